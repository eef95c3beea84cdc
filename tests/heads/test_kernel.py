"""Logits of the kernel heads against NumPy in float64."""

import numpy as np
import pytest
import torch
from numpy.polynomial import polynomial as P
from torch.nn import functional as F

from kernelhead import CosineHead, KernelHead, LandmarkHead, PrototypeHead

D, C = 6, 4


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(kind=KernelHead, **options):
    """A float64 head with random numbers everywhere, in evaluation mode."""
    head = kind(D, C, **options).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.rand_like(parameter) * 2 - 0.5)
    return head


def numbers(head):
    return {name: value.detach().numpy() for name, value in head.state_dict().items()}


def shapes(head):
    return {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}


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
@pytest.mark.parametrize("bias", [False, True])
def test_logits(degree, temperature, coefficients, bias):
    head, x = make(degree=degree, temperature=temperature, coefficients=coefficients, bias=bias), vectors(9)
    apply, default = ACTIVATIONS[coefficients]
    alpha = apply(head.raw_alpha.detach().numpy())
    default = min(default, 0.1) if bias else default
    expected = P.polyval(cosines(head, x), alpha[2:]) / (default if temperature is None else temperature)
    if bias:
        expected += head.bias.detach().numpy()
    np.testing.assert_allclose(head(x).detach(), expected, rtol=1e-11, atol=1e-12)


def test_alpha_is_ordered_from_the_even_end_point_term_upwards():
    head = KernelHead(D, C, degree=3, coefficients="relu")
    with torch.no_grad():
        head.raw_alpha.copy_(torch.tensor([32.0, 16.0, 8.0, 4.0, -3.0, 2.0]))
    assert head.alpha.tolist() == [32, 16, 8, 4, 0, 2]
    t = torch.tensor([1.0, -1.0, 0.5])
    assert head.kernel(t).tolist() == [14 + 16 + 32, 8 - 4 - 2 - 16 + 32, 8 + 2 + 0.25]
    x = torch.stack([5 * head.weight[2], -3 * head.weight[2]]).detach()
    torch.testing.assert_close(head(x)[:, 2], torch.tensor([62.0, 18.0]))


@pytest.mark.parametrize("degree", [1, 7, 12])
def test_the_learned_kernel_has_degree_plus_three_coefficients_that_start_at_one(degree):
    head = KernelHead(D, C, degree=degree, coefficients="relu")
    assert head.raw_alpha.tolist() == head.alpha.tolist() == [1.0] * (degree + 3)
    assert head.raw_alpha is head.kernel.raw_alpha
    assert (head.degree, head.temperature) == (degree, 1.0)
    assert shapes(head) == {"weight": (C, D), "kernel.raw_alpha": (degree + 3,)}
    assert set(head.state_dict()) == {*shapes(head), "_extra_state"}


@pytest.mark.parametrize(
    ("kind", "options", "coefficients", "temperature"),
    [
        (KernelHead, {}, "sigmoid", 0.1),
        (KernelHead, {"kernel": "rbf"}, "softplus", 1.0),
        (KernelHead, {"bias": True}, "softplus", 0.1),
        (KernelHead, {"bias": True, "temperature": 2.0}, "softplus", 2.0),
        (KernelHead, {"bias": True, "coefficients": "softmax"}, "softmax", 0.005),
        (PrototypeHead, {}, "softplus", 1.0),
        (PrototypeHead, {"bias": True}, "softplus", 0.1),
        (LandmarkHead, {}, "softplus", 1.0),
        (CosineHead, {}, "relu", 1.0),
    ],
)
def test_default_coefficients(kind, options, coefficients, temperature):
    head = kind(D, C, **options)
    assert (head.coefficients, head.temperature) == (coefficients, temperature)
    if kind is KernelHead:  # the configuration has them as they were given
        assert [head.config[name] for name in ("coefficients", "temperature")] == [
            options.get("coefficients"),
            options.get("temperature"),
        ]


@pytest.mark.parametrize("name", ["raw_alpha", "alpha", "degree"])
def test_what_the_kernel_owns_is_not_set_on_the_head(name):
    head = KernelHead(D, C)
    with pytest.raises((KeyError, AttributeError)):
        setattr(head, name, torch.nn.Parameter(torch.zeros(10)))
    assert head.raw_alpha.tolist() == [1.0] * 10


