"""Leave-one-out, conjugate gradients, descent and weights, against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.sparse import csr_matrix
from scipy.special import logsumexp, softmax

from kernelhead import KernelHeadClassifier
from kernelhead.metrics import best_temperature
from kernelhead.sklearn import basis, descent, search, solver
from kernelhead.sklearn.basis import CONSTANT, LandmarkSystem, RowSystem
from kernelhead.sklearn.descent import Trainer, random_landmarks
from kernelhead.sklearn.samples import Points, Samples, Scaling, scalings, weigh
from kernelhead.sklearn.search import LearnedKernel, learn_kernel
from kernelhead.sklearn.solver import Fit


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


def left_out_scores(points, target, weight, alpha, penalty):
    rows = []
    for i in range(len(points)):
        rest = np.arange(len(points)) != i
        labels = np.eye(3)[target[rest]]
        rows.append(numpy_scores(points[rest], labels, weight[rest], alpha, penalty, points[i : i + 1])[0])
    return np.array(rows)


def on_the_sphere(x, constant):
    points = np.hstack([x, np.full((len(x), 1), constant)])
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def samples_of(points, target, weight=None):
    arrays = (points, np.asarray(target), np.ones(len(points)) if weight is None else weight)
    return Samples(*(torch.as_tensor(each) for each in arrays))


def kernel_of(*powers):
    alpha = torch.tensor([0, 0, 0, *powers], dtype=torch.float64)
    return LearnedKernel(alpha, ridge=0.3, temperature=0.2, constant=1.0, lengths=torch.ones(1), loss=0.0)


def landmarks_of(samples, classes, count, kernel):
    return random_landmarks(samples, classes, count, kernel, torch.Generator().manual_seed(0)).eval()


# Leave-one-out.


def test_the_learned_kernel_has_the_loss_it_says_and_a_better_one_than_its_neighbours(rng):
    x, weight = rng.normal(size=(40, 3)), rng.uniform(0.5, 2, 40)
    target = (x[:, 0] * x[:, 1] > 0).astype(int) + (x[:, 2] > 0.5)
    tensors = [torch.from_numpy(each) for each in (x, target, weight)]
    found, _ = learn_kernel([tensors[0]], *tensors[1:], 3, degree=3)
    alpha = found.alpha.numpy()
    assert (alpha >= 0).all()
    assert alpha.sum() == pytest.approx(1)
    np.testing.assert_array_equal(alpha[:3], 0)
    length = np.sqrt(np.average(np.square(x).sum(1), weights=weight))
    lengths = found.lengths.numpy()

    def loss(alpha, penalty, temperature, constant, *lengths):
        scores = left_out_scores(on_the_sphere(x * lengths, constant), target, weight, alpha, penalty) / temperature
        shifted = scores - scores.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(40), target]
        return (losses * weight).sum() / weight.sum()

    def posterior(alpha, *rest):
        """With the prior on how far each has moved; the logarithms of alpha are known up to a constant."""
        moved = [*(np.log(alpha[3:]) - np.log(alpha[3:]).mean()), *np.log(np.divide(rest[:3], [0.3, 0.2, length]))]
        penalty = np.square(moved).sum() + np.square(np.log(rest[3:]) / 0.3).sum()
        return loss(alpha, *rest) + penalty / (2 * len(x))

    rest = np.array([found.ridge, found.temperature, found.constant, *lengths])
    assert found.loss == pytest.approx(loss(alpha, *rest))
    best = posterior(alpha, *rest)
    for factor in (0.8, 1.25):
        for m in range(6):
            assert best < posterior(alpha, *np.where(np.arange(6) == m, factor, 1) * rest)
        for m in range(3):
            other = alpha.copy()
            other[3 + m] *= factor
            assert best < posterior(other / other.sum(), *rest)


def test_the_derivative_of_leaving_out(rng):
    half = torch.from_numpy(rng.normal(size=(6, 6))).requires_grad_()
    labels = torch.eye(2, dtype=torch.float64)[[0, 1, 1, 0, 1, 0]]

    def residuals(half):
        return search._Residuals.apply(half @ half.T + torch.eye(6, dtype=torch.float64), labels)

    assert torch.autograd.gradcheck(residuals, half)


def test_the_constant_does_not_hurry_into_a_poorer_optimum(rng):
    """Classes by length alone: a kernel of a large constant and mixed powers is a local optimum, and not a good one."""
    x = rng.normal(size=(300, 8))
    target = np.digitize(np.linalg.norm(x, axis=1), [2.5, 3.1])
    features, *rest = (torch.from_numpy(each) for each in (x, target, np.ones(300)))
    assert learn_kernel([features], *rest, 3, degree=7)[0].loss < 0.58


def test_of_several_scalings_the_one_goes_on_that_is_best(rng):
    x = rng.normal(size=(60, 6))
    target = torch.from_numpy((x[:, 0] > 0).astype(int))
    scaled = [torch.from_numpy(x * each) for each in ([0.01] + [1.0] * 5, [1.0] + [0.1] * 5, [1.0] * 6)]
    rest = (target, torch.ones(60, dtype=torch.float64), 2, 3)
    found, index = learn_kernel(scaled, *rest)
    alone = [learn_kernel([each], *rest)[0] for each in scaled]
    assert index == int(np.argmin([each.loss for each in alone])) == 1
    torch.testing.assert_close(found.alpha, alone[1].alpha)
    assert found.loss == alone[1].loss


def test_the_best_temperature_gives_back_the_one_that_labels_were_drawn_at(rng):
    scores = rng.normal(size=(20_000, 4))
    probabilities = np.exp(scores / 0.5)
    probabilities /= probabilities.sum(1, keepdims=True)
    target = (probabilities.cumsum(1) < rng.random((20_000, 1))).sum(1)
    tensors = [torch.from_numpy(each) for each in (scores, target, np.ones(20_000))]
    assert best_temperature(*tensors, start=0.1) == pytest.approx(0.5, rel=0.05)


def test_the_temperature_of_faultless_scores_is_not_the_smallest():
    scores, target = torch.eye(2, dtype=torch.float64).repeat(10, 1), torch.arange(20) % 2
    found = best_temperature(scores, target, torch.full((20,), 3.0), start=1.0)
    log_t = np.linspace(-2.5, 2.5, 100_001)
    loss = np.log1p(np.exp(-np.exp(-log_t))) + 0.5 / 21 * np.exp(-log_t)  # one more sample, of either class
    by_hand = np.exp(log_t[np.argmin(loss + log_t**2 / 40)])
    assert found == pytest.approx(by_hand, rel=0.03)
    assert by_hand > 0.1


# Conjugate gradients.


def points_of(x, constant=1.0):
    width = x.shape[1]
    scaling = Scaling(np.full(width, -np.inf), np.full(width, np.inf), np.zeros(width), np.ones(width))
    return Points(x, np.arange(x.shape[0]), scaling, constant, torch.device("cpu"))


def fitted(system, target, weight, ridge, softmax):
    labels = torch.eye(3, dtype=torch.float64)[torch.as_tensor(target)]
    fit = Fit.start(system, labels)
    left = fit.improve(system, labels, torch.from_numpy(weight), ridge, softmax, 200, 1e-13)
    assert left < 1e-12
    return fit


@pytest.mark.parametrize("rank", [20, 3])  # with 3, an estimate of the preconditioner would leave samples out
@pytest.mark.parametrize("sparse", [False, True])
def test_least_squares_of_all_samples_are_a_linear_system(rng, monkeypatch, sparse, rank):
    monkeypatch.setattr(basis, "BLOCK", 16)  # several tiles
    monkeypatch.setattr(basis, "RANK", rank)
    monkeypatch.setattr(basis, "RANK_SHARE", 1000)
    x, target, weight = rng.normal(size=(40, 3)), rng.integers(0, 3, 40), rng.uniform(0.5, 2, 40)
    alpha = kernel_of(0.5, 0.3, 0.2).alpha
    points = points_of(csr_matrix(x) if sparse else x)
    system = RowSystem(points, alpha, torch.float64, np.arange(40))
    fit = fitted(system, target, weight, 0.3, softmax=False)
    unit = on_the_sphere(x, 1.0)
    gram = power_kernel(unit, unit, alpha.numpy()) + CONSTANT
    by_hand = np.linalg.solve(gram + np.diag(0.3 / weight), np.eye(3)[target])
    np.testing.assert_allclose(fit.coefficients, by_hand, atol=1e-6)
    np.testing.assert_allclose(fit.scores, gram @ by_hand, atol=1e-6)


@pytest.mark.parametrize("landmarks", [None, 12])
def test_the_log_loss_is_at_its_lowest(rng, monkeypatch, landmarks):
    """Against L-BFGS of SciPy in the features of a Cholesky factor."""
    monkeypatch.setattr(basis, "BLOCK", 16)
    x, target, weight = rng.normal(size=(40, 3)), rng.integers(0, 3, 40), rng.uniform(0.5, 2, 40)
    weight[::5] = 0  # held out
    alpha, points, unit = kernel_of(0.2, 0.3, 0.5).alpha, points_of(x), on_the_sphere(x, 1.0)
    if landmarks is None:
        system, at = RowSystem(points, alpha, torch.float64, np.arange(40)), unit
    else:
        monkeypatch.setattr(basis, "JITTER", 1e-12)
        system, at = LandmarkSystem(points, points.at(np.arange(12)), alpha, torch.float64), unit[:12]
    fit = fitted(system, target, weight, 0.05, softmax=True)
    values, vectors = np.linalg.eigh(power_kernel(at, at, alpha.numpy()))
    features = power_kernel(unit, at, alpha.numpy()) @ (vectors[:, values > 1e-9] / np.sqrt(values[values > 1e-9]))
    features = np.hstack([features, np.full((40, 1), np.sqrt(CONSTANT))])

    def objective(flat):
        w = flat.reshape(-1, 3)
        logits = features @ w
        p = softmax(logits, axis=1)
        loss = -(weight * np.log(p[np.arange(40), target])).sum() + 0.025 * np.square(w).sum()
        return loss, (features.T @ (weight[:, None] * (p - np.eye(3)[target])) + 0.05 * w).ravel()

    start = np.zeros(3 * features.shape[1])
    found = minimize(
        objective, start, jac=True, options={"maxiter": 2000, "gtol": 1e-9, "ftol": 1e-15}, method="L-BFGS-B"
    )
    np.testing.assert_allclose(fit.scores, features @ found.x.reshape(-1, 3), atol=1e-4)
    c, b = system.expansion(fit.coefficients)
    scores = power_kernel(unit, at, alpha.numpy()) @ c.numpy() + b.numpy()
    np.testing.assert_allclose(scores, fit.scores, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e6])
def test_a_step_along_a_line_ends_at_its_lowest_point(rng, scale):
    """Against SciPy, also where the loss is so flat that Newton's steps lead far away."""
    labels, weight = np.eye(3)[rng.integers(0, 3, 12)], rng.uniform(0.5, 2, 12)
    scores = rng.normal(size=(12, 3)) * 5
    change = (labels - softmax(scores, axis=1)) * rng.exponential(size=(12, 1)) * scale
    square = 1e-3 * scale**2

    def loss(length):
        at = scores + length * change
        return weight @ (logsumexp(at, axis=1) - (at * labels).sum(1)) + length**2 * square / 2

    tensors = [torch.from_numpy(each) for each in (labels, weight, change)]
    length = Fit(torch.empty(0), torch.from_numpy(scores))._length(*tensors, 0.0, square, softmax=True)
    best = minimize_scalar(loss, bounds=(0, 1e3 / scale), method="bounded", options={"xatol": 1e-6 / scale})
    assert loss(length) < best.fun + 1e-3 * (loss(0) - best.fun)


