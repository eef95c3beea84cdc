"""Pooling in the RKHS: time and memory of a training step of landmarks on maps, eager and compiled.

    python benchmarks/pool.py [--json results/bench/pool_plain.json] [--batch 128] [--landmarks 2048]

A step is forward, cross-entropy and backward to features and parameters, on maps of 64, 512 and 2048 channels and
8 x 8 positions; on CUDA under autocast to bfloat16. All ways take turns in one run:
- eager: `LandmarkHead`, whose pooling goes through blocks of samples (`kernelhead.fused.kernel_mean`);
- compiled: the same head under torch.compile, as plain operations that hold all cosines;
- expansion, the peer: a ReLU expansion of the same width, eager;
- expansion, compiled.
Memory is what autograd keeps for the backward pass, and on CUDA the peak of a step above its inputs too.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import create_head
from kernelhead.files import environment
from kernelhead.timing import kept_bytes, medians

CHANNELS, SIDE, CLASSES = (64, 512, 2048), 8, 100
Head = Callable[[Tensor], Tensor]


def loss(head: Head, maps: Tensor, labels: Tensor) -> Tensor:
    device = maps.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return F.cross_entropy(head(maps), labels)


def train(head: Head, maps: Tensor, labels: Tensor) -> None:
    maps.grad = None
    loss(head, maps, labels).backward()


def peak_bytes(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(channels: int, batch: int, landmarks: int, rounds: int, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    maps = torch.randn(batch, channels, SIDE, SIDE, device=device, requires_grad=True)
    labels = torch.randint(CLASSES, (batch,), device=device)
    kernel = create_head("landmarks", channels, CLASSES, landmarks=landmarks).to(device)
    peer = create_head("expansion", channels, CLASSES, width=landmarks).to(device)
    heads: dict[str, Head] = {
        "eager": kernel,
        "compiled": torch.compile(kernel, dynamic=False),
        "expansion": peer,
        "expansion, compiled": torch.compile(peer, dynamic=False),
    }
    steps = {name: partial(train, head, maps, labels) for name, head in heads.items()}
    times = medians(steps, math.inf, most=rounds)
    kept = {name: kept_bytes(partial(loss, head, maps, labels)) for name, head in heads.items()}
    peaks = {name: peak_bytes(step) for name, step in steps.items()} if device.type == "cuda" else {}
    for name in heads:
        cost = f"{times[name]:9.2f} ms {times[name] / times['expansion']:6.2f} x {kept[name] / 1e6:9.1f} MB kept"
        peak = f"{peaks[name] / 1e6:9.1f} MB at the peak" if peaks else ""
        print(f"{channels:>5} channels  {name:<20}{cost}{peak}", flush=True)
    shape = (batch, channels, SIDE, SIDE)
    return {"shape": shape, "landmarks": landmarks, "ms": times, "kept_bytes": kept, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--landmarks", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [compare(each, options.batch, options.landmarks, options.rounds, device) for each in CHANNELS]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"classes": CLASSES, "rows": rows, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
