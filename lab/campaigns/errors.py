"""Errors of the loss and its gradients beside NumPy in float64, over a grid: `python lab/campaigns/errors.py OUT.json`.

For every backend and dtype the largest error of the loss, and of the gradients of features, points and coefficients,
each relative to the largest entry. On CUDA the Triton backend joins. A table is written beside OUT.json.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kernelhead.files import environment, hardware_name, write_bytes
from kernelhead.functional import kernel_cross_entropy

SHAPES = ((1, 3, 2), (7, 5, 3), (33, 16, 10), (64, 65, 129), (257, 64, 100))  # N, D, C
DEGREES, PROTOTYPES, SCALES, SMOOTHINGS = (1, 2, 7, 15), (1, 3), (1e-25, 1e-12, 1.0, 1e12, 1e25), (0.0, 0.1)
MODES = ("speed", "memory")
QUANTITIES = ("loss", "features", "weight", "alpha")

HALF = (torch.bfloat16, torch.float16)

Array = NDArray[np.float64]
Rows = dict[str, dict[str, float]]


def reference(f: Array, w: Array, a: Array, y: NDArray[np.int64], prototypes: int, smoothing: float) -> list[Array]:
    """The mean loss and its gradients, by the formulas, without end points (a_{-2} = a_{-1} = 0)."""
    lengths, weights = np.linalg.norm(f, axis=1, keepdims=True), np.linalg.norm(w, axis=1, keepdims=True)
    unit, points = f / lengths, w / weights
    t = unit @ points.T
    powers = t[..., None] ** np.arange(len(a) - 2)
    k = powers @ a[2:]
    grouped = k.reshape(len(f), -1, prototypes)
    logits = np.logaddexp.reduce(grouped, axis=2)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    wanted = np.full_like(logits, smoothing / logits.shape[1])
    wanted[np.arange(len(f)), y] += 1 - smoothing
    loss = -(wanted * log_p).sum(1).mean()
    inside = np.exp(grouped - logits[..., None])
    g = (((np.exp(log_p) - wanted) / len(f))[..., None] * inside).reshape(k.shape)
    slope = g * (powers[..., :-1] @ (a[3:] * np.arange(1, len(a) - 2)))
    to_f = (slope @ points - (slope * t).sum(1, keepdims=True) * unit) / lengths
    to_w = (slope.T @ unit - (slope * t).sum(0)[:, None] * points) / weights
    to_a = np.concatenate([[0, 0, 0], (g[..., None] * powers[..., 1:]).sum((0, 1))])  # a_0 moves all logits alike
    return [np.asarray(loss), to_f, to_w, to_a]


def largest_errors(shapes: Sequence[tuple[int, int, int]] = SHAPES) -> tuple[Rows, int, int]:
    """Go through the grid. Return the largest errors by dtype and backend, the cases, and those that are not finite."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ("eager", "chunked", *(("triton",) if device == "cuda" else ()))
    largest: Rows = {}
    cases = failures = 0
    grid = itertools.product(shapes, DEGREES, PROTOTYPES, SCALES, SMOOTHINGS)
    for number, ((n, d, c), degree, prototypes, scale, smoothing) in enumerate(grid):
        random = np.random.default_rng(number)
        f, w = random.normal(size=(n, d)), random.normal(size=(c * prototypes, d))
        a = np.concatenate([[0, 0], random.exponential(size=degree + 1)])
        y = random.integers(c, size=n)
        for dtype, backend, mode in itertools.product((torch.float64, torch.float32, *HALF), backends, MODES):
            if (backend == "eager" and mode != MODES[0]) or (backend == "triton" and dtype == torch.float64):
                continue
            if dtype in HALF and scale != 1:  # beyond the range of the type
                continue
            leaves = [torch.tensor(x, device=device).to(dtype).requires_grad_() for x in (f * scale, w * scale)]
            leaves.append(torch.tensor(a, device=device).to(torch.promote_types(dtype, torch.float32)).requires_grad_())
            inputs = [x.detach().double().cpu().numpy() for x in leaves]
            loss = kernel_cross_entropy(
                *leaves, torch.tensor(y, device=device),
                prototypes=prototypes, label_smoothing=smoothing, backend=backend, mode=mode,
            )  # fmt: skip
            found = [loss, *torch.autograd.grad(loss, leaves)]
            row = largest.setdefault(f"{str(dtype).removeprefix('torch.')} {backend}", dict.fromkeys(QUANTITIES, 0.0))
            expected = reference(*inputs, y, prototypes, smoothing)
            for name, own, exact in zip(QUANTITIES, found, expected, strict=True):
                error = np.abs(own.detach().double().cpu().numpy() - exact).max() / max(np.abs(exact).max(), 1e-300)
                failures += not np.isfinite(error)
                row[name] = max(row[name], float(error))
            cases += 1
    return largest, cases, failures


def table(rows: Rows, cases: int, hardware: str) -> str:
    """Return the largest errors as a table."""
    lines = [f"The largest relative errors of {cases:,} cases beside NumPy in float64, on {hardware}.", ""]
    lines += [f"| type and backend | {' | '.join(QUANTITIES)} |", f"|---{'|---:' * len(QUANTITIES)}|"]
    lines += [f"| {name} | {' | '.join(f'{row[each]:.1e}' for each in QUANTITIES)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def main(out: Path) -> None:
    """Write the largest errors of the whole grid, as JSON and as a table beside it."""
    rows, cases, failures = largest_errors()
    about = environment()
    totals = {"cases": cases, "not finite": failures, "largest relative error": rows, **about}
    write_bytes(out, (json.dumps(totals, indent=1) + "\n").encode())
    write_bytes(out.with_suffix(".md"), table(rows, cases, hardware_name(about["hardware"])).encode())
    print(json.dumps(totals, indent=1))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
