"""Convolution, BatchNorm, shortcut and ReLU as one operation: errors, microseconds a layer, and whole training steps.

    python benchmarks/conv_norm.py [--network 20] [--runs 1 8 16] [--json results/bench/conv_norm.json]

First the layers of a CIFAR ResNet at batch 128: errors against float64 on the same rounded inputs, relative in norm,
beside those of the composition (Conv3x3, nn.BatchNorm2d, addition, ReLU), and whether 20 repetitions beside other work
give the same bits; then times of a call within a CUDA graph, forward, and forward and backward.

Then training steps of the network on random images, not compiled, as `kernelhead.train` runs them: one CUDA graph with
1 to 16 runs as parallel branches. Three ways: cuDNN's convolutions, Conv3x3, and the fused operation. For each the
number of kernels a step, those that take longest, the losses of the first 20 steps, microseconds a step and run.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conv3x3 import BATCH, SHAPES, Key, error, microseconds
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.backbones import conv3x3 as backbone
from kernelhead.backbones.conv3x3 import Conv3x3, conv_norm
from kernelhead.data.resident import ResidentImages
from kernelhead.results import environment
from kernelhead.train.distributed import World
from kernelhead.train.graph import Graph
from kernelhead.train.member import Member
from kernelhead.train.run import Run
from kernelhead.train.schedule import Schedule

WAYS = ("cudnn", "conv3x3", "fused")
CALLS = 8
LAYERS: list[tuple[Key, int]] = [
    ((3, 16, 1), 0), ((16, 16, 1), 0), ((16, 16, 1), 1), ((16, 32, 2), 0), ((32, 32, 1), 1), ((32, 32, 1), 2),
    ((32, 64, 2), 0), ((64, 64, 1), 1), ((64, 64, 1), 2),
]  # fmt: skip  # with the stride of the shortcut, 0 for none


@contextmanager
def way(name: str) -> Iterator[None]:
    """Let the backbone take cuDNN's convolutions, Conv3x3 with what follows it apart, or all as one."""
    kept = backbone.TRITON, backbone._is_usual
    if name != "fused":
        backbone._is_usual = lambda norm: False
    backbone.TRITON = name != "cudnn"
    try:
        yield
    finally:
        backbone.TRITON, backbone._is_usual = kept


