"""Gaussian kervolution in Triton kernels, against NumPy's float64. On the GPU where there is one, else interpreted: as
in `test_conv3x3`, this file runs itself as a program, which prints what it found.
"""

import itertools
import json

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

# Of images, and of the result.
KINDS = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32 to bfloat16": ("float32", "bfloat16"),
    "float16 to float32": ("float16", "float32"),
    "float32 to float16": ("float32", "float16"),
}
# N, C, H, W, filters, side, stride, padding: pixels and filters below, at and above the sides of a tile.
SHAPES = [
    (2, 3, 8, 8, 16, 3, 1, 1),
    (3, 3, 7, 5, 5, 3, 2, 1),
    (1, 3, 13, 11, 17, 3, 1, 0),
    (1, 1, 9, 7, 33, 5, 2, 2),
    (5, 2, 4, 6, 16, 2, 3, 0),
    (1, 3, 1, 1, 1, 3, 1, 1),
]
# Relative, in norm. Gradients are sums in float32 of what the inputs give exactly, whatever the result is rounded to,
# once: by half a step on a GPU, by up to a whole one in the interpreter, which cuts bfloat16.
VALUE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
GRADIENTS = 1e-5


@pytest.mark.parametrize("kind", list(KINDS))
def test_value_and_gradients(found, kind):
    assert len(found[kind]) >= 2
    for name, errors in found[kind].items():
        assert errors["value"] < VALUE[KINDS[kind][1]], (name, errors)
        assert errors["weight"] < GRADIENTS, (name, errors)
        assert errors["log_gamma"] < GRADIENTS, (name, errors)
        assert errors["layouts"], name


def test_nothing_cancels(found):
    errors = found["far from zero"]
    assert max(errors["value"], errors["weight"], errors["log_gamma"]) < GRADIENTS


@pytest.mark.parametrize("size", ["1e4", "1e30"])
def test_huge_distances_are_zeros(found, size):
    huge = found[size]
    assert huge["values"] == 0
    assert huge["gradients"] == [0, 0]
    assert max(huge["beside others"].values()) < GRADIENTS


def test_what_is_not_a_number_stays_so(found):
    assert found["not a number"] == [False, True, True]


def test_it_repeats_itself(found):
    assert found["same bits"]
    assert found["same bits, an expanded gradient"]


def test_what_is_supported(found):
    refused = ["many taps", "float64", "half weight", "no images", "too small", "vectors", "other channels", "oblong"]
    assert found["supported"] == {"usual": True, "huge": False} | dict.fromkeys(refused, False)


def test_which_way_the_module_takes(found):
    ways = {"images": 1, "autocast": 1, "without gradients": 1, "frozen": 1}
    others = ["gradient of images", "hidden", "float64", "no images", "func", "forward mode", "dual numbers"]
    assert found["calls"] == ways | dict.fromkeys(others, 0)


def test_the_module_gives_what_a_convolution_would(found):
    assert found["dtypes"] == {"plain": "torch.float32", "autocast": "torch.bfloat16"}
    assert found["module"] < 1e-5  # of torch's way, in float32


def test_gradients_of_one_parameter_alone(found):
    assert found["weight alone"]
    assert found["log_gamma alone"]


def test_refusals(found):
    assert "autograd" in found["double backward"]
    assert "gradient of its input" in found["gradient of images"]


