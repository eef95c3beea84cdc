"""The kernel averaged over places in Triton kernels, against NumPy's float64. On the GPU where there is one, else
interpreted: as in `test_cross_entropy`, this file runs itself as a program, which prints what it found.
"""

import copy
import itertools
import json
from functools import partial

import numpy as np
import pytest
import torch
from numpy.polynomial import polynomial as P

# Of features and weight, and of the products: in half precision, or under autocast.
KINDS = {
    "bfloat16": ("bfloat16", "bfloat16", None),
    "float16": ("float16", "float16", None),
    "autocast to bfloat16": ("bfloat16", "float32", "bfloat16"),
    "autocast to float16": ("float32", "float32", "float16"),
}
# N, L, D, K: each below, at and above the sides of a tile.
SHAPES = [(1, 49, 3, 1), (2, 1, 64, 100), (1, 197, 96, 130), (3, 64, 64, 64), (2, 49, 256, 130), (7, 20, 17, 100)]
DEGREES = (1, 7, 20)
# Relative errors in norm. The unit vectors are float16, off by some 2^-12: so are cosines, and the m-th power m times
# as much. Slopes and vectors of a gradient's product are bfloat16: 2^-9 each when rounded, as on a GPU, and 2^-8 when
# cut, as by the interpreter; a gradient in bfloat16 adds one more.
TOLERANCE = {"value a degree": 2**-11, "alpha a power": 2**-11, "features": 2e-2, "weight": 2e-2}


@pytest.mark.parametrize("kind", list(KINDS))
def test_value_and_gradients(found, kind):
    cases = found[kind]
    assert len(cases) >= 4
    for name, errors in cases.items():
        for part, most in TOLERANCE.items():
            assert errors[part] < most, (name, errors)
        assert errors["dtypes"], name


def test_extreme_coefficients(found):
    for name, errors in found["extreme"].items():
        for part, most in TOLERANCE.items():
            assert errors[part] < most, (name, errors)
    assert found["all coefficients zero"] == [0, 0, 0]


def test_zero_vectors_have_zero_cosines_and_gradients(found):
    zero = found["zero vectors"]
    assert zero["value"] == 0  # its distance from a_0
    assert zero["gradients"] == [0, 0]
    assert max(zero["others"].values()) < 2e-2


def test_what_is_not_a_number_stays_in_its_sample(found):
    assert found["not a number"] == [False, True, False]


def test_frozen_inputs_get_no_gradient(found):
    assert len(found["frozen"]) == 6
    for wanted, (given, worst) in found["frozen"].items():
        assert given == json.loads(wanted)
        assert worst < 1e-6, wanted  # of what it is when all are wanted: powers that are not kept are another kernel


def test_it_repeats_itself(found):
    assert found["same bits"]
    assert found["same bits, a second backward pass"]
    assert found["same bits, an expanded gradient"]


def test_which_way_is_taken(found):
    others = ("many vectors", "float32", "wide", "high", "empty", "func", "fake")
    assert found["calls"] == {"half": 1, "autocast": 1, "vectors": 1} | dict.fromkeys(others, 0)


def test_vectors_are_maps_of_one_place(found):
    assert found["vectors"]


def test_gradients_can_be_differentiated(found):
    assert found["second derivatives"] < 0.1  # of products in bfloat16, as torch composes them


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_landmarks_of_a_map_under_autocast(found, layout):
    head = found[layout]
    assert head["calls"] == 1
    assert head["layout is kept"]
    assert max(head["errors"].values()) < 3e-2, head  # standardising takes out the mean, and leaves more of the errors


