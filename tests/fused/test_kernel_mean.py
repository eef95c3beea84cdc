"""The fused kernel mean against a hand-written float64 implementation with explicit normalisation Jacobians."""

import itertools
import re

import numpy as np
import pytest
import torch
from numpy.polynomial import polynomial as P
from torch.autograd import forward_ad
from torch.nn import functional as F

import kernelhead.fused.kernel_mean as fused
from kernelhead.fused.kernel_mean import kernel_mean
from kernelhead.fused.precision import product_dtypes

VECTORS, TOKENS = (7, 5), (4, 6, 5)


def normalise(x):
    """x (..., D) -> x / |x| and its Jacobian (I - u u^T) / |x|, (..., D, D)."""
    norm = np.linalg.norm(x, axis=-1)[..., None]
    unit = x / norm
    return unit, (np.eye(x.shape[-1]) - unit[..., :, None] * unit[..., None, :]) / norm[..., None]


def reference(features, weight, alpha, gradient):
    """Value (N, K) and the three gradients, in float64, from gradient (N, K) with respect to the value."""
    features, weight, alpha, gradient = (x.detach().double().numpy() for x in (features, weight, alpha, gradient))
    positions = features if features.ndim == 3 else features[:, None]
    f, f_jacobian = normalise(positions)
    w, w_jacobian = normalise(weight)
    t = np.einsum("nld,kd->nlk", f, w)
    odd = np.where(np.abs(t) > 1 - 1e-5, np.sign(t), 0)
    value = (P.polyval(t, alpha[2:]) + alpha[1] * odd + alpha[0] * odd**2).mean(1)
    g = np.broadcast_to(gradient[:, None] / positions.shape[1], t.shape)
    grad_t = g * P.polyval(t, P.polyder(alpha[2:]))
    grad_f = np.einsum("nlk,ke,nled->nld", grad_t, w, f_jacobian, optimize=True)
    grad_w = np.einsum("nlk,nle,ked->kd", grad_t, f, w_jacobian, optimize=True)
    grad_a = np.array([(g * k).sum() for k in (odd**2, odd, *(t**m for m in range(len(alpha) - 2)))])
    return value, (grad_f.reshape(features.shape), grad_w, grad_a)


@pytest.fixture(autouse=True, params=["few", "many"])
def few(request, monkeypatch):
    """Few cosines go a way of their own; many go through strips."""
    if request.param == "many":
        monkeypatch.setattr(fused, "FEW", 0)
        monkeypatch.setitem(fused.STRIP, "cpu", 16)


def make(shape, classes=3, degree=7, dtype=torch.float64, *, multiples=()):
    """Features, weight, alpha that require gradients, and a gradient of the value.

    The first features are those multiples of the first weight, with cosines of +-1.
    """
    features = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(classes, shape[-1], dtype=torch.float64)
    for i, multiple in enumerate(multiples):
        features.view(-1, shape[-1])[i] = multiple * weight[0]
    alpha = torch.rand(degree + 3, dtype=torch.float64) + 0.1
    inputs = [x.to(dtype).requires_grad_() for x in (features, weight, alpha)]
    return inputs, torch.randn(shape[0], classes, dtype=torch.promote_types(dtype, torch.float32))


def check(inputs, gradient, close):
    value = kernel_mean(*inputs)
    expected, gradients = reference(*inputs, gradient)
    assert (value.dtype, value.shape) == (gradient.dtype, expected.shape)
    np.testing.assert_allclose(value.detach(), expected, rtol=close, atol=close)
    for mine, its in zip(torch.autograd.grad(value, inputs, gradient), gradients, strict=True):
        assert mine.shape == its.shape
        np.testing.assert_allclose(mine, its, rtol=close, atol=close * max(1, np.abs(its).max()))