@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("options", [{"landmarks": 8}, {"class_weight": "balanced", "degree": 2}])
def test_a_few_samples_that_tell_nothing_are_fitted_to_the_end(seed, options):
    """Labels by chance choose a small ridge often, and the loss of a sharp fit is flat and steep by turns."""
    random = np.random.default_rng(seed)
    x = np.array([[i, j] for i in range(3) for j in range(4)], dtype=float)
    target = random.permutation(np.arange(12) % 2)
    fitted = KernelHeadClassifier(random_state=seed, **options).fit(x, target)
    assert np.isfinite(fitted.decision_function(x)).all()


def test_features_that_are_made_anew_give_the_same_fit(rng, monkeypatch):
    """With 300 samples and landmarks for 100 of them in memory, against all in memory."""
    x = rng.normal(size=(300, 4))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    whole = KernelHeadClassifier(landmarks=40, random_state=0).fit(x, y)
    monkeypatch.setattr(solver, "KEPT_VALUES", 40 * 100)
    blocks = KernelHeadClassifier(landmarks=40, random_state=0).fit(x, y)
    assert blocks.head_.config["landmarks"] == 40
    at = rng.normal(size=(500, 4))
    assert np.abs(blocks.predict_proba(at) - whole.predict_proba(at)).mean() < 0.1
    assert np.mean(blocks.predict(at) == (at[:, 0] * at[:, 1] > 0)) > 0.85


