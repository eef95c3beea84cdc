"""The 3x3 convolutions of CIFAR ResNets against cuDNN's: microseconds of value, dL/dx and dL/dweight at batch 128.

    python lab/benchmarks/conv3x3.py [--json lab/results/bench/conv3x3.json] [--network 20]

Each time is that of a call within a CUDA graph of 20, each on an input of its own; the median of its replays. cuDNN's
(with cudnn.benchmark) include what autocast adds: rounding the weight before, widening its gradient after. The floor is
the time to read inputs and write outputs once at 4 TB/s. Errors are relative to float64 on the same rounded inputs.

--network times a compiled training step of a whole ResNet, with nn.Conv2d and with Conv3x3, then fused with what
follows it. How the kernels are launched is chosen by lab/benchmarks/conv_search.py.
"""

import argparse
import itertools
import json
import math
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.files import environment
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.networks.cifar_resnet import CifarResNet
from kernelhead_lab.networks.conv3x3 import Conv3x3
from kernelhead_lab.networks.ops import conv3x3 as ops

BATCH, CALLS = 128, 20
SHAPES = {(3, 16, 1): 32, (16, 16, 1): 32, (16, 32, 2): 32, (32, 32, 1): 16, (32, 64, 2): 16, (64, 64, 1): 8}
TABLES = {"forward": ops.FORWARD, "dgrad": ops.DGRAD, "wgrad": ops.WGRAD}
BYTES_PER_SECOND = 4e12

Key = tuple[int, int, int]


class Layer:
    """The tensors of one convolution, CALLS times, and every way to compute with them."""

    def __init__(self, key: Key, copies: int = CALLS) -> None:
        (self.channels, self.out, self.stride), size = key, SHAPES[key]
        self.weight = self._new(self.out, self.channels, 3, dtype=torch.float32) / math.sqrt(9 * self.channels)
        self.x = [self._new(BATCH, self.channels, size) for _ in range(copies)]
        self.dy = [self._new(BATCH, self.out, size // self.stride) for _ in range(copies)]
        self.rounded = self.weight.bfloat16()

    @staticmethod
    def _new(samples: int, channels: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        values = torch.randn(samples, channels, size, size, device="cuda", dtype=dtype)
        return values.contiguous(memory_format=torch.channels_last)

    def ours(self, kind: str, i: int = 0) -> Tensor:
        x, dy = self.x[i], self.dy[i]
        if kind == "forward":
            return ops._forward(x, self.weight, self.stride)
        if kind == "dgrad":
            return ops.dgrad(dy, self.weight, self.stride, *x.shape[2:], x.dtype)
        return ops.wgrad(x, dy, self.weight, self.stride)

    def cudnn(self, kind: str, i: int = 0) -> Tensor:
        x, dy = self.x[i], self.dy[i]
        if kind == "forward":
            return F.conv2d(x, self.weight.bfloat16(), stride=self.stride, padding=1)
        return self._backward(kind, dy, x, self.rounded).to(x if kind == "dgrad" else self.weight)

    def exact(self, kind: str) -> Tensor:
        x, dy, weight = self.x[0].double(), self.dy[0].double(), self.rounded.double()
        if kind == "forward":
            return F.conv2d(x, weight, stride=self.stride, padding=1)
        return self._backward(kind, dy, x, weight)

    def _backward(self, kind: str, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        wanted = [kind == "dgrad", kind == "wgrad", False]
        sides = [self.stride] * 2, [1, 1], [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(dy, x, weight, None, *sides, wanted)[kind == "wgrad"]

    def floor(self, kind: str) -> float:
        x, dy, weight = self.x[0].nbytes, self.dy[0].nbytes, self.weight.nbytes
        return 1e6 * (x + dy + weight) / BYTES_PER_SECOND


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def graph_of(call: Callable[[int], object], calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """Without torch.cuda.graph, which empties caches before each capture: a search makes a thousand."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for i in range(min(calls, 3)):  # compiles, and lets cuDNN choose
            call(i)
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for i in range(calls):
                call(i)
        finally:
            graph.capture_end()
    return graph


def microseconds(call: Callable[[int], object], replays: int = 20, calls: int = CALLS) -> float:
    """Of one call: the median of `replays` replays of a graph of `calls`."""
    return replayed(graph_of(call, calls), replays) / calls


def replayed(graph: torch.cuda.CUDAGraph, replays: int = 20) -> float:
    """Microseconds of a replay, the median."""
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def kinds(key: Key) -> list[str]:
    return [kind for kind, table in TABLES.items() if key in table]


def compare() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"{'layer':<16}{'kind':<9}{'error':>10}{'cudnn err':>11}{'ours us':>9}{'cudnn us':>10}{'floor us':>10}")
    for key, size in SHAPES.items():
        layer = Layer(key)
        name = f"{key[0]}-{key[1]}/{key[2]} @{size}"
        for kind in kinds(key):
            try:
                exact = layer.exact(kind)
                errors = error(layer.ours(kind), exact), error(layer.cudnn(kind), exact)
                repeatable = torch.equal(layer.ours(kind), layer.ours(kind))
                times = [microseconds(lambda i, way=way, kind=kind: way(kind, i)) for way in (layer.ours, layer.cudnn)]
            except Exception:
                print(f"{name:<16}{kind:<9} failed\n{traceback.format_exc(limit=-3)}", flush=True)
                continue
            row = {"layer": key, "size": size, "batch": BATCH, "kind": kind, "error": errors[0], "us": times[0]}
            rows.append(row | {"cudnn_us": times[1], "floor_us": layer.floor(kind), "repeatable": repeatable})
            figures = f"{errors[0]:>10.1e}{errors[1]:>11.1e}{times[0]:>9.2f}{times[1]:>10.2f}{layer.floor(kind):>10.2f}"
            print(f"{name:<16}{kind:<9}{figures}{'' if repeatable else '  NOT REPEATABLE'}", flush=True)
    return rows


def network(depth: int) -> dict[str, float]:
    """Milliseconds of a compiled training step of a ResNet under bfloat16 autocast, in a CUDA graph."""
    times, losses = {}, {}
    images = torch.randn(BATCH, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    labels = torch.randint(64, (BATCH,), device="cuda")
    for kind in (nn.Conv2d, Conv3x3):
        try:
            torch.manual_seed(0)
            model = CifarResNet(depth).cuda().to(memory_format=torch.channels_last)
            for module in model.modules():
                if isinstance(module, Conv3x3):
                    module.__class__ = kind
            forward = torch.compile(model, fullgraph=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
            values = []

            def step(_: int, forward=forward, optimizer=optimizer, values=values) -> None:
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = F.cross_entropy(forward(images).float(), labels)
                loss.backward()
                optimizer.step()
                values.append(loss.detach())

            times[kind.__name__] = microseconds(step, calls=3) / 1e3
            losses[kind.__name__] = [value.item() for value in values[:3]]
        except Exception:
            traceback.print_exc(limit=-4)
    print(f"ResNet-{depth}, ms a step: {times}\n  first losses {losses}", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=int, metavar="DEPTH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    result: dict[str, object] = {"format": FORMAT, "environment": environment(), "layers": compare()}
    if options.network:
        result["network_ms"] = network(options.network)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
