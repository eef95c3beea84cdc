"""Convolution, BatchNorm, ReLU and whole residual blocks as one operation: errors, microseconds, training steps.

    python lab/benchmarks/conv_norm.py [--network 20] [--runs 1 8 16] [--also 8 56]
        [--json lab/results/bench/conv_norm.json]

First the first layer and the blocks of a CIFAR ResNet at batch 128. Errors are those against float64 on the same
rounded inputs, relative in norm, beside those of the composition (Conv3x3, nn.BatchNorm2d, addition, ReLU). 20
repetitions beside other work have to give the same bits. Times are those of a call within a CUDA graph, forward, and
forward and backward.

Then training steps of the network on random images, as the laboratory's engine runs them: one CUDA graph with 1 to 16
runs as parallel branches. There are four ways: cuDNN's convolutions, the same under torch.compile, Conv3x3, and the
fused operation. It prints the number of kernels per step, those that take longest, the losses of the first 20 steps,
and microseconds per step and run.
--also: the fused way of other depths. --skip-layers: training steps alone. --ways: only some of the four.
"""

import argparse
import copy
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

from kernelhead.files import environment
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.data.resident import ResidentImages
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.graph import Graph
from kernelhead_lab.engine.member import Member
from kernelhead_lab.networks import conv3x3 as backbone
from kernelhead_lab.networks.cifar_resnet import BasicBlock
from kernelhead_lab.networks.conv3x3 import Conv3x3, conv_norm
from kernelhead_lab.tables.cifar import LINEAR, spec_of

WAYS = ("cudnn", "compiled", "conv3x3", "fused")
CALLS = 8


@contextmanager
def way(name: str) -> Iterator[None]:
    """Let the backbone take cuDNN's convolutions, Conv3x3 with what follows it apart, or all as one."""
    kept = Conv3x3.has_kernels, backbone._is_usual
    if name != "fused":
        backbone._is_usual = lambda norm: False
    if name in ("cudnn", "compiled"):
        Conv3x3.has_kernels = lambda self, x: False
    torch.compiler.reset()  # a way is not to run what another compiled
    try:
        yield
    finally:
        Conv3x3.has_kernels, backbone._is_usual = kept


