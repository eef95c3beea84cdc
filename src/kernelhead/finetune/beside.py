"""Heads beside one another on the same images: differences paired by test image, and by seed."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelhead.finetune.report import PREDICTIONS_FILE
from kernelhead.finetune.spec import TrainResult
from kernelhead.tables import Table

Runs = Mapping[str, Sequence[tuple[Path, TrainResult]]]  # folders and results of the seeds of each head


@dataclass(frozen=True)
class Difference:
    """Points of accuracy of a head over the first one, with 95 % intervals, and McNemar's exact p of a single seed."""

    points: float
    over_images: float  # half the interval over test images: what others of their kind would change
    over_seeds: float | None  # half the interval over seeds: what other trainings would change
    p: float | None


def is_right(folder: Path) -> NDArray[np.bool_]:
    """Return which test images a run got right (n,), from its predictions."""
    text = (folder / PREDICTIONS_FILE).read_text(encoding="utf-8")
    return np.array([row["class"] == row["predicted"] for row in csv.DictReader(io.StringIO(text, newline=""))])


def difference(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> Difference:
    """Compare two heads by who is right on which image, both (seeds, images).

    The interval over images takes the deviation of an image's mean over seeds, and at least that of one image in all.
    That over seeds is of the paired t-test.
    """
    from scipy import stats

    gaps = ours.astype(float) - theirs
    by_image, by_seed = gaps.mean(0), gaps.mean(1)
    seeds, images = gaps.shape
    mean = float(gaps.mean())
    over_images = 1.96 * float(np.sqrt(np.square(by_image - mean).sum() + 1)) / images
    if seeds > 1:
        half = float(stats.t.ppf(0.975, seeds - 1)) * stdev(by_seed.tolist()) / seeds**0.5
        return Difference(100 * mean, 100 * over_images, 100 * half, None)
    gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
    p = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return Difference(100 * mean, 100 * over_images, None, p)


def beside(runs: Runs) -> tuple[Table, dict[str, Any]]:
    """Return a table with a row per head, and the same as plain data."""
    right = {head: np.stack([is_right(folder) for folder, _ in each]) for head, each in runs.items()}
    first, *_ = runs
    seeds, images = right[first].shape
    columns = ["head", "accuracy, %", "NLL", "training, s", "parameters of the head", f"over {first}, points"]
    columns += ["over seeds"] if seeds > 1 else ["McNemar's p"]
    rows, plain = [], {}
    for head, each in runs.items():
        results = [result for _, result in each]
        accuracies = [result.accuracy or 0.0 for result in results]
        spread = f" ± {stdev(accuracies):.2f}" if seeds > 1 else ""
        nll, seconds = fmean(result.nll or 0.0 for result in results), fmean(result.seconds for result in results)
        row = [head, f"{fmean(accuracies):.2f}{spread}", f"{nll:.4f}", f"{seconds:.1f}"]
        row.append(f"{results[0].parameters['head']:,}")
        gap = None if head == first else difference(right[head], right[first])
        if gap is not None:
            row.append(f"{gap.points:+.2f} ± {gap.over_images:.2f}")
            row.append(f"± {gap.over_seeds:.2f}" if gap.over_seeds is not None else f"{gap.p:.3g}")
        rows.append(row + [""] * (len(columns) - len(row)))
        plain[head] = {"accuracy": accuracies, "nll": nll, "seconds": seconds, "difference": gap and asdict(gap)}
    of = f"{seeds} seed{'s' * (seeds > 1)}"
    notes = ["Differences are paired by test image, with 95 % intervals over images."]
    notes += (
        ["± after an accuracy is the deviation over seeds, and the last column a 95 % interval."] if seeds > 1 else []
    )
    return Table("beside", f"{images:,} test images, {of}", columns, rows, notes), {"first": first, "heads": plain}