# Descent.


def test_descent_starts_from_how_frequent_classes_are_and_what_kernel_values_are(rng):
    points, weight, kernel = rng.normal(size=(50, 3)), rng.uniform(1, 2, 50), kernel_of(0.4, 0.6)
    samples = samples_of(points, np.arange(50) % 5 // 2, weight)  # classes 0, 0, 1, 1, 2
    head = landmarks_of(samples, 3, 8, kernel)
    shares = np.bincount(samples.target, weight) / weight.sum()
    np.testing.assert_allclose(head(samples.points).detach() * 0.2, np.tile(shares, (50, 1)))
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    values = 2 * power_kernel(unit, head.weight.detach().numpy(), kernel.alpha.numpy())
    np.testing.assert_allclose(head.norm.running_mean, values.mean(0), atol=1e-9)
    np.testing.assert_allclose(head.norm.running_var, values.var(0), atol=1e-9)


def test_the_loss_of_descent_is_the_squared_error_of_scores(rng, monkeypatch):
    monkeypatch.setattr(descent, "NOISE", 0.0)
    monkeypatch.setattr(descent, "DROPOUT", 0.0)
    samples = samples_of(rng.normal(size=(8, 3)), [0, 1] * 4, rng.uniform(1, 2, 8))
    head = landmarks_of(samples, 2, 4, kernel_of(1.0))
    with torch.no_grad():
        head.mixing.normal_(generator=torch.Generator().manual_seed(0))
        scores = 0.2 * head.train()(samples.points).numpy()
    errors = np.square(scores - np.eye(2)[[0, 1] * 4]).sum(1)
    weight = samples.weight.numpy()
    trainer = Trainer(head, 0.2, torch.Generator(), learning_rate=0.01, batch_size=8)
    assert trainer.epoch(samples, lambda share: 1.0) == pytest.approx((errors * weight).sum() / weight.sum(), rel=1e-6)


def test_the_noise_of_descent_leaves_the_constant_coordinate_alone(rng, monkeypatch):
    seen = []
    monkeypatch.setattr(descent, "NOISE", 0.5)
    mean = descent.kernel_mean
    samples = samples_of(rng.normal(size=(8, 3)).astype(np.float32), [0, 1] * 4, np.ones(8, dtype=np.float32))
    trainer = Trainer(landmarks_of(samples, 2, 4, kernel_of(1.0)), 0.2, torch.Generator(), 0.01, batch_size=8)
    monkeypatch.setattr(descent, "kernel_mean", lambda points, *rest: seen.append(points) or mean(points, *rest))
    trainer.epoch(samples, lambda share: 1.0)
    assert {*seen[0][:, 2].tolist()} == {*samples.points[:, 2].tolist()}
    assert not {*samples.points[:, 0].tolist()} & {*seen[0][:, 0].tolist()}


def test_calibration_scales_the_logits_alone(rng):
    points = rng.normal(size=(400, 3))
    samples = samples_of(points, (points[:, 0] > 0).astype(int))
    head = landmarks_of(samples, 2, 16, kernel_of(1.0))
    with torch.no_grad():
        head.mixing.normal_(generator=torch.Generator().manual_seed(0))
        before = head(samples.points)
        better = Trainer(head, 0.2, torch.Generator(), 0.01, batch_size=8).calibrate(samples)
        np.testing.assert_allclose(head(samples.points) * better, before * 0.2, rtol=1e-9)
    assert better != 0.2


def test_the_bias_follows_the_shares_of_classes(rng):
    samples = samples_of(rng.normal(size=(40, 3)), np.zeros(40, dtype=np.int64))
    head = landmarks_of(samples, 3, 8, kernel_of(1.0))
    trainer = Trainer(head, 0.2, torch.Generator(), 0.01, batch_size=8)
    trainer.follow_shares(torch.tensor([40.0, 0, 0]), torch.tensor([50.0, 30, 20]))
    np.testing.assert_allclose(head(samples.points).detach() * 0.2, np.tile([0.5, 0.3, 0.2], (40, 1)), atol=1e-6)


# Weights and scaling.


def test_equal_samples_are_merged(rng):
    x = rng.normal(size=(4, 2)).astype(np.float32)
    x[0, 0] = 0.0
    twin = x.copy()
    twin[0, 0] = -0.0
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 0])
    both = np.vstack([x, twin])
    rows, target, weight = weigh(both, labels, np.arange(8.0), None, np.arange(2))
    features = both[rows]
    assert weight.mean() == pytest.approx(1)
    totals = (weight * sum(range(8)) / weight.sum()).round(9)
    merged = {(*row, label): total for *row, label, total in zip(*features.T, target, totals, strict=True)}
    assert merged == {(*x[0], 0): 4, (*x[1], 1): 6, (*x[2], 0): 8, (*x[3], 1): 3, (*x[3], 0): 7}


