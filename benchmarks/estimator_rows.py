"""Accuracy and log-loss of the estimator over the number of training samples, as curves.

    python benchmarks/estimator_rows.py measure --packages FOLDER --label new --json FILE [--options JSON]
    python benchmarks/estimator_rows.py draw --json FILE --out docs/images/estimator-rows.png

FOLDER is that of `benchmarks/estimator.py`. Each call of `measure` adds one curve per data set to the file, under its
label, so that several versions of the library can be measured. The same 4,000 samples are for testing at every size.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from estimator import keel, sentences
from sklearn.metrics import log_loss

from kernelhead import KernelHeadClassifier
from kernelhead.files import environment

SIZES = (500, 1000, 2000, 4000, 8000, 12_000, 16_000, 20_000, 32_000, 50_000, 51_000, 100_000)
TEST = 4000


def clusters() -> tuple[np.ndarray, np.ndarray]:
    """Made up: ten classes of forty round clusters each, in 16 dimensions."""
    rng = np.random.default_rng(0)
    centres, cluster = rng.normal(size=(400, 16)), rng.integers(0, 400, SIZES[-1] + TEST)
    return centres[cluster] + 0.6 * rng.normal(size=(len(cluster), 16)), cluster % 10


def cubic() -> tuple[np.ndarray, np.ndarray]:
    """Made up: the sign of a random polynomial of degree three in ten dimensions, with one label in twenty wrong."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SIZES[-1] + TEST, 10))
    values = np.einsum("ijk,ni,nj,nk->n", rng.normal(size=(10, 10, 10)), x, x, x, optimize=True)
    return x, (values > 0) ^ (rng.random(len(x)) < 0.05)


def measure(
    folder: Path, label: str, options: dict[str, object], file: Path, names: list[str], sizes: list[int]
) -> None:
    data = {
        "letter": lambda: keel(folder, "letter"),
        "magic": lambda: keel(folder, "magic"),
        "sentences, source": lambda: sentences(folder)["source"],
        "clusters": clusters,
        "cubic": cubic,
    }
    for name in names or data:
        x, y = data[name]()
        order = np.random.default_rng(0).permutation(len(y))
        test = order[:TEST]
        for size in (each for each in sizes if each <= len(y) - TEST):
            rows = order[TEST : TEST + size]
            started, worked = time.perf_counter(), time.process_time()
            fitted = KernelHeadClassifier(random_state=0, **options).fit(x[rows], y[rows])
            seconds, cpu = time.perf_counter() - started, time.process_time() - worked
            loss = log_loss(y[test], fitted.predict_proba(x[test]), labels=fitted.classes_)
            one = {"accuracy": 100 * fitted.score(x[test], y[test]), "log_loss": loss, "seconds": seconds, "cpu": cpu}
            print(f"{name} {label} {size}: {one}", flush=True)
            content = json.loads(file.read_text()) if file.exists() else {"format": 2, "curves": {}, **environment()}
            content["curves"].setdefault(name, {}).setdefault(label, {})[str(size)] = one
            file.write_text(json.dumps(content, indent=1) + "\n")


def draw(file: Path, out: Path) -> None:
    import matplotlib.pyplot as plt

    curves = json.loads(file.read_text())["curves"]
    figure, axes = plt.subplots(2, len(curves), figsize=(4 * len(curves), 6), sharex=True, squeeze=False)
    for column, (name, lines) in enumerate(curves.items()):
        for row, (key, title) in enumerate((("accuracy", "accuracy, %"), ("log_loss", "log-loss"))):
            for label, line in lines.items():
                sizes = sorted(line, key=int)
                axes[row][column].plot(
                    [int(size) for size in sizes], [line[size][key] for size in sizes], "o-", label=label
                )
            axes[row][column].set(xscale="log", title=name if row == 0 else "", ylabel=title)
        axes[1][column].set(xlabel="training samples", yscale="log")
    axes[0][0].legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "draw"])
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--label", default="new")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.what == "draw":
        draw(options.json, options.out)
        return
    sys.path.append(str(options.packages))
    measure(options.packages, options.label, options.options, options.json, options.only, options.sizes)


if __name__ == "__main__":
    main()
