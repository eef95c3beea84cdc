"""What a head costs: training and inference of a CIFAR ResNet with each head, beside the linear head.

    python lab/benchmarks/cost.py [--depths 8 20] [--at-once 8] [--json lab/results/bench/cost.json]
    python lab/benchmarks/cost.py --table [--runs lab/results] [--epochs 200] [--json COSTS ..]
    python lab/benchmarks/cost.py --plot saturation.png [--runs lab/results] [--epochs 200] [--json COSTS ..]

Training: microseconds per step and run of `kernelhead_lab.engine.loop.train` at batch 128, `--at-once` runs at a time.
It is the median of whole epochs of random images without the first (capture), and the lesser of two repetitions: one in
six or so was a third slower on an H200, from its first epoch to its last.

Inference: microseconds per image at batch 1000 in evaluation mode, kernel heads frozen, the median of 20. On a GPU it
runs under autocast to bfloat16 and within a CUDA graph, else the host would be measured.

--table and --plot measure nothing. The one sets the rows of JSON files beside the accuracies of the table `beyond`, the
other those of `saturation` against them (tuned protocol). Both take the files of several measurements. In the table all
heads of a network come from the first file that has it. In the plot a head comes from the first file that has it, as a
multiple of the linear head's time in that file.
"""

import argparse
import itertools
import json
import statistics
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.results import FORMAT
from kernelhead_lab.data.resident import ResidentImages, channel_statistics
from kernelhead_lab.engine.loop import Moment, Trained, train
from kernelhead_lab.networks import count_parameters
from kernelhead_lab.spec import LabSpec
from kernelhead_lab.tables import beyond
from kernelhead_lab.tables.beyond import BEYOND, SATURATION
from kernelhead_lab.tables.cifar import Head, spec_of
from kernelhead_lab.tables.grid import accuracies
from kernelhead_lab.tables.store import Store

BATCH, CLASSES, PEER = 128, 100, "linear"
REPETITIONS, EPOCHS = 2, 5
MEASURED = [Path("lab/results/bench/cost.json"), Path("lab/results/bench/cost_depths.json")]
DATA_SETS = tuple(beyond.DATA_SETS.values())
TIMES = {"train_us": ".0f", "inference_us": ".2f"}
HEADS: dict[str, Head] = {
    **{cell.row: (cell.spec.head, cell.spec.head_options) for cell in SATURATION.cells},
    "the paper's layer": beyond.HEADS["Kernel"],
}


def make_images(steps: int, device: torch.device) -> ResidentImages:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(steps * BATCH, 32, 32, 3), dtype=np.uint8)
    mean, std = channel_statistics(images)
    return ResidentImages(images, rng.integers(CLASSES, size=len(images)), mean=mean, std=std, device=device)


def spec(depth: int, own: Head, seed: int = 0) -> LabSpec:
    settings = {"batch_size": BATCH, "warmup_epochs": 1, "learning_rate": 0.05, "weight_decay": 5e-4, "head_rate": 1.0}
    return spec_of("cifar100", depth, own, epochs=EPOCHS, seed=seed, **settings)


def measure(depth: int, own: Head, data: ResidentImages, at_once: int) -> dict[str, Any]:
    specs = [spec(depth, own, seed) for seed in range(at_once)]
    seconds, trained = min((timed(specs, data) for _ in range(REPETITIONS)), key=itemgetter(0))
    model = trained[0].model.eval()
    parameters = count_parameters(model.head)
    if hasattr(model.head, "freeze"):
        model.head = model.head.freeze()
    return {
        "train_us": 1e6 * seconds / at_once,
        "inference_us": inference(model, data.labels.device),
        "head_parameters": parameters,
    }


