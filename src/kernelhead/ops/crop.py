"""A batch of small images on CUDA, cropped, flipped and normalised in one Triton kernel. Needs triton.

Of torch's operations the same takes a dozen, each over in no time: a step of a small network waits for their launches.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

BLOCK = 1024  # values that a program takes


@triton.jit
def _crop_kernel(
    stored,  # (n, SIDE, SIDE, 3), uint8
    stored_labels,
    chosen,  # where the images of a subset are stored, or None
    index,  # (B,)
    noise,  # (B, 3)
    mean,
    std,
    images,  # (B, SIZE, SIZE, 3)
    labels,  # (B,)
    SIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    image = tl.load(index + b)
    tl.store(labels + b, tl.load(stored_labels + image))  # by each program of an image: all store the same
    if chosen is not None:
        image = tl.load(chosen + image)
    top = (tl.load(noise + 3 * b) * (SIDE - SIZE + 1)).to(tl.int32)
    left = (tl.load(noise + 3 * b + 1) * (SIDE - SIZE + 1)).to(tl.int32)
    flipped = tl.load(noise + 3 * b + 2) < 0.5
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel, column, row = value % 3, value // 3 % SIZE, value // (3 * SIZE)
    column = tl.where(flipped, SIZE - 1 - column, column)
    exists = row < SIZE
    at = ((image * SIDE + top + row) * SIDE + left + column) * 3 + channel
    byte = tl.load(stored + at, mask=exists, other=0).to(tl.float32)
    normal = tl.div_rn(byte - tl.load(mean + channel), tl.load(std + channel))
    tl.store(images + b.to(tl.int64) * (3 * SIZE * SIZE) + value, normal, mask=exists)


def cropped(
    stored: Tensor,
    labels: Tensor,
    chosen: Tensor | None,
    index: Tensor,
    noise: Tensor,
    mean: Tensor,
    std: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Images (B, 3, H, W), float32, channels last, and labels (B,), as `ResidentImages.augmented` has them.

    stored (n, S, S, 3), bytes, of which those at index (B,) are taken, or at chosen[index], and of each H = W = size
    rows and columns as noise (B, 3) says; labels (m,), int64; mean and std (3,), float32.
    """
    side, batch = stored.shape[1], index.shape[0]
    images = torch.empty((batch, size, size, 3), dtype=torch.float32, device=stored.device)
    own = labels.new_empty(batch)
    if batch:
        given = (None if chosen is None else chosen.contiguous()), index.contiguous(), noise.contiguous()
        with torch.cuda.device_of(stored):
            _crop_kernel[batch, triton.cdiv(3 * size * size, BLOCK)](
                stored, labels.contiguous(), *given, mean, std, images, own, SIDE=side, SIZE=size, BLOCK=BLOCK
            )
    return images.permute(0, 3, 1, 2), own