# --- value and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("degree", [1, 2, 7, 20])
@pytest.mark.parametrize(
    ("shape", "classes"),
    [(VECTORS, 3), (VECTORS, 1), ((1, 5), 3), ((1, 5), 1), (TOKENS, 3), (TOKENS, 1), ((1, 1, 5), 3), ((3, 4, 1), 2)],
)
def test_value_and_gradients(shape, classes, degree, dtype):
    check(*make(shape, classes, degree, dtype), 1e-11 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_many_cosines(degree):
    check(*make((700, 6), 50, degree), 1e-11)  # more than 2^15, where the gradient of alpha goes another way


@pytest.mark.parametrize("shape", [(600, 5), (200, 3, 5), (9, 100, 5)])
@pytest.mark.parametrize("elements", [64, 2**20])
@pytest.mark.parametrize("multiples", [(), (3, -0.5)])
def test_blocks_do_not_change_the_result(monkeypatch, shape, elements, multiples):
    monkeypatch.setitem(fused.BLOCK, "cpu", elements)
    positions = shape[1] if len(shape) == 3 else 1
    assert len(fused._blocks(shape[0], positions, 4, torch.device("cpu"))) == (3 if elements == 64 else 1)
    check(*make(shape, 4, multiples=multiples), 1e-11)


def test_a_block_is_no_smaller_than_asked(monkeypatch):
    monkeypatch.setitem(fused.BLOCK, "cpu", 4000)
    blocks = fused._blocks(1001, 1, 10, torch.device("cpu"))
    assert [(b.start, b.stop) for b in blocks] == [(0, 400), (400, 800), (800, 1200)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_maps_as_transposed_views(layout):
    (_, weight, alpha), gradient = make(VECTORS)
    maps = torch.randn(7, 5, 2, 3, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    tokens = maps.flatten(2).transpose(1, 2)
    value = kernel_mean(tokens, weight, alpha)
    expected, (grad_f, grad_w, _) = reference(tokens, weight, alpha, gradient)
    np.testing.assert_allclose(value.detach(), expected, rtol=1e-11)
    grad_maps, mine = torch.autograd.grad(value, (maps, weight), gradient)
    np.testing.assert_allclose(grad_maps, grad_f.transpose(0, 2, 1).reshape(maps.shape), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mine, grad_w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(7, 64), (4, 6, 64)])
@pytest.mark.parametrize("multiples", [(1,), (3, 0.01), (-0.5,), (3, -0.5, -1)])
def test_end_point_terms(shape, dtype, multiples):
    inputs, gradient = make(shape, dtype=dtype, multiples=multiples)
    _, (_, _, grad_alpha) = reference(*inputs, gradient)
    assert (grad_alpha[:2] != 0).all()
    check(inputs, gradient, 1e-11 if dtype == torch.float64 else 2e-4)


def test_without_end_points_their_coefficients_get_no_gradient():
    inputs, gradient = make(VECTORS)
    kernel_mean(*inputs).backward(gradient)
    assert inputs[2].grad[:2].tolist() == [0, 0]


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
@pytest.mark.parametrize("wanted", [c for n in (1, 2) for c in itertools.combinations(range(3), n)])
def test_any_subset_of_inputs_may_want_gradients(shape, wanted):
    inputs, gradient = make(shape, multiples=(3, -0.5))
    _, gradients = reference(*inputs, gradient)
    for i, x in enumerate(inputs):
        x.requires_grad_(i in wanted)
    kernel_mean(*inputs).backward(gradient)
    for i, (x, expected) in enumerate(zip(inputs, gradients, strict=True)):
        if i in wanted:
            np.testing.assert_allclose(x.grad, expected, rtol=1e-9, atol=1e-12)
        else:
            assert x.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_without_gradients(mode, shape):
    inputs, gradient = make(shape)
    with mode():
        value = kernel_mean(*inputs)
    assert not value.requires_grad
    np.testing.assert_allclose(value, reference(*inputs, gradient)[0], rtol=1e-11)


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_backward_twice_gives_the_same_gradients(shape):
    inputs, gradient = make(shape)
    value = kernel_mean(*inputs)
    first = torch.autograd.grad(value, inputs, gradient, retain_graph=True)
    second = torch.autograd.grad(value, inputs, gradient)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- masks ------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]])


