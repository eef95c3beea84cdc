"""Kernel heads on feature vectors, trained by cross-entropy as the last layer of a network is."""

import math
import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor
from torch.nn import functional as F

from kernelhead.heads import create_head
from kernelhead.metrics import best_temperature
from kernelhead.optim import parameter_groups
from kernelhead.sklearn.samples import Array, shuffled_ranks

BATCH, LEARNING_RATE, WEIGHT_DECAY = 256, 0.1, 1e-4
MIN_EPOCHS, MIN_STEPS = 5, 100  # of the shortest run
LENGTHS, MIN_GAIN = (1, 2, 4), 0.005  # of runs, over the shortest; what a longer one has to gain in nats per sample
HELD_OUT = 3  # one sample in three of each class


class TrainedHead(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """`KernelHead`, or `PrototypeHead` with several prototypes, over standardised features and a constant one.

    Held-out samples choose the temperature, since in many dimensions logits are small, and the length of the run, which
    is doubled as long as that helps. A `ConvergenceWarning` says that it could have gone on. The final run takes all
    samples; its head is `head_`.
    """

    def __init__(self, prototypes: int = 1, random_state: int = 0) -> None:
        self.prototypes, self.random_state = prototypes, random_state

    def fit(self, X: Array, y: Array) -> Self:
        """Train on standardised features X (N, D) and labels y (N,)."""
        self.classes_, target = np.unique(y, return_inverse=True)
        points, labels = self._points(X), torch.from_numpy(target)
        held = torch.from_numpy(shuffled_ranks(target, self.random_state) % HELD_OUT == HELD_OUT - 1)
        best, length, self.temperature_ = math.inf, 1, 1.0
        for tried in LENGTHS if held.any() else ():
            logits = self._train(points[~held], labels[~held], tried)(points[held]).detach()
            temperature = best_temperature(logits, labels[held], torch.ones(len(logits)), 1.0)
            loss = F.cross_entropy(logits / temperature, labels[held]).item()
            if loss > best - MIN_GAIN:
                break
            best, length, self.temperature_ = loss, tried, temperature
        if length == LENGTHS[-1]:
            gain = f"the last doubling of the run gained more than {MIN_GAIN} nats per sample"
            warnings.warn(f"{gain}; it is still too short", ConvergenceWarning, stacklevel=2)
        self.head_ = self._train(points, labels, length)
        return self

    def predict_proba(self, X: Array) -> Array:
        """Return probabilities (N, C)."""
        with torch.no_grad():
            logits = self.head_(self._points(X)).double() / self.temperature_
        return np.asarray(torch.softmax(logits, 1))

    def _train(self, points: Tensor, labels: Tensor, length: int) -> Any:
        """Train a head from means of classes, or from some samples of each where there are several prototypes."""
        generator, count = torch.Generator().manual_seed(self.random_state), self.prototypes
        options: dict[str, Any] = {"prototypes": count, "aggregate": "logsumexp"} if count > 1 else {}
        name = "prototypes" if options else "kernel"
        with torch.random.fork_rng(devices=[]):
            head: Any = create_head(name, points.shape[1], len(self.classes_), coefficients="softplus", **options)
        for label, weight in enumerate(head.weight.detach().view(-1, count, points.shape[1])):
            own = points[labels == label]
            chosen = own[torch.randint(len(own), (count,), generator=generator)]
            weight.copy_(F.normalize(own.mean(0, keepdim=True) if count == 1 else chosen))
        batches = max(1, len(labels) // BATCH)
        epochs = length * max(MIN_EPOCHS, -(-MIN_STEPS // batches))
        optimizer = torch.optim.AdamW(parameter_groups(head, WEIGHT_DECAY), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
        for _ in range(epochs):
            for index in torch.randperm(len(labels), generator=generator).chunk(batches):
                optimizer.zero_grad()
                head.loss(points[index], labels[index]).backward()
                optimizer.step()
                schedule.step()
        return head

    @staticmethod
    def _points(X: Array) -> Tensor:
        points = torch.as_tensor(X, dtype=torch.float32)
        return F.pad(points, (0, 1), value=points.shape[1] ** 0.5)
