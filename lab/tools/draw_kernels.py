"""Draw fixed kernels and one that a network learned, for docs/explanation/mathematics.md.

python lab/tools/draw_kernels.py docs/images/kernels.png
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

LEARNED = "lab/results/cifar100/200-epochs/resnet20-kernel-coefficients_sigmoid/*seed0.json"


def main(path: Path) -> None:
    t = np.linspace(-1, 1, 201)
    (result, *_) = sorted(Path().glob(LEARNED))
    powers = np.array([0.0, *json.loads(result.read_text())["alpha"][3:]])
    shapes = {
        "linear, t": t,
        "quadratic, (1 + t)² / 4": (1 + t) ** 2 / 4,
        "(1 + t)¹⁰ / 2¹⁰": ((1 + t) / 2) ** 10,
        "Gaussian, exp(2t - 2)": np.exp(2 * t - 2),
        "learned by a ResNet-20": np.polynomial.polynomial.polyval(t, powers / powers.sum()),
    }
    figure = Figure(figsize=(7.5, 3.8), dpi=110, layout="constrained")
    panel = figure.subplots()
    colors = ("#8a8f98", "#2c47c9", "#257a57", "#bd9d08", "#b92d05")
    for (name, values), color in zip(shapes.items(), colors, strict=True):
        panel.plot(t, values, label=name, color=color, linewidth=2)
    panel.set(xlabel="t, cosine of feature and weight", ylabel="k(t)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
