"""KernelClassifier's logits against NumPy in float64."""

import numpy as np
import pytest
import torch
from numpy.polynomial import polynomial as P
from torch.nn import functional as F

from kernelhead import KernelClassifier

D, C = 6, 4


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(**options):
    """A float64 head with random numbers everywhere, in evaluation mode."""
    head = KernelClassifier(D, C, **options).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.rand_like(parameter) * 2 - 0.5)
    return head


def numbers(head):
    return {name: value.detach().numpy() for name, value in head.state_dict().items()}


def cosines(head, features):
    return unit(features.numpy()) @ unit(head.weight.detach().numpy()).T


def vectors(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


ACTIVATIONS = {
    "relu": (lambda raw: np.maximum(raw, 0), 1),
    "sigmoid": (lambda raw: 1 / (1 + np.exp(-raw)), 0.1),
    "softmax": (lambda raw: np.exp(raw) / np.exp(raw).sum(), 0.005),
    "softplus": (lambda raw: np.log1p(np.exp(raw)), 1),
    "none": (lambda raw: raw, 1),
}


# --- the paper's layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 7])
@pytest.mark.parametrize("temperature", [None, 1, 0.3])
@pytest.mark.parametrize("coefficients", ACTIVATIONS)
def test_plain_logits(degree, temperature, coefficients):
    head, x = make(degree=degree, temperature=temperature, coefficients=coefficients), vectors(9)
    apply, default = ACTIVATIONS[coefficients]
    alpha = apply(head.raw_alpha.detach().numpy())
    expected = P.polyval(cosines(head, x), alpha[2:]) / (default if temperature is None else temperature)
    np.testing.assert_allclose(head(x).detach(), expected, rtol=1e-11, atol=1e-12)


def test_alpha_is_ordered_from_the_even_end_point_term_upwards():
    head = KernelClassifier(D, C, degree=3)
    with torch.no_grad():
        head.raw_alpha.copy_(torch.tensor([32.0, 16.0, 8.0, 4.0, -3.0, 2.0]))
    assert head.alpha.tolist() == [32, 16, 8, 4, 0, 2]
    t = torch.tensor([1.0, -1.0, 0.5])
    assert head.kernel(t).tolist() == [14 + 16 + 32, 8 - 4 - 2 - 16 + 32, 8 + 2 + 0.25]
    x = torch.stack([5 * head.weight[2], -3 * head.weight[2]]).detach()
    torch.testing.assert_close(head(x)[:, 2], torch.tensor([62.0, 18.0]))


@pytest.mark.parametrize("degree", [1, 7, 12])
def test_the_learned_kernel_has_degree_plus_three_coefficients_that_start_at_one(degree):
    head = KernelClassifier(D, C, degree=degree)
    assert head.raw_alpha.tolist() == head.alpha.tolist() == [1.0] * (degree + 3)
    assert head.degree == degree
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {
        "raw_alpha": (degree + 3,),
        "weight": (C, D),
    }


@pytest.mark.parametrize(
    ("options", "kernel", "close"),
    [
        ({"kernel": "linear"}, lambda t: t, 1e-12),
        ({"kernel": "polynomial"}, lambda t: ((1 + t) / 2) ** 7, 1e-12),
        ({"kernel": "polynomial", "degree": 10}, lambda t: ((1 + t) / 2) ** 10, 1e-12),
        ({"kernel": "rbf"}, lambda t: np.exp(-2 * (1 - t)), 1e-7),
        ({"kernel": "rbf", "gamma": 3.0}, lambda t: np.exp(-6 * (1 - t)), 1e-7),
    ],
)
@pytest.mark.parametrize("coefficients", ["relu", "sigmoid", "softplus", "none"])
def test_fixed_kernels_have_one_coefficient(options, kernel, close, coefficients):
    head, x = make(coefficients=coefficients, **options), vectors(9)
    with torch.no_grad():
        head.raw_alpha.fill_(1.5)
    apply, temperature = ACTIVATIONS[coefficients]
    assert head.raw_alpha.shape == (1,)
    assert head.alpha.shape == (head.degree + 3,)
    t, scale = cosines(head, x), apply(np.array(1.5))
    np.testing.assert_allclose(head(x).detach(), scale * kernel(t) / temperature, rtol=0, atol=close * 20)
    np.testing.assert_allclose(head.kernel(torch.from_numpy(t)).detach(), scale * kernel(t), rtol=0, atol=close * 2)


def test_fixed_kernels_travel_with_the_state():
    narrow, wide = KernelClassifier(D, C, kernel="rbf", gamma=0.5), KernelClassifier(D, C, kernel="rbf", gamma=0.5)
    wide.profile.zero_()
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(wide.alpha, narrow.alpha)
    assert set(KernelClassifier(D, C).state_dict()) == {"raw_alpha", "weight"}


def test_length_of_features_and_weights_does_not_matter():
    head, x = make(), vectors(5)
    expected = head(x).detach()
    with torch.no_grad():
        head.weight.mul_(torch.tensor([0.01, 3, 500, 1])[:, None])
    torch.testing.assert_close(head(x * torch.tensor([7, 0.1, 1e-3, 1e4, 1])[:, None]).detach(), expected)


@pytest.mark.parametrize("options", [{}, {"prototypes": 3}, {"landmarks": 5}])
def test_leading_dimensions(options):
    head, x = make(**options), vectors(2, 3)
    logits = head(x)
    assert logits.shape == (2, 3, C)
    assert torch.equal(logits.view(6, C), head(x.view(6, D)))


# --- expansions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prototypes", [2, 5])
@pytest.mark.parametrize("pool", [None, "rkhs"])
def test_prototypes(prototypes, pool):
    x = vectors(7, 8) if pool else vectors(7)
    summed, mixture = (make(prototypes=prototypes, aggregate=a, pool=pool) for a in ("sum", "logsumexp"))
    mixture.load_state_dict(summed.state_dict())
    assert summed.weight.shape == (C * prototypes, D)
    values = P.polyval(cosines(summed, x), np.maximum(summed.raw_alpha.detach().numpy(), 0)[2:])
    values = values.mean(1) if pool else values
    by_class = values.reshape(7, C, prototypes)
    np.testing.assert_allclose(summed(x).detach(), by_class.sum(2), rtol=1e-10, atol=1e-12)
    of_prototypes = np.exp(values) / np.exp(values).sum(1, keepdims=True)
    np.testing.assert_allclose(
        mixture(x).softmax(1).detach(), of_prototypes.reshape(7, C, prototypes).sum(2), rtol=1e-10
    )
    np.testing.assert_allclose(mixture(x).detach(), np.log(np.exp(by_class).sum(2)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pool", [None, "rkhs"])
def test_landmarks(pool):
    head, x = make(landmarks=5, pool=pool, coefficients="sigmoid"), vectors(9, 8) if pool else vectors(9)
    assert {name: tuple(p.shape) for name, p in head.named_parameters()} == {
        "raw_alpha": (10,),
        "weight": (5, D),
        "mixing": (C, 5),
        "bias": (C,),
    }
    n = numbers(head)
    values = P.polyval(cosines(head, x), 1 / (1 + np.exp(-n["raw_alpha"])[2:])) / 0.1
    values = values.mean(1) if pool else values

    def logits(mean, variance):
        return (values - mean) / np.sqrt(variance + 1e-5) @ n["mixing"].T + n["bias"]

    trained = head.train()(x).detach()
    np.testing.assert_allclose(trained, logits(values.mean(0), values.var(0)), rtol=1e-9, atol=1e-10)
    running = 0.1 * values.mean(0), 0.9 + 0.1 * values.var(0, ddof=1)
    np.testing.assert_allclose(head.eval()(x).detach(), logits(*running), rtol=1e-9, atol=1e-10)


def test_eps_of_landmarks():
    head, x = make(landmarks=5, eps=1e-3), vectors(9)
    exactly = make(landmarks=5, eps=1e-12)
    exactly.load_state_dict(head.state_dict())
    n = numbers(head)
    values = P.polyval(cosines(head, x), np.maximum(n["raw_alpha"][2:], 0))
    for one, eps in ((head, 1e-3), (exactly, 1e-12)):
        standard = (values - values.mean(0)) / np.sqrt(values.var(0) + eps)
        np.testing.assert_allclose(one.train()(x).detach(), standard @ n["mixing"].T + n["bias"], rtol=1e-8, atol=1e-9)


def test_one_sample_cannot_be_standardised():
    head = make(landmarks=5)
    assert head.eval()(vectors(1)).shape == (1, C)
    with pytest.raises(ValueError, match="train with two or more"):
        head.train()(vectors(1))
    assert make(landmarks=5, standardize=False).train()(vectors(1)).shape == (1, C)


def test_landmarks_as_they_are():
    head, x = make(landmarks=5, standardize=False, temperature=0.5, coefficients="softplus"), vectors(9)
    n = numbers(head)
    values = P.polyval(cosines(head, x), np.log1p(np.exp(n["raw_alpha"][2:]))) / 0.5
    for _ in range(2):  # no statistics are kept
        np.testing.assert_allclose(head.train()(x).detach(), values @ n["mixing"].T + n["bias"], rtol=1e-9, atol=1e-10)
    assert set(head.state_dict()) == {"raw_alpha", "weight", "mixing", "bias"}


def test_as_many_landmarks_as_classes_with_identity_mixing_are_the_plain_layer():
    plain, head, x = make(), make(landmarks=C), vectors(9)
    with torch.no_grad():
        head.weight.copy_(plain.weight)
        head.raw_alpha.copy_(plain.raw_alpha)
        head.mixing.copy_(torch.eye(C))
        head.bias.zero_()
    logits = plain(x).detach()
    torch.testing.assert_close(head(x).detach(), logits / np.sqrt(1 + 1e-5))
    standardised = (logits - logits.mean(0)) / (logits.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(head.train()(x).detach(), standardised)


# --- the mean embedding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rkhs_pooling_averages_the_kernel_over_places(layout, dtype):
    head = make(pool="rkhs").to(dtype)
    maps = torch.randn(5, D, 3, 2, dtype=dtype)
    tokens = maps.permute(0, 2, 3, 1).reshape(5, 6, D)
    alpha = np.maximum(head.raw_alpha.detach().numpy(), 0)
    expected = P.polyval(cosines(head, tokens), alpha[2:]).mean(1)
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(head(maps.contiguous(memory_format=layout)).detach(), expected, **close)
    np.testing.assert_allclose(head(tokens).detach(), expected, **close)
    np.testing.assert_allclose(head(tokens.flip(1)).detach(), expected, **close)


def test_rkhs_pooling_of_one_place_is_the_plain_layer():
    pooled, plain, x = make(pool="rkhs"), make(), vectors(5)
    plain.load_state_dict(pooled.state_dict())
    torch.testing.assert_close(pooled(x[:, :, None, None]), plain(x))


def test_degree_two_of_rkhs_pooling_is_second_order_pooling():
    head, x = make(pool="rkhs", degree=2), vectors(5, 8)
    with torch.no_grad():
        head.raw_alpha.copy_(torch.tensor([0, 0, 0, 0, 1]))
    f, w = unit(x.numpy()), unit(head.weight.detach().numpy())
    moments = np.stack([np.mean([np.outer(place, place) for place in sample], axis=0) for sample in f])
    expected = np.stack([[v @ moment @ v for v in w] for moment in moments])
    np.testing.assert_allclose(head(x).detach(), expected, rtol=1e-11)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("window", "height", "width"), [(2, 3, 5), (2, 2, 2), (3, 4, 3)])
def test_windows_are_compared_as_one_vector(window, height, width, layout):
    head = make(pool="rkhs", window=window, degree=3)
    maps = torch.randn(5, D, height, width, dtype=torch.float64)
    alpha, w = np.maximum(head.raw_alpha.detach().numpy(), 0), unit(head.weight.detach().numpy())
    values = []
    for row in range(height - window + 1):
        for column in range(width - window + 1):
            places = [(row + i, column + j) for i in range(window) for j in range(window)]
            seen = np.concatenate([maps.numpy()[:, :, i, j] for i, j in places], axis=1)
            values.append(P.polyval(unit(seen) @ w.T, alpha[2:]))
    laid_out = maps.contiguous(memory_format=layout)
    np.testing.assert_allclose(head(laid_out).detach(), np.mean(values, axis=0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(head.freeze()(laid_out).detach(), np.mean(values, axis=0), rtol=1e-10, atol=1e-12)


def test_windows_know_what_is_beside_what():
    """Places in another order are the same to a head without windows."""
    plain, windows = make(pool="rkhs"), make(pool="rkhs", window=2)
    maps = torch.randn(5, D, 3, 4, dtype=torch.float64)
    other = maps.flatten(2)[:, :, torch.randperm(12, generator=torch.Generator().manual_seed(1))].view_as(maps)
    torch.testing.assert_close(plain(other), plain(maps))
    assert (windows(other) - windows(maps)).abs().max() > 1e-3


def test_windows_start_with_weights_of_length_about_one():
    weight = KernelClassifier(64, 100, landmarks=500, pool="rkhs", window=2).weight
    assert weight.shape == (500, 256)
    assert weight.norm(dim=1).mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("options", "features", "words"),
    [
        ({"window": 2}, None, "goes with pool='rkhs'"),
        ({"window": 0, "pool": "rkhs"}, None, "window to be a positive integer"),
        ({"window": 2.0, "pool": "rkhs"}, None, "window to be a positive integer"),
        ({"window": 2, "pool": "rkhs"}, (3, 4, D), r"windows expects a map \(N, 6, H, W\), got \(3, 4, 6\)"),
        ({"window": 2, "pool": "rkhs"}, (3, D + 1, 4, 4), r"windows expects a map \(N, 6, H, W\)"),
        ({"window": 3, "pool": "rkhs"}, (3, D, 4, 2), "has 3 x 3 windows of places, and the map is 4 x 2"),
    ],
)
def test_windows_that_cannot_be(options, features, words):
    with pytest.raises(ValueError, match=words):
        KernelClassifier(D, C, **options)(torch.randn(features or (3, D)))


# --- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kernel": "rbf"}, {"prototypes": 2}, {"landmarks": 5}])
def test_reset_parameters_starts_anew(options):
    head = make(**options)
    head.train()(vectors(9))
    before = numbers(head)["weight"].copy()
    head.reset_parameters()
    assert (head.raw_alpha == 1).all()
    assert not np.allclose(head.weight.detach(), before)
    if head.landmarks:
        assert (head.bias == 0).all()
        assert (head.norm.running_mean == 0).all()
        assert (head.norm.running_var == 1).all()
        assert head.mixing.abs().max() <= 5**-0.5


def test_weights_start_with_length_about_one_in_every_direction():
    weight = KernelClassifier(256, 500).weight.detach()
    np.testing.assert_allclose(weight.norm(dim=1), 1, atol=0.25)
    assert weight.mean(0).abs().max() < 5 * 256**-0.5 * 500**-0.5


def test_float32_layer_on_float64_features_gives_float64_logits():
    head, x = make().float(), vectors(3)
    assert head(x).dtype == torch.float64
    assert head(x.float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["degree=7", "kernel='learned'", "coefficients='relu'", "temperature=1"]),
        ({"coefficients": "softmax", "degree": 3}, ["degree=3", "coefficients='softmax'", "temperature=0.005"]),
        ({"kernel": "rbf", "gamma": 2.0}, ["kernel='rbf'", "gamma=2"]),
        ({"prototypes": 3, "aggregate": "sum"}, ["prototypes=3", "aggregate='sum'"]),
        ({"landmarks": 9, "pool": "rkhs"}, ["landmarks=9", "pool='rkhs'"]),
        ({"landmarks": 9, "standardize": False}, ["landmarks=9, standardize=False"]),
    ],
)
def test_repr_says_the_options(options, parts):
    text = repr(KernelClassifier(D, C, **options))
    assert all(part in text for part in parts)


def test_learns_what_no_linear_layer_can():
    """Two opposite quarters of the circle a class: odd functions of f are of no use, t^2 separates."""
    angles = torch.rand(400, generator=torch.Generator().manual_seed(1)) * 2 * torch.pi
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    target = (x[:, 0] * x[:, 1] > 0).long()

    def final_loss(head):
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(150):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(x), target)
            loss.backward()
            optimizer.step()
        return loss.item()

    assert final_loss(KernelClassifier(2, 2)) < 0.35
    assert final_loss(KernelClassifier(2, 2, kernel="linear")) > 0.6


@pytest.mark.parametrize("options", [{}, {"landmarks": 6}, {"prototypes": 2}, {"landmarks": 6, "pool": "rkhs"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float64])
def test_every_precision_under_autocast(options, dtype, input_dtype):
    head = KernelClassifier(D, C, **options).to(dtype)
    shape = (5, 7, D) if options.get("pool") else (5, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(torch.randn(shape, dtype=input_dtype))
    assert torch.isfinite(logits).all()
    logits.float().square().sum().backward()
    assert torch.isfinite(head.weight.grad).all()


def test_fake_tensors_give_shapes_and_leave_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        head = KernelClassifier(D, C, degree=11)
        logits = head(torch.randn(5, D))
        assert logits.shape == (5, C)
        logits.sum().backward()
    real = KernelClassifier(D, C, degree=11)
    real(torch.randn(5, D)).sum().backward()
    assert torch.isfinite(real.raw_alpha.grad).all()


def test_temperature_with_landmarks_is_refused():
    with pytest.raises(ValueError, match="temperature does nothing with landmarks"):
        KernelClassifier(D, C, landmarks=4, temperature=0.5)
