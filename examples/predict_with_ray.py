"""Name the class of many images with Ray Data: actors hold the model, and batches of paths come to them.

    python examples/predict_with_ray.py MODEL IMAGES OUT [ACTORS]

MODEL is a run of `kernelhead train`, IMAGES a folder, and OUT gets parquet files. Take one actor per GPU, or per CPU
core. On one machine `kernelhead predict --out` does the same without Ray, and can be interrupted.

Needs pip install 'kernelhead[ray,vision]'.
"""

import sys
from pathlib import Path
from typing import Any

import ray
import torch

from kernelhead.finetune.distributed import choose_device
from kernelhead.finetune.images import expand
from kernelhead.finetune.prediction import COLUMNS, classify_files, predictions
from kernelhead.finetune.saved import load_classifier


class Classifier:
    def __init__(self, model: str) -> None:
        self.saved, self.device = load_classifier(Path(model)), choose_device("auto")

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        paths = [Path(path) for path in batch["item"]]
        found = predictions(self.saved, classify_files(self.saved, paths, self.device, workers=0))
        rows = [row for _, own in found for row in own]
        return {name: list(values) for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


def main(model: str, images: str, out: str, actors: int = 1) -> None:
    paths = [str(path) for path in expand([Path(images).resolve()])]
    data = ray.data.from_items(paths).map_batches(
        Classifier,
        fn_constructor_args=(str(Path(model).resolve()),),
        batch_size=256,
        num_cpus=1,
        num_gpus=int(torch.cuda.is_available()),
        compute=ray.data.ActorPoolStrategy(size=int(actors)),
    )
    data.write_parquet(str(Path(out).resolve()))
    print(f"Written {len(paths):,} predictions to {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
