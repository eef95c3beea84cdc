import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, make_circles, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kernelhead
from kernelhead import KernelClassifier, KernelHeadClassifier, estimator, ridge
from kernelhead.landmark_training import Samples, Trainer, calibrate, follow_shares, random_landmarks
from kernelhead.weighting import scalings, weigh

EXAMPLE = Path(__file__).parent.parent / "examples" / "estimator_digits.py"
ADAM = {"solver": "adam", "landmarks": 32, "batch_size": 32, "random_state": 0}


@pytest.fixture(scope="module")
def moons():
    return make_moons(300, noise=0.2, random_state=0)


@parametrize_with_checks(
    [
        KernelHeadClassifier(),
        KernelHeadClassifier(solver="adam", landmarks=32),
        KernelHeadClassifier(early_stopping=True, landmarks=32, epochs=20),
        KernelHeadClassifier(class_weight="balanced", degree=2),
    ]
)
def test_scikit_learn_takes_it_for_one_of_its_own(estimator, check):
    check(estimator)


def test_it_is_a_name_of_the_package():
    assert kernelhead.KernelHeadClassifier is estimator.KernelHeadClassifier


# The mathematics, computed again in NumPy by bordered linear systems.


def power_kernel(a, b, alpha):
    t = a @ b.T
    return sum(alpha[3 + m] * t ** (m + 1) for m in range(len(alpha) - 3))


def numpy_scores(points, labels, weight, alpha, penalty, at):
    """Kernel ridge regression with a free constant: [K + penalty / w, 1; 1, 0] [c; b] = [Y; 0]."""
    n = len(points)
    system = np.zeros((n + 1, n + 1))
    system[:n, :n] = power_kernel(points, points, alpha) + np.diag(penalty / weight)
    system[:n, n] = system[n, :n] = 1
    solution = np.linalg.solve(system, np.vstack([labels, np.zeros(labels.shape[1])]))
    return power_kernel(at, points, alpha) @ solution[:n] + solution[n]


def on_the_sphere(x, constant):
    points = np.hstack([x, np.full((len(x), 1), constant)])
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def small_problem(rng, n=30):
    points = rng.normal(size=(n, 4))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    target = rng.integers(0, 3, n)
    return points, target, rng.uniform(0.5, 2, n)


def left_out_scores(points, target, weight, alpha, penalty):
    rows = []
    for i in range(len(points)):
        rest = np.arange(len(points)) != i
        labels = np.eye(3)[target[rest]]
        rows.append(numpy_scores(points[rest], labels, weight[rest], alpha, penalty, points[i : i + 1])[0])
    return np.array(rows)


def test_leave_one_out_is_what_fitting_without_each_sample_gives(rng, monkeypatch):
    monkeypatch.setattr(ridge, "ROWS", 7)
    points, target, weight = small_problem(rng)
    alpha = np.array([0, 0, 0, 0.5, 0.3, 0.2])
    kernel = ridge.LearnedKernel(torch.from_numpy(alpha), 0.2, 1.0, 1.0, 0.0)
    tensors = [torch.from_numpy(each) for each in (points, target, weight)]
    found = ridge.solve(*tensors, 3, kernel, torch.tensor([4, 0, 11]))
    np.testing.assert_allclose(found.left_out, left_out_scores(points, target, weight, alpha, 0.2)[[4, 0, 11]])
    at = rng.normal(size=(5, 4))
    values = power_kernel(points, points, alpha)
    mean = np.average(values, axis=0, weights=weight)
    np.testing.assert_allclose(found.mean, mean, atol=1e-12)
    np.testing.assert_allclose(found.variance, np.average((values - mean) ** 2, axis=0, weights=weight))
    scores = power_kernel(at, points, alpha) @ found.coefficients.numpy() + found.constant.numpy()
    np.testing.assert_allclose(scores, numpy_scores(points, np.eye(3)[target], weight, alpha, 0.2, at), rtol=1e-9)


def mean_log_loss(scores, target, weight):
    shifted = scores - scores.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(target)), target]
    return (losses * weight).sum() / weight.sum()


