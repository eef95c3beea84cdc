"""Other launches of the convolutions than those of their tables, for the tests of their kernels."""

from contextlib import contextmanager

SIZE = 5, 6, 9  # N, H, W


@contextmanager
def few_programs():
    """Let two programs take everything, in small blocks: several for each, the last of them not full.

    At SIZE a block has lanes of several images, and of an image they are in two blocks.
    """
    from kernelhead_lab.networks.ops import conv3x3, conv_norm

    maps = conv3x3.FORWARD, conv3x3.DGRAD, conv3x3.DGRAD_SUMS
    small = [(table, {"block": 16, "blocks": 99}) for table in maps]
    small += [(table, {"elements": 512, "blocks": 99}) for table in (conv_norm.NORMALIZE, conv_norm.BACKWARD)]
    small += [(conv3x3.WGRAD, {"block": 16, "parts": 2}), (conv_norm.SUMS, {"elements": 512, "parts": 2})]
    kept = [dict(table) for table, _ in small]
    programs, conv3x3.PROGRAMS = conv3x3.PROGRAMS, 2
    for table, changes in small:
        table.update({key: how._replace(**changes) for key, how in table.items()})
    try:
        yield
    finally:
        conv3x3.PROGRAMS = programs
        for (table, _), before in zip(small, kept, strict=True):
            table.update(before)


@contextmanager
def other_strips(channels, tiles, parts):
    """Strips of (group, columns, rows, ahead) forward and for the input's gradient, (group, columns, rows) for dw."""
    from kernelhead_lab.networks.ops import conv3x3

    every = conv3x3.FORWARD, conv3x3.DGRAD, conv3x3.DGRAD_SUMS, conv3x3.WGRAD
    tables = [table for table in every if channels in table]
    kept = [table[channels] for table in tables]
    for table, how in zip(tables, kept, strict=True):
        changes = parts if table is conv3x3.WGRAD else tiles
        table[channels] = how._replace(**dict(zip(how._fields, changes, strict=False)), block=16)
    try:
        yield
    finally:
        for table, how in zip(tables, kept, strict=True):
            table[channels] = how
