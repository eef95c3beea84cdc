"""Second-order pooling in Triton kernels, against NumPy's float64. On the GPU where there is one, else interpreted: as
in `test_conv3x3`, this file runs itself as a program, which prints what it found.
"""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

# Of the places, and of the embedding.
KINDS = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "bfloat16 to float32": ("bfloat16", "float32"),
    "float16 to bfloat16": ("float16", "bfloat16"),
}
# N, L, D: each below, at and above the sides of a tile.
SHAPES = [(1, 49, 3), (3, 64, 64), (2, 1, 17), (2, 131, 24), (1, 65, 128), (5, 16, 16), (2, 7, 97)]
# Relative, in norm. Moments are exact products added up in float32; the embedding is rounded once, by half a step on a
# GPU, by up to a whole one in the interpreter, which cuts bfloat16. Slopes and places of the gradient are bfloat16.
VALUE = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
GRADIENT = 2e-2
EPS = 1e-5


@pytest.mark.parametrize("kind", list(KINDS))
def test_value_and_gradient(found, kind):
    assert len(found[kind]) >= 3
    for name, errors in found[kind].items():
        assert errors["value"] < VALUE[KINDS[kind][1]], (name, errors)
        assert errors["gradient"] < GRADIENT, (name, errors)
        assert errors["layouts"], name


def test_embeddings_have_the_length_of_as_many_features(found):
    assert found["length"] == pytest.approx(17**0.5, rel=1e-5)


def test_zero_maps_have_zero_embeddings_and_gradients(found):
    zero = found["zeros"]
    assert zero["zeros"] == [0, 0]
    assert zero["finite"]
    assert zero["a feature"] == 0  # one that is 0 everywhere has no part in the embedding
    assert max(zero["others"].values()) < GRADIENT


def test_squares_may_overflow_half_precision(found):
    assert max(found["large"].values()) < GRADIENT


def test_squares_may_vanish_in_half_precision(found):
    assert max(found["small"].values()) < GRADIENT


def test_what_is_not_a_number_stays_in_its_sample(found):
    assert found["not a number"] == [[False, True, False], [False, True, False]]


def test_it_repeats_itself(found):
    assert found["same bits"]
    assert found["same bits, alone"]
    assert found["same bits, an expanded gradient"]


def test_what_is_supported(found):
    refused = dict.fromkeys(["float32", "float64", "wide", "no samples", "double embedding"], False)
    assert found["supported"] == {"usual": True, "float16": True} | refused


def test_gradients_cannot_be_differentiated_again(found):
    assert "autograd" in found["double backward"]


def test_which_way_the_head_takes(found):
    refused = ["float32", "wide", "no samples", "func", "forward mode", "dual numbers"]
    assert found["calls"] == {"half": 1, "autocast": 1, "tokens": 1} | dict.fromkeys(refused, 0)


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_head_under_autocast(found, layout):
    head = found[layout]
    assert head["dtypes"] == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"]
    assert head["layout is kept"]
    assert max(head["errors"]) < GRADIENT
    assert head["compiled"]