class Layer:
    """A convolution and its BatchNorm, CALLS inputs and gradients."""

    def __init__(self, key: Key, shortcut_stride: int) -> None:
        (channels, out, stride), size = key, SHAPES[key]
        after = size // stride
        self.stride, self.rectified = shortcut_stride, shortcut_stride != 1 or key[0] < 64
        conv = Conv3x3(channels, out, 3, stride=stride, padding=1, bias=False)
        self.modules = nn.ModuleList([conv, nn.BatchNorm2d(out)]).cuda().to(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter in (conv.weight, self.modules[1].weight, self.modules[1].bias):
                parameter.add_(torch.randn_like(parameter) / 10)
            conv.weight.copy_(conv.weight.bfloat16())
        self.x = [self._new(channels, size).add_(0.5).requires_grad_(channels > 3) for _ in range(CALLS)]
        self.dz = [self._new(out, after) for _ in range(CALLS)]
        source = {0: None, 1: (out, after), 2: (out // 2, 2 * after)}[shortcut_stride]
        self.shortcut = [source and self._new(*source).requires_grad_() for _ in range(CALLS)]

    @staticmethod
    def _new(channels: int, size: int) -> Tensor:
        values = torch.randn(BATCH, channels, size, size, device="cuda", dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    def forward(self, i: int = 0) -> Tensor:
        conv, norm = self.modules
        options = {"shortcut_stride": max(1, self.stride), "rectified": self.rectified}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return conv_norm(conv, norm, self.x[i], self.shortcut[i], **options)

    def both(self, i: int = 0, gradient: Tensor | None = None) -> dict[str, Tensor]:
        z = self.forward(i)
        conv, norm = self.modules
        wanted = {"dw": conv.weight, "dscale": norm.weight, "dbias": norm.bias}
        wanted |= {"dx": self.x[i]} if self.x[i].requires_grad else {}
        wanted |= {"dshortcut": self.shortcut[i]} if self.stride else {}
        found = torch.autograd.grad(z, list(wanted.values()), self.dz[i] if gradient is None else gradient)
        return {"z": z.detach()} | dict(zip(wanted, found, strict=True))

    def exact(self, z: Tensor) -> dict[str, Tensor]:
        """In float64; where z, that of ours, is rectified, so is the gradient."""
        conv, norm = self.modules
        leaves = {"dx": self.x[0], "dw": conv.weight, "dscale": norm.weight, "dbias": norm.bias}
        leaves |= {"dshortcut": self.shortcut[0]} if self.stride else {}
        leaves = {key: leaf.detach().double().requires_grad_() for key, leaf in leaves.items()}
        y = F.conv2d(leaves["dx"], leaves["dw"], stride=conv.stride, padding=1)
        mean, variance = (torch.full_like(norm.weight, value, dtype=torch.float64) for value in (0, 1))
        linear = F.batch_norm(y, mean, variance, leaves["dscale"], leaves["dbias"], True, 0.1, norm.eps)
        if self.stride:
            new = linear.shape[1] - leaves["dshortcut"].shape[1]
            padding = (0, 0, 0, 0, new // 2, new - new // 2)
            linear = linear + F.pad(leaves["dshortcut"][:, :, :: self.stride, :: self.stride], padding)
        dz = torch.where(z > 0, self.dz[0], 0) if self.rectified else self.dz[0]
        found = torch.autograd.grad(linear, list(leaves.values()), dz.double())
        result = {"z": linear.relu() if self.rectified else linear, "mean": mean, "variance": variance}
        return result | dict(zip(leaves, found, strict=True))

    def fresh(self, i: int = 0) -> dict[str, Tensor]:
        """A step from the start of the running statistics, which are among the results."""
        norm = self.modules[1]
        norm.reset_running_stats()
        return self.both(i) | {"mean": norm.running_mean.clone(), "variance": norm.running_var.clone()}


def examine(key: Key, shortcut_stride: int) -> tuple[dict[str, dict[str, float]], bool]:
    """In a process of its own, so that all kernels are compiled at once: errors, and whether bits repeat."""
    torch.manual_seed(0)
    layer = Layer(key, shortcut_stride)
    errors: dict[str, dict[str, float]] = {}
    for name in ("fused", "conv3x3"):
        with way(name):
            ours = layer.fresh()
        exact = layer.exact(ours["z"])
        errors[name] = {kind: error(value, exact[kind]) for kind, value in ours.items()}
    first, busy = layer.fresh(), torch.cuda.Stream()
    other = torch.randn(2048, 2048, device="cuda")
    repeatable = True
    for _ in range(20):
        with torch.cuda.stream(busy):
            other @ other
        repeatable &= all(torch.equal(first[kind], value) for kind, value in layer.fresh().items())
    return errors, repeatable and layer.modules[0].tickets.item() == 0


def layers() -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(LAYERS), mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(examine, *layer) for layer in LAYERS]
        for (key, shortcut_stride), future in zip(LAYERS, futures, strict=True):
            name = f"{key[0]}-{key[1]}/{key[2]} @{SHAPES[key]} shortcut {shortcut_stride or 'none'}"
            try:
                errors, repeatable = future.result(timeout=120)
            except Exception:
                print(f"{name} failed\n{traceback.format_exc(limit=-3)}", flush=True)
                continue
            rows.append({"layer": key, "shortcut": shortcut_stride, "errors": errors, "repeatable": repeatable})
            print(f"{name}: {'bits repeat' if repeatable else 'NOT REPEATABLE, or the ticket is not zero'}; errors")
            for kind, value in errors["fused"].items():
                print(f"    {kind:<10}{value:9.1e}  apart {errors['conv3x3'][kind]:9.1e}", flush=True)
    for row in rows:
        try:
            layer = Layer(row["layer"], row["shortcut"])
            for name in ("fused", "conv3x3"):
                with way(name):
                    row[name] = [microseconds(call, calls=CALLS) for call in (layer.forward, layer.both)]
            times = (
                f"{ours:.1f} us (apart {theirs:.1f})" for ours, theirs in zip(row["fused"], row["conv3x3"], strict=True)
            )
            print(f"{row['layer']} shortcut {row['shortcut']}: " + ", and backward ".join(times), flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
    return rows


def random_images(images: int = 40 * BATCH) -> ResidentImages:
    draw = np.random.default_rng(0)
    pictures = draw.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    mean = torch.full((3,), 127.5)
    return ResidentImages(pictures, draw.integers(0, 10, images), mean=mean, std=mean / 2, device=torch.device("cuda"))


def members(depth: int, runs: int, data: ResidentImages) -> list[Member]:
    made = [
        Member(Run(f"cifar_resnet{depth}", "softmax", 0.05, seed=seed), data, 10, Schedule(20, BATCH, warmup_epochs=1),
               compiled=False, world=World())
        for seed in range(runs)
    ]  # fmt: skip
    for member in made:
        member.start_epoch(0)
    return made


def count_kernels(member: Member) -> tuple[int, list[str]]:
    """Of a step, and which take longest."""
    for _ in range(3):
        member.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        member.step()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name] += 1
            times[event.name] += event.time_range.elapsed_us()
    longest = [f"{took:7.1f} us {kernels[name]:4d} x {name[:90]}" for name, took in times.most_common(16)]
    return sum(kernels.values()), [f"{sum(times.values()):.0f} us busy", *longest]


def network(depth: int, runs: list[int]) -> dict[str, dict[str, Any]]:
    data = random_images()
    rows: dict[str, dict[str, Any]] = {name: {} for name in WAYS}
    for name, row in rows.items():
        try:
            with way(name):
                row["kernels"], longest = count_kernels(members(depth, 1, data)[0])
            print(f"ResNet-{depth} {name}: {row['kernels']} kernels a step, " + "\n    ".join(longest), flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
    for count, name in itertools.product(runs, WAYS):
        try:
            with way(name):
                branches = members(depth, count, data)
                graph = Graph(branches)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
            for mark in marks[:-1]:
                mark.record()
                graph.replay()
            marks[-1].record()
            torch.cuda.synchronize()
            took = [1e3 * a.elapsed_time(b) / count for a, b in itertools.pairwise(marks[20:])]
            rows[name][f"us of {count}"] = statistics.median(took)
            losses = branches[0].losses[:20].tolist()
            rows[name][f"losses of {count}"] = losses
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            print(
                f"{count:3d} runs, {name:<8}{statistics.median(took):8.1f} us a step and run\n    {shown}", flush=True
            )
            del graph, branches
        except Exception:
            traceback.print_exc(limit=-4)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=int, metavar="DEPTH")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    result: dict[str, object] = {"environment": environment(), "layers": layers()}
    if options.network:
        result["network"] = network(options.network, options.runs)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
