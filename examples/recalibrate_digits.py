"""Test on larger images than in training, and recalibrate the head.

A landmark head standardises kernel values by statistics of training. On larger images they are means over more spatial
positions, which vary less. recalibrate estimates the statistics anew, and the temperature from held-out labels.

python examples/recalibrate_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import kernelhead
from kernelhead.metrics import accuracy, negative_log_likelihood

TRAIN_SIDE, TEST_SIDE = 16, 24


def network() -> nn.Module:
    """A small convolutional network that takes images of any size."""
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 16, 2), (16, 32, 1), (32, 32, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def main() -> list[float]:
    """Print accuracy and NLL before and after; return the NLLs."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target).long()
    train, held, test = torch.randperm(len(labels)).split([900, 400, 497])

    def sized(rows: Tensor, side: int) -> Tensor:
        return F.interpolate(images[rows], size=side, mode="bilinear")

    model = kernelhead.kernelize(network(), head="landmarks", landmarks=128, inputs=sized(train[:2], TRAIN_SIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10 * 18)
    for _ in range(10):
        for batch in train[torch.randperm(900)].split(50):
            loss = F.cross_entropy(model(sized(batch, TRAIN_SIDE)), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    def report(what: str, side: int) -> float:
        with torch.no_grad():
            logits = model.eval()(sized(test, side))
        nll = negative_log_likelihood(logits, labels[test])
        print(f"{what:<34} accuracy {accuracy(logits, labels[test]):5.2f} %, NLL {nll:.3f}")
        return nll

    found = [
        report(f"trained and tested at {TRAIN_SIDE} pixels", TRAIN_SIDE),
        report(f"tested at {TEST_SIDE} pixels", TEST_SIDE),
    ]
    kernelhead.recalibrate(model, [sized(train, TEST_SIDE)])
    found.append(report("with new statistics", TEST_SIDE))
    kernelhead.recalibrate(model, [(sized(held, TEST_SIDE), labels[held])])
    found.append(report("with held-out labels", TEST_SIDE))
    return found


if __name__ == "__main__":
    main()