def test_frozen_heads_go_through_the_same_kernel(found):
    heads = found["frozen heads"]
    assert len(heads) == 5
    for name, head in heads.items():
        assert head["calls"] == {"autocast": 1, "float32": 0, "features that learn": 0}, name
        assert head["degree"] == (1 if name == "constant" else 6), name
        assert head["error"] < 1e-2, (name, head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def exact(features, weight, alpha, gradient):
    """Value (N, K) and pairs of gradients and sizes to measure errors by, in float64.

    The sizes are those of dL/df and dL/dw with what points along f and w still in them, and of the terms of dL/da_m.
    """
    f, w, a, g = (x.detach().cpu().double().numpy() for x in (features, weight, alpha, gradient))
    lengths = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (f, w)]
    lengths = [np.where(length > 0, length, np.inf) for length in lengths]
    u, v = f / lengths[0], w / lengths[1]
    t = u @ v.T
    share = np.broadcast_to(g[:, None] / f.shape[1], t.shape)
    slope = share * P.polyval(t, P.polyder(a[2:]))
    found = []
    for length, own, whole in zip(lengths, (u, v), (slope @ v, np.einsum("nlk,nld->kd", slope, u)), strict=True):
        tangent = whole - (whole * own).sum(-1, keepdims=True) * own
        found.append((tangent / length, np.linalg.norm(whole / length) or 1.0))
    powers = [share * t**m for m in range(len(a) - 2)]
    moments = [0, 0, *(power.sum() for power in powers)], [1, 1, *(np.abs(power).sum() for power in powers)]
    return P.polyval(t, a[2:]).mean(1), *found, moments


def relative(ours, wanted):
    return float(np.linalg.norm(ours - wanted) / (np.linalg.norm(wanted) or 1.0))


def compare(ours, inputs, gradient):
    value, *gradients = (x.detach().double().cpu().numpy() for x in ours)
    wanted, (features, features_size), (weight, weight_size), (moments, sizes) = exact(*inputs, gradient)
    degree = len(moments) - 3
    powers = np.array([1, 1, 1, *range(1, degree + 1)])
    return {
        "value a degree": relative(value, wanted) / degree,
        "alpha a power": float((np.abs(gradients[2] - moments) / sizes / powers).max()),
        "features": float(np.linalg.norm(gradients[0] - features) / features_size),
        "weight": float(np.linalg.norm(gradients[1] - weight) / weight_size),
    }


def make(shape, degree, kind="bfloat16", device="cpu"):
    """Features, of which some are near a weight or opposite to one, so that high powers of cosines count."""
    samples, places, width, classes = shape
    torch.manual_seed(samples + degree)
    weight, features = torch.randn(classes, width), torch.randn(samples, places, width)
    near = weight[torch.randint(classes, (samples, places))] * torch.randn(samples, places, 1)
    features = torch.where(torch.rand(samples, places, 1) < 0.5, near + 0.3 * features, features)
    alpha = torch.rand(degree + 3) + 0.1
    dtypes = [getattr(torch, name) for name in KINDS[kind][:2]] + [torch.float32]
    inputs = [x.to(device, dtype).requires_grad_() for x, dtype in zip((features, weight, alpha), dtypes, strict=True)]
    return inputs, torch.randn(samples, classes).to(device)


