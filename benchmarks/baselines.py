"""Baselines on CUDA, kervolution, second-order pooling and the expansion: what their kernels save in training.

    python benchmarks/baselines.py [--json results/bench/baselines.json] [--network 20] [--only expansion]
    python benchmarks/baselines.py --tiles [--only expansion]               tiles, warps and programs of the kernels

Microseconds of forward and backward at batch 128 under autocast to bfloat16, within a CUDA graph: alone, and as one of
8 parallel branches, each with a module of its own; plain, and under torch.compile. Modules:
- kervolution: 16 filters of 3x3 on images (128, 3, 32, 32), float32 and channels last, which need no gradient;
- stem: the same with BatchNorm and ReLU; its peer is a convolution;
- second_order: the head on maps (128, 64, 8, 8), bfloat16 and channels last; its peer is softmax on their mean;
- expansion: the head of so many channels on such maps, whose kernels are for a head that is not compiled;
- with --network, whole ResNets of that depth, compiled, with the first and the second.
--only takes those whose name begins so.
Ways: the kernels of `kernelhead.ops`; torch's operations instead; and these with a float32 result of the kervolution,
which all that follows then is.

Errors are those of value and gradients against float64 on the same inputs, relative in norm, and bits are compared
over 20 repetitions beside other work.
"""

import argparse
import copy
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo
from conv3x3 import error, microseconds, replayed
from torch import Tensor, nn

from kernelhead import create_head
from kernelhead.backbones import CifarResNet, Classifier, kervolution
from kernelhead.backbones.conv3x3 import Conv3x3, conv_norm
from kernelhead.backbones.kervolution import GaussianKervolution2d
from kernelhead.heads import second_order
from kernelhead.ops import kervolution as kervolution_ops
from kernelhead.ops import norm_relu_mean, norm_relu_mean_kernels
from kernelhead.ops import second_order as second_order_ops
from kernelhead.results import environment

DEVICE, BATCH, CLASSES = "cuda", 128, 100
CALLS, BRANCHES = 8, 8  # in a row within a graph, or within each of its branches
KERNELS, TORCH, WIDE = "kernels", "torch", "torch, float32"

Tensors = tuple[Tensor, ...]


class Stem(nn.Module):
    """The first layer of a CIFAR ResNet."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm2d(conv.out_channels)

    def forward(self, images: Tensor) -> Tensor:
        return conv_norm(self.conv, self.norm, images)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = create_head("softmax", 64, CLASSES)

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits


def kervolutional() -> GaussianKervolution2d:
    return GaussianKervolution2d(3, 16, 3, padding=1)


def random_images() -> Tensor:
    return torch.randn(BATCH, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last)


def random_maps() -> Tensor:
    maps = torch.randn(BATCH, 64, 8, 8, device=DEVICE, dtype=torch.bfloat16)
    return maps.contiguous(memory_format=torch.channels_last).requires_grad_()


Subject = tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[str, ...]]

SUBJECTS: dict[str, Subject] = {
    "kervolution": (kervolutional, random_images, (KERNELS, TORCH, WIDE)),
    "stem": (lambda: Stem(kervolutional()), random_images, (KERNELS, TORCH, WIDE)),
    "stem, convolution": (lambda: Stem(Conv3x3(3, 16, 3, padding=1, bias=False)), random_images, (KERNELS,)),
    "second_order": (lambda: create_head("second_order", 64, CLASSES), random_maps, (KERNELS, TORCH)),
    "expansion 512": (lambda: create_head("expansion", 64, CLASSES), random_maps, (KERNELS, TORCH)),
    "expansion 2048": (lambda: create_head("expansion", 64, CLASSES, width=2048), random_maps, (KERNELS, TORCH)),
    "softmax": (Softmax, random_maps, (TORCH,)),
}


def networks(depth: int) -> dict[str, Subject]:
    def network(head: str, **options: str) -> Callable[[], nn.Module]:
        return lambda: Classifier(CifarResNet(depth, **options), create_head(head, 64, CLASSES))

    return {
        f"ResNet-{depth}": (network("softmax"), random_images, (KERNELS,)),
        f"ResNet-{depth}, kervolution": (
            network("softmax", kervolution="first"),
            random_images,
            (KERNELS, TORCH, WIDE),
        ),
        f"ResNet-{depth}, second_order": (network("second_order"), random_images, (KERNELS, TORCH)),
    }


@contextmanager
def choose(way: str) -> Iterator[None]:
    """The kernels of these baselines, or torch's operations. What is compiled is to be called first in here."""
    modules = kervolution, second_order, norm_relu_mean
    kept = [module.runs_kernels for module in modules], GaussianKervolution2d._dtype
    if way != KERNELS:
        for module in modules:
            module.runs_kernels = lambda _: False
    if way == WIDE:
        GaussianKervolution2d._dtype = lambda self, images: self.weight.dtype
    try:
        yield
    finally:
        for module, runs_kernels in zip(modules, kept[0], strict=True):
            module.runs_kernels = runs_kernels
        GaussianKervolution2d._dtype = kept[1]


