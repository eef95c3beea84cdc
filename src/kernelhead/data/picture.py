"""One picture file as upright pixels in RGB, or as the JPEG bytes of a packed file."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

JPEG_QUALITY = 95
ORIENTATION = 0x0112  # the EXIF tag; 2 to 8 are turned or mirrored
BITS_PER_SAMPLE = 0x0102  # the tag of TIFF


def open_picture(path: Path, short_side: int | None) -> NDArray[np.uint8]:
    """A picture file as uint8 (H, W, 3): upright, in RGB, its short side no longer than `short_side`."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            return np.asarray(_upright_rgb(opened, short_side))
    except Exception as error:  # see `packed.pack`
        raise ValueError(f"{path} is not a readable picture ({error})") from error


def encode_jpeg(path: Path, short_side: int | None) -> tuple[bytes, int]:
    """The JPEG bytes of a picture file and the length of its short side."""
    from PIL import Image

    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as opened:
        fits = short_side is None or min(opened.size) <= short_side
        if opened.format == "JPEG" and opened.mode == "RGB" and not _turned(opened) and fits:
            opened.load()
            return content, min(opened.size)
        image = _upright_rgb(opened, short_side)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return out.getvalue(), min(image.size)


def _turned(image: "Image") -> bool:
    return image.getexif().get(ORIENTATION, 1) in range(2, 9)


def _bits(image: "Image") -> int:
    """Bits of a pixel in a mode of more than 8.

    The mode I does not tell: it is that of 32 bits, and some versions of Pillow open 16 bits so. PNG has no more than
    16, and those of PPM are scaled to 16 by Pillow.
    """
    from PIL.TiffImagePlugin import TiffImageFile

    if isinstance(image, TiffImageFile):
        bits: int = max(image.tag_v2[BITS_PER_SAMPLE])
        return bits
    narrow = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    return 16 if narrow else 32


def _upright_rgb(opened: "Image", short_side: int | None) -> "Image":
    from PIL import Image, ImageOps

    if short_side is not None and min(opened.size) > short_side:
        # A JPEG decoder makes an image 2, 4 or 8 times smaller while it decodes; twice the size keeps the detail.
        width, height = (2 * side * short_side // min(opened.size) + 1 for side in opened.size)
        opened.draft(None, (width, height))
    image: Image.Image = ImageOps.exif_transpose(opened) if _turned(opened) else opened
    if opened.mode[0] in "IF":  # more than 8 bits a pixel, which some versions of Pillow would cut at 255
        bits = _bits(opened)
        if bits > 16:
            raise ValueError(f"it has {bits} bits a pixel, and nothing says which of its values is white")
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).clip(0, 255).astype(np.uint8))
    if "transparency" in image.info:  # Pillow warns of a palette with transparency that becomes RGB at once
        image = image.convert("RGBA")
    image = image.convert("RGB")
    if short_side is not None and min(image.size) > short_side:
        width, height = (max(1, round(side * short_side / min(image.size))) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
    return image
