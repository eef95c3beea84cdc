"""The cost of heads on a machine: training, inference and memory, beside a linear layer.

All heads take their steps in turn, so a slow moment of the machine hits them alike; what counts is the ratio.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelhead.heads import Head, create_head

BASELINE = "linear"
WARM_UP_ROUNDS, MIN_ROUNDS = 3, 5
MAX_WEIGHTS = 2**28  # of second-order pooling, which has features x features x classes: beyond, it is left out


def make_heads(features: int, classes: int, positions: bool, landmarks: int) -> dict[str, Head]:
    """Make the heads by name, the baseline first: those of vectors, or those that pool positions."""
    names = ["expansion", "attentive"] if positions else ["kernel", "prototypes"]
    if positions and features**2 * classes <= MAX_WEIGHTS:
        names.append("second_order")
    options = {"expansion": {"width": landmarks}, "landmarks": {"landmarks": landmarks}}
    return {
        name: create_head(name, features, classes, **options.get(name, {})) for name in (BASELINE, *names, "landmarks")
    }


def measure(heads: Mapping[str, Head], features: Tensor, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Time heads for about so many seconds, and count their parameters and the bytes kept for the backward pass.

    features are vectors `(N, D)`, or maps `(N, D, H, W)` of which a head that does not pool takes the mean. A training
    step is forward, loss and backward, with gradients for the features, by the fused loss where it pays. Half precision
    is autocast's. At inference heads are frozen.
    """
    heads = {name: head.to(features.device) for name, head in heads.items()}
    features = features.detach().requires_grad_()
    target = torch.randint(heads[BASELINE].num_classes, features.shape[:1], device=features.device)
    autocast = partial(torch.autocast, features.device.type, dtype, enabled=dtype != torch.float32)

    def pooled(head: Head) -> Tensor:
        return features if head.pools or features.dim() == 2 else features.mean((2, 3))

    def loss(head: Head) -> Tensor:
        with autocast():
            return head.loss(pooled(head), target)

    def train(head: Head) -> None:
        torch.autograd.grad(loss(head), [features, *head.parameters()])

    def infer(head: Head) -> None:
        with torch.inference_mode(), autocast():
            head(pooled(head))

    trained = medians({name: partial(train, head) for name, head in heads.items()}, seconds / 2)
    inferred = medians({name: partial(infer, head.freeze()) for name, head in heads.items()}, seconds / 2)
    return [
        {
            "head": name,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "kept_bytes": kept_bytes(partial(loss, head)),
            "training_ms": trained[name],
            "inference_ms": inferred[name],
        }
        for name, head in heads.items()
    ]


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


def medians(steps: Mapping[str, Callable[[], None]], seconds: float, most: float = math.inf) -> dict[str, float]:
    """Median milliseconds of each step, all in turn for so many seconds, or `most` rounds, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP_ROUNDS):
        for step in steps.values():
            step()
    began, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or (time.perf_counter() - began < seconds and rounds < most):
        for name, step in steps.items():
            started = _now()
            step()
            times[name].append(1e3 * (_now() - started))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def _now() -> float:
    """Seconds on a clock, once a GPU has finished what it was given."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