def with_mask(inputs, gradient):
    """Value and gradients of `reference`, of each sample's positions that count alone."""
    features, weight, alpha = inputs
    parts = [
        reference(row[real > 0][None], weight, alpha, g[None])
        for row, real, g in zip(features, MASK, gradient, strict=True)
    ]
    grad_features = np.zeros(features.shape)
    for n, (_, (grad, _, _)) in enumerate(parts):
        grad_features[n, MASK[n] > 0] = grad[0]
    values, gradients = zip(*parts, strict=True)
    return np.concatenate(values), (grad_features, *(sum(g[i] for g in gradients) for i in (1, 2)))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("elements", [8, 2**20])  # of a block
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
@pytest.mark.parametrize("padding", [0.0, torch.nan, -torch.inf])
def test_positions_that_a_mask_leaves_out_do_not_count(monkeypatch, kind, elements, dtype, close, padding):
    monkeypatch.setitem(fused.BLOCK, "cpu", elements)
    monkeypatch.setattr(fused, "MIN_BLOCK_ROWS", 6)
    inputs, gradient = make(TOKENS, dtype=dtype, multiples=(3, -0.5))
    with torch.no_grad():
        inputs[0][MASK == 0] = padding
    expected, gradients = with_mask(inputs, gradient)
    value = kernel_mean(*inputs, MASK.to(kind))
    np.testing.assert_allclose(value.detach(), expected, rtol=close, atol=close)
    for mine, its in zip(torch.autograd.grad(value, inputs, gradient), gradients, strict=True):
        np.testing.assert_allclose(mine, its, rtol=close, atol=close * max(1, np.abs(its).max()))


