"""Features and points of any length that their precision can hold, against the same head in float64."""

import copy

import pytest
import torch

from kernelhead import create_head, kernel_cross_entropy

N, D, C = 6, 32, 4  # of fewer features, some of the smallest vectors in float16 would be parallel
HEADS = {
    "cosine": {},
    "kernel": {"coefficients": "softplus"},
    "prototypes": {"prototypes": 2, "aggregate": "logsumexp"},
    "landmarks": {"landmarks": 16},
    "second_order": {},
    "expansion": {"width": 16},
}
SCALES = {
    torch.float32: (1e-38, 1e-30, 1e-21, 1e-10, 1e10, 1e17, 1e21, 1e38),
    torch.bfloat16: (1e-38, 1e-21, 1e21, 1e38),
    torch.float16: (6e-8, 1e-3, 6e4),
}
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
GRID = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]
every_scale = pytest.mark.parametrize(("dtype", "scale"), GRID, ids=[f"{d}-{s:g}" for d, s in GRID])


def directions(shape, scale, dtype):
    """Vectors with entries from half the scale to the scale, so that all can be held, and of either sign."""
    signs = torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    return (signs.double() * (0.5 + 0.5 * torch.rand(shape, dtype=torch.float64)) * scale).to(dtype)


def run(head, features, slopes):
    features = features.clone().requires_grad_()
    logits = head(features)
    (logits.double() * slopes).sum().backward()
    return logits.detach().double(), features.grad.double()


def assert_close(value, truth, close, dtype):
    """Equal up to rounding wherever the truth fits into the precision, and nowhere NaN."""
    fits = truth.abs() < 0.9 * torch.finfo(dtype).max
    assert not value.isnan().any()
    assert value[fits].isfinite().all()
    if fits.all():
        assert (value - truth).abs().max() <= close * truth.abs().max() + 2 * torch.finfo(dtype).tiny


@every_scale
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", [(N, D), (N, 3, D)], ids=["vectors", "tokens"])
def test_logits_and_gradients_are_those_of_float64(name, shape, dtype, scale):
    torch.manual_seed(0)
    head = create_head(name, D, C, **HEADS[name])
    if len(shape) == 3 and not head.pools:
        return
    head.train()(torch.randn(64, *shape[1:]))  # moves running statistics
    head = head.eval().to(dtype)
    if hasattr(head, "kernel"):
        with torch.no_grad():
            head.weight.copy_(directions(head.weight.shape, scale, dtype))
    features, slopes = directions(shape, scale, dtype), torch.randn(N, C, dtype=torch.float64)
    truth, true_gradient = run(copy.deepcopy(head).double(), features.double(), slopes)
    for each in (head, head.freeze()):
        logits, gradient = run(each, features, slopes)
        assert_close(logits, truth, CLOSE[dtype], dtype)
        assert_close(gradient, true_gradient, 10 * CLOSE[dtype], dtype)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("differentiated_twice", [False, True])
def test_slopes_that_float16_cannot_hold_lead_to_gradients_that_it_can(name, differentiated_twice):
    torch.manual_seed(0)
    head = create_head(name, D, C, **HEADS[name]).eval().half()
    features = directions((N, D), 6e4, torch.float16).requires_grad_()
    slopes = torch.full((N, C), 3e4, dtype=torch.float16)
    (gradient,) = torch.autograd.grad(head(features), features, slopes, create_graph=differentiated_twice)
    exact = features.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(copy.deepcopy(head).double()(exact), exact, slopes.double())
    assert truth.abs().max() < 60000
    assert_close(gradient.double(), truth, 0.05, torch.float16)


@every_scale
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_the_loss_and_its_gradients_are_those_of_float64(backend, dtype, scale):
    torch.manual_seed(0)
    alpha, target = torch.rand(8, dtype=torch.float64), torch.arange(N) % C

    def loss_and_gradients(features, weight):
        inputs = features.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = kernel_cross_entropy(
            *inputs, alpha.to(torch.promote_types(dtype, torch.float32)), target, backend=backend
        )
        return [each.detach().double() for each in (loss, *torch.autograd.grad(loss, inputs))]

    given = directions((N, D), scale, dtype), directions((C, D), scale, dtype)
    truth = loss_and_gradients(*(each.double() for each in given))
    for found, expected in zip(loss_and_gradients(*given), truth, strict=True):
        assert_close(found, expected, 10 * CLOSE[dtype], dtype)


@pytest.mark.parametrize("name", ["kernel", "landmarks"])
@pytest.mark.parametrize("scale", [1e-38, 1e38])
def test_compiled_too(name, scale):
    torch.manual_seed(0)
    head = create_head(name, D, C, **HEADS[name]).eval()
    features, slopes = directions((N, D), scale, torch.float32), torch.randn(N, C, dtype=torch.float64)
    truth, true_gradient = run(copy.deepcopy(head).double(), features.double(), slopes)
    logits, gradient = run(torch.compile(head, backend="aot_eager", fullgraph=True), features, slopes)
    assert_close(logits, truth, CLOSE[torch.float32], torch.float32)
    assert_close(gradient, true_gradient, CLOSE[torch.float32], torch.float32)
