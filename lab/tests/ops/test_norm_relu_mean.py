"""BatchNorm, ReLU and mean over positions in Triton kernels, against NumPy's float64.

On the GPU where there is one, else interpreted: this file runs itself as a program, which prints what it found.
"""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

# N, L, C: each below, at and above the sides of a tile.
SHAPES = [(2, 1, 3), (1, 2, 1), (65, 1, 64), (3, 49, 65), (4, 64, 64), (2, 130, 100), (9, 6, 130), (130, 3, 17)]
DTYPES = ["bfloat16", "float16"]
# Relative errors in norm. All is float32 except dL/dy, which is rounded to y's precision. Its error is relative to its
# size before BatchNorm takes out mean and slope: with two positions nothing would be left.
TOLERANCE = {"value": 1e-5, "weight": 1e-5, "bias": 1e-5, "running mean": 1e-5, "running var": 1e-5}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-10}
EPS, MOMENTUM = 1e-5, 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(found, shape, dtype):
    errors = found[dtype][str(shape)]
    for part, most in TOLERANCE.items():
        assert errors[part] < most, (part, errors)
    assert errors["y"] < ROUNDING[dtype]
    assert errors["batches"] == 8
    assert errors["dtypes"]


def test_many_parts(found):
    for part, most in TOLERANCE.items():
        assert found["many parts"][part] < most
    assert found["many parts"]["y"] < ROUNDING["bfloat16"]


def test_a_small_variance_beside_a_large_mean(found):
    """A mean of 100 deviations, in the first batch: in squares of the values float32 would leave few digits."""
    for part, most in TOLERANCE.items():
        assert found["large mean"][part] < most, part


def test_a_channel_that_does_not_vary(found):
    assert found["constant"] == {"value": 0, "gradients": 0, "running var": 0}


def test_a_zero_gradient(found):
    assert found["zero gradient"] == [0, 0, 0]


def test_what_is_not_a_number_stays_in_its_channel(found):
    assert found["not a number"] == {"value": [False, True, False], "running var": [False, True, False]}


def test_frozen_inputs_get_no_gradient(found):
    assert len(found["frozen"]) == 7
    for wanted, (given, same) in found["frozen"].items():
        assert given == json.loads(wanted)
        assert same, wanted
    assert found["without gradients"]


def test_it_repeats_itself(found):
    assert found["same bits"]
    assert found["same bits, a second backward pass"]
    assert found["same bits, an expanded gradient"]


def test_gradients_can_be_differentiated(found):
    assert max(found["second derivatives"]) < 2e-2  # y's is rounded to bfloat16 twice
    assert found["batched gradients"] < 2e-2


def test_which_way_is_taken(found):
    taken = ["maps", "float16", "vectors", "grad mode off"]
    assert {way: calls for way, calls in found["calls"].items() if calls} == dict.fromkeys(taken, 1)
    assert len(found["calls"]) == len(taken) + 13


def test_a_single_position_has_no_variance(found):
    assert found["single position"].startswith("Expected more than 1 value per channel when training")


