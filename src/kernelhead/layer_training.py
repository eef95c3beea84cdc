"""The paper's layer on feature vectors, trained as the last layer of a network is: by cross-entropy."""

import math
import warnings
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.nn import functional as F

from kernelhead.heads import KernelClassifier
from kernelhead.parameters import parameter_groups
from kernelhead.ridge import best_temperature

BATCH, LEARNING_RATE, WEIGHT_DECAY = 256, 0.1, 1e-4
EPOCHS, STEPS = 5, 100  # the shortest training: both, at least
DOUBLINGS, GAIN = 2, 0.005  # how often it may be doubled, and what each has to gain, in nats a sample
PARTS, ENOUGH = 3, 300  # samples are held out a third at a time, until there are so many


class LayerClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """`KernelClassifier` over standardised features and a constant one, class weights starting at samples.

    It is trained at temperature 1, where logits of features in many dimensions are small, which keeps it from learning
    the samples by heart, but also its probabilities far from certain. So the temperature it predicts with is that of
    the best log-loss on samples held out of a training. So is the length of training: it is doubled as long as that
    gains anything there, and a `ConvergenceWarning` says that it could have gone on. Then it is trained on all samples.

    Args:
        prototypes: class weights a class, a mixture if there are several.
        random_state: of their start and the order of samples.

    Attributes:
        classes_: (C,), sorted.
        head_: the `KernelClassifier`, (N, D + 1) -> (N, C).
    """

    def __init__(self, prototypes: int = 1, random_state: int = 0) -> None:
        self.prototypes = prototypes
        self.random_state = random_state

    def fit(self, X: NDArray[Any], y: NDArray[Any]) -> Self:
        """Train on standardised features X (N, D) and labels y (N,)."""
        self.classes_, target = np.unique(y, return_inverse=True)
        points, labels = self._points(X), torch.from_numpy(target)
        length, temperature = self._suitable(points, labels)
        self.head_ = self._trained(points, labels, length)
        self.head_.temperature = temperature
        return self

    def _suitable(self, points: Tensor, labels: Tensor) -> tuple[int, float]:
        """The length of training, in those of the shortest, and the temperature that suit samples held out of it."""
        part = _parts(labels, torch.Generator().manual_seed(self.random_state))
        if not (part >= 0).any():  # one sample of each class
            return 1, 1.0
        best, found = math.inf, (1, 1.0)
        for doubling in range(DOUBLINGS + 1):
            logits, truth = self._held_out(points, labels, part, 2**doubling)
            temperature = best_temperature(logits, truth, torch.ones(len(truth)), 1.0)
            loss = F.cross_entropy(logits / temperature, truth).item()
            if loss > best - GAIN:
                return found
            best, found = loss, (2**doubling, temperature)
        warnings.warn(
            f"the last doubling of its training still gained more than {GAIN} nats a sample on samples held out",
            ConvergenceWarning,
            stacklevel=3,
        )
        return found

    def _held_out(self, points: Tensor, labels: Tensor, part: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Logits (n, C) and labels (n,) of samples that a training of this length did not see."""
        logits: list[Tensor] = []
        truth: list[Tensor] = []
        for number in range(PARTS):
            held = part == number
            if held.any() and sum(len(each) for each in truth) < ENOUGH:
                head = self._trained(points[~held], labels[~held], length)
                with torch.no_grad():
                    logits.append(head(points[held]))
                truth.append(labels[held])
        return torch.cat(logits), torch.cat(truth)

    def _trained(self, points: Tensor, labels: Tensor, length: int) -> KernelClassifier:
        generator = torch.Generator().manual_seed(self.random_state)
        head = self._start(points, labels, generator)
        batches = max(1, len(labels) // BATCH)
        epochs = length * max(EPOCHS, -(-STEPS // batches))
        optimizer = torch.optim.AdamW(parameter_groups(head, WEIGHT_DECAY), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (epochs * batches)))
        )
        for _ in range(epochs):
            for index in torch.randperm(len(labels), generator=generator).chunk(batches):
                optimizer.zero_grad()
                loss = head.loss(points[index], labels[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
        return head

    def _start(self, points: Tensor, labels: Tensor, generator: torch.Generator) -> KernelClassifier:
        """Class weights at the mean of a class, or prototypes at some of its samples."""
        classes = len(self.classes_)
        with torch.random.fork_rng(devices=[]):
            head = KernelClassifier(points.shape[1], classes, prototypes=self.prototypes, coefficients="softplus")
        with torch.no_grad():
            for index in range(classes):
                own = (labels == index).nonzero().view(-1)
                chosen = own[torch.randint(len(own), (self.prototypes,), generator=generator)]
                start = points[chosen] if self.prototypes > 1 else points[own].mean(0, keepdim=True)
                head.weight[index * self.prototypes : (index + 1) * self.prototypes] = F.normalize(start)
        return head

    def predict_proba(self, X: NDArray[Any]) -> NDArray[Any]:
        """Probabilities (N, C)."""
        with torch.no_grad():
            probabilities: NDArray[Any] = torch.softmax(self.head_(self._points(X)).double(), 1).numpy()
        return probabilities

    @staticmethod
    def _points(X: NDArray[Any]) -> Tensor:
        points = torch.as_tensor(X, dtype=torch.float32)
        return F.pad(points, (0, 1), value=points.shape[1] ** 0.5)


def _parts(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Which part each sample is held out with, every class spread over them; -1, never, the only one of a class."""
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    part = torch.empty_like(labels)
    part[order] = torch.where(counts.repeat_interleave(counts) > 1, rank % PARTS, -1)
    return part
