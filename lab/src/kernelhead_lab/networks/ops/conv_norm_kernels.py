"""The Triton kernels of `kernelhead_lab.networks.ops.conv_norm`: BatchNorm, shortcut and ReLU, and their gradients."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from kernelhead_lab.networks.ops.conv3x3_kernels import factor_and_shift, positions


@triton.jit(do_not_specialize=["blocks"])
def normalize_kernel(
    y,
    statistics,
    scale,
    bias,
    shortcut,
    z,
    pixels,
    blocks,  # of pixels, for each program
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    H_SHORTCUT: tl.constexpr,
    W_SHORTCUT: tl.constexpr,
    C_SHORTCUT: tl.constexpr,  # 0: there is none
    STRIDE: tl.constexpr,  # of the shortcut
    RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    c = tl.arange(0, C)
    factor, shift = factor_and_shift(statistics, scale, bias, c, C)
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        at = m[:, None] * C + c[None, :]
        within = (m < pixels)[:, None]
        value = tl.load(y + at, mask=within, other=0.0).to(tl.float32) * factor[None, :] + shift[None, :]
        if C_SHORTCUT > 0:
            column, row, image = positions(m, W, H)
            position = (image * H_SHORTCUT + row * STRIDE) * W_SHORTCUT + column * STRIDE
            channel = c - (C - C_SHORTCUT) // 2
            kept = within & ((channel >= 0) & (channel < C_SHORTCUT))[None, :]
            added = tl.load(shortcut + position[:, None] * C_SHORTCUT + channel[None, :], mask=kept, other=0.0)
            value += added.to(tl.float32)
        if RECTIFIED:
            value = tl.where(value < 0, 0.0, value)  # what is not a number stays so
        tl.store(z + at, value.to(z.dtype.element_ty), mask=within)


@triton.jit
def _gradient(dz, z, at, within, convolved, factor, shift, RECTIFIED: tl.constexpr):
    """With respect to the sum that is rectified: its sign is that of z or, without a shortcut, computed again."""
    gradient = tl.load(dz + at, mask=within, other=0.0).to(tl.float32)
    if RECTIFIED:
        if z is not None:
            value = tl.load(z + at, mask=within, other=0.0).to(tl.float32)
        else:
            value = convolved * factor[None, :] + shift[None, :]
        gradient = tl.where(value <= 0, 0.0, gradient)
    return gradient


@triton.jit(do_not_specialize=["blocks"])
def sums_kernel(
    dz,
    z,  # where a shortcut was added and the sum rectified, else None
    y,
    statistics,
    scale,
    bias,
    partial,  # (parts, 2, C): sums of the gradient, and of its products with the normalised values
    pixels,
    blocks,  # of pixels, for each part
    C: tl.constexpr,
    RECTIFIED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    c = tl.arange(0, C)
    factor, shift = factor_and_shift(statistics, scale, bias, c, C)
    mean = tl.load(statistics + c)
    first = tl.zeros((BLOCK, C), tl.float32)
    second = tl.zeros((BLOCK, C), tl.float32)
    for block in range(blocks):
        m = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        at = m[:, None] * C + c[None, :]
        within = (m < pixels)[:, None]
        convolved = tl.load(y + at, mask=within, other=0.0).to(tl.float32)
        gradient = _gradient(dz, z, at, within, convolved, factor, shift, RECTIFIED)
        first += gradient
        second += gradient * (convolved - mean[None, :])
    own = partial + part * (2 * C) + c
    tl.store(own, tl.sum(first, 0))
    tl.store(own + C, tl.sum(second, 0) * tl.load(statistics + C + c))


@triton.jit(do_not_specialize=["blocks"])
def backward_kernel(
    dz,
    z,
    y,
    statistics,
    scale,
    bias,
    partial,
    dy,
    dscale,
    dbias,
    pixels,
    blocks,  # of pixels, for each program
    parts,
    C: tl.constexpr,
    RECTIFIED: tl.constexpr,
    PARTS: tl.constexpr,  # at least, as a power of 2
    BLOCK: tl.constexpr,
):
    c = tl.arange(0, C)
    part = tl.arange(0, PARTS)[:, None]
    summed = partial + part * (2 * C) + c[None, :]
    along_bias = tl.sum(tl.load(summed, mask=part < parts, other=0.0), 0)
    along_scale = tl.sum(tl.load(summed + C, mask=part < parts, other=0.0), 0)
    if tl.program_id(0) == 0:
        tl.store(dbias + c, along_bias)
        tl.store(dscale + c, along_scale)

    # dy = (gradient - mean of gradient - normalised y * mean of its product with the gradient) * factor
    factor, shift = factor_and_shift(statistics, scale, bias, c, C)
    slope = -along_scale / pixels * tl.load(statistics + C + c) * factor
    level = -along_bias / pixels * factor - tl.load(statistics + c) * slope
    for block in range(blocks):
        m = (tl.program_id(0) * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        at = m[:, None] * C + c[None, :]
        within = (m < pixels)[:, None]
        convolved = tl.load(y + at, mask=within, other=0.0).to(tl.float32)
        gradient = _gradient(dz, z, at, within, convolved, factor, shift, RECTIFIED)
        value = gradient * factor[None, :] + (convolved * slope[None, :] + level[None, :])
        tl.store(dy + at, value.to(dy.dtype.element_ty), mask=within)
