"""What heads cost on a machine: training, inference and memory, beside a linear layer.

All heads take their steps in turn, so that a slow moment of the machine hits them alike; what counts is the ratio.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kernelhead.backbones import count_parameters
from kernelhead.heads import KernelClassifier, create_head, loss_and_hits

PEER = "linear layer"
WARM_UP, FEWEST = 3, 5  # rounds: before any is timed, and of those that are
MOST_WEIGHTS = 2**28  # of second-order pooling, which has features x features x classes: beyond, it is left out

Kind = tuple[str, dict[str, object]]  # a head and its options
Step = Callable[[], None]


@dataclass(frozen=True)
class Problem:
    """Features of a batch, and the heads on them.

    Args:
        features, classes: D and C.
        batch: N, samples of a step.
        places: L, of a feature map (N, D, L, 1), for heads that pool themselves; None for vectors (N, D).
        landmarks: Q, also the width of the expansion.
        prototypes: P.
    """

    features: int
    classes: int
    batch: int
    places: int | None = None
    landmarks: int = 512
    prototypes: int = 4

    def heads(self) -> dict[str, nn.Module]:
        """By name, the linear layer first."""
        if self.places is None:
            vectors: dict[str, Kind] = {
                PEER: ("softmax", {}),
                "kernel": ("kernel", {}),
                f"kernel, {self.prototypes} prototypes": ("kernel", {"prototypes": self.prototypes}),
                f"kernel, {self.landmarks} landmarks": ("kernel", {"landmarks": self.landmarks}),
            }
            if self.prototypes == 1:
                del vectors["kernel, 1 prototypes"]  # the kernel head itself
            return {name: self._create(*kind) for name, kind in vectors.items()}
        kinds: dict[str, Kind] = {
            "second-order pooling": ("second_order", {}),
            f"expansion to {self.landmarks}": ("expansion", {"width": self.landmarks}),
            "kernel, RKHS pooling": ("kernel", {"pool": "rkhs"}),
            f"kernel, {self.landmarks} landmarks, RKHS pooling": (
                "kernel",
                {"pool": "rkhs", "landmarks": self.landmarks, "coefficients": "softplus"},
            ),
        }
        if not self.has_second_order:
            del kinds["second-order pooling"]
        made = {name: self._create(*kind) for name, kind in kinds.items()}
        return {PEER: _AfterMean(self._create("softmax", {})), **made}

    @property
    def has_second_order(self) -> bool:
        """Whether second-order pooling is among the heads: it takes places, and not too many features."""
        return self.places is not None and self.features**2 * self.classes <= MOST_WEIGHTS

    def _create(self, head: str, options: dict[str, object]) -> nn.Module:
        return create_head(head, self.features, self.classes, **options)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Features (N, D) or (N, D, L, 1) with a gradient, and labels (N,)."""
        places = () if self.places is None else (self.places, 1)
        features = torch.randn(self.batch, self.features, *places, device=device, requires_grad=True)
        return features, torch.randint(self.classes, (self.batch,), device=device)


class _AfterMean(nn.Module):
    """A head on the mean over places: what a network with average pooling has."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Cost:
    """Of one head: parameters, milliseconds of a training step and of inference, bytes kept for the backward pass."""

    head: str
    parameters: int
    training_ms: float
    inference_ms: float
    kept_bytes: int


def measure(problem: Problem, device: torch.device, dtype: torch.dtype, seconds: float) -> list[Cost]:
    """Time the heads of a problem for about so many seconds, the linear layer first.

    A training step is forward, loss and backward, with gradients for the features, as `kernelhead train` takes it: with
    the fused loss where it pays. Half precision is autocast's. At inference kernel heads are frozen.
    """
    heads = {name: head.to(device) for name, head in problem.heads().items()}  # first: too large ones fail at once
    features, target = problem.draw(device)
    kept = {name: kept_bytes(partial(_loss, head, features, target, dtype)) for name, head in heads.items()}
    training = {name: _training_step(head, features, target, dtype) for name, head in heads.items()}
    trained = medians(training, seconds / 2, device)
    inference = {name: _inference_step(head, features.detach(), dtype) for name, head in heads.items()}
    inferred = medians(inference, seconds / 2, device)
    return [
        Cost(name, count_parameters(head), trained[name], inferred[name], kept[name]) for name, head in heads.items()
    ]


def _loss(head: nn.Module, features: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(features.device.type, dtype, enabled=dtype != torch.float32):
        return loss_and_hits(head, features, target)[0]


def _training_step(head: nn.Module, features: Tensor, target: Tensor, dtype: torch.dtype) -> Step:
    wanted = [features, *head.parameters()]

    def step() -> None:
        torch.autograd.grad(_loss(head, features, target, dtype), wanted)

    return step


def _inference_step(head: nn.Module, features: Tensor, dtype: torch.dtype) -> Step:
    frozen = head.eval().freeze() if isinstance(head, KernelClassifier) else head.eval()

    def step() -> None:
        with torch.inference_mode(), torch.autocast(features.device.type, dtype, enabled=dtype != torch.float32):
            frozen(features)

    return step


def kept_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps between a forward and a backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # holds what is kept until it is counted
    del result
    return sum(kept.values())


def medians(
    steps: Mapping[str, Step], seconds: float, device: torch.device | None = None, most: int | None = None
) -> dict[str, float]:
    """Median milliseconds of each step, all in turn for so many seconds, or `most` rounds of them, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    began, rounds = time.perf_counter(), 0
    while rounds < FEWEST or (time.perf_counter() - began < seconds and (most is None or rounds < most)):
        for name, step in steps.items():
            _finish(device)
            started = time.perf_counter()
            step()
            _finish(device)
            times[name].append(1e3 * (time.perf_counter() - started))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def _finish(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
