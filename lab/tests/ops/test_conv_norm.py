"""The fused layer against conv2d and batch_norm in float64: on the GPU where there is one, else under the interpreter.

As in test_conv3x3.py, this file runs itself as a program, which prints what it found.
"""

import copy
import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernelhead_lab.networks import CifarResNet
from kernelhead_lab.networks.conv3x3 import Conv3x3, conv_norm

CHANNELS = [(3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]  # in, out, stride
VARIANTS = [((2, 8, 8), True), ((3, 5, 7), True), ((5, 3, 3), False)]  # (N, H, W), rectified
CASES = [(channels, *variant) for channels, variant in itertools.product(CHANNELS, VARIANTS)]
FEW = {f"{channels} by few programs": channels for channels in CHANNELS[:3]}


def name(channels, size, rectified):
    return f"{channels} {size} {'rectified' if rectified else 'linear'}"


@pytest.mark.parametrize("case", [*itertools.starmap(name, CASES), *FEW])
def test_value_and_gradients(found, case):
    here = found[case]
    # Errors relative to the largest value. Statistics and sums over pixels are float32. The rest is rounded to bfloat16
    # twice, y and z forward, dy and dx backward, each by 2^-9 (2^-8 in the interpreter, which cuts where a GPU rounds)
    # of values that can be larger than the result: y's by its mean, dy's by what BatchNorm subtracts.
    for kind in ("running mean", "running var"):
        assert here[kind] < 1e-5
    for kind in ("z", "dx", "dweight", "dscale", "dbias"):
        assert here[kind] < 2**-6, kind
    assert here["layouts"]
    assert here["tickets"] == 0
    assert here["batches"] == 8


def test_a_small_variance_beside_a_large_mean(found):
    """A mean of 100 deviations: in squares of the values themselves float32 would leave the variance few digits.

    The running mean, from which differences are taken, is at first zero. By then torch, which takes the statistics of y
    as rounded to bfloat16, is wrong by a percent.
    """
    assert found["large mean, first batch"] < 5e-3
    assert found["large mean, later"] < 1e-5


def test_two_steps_in_a_row(found):
    assert max(found["second step"]) < 1e-5


def test_same_numbers_give_the_same_bits(found):
    assert found["repeatable"]


def test_what_is_not_a_number_stays_so(found):
    assert found["nan"] == [True, True]


def test_operators_are_what_they_declare(found):
    assert set(found["opcheck"].values()) == {"SUCCESS"}


def test_compiled_without_a_break(found):
    assert found["compiled"]


def test_what_is_supported(found):
    assert found["supported"] == [True, False, False, False]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("rectified", [True, False])
def test_a_composition_on_a_cpu(training, autocast, rectified):
    ours = nn.ModuleList([Conv3x3(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)]).train(training)
    plain = copy.deepcopy(ours)
    x = torch.randn(2, 16, 5, 4)
    results = []
    for (conv, norm), fused in ((ours, True), (plain, False)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if fused:
                z = conv_norm(conv, norm, leaf, rectified=rectified)
            else:
                z = F.relu(norm(conv(leaf))) if rectified else norm(conv(leaf))
        gradients = torch.autograd.grad(z.float().square().sum(), (leaf, conv.weight, norm.weight, norm.bias))
        results.append((z, *gradients, *norm.buffers()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_counters_are_no_part_of_the_state():
    network = CifarResNet(8)
    assert not any("tickets" in key for key in network.state_dict())
    assert any("tickets" in key for key, _ in network.named_buffers())


def main():
    from interpreter import choose_device
    from launches import SIZE, few_programs

    device = choose_device()
    from kernelhead_lab.networks.ops import conv_norm as ops

    def error(ours, exact):
        return ((ours.double() - exact).abs().max() / exact.abs().max()).item()

    def state(channels, mean=0.0):
        made = {"running_mean": torch.randn(channels), "running_var": torch.rand(channels) + 0.5}
        made["running_mean"] += mean
        made |= {"batches": torch.tensor(7), "tickets": torch.zeros(1, dtype=torch.int32)}
        return {key: tensor.to(device) for key, tensor in made.items()} | {"momentum": 0.1, "eps": 1e-5}

    def draw(*shape):
        drawn = torch.randn(shape, device=device).bfloat16()
        return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn

    def layer(kept, weight, scale, bias, stride=1):
        return ops.Layer(weight=weight, scale=scale, bias=bias, stride=stride, **kept)

    def examine(channels, size, rectified):
        (c_in, c_out, stride), (samples, height, width) = channels, size
        kept = state(c_out)
        running = kept["running_mean"].double(), kept["running_var"].double()
        # The mean of an input is not zero, as after a ReLU.
        leaves = {"x": draw(samples, c_in, height, width) + 0.5, "weight": draw(c_out, c_in, 3, 3).float()}
        leaves |= {"scale": torch.rand(c_out, device=device) + 0.5, "bias": torch.randn(c_out, device=device)}
        exact = {key: leaf.double().requires_grad_() for key, leaf in leaves.items()}
        ours = {key: leaf.requires_grad_() for key, leaf in leaves.items()}

        y = F.conv2d(exact["x"], exact["weight"], stride=stride, padding=1)
        linear = F.batch_norm(y, *running, exact["scale"], exact["bias"], True, 0.1, 1e-5)
        x, *parameters = ours.values()
        z = ops.conv_norm(x, layer(kept, *parameters, stride), rectified=rectified)
        dz = torch.randn_like(linear).bfloat16()
        # Where a rounding error decides whether a value is rectified, its gradient is all or nothing: ours decides.
        passed = torch.where(z > 0, dz, 0) if rectified else dz
        gradients = torch.autograd.grad(z, list(ours.values()), dz)
        exact_gradients = torch.autograd.grad(linear, list(exact.values()), passed.double())
        result = {f"d{key}": error(*pair) for key, *pair in zip(leaves, gradients, exact_gradients, strict=True)}
        layouts = [z.is_contiguous(memory_format=torch.channels_last), z.dtype == torch.bfloat16]
        layouts += [gradient.dtype == leaf.dtype for gradient, leaf in zip(gradients, ours.values(), strict=True)]
        return result | {
            "z": error(z, F.relu(linear) if rectified else linear),
            "running mean": error(kept["running_mean"], running[0]),
            "running var": error(kept["running_var"], running[1]),
            "tickets": kept["tickets"].item(),
            "batches": kept["batches"].item(),
            "layouts": all(layouts),
        }

    def large_mean(running_mean):
        """The variance of 100 + values of deviation 1, by the change of the running variance."""
        x = draw(8, 16, 12, 12)
        x[:, 0] = 10
        weight = torch.zeros(16, 16, 3, 3, device=device)
        weight[:, 1:, 1, 1] = torch.randn(16, 15, device=device).bfloat16() / 4
        weight[:, 0, 1, 1] = 10
        kept = state(16) | {"momentum": 1.0}
        kept["running_mean"].fill_(running_mean)
        ops.conv_norm(x, layer(kept, weight, torch.ones(16, device=device), torch.zeros(16, device=device)))
        exact = F.conv2d(x.double(), weight.double(), padding=1).var((0, 2, 3))
        return error(kept["running_var"], exact)

    torch.manual_seed(0)
    found = {name(*case): examine(*case) for case in CASES}
    with few_programs():
        found |= {case: examine(channels, SIZE, rectified=True) for case, channels in FEW.items()}
    found["large mean, first batch"] = large_mean(0.0)
    found["large mean, later"] = large_mean(99.0)

    leaves = {"x": draw(6, 16, 12, 12), "weight": draw(16, 16, 3, 3).float()}
    leaves |= {"scale": torch.rand(16, device=device), "bias": torch.randn(16, device=device)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    first = state(16)

    def step(call, kept):
        x, *parameters = leaves.values()
        z = call(x, layer(kept, *parameters))
        return [z, *torch.autograd.grad(z.float().square().sum(), list(leaves.values()))]

    def fresh():
        return copy.deepcopy(first)

    steps = [fresh(), fresh()]
    results = [step(ops.conv_norm, kept) + list(kept.values())[:4] for kept in steps]
    found["repeatable"] = all(torch.equal(*pair) for pair in zip(*results, strict=True))

    step(ops.conv_norm, steps[0])
    expected = [first[key].double() for key in ("running_mean", "running_var")]
    y = F.conv2d(leaves["x"].double(), leaves["weight"].double(), padding=1)
    for _ in range(2):
        F.batch_norm(y, *expected, None, None, True, 0.1, 1e-5)
    pairs = zip((steps[0]["running_mean"], steps[0]["running_var"]), expected, strict=True)
    found["second step"] = [error(*pair) for pair in pairs]

    compiled = torch.compile(ops.conv_norm, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    kept = fresh()
    again = step(compiled, kept) + list(kept.values())[:4]
    found["compiled"] = all(torch.equal(*pair) for pair in zip(results[1], again, strict=True))

    spoilt = leaves["x"].detach().clone()
    spoilt[0, 0, 0, 0] = torch.nan
    kept = fresh()
    z = ops.conv_norm(spoilt, layer(kept, *list(leaves.values())[1:]))
    found["nan"] = [z.isnan().all().item(), kept["running_var"].isnan().all().item()]

    x, weight, scale, bias = (leaf.detach() for leaf in leaves.values())
    kept = fresh()
    found["opcheck"] = {}
    forward = (x, weight, *list(kept.values())[:4], 1, 0.1, 1e-5)
    y, statistics = ops._convolve(*forward)
    normalize = (*(tensor.clone().requires_grad_() for tensor in (x, weight, scale, bias)), y, statistics, 1, True)
    z = ops.normalize(*normalize).detach()
    for operator, arguments in (
        (ops._convolve, forward),
        (ops.normalize, normalize),
        (ops.denormalize, (z, z, y, statistics, scale, bias, True)),
    ):
        for test, verdict in torch.library.opcheck(operator, arguments).items():
            found["opcheck"][f"{operator} {test}"] = verdict

    found["supported"] = [
        ops.supported(x, weight, 1),
        ops.supported(x, weight, 3),
        ops.supported(x[:1, :, :1, :1], weight, 1),
        ops.supported(x.double(), weight, 1),
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
