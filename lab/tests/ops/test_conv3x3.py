"""The kernels against F.conv2d in float64: on the GPU where there is one, else under Triton's interpreter.

The interpreter has to be chosen before triton is imported, and other tests import it: this file runs itself as a
program, which prints what it found.
"""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelhead_lab.networks.conv3x3 import Conv3x3

CHANNELS = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]  # in, out, stride
SIZES = [(2, 8, 8), (3, 5, 7), (1, 1, 3)]  # N, H, W
CASES = [f"{channels} {size}" for channels, size in itertools.product(CHANNELS, SIZES)]
FEW = {f"{channels} by few programs": channels for channels in CHANNELS[:3]}
STRIPS = [  # channels, and what else `other_strips` takes
    ((16, 16, 1), (1, 4, 1, 0), (1, 1, 1)),
    ((16, 16, 1), (1, 1, 3, 2), (1, 3, 3)),
    ((16, 16, 1), (4, 2, 2, 1), (4, 6, 2)),
    ((16, 16, 1), (2, 4, 8, 11), (2, 2, 8)),
    ((16, 32, 2), (2, 2, 2, 1), (2, 5, 2)),
    ((16, 32, 2), (2, 1, 8, 0), (1, 1, 8)),
    ((3, 16, 1), (4, 8, 2, 3), (1, 3, 5)),
]
OTHERS = {f"{channels} in strips {tiles} {parts}": (channels, tiles, parts) for channels, tiles, parts in STRIPS}


@pytest.mark.parametrize("case", [*CASES, *FEW, *OTHERS])
def test_value_and_gradients(found, case):
    here = found[case]
    # One rounding to bfloat16 of a value that float32 sums gave; the interpreter cuts where a GPU rounds.
    assert here["value"] < 2**-7
    assert here["dx of float32"] < (2**-7 if case.startswith("(3,") else 1e-5)  # an image's is torch's own
    assert here["dx"] < 2**-7
    assert here["dw"] < 1e-5
    assert here["dw of bfloat16"] < 2**-7
    assert here["layouts"]


def test_same_numbers_give_the_same_bits(found):
    assert found["repeatable"]


def test_what_is_supported(found):
    assert found["supported"] == [True, False, False, False, False]


def test_gradients_cannot_be_differentiated_again(found):
    assert "autograd" in found["double backward"]