class Step:
    """Forward and backward of a module under autocast, for inputs and gradients that stay where they are."""

    def __init__(self, subject: Subject, *, compiled: bool = False) -> None:
        make, inputs, _ = subject
        torch.manual_seed(0)
        self.module = make().to(DEVICE).to(memory_format=torch.channels_last)
        self.inputs = [inputs() for _ in range(CALLS)]
        self.function = torch.compile(self.module, fullgraph=True, dynamic=False) if compiled else self.module
        with torch.no_grad(), self.autocast():
            value = self.module(self.inputs[0])
        self.gradient = torch.randn_like(value)

    def autocast(self) -> torch.autocast:
        return torch.autocast(DEVICE, dtype=torch.bfloat16)

    def __call__(self, i: int = 0) -> Tensors:
        """Value and gradients."""
        x = self.inputs[i]
        with self.autocast():
            value = self.function(x)
        wanted = [*self.module.parameters(), *([x] if x.requires_grad else [])]
        return value.detach(), *torch.autograd.grad(value, wanted, self.gradient)

    def exact(self) -> Tensors:
        """Likewise, in float64."""
        module, x = copy.deepcopy(self.module).double(), self.inputs[0].detach().double()
        x.requires_grad_(self.inputs[0].requires_grad)
        value = module(x)
        wanted = [*module.parameters(), *([x] if x.requires_grad else [])]
        return value.detach(), *torch.autograd.grad(value, wanted, self.gradient.double())

    def errors(self) -> dict[str, float]:
        names = ["value", *(name for name, _ in self.module.named_parameters()), "maps"]
        return {name: error(x, y) for name, x, y in zip(names, self(), self.exact(), strict=False)}

    def repeats(self) -> bool:
        first, busy = self(), torch.cuda.Stream()
        other = torch.randn(2048, 2048, device=DEVICE)
        for _ in range(20):
            with torch.cuda.stream(busy):
                other @ other
            if not all(map(torch.equal, first, self())):
                return False
        return True