class Unit:
    """The first layer of a network or one of its blocks, by the shape of its first convolution; CALLS inputs each."""

    def __init__(self, key: Key) -> None:
        (channels, out, stride), size = key, SHAPES[key]
        self.rectified = key != (64, 64, 1)  # as the last block of a network
        self.block: nn.Module
        if channels == 3:
            conv = Conv3x3(channels, out, 3, stride=stride, padding=1, bias=False)
            self.block = nn.ModuleDict({"conv1": conv, "bn1": nn.BatchNorm2d(out)})
        else:
            self.block = BasicBlock(channels, out, stride, kervolution=False, rectified=self.rectified)
        self.block.cuda().to(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter in self.block.parameters():
                parameter.add_(torch.randn_like(parameter) / 10)
                if parameter.dim() == 4:
                    parameter.copy_(parameter.bfloat16())
        self.x = [self._new(channels, size).add_(0.5).requires_grad_(channels > 3) for _ in range(CALLS)]
        self.dz = [self._new(out, size // stride) for _ in range(CALLS)]

    @staticmethod
    def _new(channels: int, size: int) -> Tensor:
        values = torch.randn(BATCH, channels, size, size, device="cuda", dtype=torch.bfloat16)
        return values.contiguous(memory_format=torch.channels_last)

    def hidden(self, i: int = 0) -> Tensor:
        """After the first convolution."""
        conv, norm = self.block.get_submodule("conv1"), self.block.get_submodule("bn1")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return conv_norm(conv, norm, self.x[i])

    def forward(self, i: int = 0) -> Tensor:
        if isinstance(self.block, nn.ModuleDict):
            return self.hidden(i)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.block(self.x[i])

    def both(self, i: int = 0) -> dict[str, Tensor]:
        z = self.forward(i)
        wanted = {f"d {name}": parameter for name, parameter in self.block.named_parameters()}
        wanted |= {"d x": self.x[i]} if self.x[i].requires_grad else {}
        found = torch.autograd.grad(z, list(wanted.values()), self.dz[i])
        return {"z": z.detach()} | dict(zip(wanted, found, strict=True))

    def exact(self, hidden: Tensor, z: Tensor) -> dict[str, Tensor]:
        """In float64; where those of ours are rectified, so are the values and the gradients."""
        block = copy.deepcopy(self.block).double()
        for module in block.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        x = self.x[0].detach().double().requires_grad_()
        stride = block.get_submodule("conv1").stride[0]
        with way("cudnn"):
            linear = conv_norm(block.get_submodule("conv1"), block.get_submodule("bn1"), x, rectified=False)
            if isinstance(block, BasicBlock):
                linear = conv_norm(block.conv2, block.bn2, torch.where(hidden > 0, linear, 0), rectified=False)
                new = linear.shape[1] - x.shape[1]
                linear = linear + F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, new // 2, new - new // 2))
        dz = torch.where(z > 0, self.dz[0], 0) if self.rectified else self.dz[0]
        leaves = {f"d {name}": parameter for name, parameter in block.named_parameters()} | {"d x": x}
        found = torch.autograd.grad(linear, list(leaves.values()), dz.double())
        result = {"z": linear.relu() if self.rectified else linear} | dict(zip(leaves, found, strict=True))
        return result | {name: buffer for name, buffer in block.named_buffers() if "running" in name}

    def fresh(self, i: int = 0) -> dict[str, Tensor]:
        """A step from the start of the running statistics, which are among the results."""
        for module in self.block.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
        found = self.both(i)
        return found | {name: buffer.clone() for name, buffer in self.block.named_buffers() if "running" in name}


def examine(key: Key) -> tuple[dict[str, dict[str, float]], bool]:
    """In a process of its own, so that all kernels are compiled at once: errors, and whether bits repeat."""
    torch.manual_seed(0)
    unit = Unit(key)
    errors: dict[str, dict[str, float]] = {}
    for name in ("fused", "conv3x3"):
        with way(name):
            hidden, ours = unit.hidden().detach(), unit.fresh()
        exact = unit.exact(hidden, ours["z"])
        errors[name] = {kind: error(value, exact[kind]) for kind, value in ours.items()}
    first, busy = unit.fresh(), torch.cuda.Stream()
    other = torch.randn(2048, 2048, device="cuda")
    repeatable = True
    for _ in range(20):
        with torch.cuda.stream(busy):
            other @ other
        repeatable &= all(torch.equal(first[kind], value) for kind, value in unit.fresh().items())
    tickets = [buffer.item() for name, buffer in unit.block.named_buffers() if "tickets" in name]
    return errors, repeatable and not any(tickets)


def layers() -> list[dict[str, Any]]:
    rows = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(SHAPES), mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(examine, key) for key in SHAPES]
        for (key, size), future in zip(SHAPES.items(), futures, strict=True):
            name = f"{key[0]}-{key[1]}/{key[2]} @{size}"
            try:
                errors, repeatable = future.result(timeout=120)
            except Exception:
                print(f"{name} failed\n{traceback.format_exc(limit=-3)}", flush=True)
                continue
            rows.append({"layer": key, "block": key[0] > 3, "errors": errors, "repeatable": repeatable})
            print(f"{name}: {'bits repeat' if repeatable else 'NOT REPEATABLE, or the tickets are not zero'}; errors")
            for kind, value in errors["fused"].items():
                print(f"    {kind:<18}{value:9.1e}  apart {errors['conv3x3'][kind]:9.1e}", flush=True)
    for row in rows:
        try:
            unit = Unit(row["layer"])
            for name in ("fused", "conv3x3"):
                with way(name):
                    row[name] = [microseconds(call, calls=CALLS) for call in (unit.forward, unit.both)]
            times = (
                f"{ours:.1f} us (apart {theirs:.1f})" for ours, theirs in zip(row["fused"], row["conv3x3"], strict=True)
            )
            print(f"{row['layer']}: " + ", and backward ".join(times), flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
    return rows


def random_images(images: int = 40 * BATCH) -> ResidentImages:
    draw = np.random.default_rng(0)
    random = draw.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8)
    mean = torch.full((3,), 127.5)
    return ResidentImages(random, draw.integers(0, 10, images), mean=mean, std=mean / 2, device=torch.device("cuda"))


def members(depth: int, runs: int, data: ResidentImages, *, compiled: bool) -> list[Member]:
    settings = {"batch_size": BATCH, "warmup_epochs": 1, "learning_rate": 0.05, "weight_decay": 1e-4, "head_rate": 1.0}
    made = []
    for seed in range(runs):
        feed = Feed(data, seed=seed, batch_size=BATCH, compiled=compiled)
        feed.start_epoch(0)
        spec = spec_of("cifar10", depth, LINEAR, epochs=20, seed=seed, **settings)
        made.append(Member(spec, feed, 10, compiled=compiled))
    return made


def count_kernels(member: Member) -> tuple[int, list[str]]:
    """Return how many kernels a step has, and which take longest."""
    for _ in range(3):
        member.feed.step()
        member.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        member.feed.step()
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


def network(depth: int, runs: list[int], ways: tuple[str, ...] = WAYS) -> dict[str, dict[str, Any]]:
    data = random_images()
    rows: dict[str, dict[str, Any]] = {name: {} for name in ways}
    for name, row in rows.items():
        try:
            with way(name):
                row["kernels"], longest = count_kernels(members(depth, 1, data, compiled=name == "compiled")[0])
            print(f"ResNet-{depth} {name}: {row['kernels']} kernels per step, " + "\n    ".join(longest), flush=True)
        except Exception:
            traceback.print_exc(limit=-4)
    for count, name in itertools.product(runs, ways):
        try:
            with way(name):
                branches = members(depth, count, data, compiled=name == "compiled")
                graph = Graph(branches, 0)
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
            print(f"ResNet-{depth}, {count:3d} runs, {name:<8}{statistics.median(took):8.1f} us per step and run")
            print(f"    {shown}", flush=True)
            del graph, branches
        except Exception:
            traceback.print_exc(limit=-4)
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", type=int, metavar="DEPTH")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--also", type=int, nargs="+", metavar="DEPTH", default=[])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--skip-layers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    result: dict[str, object] = {"format": FORMAT, "environment": environment()}
    if not options.skip_layers:
        result["layers"] = layers()
    if options.network:
        result["network"] = network(options.network, options.runs, tuple(options.ways))
    if options.also:
        result["also"] = {depth: network(depth, options.runs, ("fused",)) for depth in options.also}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