def test_compiled(found):
    assert found["compiled"]
    assert set(found["opcheck"].values()) == {"SUCCESS"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def exact(x, weight, log_gamma, gradient, stride, padding):
    """Value, dL/dw by its formula and dL/dlog gamma by central differences, in float64."""
    x, w, gamma, g = (t.detach().cpu().double().numpy() for t in (x, weight, log_gamma, gradient))
    x = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    difference = windows[:, None] - w[None, :, :, None, None]  # N, filters, C, H', W', side, side
    distance = (difference**2).sum((2, 5, 6))
    n = w[0].size

    def value(log_gamma):
        return np.exp(-np.exp(log_gamma) * distance / n)

    outer = g * value(gamma) * np.exp(gamma) / n
    step = 1e-5
    along = (g * (value(gamma + step) - value(gamma - step))).sum() / (2 * step)
    return value(gamma), 2 * np.einsum("nohw,nochwrs->ocrs", outer, difference), along


def relative(ours, wanted):
    ours = ours.detach().double().cpu().numpy()
    return float(np.linalg.norm(ours - wanted) / (np.linalg.norm(wanted) or 1.0))


def make(shape, kind="float32", device="cpu"):
    """Inputs and a gradient, which is positive on the whole: that of gamma is one sum, and should not vanish."""
    samples, channels, height, width, filters, side, stride, padding = shape
    torch.manual_seed(samples + filters)
    dtype, out = (getattr(torch, name) for name in KINDS[kind])
    x = torch.randn(samples, channels, height, width).to(device, dtype)
    weight = (0.5 * torch.randn(filters, channels, side, side)).to(device).requires_grad_()
    log_gamma = torch.tensor(0.3, device=device, requires_grad=True)
    sides = [(size + 2 * padding - side) // stride + 1 for size in (height, width)]
    gradient = (torch.randn(samples, filters, *sides) + 0.5).to(device, out)
    return (x, weight, log_gamma), gradient, {"stride": stride, "padding": padding, "dtype": out}


def compute(inputs, gradient, options, **more):
    from kernelhead.ops.kervolution import kervolution

    value = kervolution(*inputs, **options)
    wanted = [t for t in inputs if t.requires_grad]
    return value, *torch.autograd.grad(value, wanted, gradient, **more)


def compare(ours, inputs, gradient, options):
    wanted = exact(*inputs, gradient, options["stride"], options["padding"])
    return dict(zip(("value", "weight", "log_gamma"), map(relative, ours, wanted), strict=True))


def same(one, other):
    return all(map(torch.equal, one, other))


def main():
    from interpreter import captured, choose_device

    from kernelhead.backbones import kervolution as backbone
    from kernelhead.ops import kervolution as ops

    device = choose_device()
    last = {"memory_format": torch.channels_last}
    report, tables = {}, (ops.FORWARD, ops.BACKWARD)
    small = [ops.Tiles(16, 16, 4, 3), ops.Tiles(16, 8, 4, 6)]  # several blocks a program, several programs of filters
    if device == "cpu":
        tables = [table._replace(pixels=256) for table in tables]  # fewer programs, each of which takes long
    combinations = list(itertools.product((False, True), (False, True), SHAPES))
    for i, kind in enumerate(KINDS):
        report[kind] = {}
        for is_small, is_last, shape in combinations[i :: len(KINDS) * (1 if device == "cuda" else 2)]:
            ops.FORWARD, ops.BACKWARD = small if is_small else tables
            (x, weight, log_gamma), gradient, options = make(shape, kind, device)
            if is_last:
                x, weight = (t.detach().contiguous(**last).requires_grad_(t.requires_grad) for t in (x, weight))
            else:
                gradient = gradient.contiguous(**last)
            inputs = x, weight, log_gamma
            ours = compute(inputs, gradient, options)
            assert ops.supported(x, weight, options["stride"], options["padding"])
            layouts = ours[0].dtype == options["dtype"] and ours[0].is_contiguous(**last)
            layouts = layouts and (ours[1].dtype, ours[1].stride()) == (weight.dtype, weight.stride())
            name = str((shape, is_small, is_last))
            report[kind][name] = compare(ours, inputs, gradient, options) | {"layouts": layouts}
    ops.FORWARD, ops.BACKWARD = tables

    usual = make((2, 3, 7, 6, 5, 2, 1, 0), device=device)  # few taps: quick to interpret
    (x, weight, log_gamma), gradient, options = usual
    with torch.no_grad():
        far = (x + 1000, (weight + 1000).requires_grad_(), log_gamma)
    report["far from zero"] = compare(compute(far, gradient, options), far, gradient, options)
    for size in ("1e4", "1e30"):
        huge = x.new_full(x.shape, float(size)), weight, log_gamma
        ours = compute(huge, gradient, options)
        both = torch.cat([x, huge[0]]), weight, log_gamma
        beside = compute(both, torch.cat([gradient, gradient]), options)
        wanted = exact(x, weight, log_gamma, gradient, options["stride"], options["padding"])
        report[size] = {
            "values": ours[0].abs().max().item(),
            "gradients": [t.abs().max().item() for t in ours[1:]],
            "beside others": {"weight": relative(beside[1], wanted[1]), "log_gamma": relative(beside[2], wanted[2])},
        }
    broken = x.clone()
    broken[0, 0, 3, 3] = torch.nan
    ours = compute((broken, weight, log_gamma), gradient, options)
    report["not a number"] = [t.isnan().all().item() for t in ours]

    first = compute(*usual)
    report["same bits"] = same(first, compute(*usual))
    expanded = gradient.new_ones(()).expand(gradient.shape)
    report["same bits, an expanded gradient"] = same(
        compute(usual[0], expanded, options), compute(usual[0], torch.ones_like(gradient), options)
    )
    alone = compute((x, weight, log_gamma.detach()), gradient, options)
    report["weight alone"] = same(alone, first[:2])
    alone = compute((x, weight.detach(), log_gamma), gradient, options)
    report["log_gamma alone"] = same(alone, (first[0], first[2]))
    try:
        sum(t.sum() for t in compute(*usual, create_graph=True)[1:]).backward()
    except RuntimeError as refusal:
        report["double backward"] = str(refusal)
    try:
        compute((x.clone().requires_grad_(), weight, log_gamma), gradient, options)
    except RuntimeError as refusal:
        report["gradient of images"] = str(refusal)

    report["supported"] = {
        "usual": ops.supported(x, weight, 1, 0),
        "huge": ops.supported(x[:1].expand(2**23, -1, -1, -1), weight, 1, 0),
        "many taps": ops.supported(x, weight.new_empty(4, 3, 4, 4), 1, 0),
        "float64": ops.supported(x.double(), weight, 1, 0),
        "half weight": ops.supported(x, weight.bfloat16(), 1, 0),
        "no images": ops.supported(x[:0], weight, 1, 0),
        "too small": ops.supported(x[:, :, :1], weight, 1, 0),
        "vectors": ops.supported(x[0], weight, 1, 0),
        "other channels": ops.supported(x[:, :2], weight, 1, 0),
        "oblong": ops.supported(x, weight[:, :, :1], 1, 0),
    }
    report |= examine_module(backbone, ops, device)
    arguments = (x, weight, log_gamma, 1, 0, torch.float32)
    report["opcheck"] = torch.library.opcheck(ops._forward, arguments)
    if device == "cuda":
        inputs, gradient, options = make((40, 3, 32, 32, 16, 3, 1, 1), "float32 to bfloat16", device)
        report["captured"] = captured(lambda *own: compute(own, gradient, options), *inputs)
    print(json.dumps(report))


def examine_module(backbone, ops, device):
    if device == "cpu":
        original = backbone.runs_kernels
        backbone.runs_kernels = lambda device: True
    calls, forward = [], ops.kervolution

    def watched(*arguments, **options):
        calls.append(arguments)
        return forward(*arguments, **options)

    def count(layer, images, enabled=False):
        before = len(calls)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            layer(images)
        return len(calls) - before

    torch.backends.cudnn.allow_tf32 = False  # torch's way is to be compared with
    torch.manual_seed(0)
    layer = backbone.GaussianKervolution2d(3, 5, 3, stride=2, padding=1).to(device)
    frozen = backbone.GaussianKervolution2d(3, 5, 3).to(device).requires_grad_(False)
    hidden = backbone.GaussianKervolution2d(4, 5, 3).to(device)
    images = torch.randn(2, 3, 9, 7, device=device)
    ops.kervolution = watched
    found = {
        "images": count(layer, images),
        "autocast": count(layer, images, True),
        "frozen": count(frozen, images),
        "gradient of images": count(layer, images.clone().requires_grad_()),
        "hidden": count(hidden, torch.randn(2, 4, 9, 7, device=device)),
        "float64": count(layer.double(), images.double()),
        "no images": count(layer.float(), images[:0]),
    }
    with torch.no_grad():
        found["without gradients"] = count(layer, images.clone().requires_grad_())
    before = len(calls)
    torch.func.grad(lambda own: torch.func.functional_call(layer, own, images).sum())(dict(layer.named_parameters()))
    found["func"] = len(calls) - before
    torch.func.jvp(layer, (images,), (images,))
    found["forward mode"] = len(calls) - before
    with forward_ad.dual_level():
        found["dual numbers"] = count(layer, forward_ad.make_dual(images, images))
    ops.kervolution = forward

    def run(function, images, enabled):
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            value = function(images)
        return value, *torch.autograd.grad(value.float().square().sum(), list(layer.parameters()))

    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    plain, autocast = (run(layer, images, enabled) for enabled in (False, True))
    pairs = [(run(compiled, images, enabled), wanted) for enabled, wanted in ((False, plain), (True, autocast))]
    torchs = [t.detach().double().cpu().numpy() for t in run(layer, images.clone().requires_grad_(), False)]
    if device == "cpu":
        backbone.runs_kernels = original
    return {
        "calls": found,
        "dtypes": {"plain": str(plain[0].dtype), "autocast": str(autocast[0].dtype)},
        "module": max(map(relative, plain, torchs)),
        "compiled": all(same(one, other) for one, other in pairs),
    }


if __name__ == "__main__":
    main()