@pytest.mark.parametrize("stride", [1, 2])
def test_module_is_an_ordinary_convolution_on_a_cpu(stride):
    ours = Conv3x3(16, 32, 3, stride=stride, padding=1, bias=False)
    plain = nn.Conv2d(16, 32, 3, stride=stride, padding=1, bias=False)
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 9, 8)
    assert torch.equal(ours(x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("options", [{"padding": 0}, {"groups": 2}, {"dilation": 2}, {"bias": True}])
def test_module_takes_what_the_kernels_do_not(options):
    options = {"padding": 1, "bias": False, **options}
    ours, plain = Conv3x3(4, 6, 3, **options), nn.Conv2d(4, 6, 3, **options)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9, 8)
    assert not ours._is_plain()
    assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_module_under_autocast_and_compile(found, way):
    """Value and gradients are those of nn.Conv2d."""
    assert found["module"][way] == {"kernels": True, "dtypes": True, "close": True}


def main():
    from interpreter import choose_device
    from launches import SIZE, few_programs, other_strips

    device = choose_device()
    from kernelhead_lab.networks.ops.conv3x3 import conv3x3, supported

    def error(ours, exact):
        return ((ours.double() - exact).abs().max() / exact.abs().max()).item()

    def examine(channels, size):
        (c_in, c_out, stride), (samples, height, width) = channels, size
        x = torch.randn(samples, c_in, height, width, device=device).bfloat16()
        weight = torch.randn(c_out, c_in, 3, 3, device=device).bfloat16()
        exact_x, exact_weight = (tensor.double().requires_grad_() for tensor in (x, weight))
        exact = F.conv2d(exact_x, exact_weight, stride=stride, padding=1)
        dy = torch.randn_like(exact).bfloat16()
        exact_dx, exact_dw = torch.autograd.grad(exact, (exact_x, exact_weight), dy.double())

        last = {"memory_format": torch.channels_last}
        leaf, master = x.clone(**last).requires_grad_(), weight.float().contiguous(**last).requires_grad_()
        y = conv3x3(leaf, master, stride)
        dx, dw = torch.autograd.grad(y, (leaf, master), dy)
        layouts = [dx.dtype == torch.bfloat16, dw.dtype == torch.float32, dw.stride() == master.stride()]
        layouts += [y.dtype == torch.bfloat16, y.stride() == torch.empty(y.shape).contiguous(**last).stride()]
        # The other precisions and memory formats: a float32 input, a bfloat16 weight, both contiguous.
        image, half = x.float().requires_grad_(), weight.clone().requires_grad_()
        other_dx, other_dw = torch.autograd.grad(conv3x3(image, half, stride), (image, half), dy)
        layouts += [other_dx.dtype == torch.float32, other_dw.dtype == torch.bfloat16]
        return {
            "value": error(y, exact),
            "dx": error(dx, exact_dx),
            "dx of float32": error(other_dx, exact_dx),
            "dw": error(dw, exact_dw),
            "dw of bfloat16": error(other_dw, exact_dw),
            "layouts": all(layouts),
        }

    torch.manual_seed(0)
    found = {f"{channels} {size}": examine(channels, size) for channels, size in itertools.product(CHANNELS, SIZES)}
    with few_programs():
        found |= {case: examine(channels, SIZE) for case, channels in FEW.items()}
    for case, strips in OTHERS.items():
        with other_strips(*strips):
            found[case] = examine(strips[0], SIZE)
    x, weight = torch.randn(3, 16, 20, 12, device=device), torch.randn(16, 16, 3, 3, device=device)
    leaf, master = x.requires_grad_(), weight.requires_grad_()
    runs = [torch.autograd.grad(conv3x3(leaf, master).sum(), (leaf, master), create_graph=True) for _ in range(2)]
    found["repeatable"] = all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    try:
        runs[0][1].sum().backward()
    except RuntimeError as refusal:
        found["double backward"] = str(refusal)
    found["supported"] = [
        supported(x, weight, 1),
        supported(x, weight, 3),
        supported(x[0], weight, 1),
        supported(x, weight[:, :, :2], 1),
        supported(x.double(), weight, 1),
    ]
    found["module"] = examine_module(device)
    print(json.dumps(found))


def examine_module(device):
    from kernelhead_lab.networks.ops import conv3x3 as ops

    ours = Conv3x3(16, 32, 3, stride=2, padding=1, bias=False).to(device)
    plain = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False).to(device)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 16, 10, 12, device=device)
    if device == "cpu":
        Conv3x3.has_kernels = lambda conv, x: conv._is_plain()
    calls, kernels = [], ops.conv3x3

    def watched(*arguments):
        calls.append(arguments)
        return kernels(*arguments)

    def step(module, weight):
        leaf = x.clone().requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            y = module(leaf)
        return y, *torch.autograd.grad(y.float().square().sum(), (leaf, weight))

    ops.conv3x3 = watched
    compiled = torch.compile(ours, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    expected, found = step(plain, plain.weight), {}
    for way, module in {"plain": ours, "compiled": compiled}.items():
        before = len(calls)
        results = list(zip(step(module, ours.weight), expected, strict=True))
        found[way] = {
            "kernels": len(calls) > before,
            "dtypes": all(one.dtype == other.dtype for one, other in results),
            "close": all(
                torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2 * other.abs().max().item())
                for one, other in results
            ),
        }
    return found


if __name__ == "__main__":
    main()
