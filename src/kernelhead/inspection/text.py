"""A kernel drawn in Braille dots."""

from collections.abc import Sequence

import numpy as np

WIDTH, HEIGHT = 60, 12  # characters; each has 2 by 4 dots
BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column


def draw(values: Sequence[float]) -> str:
    """Draw a curve over [-1, 1], given at equal steps, with the largest and smallest value beside it."""
    low, high = min(values), max(values)
    steps = np.linspace(0, len(values) - 1, 2 * WIDTH)
    heights = (high - np.interp(steps, range(len(values)), values)) / ((high - low) or 1.0)
    rows = np.rint(heights * (4 * HEIGHT - 1)).astype(int).tolist()
    cells = [[0] * WIDTH for _ in range(HEIGHT)]
    for column, (before, row) in enumerate(zip([rows[0], *rows], rows, strict=False)):
        for dot in range(min(row, before + 1), max(row, before - 1) + 1):  # no gap where the curve is steep
            cells[dot // 4][column // 2] |= DOTS[dot % 4][column % 2]
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    drawn = ["".join(chr(BLANK | cell) if cell else " " for cell in line) for line in cells]
    lines = [f"{label:>{margin}} │{line}".rstrip() for label, line in zip(labels, drawn, strict=True)]
    axis = f"{'-1':<{WIDTH // 2}}{'0':<{WIDTH // 2 - 1}}1"
    return "\n".join(["k(t)", *lines, f"{'':>{margin}} └{'─' * WIDTH}", f"{'':>{margin + 1}}{axis}"])