def test_the_learned_kernel_has_the_loss_it_says_and_a_better_one_than_its_neighbours(rng):
    x, weight = rng.normal(size=(40, 3)), rng.uniform(0.5, 2, 40)
    target = (x[:, 0] * x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5)
    tensors = [torch.from_numpy(each) for each in (x, target, weight)]
    found, _ = ridge.learn_kernel([tensors[0]], *tensors[1:], 3, degree=3)
    alpha = found.alpha.numpy()
    assert (alpha >= 0).all()
    assert alpha.sum() == pytest.approx(1)
    np.testing.assert_array_equal(alpha[:3], 0)
    length = np.sqrt(np.average(np.square(x).sum(1), weights=weight))

    def loss(alpha, penalty, temperature, constant):
        scores = left_out_scores(on_the_sphere(x, constant), target, weight, alpha, penalty)
        return mean_log_loss(scores / temperature, target, weight)

    def posterior(alpha, *rest):
        """With the prior on how far each has moved; the logarithms of alpha are known up to a constant."""
        moved = [*(np.log(alpha[3:]) - np.log(alpha[3:]).mean()), *np.log(np.divide(rest, [0.3, 0.2, length]))]
        return loss(alpha, *rest) + np.square(moved).sum() / (2 * len(x))

    rest = np.array([found.ridge, found.temperature, found.constant])
    assert found.loss == pytest.approx(loss(alpha, *rest))
    best = posterior(alpha, *rest)
    for factor in (0.8, 1.25):
        for m in range(3):
            assert best < posterior(alpha, *np.where(np.arange(3) == m, factor, 1) * rest)
            other = alpha.copy()
            other[3 + m] *= factor
            assert best < posterior(other / other.sum(), *rest)


def test_the_derivative_of_leaving_out(rng):
    half = torch.from_numpy(rng.normal(size=(6, 6))).requires_grad_()
    labels = torch.eye(2, dtype=torch.float64)[[0, 1, 1, 0, 1, 0]]

    def residuals(half):
        return ridge._Residuals.apply(half @ half.T + torch.eye(6, dtype=torch.float64), labels)

    assert torch.autograd.gradcheck(residuals, half)


def test_the_constant_does_not_hurry_into_a_poorer_optimum(rng):
    """Classes by length alone: a kernel of a large constant and mixed powers is a local optimum, and not a good one."""
    x = rng.normal(size=(300, 8))
    target = np.digitize(np.linalg.norm(x, axis=1), [2.5, 3.1])
    features, *rest = (torch.from_numpy(each) for each in (x, target, np.ones(300)))
    found, _ = ridge.learn_kernel([features], *rest, 3, degree=7)
    assert found.loss < 0.58


def test_of_several_scalings_the_one_goes_on_that_is_best(rng):
    x = rng.normal(size=(60, 6))
    target = torch.from_numpy((x[:, 0] > 0).astype(int))
    scaled = [torch.from_numpy(x * each) for each in ([0.01] + [1.0] * 5, [1.0] + [0.1] * 5, [1.0] * 6)]
    rest = (target, torch.ones(60, dtype=torch.float64), 2, 3)
    found, index = ridge.learn_kernel(scaled, *rest)
    alone = [ridge.learn_kernel([each], *rest)[0] for each in scaled]
    assert index == int(np.argmin([each.loss for each in alone])) == 1
    torch.testing.assert_close(found.alpha, alone[1].alpha)
    assert found.loss == alone[1].loss


def test_the_kernel_follows_the_problem(rng):
    x, at = rng.normal(size=(500, 6)), rng.normal(size=(200, 6))
    design = np.hstack([at, np.ones((200, 1))])

    def linear_share(target):
        """Of the decision's variance, what a linear function of the features explains; and the kernel."""
        fitted = KernelHeadClassifier(degree=4).fit(x, target)
        decision = fitted.decision_function(at)
        rest = decision - design @ np.linalg.lstsq(design, decision)[0]
        return 1 - rest.var() / decision.var(), fitted.alpha_[3:]

    share, alpha = linear_share(x[:, 0] * x[:, 1] > 0)
    assert share < 0.1
    assert alpha[1] > 0.6  # mostly quadratic
    assert linear_share(x[:, 0] + x[:, 1] > 0)[0] > 0.95


def test_the_exact_head_is_kernel_ridge_regression_over_its_temperature(rng):
    x, y = rng.normal(size=(40, 3)), rng.integers(0, 3, 40)
    fitted = KernelHeadClassifier().fit(x, y)

    def chart(x):
        return on_the_sphere((x - fitted.mean_) / fitted.scale_, fitted.constant_)

    at = rng.normal(size=(7, 3))
    scores = numpy_scores(chart(x), np.eye(3)[y], np.ones(40), fitted.alpha_, fitted.ridge_, chart(at))
    np.testing.assert_allclose(fitted.decision_function(at), scores / fitted.temperature_, rtol=1e-6, atol=1e-8)


def test_the_best_temperature_gives_back_the_one_that_labels_were_drawn_at(rng):
    scores = rng.normal(size=(20_000, 4))
    probabilities = np.exp(scores / 0.5)
    probabilities /= probabilities.sum(1, keepdims=True)
    target = (probabilities.cumsum(1) < rng.random((20_000, 1))).sum(1)
    tensors = [torch.from_numpy(each) for each in (scores, target, np.ones(20_000))]
    assert ridge.best_temperature(*tensors, start=0.1) == pytest.approx(0.5, rel=0.05)