def test_compiled(found):
    assert set(found["opcheck"].values()) == {"SUCCESS"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_on_two_streams(found):
    assert found["captured"]


# --- the program ------------------------------------------------------------------------------------------------------


def exact(places, gradient):
    """Embedding (N, D * D) and dL/dplaces (N, L, D), in float64."""
    x, g = (t.detach().cpu().double().numpy() for t in (places, gradient))
    samples, count, width = x.shape
    square = (x**2).mean((1, 2), keepdims=True)
    square[square == 0] = np.inf
    moments = np.einsum("nli,nlj->nij", x, x) / count / square
    rooted = moments / np.sqrt(np.abs(moments) + EPS)
    length = np.linalg.norm(rooted, axis=(1, 2), keepdims=True)
    length[length == 0] = np.inf
    g = g.reshape(samples, width, width)
    length /= np.sqrt(width)
    g = (g - rooted * ((g * rooted).sum((1, 2), keepdims=True) / (width * length**2))) / length
    # d/ds of s (|s| + eps)^-1/2
    g = g * ((np.abs(moments) + EPS) ** -0.5 - 0.5 * np.abs(moments) * (np.abs(moments) + EPS) ** -1.5)
    unscaled = np.einsum("nli,nij->nlj", x, g + g.swapaxes(1, 2)) / count / square
    # Through the mean square, whose gradient is 2 x / (L D): what is along x goes.
    along = (unscaled * x).sum((1, 2), keepdims=True) / (square * count * width)
    return (rooted / length).reshape(samples, -1), unscaled - along * x


def relative(ours, wanted):
    ours = ours.detach().double().cpu().numpy()
    return float(np.linalg.norm(ours - wanted) / (np.linalg.norm(wanted) or 1.0))


def make(shape, kind="bfloat16", device="cpu"):
    samples, _, width = shape
    torch.manual_seed(samples + width)
    dtype, out = (getattr(torch, name) for name in KINDS[kind])
    places = (torch.randn(shape) + 0.5).to(device, dtype).requires_grad_()
    return places, torch.randn(samples, width**2).to(device, out)


def compute(places, gradient, **options):
    from kernelhead.ops.second_order import second_order

    value = second_order(places, gradient.dtype, EPS)
    return value, *torch.autograd.grad(value, places, gradient, **options)


def compare(ours, places, gradient):
    return dict(zip(("value", "gradient"), map(relative, ours, exact(places, gradient)), strict=True))


def same(one, other):
    return all(map(torch.equal, one, other))


def main():
    from interpreter import captured, choose_device

    from kernelhead.heads import second_order as heads
    from kernelhead.ops import second_order as ops

    device = choose_device()
    report = {}
    layouts = {
        "contiguous": lambda x: x,
        "map": lambda x: x.mT.contiguous().mT,  # as the places of a map that is not channels last
        "sliced": lambda x: torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]],
    }
    combinations = list(itertools.product(SHAPES, layouts))
    for i, kind in enumerate(KINDS):
        report[kind] = {}
        for shape, layout in combinations[i :: len(KINDS)]:
            places, gradient = make(shape, kind, device)
            places = layouts[layout](places.detach()).requires_grad_()
            ours = compute(places, gradient)
            kept = ours[0].dtype == gradient.dtype and ours[1].dtype == places.dtype
            kept = kept and (layout == "sliced" or ours[1].stride() == places.stride())
            report[kind][str((shape, layout))] = compare(ours, places, gradient) | {"layouts": kept}

    usual = make((3, 9, 17), "bfloat16 to float32", device)
    places, gradient = usual
    first = compute(*usual)
    report["length"] = first[0].norm(dim=1).mean().item()
    with torch.no_grad():
        zeros = places.clone()
        zeros[1], zeros[:, :, 5] = 0, 0
    ours = compute(zeros.requires_grad_(), gradient)
    others = compute(*(t.detach()[::2].requires_grad_() for t in (zeros, gradient)))
    report["zeros"] = {
        "zeros": [t[1].abs().max().item() for t in ours],
        "finite": all(t.isfinite().all().item() for t in ours),
        "a feature": ours[0].view(3, 17, 17)[:, 5].abs().max().item(),
        "others": compare(others, zeros[::2], gradient[::2]),
    }
    for name, size in {"large": 1e4, "small": 1e-4}.items():
        scaled = (size * torch.randn(2, 9, 17)).to(device, torch.float16).requires_grad_()
        report[name] = compare(compute(scaled, gradient[:2]), scaled, gradient[:2])
    broken = places.detach().clone()
    broken[1, 3, 4] = torch.nan
    ours = compute(broken.requires_grad_(), gradient)
    report["not a number"] = [t.isnan().view(3, -1).any(1).tolist() for t in ours]

    report["same bits"] = same(first, compute(*usual))
    alone = compute(places.detach()[1:2].requires_grad_(), gradient[1:2])
    report["same bits, alone"] = same(alone, [t[1:2] for t in first])
    expanded = compute(places, gradient.new_ones(()).expand(gradient.shape))
    report["same bits, an expanded gradient"] = same(expanded, compute(places, torch.ones_like(gradient)))
    try:
        compute(*usual, create_graph=True)[1].float().sum().backward()
    except RuntimeError as refusal:
        report["double backward"] = str(refusal)

    bfloat16 = torch.bfloat16
    report["supported"] = {
        "usual": ops.supported(places, bfloat16),
        "float16": ops.supported(places.half(), torch.float32),
        "float32": ops.supported(places.float(), bfloat16),
        "float64": ops.supported(places.double(), bfloat16),
        "wide": ops.supported(places.new_empty(1, 2, 129), bfloat16),
        "no samples": ops.supported(places[:0], bfloat16),
        "double embedding": ops.supported(places, torch.float64),
    }
    report |= examine_head(heads, ops, device)
    report["opcheck"] = torch.library.opcheck(ops._forward, (places, torch.float32, EPS))
    if device == "cuda":
        places, gradient = make((40, 64, 64), "bfloat16", device)
        report["captured"] = captured(lambda own: compute(own, gradient), places)
    print(json.dumps(report))