def together(steps: list[Step], replays: int = 20) -> float:
    """Microseconds of a call, where each step makes CALLS of them in a branch of a CUDA graph."""
    streams = [torch.cuda.Stream() for _ in steps]

    def fork_and_join(calls: int) -> None:
        main = torch.cuda.current_stream()
        for step, stream in zip(steps, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for i in range(calls):
                    step(i)
        for stream in streams:
            main.wait_stream(stream)

    for _ in range(3):
        fork_and_join(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fork_and_join(CALLS)
    return replayed(graph, replays) / (CALLS * len(steps))


def compare(name: str, subject: Subject, *, plain: bool) -> Iterator[dict[str, object]]:
    """A row for each way; `plain`: not only compiled, and with errors."""
    for way in subject[2]:
        row: dict[str, object] = {"module": name, "way": way}
        try:
            torch._dynamo.reset()  # a way is not to run what another compiled
            with choose(way), torch._dynamo.config.patch(recompile_limit=4 * BRANCHES):
                if plain:
                    step = Step(subject)
                    row |= {"errors": step.errors(), "repeatable": step.repeats()}
                for compiled in (False, True) if plain else (True,):
                    steps = [Step(subject, compiled=compiled) for _ in range(BRANCHES)]
                    took = {"alone": microseconds(steps[0], calls=CALLS), "together": together(steps)}
                    row |= {f"{'compiled' if compiled else 'plain'}_us": took}
            print(describe(row), flush=True)
            yield row
        except Exception:
            print(f"{name}, {way} failed\n{traceback.format_exc(limit=-4)}", flush=True)


def describe(row: dict[str, object]) -> str:
    text = f"{row['module']:<28}{row['way']:<16}"
    for kind in ("plain_us", "compiled_us"):
        took = row.get(kind)
        if isinstance(took, dict):
            text += f"{kind[:-3]} {took['alone']:8.1f} us alone {took['together']:8.1f} of {BRANCHES}   "
    errors = row.get("errors")
    if isinstance(errors, dict):
        text += "errors " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
        text += "" if row["repeatable"] else "  NOT REPEATABLE"
    return text


def launches() -> dict[str, tuple[object, str, list[object], Callable[[int], object]]]:
    """By kernel: where its table is, candidates for it, and the call to time."""
    step, head = Step(SUBJECTS["kervolution"]), Step(SUBJECTS["second_order"])
    layer = step.module
    shared = layer.weight, layer.log_gamma, 1, 1
    places = [x.detach().flatten(2).mT for x in head.inputs]
    embedding = torch.randn(BATCH, 64 * 64, device=DEVICE, dtype=torch.bfloat16)
    tiles: list[object] = [
        kervolution_ops.Tiles(pixels, 16, warps, programs)
        for pixels, warps, programs in itertools.product((8, 16, 32, 64), (2, 4, 8), (132, 264, 396, 528, 1056))
        if 1 <= pixels // (2 * warps) <= 4  # so many values a thread
    ]
    warps: list[object] = [{128: (count, count)} for count in (2, 4, 8, 16)]
    expansion = norm_relu_mean_kernels
    rectangles: list[object] = [
        expansion.Tiles(rows, channels, count)
        for rows, channels, count in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (2, 4, 8))
        if 8 <= rows * channels // (32 * count) <= 64  # so many values a thread
    ]
    narrow: list[object] = [
        expansion.Tiles(rows, channels, count)
        for rows, channels, count in itertools.product((32, 64, 128), (8, 16, 32), (2, 4, 8))
    ]
    norm = nn.BatchNorm2d(2048).to(DEVICE)
    parameters = norm.weight.detach(), norm.bias.detach()
    state = norm.running_mean, norm.running_var, norm.num_batches_tracked
    ys = [torch.randn(BATCH, 64, 2048, device=DEVICE, dtype=torch.bfloat16) for _ in range(CALLS)]
    statistics = [expansion.batch_statistics(y, *state, 0.1, 1e-5) for y in ys]
    passed = [expansion.pool(*pair, *parameters, keep=True)[1] for pair in zip(ys, statistics, strict=True)]
    g = torch.randn(BATCH, 2048, device=DEVICE)
    sums = expansion.parameter_gradients(g, passed[0])
    return {
        "expansion statistics": (
            expansion, "STATISTICS", rectangles, lambda i: expansion.batch_statistics(ys[i], *state, 0.1, 1e-5)
        ),
        "expansion pool": (
            expansion, "POOL", rectangles, lambda i: expansion.pool(ys[i], statistics[i], *parameters, keep=True)
        ),
        "expansion sums": (expansion, "SUMS", narrow, lambda i: expansion.parameter_gradients(g, passed[i])),
        "expansion gradient": (
            expansion, "GRADIENT", rectangles,
            lambda i: expansion.input_gradient(g, ys[i], statistics[i], *parameters, sums),
        ),
        "kervolution forward": (
            kervolution_ops, "FORWARD", tiles,
            lambda i: kervolution_ops._forward(step.inputs[i], *shared, torch.bfloat16),
        ),
        "kervolution backward": (
            kervolution_ops, "BACKWARD", tiles,
            lambda i: kervolution_ops._gradients(step.gradient, step.inputs[i], *shared),
        ),
        "second_order forward": (
            second_order_ops, "WARPS", warps,
            lambda i: second_order_ops._forward(places[i], torch.bfloat16, second_order.EPS),
        ),
        "second_order backward": (
            second_order_ops, "WARPS", warps,
            lambda i: second_order_ops._gradient(embedding, places[i], second_order.EPS),
        ),
    }  # fmt: skip


def search(only: str) -> list[dict[str, object]]:
    """Microseconds of each kernel whose name begins so, the fastest first."""
    rows: list[dict[str, object]] = []
    for name, (module, table, candidates, call) in launches().items():
        if not name.startswith(only):
            continue
        kept, found = getattr(module, table), []
        for how in [kept, *candidates]:
            setattr(module, table, how)
            try:
                found.append((microseconds(call, calls=CALLS), how))
            except Exception:
                print(f"{name} {how} failed\n{traceback.format_exc(limit=-2)}", flush=True)
        setattr(module, table, kept)
        for took, how in sorted(found, key=lambda pair: pair[0])[:6]:
            print(f"{name:<24}{took:8.2f} us  {how}{'  (now)' if how == kept else ''}", flush=True)
        rows += [{"kernel": name, "how": str(how), "us": took} for took, how in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--network", type=int, metavar="DEPTH")
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, object]] = []
    if options.tiles:
        rows = search(options.only)
    else:
        for name, subject in SUBJECTS.items():
            if name.startswith(options.only):
                rows += compare(name, subject, plain=True)
        if options.network:
            for name, subject in networks(options.network).items():
                rows += compare(name, subject, plain=False)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"batch": BATCH, "branches": BRANCHES, "rows": rows, **environment()}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