def test_the_temperature_of_faultless_scores_is_not_the_smallest():
    scores, target = torch.eye(2, dtype=torch.float64).repeat(10, 1), torch.arange(20) % 2
    found = ridge.best_temperature(scores, target, torch.full((20,), 3.0), start=1.0)
    log_t = np.linspace(-2.5, 2.5, 100_001)
    by_hand = np.exp(log_t[np.argmin(np.log1p(np.exp(-np.exp(-log_t))) + log_t**2 / 40)])
    assert found == pytest.approx(by_hand, rel=0.03)
    assert by_hand > 0.1


# How well it does.


def test_digits_are_told_apart():
    x, y = load_digits(return_X_y=True)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    assert cross_val_score(KernelHeadClassifier(random_state=0), x, y, cv=folds).mean() >= 0.983


def test_features_are_scaled_apart_or_together_as_the_samples_would_have_it(rng):
    """Deviations that say what matters are kept; where they are units of measurement, they are not."""
    signal = rng.normal(size=(300, 3)) * 3
    x, y = np.hstack([signal, rng.normal(size=(300, 20)) * 0.3]), (signal > 0).sum(1)
    together = KernelHeadClassifier(random_state=0).fit(x, y)
    np.testing.assert_allclose(together.scale_, np.sqrt(x.var(0).mean()))
    units = np.r_[[1e-3] * 3, [1.0] * 20]
    apart = KernelHeadClassifier(random_state=0).fit(x * units, y)
    np.testing.assert_allclose(apart.scale_, x.std(0) * units)


def test_length_alone_tells_classes_apart():
    x, y = make_circles(400, noise=0.1, factor=0.4, random_state=0)
    assert KernelHeadClassifier().fit(x[:300], y[:300]).score(x[300:], y[300:]) > 0.97


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 60}])
def test_features_of_any_scale_and_place(moons, options):
    x, y = moons
    moved = x * [1e-6, 1e6] + [1e3, -1e8]
    fitted = KernelHeadClassifier(**options).fit(x[:200], y[:200])
    moved_too = KernelHeadClassifier(**options).fit(moved[:200], y[:200])
    assert fitted.score(x[200:], y[200:]) > 0.9
    assert np.mean(fitted.predict(x[200:]) == moved_too.predict(moved[200:])) > 0.95


@pytest.mark.parametrize("exponent", [1000, 600, -600, -1000])
def test_extreme_features_are_scaled_exactly(exponent):
    """By a power of two nothing is rounded, so that even the kernel is the same."""
    x, y = load_iris(return_X_y=True)
    x, factor = np.hstack([x, np.full((150, 1), 3.0), np.zeros((150, 1))]), 2.0**exponent
    plain = KernelHeadClassifier().fit(x[::2], y[::2])
    extreme = KernelHeadClassifier().fit(x[::2] * factor, y[::2])
    np.testing.assert_array_equal(extreme.scale_ / factor, plain.scale_)
    np.testing.assert_array_equal(extreme.predict_proba(x[1::2] * factor), plain.predict_proba(x[1::2]))
    assert plain.score(x[1::2], y[1::2]) > 0.95


def test_an_extreme_feature_beside_usual_ones_hides_none():
    x, y = load_iris(return_X_y=True)
    units = np.array([1e300, 1.0, 1.0, 1e-300])
    mean, scales = scalings(x * units, np.ones(150))
    np.testing.assert_allclose(mean / units, x.mean(0))
    np.testing.assert_allclose(scales[0] / units, x.std(0))
    assert KernelHeadClassifier().fit(x[::2] * units, y[::2]).score(x[1::2] * units, y[1::2]) > 0.94
    constant = np.hstack([x, np.full((150, 1), 1e300)])
    assert KernelHeadClassifier().fit(constant[::2], y[::2]).score(constant[1::2], y[1::2]) > 0.94


def test_probabilities_are_calibrated_by_the_exact_solver():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 5))
    y = rng.random(2000) < 1 / (1 + np.exp(-2 * x[:, 0]))
    fitted = KernelHeadClassifier(random_state=0).fit(x[:1000], y[:1000])
    truth = 1 / (1 + np.exp(-2 * x[1000:, 0]))
    assert log_loss(y[1000:], fitted.predict_proba(x[1000:])) < log_loss(y[1000:], truth) + 0.02


