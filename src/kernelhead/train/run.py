"""One training among those that go on at once, and what comes of it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernelhead.backbones import Classifier, create_backbone
from kernelhead.heads import create_head


@dataclass(frozen=True)
class Run:
    """What may differ between runs that are trained at once.

    `teacher` is the file of a trained classifier (see `saved`) whose scores, softened by `temperature`, are learned
    instead of the labels. `mixup` trains by `mixup_cross_entropy`. `head_rate`: what the head's learning rate is times
    that of the backbone.
    """

    backbone: str
    head: str
    learning_rate: float
    weight_decay: float = 1e-4
    seed: int = 0
    head_options: dict[str, Any] = field(default_factory=dict)
    backbone_options: dict[str, Any] = field(default_factory=dict)
    teacher: str | None = None
    temperature: float = 20.0
    mixup: bool = False
    head_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.mixup and self.teacher is not None:
            raise ValueError("mixup mixes labels, and with a teacher its scores are learned instead: use one of them")

    def create(self, num_classes: int) -> Classifier:
        """The network at its start, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            backbone = create_backbone(self.backbone, **self.backbone_options)
            return Classifier(backbone, create_head(self.head, backbone.num_features, num_classes, **self.head_options))


@dataclass
class Trained:
    """A run's network after training, loss and share of correct answers at every step of it.

    losses, accuracies (steps,): of the training batches, NaN where a step was not reached. `diverged_at`: the step at
    which the loss was not finite any more, if there was one; the network is then of no use.
    """

    run: Run
    model: Classifier
    losses: Tensor
    accuracies: Tensor
    diverged_at: int | None = None