def test_an_extreme_feature_beside_usual_ones_hides_none(iris):
    x, y = iris
    units = np.array([1e300, 1.0, 1.0, 1e-300])
    own = scalings(x * units, np.ones(150))[0]
    np.testing.assert_allclose(own.mean / units, x.mean(0))
    np.testing.assert_allclose(own.scale / units, x.std(0))
    constant = np.hstack([x, np.full((150, 1), 1e300)])
    for extreme in (x * units, constant):
        assert KernelHeadClassifier(random_state=0).fit(extreme[::2], y[::2]).score(extreme[1::2], y[1::2]) > 0.94


@pytest.mark.parametrize("exponent", [1000, 600, -600, -1000])
def test_extreme_features_are_scaled_exactly(iris, exponent):
    """By a power of two nothing is rounded, so that even the kernel is the same."""
    x, y = np.hstack([iris[0], np.full((150, 1), 3.0), np.zeros((150, 1))]), iris[1]
    factor = 2.0**exponent
    plain = KernelHeadClassifier(random_state=0).fit(x[::2], y[::2])
    extreme = KernelHeadClassifier(random_state=0).fit(x[::2] * factor, y[::2])
    np.testing.assert_array_equal(extreme.scale_ / factor, plain.scale_)
    np.testing.assert_array_equal(extreme.predict_proba(x[1::2] * factor), plain.predict_proba(x[1::2]))
    assert plain.score(x[1::2], y[1::2]) > 0.95
