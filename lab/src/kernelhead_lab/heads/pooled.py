"""The paper's layer and prototypes with kernel values that are averaged over positions."""

from typing import Any

from kernelhead.heads import KernelHead, PrototypeHead
from kernelhead.heads._base import POOLS
from kernelhead.heads._inputs import check_choice


class PooledKernelHead(KernelHead):
    """`KernelHead` of the kernel mean embedding: k(<w_j, f>) / T is averaged over the positions of a map or tokens.

    It takes maps, tokens or vectors, as `LandmarkHead` does.
    """

    name = "pooled_kernel"

    def __init__(self, in_features: int, num_classes: int, *, pool: str | None = "auto", **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        check_choice(type(self).__name__, "pool", pool, POOLS)
        self._options |= {"pool": pool}
        self.pool = pool


class PooledPrototypeHead(PrototypeHead):
    """`PrototypeHead` of the kernel mean embedding: kernel values are averaged over positions, then aggregated.

    It takes maps, tokens or vectors, as `LandmarkHead` does.
    """

    name = "pooled_prototypes"

    def __init__(self, in_features: int, num_classes: int, *, pool: str | None = "auto", **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        check_choice(type(self).__name__, "pool", pool, POOLS)
        self._options |= {"pool": pool}
        self.pool = pool
