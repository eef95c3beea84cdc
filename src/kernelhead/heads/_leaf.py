"""Heads in graphs of torch.fx, which feature extractors of torchvision and timm are made of."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from torch import Tensor, fx, nn

Head = TypeVar("Head", bound=nn.Module)


def leaf(forward: Callable[[Head, Tensor], Tensor]) -> Callable[[Head, Tensor], Tensor]:
    """Make a head's forward pass one node of a traced graph, as layers of PyTorch are: it looks at shapes."""

    @wraps(forward)
    def traced(head: Head, features: Tensor) -> Tensor:
        if isinstance(features, fx.Proxy):
            tracer = features.tracer
            node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(head), (features,), {})
            return node
        return forward(head, features)

    return traced
