"""A frozen kernel head against the head it was made from: time of a forward pass on a CPU, without autograd.

    python benchmarks/freeze.py [--repeats 200] [--threads 1] [--json results/bench/freeze.json]

Head, frozen head and, for feature vectors, a linear layer of the same size, all in one run and interleaved, so that a
slow moment of the machine hits them alike. `three dead terms` is a head whose a_5 .. a_7 are zero, as training with
relu coefficients may leave it; the other heads have all their terms.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch
from torch import nn

from kernelhead import create_head
from kernelhead.files import environment
from kernelhead.heads import Head
from kernelhead.timing import medians

# label, shape of the input, classes, options of the head with its name
CASES: list[tuple[str, tuple[int, ...], int, dict[str, object]]] = [
    ("kernel", (1, 512), 1000, {"name": "kernel"}),
    ("kernel", (8, 2048), 1000, {"name": "kernel"}),
    ("kernel", (32, 512), 100, {"name": "kernel"}),
    ("kernel", (128, 64), 100, {"name": "kernel"}),
    ("kernel", (128, 2048), 37, {"name": "kernel"}),
    ("kernel", (128, 2048), 1000, {"name": "kernel"}),
    ("kernel", (1024, 64), 100, {"name": "kernel"}),
    ("three dead terms", (1024, 64), 100, {"name": "kernel"}),
    ("rbf", (128, 512), 100, {"name": "kernel", "kernel": "rbf"}),
    ("4 prototypes", (1024, 64), 100, {"name": "prototypes", "aggregate": "logsumexp"}),
    ("512 landmarks", (128, 64), 100, {"name": "landmarks", "landmarks": 512, "pool": None}),
    ("512 landmarks, maps", (32, 64, 8, 8), 100, {"name": "landmarks", "landmarks": 512}),
]


def trained(name: str, shape: tuple[int, ...], classes: int, options: dict[str, object]) -> Head:
    """A head in evaluation mode, with statistics where it has some."""
    head = create_head(in_features=shape[1], num_classes=classes, **options)
    with torch.no_grad():
        if name == "three dead terms":
            head.raw_alpha[-3:] = -0.1
        head(torch.randn(64, *shape[1:]))
    return head.eval()


def compare(
    name: str, shape: tuple[int, ...], classes: int, options: dict[str, object], repeats: int
) -> dict[str, object]:
    head = trained(name, shape, classes, options)
    modules: dict[str, nn.Module] = {"head": head, "frozen": head.freeze()}
    if len(shape) == 2:
        modules["linear"] = nn.Linear(shape[1], classes)
    x = torch.randn(shape)
    with torch.inference_mode():
        difference = (modules["frozen"](x) - head(x)).abs().max().item()
        times = medians({key: partial(module, x) for key, module in modules.items()}, math.inf, most=repeats)
    return {"head": name, "shape": shape, "classes": classes, "milliseconds": times, "difference": difference}


def markdown(rows: list[dict[str, object]]) -> str:
    lines = ["| head | input | classes | head | frozen | faster by | linear layer |", "|---|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        times, shape = row["milliseconds"], " x ".join(map(str, row["shape"]))
        linear = f"{times['linear']:.3f} ms" if "linear" in times else ""
        cells = [row["head"], shape, str(row["classes"]), f"{times['head']:.3f} ms", f"{times['frozen']:.3f} ms"]
        lines.append("| " + " | ".join([*cells, f"{times['head'] / times['frozen']:.2f}", linear]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [compare(*case, options.repeats) for case in CASES]
    print(markdown(rows))
    print(f"largest difference of a logit: {max(row['difference'] for row in rows):.1e}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"rows": rows, "repeats": options.repeats, **environment()}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
