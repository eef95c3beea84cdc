"""A kernel drawn in characters."""

from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 61, 16


def draw(values: Sequence[float]) -> str:
    """Draw a curve over [-1, 1], given at equal steps, with the largest and smallest value beside it."""
    low, high = min(values), max(values)
    heights = np.interp(np.linspace(0, len(values) - 1, WIDTH), range(len(values)), values)
    rows = np.rint((high - heights) / ((high - low) or 1.0) * (HEIGHT - 1)).astype(int)
    before = np.concatenate([rows[:1], rows[:-1]])
    row = np.arange(HEIGHT)[:, None]
    # No gap where the curve is steep: a column goes on where the one before ended.
    marked = (row == rows) | ((np.minimum(before, rows) < row) & (row < np.maximum(before, rows)))
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    drawn = ["".join("•" if dot else " " for dot in line) for line in marked]
    lines = [f"{label:>{margin}} │{line}".rstrip() for label, line in zip(labels, drawn, strict=True)]
    axis = f"{'-1':<{WIDTH // 2}}{'0':<{WIDTH // 2}}1"
    return "\n".join(["k(t)", *lines, f"{'':>{margin}} └{'─' * WIDTH}", f"{'':>{margin + 1}}{axis}"])