def timed(specs: list[LabSpec], data: ResidentImages) -> tuple[float, list[Trained]]:
    """Return the seconds of a step of all runs at once, and what came of them."""
    ends: list[float] = []

    def progress(moment: Moment) -> None:
        if moment.epoch_done:
            ends.append(time.perf_counter())

    trained = train(specs, data, CLASSES, progress=progress)
    epoch = statistics.median(after - before for before, after in itertools.pairwise(ends))
    return epoch / (len(data) // BATCH), trained


def inference(model: torch.nn.Module, device: torch.device, batch: int = 1000, repeats: int = 20) -> float:
    images = torch.randn(batch, 3, 32, 32, device=device)

    def forward(_: int = 0) -> None:
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            model(images)

    if device.type == "cuda":
        from conv3x3 import microseconds  # beside this file

        images = images.contiguous(memory_format=torch.channels_last)
        return float(microseconds(forward, repeats, calls=1)) / batch
    seconds = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        forward()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds[3:]) / batch


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Return a line per network and head: parameters, times, their ratios to the linear head, accuracies if known."""
    told = any("accuracies" in row for row in rows.values())
    titles = ["network", "head", *([f"{data}, % (seeds)" for data in DATA_SETS] if told else []), "head's parameters"]
    titles += ["training, µs per step", "ratio", "inference, µs per image", "ratio"]
    lines = [titles, ["---", "---", *["--:"] * (len(titles) - 2)]]
    for name, row in rows.items():
        if told and "accuracies" not in row:
            continue
        network, head = name.split(", ", 1)
        line = [network, head, *([row["accuracies"].get(data, "") for data in DATA_SETS] if told else [])]
        line.append(f"{row['head_parameters']:,}")
        for key, form in TIMES.items():
            line += [f"{row[key]:{form}}", f"{row[key] / rows[f'{network}, {PEER}'][key]:.2f}"]
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_accuracies(rows: dict[str, dict[str, Any]], runs: Path, epochs: int) -> dict[str, dict[str, Any]]:
    """Return the rows with the accuracies of networks and heads of the table `beyond`, by data set."""
    store, protocol = Store(runs, epochs), BEYOND.protocols["tuned"]
    whole = {name: spec(8, own).head_options for name, own in HEADS.items()}
    names = {
        column: name
        for column, own in beyond.HEADS.items()
        for name in HEADS
        if (own[0], spec(8, own).head_options) == (HEADS[name][0], whole[name])
    }
    found: dict[str, dict[str, str]] = {}
    for cell in BEYOND.cells:
        column, data = cell.column.split()
        name, values = f"{cell.row}, {names[column]}", accuracies(cell, store, protocol)
        if values and name in rows:
            found.setdefault(name, {})[data] = f"{statistics.mean(values.values()):.2f} ({len(values)})"
    if not found:
        raise SystemExit(f"{runs} has no runs of {epochs} epochs of the table beyond whose cost was measured")
    return {**rows, **{name: {**rows[name], "accuracies": told} for name, told in found.items()}}


def together(files: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the rows of several measurements by depth; a network is that of the first file that has it."""
    found: dict[str, dict[str, Any]] = {}
    for rows in files:
        known = {name.split(", ")[0] for name in found}
        found |= {name: row for name, row in rows.items() if name.split(", ")[0] not in known}
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(", ")[0].rpartition("-")[2])))


def relative(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of one file with the time of a training step over that of the linear head."""
    peers = {name: rows[f"{name.split(', ')[0]}, {PEER}"] for name in rows}
    return {name: {**row, "train_ratio": row["train_us"] / peers[name]["train_us"]} for name, row in rows.items()}


def plot(rows: dict[str, dict[str, Any]], runs: Path, epochs: int, path: Path) -> None:
    """Draw the accuracy of ResNet-8 over parameters of the head, and over the time of a step, a line per kind."""
    import matplotlib.pyplot as plt

    store, protocol = Store(runs, epochs), SATURATION.protocols["tuned"]
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for cell in SATURATION.cells:
        found, cost = accuracies(cell, store, protocol), rows.get(f"{cell.column}, {cell.row}")
        if found and cost is not None:
            kind = cell.row.rstrip("0123456789").strip()
            accuracy = statistics.mean(found.values())
            lines.setdefault(kind, []).append((cost["head_parameters"], cost["train_ratio"], accuracy))
    if not lines:
        raise SystemExit(f"{runs} has no runs of {epochs} epochs of the table saturation whose cost was measured")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for kind, points in lines.items():
        style = "o-" if len(points) > 1 else "D"
        for number, axis in enumerate(axes):
            axis.plot([point[number] for point in points], [point[2] for point in points], style, label=kind, ms=4)
    axes[0].set(xscale="log", xlabel="parameters of the head", ylabel=f"test accuracy, %, {epochs} epochs")
    axes[1].set(xlabel="time of a training step of the whole network, over that with the linear head")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, frameon=False)
    figure.suptitle("CIFAR-100, ResNet-8")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS), metavar="HEAD")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="steps of an epoch")
    parser.add_argument("--json", type=Path, nargs="+", default=[], help="where the figures are kept; several to read")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument("--runs", type=Path, default=Path("lab/results"), help="results of `beyond` or `saturation`")
    parser.add_argument("--epochs", type=int, default=200, help="epochs of these runs")
    options = parser.parse_args()
    if len(options.json) > 1 and not options.table and options.plot is None:
        parser.error("only --table and --plot take several files")
    if options.table or options.plot is not None:
        files = []
        for costs in options.json or MEASURED:
            if not costs.exists():
                raise SystemExit(f"{costs} is not there: measure first, with --json {costs}")
            files.append(json.loads(costs.read_text())["rows"])
        if options.table:
            print(markdown(with_accuracies(together(files), options.runs, options.epochs)), end="")
        if options.plot is not None:
            rows = {name: row for kept in reversed(files) for name, row in relative(kept).items()}  # the first counts
            plot(rows, options.runs, options.epochs, options.plot)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = make_images(options.steps, device)
    heads = dict.fromkeys([PEER, *options.heads])
    rows: dict[str, dict[str, Any]] = {}
    for depth, name in itertools.product(options.depths, heads):
        rows[f"ResNet-{depth}, {name}"] = measure(depth, HEADS[name], data, options.at_once)
        print(markdown(rows).splitlines()[-1], flush=True)
        if options.json:
            measured = {"benchmark": "cost", "batch_size": BATCH, "at_once": options.at_once, "rows": rows}
            made = {"format": FORMAT, **measured, **environment()}
            write_bytes(options.json[0], (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