@pytest.mark.parametrize("case", ["contiguous", "channels last", "tokens", "normalized", "vectors"])
def test_expansion_head_agrees_with_the_plain_way(found, case):
    head = found["heads"][case]
    assert head["calls"] == 1
    assert head["same dtype"]
    assert head["layout is kept"]
    # Of two ways with products in bfloat16, which the plain one has between all its operations.
    assert max(head["errors"].values()) < 3e-2, head
    assert head["batches"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def exact(y, weight, bias, gradient, running_mean, running_var):
    """Value, gradients of y, weight and bias, new running statistics, and a size to measure errors of dL/dy by.

    In float64, channel by channel.
    """
    samples, positions, channels = y.shape
    rows = samples * positions
    value, dy, whole = np.empty((samples, channels)), np.empty(y.shape), np.empty(y.shape)
    found = np.empty((4, channels))
    for c in range(channels):
        column = y[:, :, c].reshape(-1)
        deviation = np.sqrt(column.var() + EPS)
        x = (column - column.mean()) / deviation
        z = x * weight[c] + bias[c]
        value[:, c] = np.maximum(z, 0).reshape(samples, positions).mean(1)
        dz = np.repeat(gradient[:, c] / positions, positions) * (z > 0)
        # The Jacobian of x: what is constant over a channel, and what points along x, is taken out.
        jacobian = (np.eye(rows) - 1 / rows - np.outer(x, x) / rows) / deviation
        dy[:, :, c] = (jacobian @ dz * weight[c]).reshape(samples, positions)
        whole[:, :, c] = (dz * weight[c] / deviation).reshape(samples, positions)
        mean = (1 - MOMENTUM) * running_mean[c] + MOMENTUM * column.mean()
        var = (1 - MOMENTUM) * running_var[c] + MOMENTUM * column.var(ddof=1)
        found[:, c] = (dz * x).sum(), dz.sum(), mean, var
    return (value, dy, *found), np.linalg.norm(whole)


def relative(ours, wanted):
    ours, wanted = (x.detach().double().cpu().numpy() if isinstance(x, torch.Tensor) else x for x in (ours, wanted))
    return float(np.linalg.norm(ours - wanted) / (np.linalg.norm(wanted) or 1.0))


def make(shape, dtype="bfloat16", device="cpu", mean=0.5):
    """y, weight and bias as leaves, a gradient, and a BatchNorm that has seen 7 batches."""
    samples, _, channels = shape
    torch.manual_seed(sum(shape))
    y = (mean + torch.randn(shape)).to(getattr(torch, dtype))
    norm = nn.BatchNorm1d(channels, eps=EPS, momentum=MOMENTUM)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels))
        norm.bias.copy_(torch.randn(channels))
        norm.running_mean.copy_(torch.randn(channels))
        norm.running_var.copy_(torch.rand(channels) + 0.5)
        norm.num_batches_tracked.fill_(7)
    gradient = torch.randn(samples, channels) + 0.3
    return y.to(device).requires_grad_(), norm.to(device), gradient.to(device)


def compute(y, norm, gradient, **options):
    """Value and gradients, without a trace in `norm`."""
    from kernelhead_lab.heads.norm_relu_mean import norm_relu_mean

    value = norm_relu_mean(y, copy_of(norm, norm.weight, norm.bias))
    return value, *torch.autograd.grad(value, (y, norm.weight, norm.bias), gradient, **options)


def copy_of(norm, weight, bias):
    """With statistics of its own and these parameters."""
    own = copy.deepcopy(norm)
    own.weight, own.bias = weight, bias
    return own


def compare(y, norm, gradient):
    from kernelhead_lab.heads.norm_relu_mean import norm_relu_mean

    given = y, norm.weight, norm.bias, gradient, norm.running_mean, norm.running_var
    wanted, size = exact(*(x.detach().cpu().double().numpy() for x in given))
    value = norm_relu_mean(y, norm)
    gradients = torch.autograd.grad(value, given[:3], gradient)
    names = "value", "y", "weight", "bias", "running mean", "running var"
    ours = value, *gradients, norm.running_mean, norm.running_var
    errors = {name: relative(*pair) for name, *pair in zip(names, ours, wanted, strict=True)}
    errors["y"] *= float(np.linalg.norm(wanted[1]) / size)
    dtypes = value.dtype == torch.float32 and all(g.dtype == x.dtype for g, x in zip(gradients, given, strict=False))
    return errors | {"batches": norm.num_batches_tracked.item(), "dtypes": dtypes}


