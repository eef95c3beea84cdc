"""Images as a trained classifier takes them."""

import warnings
from collections.abc import Callable, Sequence

import torch

from kernelhead.data.cifar import CLASSES
from kernelhead.data.images import Images
from kernelhead.data.large import SHORT_SIDE
from kernelhead.data.open import open_for_testing
from kernelhead.data.packed_folders import remember_folder
from kernelhead.train.loop import BATCH_PIXELS
from kernelhead.train.saved import SavedClassifier

NAMED = 5  # of many names, so many are shown
STREAMED_BATCH = 128  # a streamed image needs the memory of its picture, however small the network's input is

Steps = Callable[[str, int, int], None]  # what, done, total


def open_other(
    saved: SavedClassifier, data: str, device: torch.device, progress: Steps | None
) -> tuple[Images, list[str]]:
    """Test images and classes of other data than a classifier's own, as its network takes them."""
    short_side = saved.settings.get("short_side", SHORT_SIDE)
    if data not in CLASSES:
        need_pillow()
    images, classes, left_out = open_for_testing(
        data, saved.input, device, short_side=short_side, margin=margin_of(saved), progress=progress
    )
    remember_folder(data, short_side, images)
    warn_of(left_out)
    return images, classes


def margin_of(saved: SavedClassifier) -> float | None:
    """A network that was trained on whole images of CIFAR is shown the whole of a picture."""
    return 1.0 if saved.settings.get("data") in CLASSES else None


def streamed_batch(size: int) -> int:
    """How many streamed images of side `size` are looked at together."""
    return max(1, min(STREAMED_BATCH, BATCH_PIXELS // size**2))


def need_pillow() -> None:
    """See that pictures can be read, before something is done with them."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        sentence = "pictures need Pillow; pip install 'kernelhead[vision]' brings it"
        raise ModuleNotFoundError(sentence, name=error.name) from error


def warn_of(left_out: Sequence[str]) -> None:
    """Warn of pictures that are not among the images."""
    if left_out:
        sentence = f"{len(left_out)} pictures are missing or cannot be read: {some(left_out)}"
        warnings.warn(sentence, stacklevel=3)


def some(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:NAMED]) + (", .." if len(names) > NAMED else "")