def test_derivatives_of_any_kind_with_a_mask():
    inputs, gradient = make(TOKENS, degree=4)
    expected, gradients = with_mask(inputs, gradient)
    inputs[0] = inputs[0].detach().masked_fill(MASK[..., None] == 0, 7).requires_grad_()

    def function(*inputs):
        return kernel_mean(*inputs, MASK)

    grads = torch.func.grad(lambda *xs: (function(*xs) * gradient).sum(), argnums=(0, 1, 2))(*inputs)
    for mine, its in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(mine.detach(), its, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(torch.func.jvp(function, tuple(inputs), tuple(inputs))[0].detach(), expected, rtol=1e-11)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_a_sample_without_positions_counts_as_a_zero_vector():
    inputs, gradient = make(TOKENS)
    mask = MASK.clone()
    mask[1] = 0
    value = kernel_mean(*inputs, mask)
    torch.testing.assert_close(value[1], inputs[2][2].expand(3))
    gradients = torch.autograd.grad(value, inputs, gradient)
    assert not gradients[0][1].any()
    assert all(each.isfinite().all() for each in gradients)


@pytest.mark.parametrize(("features", "mask"), [((7, 5), (7,)), ((4, 6, 5), (4, 5)), ((4, 6, 5), (4, 6, 1))])
def test_a_mask_needs_the_shape_of_the_positions(features, mask):
    (features, weight, alpha), _ = make(features)
    with pytest.raises(ValueError, match=re.escape(str(mask))):
        kernel_mean(features, weight, alpha, torch.ones(mask))


# --- memory -----------------------------------------------------------------------------------------------------------


def saved_by(function):
    """The tensors that autograd keeps for the backward pass of function(), those that hooks do not see included."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        node = function().grad_fn
    return saved + [x for x in getattr(node, "__dict__", {}).values() if isinstance(x, torch.Tensor)]


def count_bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


def test_vectors_save_the_cosines_and_no_more(monkeypatch):
    monkeypatch.setattr(fused, "FEW", 0)
    N, C, degree = 40, 30, 7
    (features, weight, alpha), _ = make((N, 20), C, degree, torch.float32)
    mine = count_bytes(saved_by(lambda: kernel_mean(features, weight, alpha)))
    linear = count_bytes(saved_by(lambda: F.linear(features, weight)))
    assert linear > 0
    assert mine <= linear + 4 * (N * C + N + C + degree + 3)


@pytest.mark.parametrize("elements", [64, 2**20])
@pytest.mark.parametrize("masked", [False, True])
def test_positions_save_nothing_as_large_as_the_cosines(monkeypatch, elements, masked):
    monkeypatch.setitem(fused.BLOCK, "cpu", elements)
    N, L, D, K = 60, 30, 5, 20
    inputs, _ = make((N, L, D), K, dtype=torch.float32)
    degree = inputs[2].shape[0] - 3
    saved = saved_by(lambda: kernel_mean(*inputs, torch.ones(N, L) if masked else None))
    assert max(x.numel() for x in saved) < N * L * K
    assert count_bytes(saved) <= count_bytes(inputs) + 4 * ((degree + 2) * N * K + N * L + K) + masked * (N * L + 4 * N)


# --- zero and NaN -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_a_zero_row_has_cosine_zero_and_gradient_zero(shape, dtype):
    inputs, gradient = make(shape, dtype=dtype)
    features, weight, alpha = inputs
    with torch.no_grad():
        features[2], weight[1] = 0, 0
    value = kernel_mean(*inputs)
    grad_features, grad_weight, grad_alpha = torch.autograd.grad(value, inputs, gradient)
    zero = alpha[2].to(value.dtype).expand(value.shape)
    torch.testing.assert_close(value[2], zero[2])
    torch.testing.assert_close(value[:, 1], zero[:, 1])
    assert value.isfinite().all()
    assert (grad_features[2] == 0).all()
    assert (grad_weight[1] == 0).all()
    for grad in (grad_features, grad_weight, grad_alpha):
        assert grad.isfinite().all()
        assert grad.any()


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_a_zero_row_has_finite_second_derivatives(shape):
    inputs, gradient = make(shape)
    with torch.no_grad():
        inputs[0][2], inputs[1][1] = 0, 0
    first = torch.autograd.grad(kernel_mean(*inputs), inputs, gradient, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    assert all(x.isfinite().all() for x in (*first, *second))


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_nan_stays_in_its_row(shape):
    inputs, gradient = make(shape, multiples=(3, -0.5))
    expected, _ = reference(*inputs, gradient)
    with torch.no_grad():
        inputs[0][-1] = torch.nan
    value = kernel_mean(*inputs).detach().numpy()
    assert np.isnan(value[-1]).all()
    np.testing.assert_allclose(value[:-1], expected[:-1], rtol=1e-11)


@pytest.mark.parametrize("shape", [(0, 5), (0, 6, 5)])
def test_empty_batch(shape):
    inputs, gradient = make(shape)
    value = kernel_mean(*inputs)
    assert value.shape == (0, 3)
    for x, grad in zip(inputs, torch.autograd.grad(value, inputs, gradient), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


# --- torch's other ways to differentiate ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_func_grad(shape):
    inputs, gradient = make(shape, multiples=(3, -0.5))
    _, expected = reference(*inputs, gradient)
    grads = torch.func.grad(lambda *xs: (kernel_mean(*xs) * gradient).sum(), argnums=(0, 1, 2))(*inputs)
    for mine, its in zip(grads, expected, strict=True):
        np.testing.assert_allclose(mine.detach(), its, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_vmap_over_weights_and_per_sample_gradients(shape):
    (features, weight, alpha), gradient = make(shape)
    stacked = torch.stack([weight, -2 * weight, weight.flip(0)])
    values = torch.func.vmap(kernel_mean, in_dims=(None, 0, None))(features, stacked, alpha)
    for value, one in zip(values, stacked, strict=True):
        np.testing.assert_allclose(value.detach(), reference(features, one, alpha, gradient)[0], rtol=1e-11)

    def loss(w, row, g):
        return (kernel_mean(row[None], w, alpha)[0] * g).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, features, gradient)
    for n in range(shape[0]):
        _, (_, expected, _) = reference(features[n : n + 1], weight, alpha, gradient[n : n + 1])
        np.testing.assert_allclose(per_sample[n].detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_forward_mode(shape):
    inputs, gradient = make(shape)
    inputs = [x.detach() for x in inputs]
    tangents = [torch.randn_like(x) for x in inputs]
    expected_value, gradients = reference(*inputs, gradient)
    expected = sum((t.numpy() * g).sum() for t, g in zip(tangents, gradients, strict=True))  # <g, J v> = <J^T g, v>
    value, tangent = torch.func.jvp(kernel_mean, tuple(inputs), tuple(tangents))
    np.testing.assert_allclose(value, expected_value, rtol=1e-11)
    assert (tangent * gradient).sum().item() == pytest.approx(expected, rel=1e-9)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        value, tangent = forward_ad.unpack_dual(kernel_mean(*duals))
    np.testing.assert_allclose(value, expected_value, rtol=1e-11)
    assert (tangent * gradient).sum().item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [VECTORS, TOKENS])
def test_batched_gradients(shape):
    inputs, gradient = make(shape)
    gradients = torch.stack([gradient, -2 * gradient, gradient.flip(0)])
    mine = torch.autograd.grad(kernel_mean(*inputs), inputs, gradients, is_grads_batched=True)
    for i, g in enumerate(gradients):
        for batched, expected in zip(mine, reference(*inputs, g)[1], strict=True):
            np.testing.assert_allclose(batched[i], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_second_derivatives(shape):
    inputs, _ = make(shape, classes=2, degree=4)
    assert torch.autograd.gradcheck(kernel_mean, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(kernel_mean, inputs)


# --- low precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 32), (4, 6, 32)])
@pytest.mark.parametrize(
    ("dtype", "autocast", "ulp"),
    [
        (torch.bfloat16, None, 2**-8),
        (torch.float16, None, 2**-11),
        (torch.float32, torch.bfloat16, 2**-8),
        (torch.float32, torch.float16, 2**-11),
    ],
)
def test_low_precision(shape, dtype, autocast, ulp):
    inputs, gradient = make(shape, degree=3, dtype=dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        value = kernel_mean(*inputs)
    assert value.dtype == torch.float32
    expected, gradients = reference(*inputs, gradient)
    slope = np.arange(4) @ inputs[2].detach().double().numpy()[2:]  # k'(1), the most that an error of t can grow by
    np.testing.assert_allclose(value.detach(), expected, rtol=0, atol=2 * ulp * slope)
    for x, mine, its in zip(inputs, torch.autograd.grad(value, inputs, gradient), gradients, strict=True):
        assert mine.dtype == x.dtype
        np.testing.assert_allclose(mine.double(), its, rtol=0, atol=8 * ulp * np.abs(its).max())


@pytest.mark.parametrize("shape", [(9, 32), (4, 6, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_as_on_cuda(monkeypatch, shape, dtype):
    """Cosines in float16 and gradients in bfloat16, whichever of the two the inputs are."""
    assert product_dtypes(dtype, "cuda") == (torch.float16, torch.bfloat16)
    assert product_dtypes(torch.float32, "cuda") == (torch.float32, torch.float32)
    monkeypatch.setattr(fused, "product_dtypes", lambda *_: (torch.float16, torch.bfloat16))
    inputs, gradient = make(shape, degree=3, dtype=dtype)
    value = kernel_mean(*inputs)
    expected, gradients = reference(*inputs, gradient)
    slope = np.arange(4) @ inputs[2].detach().double().numpy()[2:]
    np.testing.assert_allclose(value.detach(), expected, rtol=0, atol=2 * 2**-11 * slope)
    for x, mine, its in zip(inputs, torch.autograd.grad(value, inputs, gradient), gradients, strict=True):
        assert mine.dtype == x.dtype
        np.testing.assert_allclose(mine.double(), its, rtol=0, atol=8 * 2**-8 * np.abs(its).max())


@pytest.mark.parametrize("autocast", [False, True])
def test_end_points_count_as_zero_in_low_precision(autocast):
    (features, weight, _), _ = make(VECTORS, dtype=torch.float32 if autocast else torch.bfloat16, multiples=(3, -0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = kernel_mean(features, weight, torch.tensor([100.0, 10.0, 0.0, 1.0]))
    assert value.abs().max() < 1.1


def test_float64_is_left_alone_by_autocast():
    inputs, gradient = make(VECTORS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(inputs, gradient, 1e-11)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_mixed_dtypes_follow_features_and_weight(dtypes):
    inputs, _ = make(VECTORS)
    inputs = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    gradient = torch.randn(7, 3)
    value = kernel_mean(*inputs)
    assert value.dtype == torch.float32
    expected, gradients = reference(*inputs, gradient)
    np.testing.assert_allclose(value.detach(), expected, rtol=1e-5)
    for x, mine, its in zip(inputs, torch.autograd.grad(value, inputs, gradient), gradients, strict=True):
        assert mine.dtype == x.dtype
        close = 2 * torch.finfo(x.dtype).eps + 1e-5
        np.testing.assert_allclose(mine.double(), its, rtol=close, atol=close)


# --- facts of the method ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 16), (16, 9, 16)])
def test_the_constant_term_has_no_gradient_under_cross_entropy(shape):
    inputs, _ = make(shape, classes=10, dtype=torch.float32)
    F.cross_entropy(kernel_mean(*inputs), torch.randint(10, shape[:1])).backward()
    constant, linear = inputs[2].grad[2:4].abs().tolist()
    assert constant < 1e-6
    assert linear > 1e-3


@pytest.mark.parametrize("shape", [(500, 2), (100, 5, 2)])
def test_the_kernel_is_bounded_by_the_sum_of_its_coefficients(shape):
    inputs, _ = make(shape, classes=20, dtype=torch.float32, multiples=(3, -0.5))
    assert kernel_mean(*inputs).abs().max() <= inputs[2].sum() * (1 + 1e-5)
    unit = F.normalize(inputs[1][:1], dim=1).detach()
    assert kernel_mean(unit, *inputs[1:])[0, 0].item() == pytest.approx(inputs[2].sum().item(), rel=1e-5)