def test_descent_learns_and_calibrates(monkeypatch):
    monkeypatch.setattr(estimator, "CALIBRATED", 5)
    x, y = make_moons(1500, noise=0.3, random_state=0)
    options = {**ADAM, "epochs": 40}
    fitted = KernelHeadClassifier(**options).fit(x[:1000], y[:1000])
    assert fitted.solver_ == "adam"
    assert fitted.head_.weight.shape == (32, 3)
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0]
    assert fitted.score(x[1000:], y[1000:]) > 0.88
    exact = KernelHeadClassifier(random_state=0).fit(x[:1000], y[:1000])
    worst = log_loss(y[1000:], exact.predict_proba(x[1000:])) + 0.05
    assert log_loss(y[1000:], fitted.predict_proba(x[1000:])) < worst


def test_calibration_scales_the_logits_alone(rng):
    points = torch.from_numpy(rng.normal(size=(400, 3)))
    samples = Samples(points, (points[:, 0] > 0).long(), torch.ones(400, dtype=torch.float64))
    kernel = ridge.LearnedKernel(torch.tensor([0, 0, 0, 1.0], dtype=torch.float64), 0.3, 0.2, 1.0, 0.0)
    head = random_landmarks(samples, 2, 16, kernel, 0.1, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        head.mixing.normal_(generator=torch.Generator().manual_seed(0))
        before = head(points)
        better = calibrate(head, samples, 0.2)
        np.testing.assert_allclose(head(points) * better, before * 0.2, rtol=1e-9)


def test_auto_solves_exactly_up_to_a_size(monkeypatch, moons):
    assert KernelHeadClassifier().fit(*moons).solver_ == "exact"
    assert KernelHeadClassifier(early_stopping=True, **{**ADAM, "solver": "auto"}).fit(*moons).solver_ == "adam"
    monkeypatch.setattr(estimator, "EXACT_SAMPLES", 299)
    assert KernelHeadClassifier(**{**ADAM, "solver": "auto"}).fit(*moons).solver_ == "adam"


def test_a_part_of_the_samples_is_enough_for_the_kernel(monkeypatch, moons):
    monkeypatch.setattr(estimator, "LEFT_OUT", 100)
    fitted = KernelHeadClassifier(random_state=0).fit(*moons)
    assert fitted.head_.weight.shape == (300, 3)
    assert fitted.score(*moons) > 0.95


# Labels and weights.


@pytest.mark.parametrize(
    "names", [["low", "mid", "top"], [-7, 0, 3], [1.0, 2.0, 4.0], np.array(["a", "b", "c"], dtype=object)]
)
@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 60}])
def test_labels_of_any_kind(names, options):
    x, y = load_iris(return_X_y=True)
    named = np.asarray(names)[y]
    fitted = KernelHeadClassifier(**options).fit(x, named)
    np.testing.assert_array_equal(fitted.classes_, np.unique(named))
    assert fitted.predict(x).dtype == named.dtype
    assert fitted.score(x, named) > 0.9
    assert fitted.predict_proba(x).shape == (150, 3)
    np.testing.assert_allclose(fitted.predict_proba(x).sum(1), 1)


def test_two_classes_of_booleans_have_one_decision(moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y == 1)
    decision = fitted.decision_function(x)
    assert decision.shape == (300,)
    np.testing.assert_array_equal(fitted.predict(x), decision > 0)
    np.testing.assert_allclose(fitted.predict_proba(x)[:, 1], 1 / (1 + np.exp(-decision)), rtol=1e-6)


def test_repeated_samples_are_weights(moons, rng):
    x, y = moons[0][:100], moons[1][:100]
    times = rng.integers(0, 3, 100)
    weighted = KernelHeadClassifier().fit(x, y, sample_weight=times)
    repeated = KernelHeadClassifier().fit(np.repeat(x, times, axis=0), np.repeat(y, times))
    np.testing.assert_allclose(weighted.predict_proba(x), repeated.predict_proba(x), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 60}])
def test_weights_of_classes(rng, options):
    x = np.vstack([rng.normal(size=(200, 2)), rng.normal(size=(20, 2)) + 1.5])
    y = np.repeat([0, 1], [200, 20])
    plain = KernelHeadClassifier(**options).fit(x, y)
    balanced = KernelHeadClassifier(class_weight="balanced", **options).fit(x, y)
    named = KernelHeadClassifier(class_weight={0: 220 / 400, 1: 220 / 40}, **options).fit(x, y)
    assert (balanced.predict(x) == 1).sum() > 1.5 * (plain.predict(x) == 1).sum()
    np.testing.assert_allclose(balanced.predict_proba(x), named.predict_proba(x), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, ADAM])
