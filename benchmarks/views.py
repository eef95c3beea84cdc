"""Random-resized crops of 64 images at 224 pixels on a CPU, beside torchvision and beside matrices, as a GPU has them.

    python benchmarks/views.py [--threads 1] [--repeats 20] [--json lab/results/bench/views.json]

Images have short sides of 320 pixels, are in memory and are not normalised. All take turns. torchvision rounds to bytes
between the axes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torchvision.transforms import v2

from kernelhead.files import environment, write_bytes
from kernelhead.finetune import views

BATCH, SIZE, SHORT = 64, 224, 320
PEER = v2.Compose([v2.RandomResizedCrop(SIZE, views.SCALES, views.RATIOS), v2.RandomHorizontalFlip()])


def by_matrices(images: Tensor, about: Tensor) -> Tensor:
    top, left, height, width, mirrored, rows, columns = about.float().unbind(1)
    down = views._weights(top, height, rows, torch.zeros_like(mirrored), SIZE, torch.arange(images.shape[2]))
    across = views._weights(left, width, columns, mirrored, SIZE, torch.arange(images.shape[3]))
    narrow = images.float().flatten(1, 2) @ across.mT
    return down[:, None] @ narrow.view(*images.shape[:3], SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sides = [SHORT + (SHORT * (index % 10)) // 15 for index in range(BATCH)]
    images = [
        torch.randint(256, (3, SHORT, side) if side % 2 else (3, side, SHORT), dtype=torch.uint8) for side in sides
    ]
    shown = [views.training_view(*each.shape[1:], SIZE, "imagenet", "crop", Random(n)) for n, each in enumerate(images)]

    def stacked() -> tuple[Tensor, Tensor]:
        parts = (views.cut_out(image, view, SIZE) for image, view in zip(images, shown, strict=True))
        return views.stack(*zip(*parts, strict=True))

    methods: dict[str, Callable[[], Tensor]] = {
        "kernelhead": lambda: views.resample(*stacked(), SIZE),
        "torchvision": lambda: torch.stack([PEER(image) for image in images]).float(),
        "matrices": lambda: by_matrices(*stacked()),
    }
    difference = (methods["kernelhead"]() - methods["matrices"]()).abs().max().item()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(options.repeats):
        for name, method in methods.items():
            began = time.perf_counter()
            method()
            seconds[name].append(time.perf_counter() - began)
    row = {name: statistics.median(each) for name, each in seconds.items()}
    row |= {f"over_{name}": row["kernelhead"] / row[name] for name in ("torchvision", "matrices")}
    print(json.dumps({**row, "largest_difference": difference}))
    if options.json:
        made = {"benchmark": "views", "threads": options.threads, "repeats": options.repeats, "rows": {"cpu": row}}
        write_bytes(options.json, (json.dumps({**made, **environment()}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
