"""The outcome of a comparison of classifiers as a table, as JSON and in one sentence."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from kernelhead.tables import Table, show


@dataclass(frozen=True)
class Result:
    """Values of one classifier per fold, and the calibration error over all folds."""

    name: str
    label: str
    is_head: bool
    accuracy: list[float]
    nll: list[float] | None
    ece: float | None
    fit_seconds: list[float]
    predict_seconds: list[float]
    converged: bool = True


@dataclass(frozen=True)
class Difference:
    """Mean of ours - theirs over the folds, with a 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def difference(ours: Sequence[float], theirs: Sequence[float], grain: float = 0.0) -> Difference:
    """Compare values per fold by the corrected resampled t-test (Nadeau and Bengio, 2003).

    Training sets overlap. The variance of the mean over k folds therefore counts as (1/k + test/train) times that of a
    fold, with k - 1 degrees of freedom.

    A few folds may agree by chance, so no standard deviation below `grain` is taken: one sample of a fold, for
    accuracies. Without any deviation the interval is infinite.
    """
    from scipy import stats

    values = np.asarray(ours) - np.asarray(theirs)
    k, mean = len(values), float(values.mean())
    deviation = max(float(values.std(ddof=1)), grain)
    if deviation <= 1e-9 * np.abs([ours, theirs]).max():  # equal except for rounding
        return Difference(mean, -np.inf, np.inf)
    half = float(stats.t.ppf(0.975, k - 1) * np.sqrt(1 / k + 1 / (k - 1)) * deviation)
    return Difference(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Comparison:
    """Results of all classifiers on one set of features; `print` shows them as a table."""

    samples: int
    features: int
    classes: int
    folds: int
    seed: int
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def baseline(self) -> Result | None:
        """The baseline with the best accuracy."""
        others = (result for result in self.results if not result.is_head)
        return max(others, key=lambda result: float(np.mean(result.accuracy)), default=None)

    def gap(self, ours: Result) -> Difference | None:
        """Return the difference in accuracy, in points, from the best baseline."""
        theirs = self.baseline
        return None if theirs is None or ours is theirs else self._difference(ours, theirs)

    def _difference(self, ours: Result, theirs: Result) -> Difference:
        return difference(ours.accuracy, theirs.accuracy, grain=100 * self.folds / self.samples)

    def verdict(self) -> str:
        """Say in one sentence whether the first head helps: the best of them would be the best by luck, too."""
        head, best = next((result for result in self.results if result.is_head), None), self.baseline
        gap = None if head is None else self.gap(head)
        if head is None or best is None or gap is None:
            return "A head and a baseline are needed for a verdict."
        size = f"{abs(gap.mean):.2f} points of accuracy"
        if gap.low > 0:
            text = f"The kernel head helps: {head.label} gains {size} over {best.label}"
        elif gap.high < 0:
            text = f"The kernel head does not help: {head.label} loses {size} to {best.label}"
        else:
            gaps = {each.label: self._difference(head, each) for each in self.results if each is not head}
            tied = [label for label, each in gaps.items() if each.low <= 0 <= each.high]
            place = f"is at {gap.mean:+.2f} points to the best baseline, and ties with {', '.join(tied)}"
            text = f"No difference in accuracy that {self.folds} folds can show: {head.label} {place}"
        text += f" (95 % interval {gap.low:+.2f} to {gap.high:+.2f})"
        if head.nll and best.nll:
            gain = difference(best.nll, head.nll)
            if not gain.low <= 0 <= gain.high:
                word = "better" if gain.mean > 0 else "worse"
                text += f"; its probabilities are {word}, by {abs(gain.mean):.3f} nats per sample"
        return f"{text}."

    def table(self) -> Table:
        """Return a row per classifier, with differences in accuracy from the best baseline."""
        over = [] if self.baseline is None else [f"over {self.baseline.label}"]
        columns, rows = ["", "accuracy, %", "NLL", "ECE, %", "fit, s", "predict, s", *over], []
        for one in self.results:
            row = [one.label, f"{np.mean(one.accuracy):.2f} ± {np.std(one.accuracy, ddof=1):.2f}"]
            row += ["" if one.nll is None else f"{np.mean(one.nll):.3f}", "" if one.ece is None else f"{one.ece:.2f}"]
            row += [f"{np.mean(one.fit_seconds):.2f}", f"{np.mean(one.predict_seconds):.3f}", str(self.gap(one) or "")]
            rows.append(row[: len(columns)])
        title = f"{self.samples} samples, {self.features} features, {self.classes} classes; {self.folds} folds"
        notes = [
            "± is the standard deviation over folds. Differences from the best baseline are means with a 95 % "
            "interval, paired by fold (corrected resampled t-test, with a deviation of at least one sample per fold).",
            *(f"{one.label} stopped before it converged." for one in self.results if not one.converged),
            *self.notes,
        ]
        return Table("compare", title, columns, rows, notes)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        results = [
            {**asdict(one), "accuracy_difference": (gap := self.gap(one)) and asdict(gap)} for one in self.results
        ]
        best = self.baseline and self.baseline.name
        return {"format": 2, **asdict(self), "results": results, "baseline": best, "verdict": self.verdict()}

    def __str__(self) -> str:
        text = io.StringIO()
        show(self.table(), Console(file=text, width=120))
        return text.getvalue() + self.verdict()