def test_a_common_factor_of_weights_does_nothing(moons, rng, options):
    x, y = moons
    weight = rng.uniform(0.5, 2, 300)
    plain = KernelHeadClassifier(**options).fit(x, y, sample_weight=weight)
    small = KernelHeadClassifier(**options).fit(x, y, sample_weight=weight * 2.0**-30)
    np.testing.assert_allclose(small.predict_proba(x), plain.predict_proba(x), rtol=1e-6)


def test_equal_samples_are_merged(rng):
    x = rng.normal(size=(4, 2)).astype(np.float32)
    x[0, 0] = 0.0
    twin = x.copy()
    twin[0, 0] = -0.0
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 0])
    features, target, weight = weigh(np.vstack([x, twin]), labels, np.arange(8.0), None, np.arange(2))
    assert weight.mean() == pytest.approx(1)
    totals = (weight * sum(range(8)) / weight.sum()).round(9)
    merged = {(*row, label): total for *row, label, total in zip(*features.T, target, totals, strict=True)}
    assert merged == {(*x[0], 0): 4, (*x[1], 1): 6, (*x[2], 0): 8, (*x[3], 1): 3, (*x[3], 0): 7}


def test_descent_starts_from_how_frequent_classes_are_and_what_kernel_values_are(rng):
    points = torch.from_numpy(rng.normal(size=(50, 3)))
    weight = torch.from_numpy(rng.uniform(1, 2, 50))
    samples = Samples(points, torch.arange(50) % 5 // 2, weight)  # classes 0, 0, 1, 1, 2
    kernel = ridge.LearnedKernel(torch.tensor([0, 0, 0, 0.4, 0.6], dtype=torch.float64), 0.3, 0.2, 1.0, 0.0)
    head = random_landmarks(samples, 3, 8, kernel, 0.1, torch.Generator().manual_seed(0)).eval()
    shares = np.bincount(samples.target, weight) / weight.sum().item()
    np.testing.assert_allclose(head(points).detach() * 0.2, np.tile(shares, (50, 1)))
    unit = points.numpy() / np.linalg.norm(points, axis=1, keepdims=True)
    values = 2 * power_kernel(unit, head.weight.detach().numpy(), kernel.alpha.numpy())
    np.testing.assert_allclose(head.norm.running_mean, values.mean(0), atol=1e-9)
    np.testing.assert_allclose(head.norm.running_var, values.var(0), atol=1e-9)


def test_weights_move_the_descent(moons):
    x, y = moons
    flipped = np.concatenate([y, 1 - y])
    weight = np.repeat([1.0, 0.01], len(y))
    fitted = KernelHeadClassifier(**ADAM, epochs=40).fit(np.vstack([x, x]), flipped, sample_weight=weight)
    assert fitted.score(x, y) > 0.9


# As scikit-learn uses it.


def test_in_a_pipeline_a_search_and_processes(moons):
    x, y = moons
    pipeline = make_pipeline(MinMaxScaler(), KernelHeadClassifier(random_state=0))
    search = GridSearchCV(pipeline, {"kernelheadclassifier__degree": [1, 5]}, cv=3, n_jobs=2).fit(x, y)
    assert search.best_params_ == {"kernelheadclassifier__degree": 5}
    assert search.best_score_ > 0.9
    assert cross_val_score(pipeline, x, y, cv=3, n_jobs=2).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 5}, {**ADAM, "epochs": 5, "early_stopping": True}])
