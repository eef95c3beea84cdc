"""A description as text, with the kernel drawn in Braille dots."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kernelhead.inspection.points import COLLAPSED, NAMED, Pair, Points

if TYPE_CHECKING:
    from kernelhead.inspection import Description, Term

WIDTH, HEIGHT = 60, 12  # characters; each has 2 by 4 dots
BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a Braille character, by row and column
BARS = "▁▂▃▄▅▆▇█"
SHOWN = 60  # bars


def describe(description: "Description") -> str:
    """The whole text."""
    parts = [description.head, draw(description.k), _ends(description), _table(description), _degrees(description)]
    parts += [_definiteness(description), *_points(description.points, description.classes)]
    return "\n\n".join(part for part in parts if part)


def draw(values: Sequence[float]) -> str:
    """A curve over [-1, 1], its values at equal steps, with the largest and smallest value beside it."""
    low, high = min(values), max(values)
    spread = high - low or 1.0
    rows, columns = 4 * HEIGHT, 2 * WIDTH
    cells = [[0] * WIDTH for _ in range(HEIGHT)]
    before: int | None = None
    for column in range(columns):
        place = column / (columns - 1) * (len(values) - 1)
        left = min(int(place), len(values) - 2)
        value = values[left] + (place - left) * (values[left + 1] - values[left])
        row = round((high - value) / spread * (rows - 1))
        first, last = (row, row) if before is None else (min(row, before + 1), max(row, before - 1))
        for dot in range(first, last + 1):  # no gap where the curve is steep
            cells[dot // 4][column // 2] |= DOTS[dot % 4][column % 2]
        before = row
    drawn = ["".join(chr(BLANK | cell) if cell else " " for cell in line) for line in cells]
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    lines = [f"{label:>{margin}} │{line}".rstrip() for label, line in zip(labels, drawn, strict=True)]
    half = WIDTH // 2
    lines.append(" " * margin + " └" + "─" * WIDTH)
    lines.append(" " * (margin + 1) + f"{'-1':<{half}}{'0':<{half - 1}}1")
    return "k(t)\n" + "\n".join(lines)


def _ends(description: "Description") -> str:
    """What the drawing does not show."""
    even, odd = (term.value for term in description.terms[:2])
    lines = []
    if even or odd:
        lines.append(f"At t = 1 the kernel jumps by {even + odd:.4g}, at t = -1 by {even - odd:.4g} (a_-2 and a_-1).")
    if description.pool is not None:
        over = "the places of a map, or over tokens"
        if description.window > 1:
            over = f"all windows of {description.window} x {description.window} places of a map"
        lines.append(f"The head averages k over {over}: a kernel mean embedding.")
    return "\n".join(lines)


def _table(description: "Description") -> str:
    """Terms, one a line, and what they mean."""
    landmarks = description.points.kind == "landmarks"
    rows = [("term", "raw", "a", "without it", "end here")]
    notes = [""]
    for term in description.terms:
        end = f"{description.cost_beyond(term.order):.4g}" if term.order >= 1 else ""
        rows.append((term.name, f"{term.raw:.5f}", f"{term.value:.5f}", f"{term.cost:.4g}", end))
        notes.append(_note(term, landmarks))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, note in zip(rows, notes, strict=True):
        cells = [
            f"{row[0]:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, note]).rstrip())
    lines.append(
        "without it, end here: by how much a logit changes at most without this term, and where the series ends\n"
        f"after it, at temperature {description.temperature:g}; freeze(tolerance=..) leaves terms out."
    )
    if description.kernel != "learned":
        lines[-1] += "\nThe kernel is fixed but for its scale, the one raw parameter."
    if description.largest_logit is not None:
        lines[-1] += f" No logit is beyond ±{description.largest_logit:.4g}."
    return "\n".join(lines)


def _note(term: "Term", landmarks: bool) -> str:
    if term.dead:
        return "dead: zero, and relu gives it no gradient any more"
    if term.value == 0:
        return ""
    if term.order < 0:
        return "only where t = ±1, that is hardly ever"
    if term.order == 0:
        return "standardising takes it out" if landmarks else "the same for all classes: no probability depends on it"
    return "negative" if term.value < 0 else ""


def _degrees(description: "Description") -> str:
    degree = len(description.terms) - 3
    lines = [
        f"Effective degree {description.effective_degree} of {degree}: terms beyond it make up no more than 1 % of all "
        f"from a_1 on. Mean degree {description.mean_degree:.2f}."
    ]
    if description.dead:
        lines.append(f"Dead terms: {', '.join(description.dead)}. Softplus coefficients cannot die.")
    return "\n".join(lines)


def _definiteness(description: "Description") -> str:
    found = description.definiteness
    if found.everywhere:
        verdict = "Positive definite on every sphere: no coefficient is negative (Schoenberg)."
    else:
        names = ", ".join(found.negative)
        here = "still is" if found.here else "is not either"
        verdict = (
            f"Not positive definite on every sphere: {names} {'is' if len(found.negative) == 1 else 'are'} negative "
            f"(Schoenberg). On the sphere of its own {found.dimension} features it {here}, by its expansion in "
            "spherical harmonics."
        )
    return (
        f"{verdict}\nGram matrix of {found.gram_points} random points: smallest eigenvalue "
        f"{found.smallest_eigenvalue:.3g}, largest {found.largest_eigenvalue:.3g}."
    )


def _points(points: Points, classes: Sequence[str] | None) -> list[str]:
    parts = []
    named = {"class weights": "Class weights", "prototypes": "Prototypes", "landmarks": "Landmarks"}[points.kind]
    sizes = f"{points.count}" + (f", {points.per_class} a class" if points.kind == "prototypes" else "")
    lines = [f"{named}: {sizes}."]
    if points.closest is not None:
        among = "of one class " if points.kind == "prototypes" else ""
        which = _pair(points.closest, points, classes)
        lines[0] += f" The closest two {among}have cosine {points.closest.cosine:.3f} ({which})."
    if points.collapsed:
        shown = "; ".join(_pair(pair, points, classes) for pair in points.collapsed[:5])
        count = f"{len(points.collapsed)}{' or more' if len(points.collapsed) == NAMED else ''}"
        more = "; .." if len(points.collapsed) > 5 else ""
        lines.append(f"Collapsed into one (cosine above {COLLAPSED}), {count} of {points.pairs} pairs: {shown}{more}.")
    parts.append("\n".join(lines))
    if points.mixing is not None:
        half, most = (_holding(points.mixing, share) for share in (0.5, 0.99))
        parts.append(
            f"Use of landmarks (squared lengths of mixing's columns, largest first): {half} hold half of it, "
            f"{most} hold 99 %.\n{_bars(points.mixing)}"
        )
    if points.nearest is not None and points.samples:
        shares = [count / points.samples for count in points.nearest]
        line = (
            f"Nearest in the RKHS, shares of {points.samples} samples, largest first: {len(points.unused)} of "
            f"{points.count} are the nearest of none."
        )
        if points.kind == "prototypes":
            used = _used_of_a_class(points.nearest, points.per_class)
            line += f" A class that has samples uses {used:.1f} of its {points.per_class} in effect."
        parts.append(f"{line}\n{_bars(shares)}")
    return parts


def _used_of_a_class(nearest: Sequence[int], size: int) -> float:
    """How many prototypes a class uses in effect: the exponential of the entropy of their shares, its mean."""
    used = []
    for start in range(0, len(nearest), size):
        counts = nearest[start : start + size]
        if total := sum(counts):
            used.append(math.exp(-sum(count / total * math.log(count / total) for count in counts if count)))
    return sum(used) / len(used)


def _pair(pair: Pair, points: Points, classes: Sequence[str] | None) -> str:
    """Which two: the classes of class weights, class and numbers of prototypes, numbers of landmarks."""
    size = points.per_class
    owners = [
        f"class {place // size}" if classes is None else classes[place // size] for place in (pair.first, pair.second)
    ]
    if points.kind == "class weights":
        return f"{owners[0]} and {owners[1]}"
    if points.kind == "prototypes":
        return f"{owners[0]}: {pair.first % size} and {pair.second % size}"
    return f"{pair.first} and {pair.second}"


def _holding(shares: Sequence[float], wanted: float) -> int:
    """How many of the largest it takes for a share of the whole."""
    total = 0.0
    for number, share in enumerate(sorted(shares, reverse=True), start=1):
        total += share
        if total >= wanted - 1e-9:
            return number
    return len(shares)


def _bars(values: Sequence[float]) -> str:
    """A bar each, the largest first; of very many, some at equal steps."""
    ordered = sorted(values, reverse=True)
    if len(ordered) > SHOWN:
        ordered = [ordered[round(place * (len(ordered) - 1) / (SHOWN - 1))] for place in range(SHOWN)]
    largest = ordered[0] or 1.0
    return "".join(
        BARS[min(int(value / largest * len(BARS)), len(BARS) - 1)] if value > 0 else "·" for value in ordered
    )
