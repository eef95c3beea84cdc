"""What the prototypes of a class do: networks of the table `saturation` on all images of CIFAR-100.

    python lab/benchmarks/prototypes.py runs [--epochs 100] [--json lab/results/bench/prototypes.json]

For each network with 2, 4 or 8 prototypes on the pooled feature, summed or in a mixture (logsumexp), in float32:
- accuracy on the training images, as they are, and on the test images;
- idle: percent of the prototypes that are the nearest of their class to none of its training images;
- twins: percent whose cosine to another of their class is above 0.99;
- in use: exp of the entropy of softmax over the kernel values of an image with its class, mean over training images.
RUNS is where `kernelhead-lab reproduce saturation --epochs 100 --protocol tuned` left its networks.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.results import FORMAT
from kernelhead.metrics import accuracy
from kernelhead_lab.data.images import Images
from kernelhead_lab.data.open import open_data
from kernelhead_lab.engine.loop import predict
from kernelhead_lab.networks import Classifier
from kernelhead_lab.tables.beyond import SATURATION
from kernelhead_lab.tables.outcome import load_network
from kernelhead_lab.tables.store import Store

KINDS = "sum of prototypes", "logsumexp of prototypes"


def examine(model: Classifier, train: Images, test: Images) -> dict[str, Any]:
    head: Any = model.head
    labels = train.labels
    features, unseen = (predict(model.backbone, images) for images in (train, test))
    points = F.normalize(head.weight.detach(), dim=1).view(head.num_classes, head.prototypes, -1)
    own = torch.einsum("nd,npd->np", F.normalize(features, dim=1), points[labels])  # cosines with those of its class
    nearest = torch.bincount(labels * head.prototypes + own.argmax(1), minlength=len(head.weight))
    twins = head.describe().points.collapsed
    with torch.no_grad():
        shares = torch.softmax(head.kernel(own).double(), 1)
        accuracies = [accuracy(head(features), labels), accuracy(head(unseen), test.labels)]
    return {
        "prototypes": head.prototypes,
        "aggregate": head.aggregate,
        "training_accuracy": accuracies[0],
        "test_accuracy": accuracies[1],
        "idle": 100 * (nearest == 0).double().mean().item(),
        "twins": 100 * len(twins) / len(head.weight),
        "in_use": torch.special.entr(shares).sum(1).exp().mean().item(),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    titles = ["prototypes", "aggregate", "training accuracy, %", "test accuracy, %", "idle, %", "twins, %", "in use"]
    lines = [titles, ["--:", "---", *["--:"] * 5]]
    for row in rows:
        count, aggregate, *figures = row.values()
        lines.append([str(count), aggregate, *(f"{figure:.1f}" for figure in figures)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    opened = open_data("cifar100", torch.device("cpu"))
    store, protocol = Store(options.runs, options.epochs), SATURATION.protocols["tuned"]
    cells = [
        cell for cell in SATURATION.cells if cell.row.rstrip("0123456789 ") in KINDS and not cell.row.endswith(" 1")
    ]
    rows = []
    for cell in cells:
        choice = store.choice(cell, protocol)
        if choice is None:
            raise SystemExit(f"{options.runs} has no runs of {cell.row!r}; make them with kernelhead-lab reproduce")
        spec = protocol.applied(cell.spec, choice, options.epochs, 0)
        rows.append(examine(load_network(store.model_path(spec)), opened.train, opened.test))
        print(markdown(rows).splitlines()[-1], flush=True)
    if options.json:
        made = {"format": FORMAT, "benchmark": "prototypes", "epochs": options.epochs, "rows": rows, **environment()}
        write_bytes(options.json, (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
