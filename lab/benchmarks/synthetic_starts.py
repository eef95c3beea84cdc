"""Why the paper's protocol stalls on the synthetic data: coefficients, weight decay and starts taken apart.

    python lab/benchmarks/synthetic_starts.py [--json lab/results/bench/synthetic_starts.json]

The paper's layer, learning rate 1, 30 epochs, 10 draws, 8 starts each, all 10,000 training samples. For each activation
and weight decay it prints the mean test accuracy over starts, and that of the start with the lowest training loss. It
counts the coefficients a_1 .. a_7 that are zero at the end, and those among them with a negative gradient: they would
lower the training loss if they could come back.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from kernelhead import KernelHead, kernels, metrics
from kernelhead.files import environment
from kernelhead.finetune.results import FORMAT
from kernelhead.functional import kernel_mean
from kernelhead_lab.engine.ensemble import ensemble_logits, train_ensemble
from kernelhead_lab.tables.synthetic_data import draw

DRAWS, STARTS, EPOCHS, BATCH = 10, 8, 30, 128


def study(coefficients: str, weight_decay: float, epochs: int) -> dict[str, object]:
    draws = [draw(seed) for seed in range(DRAWS)]
    of_draw = [seed for seed in range(DRAWS) for _ in range(STARTS)]
    heads = []
    for _, start in product(range(DRAWS), range(STARTS)):
        torch.manual_seed(start)
        heads.append(KernelHead(3, 2, coefficients=coefficients))
    x = torch.from_numpy(np.stack([draws[seed].x_train for seed in of_draw])).float()
    y = torch.from_numpy(np.stack([draws[seed].y_train for seed in of_draw]))
    rates = torch.ones(len(heads))
    length = {"epochs": epochs, "batch_size": BATCH}
    train_ensemble(heads, x, y, **length, learning_rate=rates, weight_decay=weight_decay * rates)

    accuracy, loss, dead, wanted = [], [], 0, 0
    for index, (seed, head) in enumerate(zip(of_draw, heads, strict=True)):
        alpha = head.alpha.detach().requires_grad_()
        value = F.cross_entropy(kernel_mean(x[index], head.weight.detach(), alpha), y[index])
        (gradient,) = torch.autograd.grad(value, alpha)
        at_zero = alpha[kernels.END_POINTS + 1 :] < 1e-3
        dead += int(at_zero.sum())
        wanted += int((gradient[kernels.END_POINTS + 1 :][at_zero] < -1e-4).sum())
        test = torch.from_numpy(draws[seed].x_test).float()
        accuracy.append(metrics.accuracy(ensemble_logits([head], test[None])[0], torch.from_numpy(draws[seed].y_test)))
        loss.append(value.item())
    by_draw, losses = np.array(accuracy).reshape(DRAWS, STARTS), np.array(loss).reshape(DRAWS, STARTS)
    return {
        "coefficients": coefficients,
        "weight_decay": weight_decay,
        "mean_over_starts": by_draw.mean(),
        "best_training_loss": by_draw[np.arange(DRAWS), losses.argmin(1)].mean(),
        "at_zero_percent": 100 * dead / (7 * len(heads)),
        "at_zero": dead,
        "at_zero_with_negative_gradient": wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for coefficients, weight_decay in product(("relu", "softplus"), (1e-4, 0.0)):
        row = study(coefficients, weight_decay, options.epochs)
        rows.append(row)
        print(
            f"{coefficients:<9} weight decay {weight_decay:<7g} mean over starts {row['mean_over_starts']:.2f}  "
            f"best of {STARTS} by training loss {row['best_training_loss']:.2f}  "
            f"at zero {row['at_zero_percent']:.0f} %, {row['at_zero_with_negative_gradient']} of {row['at_zero']} "
            "with a negative gradient",
            flush=True,
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        counts = {"draws": DRAWS, "starts": STARTS, "epochs": options.epochs}
        content = {"format": FORMAT, "rows": rows, **counts, **environment()}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
