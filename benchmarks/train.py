"""The training loop on one GPU with real CIFAR-10: seconds an epoch and run, beside a plain PyTorch script.

    python benchmarks/train.py [--depths 8 20 56] [--runs 1 4 8 16] [--epochs 3] [--json results/bench/train.json]

Ours: `kernelhead.train.loop.train` with 1 to 16 runs (seeds) at once, with and without torch.compile: whole epochs from
one end to the next, shuffling and book-keeping included; the first epoch (capture, compilation) is told apart.
The peer, in the same run: a plain script of the usual kind: DataLoader with worker processes, torchvision's transforms,
pinned memory, eager network in channels_last, bf16 autocast, torch.optim.SGD, cudnn.benchmark.
Both train CIFAR ResNets with the softmax head at batch 128. Rows that the JSON file already has are kept.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from kernelhead.backbones import conv3x3, expected_input
from kernelhead.data.cifar import load_cifar
from kernelhead.data.open import open_data
from kernelhead.results import environment, write_bytes
from kernelhead.train.loop import Moment, Run, train
from kernelhead.train.schedule import Schedule

BATCH = 128


def ours(depth: int, runs: int, compiled: bool, epochs: int, device: torch.device) -> dict[str, Any]:
    data = open_data("cifar10", expected_input("resnet50"), device).train
    ends = [time.perf_counter()]

    def progress(moment: Moment) -> None:
        if moment.epoch_done:
            ends.append(time.perf_counter())

    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    each = [Run(f"cifar_resnet{depth}", "softmax", 0.1, 5e-4, seed=seed) for seed in range(runs)]
    schedule = Schedule(epochs + 1, BATCH, warmup_epochs=1)
    trained = train(each, data, 10, schedule, compiled=compiled, progress=progress)
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {
        "seconds": statistics.median(seconds) / runs,
        "slowest": max(seconds) / runs,
        "first_epoch": ends[1] - ends[0],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "last_losses": [result.losses[-50:].mean().item() for result in trained],
    }


class PlainImages(Dataset[tuple[torch.Tensor, int]]):
    """As the usual script has it: one image after the other, through torchvision's transforms."""

    def __init__(self) -> None:
        from torchvision import transforms

        images = load_cifar("cifar10")
        self.images, self.labels = images.x_train, images.y_train.astype("int64")
        self.transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def plain(depth: int, workers: int, epochs: int, device: torch.device) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    conv3x3.TRITON = False  # PyTorch's own convolutions and BatchNorm: outside a graph our operators cost the host more
    model = Run(f"cifar_resnet{depth}", "softmax", 0.1).create(10).to(device, memory_format=torch.channels_last)
    loader = DataLoader(
        PlainImages(), BATCH, shuffle=True, drop_last=True, num_workers=workers, pin_memory=True,
        persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip
    total = (epochs + 1) * len(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    ends = [time.perf_counter()]
    for _ in range(epochs + 1):
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
    torch.backends.cudnn.benchmark, conv3x3.TRITON = False, True
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {"seconds": statistics.median(seconds), "first_epoch": ends[1] - ends[0], "last_losses": [loss.item()]}


def markdown(rows: dict[str, Any]) -> str:
    """Seconds an epoch and run, a line for each network with and without torch.compile."""
    lines = [
        "| network | plain script | 1 run | 4 at once | 8 at once | 16 at once | plain script over the best |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    plains = {name.split()[0]: row["seconds"] for name, row in rows.items() if "plain" in name}
    for network, peer in plains.items():
        for compiled in ("", " compiled"):
            ours = [rows[f"{network} x{runs}{compiled}"]["seconds"] for runs in (1, 4, 8, 16)]
            label = f"ResNet-{network.removeprefix('resnet')}{', torch.compile' if compiled else ''}"
            cells = [label, f"{peer:.2f}", *(f"{seconds:.3f}" for seconds in ours), f"{peer / min(ours):.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 20, 56])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--epochs", type=int, default=3, help="timed epochs, after a first one")
    parser.add_argument("--workers", type=int, default=8, help="of the plain script's DataLoader")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    device = torch.device("cuda")
    rows: dict[str, Any] = {}
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]

    wanted: list[tuple[str, Any]] = []
    for depth in options.depths:
        name = f"resnet{depth} plain, {options.workers} workers"
        wanted.append((name, lambda depth=depth: plain(depth, options.workers, 1, device)))
        for compiled in (False, True):
            for runs in options.runs:
                name = f"resnet{depth} x{runs}{' compiled' if compiled else ''}"
                wanted.append((name, lambda d=depth, r=runs, c=compiled: ours(d, r, c, options.epochs, device)))
    for name, measure in wanted:
        if name not in rows:
            rows[name] = measure()
            torch.cuda.empty_cache()
            if options.json:
                made = {"benchmark": "train", "batch_size": BATCH, "rows": rows, **environment()}
                write_bytes(options.json, (json.dumps(made, indent=1) + "\n").encode())
        row = rows[name]
        peer = rows[f"resnet{name.split()[0].removeprefix('resnet')} plain, {options.workers} workers"]
        ratio = peer["seconds"] / row["seconds"]
        print(f"{name:32s} {row['seconds']:7.3f} s an epoch and run, {ratio:5.1f} x plain, "
              f"first epoch {row['first_epoch']:6.1f} s, loss {row['last_losses'][0]:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
