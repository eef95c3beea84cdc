"""The fused block against conv2d and batch_norm in float64: on the GPU where there is one, else under the interpreter.

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
from kernelhead_lab.networks.cifar_resnet import BasicBlock
from kernelhead_lab.networks.conv3x3 import Conv3x3

CHANNELS = [(16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]  # in, out, stride
VARIANTS = [((3, 5, 7), True), ((2, 4, 6), False)]  # (N, H, W), rectified
CASES = list(itertools.product(CHANNELS, VARIANTS))
FEW = {f"{channels} by few programs": channels for channels in CHANNELS[:2]}
STRIPS = [(16, (1, 4, 1, 0)), (16, (4, 2, 2, 1)), (32, (1, 1, 3, 2)), (16, (2, 4, 8, 11))]  # as for `other_strips`


def name(channels, variant):
    size, rectified = variant
    return f"{channels} {size} {'rectified' if rectified else 'linear'}"


@pytest.mark.parametrize("case", [*itertools.starmap(name, CASES), *FEW])
def test_value_and_gradients(found, case):
    """Errors relative to the largest value: each of a block's tensors is rounded to bfloat16, see test_conv_norm.py.

    What the second layer's statistics are taken of is such a tensor, too.
    """
    here = found[case]
    for kind in ("mean1", "var1"):
        assert here[kind] < 1e-5
    for kind in ("z", "mean2", "var2", "dbias2"):
        assert here[kind] < 2**-6, kind
    for kind in ("dx", "dweight1", "dscale1", "dbias1", "dweight2", "dscale2"):
        assert here[kind] < 2**-5, kind
    assert here["layouts"]
    assert here["tickets"] == 0
    assert here["batches"] == [8, 8]


def test_same_numbers_give_the_same_bits(found):
    assert found["repeatable"]


def test_only_what_is_wanted(found):
    """Without gradients of x, or of the weights, those that remain are the same."""
    assert found["partly"] == [True, True]


def test_what_is_not_a_number_stays_so(found):
    assert found["nan"] == [True, True]


def test_sums_of_the_gradient_between_two_layers(found):
    assert len(found["between"]) == len(STRIPS)
    for case, (dy, *sums) in found["between"].items():
        assert dy < 4e-3, case  # bfloat16, rounded once more here and there where sums differ in their last bits
        assert max(sums) < 1e-5, case


def test_operators_are_what_they_declare(found):
    assert set(found["opcheck"].values()) == {"SUCCESS"}


def test_compiled_without_a_break(found):
    assert found["compiled"]


def test_what_is_supported(found):
    assert found["supported"] == [True, True, False, False, False, False]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize(("channels", "stride"), [(32, 1), (16, 1), (16, 2), (17, 2)])
def test_a_composition_on_a_cpu(training, autocast, channels, stride):
    block = BasicBlock(channels, 32, stride, kervolution=False, rectified=channels > 16).train(training)
    plain = copy.deepcopy(block)
    x = torch.randn(2, channels, 6, 5)
    results = []
    for module, fused in ((block, True), (plain, False)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            z = module(leaf) if fused else composed(module, leaf, channels > 16)
        gradients = torch.autograd.grad(z.float().square().sum(), (leaf, *module.parameters()))
        results.append((z, *gradients, *module.buffers()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def composed(block, x, rectified):
    linear = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
    stride, new = block.conv1.stride[0], linear.shape[1] - x.shape[1]
    if stride > 1 or new:
        x = F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, new // 2, new - new // 2))
    return F.relu(linear + x) if rectified else linear + x


def test_a_network_is_the_composition(found):
    """Relative errors of features and running variances against float64; the same network compiled."""
    network = found["network"]
    assert network["blocks"] == 3
    assert network["features"] < 0.05
    assert max(network["variances"]) < 0.03
    assert set(network["batches"]) == {1}
    assert network["compiled"]


def main():
    from interpreter import choose_device
    from launches import SIZE, few_programs

    device = choose_device()
    from kernelhead_lab.networks.ops import basic_block as ops
    from kernelhead_lab.networks.ops import conv_norm
    from kernelhead_lab.networks.ops.conv_norm import Layer

    def error(ours, exact):
        return ((ours.double() - exact).abs().max() / exact.abs().max()).item()

    def draw(*shape):
        drawn = torch.randn(shape, device=device).bfloat16()
        return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn

    def draw_layer(c_in, c_out, stride):
        layer = {"weight": draw(c_out, c_in, 3, 3).float() / c_in**0.5}
        layer |= {"scale": torch.rand(c_out) + 0.5, "bias": torch.randn(c_out)}
        layer |= {"running_mean": torch.randn(c_out), "running_var": torch.rand(c_out) + 0.5}
        layer |= {"batches": torch.tensor(7), "tickets": torch.zeros(1, dtype=torch.int32)}
        layer = {key: tensor.to(device) for key, tensor in layer.items()}
        layer["weight"] = layer["weight"].bfloat16().float()
        return Layer(**layer, momentum=0.1, eps=1e-5, stride=stride)

    def leaves(x, layers):
        return [x] + [tensor for layer in layers for tensor in (layer.weight, layer.scale, layer.bias)]

    def normalize_exactly(x, weight, scale, bias, layer, stride):
        running = layer.running_mean.double(), layer.running_var.double()
        y = F.conv2d(x, weight, stride=stride, padding=1)
        return F.batch_norm(y, *running, scale, bias, True, 0.1, 1e-5), running

    def examine(channels, variant):
        (c_in, c_out, stride), ((samples, height, width), rectified) = channels, variant
        x = draw(samples, c_in, height, width) + 0.5
        layers = [draw_layer(c_in, c_out, stride), draw_layer(c_out, c_out, 1)]
        exact = [leaf.double().requires_grad_() for leaf in leaves(x, layers)]
        # Where a rounding error decides whether a value is rectified, its gradient is all or nothing: ours decides.
        between = conv_norm.conv_norm(x, copy.deepcopy(layers[0]))
        hidden, running1 = normalize_exactly(*exact[:4], layers[0], stride)
        linear, running2 = normalize_exactly(torch.where(between > 0, hidden, 0), *exact[4:], layers[1], 1)
        before = (c_out - c_in) // 2
        shortcut = F.pad(exact[0][:, :, ::stride, ::stride], (0, 0, 0, 0, before, c_out - c_in - before))
        linear = linear + shortcut

        ours = [leaf.requires_grad_() for leaf in leaves(x, layers)]
        z = ops.basic_block(x, *layers, rectified=rectified)
        dz = torch.randn_like(linear).bfloat16()
        gradients = torch.autograd.grad(z, ours, dz)
        passed = torch.where(z > 0, dz, 0) if rectified else dz
        exact_gradients = torch.autograd.grad(linear, exact, passed.double())
        kinds = ["dx", *(f"d{kind}{number}" for number in (1, 2) for kind in ("weight", "scale", "bias"))]
        result = {kind: error(*pair) for kind, *pair in zip(kinds, gradients, exact_gradients, strict=True)}
        for number, layer, (mean, variance) in zip((1, 2), layers, (running1, running2), strict=True):
            result[f"mean{number}"] = error(layer.running_mean, mean)
            result[f"var{number}"] = error(layer.running_var, variance)
        layouts = [z.is_contiguous(memory_format=torch.channels_last), z.dtype == torch.bfloat16]
        layouts += [gradient.dtype == leaf.dtype for gradient, leaf in zip(gradients, ours, strict=True)]
        return result | {
            "z": error(z, F.relu(linear) if rectified else linear),
            "tickets": sum(layer.tickets.item() for layer in layers),
            "batches": [layer.batches.item() for layer in layers],
            "layouts": all(layouts),
        }

    torch.manual_seed(0)
    found = {name(*case): examine(*case) for case in CASES}
    with few_programs():
        found |= {case: examine(channels, (SIZE, True)) for case, channels in FEW.items()}

    x = draw(4, 16, 7, 9)
    first = [draw_layer(16, 32, 2), draw_layer(32, 32, 1)]

    def step(call, wanted, x=x):
        layers = copy.deepcopy(first)
        given = [leaf.detach().requires_grad_(i in wanted) for i, leaf in enumerate(leaves(x, layers))]
        layers = [
            layer._replace(weight=given[i], scale=given[i + 1], bias=given[i + 2])
            for i, layer in zip((1, 4), layers, strict=True)
        ]
        z = call(given[0], *layers)
        gradients = torch.autograd.grad(z.float().square().sum(), [given[i] for i in wanted])
        kept = [tensor for layer in layers for tensor in layer[3:7]]
        return dict(zip(wanted, gradients, strict=True)), [z, *kept]

    every = range(7)
    gradients, kept = step(ops.basic_block, every)
    again, kept_again = step(ops.basic_block, every)
    pairs = [*zip(gradients.values(), again.values(), strict=True), *zip(kept, kept_again, strict=True)]
    found["repeatable"] = all(torch.equal(*pair) for pair in pairs)
    found["partly"] = [
        all(torch.equal(gradients[i], gradient) for i, gradient in step(ops.basic_block, wanted)[0].items())
        for wanted in ((1, 2, 3, 4, 5, 6), (0, 2, 6))
    ]
    compiled = torch.compile(ops.basic_block, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    again, kept_again = step(compiled, every)
    pairs = [*zip(gradients.values(), again.values(), strict=True), *zip(kept, kept_again, strict=True)]
    found["compiled"] = all(torch.equal(*pair) for pair in pairs)

    spoilt = x.clone()
    spoilt[0, 0, 0, 0] = torch.nan
    gradients, (z, *_) = step(ops.basic_block, every, spoilt)
    found["nan"] = [z.isnan().all().item(), gradients[0].isnan().all().item()]

    layers = copy.deepcopy(first)
    y, statistics = conv_norm.convolve(x, layers[0])
    between = conv_norm.normalized(y, statistics, layers[0].scale, layers[0].bias, rectified=True)
    y2, statistics2 = conv_norm.convolve(between, layers[1])
    given = [tensor.detach().clone().requires_grad_() for tensor in leaves(x, layers)]
    conclude = (*given, y, statistics, between, y2, statistics2, 2, True)
    z = ops._conclude(*conclude).detach()
    dgrad = (y, layers[0].weight.detach(), 2, 7, 9, torch.bfloat16, y2, z)
    normalisation = [tensor.detach() for tensor in (y, statistics, layers[0].scale, layers[0].bias)]
    between = y2, layers[1].weight.detach(), *normalisation
    found["opcheck"] = {}
    operators = (ops._conclude, conclude), (ops.conv3x3.dgrad, dgrad), (conv_norm.denormalize_between, between)
    for operator, arguments in operators:
        for test, verdict in torch.library.opcheck(operator, arguments).items():
            found["opcheck"][f"{operator} {test}"] = verdict

    found["between"] = {str(case): examine_between(*case, draw, draw_layer) for case in STRIPS}

    weights = [layer.weight for layer in first]
    found["supported"] = [
        ops.supported(x, *weights, 2),
        ops.supported(x, torch.zeros(16, 16, 3, 3), torch.zeros(16, 16, 3, 3), 1),
        ops.supported(x.float(), *weights, 2),
        ops.supported(x, *weights, 1),
        ops.supported(x, weights[0], weights[0], 2),
        ops.supported(x[:1, :, :1, :1], *weights, 2),
    ]
    found["network"] = examine_network(ops, device)
    print(json.dumps(found))


def examine_between(channels, strips, draw, draw_layer):
    """How far gradients between two layers are from those with sums of their own, by strips of no table."""
    from launches import SIZE, other_strips

    from kernelhead_lab.networks.ops import conv3x3, conv_norm

    samples, height, width = SIZE
    x, layer, second = draw(samples, channels, height, width), *(draw_layer(channels, channels, 1) for _ in range(2))
    y, statistics = conv_norm.convolve(x, layer)
    dy = draw(samples, channels, height, width)
    normalisation = y, statistics, layer.scale, layer.bias
    dz = conv3x3.dgrad(dy, second.weight, 1, height, width, torch.bfloat16)
    expected = conv_norm.denormalize(dz, None, *normalisation, True)
    with other_strips((channels, channels, 1), strips, (1, 1, 1)):
        ours = conv_norm.denormalize_between(dy, second.weight, *normalisation)
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(ours, expected, strict=True)]


def examine_network(ops, device):
    calls, basic_block = [], ops.basic_block

    def watched(*arguments, **options):
        calls.append(arguments)
        return basic_block(*arguments, **options)

    usual = Conv3x3.has_kernels
    if device == "cpu":
        Conv3x3.has_kernels = lambda conv, x: conv._is_plain()
    ours = CifarResNet(8).to(device).to(memory_format=torch.channels_last)
    exact, compiled = copy.deepcopy(ours).double(), copy.deepcopy(ours)
    images = torch.randn(4, 3, 16, 16, device=device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    with torch.autocast(device, dtype=torch.bfloat16):
        ops.basic_block = watched
        features = ours(images)
        ops.basic_block = basic_block
        again = torch.compile(compiled, fullgraph=True, backend=backend)(images)
    Conv3x3.has_kernels = usual
    expected = exact(images.double())
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    exact_norms = [module for module in exact.modules() if isinstance(module, nn.BatchNorm2d)]
    ratios = [ours.running_var / exact.running_var for ours, exact in zip(norms, exact_norms, strict=True)]
    return {
        "blocks": len(calls),
        "features": ((features - expected).norm() / expected.norm()).item(),
        "variances": [(ratio - 1).abs().max().item() for ratio in ratios],
        "batches": [norm.num_batches_tracked.item() for norm in norms],
        "compiled": torch.allclose(again, features, rtol=1e-2, atol=1e-2),
    }


if __name__ == "__main__":
    main()
