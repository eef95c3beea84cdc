"""What a small network learns from: labels, or a teacher's scores at a high or a low temperature. For a CPU.

    python lab/benchmarks/students.py TEACHER.safetensors [--data cifar100] [--epochs 10] [--json FIGURES.json]

Trains LeNet-5, and one with three times its channels and units, on nine tenths of the training images. They are
mirrored at random and not shifted, so that the teacher has to look at each only twice. Tests on the other tenth, which
the students do not see and the teacher may have seen: no test image is looked at. Each has three learning rates and one
seed. The best rate counts, so that differences of less than a point say little.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing import get_context
from torch.nn import functional as F

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.results import FORMAT
from kernelhead.finetune.schedule import epoch_order
from kernelhead.functional import distillation_loss
from kernelhead.heads import create_head
from kernelhead.metrics import summary
from kernelhead.optim import parameter_groups
from kernelhead_lab.data.images import hold_out
from kernelhead_lab.data.open import open_data
from kernelhead_lab.engine.schedule import rate_factors, steps_per_epoch
from kernelhead_lab.networks import Classifier, LeNet5, count_parameters
from kernelhead_lab.tables.outcome import load_network

HELD_OUT, DECAY, BATCH = 0.1, 1e-4, 128
RATES = {"linear": (0.01, 0.03, 0.1), "cosine": (0.1, 0.3, 1.0), "kernel": (0.1, 0.3, 1.0)}


class Case(NamedTuple):
    """A student: its head, what it learns from (None: the labels), and how wide it is."""

    head: str
    temperature: float | None
    width: int = 1

    def __str__(self) -> str:
        learned = "labels" if self.temperature is None else f"scores at {self.temperature:g}"
        return f"{self.head}, {learned}" + (f", {self.width} times as wide" if self.width > 1 else "")


CASES = [
    Case("linear", 20.0, 3),  # the longest
    *(Case(head, temperature) for head in RATES for temperature in (20.0, 4.0, None)),
]


class Wide(LeNet5):
    """LeNet-5 with more channels and units, all by the same factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = 84 * width
        self.conv1, self.conv2 = nn.Conv2d(3, 6 * width, 5), nn.Conv2d(6 * width, 16 * width, 5)
        self.fc1, self.fc2 = nn.Linear(400 * width, 120 * width), nn.Linear(120 * width, 84 * width)


@torch.no_grad()
def scores_of(teacher: nn.Module, images: Tensor) -> Tensor:
    """Return scores (n, 2, C) of images as they are, and mirrored."""
    teacher.eval()
    pairs = (torch.stack([teacher(batch), teacher(batch.flip(3))], 1) for batch in images.split(500))
    return torch.cat(list(pairs))


def trained(case: Case, images: Tensor, labels: Tensor, scores: Tensor, rate: float, epochs: int) -> Classifier:
    """A student that has learned from images (n, 3, 32, 32), labels (n,) and a teacher's scores (n, 2, C)."""
    torch.manual_seed(0)
    network = Wide(case.width)
    model = Classifier(network, create_head(case.head, network.num_features, scores.shape[2])).train()
    steps = steps_per_epoch(len(images), BATCH)
    factors = iter(rate_factors(steps, epochs, warmup_epochs=2))
    optimizer = torch.optim.SGD(parameter_groups(model, DECAY), lr=rate, momentum=0.9)
    for epoch in range(epochs):
        for batch in epoch_order(len(images), 0, epoch).split(BATCH)[:steps]:
            factor = next(factors)
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            side = torch.randint(2, (len(batch),))
            shown = torch.where((side == 1)[:, None, None, None], images[batch].flip(3), images[batch])
            logits = model(shown)
            if case.temperature is None:
                loss = F.cross_entropy(logits, labels[batch])
            else:
                loss = distillation_loss(logits, scores[batch, side], temperature=case.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def tested(model: Classifier, images: Tensor, labels: Tensor) -> float | None:
    """Return the accuracy in percent; None where training diverged."""
    logits = torch.cat([model(batch) for batch in images.split(1000)])
    return float(summary(logits, labels)["accuracy"]) if logits.isfinite().all() else None


class Figures(NamedTuple):
    """Accuracy on images that were held out and on those that were learned from; how large the student is."""

    held_out: float | None
    training: float | None
    parameters: int


def measured(
    case: Case, rate: float, epochs: int, data: tuple[Tensor, Tensor, Tensor], held: tuple[Tensor, Tensor]
) -> Figures:
    torch.set_num_threads(1)  # more of them do not help such small networks
    images, labels, scores = data
    model = trained(case, images, labels, scores, rate, epochs)
    return Figures(tested(model, *held), tested(model, images, labels), count_parameters(model))


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    titles = ["head, learns from", "held-out accuracy, %", "of the images it learns from", "rate", "parameters"]
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)]]
    for name, row in rows.items():
        accuracies = [row[of][row["rate"]] for of in ("held_out", "training")]
        told = ["diverged" if accuracy is None else f"{accuracy:.1f}" for accuracy in accuracies]
        lines.append([name, *told, row["rate"], f"{row['parameters']:,}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="a network that `kernelhead-lab reproduce` has kept")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    opened = open_data(options.data, torch.device("cpu"))
    images, labels = opened.train.plain(torch.arange(len(opened.train)))
    kept, held = hold_out(labels.numpy(), HELD_OUT, seed=0)
    teacher = load_network(options.teacher)
    if teacher.head.num_classes != len(opened.classes):
        parser.error(
            f"{options.teacher} knows {teacher.head.num_classes} classes, {options.data} has {len(opened.classes)}"
        )
    scores = scores_of(teacher, images[kept])
    data, tests = (images[kept], labels[kept], scores), (images[held], labels[held])
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:  # torch shares tensors with processes
        found = {
            case: {rate: pool.submit(measured, case, rate, options.epochs, data, tests) for rate in RATES[case.head]}
            for case in CASES
        }
        for case, of_rate in found.items():
            figures = {f"{rate:g}": future.result() for rate, future in of_rate.items()}
            held_out = {rate: own.held_out for rate, own in figures.items()}
            rows[str(case)] = {
                "held_out": held_out,
                "training": {rate: own.training for rate, own in figures.items()},
                "rate": max(held_out, key=lambda rate: held_out[rate] or 0.0),
                "parameters": next(iter(figures.values())).parameters,
            }
            print(f"{case}: {held_out}", flush=True)
    print(markdown(rows))
    if options.json:
        made = {"format": FORMAT, "benchmark": "students", "data": options.data, "epochs": options.epochs, "rows": rows}
        write_bytes(options.json, (json.dumps(made | environment(), indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
