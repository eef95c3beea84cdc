"""The laboratory's engine on one GPU with real CIFAR-10: seconds per epoch and run, beside a plain PyTorch script.

    python lab/benchmarks/train.py [--depths 8 20 56] [--runs 1 4 8 16] [--epochs 3]
        [--json lab/results/bench/train.json]

Ours: `kernelhead_lab.engine.loop.train` with 1 to 16 runs (seeds) at once, with and without torch.compile: whole
epochs, shuffling and book-keeping included. The first epoch (capture, compilation) is listed apart. The peer: a plain
script of the usual kind. It has a DataLoader with worker processes, torchvision's transforms, pinned memory, an eager
network in channels_last, bfloat16 autocast, torch.optim.SGD and cudnn.benchmark. Both train CIFAR ResNets with the
linear head at batch 128. A second peer, "compiled", has its images on the GPU without augmentation, a network under
torch.compile(mode="reduce-overhead"), whose CUDA graphs are torch's own, and the fused SGD. Rows that the JSON file
already has are kept.
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

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.cifar import load_cifar
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.data.open import open_data
from kernelhead_lab.engine.loop import Moment, train
from kernelhead_lab.networks import build
from kernelhead_lab.networks.conv3x3 import Conv3x3
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables.cifar import LINEAR, spec_of

BATCH = 128


def spec(depth: int, epochs: int, seed: int = 0) -> LabSpec:
    settings = {"batch_size": BATCH, "warmup_epochs": 1, "learning_rate": 0.1, "weight_decay": 5e-4, "head_rate": 1.0}
    return spec_of("cifar10", depth, LINEAR, epochs=epochs, seed=seed, **settings)


def ours(depth: int, runs: int, compiled: bool, epochs: int, device: torch.device) -> dict[str, Any]:
    data = open_data("cifar10", device).train
    ends = [time.perf_counter()]

    def progress(moment: Moment) -> None:
        if moment.epoch_done:
            ends.append(time.perf_counter())

    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    specs = [spec(depth, epochs + 1, seed) for seed in range(runs)]
    trained = train(specs, data, 10, compiled=compiled, progress=progress)
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {
        "seconds": statistics.median(seconds) / runs,
        "slowest": max(seconds) / runs,
        "first_epoch": ends[1] - ends[0],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "last_losses": [result.losses[-50:].mean().item() for result in trained],
    }


class PlainImages(Dataset[tuple[torch.Tensor, int]]):
    """Images as the usual script has them: one after the other, through torchvision's transforms."""

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
    # PyTorch's own convolutions and BatchNorm: outside of a graph our operators cost the host more.
    kept, Conv3x3.has_kernels = Conv3x3.has_kernels, lambda self, x: False
    model = build(spec(depth, epochs), 10).to(device, memory_format=torch.channels_last)
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
    torch.backends.cudnn.benchmark, Conv3x3.has_kernels = False, kept
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {"seconds": statistics.median(seconds), "first_epoch": ends[1] - ends[0], "last_losses": [loss.item()]}


def compiled_script(depth: int, epochs: int, device: torch.device) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    kept, Conv3x3.has_kernels = Conv3x3.has_kernels, lambda self, x: False
    torch.compiler.reset()
    model = build(spec(depth, epochs), 10).to(device, memory_format=torch.channels_last)
    network = torch.compile(model, mode="reduce-overhead")
    known = load_cifar("cifar10")
    pixels = torch.from_numpy(known.x_train).to(device).permute(0, 3, 1, 2).float()
    pixels = ((pixels - 120.0) / 64.0).contiguous(memory_format=torch.channels_last)
    targets = torch.from_numpy(known.y_train.astype("int64")).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)
    ends = [time.perf_counter()]
    for _ in range(epochs + 1):
        for chosen in torch.randperm(len(targets), device=device).split(BATCH)[: len(targets) // BATCH]:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(network(pixels[chosen]), targets[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
    torch.backends.cudnn.benchmark, Conv3x3.has_kernels = False, kept
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {"seconds": statistics.median(seconds), "first_epoch": ends[1] - ends[0], "last_losses": [loss.item()]}


def markdown(rows: dict[str, Any]) -> str:
    """Return seconds per epoch and run, a line for each network with and without torch.compile."""
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
    parser.add_argument("--workers", type=int, default=8, help="workers of the plain script's DataLoader")
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
        wanted.append((f"resnet{depth} script, compiled", lambda d=depth: compiled_script(d, options.epochs, device)))
        for compiled in (False, True):
            for runs in options.runs:
                name = f"resnet{depth} x{runs}{' compiled' if compiled else ''}"
                wanted.append((name, lambda d=depth, r=runs, c=compiled: ours(d, r, c, options.epochs, device)))
    for name, measure in wanted:
        if name not in rows:
            rows[name] = measure()
            torch.cuda.empty_cache()
            if options.json:
                made = {"format": FORMAT, "benchmark": "train", "batch_size": BATCH, "rows": rows, **environment()}
                write_bytes(options.json, (json.dumps(made, indent=1) + "\n").encode())
        row = rows[name]
        peer = rows[f"resnet{name.split()[0].removeprefix('resnet')} plain, {options.workers} workers"]
        ratio = peer["seconds"] / row["seconds"]
        print(f"{name:32s} {row['seconds']:7.3f} s per epoch and run, {ratio:5.1f} x plain, "
              f"first epoch {row['first_epoch']:6.1f} s, loss {row['last_losses'][0]:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