def test_a_random_state_makes_it_the_same_and_pickles_keep_it(moons, options):
    x, y = moons
    model = KernelHeadClassifier(**{"random_state": 0, **options})
    state = torch.get_rng_state()
    first, second = clone(model).fit(x, y), clone(model).fit(x, y)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are touched
    np.testing.assert_array_equal(first.predict_proba(x), second.predict_proba(x))
    again = pickle.loads(pickle.dumps(first))
    np.testing.assert_array_equal(again.predict_proba(x), first.predict_proba(x))
    if options:
        other = clone(model).set_params(random_state=1).fit(x, y)
        assert not np.array_equal(other.predict_proba(x), first.predict_proba(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_solves_the_same_exactly_and_its_pickle_needs_none(moons):
    x, y = moons
    here = KernelHeadClassifier(random_state=0, device="cpu").fit(x, y)
    there = KernelHeadClassifier(random_state=0).fit(x, y)
    assert there.head_.weight.is_cuda
    np.testing.assert_allclose(there.predict_proba(x), here.predict_proba(x), atol=1e-4)
    again = pickle.loads(pickle.dumps(there)).set_params(device="cpu")
    assert not again.head_.weight.is_cuda
    np.testing.assert_allclose(again.predict_proba(x), there.predict_proba(x), atol=1e-9)
    np.testing.assert_array_equal(there.predict(x), again.predict(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_descends_as_well_and_goes_on_elsewhere(moons):
    x, y = moons
    scores = {}
    for device in ("cpu", "cuda"):
        model = KernelHeadClassifier(**ADAM, epochs=60, device=device).fit(x[:200], y[:200])
        scores[device] = model.partial_fit(x[:200], y[:200]).score(x[200:], y[200:])
        again = model.set_params(device="cpu").partial_fit(x[:200], y[:200])
        assert again.score(x[200:], y[200:]) > 0.9
    assert scores["cuda"] == pytest.approx(scores["cpu"], abs=0.05)


def test_early_stopping_keeps_the_best_and_says_how_it_goes(moons, capsys):
    x, y = moons
    noisy = np.where(np.random.default_rng(0).random(300) < 0.3, 1 - y, y)
    model = KernelHeadClassifier(
        **{**ADAM, "learning_rate": 0.3}, epochs=50, early_stopping=True, patience=2, verbose=True
    )
    fitted = model.fit(x, noisy)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("leave-one-out log-loss")
    losses = [float(line.split()[-1]) for line in lines[1:]]
    assert len(losses) == len(fitted.loss_curve_) < 50
    assert len(losses) - 1 - int(np.argmin(losses)) == 2

    x, noisy, _ = weigh(x, noisy, np.ones(300), None, fitted.classes_)  # for the order alone: none is repeated
    held_out = np.random.RandomState(0)
    held_out.permutation(300)  # the kernel's samples came first
    index = held_out.permutation(300)[:30]
    assert log_loss(noisy[index], fitted.predict_proba(x[index])) == pytest.approx(min(losses), abs=1e-3)


def test_silent_unless_asked(moons, capsys):
    KernelHeadClassifier().fit(*moons)
    assert capsys.readouterr().out == ""


def test_it_learns_by_and_by(moons):
    x, y = moons
    model = KernelHeadClassifier(**ADAM)
    for _ in range(40):
        for start in range(0, 200, 50):
            model.partial_fit(x[start : start + 50], y[start : start + 50], classes=[0, 1])
    assert model.score(x[200:], y[200:]) > 0.9
    assert model.head_.weight.shape == (32, 3)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))
    assert again.partial_fit(x[:50], y[:50]).score(x[200:], y[200:]) > 0.9


@pytest.mark.parametrize(("load", "others"), [(load_breast_cancer, 0), (load_breast_cancer, 5), (load_iris, 0)])
def test_a_first_batch_of_mostly_one_class_is_recovered_from(load, others):
    x, y = load(return_X_y=True)
    first = np.r_[np.flatnonzero(y == 0)[:200], np.flatnonzero(y == 1)[:others]]
    model = KernelHeadClassifier(landmarks=64, random_state=0)
    model.partial_fit(x[first], y[first], classes=np.unique(y))
    assert (model.predict(x[first]) == 0).mean() > 0.95
    for _ in range(30):
        model.partial_fit(x, y)
    assert model.score(x, y) > 0.94


def test_what_the_first_batch_fixes_waits_for_a_second_class(moons, monkeypatch):
    monkeypatch.setattr(estimator, "LEFT_OUT", 60)
    x, y = moons
    none, one = x[y == 0], x[y == 1]
    model = KernelHeadClassifier(**ADAM).partial_fit(none[:50], [0] * 50, classes=[0, 1])
    model.partial_fit(none[50:100], [0] * 50)
    model = pickle.loads(pickle.dumps(model)).partial_fit(one[:30], [1] * 30)
    both = np.vstack([none[40:100], one[:30]])
    np.testing.assert_allclose(model.mean_, both.mean(0))
    settled = model.mean_
    np.testing.assert_array_equal(model.partial_fit(x, y).mean_, settled)


def test_the_bias_follows_the_shares_of_classes(rng):
    points = torch.from_numpy(rng.normal(size=(40, 3)))
    samples = Samples(points, torch.zeros(40, dtype=torch.int64), torch.ones(40, dtype=torch.float64))
    kernel = ridge.LearnedKernel(torch.tensor([0, 0, 0, 1.0], dtype=torch.float64), 0.3, 0.2, 1.0, 0.0)
    head = random_landmarks(samples, 3, 8, kernel, 0.1, torch.Generator().manual_seed(0)).eval()
    follow_shares(head, torch.tensor([40.0, 0, 0]), torch.tensor([50.0, 30, 20]), 0.2)
    np.testing.assert_allclose(head(points).detach() * 0.2, np.tile([0.5, 0.3, 0.2], (40, 1)), atol=1e-6)


def test_a_first_batch_smaller_than_the_landmarks(moons):
    x, y = moons
    model = KernelHeadClassifier(**ADAM).partial_fit(x[:10], y[:10], classes=[0, 1])
    weight = model.head_.weight
    assert weight.shape == (32, 3)
    assert len(torch.unique(weight, dim=0)) == 32
    before = model.predict_proba(x)
    model.partial_fit(x[:1], y[:1])  # one sample has no deviation to be standardised by
    assert np.isfinite(model.predict_proba(x)).all()
    assert not np.array_equal(model.predict_proba(x), before)


def test_a_batch_of_one_sample(moons):
    x, y = moons[0][:7], moons[1][:7]
    fitted = KernelHeadClassifier(**{**ADAM, "batch_size": 2}, epochs=2).fit(x, y)  # batches of 3, 3 and 1
    assert np.isfinite(fitted.predict_proba(x)).all()


@pytest.mark.filterwarnings("ignore:solver 'exact'")  # an exact fit has no batches, but what goes on from it has
@pytest.mark.parametrize("options", [{"random_state": 0, "batch_size": 10}, {**ADAM, "epochs": 40}])
def test_partial_fit_goes_on_from_a_fit_and_a_fit_starts_anew(moons, options):
    x, y = moons
    model = KernelHeadClassifier(**options).fit(x[:100], y[:100])
    fresh = model.predict_proba(x)
    model.partial_fit(x[100:], y[100:])
    after = model.predict_proba(x)
    assert 0 < np.abs(after - fresh).mean() < 0.1
    for _ in range(50):  # the other way round
        model.partial_fit(x[:100], 1 - y[:100])
    assert model.loss_curve_[-1] < 0.8 * model.loss_curve_[-50]
    np.testing.assert_array_equal(model.fit(x[:100], y[:100]).predict_proba(x), fresh)


def test_a_step_of_descent_leaves_the_constant_coordinate_alone(rng):
    points = torch.from_numpy(rng.normal(size=(8, 3)).astype(np.float32))
    samples = Samples(points, torch.tensor([0, 1] * 4), torch.ones(8))
    kernel = ridge.LearnedKernel(torch.tensor([0, 0, 0, 1.0]), 0.3, 0.2, 1.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    head = random_landmarks(samples, 2, 4, kernel, 0.1, generator)
    seen = []
    head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    trainer = Trainer(head, 0.2, learning_rate=0.01, noise=0.5, dropout=0.0, generator=generator)
    trainer.epoch(samples, 8, lambda share: 1.0)
    ordered = {tuple(row) for row in points[:, 2:].tolist()}
    assert {tuple(row) for row in seen[0][:, 2:].tolist()} == ordered
    assert not set(points[:, 0].tolist()) & set(seen[0][:, 0].tolist())


@pytest.mark.parametrize("options", [{}, {**ADAM, "epochs": 5}])
def test_terms_that_the_kernel_lacks_are_exactly_zero(moons, options):
    fitted = KernelHeadClassifier(**options).fit(*moons)
    np.testing.assert_array_equal(fitted.alpha_[:3], 0)
    assert (fitted.alpha_[3:] > 0).all()
    assert fitted.alpha_.sum() == pytest.approx(1)
    assert [term.value for term in fitted.head_.describe().terms[:3]] == [0, 0, 0]
    assert "jumps" not in str(fitted.head_.describe())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_network_are_read_as_arrays(moons, dtype):
    features = torch.from_numpy(moons[0]).to(dtype).requires_grad_()
    labels, weight = torch.from_numpy(moons[1]), torch.linspace(1, 2, 300).to(dtype)
    rounded = features.detach().float().numpy()
    given = KernelHeadClassifier().fit(features, labels, weight)
    same = KernelHeadClassifier().fit(rounded, moons[1], weight.float().numpy())
    np.testing.assert_allclose(given.predict_proba(features), same.predict_proba(rounded), rtol=1e-9)


def test_the_head_is_a_layer_of_its_own(moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y)
    assert isinstance(fitted.head_, KernelClassifier)
    points = np.hstack([(x - fitted.mean_) / fitted.scale_, np.full((300, 1), fitted.constant_)])
    logits = fitted.head_(torch.from_numpy(points)).detach().numpy()
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], fitted.decision_function(x))


def test_predictions_in_blocks(monkeypatch, moons):
    x, y = moons
    fitted = KernelHeadClassifier().fit(x, y)
    whole = fitted.decision_function(x)
    monkeypatch.setattr(estimator, "BLOCK", 7 * 300)
    np.testing.assert_allclose(fitted.decision_function(x), whole, rtol=1e-9)


# What is refused.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"solver": "magic"}, "unknown solver 'magic'; choose one of auto, exact, adam"),
        ({"degree": 0}, "degree must be a positive integer, got 0"),
        ({"landmarks": 2.5}, "landmarks must be a positive integer, got 2.5"),
        ({"epochs": True}, "epochs must be a positive integer, got True"),
        ({"learning_rate": -1}, "learning_rate must be positive and finite, got -1"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1, got 1.0"),
        ({"device": "gpu"}, "unknown device 'gpu'; choose auto, cpu or cuda"),
        ({"device": "meta"}, "device 'meta' is not here, or has no float64; choose auto, cpu or cuda"),
    ],
)
def test_parameters_out_of_range(moons, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        KernelHeadClassifier(**options).fit(*moons)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"landmarks": 8},
            "solver 'exact', which 'auto' is up to LIMIT samples, ignores landmarks: it needs solver='adam'",
        ),
        (
            {"solver": "exact", "epochs": 9, "batch_size": 8, "learning_rate": 0.1},
            "solver 'exact' ignores epochs, batch_size, learning_rate: they need solver='adam'",
        ),
        (
            {"solver": "exact", "early_stopping": True, "patience": 9},
            "solver 'exact' ignores early_stopping, patience: they need solver='adam'",
        ),
        (
            {"solver": "exact", "validation_fraction": 0.2},
            "solver 'exact' ignores validation_fraction: it needs solver='adam' and early_stopping=True",
        ),
        ({**ADAM, "patience": 9}, "solver 'adam' ignores patience: it needs early_stopping=True"),
    ],
)
def test_options_given_in_vain_are_named(moons, options, sentence):
    whole = re.escape(sentence.replace("LIMIT", f"{estimator.EXACT_SAMPLES:,}")) + "$"
    with pytest.warns(UserWarning, match=whole) as caught:
        KernelHeadClassifier(**options).fit(*moons)
    assert [each.filename for each in caught] == [__file__]


