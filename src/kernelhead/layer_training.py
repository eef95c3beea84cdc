"""The paper's layer on feature vectors, trained as the last layer of a network is: by cross-entropy."""

import math
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor
from torch.nn import functional as F

from kernelhead.heads import KernelClassifier
from kernelhead.parameters import parameter_groups

BATCH, EPOCHS, STEPS, LEARNING_RATE, WEIGHT_DECAY = 256, 20, 400, 0.01, 1e-4


class LayerClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """`KernelClassifier` over standardised features and a constant one, class weights starting at samples.

    Args:
        prototypes: class weights a class, a mixture if there are several.
        random_state: of their start and the order of samples.
    """

    def __init__(self, prototypes: int = 1, random_state: int = 0) -> None:
        self.prototypes = prototypes
        self.random_state = random_state

    def fit(self, X: NDArray[Any], y: NDArray[Any]) -> Self:
        """Train on standardised features X (N, D) and labels y (N,)."""
        self.classes_, target = np.unique(y, return_inverse=True)
        points, labels = self._points(X), torch.from_numpy(target)
        generator = torch.Generator().manual_seed(self.random_state)
        with torch.random.fork_rng(devices=[]):
            head = KernelClassifier(
                points.shape[1], len(self.classes_), prototypes=self.prototypes, coefficients="softplus"
            )
        with torch.no_grad():
            for index in range(len(self.classes_)):
                own = (labels == index).nonzero().view(-1)
                chosen = own[torch.randint(len(own), (self.prototypes,), generator=generator)]
                start = points[chosen] if self.prototypes > 1 else points[own].mean(0, keepdim=True)
                head.weight[index * self.prototypes : (index + 1) * self.prototypes] = F.normalize(start)
        self.head_ = head
        self._train(points, labels, generator)
        return self

    def _train(self, points: Tensor, labels: Tensor, generator: torch.Generator) -> None:
        batches = max(1, len(labels) // BATCH)
        epochs = max(EPOCHS, -(-STEPS // batches))
        optimizer = torch.optim.AdamW(parameter_groups(self.head_, WEIGHT_DECAY), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / (epochs * batches)))
        )
        for _ in range(epochs):
            for index in torch.randperm(len(labels), generator=generator).chunk(batches):
                optimizer.zero_grad()
                loss = self.head_.loss(points[index], labels[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()

    def predict_proba(self, X: NDArray[Any]) -> NDArray[Any]:
        """Probabilities (N, C)."""
        with torch.no_grad():
            probabilities: NDArray[Any] = torch.softmax(self.head_(self._points(X)).double(), 1).numpy()
        return probabilities

    @staticmethod
    def _points(X: NDArray[Any]) -> Tensor:
        points = torch.as_tensor(X, dtype=torch.float32)
        return F.pad(points, (0, 1), value=points.shape[1] ** 0.5)