def compute(inputs, gradient, kind="bfloat16", **options):
    from kernelhead.ops.kernel_mean import kernel_mean

    autocast = KINDS[kind][2]
    with torch.autocast(gradient.device.type, getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
        value = kernel_mean(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return value, *torch.autograd.grad(value, wanted, gradient, **options)


def main():
    from interpreter import captured, choose_device
    from torch._subclasses import FakeTensorMode

    from kernelhead import KernelClassifier
    from kernelhead.ops import kernel_mean, kernel_pool

    device = choose_device()
    if device == "cpu":
        kernel_mean.runs_kernels = lambda device: True
        kernel_pool.ELEMENTS = 2048  # rather than many programs, each of which takes long to interpret

    calls, pool = [], kernel_pool.pool

    def watched(*arguments, **options):
        calls.append(arguments)
        return pool(*arguments, **options)

    kernel_pool.pool = watched
    report = {}
    tables = kernel_pool.POOL, kernel_pool.FEATURES, kernel_pool.WEIGHT
    small = {256: kernel_pool.Tiles(16, 32, 4, 2, 6)}  # many chunks of places, several samples a program
    combinations = list(itertools.product(SHAPES, DEGREES, (False, True)))
    for i, kind in enumerate(KINDS):
        report[kind] = {}
        for shape, degree, is_small in combinations[i :: 3 if device == "cuda" else 9]:
            kernel_pool.POOL, kernel_pool.FEATURES, kernel_pool.WEIGHT = [small] * 3 if is_small else tables
            inputs, gradient = make(shape, degree, kind, device)
            ours = compute(inputs, gradient, kind)
            dtypes = ours[0].dtype == torch.float32 and all(
                g.dtype == x.dtype for g, x in zip(ours[1:], inputs, strict=True)
            )
            report[kind][str((shape, degree, is_small))] = compare(ours, inputs, gradient) | {"dtypes": dtypes}
    kernel_pool.POOL, kernel_pool.FEATURES, kernel_pool.WEIGHT = tables

    report["extreme"] = {}
    shape = 2, 20, 17, 40
    for name, (degree, low, high) in {"a_20 alone": (20, 0, 1), "huge": (7, 1e4, 1e4), "tiny": (7, 1e-6, 1e-6)}.items():
        inputs, gradient = make(shape, degree, device=device)
        with torch.no_grad():
            inputs[2][:-1], inputs[2][-1] = low, high
        report["extreme"][name] = compare(compute(inputs, gradient), inputs, gradient)
    with torch.no_grad():
        inputs[2].zero_()
    report["all coefficients zero"] = [x.abs().max().item() for x in compute(inputs, gradient)[:3]]

    inputs, gradient = make(shape, 7, device=device)
    with torch.no_grad():
        inputs[0][1], inputs[0][0, 5], inputs[1][7] = 0, 0, 0
    ours = compute(inputs, gradient)
    distance = ours[0] - inputs[2][2]
    report["zero vectors"] = {
        "value": max(distance[1].abs().max().item(), distance[:, 7].abs().max().item()),
        "gradients": [x.abs().max().item() for x in (ours[1][1], ours[2][7])],
        "others": compare(ours, inputs, gradient),
    }
    inputs, gradient = make((3, 20, 17, 40), 7, device=device)
    with torch.no_grad():
        inputs[0][1, 19] = torch.nan
    report["not a number"] = compute(inputs, gradient)[0].isnan().all(1).tolist()

    inputs, gradient = make(shape, 7, device=device)
    first, report["frozen"] = compute(inputs, gradient), {}
    for wanted in itertools.product((False, True), repeat=3):
        if any(wanted) and not all(wanted):
            some = [x.detach().requires_grad_(wants) for x, wants in zip(inputs, wanted, strict=True)]
            value = kernel_mean.kernel_mean(*some)
            value.backward(gradient)
            pairs = [(value, first[0])] + [
                (x.grad, g) for x, g in zip(some, first[1:], strict=True) if x.grad is not None
            ]
            worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            report["frozen"][json.dumps(wanted)] = [x.grad is not None for x in some], worst

    def same(one, other):
        return all(map(torch.equal, one, other))

    report["same bits"] = same(first, compute(inputs, gradient))
    value, *gradients = compute(inputs, gradient, retain_graph=True)
    report["same bits, a second backward pass"] = same(gradients, torch.autograd.grad(value, inputs, gradient))
    summed = torch.autograd.grad(kernel_mean.kernel_mean(*inputs).sum(), inputs)
    report["same bits, an expanded gradient"] = same(summed, compute(inputs, torch.ones_like(gradient))[1:])

    def count(function):
        before = len(calls)
        function()
        return len(calls) - before

    features, weight, alpha = (x.detach() for x in inputs)
    full = features.float(), weight.float(), alpha
    many = features[:1, 0].expand(kernel_mean.FEW // len(weight) + 1, -1)
    report["calls"] = {
        "half": count(lambda: kernel_mean.kernel_mean(features, weight, alpha)),
        "autocast": count(lambda: compute([x.requires_grad_() for x in full], gradient, "autocast to bfloat16")),
        "vectors": count(lambda: kernel_mean.kernel_mean(features[:, 0], weight, alpha)),
        "many vectors": count(lambda: kernel_mean.kernel_mean(many, weight, alpha)),
        "float32": count(lambda: kernel_mean.kernel_mean(*full)),
        "wide": count(lambda: kernel_mean.kernel_mean(*make((2, 3, 257, 4), 2, device=device)[0])),
        "high": count(lambda: kernel_mean.kernel_mean(*make((2, 3, 8, 4), 33, device=device)[0])),
        "empty": count(lambda: kernel_mean.kernel_mean(features[:0], weight, alpha)),
        "func": count(lambda: torch.func.vmap(kernel_mean.kernel_mean, (None, 0, None))(features, weight[None], alpha)),
    }
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        report["calls"]["fake"] = count(lambda: kernel_mean.kernel_mean(fake.from_tensor(features), weight, alpha))

    inputs, gradient = make((9, 1, 17, 40), 7, device=device)
    with_places = compute(inputs, gradient)
    vectors = compute([inputs[0].detach()[:, 0].requires_grad_(), *inputs[1:]], gradient)
    report["vectors"] = same(with_places, [vectors[0], vectors[1][:, None], *vectors[2:]])

    inputs, gradient = make((2, 5, 8, 6), 3, device=device)
    found = compute(inputs, gradient, create_graph=True)[1:]
    second = torch.autograd.grad(sum(x.float().square().sum() for x in found), inputs)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(kernel_mean.kernel_mean(*doubles), doubles, gradient.double(), create_graph=True)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in found), doubles)
    pairs = zip(second, wanted, strict=True)
    report["second derivatives"] = max(relative(*(x.double().cpu().numpy() for x in pair)) for pair in pairs)

    for layout in ("contiguous_format", "channels_last"):
        torch.manual_seed(0)
        head = KernelClassifier(16, 5, landmarks=70, coefficients="softplus", pool="rkhs").to(device)
        maps = torch.randn(6, 16, 3, 3, device=device).contiguous(memory_format=getattr(torch, layout))
        exactly, doubles = copy.deepcopy(head).double(), maps.double().requires_grad_()
        maps.requires_grad_()
        gradient = torch.randn(6, 5, device=device)
        with torch.autocast(device, torch.bfloat16):
            before = len(calls)
            logits = head(maps)
        logits.backward(gradient.to(logits.dtype))
        exactly(doubles).backward(gradient.double())
        ours = {name: x.grad for name, x in head.named_parameters()} | {"maps": maps.grad}
        wanted = {name: x.grad for name, x in exactly.named_parameters()} | {"maps": doubles.grad}
        pairs = {name: [x.double().cpu().numpy() for x in (ours[name], wanted[name])] for name in wanted}
        report[layout] = {
            "calls": len(calls) - before,
            "layout is kept": maps.grad.stride() == maps.stride(),
            "errors": {name: relative(*pair) for name, pair in pairs.items()},
        }

    report["frozen heads"] = {}
    for name, options in {
        "class weights": {},
        "prototypes": {"prototypes": 3},
        "landmarks": {"landmarks": 70, "scale": 0.25},
        "landmarks as they are": {"landmarks": 70, "standardize": False},
        "constant": {},
    }.items():
        torch.manual_seed(1)
        head = KernelClassifier(16, 5, pool="rkhs", **options).to(device)
        with torch.no_grad():
            head.raw_alpha[-1] = -1.0  # a term less
            head.raw_alpha[3:] *= name != "constant"
            head(torch.randn(64, 16, 3, 3, device=device))
        frozen, maps = head.eval().freeze(), torch.randn(6, 16, 3, 3, device=device)
        exactly = copy.deepcopy(head).double()(maps.double()).detach()
        called = {"float32": count(partial(frozen, maps))}
        with torch.autocast(device, torch.bfloat16):
            called["features that learn"] = count(partial(frozen, maps.clone().requires_grad_()))
            called["autocast"] = count(partial(frozen, maps))
            logits = frozen(maps)
        report["frozen heads"][name] = {
            "calls": called,
            "degree": len(calls[-1][2]) - 3,
            "error": relative(logits.double().cpu().numpy(), exactly.cpu().numpy()),
        }

    if device == "cuda":
        inputs, gradient = make((40, 64, 64, 130), 7, "autocast to bfloat16", device)
        report["captured"] = captured(lambda *own: compute(own, gradient, "autocast to bfloat16"), *inputs)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