def test_defaults_and_options_in_use_give_no_warning(moons, recwarn):
    KernelHeadClassifier(landmarks=np.int64(1024), epochs=6).fit(*moons)
    KernelHeadClassifier(**ADAM, epochs=2, learning_rate=0.1).fit(*moons)
    KernelHeadClassifier(**ADAM, epochs=2, early_stopping=True, patience=1, validation_fraction=0.2).fit(*moons)
    assert not recwarn.list


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_sentence_says_so(moons):
    fitted = KernelHeadClassifier().fit(*moons).set_params(device="cuda")  # as a pickle from elsewhere
    with pytest.raises(ValueError, match="there is no CUDA device here"):
        fitted.predict(moons[0])
    assert fitted.set_params(device="auto").score(*moons) > 0.9


@pytest.mark.parametrize("options", [{}, ADAM])
def test_two_samples_are_enough(options):
    np.testing.assert_array_equal(
        KernelHeadClassifier(**options).fit([[0.0], [1.0]], ["a", "b"]).predict([[0], [1]]), ["a", "b"]
    )


def test_one_class_is_refused_and_constant_features_are_not(moons):
    x, y = moons
    with pytest.raises(ValueError, match="two classes or more, got 1 class"):
        KernelHeadClassifier().fit(x, np.zeros(300))
    with pytest.raises(ValueError, match="two classes or more"):
        KernelHeadClassifier().fit(x, y, sample_weight=y)
    padded = np.hstack([x, np.full((300, 1), 1e9), np.zeros((300, 1))])
    assert KernelHeadClassifier().fit(padded, y).score(padded, y) > 0.95
    nothing = KernelHeadClassifier().fit(np.ones((10, 2)), [0] * 7 + [1] * 3)
    np.testing.assert_array_equal(nothing.predict(np.ones((2, 2))), 0)


def test_partial_fit_refuses(moons):
    x, y = moons
    with pytest.raises(ValueError, match="needs classes"):
        KernelHeadClassifier().partial_fit(x, y)
    model = KernelHeadClassifier(**ADAM).partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match="is none of the classes"):
        model.partial_fit(x, y + 1)
    with pytest.raises(ValueError, match="in the first call"):
        model.partial_fit(x, y, classes=[0, 1, 2])
    with pytest.raises(NotFittedError):
        KernelHeadClassifier().predict(x)


def test_without_scikit_learn_a_sentence_says_what_brings_it():
    program = "import sys; sys.modules['sklearn'] = None\nfrom kernelhead import KernelHeadClassifier"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'kernelhead[sklearn]'" in done.stderr


def test_the_example_runs(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "KernelHeadClassifier: 98.94 %"
    assert lines[-1].startswith("degree 7: ")