def examine_head(heads, ops, device):
    if device == "cpu":
        original = heads.runs_kernels
        heads.runs_kernels = lambda device: True
    calls, forward = [], ops.second_order

    def watched(*arguments):
        calls.append(arguments)
        return forward(*arguments)

    def count(function):
        before = len(calls)
        function()
        return len(calls) - before

    def autocast():
        return torch.autocast(device, torch.bfloat16)

    torch.manual_seed(0)
    head = heads.SecondOrderHead(12, 5).to(device)
    maps = torch.randn(4, 12, 3, 2, device=device).bfloat16()
    ops.second_order = watched
    found = {
        "half": count(lambda: copy.deepcopy(head).bfloat16()(maps)),
        "tokens": count(lambda: copy.deepcopy(head).bfloat16()(maps.flatten(2).mT)),
        "float32": count(lambda: head(maps.float())),
        "wide": count(lambda: heads.SecondOrderHead(129, 5).to(device, torch.bfloat16)(maps.new_ones(1, 129, 2, 1))),
        "no samples": count(lambda: copy.deepcopy(head).bfloat16()(maps[:0])),
    }
    with autocast():
        found["autocast"] = count(lambda: head(maps))
        found["func"] = count(lambda: torch.func.vmap(head)(maps[None]))
        found["forward mode"] = count(lambda: torch.func.jvp(head, (maps,), (maps,)))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(maps, maps)
            found["dual numbers"] = count(lambda: head(dual))
    ops.second_order = forward

    def run(function, maps, gradient):
        leaf = maps.detach().requires_grad_()
        logits = function(leaf)
        return logits, *torch.autograd.grad(logits, [leaf, *head.parameters()], gradient.to(logits.dtype))

    report, gradient = {"calls": found}, torch.randn(4, 5, device=device)
    compiled = torch.compile(head, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for layout in ("contiguous_format", "channels_last"):
        maps = maps.contiguous(memory_format=getattr(torch, layout))
        with autocast():
            ours, again = run(head, maps, gradient), run(compiled, maps, gradient)
        x = maps.flatten(2).mT
        weight = head.classifier.weight.detach().double()
        through = gradient.double() @ weight
        embedding, wanted = exact(x, through)
        g = gradient.double().cpu().numpy()
        logits = embedding @ weight.cpu().numpy().T + head.classifier.bias.detach().double().cpu().numpy()
        wanted = logits, wanted.swapaxes(1, 2).reshape(maps.shape), g.T @ embedding, g.sum(0)
        close = [relative(one, other.detach().double().cpu().numpy()) for one, other in zip(again, ours, strict=True)]
        report[layout] = {
            "dtypes": [str(t.dtype) for t in ours],
            "layout is kept": ours[1].stride() == maps.stride(),
            "errors": list(map(relative, ours, wanted)),
            "compiled": max(close) < 1e-2,  # the linear layer's products may be added in another order
        }
    if device == "cpu":
        heads.runs_kernels = original
    return report


if __name__ == "__main__":
    main()
