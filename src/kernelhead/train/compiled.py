"""torch.compile, as the steps of a training need it."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compile_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Runs that differ in values alone share one compilation; every other kind of network has its own.

    torch keeps eight for a function unless told otherwise, and would sooner make sizes that differ between kinds
    dynamic, which is slower than one compilation each.
    """
    from torch._dynamo import config  # slow to import, and not needed without

    limit = config.patch(recompile_limit=config.accumulated_recompile_limit)
    compiled: Callable[P, R] = limit(torch.compile(function, fullgraph=True, dynamic=False))
    return compiled
