"""What a comparison of classifiers found, as a table, as JSON, and in one sentence.

Differences are paired by fold. Their intervals are those of the corrected resampled t-test (Nadeau and Bengio, 2003):
training sets of cross-validation overlap, so the variance of the mean over k folds counts as (1/k + test/train) times
that of a fold, with k - 1 degrees of freedom.

Accuracies on n samples are multiples of 1 / n, so that a few folds may agree by chance, and the variance that they show
is then zero, which says that it is unknown and not that the difference is certain. At least one sample of each fold
could have gone otherwise. Where two classifiers are expected to differ on one of n paired outcomes, the difference of
their accuracies has variance 1 / n^2, and no less is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelhead.paper.table import Table


@dataclass(frozen=True)
class Result:
    """What one classifier did: a value for each fold; the calibration error over all folds together."""

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
    """Paired by fold; see the module's docstring.

    Args:
        ours: a value for each fold.
        theirs: on the same folds.
        grain: the least standard deviation over folds, of accuracies what one sample of a fold makes. Where neither
            it nor the folds tell a deviation, there is nothing to judge by, and the interval is infinite.
    """
    from scipy import stats

    values = np.asarray(ours) - np.asarray(theirs)
    k, mean = len(values), float(values.mean())
    deviation = max(float(values.std(ddof=1)), grain)
    if deviation <= 1e-9 * np.abs([ours, theirs]).max():  # equal but for rounding
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
    def head(self) -> Result | None:
        """The head that the verdict is about. It is the first, whatever came out: the best would be so by luck, too."""
        return next((result for result in self.results if result.is_head), None)

    @property
    def baseline(self) -> Result | None:
        """The baseline with the best accuracy: what a head has to beat."""
        others = [result for result in self.results if not result.is_head]
        return max(others, key=lambda result: float(np.mean(result.accuracy)), default=None)

    def accuracy_difference(self, ours: Result, theirs: Result) -> Difference:
        """In points, with one sample of a fold as the grain."""
        return difference(ours.accuracy, theirs.accuracy, grain=100 * self.folds / self.samples)

    def verdict(self) -> str:
        """One sentence on whether the head helps."""
        head, baseline = self.head, self.baseline
        if head is None or baseline is None:
            return "A head and a baseline are needed for a verdict."
        gap = self.accuracy_difference(head, baseline)
        points = f"{abs(gap.mean):.2f} points of accuracy"
        interval = f"95 % interval {gap.low:+.2f} to {gap.high:+.2f}"
        if gap.low > 0:
            text = f"The kernel head helps: {head.label} gains {points} over {baseline.label} ({interval})"
        elif gap.high < 0:
            text = f"The kernel head does not help: {head.label} loses {points} to {baseline.label} ({interval})"
        else:
            text = (
                f"No difference in accuracy that {self.folds} folds can show: {head.label} is at {gap.mean:+.2f} "
                f"points to the best baseline, {baseline.label} ({interval})"
            )
        if head.nll is None or baseline.nll is None:
            return f"{text}."
        gain = difference(baseline.nll, head.nll)
        if gain.low > 0:
            return f"{text}; its probabilities are better, by {gain.mean:.3f} nats a sample."
        if gain.high < 0:
            return f"{text}; its probabilities are worse, by {-gain.mean:.3f} nats a sample."
        return f"{text}."

    def table(self) -> Table:
        """A row for each classifier, differences in accuracy against the best baseline."""
        baseline = self.baseline
        columns = ["", "accuracy, %", "NLL", "ECE, %", "fit, s", "predict, s"]
        if baseline is not None:
            columns.append(f"over {baseline.label}")
        rows = []
        for one in self.results:
            deviation = float(np.std(one.accuracy, ddof=1))
            row = [one.label, f"{np.mean(one.accuracy):.2f} ± {deviation:.2f}"]
            row.append("" if one.nll is None else f"{np.mean(one.nll):.3f}")
            row.append("" if one.ece is None else f"{one.ece:.2f}")
            row += [f"{np.mean(one.fit_seconds):.2f}", f"{np.mean(one.predict_seconds):.3f}"]
            if baseline is not None:
                row.append("" if one is baseline else str(self.accuracy_difference(one, baseline)))
            rows.append(row)
        title = f"{self.samples} samples, {self.features} features, {self.classes} classes; {self.folds} folds"
        notes = [
            "± is the standard deviation over folds. Differences: mean and 95 % interval, paired by fold (corrected "
            "resampled t-test, a fold's deviation taken as one sample at least), against the best baseline.",
            *(f"{one.label} stopped before it converged." for one in self.results if not one.converged),
            *self.notes,
        ]
        return Table("compare", title, columns, rows, notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        baseline = self.baseline
        results = []
        for one in self.results:
            gap = None if baseline is None or one is baseline else self.accuracy_difference(one, baseline)
            results.append({**vars(one), "accuracy_difference": None if gap is None else vars(gap)})
        own = {name: value for name, value in vars(self).items() if name != "results"}
        return {
            **own,
            "baseline": None if baseline is None else baseline.name,
            "results": results,
            "verdict": self.verdict(),
        }

    def __str__(self) -> str:
        table = self.table()
        cells = [table.columns, *table.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        return "\n".join([table.title, *lines, *table.notes, self.verdict()])
