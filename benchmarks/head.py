"""The kernel head against its peers: time of a forward and backward pass with cross-entropy, and what autograd keeps.

    python benchmarks/head.py [--repeats 200] [--threads 2] [--json results/bench/head.json]

Peers, all in one run and interleaved, so that a slow moment of the machine hits them alike:
- linear: nn.Linear and F.cross_entropy;
- naive: the kernel head with all powers of the cosines materialised, N x (M + 3) x C, left to autograd;
- linear and kernel again under torch.compile, at one size;
- expansion: linear expansion, BatchNorm, ReLU, average and linear layer, of the width of the landmarks.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead import KernelHead, create_head
from kernelhead.files import environment
from kernelhead.timing import kept_bytes, medians

SHAPES = [(128, 2048, 1000), (128, 64, 100), (2, 2, 2), (1024, 64, 100), (1024, 512, 10000)]  # N, D, C


class NaiveKernelHead(nn.Module):
    """Every power of the cosines in one tensor, weighted and summed: what a first implementation looks like."""

    def __init__(self, in_features: int, num_classes: int, degree: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, in_features) / in_features**0.5)
        self.raw_alpha = nn.Parameter(torch.ones(degree + 3))
        self.degree = degree

    def forward(self, features: Tensor) -> Tensor:
        t = F.normalize(features) @ F.normalize(self.weight).t()
        ones, minus_ones = (t > 1 - 1e-6).to(t), (t < -1 + 1e-6).to(t)
        powers = [t**m for m in range(self.degree + 1)]
        basis = torch.stack([ones + minus_ones, ones - minus_ones, *powers], dim=1)
        return (basis * torch.relu(self.raw_alpha)[None, :, None]).sum(1)


def training_step(head: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        head.zero_grad(set_to_none=True)
        F.cross_entropy(head(x), y).backward()

    return step


def compare(shape: tuple[int, ...], classes: int, heads: dict[str, nn.Module], repeats: int) -> dict[str, object]:
    x = torch.randn(shape, requires_grad=True)
    y = torch.randint(classes, (shape[0],))
    times = medians({name: training_step(head, x, y) for name, head in heads.items()}, math.inf, most=repeats)
    memory = {name: kept_bytes(partial(head, x)) for name, head in heads.items()}
    peer = next(iter(heads))
    print(f"\ninput {shape}, {classes} classes")
    for name in heads:
        ratio = times[name] / times[peer]
        print(f"  {name:<28}{times[name]:9.3f} ms  {ratio:6.2f} x {peer:<10}{memory[name] / 2**20:9.3f} MiB saved")
    return {"shape": shape, "classes": classes, "milliseconds": times, "saved_bytes": memory, "peer": peer}


def markdown(rows: list[dict[str, object]]) -> str:
    """The README's table: what was measured, its peer, their ratio, and the ratio we set out for."""
    goals = {("kernel", 128, 2048): "1.2", ("kernel", 128, 64): "1.8", ("kernel", 1024, 512): "1.25"}
    goals |= {("compiled kernel", 128, 64): "1.25", ("landmarks", 128, 64): "1.3"}
    lines = ["| head | input | classes | time | peer | ratio | at most |", "|---|---|--:|--:|---|--:|--:|"]
    for row in rows:
        times, peer, shape = row["milliseconds"], row["peer"], row["shape"]
        ours = next(name for name in times if name not in (peer, "naive"))
        goal = goals.get((ours, *shape[:2]), "")
        cells = [ours, " x ".join(map(str, shape)), str(row["classes"]), f"{times[ours]:.2f} ms"]
        cells += [f"{peer}, {times[peer]:.2f} ms", f"{times[ours] / times[peer]:.2f}", goal]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    for samples, width, classes in SHAPES:
        heads = {
            "linear": nn.Linear(width, classes),
            "kernel": KernelHead(width, classes),
            "naive": NaiveKernelHead(width, classes),
        }
        repeats = options.repeats if samples * classes < 10**6 else max(5, options.repeats // 20)
        row = compare((samples, width), classes, heads, repeats)
        times, memory = row["milliseconds"], row["saved_bytes"]
        extra = (memory["kernel"] - memory["linear"]) / (4 * samples * classes)
        print(f"  the kernel head is {times['naive'] / times['kernel']:.1f} x faster than the naive version, and saves")
        print(
            f"  {extra:.3f} N x C tensors beyond the linear layer; the naive version "
            f"{(memory['naive'] - memory['linear']) / (4 * samples * classes):.1f}"
        )
        rows.append(row)

    heads = {
        "compiled linear": torch.compile(nn.Linear(64, 100)),
        "compiled kernel": torch.compile(KernelHead(64, 100)),
    }
    rows.append(compare((128, 64), 100, heads, options.repeats))
    heads = {
        "expansion": create_head("expansion", 64, 100, width=512),
        "landmarks": create_head("landmarks", 64, 100, landmarks=512),
    }
    rows.append(compare((128, 64, 8, 8), 100, heads, max(50, options.repeats // 4)))

    print("\n" + markdown(rows))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"rows": rows, "repeats": options.repeats, **environment()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
