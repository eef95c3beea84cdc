"""torch.compile, as the steps of a run need it."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compile_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function once per kind of network; networks that differ in values alone share a compilation.

    torch keeps eight compilations of a function unless told otherwise. Beyond that it makes sizes dynamic, which is
    slower than one compilation each.
    """
    from torch._dynamo import config  # slow to import, and not needed without

    limit = config.patch(recompile_limit=config.accumulated_recompile_limit)
    compiled: Callable[P, R] = limit(torch.compile(function, fullgraph=True, dynamic=False))
    return compiled
