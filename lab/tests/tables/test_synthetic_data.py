"""The two-class data on the sphere and its Bayes classifier, against quadrature and sampling."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad

from kernelhead_lab.tables import synthetic_data as synthetic


def direction(cosine, mean):
    """A unit vector at that cosine from `mean`, and the rest of it in an arbitrary direction."""
    axis = mean / np.linalg.norm(mean)
    side = np.cross(axis, [0.3, -0.5, 0.8])
    return cosine * axis + np.sqrt(1 - cosine**2) * side / np.linalg.norm(side)


def log_density(u, mean, variance):
    """Log of the integral of r^2 N(r u; mean, variance I) over r > 0, by adaptive quadrature around the peak."""
    inner = u @ mean

    def exponent(r):
        return 2 * np.log(r) - (r**2 - 2 * r * inner + mean @ mean) / (2 * variance)

    peak = (inner + np.sqrt(inner**2 + 8 * variance)) / 2  # where the derivative of the exponent is zero
    width = 1 / np.sqrt(2 / peak**2 + 1 / variance)
    edges = [max(0.0, peak - 15 * width), peak, peak + 5 * width, peak + 60 * width]
    pieces = [
        quad(lambda r: np.exp(exponent(r) - exponent(peak)) if r > 0 else 0.0, *ends, epsabs=0, epsrel=1e-11)[0]
        for ends in pairwise(edges)
    ]
    return np.log(sum(pieces)) + exponent(peak) - 1.5 * np.log(2 * np.pi * variance)


# --- the draw ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_class", [1, 50, 5000])
def test_draw_has_balanced_points_of_unit_length(per_class):
    draw = synthetic.draw(3, per_class=per_class)
    assert draw.seed == 3
    assert draw.centers.shape == (2, 10, 3)
    for x, y in ((draw.x_train, draw.y_train), (draw.x_test, draw.y_test)):
        assert x.shape == (2 * per_class, 3)
        np.testing.assert_allclose((x**2).sum(1), 1, rtol=1e-14)
        assert np.bincount(y).tolist() == [per_class, per_class]
    assert not np.isclose(draw.x_train, draw.x_test).all()


def test_the_paper_draws_5000_per_class():
    assert synthetic.draw(0).x_train.shape == (10_000, 3)


def test_classes_come_in_random_order():
    y = synthetic.draw(0, per_class=500).y_train
    assert 400 < (y[1:] != y[:-1]).sum() < 600


def test_the_seed_decides_everything():
    first, again, other = (synthetic.draw(seed, per_class=20) for seed in (5, 5, 6))
    for name in ("centers", "x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert not np.isclose(first.centers, other.centers).any()


def test_centers_have_the_means_and_the_covariance_of_appendix_a():
    centers = np.stack([synthetic.draw(seed, per_class=1).centers for seed in range(2000)])
    for label, mean in enumerate([(1, 0, 0), (0, 1, 0)]):
        of_class = centers[:, label].reshape(-1, 3)
        n = len(of_class)
        np.testing.assert_allclose(of_class.mean(0), mean, atol=4 * np.sqrt(0.5 / n))
        np.testing.assert_allclose(np.cov(of_class.T), 0.5 * np.eye(3), atol=5 * 0.5 * np.sqrt(2 / n))


def test_observations_are_likeliest_under_clusters_of_variance_0_02_around_their_own_centers():
    draw = synthetic.draw(1)

    def log_likelihood(variance, centers):
        terms = [np.exp(synthetic.projected_log_density(draw.x_train, c, variance)).mean(1) for c in centers]
        return np.log(np.where(draw.y_train == 0, *terms)).mean()

    variances = 0.02 * np.array([0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2])
    right = [log_likelihood(v, draw.centers) for v in variances]
    assert np.argmax(right) == 3
    assert max(log_likelihood(v, draw.centers[::-1]) for v in variances) < min(right)


def test_every_center_is_as_likely_as_the_others():
    draw = synthetic.draw(2, per_class=20_000)
    for label in (0, 1):
        x = draw.x_train[draw.y_train == label]
        terms = np.exp(synthetic.projected_log_density(x, draw.centers[label], 0.02))
        share = (terms / terms.sum(1, keepdims=True)).mean(0)  # each center's posterior share of the points
        np.testing.assert_allclose(share, 0.1, atol=4 * np.sqrt(0.09 / len(x)))


# --- the density ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variance", [0.02, 0.5])
@pytest.mark.parametrize("length", [0.05, 0.7, 1.5, 2.75, 2.9, 6.0])
def test_projected_density_is_the_integral_along_the_ray(variance, length):
    mean = length * np.array([2, -1, 2]) / 3
    u = np.stack([direction(c, mean) for c in (-1, -0.99, -0.7, -0.3, -1e-3, 0, 0.2, 0.8, 1)])
    expected = [log_density(v, mean, variance) for v in u]
    value = synthetic.projected_log_density(u, mean[None], variance)
    assert value.shape == (9, 1)
    np.testing.assert_allclose(value[:, 0], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("z", [-19.0, -19.99, -20.0, -20.01, -22.0, -40.0, -300.0])
def test_density_far_behind_the_sphere(z):
    mean = np.array([[-z * np.sqrt(0.02), 0, 0]])
    u = np.array([[-1.0, 0, 0]])
    value = synthetic.projected_log_density(u, mean, 0.02)[0, 0]
    assert value == pytest.approx(log_density(u[0], mean[0], 0.02), rel=0, abs=1e-8)


@pytest.mark.parametrize("length", [0, 0.1, 1, 3])
@pytest.mark.parametrize("variance", [0.02, 0.5])
def test_projected_density_integrates_to_one(length, variance):
    mean = np.array([[0, 0, length]])

    def ring(height):
        u = np.array([[np.sqrt(1 - height**2), 0, height]])
        return 2 * np.pi * np.exp(synthetic.projected_log_density(u, mean, variance)[0, 0])

    total, _ = quad(ring, -1, 1, points=[0.9, 0.99], limit=200, epsabs=1e-11)
    assert total == pytest.approx(1, abs=1e-9)


def test_density_at_the_origin_is_uniform(rng):
    u = rng.standard_normal((5, 3))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(synthetic.projected_log_density(u, np.zeros((1, 3)), 0.3)), 1 / (4 * np.pi))


def test_class_densities_are_equal_mixtures_and_the_posterior_is_bayes_rule():
    draw = synthetic.draw(4, per_class=10)
    u = draw.x_test
    densities = np.stack(
        [[np.mean([np.exp(log_density(v, center, 0.02)) for center in c]) for v in u] for c in draw.centers], axis=1
    )
    np.testing.assert_allclose(np.exp(synthetic.class_log_densities(u, draw.centers)), densities, rtol=1e-7)
    posterior = synthetic.bayes_posterior(u, draw.centers)
    np.testing.assert_allclose(posterior, densities / densities.sum(1, keepdims=True), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(posterior.sum(1), 1, rtol=1e-14)


# --- the Bayes classifier ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_bayes_accuracy_is_that_of_the_posterior_on_fresh_data(seed):
    draw = synthetic.draw(seed, per_class=50_000)
    accuracy = synthetic.bayes_accuracy(draw.centers)
    correct = synthetic.bayes_posterior(draw.x_test, draw.centers).argmax(1) == draw.y_test
    assert accuracy == pytest.approx(correct.mean(), abs=4 * np.sqrt(accuracy * (1 - accuracy) / len(correct)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (5, 6))])
def test_bayes_accuracy_has_converged(seed):
    centers = synthetic.draw(seed, per_class=1).centers
    finer = synthetic.bayes_accuracy(centers, latitudes=401)
    assert synthetic.bayes_accuracy(centers) == pytest.approx(finer, abs=2e-5)


def test_bayes_accuracy_of_classes_that_cannot_and_that_can_be_told_apart(rng):
    same = rng.standard_normal((1, 10, 3))
    assert synthetic.bayes_accuracy(np.concatenate([same, same])) == pytest.approx(0.5, abs=1e-5)
    apart = np.array([[[2.0, 0, 0]], [[-2.0, 0, 0]]])
    assert synthetic.bayes_accuracy(apart) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_other_classifier_does_better(rng, seed):
    draw = synthetic.draw(seed, per_class=20_000)
    x, y, centers = draw.x_test, draw.y_test, draw.centers
    units = centers / np.linalg.norm(centers, axis=2, keepdims=True)
    accuracy = synthetic.bayes_accuracy(centers)
    guesses = [x @ w > b for w, b in zip(rng.standard_normal((20, 3)), rng.normal(0, 0.3, 20), strict=True)]
    guesses += [x[:, 1] > x[:, 0], (x @ units[1].T).max(1) > (x @ units[0].T).max(1)]
    for width in (1, 10, 100):
        scores = [np.exp(width * x @ units[label].T).sum(1) for label in (0, 1)]
        guesses.append(scores[1] > scores[0])
    scores = [np.mean(guess == y) for guess in guesses]
    assert max(scores) <= accuracy + 3 * np.sqrt(0.25 / len(y))
    assert max(scores) > accuracy - 0.2
