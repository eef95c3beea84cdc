"""The learning rate over time."""

import math


def warmup_cosine(step: int, total: int, warmup: int) -> float:
    """Factor on the base learning rate at `step` of `total`: linear warm-up, then cosine decay to zero.

    The paper's Appendix B. Step 0 of a warm-up of w steps has factor 1 / w, step w - 1 has factor 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