@pytest.mark.parametrize(
    ("options", "kernel", "close"),
    [
        ({"kernel": "cosine"}, lambda t: t, 1e-12),
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
    narrow, wide = (KernelHead(D, C, kernel="rbf", gamma=0.5) for _ in range(2))
    wide.kernel.profile.zero_()
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(wide.alpha, narrow.alpha)


def test_cosine_is_a_scaled_cosine():
    head, x = make(CosineHead), vectors(5)
    with torch.no_grad():
        head.raw_alpha.fill_(2.5)
    np.testing.assert_allclose(head(x).detach(), 2.5 * cosines(head, x), rtol=1e-12, atol=1e-14)
    assert shapes(head) == {"weight": (C, D), "kernel.raw_alpha": (1,)}


def test_length_of_features_and_weights_does_not_matter():
    head, x = make(), vectors(5)
    expected = head(x).detach()
    with torch.no_grad():
        head.weight.mul_(torch.tensor([0.01, 3, 500, 1])[:, None])
    torch.testing.assert_close(head(x * torch.tensor([7, 0.1, 1e-3, 1e4, 1])[:, None]).detach(), expected)


# --- expansions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prototypes", [2, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_prototypes(prototypes, bias):
    x = vectors(7)
    options = {"prototypes": prototypes, "bias": bias, "temperature": 0.5}
    summed, mixture = (make(PrototypeHead, aggregate=name, **options) for name in ("sum", "logsumexp"))
    mixture.load_state_dict(dict(summed.named_parameters()))  # without the configuration
    assert summed.weight.shape == (C * prototypes, D)
    values = P.polyval(cosines(summed, x), np.log1p(np.exp(summed.raw_alpha.detach().numpy()))[2:]) / 0.5
    by_class = values.reshape(7, C, prototypes)
    shift = summed.bias.detach().numpy() if bias else 0
    np.testing.assert_allclose(summed(x).detach(), by_class.sum(2) + shift, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mixture(x).detach(), np.log(np.exp(by_class).sum(2)) + shift, rtol=1e-10, atol=1e-12)
    if not bias:
        share = np.exp(values) / np.exp(values).sum(1, keepdims=True)
        np.testing.assert_allclose(mixture(x).softmax(1).detach(), share.reshape(by_class.shape).sum(2), rtol=1e-10)


@pytest.mark.parametrize("pool", [None, "auto"])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_landmarks(pool, scale):
    x = vectors(9, 8) if pool else vectors(9)
    head = make(LandmarkHead, landmarks=5, pool=pool, scale=scale, coefficients="sigmoid")
    assert shapes(head) == {"weight": (5, D), "mixing": (C, 5), "bias": (C,), "kernel.raw_alpha": (10,)}
    n = numbers(head)
    values = P.polyval(cosines(head, x), 1 / (1 + np.exp(-n["kernel.raw_alpha"])[2:])) / 0.1
    values = values.mean(1) if pool else values
    factor = (128 / 5) ** 0.5 if scale is None else scale

    def logits(mean, variance):
        return factor * (values - mean) / np.sqrt(variance + 1e-5) @ n["mixing"].T + n["bias"]

    trained = head.train()(x).detach()
    np.testing.assert_allclose(trained, logits(values.mean(0), values.var(0)), rtol=1e-9, atol=1e-10)
    running = 0.1 * values.mean(0), 0.9 + 0.1 * values.var(0, ddof=1)
    np.testing.assert_allclose(head.eval()(x).detach(), logits(*running), rtol=1e-9, atol=1e-10)


def test_one_sample_cannot_be_standardised():
    head = make(LandmarkHead, landmarks=5)
    assert head.eval()(vectors(1)).shape == (1, C)
    with pytest.raises(ValueError, match="needs two or more samples to standardise over; got a batch of 1"):
        head.train()(vectors(1))


def test_as_many_landmarks_as_classes_with_identity_mixing_are_the_plain_layer():
    plain, x = make(coefficients="relu"), vectors(9)
    head = make(LandmarkHead, landmarks=C, scale=1.0, coefficients="relu")
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
def test_pooling_averages_the_kernel_over_positions(layout, dtype):
    head = make(LandmarkHead, landmarks=5, coefficients="relu").to(dtype)
    maps = torch.randn(5, D, 3, 2, dtype=dtype)
    tokens = maps.permute(0, 2, 3, 1).reshape(5, 6, D)
    n = numbers(head)
    psi = P.polyval(cosines(head, tokens), np.maximum(n["kernel.raw_alpha"], 0)[2:]).mean(1)
    expected = head.scale * psi / np.sqrt(1 + 1e-5) @ n["mixing"].T + n["bias"]
    close = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(head(maps.contiguous(memory_format=layout)).detach(), expected, **close)
    np.testing.assert_allclose(head(tokens).detach(), expected, **close)
    np.testing.assert_allclose(head(tokens.flip(1)).detach(), expected, **close)


def test_a_single_position_is_a_vector():
    head, x = make(LandmarkHead, landmarks=5), vectors(5)
    plain = make(LandmarkHead, landmarks=5, pool=None)
    plain.load_state_dict(dict([*head.named_parameters(), *head.named_buffers()]))  # without the configuration
    for one in (x, x[:, None], x[:, :, None, None]):
        torch.testing.assert_close(head(one), plain(x))


# --- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [(KernelHead, {}), (PrototypeHead, {}), (LandmarkHead, {"landmarks": 500})]
)
def test_weights_start_with_length_about_one_in_every_direction(kind, options):
    weight = kind(256, 500, **options).weight.detach()
    np.testing.assert_allclose(weight.norm(dim=1), 1, atol=0.25)
    assert weight.mean(0).abs().max() < 5 * 256**-0.5 * len(weight) ** -0.5


def test_landmarks_start_anew():
    head = make(LandmarkHead, landmarks=5)
    head.train()(vectors(9))
    head.reset_parameters()
    assert (head.bias == 0).all()
    assert (head.norm.running_mean == 0).all()
    assert (head.norm.running_var == 1).all()
    assert head.mixing.abs().max() <= 5**-0.5


def test_float32_layer_on_float64_features_gives_float64_logits():
    head, x = make().float(), vectors(3)
    assert head(x).dtype == torch.float64
    assert head(x.float()).dtype == torch.float32


def test_learns_what_no_linear_layer_can():
    """Two opposite quarters of the circle per class: odd functions of f are of no use, t^2 separates."""
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

    assert final_loss(KernelHead(2, 2)) < 0.35
    assert final_loss(CosineHead(2, 2)) > 0.6


@pytest.mark.parametrize("kind", [KernelHead, PrototypeHead, LandmarkHead])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float64])
def test_every_precision_under_autocast(kind, dtype, input_dtype):
    head = kind(D, C).to(dtype)
    shape = (5, 7, D) if head.pools else (5, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(torch.randn(shape, dtype=input_dtype))
    assert torch.isfinite(logits).all()
    logits.float().square().sum().backward()
    assert torch.isfinite(head.weight.grad).all()


def test_fake_tensors_give_shapes_and_leave_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        head = KernelHead(D, C, degree=11, bias=True)
        logits = head(torch.randn(5, D))
        assert logits.shape == (5, C)
        logits.sum().backward()
    real = KernelHead(D, C, degree=11)
    real(torch.randn(5, D)).sum().backward()
    assert torch.isfinite(real.raw_alpha.grad).all()


# --- the fused loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "fused"),
    [
        (KernelHead, {}, True),
        (CosineHead, {}, True),
        (KernelHead, {"bias": True}, False),
        (PrototypeHead, {"aggregate": "logsumexp"}, True),
        (PrototypeHead, {"aggregate": "sum"}, False),
        (LandmarkHead, {}, False),
    ],
)
def test_which_heads_have_a_fused_loss(kind, options, fused):
    head, x, labels = make(kind, **options), vectors(5), torch.arange(5) % C
    assert head.has_fused_loss is fused
    if kind is LandmarkHead:
        return
    if fused:
        exactly = F.cross_entropy(head(x), labels)
        for mode in ("speed", "memory"):
            torch.testing.assert_close(head.loss(x, labels, backend="chunked", mode=mode), exactly)
    else:
        with pytest.raises(ValueError, match=f"^{kind.__name__} has no fused loss here; got backend='chunked'"):
            head.loss(x, labels, backend="chunked")
