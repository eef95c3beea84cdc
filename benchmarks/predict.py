"""Images per second of `kernelhead predict --out`, beside a plain loop over a DataLoader.

    python benchmarks/predict.py [--images 2000] [--repeats 3] [--device auto] [--json lab/results/bench/predict.json]

JPEG files of 500 x 375 pixels; torchvision's ResNet-18 at 224 pixels without trained weights. The plain loop has the
same network, batches and workers, torchvision's resize and centre crop, and keeps the class of each image. Both take
turns, and both start their workers anew.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.data import batch_share, worker_count
from kernelhead.finetune.distributed import choose_device
from kernelhead.finetune.images import expand
from kernelhead.finetune.prediction import predict_into
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, CLASSES = 224, 100


class Files(Dataset[torch.Tensor]):
    """The usual data set of a plain script."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.seen = v2.Compose([v2.Resize(256), v2.CenterCrop(SIZE), v2.ToImage(), v2.ToDtype(torch.float32, True)])
        self.normalise = v2.Normalize(MEAN, STD)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        found: torch.Tensor = self.normalise(self.seen(Image.open(self.paths[index]).convert("RGB")))
        return found


def plain(saved: SavedClassifier, paths: list[Path], device: torch.device) -> list[int]:
    model, found = saved.model.to(device).eval(), list[int]()
    given: dict[str, Any] = {"batch_size": batch_share(SIZE), "num_workers": worker_count(saved.spec)}
    with torch.inference_mode():
        for images in DataLoader(Files(paths), **given, pin_memory=device.type == "cuda"):
            found += model(images.to(device, non_blocking=True)).argmax(1).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rng = choose_device(options.device), np.random.default_rng(0)
    spec = resolved(TrainSpec("none", "torchvision/resnet18", "linear", pretrained=False, amp="none"))
    model = create_classifier(spec, CLASSES)
    names = [f"class{index:02}" for index in range(CLASSES)]
    saved = SavedClassifier(model, head_of(model), names, spec, Input(SIZE, MEAN, STD))
    seconds: dict[str, list[float]] = {"kernelhead": [], "plain": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary) / "images", Path(temporary) / "found.csv"
        folder.mkdir()
        for index in range(100):
            smooth = Image.fromarray(rng.integers(256, size=(30, 40, 3), dtype=np.uint8)).resize((500, 375))
            smooth.save(folder / f"{index:07}.jpg", quality=90)
        for index in range(100, options.images):
            os.link(folder / f"{index % 100:07}.jpg", folder / f"{index:07}.jpg")
        paths = list(expand([folder]))
        for _ in range(options.repeats):
            began = time.perf_counter()
            predict_into(out, saved, expand([folder]), device, len(paths))
            seconds["kernelhead"].append(time.perf_counter() - began)
            began = time.perf_counter()
            found = plain(saved, paths, device)
            seconds["plain"].append(time.perf_counter() - began)
        own = [line.split(",")[1] for line in out.read_text().splitlines()[1:]]
    same = statistics.fmean(name == names[label] for name, label in zip(own, found, strict=True))
    row = {name: options.images / statistics.median(each) for name, each in seconds.items()}
    row |= {"ratio": row["kernelhead"] / row["plain"], "same_class": same}
    print(json.dumps(row))
    if options.json:
        made = {
            "benchmark": "predict",
            "images": options.images,
            "repeats": options.repeats,
            "rows": {device.type: row},
        }
        write_bytes(options.json, (json.dumps({**made, **environment()}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
