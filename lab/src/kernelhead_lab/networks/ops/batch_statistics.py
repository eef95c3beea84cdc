"""BatchNorm's statistics of values that a Triton kernel holds, taken before they leave it. Needs triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def batch_statistics(
    first,  # (BLOCK, C): this program's differences from the running mean, summed over its blocks of values
    second,  # and the squares of these differences
    partial,  # (programs, 2, C)
    statistics,  # (2, C): the mean, and one over the standard deviation
    running_mean,
    running_var,
    batches,  # how many the running statistics have seen
    tickets,  # zero, before and after
    pixels,
    momentum,
    eps,
    C: tl.constexpr,
):
    """Mean and deviation of each channel over all programs, and what BatchNorm keeps of them.

    Each program writes its sums; the one that finishes last adds them, always in the same order. The sums are those of
    differences from the running mean: squares of the values themselves would drown a small variance in a large mean.
    """
    ROWS: tl.constexpr = 2048 // C  # of partial sums, added at once
    c = tl.arange(0, C)
    own = partial + tl.program_id(0) * (2 * C) + c
    tl.store(own, tl.sum(first, 0))
    tl.store(own + C, tl.sum(second, 0))
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket, which releases and acquires
    programs = tl.num_programs(0)
    if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == programs - 1:
        first_all = tl.zeros((ROWS, C), tl.float32)
        second_all = tl.zeros((ROWS, C), tl.float32)
        for begin in range(0, programs, ROWS):
            row = begin + tl.arange(0, ROWS)
            at = partial + row[:, None] * (2 * C) + c[None, :]
            written = (row < programs)[:, None]
            first_all += tl.load(at, mask=written, other=0.0, cache_modifier=".cg")  # from where all programs see it
            second_all += tl.load(at + C, mask=written, other=0.0, cache_modifier=".cg")
        offset = tl.sum(first_all, 0) / pixels
        variance = tl.sum(second_all, 0) / pixels - offset * offset
        variance = tl.where(variance < 0, 0.0, variance)
        before = tl.load(running_mean + c)
        spread = tl.load(running_var + c)
        tl.store(statistics + c, before + offset)
        tl.store(statistics + C + c, 1 / tl.sqrt(variance + eps))
        tl.store(running_mean + c, before + momentum * offset)
        tl.store(running_var + c, spread + momentum * (variance * (pixels / (pixels - 1.0)) - spread))
        tl.store(batches, tl.load(batches) + 1)
        tl.store(tickets, 0)