def main():
    from interpreter import captured, choose_device
    from torch._subclasses import FakeTensorMode

    from kernelhead_lab.heads import create_lab_head
    from kernelhead_lab.heads import norm_relu_mean as ops
    from kernelhead_lab.heads import norm_relu_mean_kernels as kernels

    device = choose_device()
    if device == "cpu":
        ops.runs_kernels = lambda device: True

    calls, pool = [], kernels.pool

    def watched(*arguments, **options):
        calls.append(arguments)
        return pool(*arguments, **options)

    kernels.pool = watched
    report = {dtype: {str(shape): compare(*make(shape, dtype, device)) for shape in SHAPES} for dtype in DTYPES}

    kept = kernels.PARTS, kernels.PROGRAMS, kernels.STATISTICS, kernels.SUMS, kernels.BLOCKS
    kernels.PARTS, kernels.PROGRAMS, kernels.BLOCKS = 5, 10, 2
    kernels.STATISTICS = kernels.SUMS = kernels.Tiles(16, 32, 4)
    report["many parts"] = compare(*make((70, 4, 50), device=device))
    kernels.PARTS, kernels.PROGRAMS, kernels.STATISTICS, kernels.SUMS, kernels.BLOCKS = kept

    y, norm, gradient = make((8, 30, 20), "float16", device, mean=100.0)
    norm.running_mean.zero_()
    report["large mean"] = compare(y, norm, gradient)

    y, norm, gradient = make((3, 5, 4), device=device)
    with torch.no_grad():
        y.fill_(1.7)
        norm.bias.fill_(-0.1)
        norm.running_var.zero_()
    value, *gradients = compute(y, norm, gradient)
    ops.norm_relu_mean(y, norm)
    report["constant"] = {
        "value": value.abs().max().item(),
        "gradients": max(x.abs().max().item() for x in gradients),
        "running var": norm.running_var.abs().max().item(),
    }

    y, norm, gradient = make((3, 20, 40), device=device)
    report["zero gradient"] = [x.abs().max().item() for x in compute(y, norm, torch.zeros_like(gradient))[1:]]

    spoilt, other, _ = make((3, 20, 3), device=device)
    with torch.no_grad():
        spoilt[1, 7, 1] = torch.nan
    value = ops.norm_relu_mean(spoilt, other)
    report["not a number"] = {
        "value": value.isnan().all(0).tolist(),
        "running var": other.running_var.isnan().tolist(),
    }

    def same(one, other):
        return all(map(torch.equal, one, other))

    first, report["frozen"] = compute(y, norm, gradient), {}
    for wanted in itertools.product((False, True), repeat=3):
        leaves = [x.detach().clone() for x in (y, norm.weight, norm.bias)]
        some = [leaves[0], *(nn.Parameter(x) for x in leaves[1:])]
        some = [x.requires_grad_(wants) for x, wants in zip(some, wanted, strict=True)]
        value = ops.norm_relu_mean(some[0], copy_of(norm, *some[1:]))
        if not any(wanted):
            report["without gradients"] = torch.equal(value, first[0]) and not value.requires_grad
            continue
        value.backward(gradient)
        pairs = [(value, first[0]), *((x.grad, g) for x, g in zip(some, first[1:], strict=True) if x.grad is not None)]
        report["frozen"][json.dumps(wanted)] = (
            [x.grad is not None for x in some],
            all(itertools.starmap(torch.equal, pairs)),
        )

    report["same bits"] = same(first, compute(y, norm, gradient))
    value, *gradients = compute(y, norm, gradient, retain_graph=True)
    again = torch.autograd.grad(value, (y, norm.weight, norm.bias), gradient)
    report["same bits, a second backward pass"] = same(gradients, again)
    value = ops.norm_relu_mean(y, copy_of(norm, norm.weight, norm.bias))
    summed = torch.autograd.grad(value.sum(), (y, norm.weight, norm.bias))
    report["same bits, an expanded gradient"] = same(summed, compute(y, norm, torch.ones_like(gradient))[1:])

    def twice(y, norm, gradient, function):
        """Derivatives of the squared gradients."""
        leaves = y, norm.weight, norm.bias
        gradients = torch.autograd.grad(function(y, norm), leaves, gradient, create_graph=True)
        return torch.autograd.grad(sum(x.to(gradient.dtype).square().sum() for x in gradients), leaves)

    def plain(y, norm):
        return torch.relu(norm(y.mT)).mean(2)

    y, norm, gradient = make((4, 5, 6), device=device)
    exactly = y.detach().double().requires_grad_(), copy.deepcopy(norm).double(), gradient.double()
    pairs = zip(twice(y, norm, gradient, ops.norm_relu_mean), twice(*exactly, plain), strict=True)
    report["second derivatives"] = list(itertools.starmap(relative, pairs))
    value = ops.norm_relu_mean(y, norm)
    both = torch.stack([gradient, 2 * gradient])
    batched = torch.autograd.grad(value, y, both, is_grads_batched=True)[0]
    report["batched gradients"] = relative(batched[1], 2 * compute(y, norm, gradient)[1])

    def count(function, dtype=torch.bfloat16, enabled=True):
        before = len(calls)
        with torch.autocast(device, dtype, enabled=enabled):
            function()
        return len(calls) - before

    def head_of(change=lambda head: None, **options):
        torch.manual_seed(0)
        plain = {"normalized": False, "standardized": False, "scale": 1.0}
        head = create_lab_head("expansion_variant", 16, 5, width=70, **{**plain, **options}).to(device)
        nn.init.normal_(head.norm.bias)
        change(head)
        return head

    def hooked(part):
        return lambda head: getattr(head, part).register_forward_hook(lambda *_: None)

    def without_momentum(head):
        head.norm.momentum = None

    def half(head):
        head.norm.half()

    def plainly(head):
        head.norm = nn.BatchNorm1d(70, affine=False, device=device)

    maps = torch.randn(6, 16, 3, 3, device=device)
    head = head_of()

    def summed_logits(features):
        buffers = {name: x.clone() for name, x in head.named_buffers()}  # which torch.func is not to change
        return torch.func.functional_call(head, buffers, features).float().sum()

    compiled = torch.compile(head, backend="eager", fullgraph=True)
    report["calls"] = {
        "maps": count(lambda: head_of()(maps)),
        "float16": count(lambda: head_of()(maps), torch.float16),
        "vectors": count(lambda: head_of(pool=None)(maps[:, :, 0, 0])),
        "grad mode off": count(torch.no_grad()(lambda: head_of()(maps))),
        "float32": count(lambda: head_of()(maps), enabled=False),
        "evaluated": count(lambda: head_of(lambda head: head.eval())(maps)),
        "frozen norm": count(lambda: head_of(lambda head: head.norm.eval())(maps)),
        "hook of norm": count(lambda: head_of(hooked("norm"))(maps)),
        "hook of expand": count(lambda: head_of(hooked("expand"))(maps)),
        "cumulative": count(lambda: head_of(without_momentum)(maps)),
        "half norm": count(lambda: head_of(half)(maps), torch.float16),
        "not affine": count(lambda: head_of(plainly)(maps)),
        "empty": count(lambda: head_of(lambda head: head.norm.eval())(maps[:0])),
        "func": count(lambda: torch.func.grad(summed_logits)(maps)),
        "compiled": count(lambda: compiled(maps)),
        "traced": count(lambda: torch.jit.trace(head, maps, check_trace=False)),
    }
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        report["calls"]["fake"] = count(lambda: head(fake.from_tensor(maps)))
    try:
        count(lambda: head_of()(maps[:1, :, :1, :1]))
    except ValueError as error:
        report["single position"] = str(error)

    cases = {
        "contiguous": (maps, {}),
        "channels last": (maps.contiguous(memory_format=torch.channels_last), {}),
        "tokens": (maps.flatten(2).mT.contiguous(), {"standardized": True}),
        "normalized": (maps, {"normalized": True, "dropout": 0.5}),
        "vectors": (maps[:, :, 0, 0].contiguous(), {"pool": None}),
    }
    report["heads"] = {}
    for case, (features, options) in cases.items():
        ways, before = [], len(calls)
        for runs in (ops.runs_kernels, lambda device: False):
            usual, ops.runs_kernels = ops.runs_kernels, runs
            head, leaf = head_of(**options), features.detach().clone().requires_grad_()
            torch.manual_seed(1)  # of the dropout
            with torch.autocast(device, torch.bfloat16):
                logits = head(leaf)
            logits.float().square().sum().backward()
            ops.runs_kernels = usual
            tensors = {name: x.grad for name, x in head.named_parameters()} | dict(head.named_buffers())
            ways.append(tensors | {"logits": logits, "features": leaf.grad})
        batches = ways[0].pop("norm.num_batches_tracked").item()
        report["heads"][case] = {
            "calls": len(calls) - before,
            "same dtype": all(ways[0][name].dtype == ways[1][name].dtype for name in ways[0]),
            "layout is kept": leaf.grad.stride() == leaf.stride(),
            "errors": {name: relative(ways[0][name], ways[1][name]) for name in ways[0]},
            "batches": batches,
        }

    if device == "cuda":
        y, norm, gradient = make((40, 64, 130), device=device)

        def step(y, weight, bias):
            own = copy_of(norm, nn.Parameter(weight), nn.Parameter(bias))
            value = ops.norm_relu_mean(y, own)
            return value, *torch.autograd.grad(value, (y, own.weight, own.bias), gradient), own.running_var

        report["captured"] = captured(step, y, norm.weight, norm.bias)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
