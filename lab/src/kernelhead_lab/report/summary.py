"""Two short tables for the first page: which head to choose, and six claims of the paper."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kernelhead.tables import Table
from kernelhead_lab.tables.beyond import BEYOND
from kernelhead_lab.tables.cifar import CIFAR10, CIFAR100
from kernelhead_lab.tables.experiment import Experiment
from kernelhead_lab.tables.grid import accuracies
from kernelhead_lab.tables.statistics import differences
from kernelhead_lab.tables.store import Store
from kernelhead_lab.tables.transfer import TRANSFER

HEADS, CLAIMS = "heads", "claims-short"
SHOWN = 6  # claims
COLUMNS = ["head", "take it", "CIFAR-10", "CIFAR-100", "Pets", "Cars", "time", "memory", "parameters", "not"]
FROM_SCRATCH, FINE_TUNED = 200, 30  # epochs
PETS, CARS = ("Oxford-IIIT Pets", "Stanford Cars")
CLAIM_COLUMNS = ("", "paper", "ours", "n", "p", "verdict")


class Choice(NamedTuple):
    """What is said of a head; its columns in the tables, and its name among the measurements of time."""

    take: str
    leave: str
    scratch: str = ""
    tuned: str = ""
    timed: str = ""


CHOICES = {
    "linear": Choice("as the baseline", "", "SM", "SM", "linear"),
    "landmarks": Choice(
        "to train a network: the default", "on frozen features, or in batches of one", "Best", "Best", "landmarks 2048"
    ),
    "kernel": Choice("for very many classes", "where each point counts", "Kernel", "Ours", "the paper's layer"),
    "prototypes": Choice("for very many classes of several kinds each", "for few classes"),
    "attentive": Choice("on frozen tokens", "on features without positions"),
    "second_order": Choice(
        "for calibrated probabilities", "for wide features: it has D² per class", "SOP", "SOP", "second-order"
    ),
    "cosine": Choice("as a baseline of the paper", "", "LIN", "LIN"),
    "expansion": Choice("as the control of landmarks", "", "EXP", "EXP", "expansion 2048"),
}


def tables(stores: Mapping[int, Store], claims: Table, bench: Path) -> list[Table]:
    """Return both tables, or the second alone without the runs or the measurements of the first."""
    made = []
    if {FROM_SCRATCH, FINE_TUNED} <= stores.keys() and (bench / "cost.json").exists():
        made.append(_heads(stores, bench))
    kept = [claims.columns.index(name) for name in CLAIM_COLUMNS]
    rows = [[row[index] for index in kept] for row in claims.rows[: SHOWN + 2] if not row[0].startswith(("4.", "6."))]
    notes = ["By how many points of test accuracy the paper's layer is ahead. n: pairs of runs; p: sign-flip test."]
    return [*made, Table(CLAIMS, "Six claims of the paper", ["claim", *CLAIM_COLUMNS[1:]], rows, notes)]


def _heads(stores: Mapping[int, Store], bench: Path) -> Table:
    memory, times = _read(bench / "heads_memory.json")["rows"], _read(bench / "cost.json")["rows"]
    scratch, tuned = stores[FROM_SCRATCH], stores[FINE_TUNED]
    rows = []
    for name, choice in CHOICES.items():
        words = [f"`{name}`", choice.take]
        for data, plain in (("CIFAR-10", CIFAR10), ("CIFAR-100", CIFAR100)):
            gain = _gain(BEYOND, scratch, "ResNet-20", f"{choice.scratch} {data}", f"SM {data}")
            words.append(gain or _gain(plain, scratch, "ResNet-20", choice.scratch, "SM"))
        words += [_gain(TRANSFER, tuned, data, choice.tuned, "SM") for data in (PETS, CARS)]
        step = times.get(f"ResNet-20, {choice.timed}")
        words.append(f"{step['train_us'] / times['ResNet-20, linear']['train_us']:.2f}" if step else "")
        kept, own = memory[name]["kept_bytes"], memory[name]["parameters"]
        rows.append([*words, f"{kept / 1e6:.1f} MB", f"{own:,}", choice.leave])
    notes = [
        "Points of test accuracy over `linear`: ResNet-20 from scratch on CIFAR, ResNet-50 fine-tuned on Pets and "
        "Cars. An asterisk marks the paper's protocol, where the tuned one was not run.",
        "Time: a training step of ResNet-20 over that with `linear`, on an H200. Memory: what the head keeps for the "
        "backward pass of 128 maps of 64 x 8 x 8, counted on a CPU. Parameters: for 64 features and 100 classes.",
    ]
    return Table(HEADS, "Which head to choose", COLUMNS, rows, notes)


def _gain(experiment: Experiment, store: Store, row: str, column: str, baseline: str) -> str:
    """Return the mean difference over seeds, under the tuned protocol if it was run, else under the paper's."""
    cells = {cell.column: cell for cell in experiment.cells if cell.row == row}
    if column not in cells or column == baseline:
        return ""
    for name, mark in (("tuned", ""), ("paper", "*")):
        if name in experiment.protocols:
            protocol = experiment.protocols[name]
            ours, theirs = (accuracies(cells[each], store, protocol) for each in (column, baseline))
            found = differences(ours, theirs)
            if found:
                return f"{fmean(found.values()):+.2f}{mark}"
    return ""


@cache
def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
