"""Labelled images as batches for a network: read once, augmented per image, normalised on the device."""

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernelhead.finetune.backbones import Input, create_network, expected_input
from kernelhead.finetune.cifar import MEANS, load_cifar, vision
from kernelhead.finetune.distributed import is_first
from kernelhead.finetune.images import DATA_SETS, Labelled, Listing, Source, data_path, list_images, name_of, read_image
from kernelhead.finetune.interrupt import ignore_interrupts
from kernelhead.finetune.schedule import mix
from kernelhead.finetune.spec import TrainSpec
from kernelhead.finetune.views import CROP_MARGIN, View, cut_out, resample, stack, test_view, training_view

DETAIL = 1.25  # images are kept larger than that by so much, for random crops
MEMORY_SHARE = 0.25  # of the memory of a device that decoded images may take
BATCH_PIXELS, MAX_BATCH = 2**22, 256  # per batch without gradients
MAX_WORKERS = 8
MIN_SIDE = 32  # pixels; enough to see that an image can be read
NAMED = 5  # so many of the names of files are shown

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
Key = tuple[int, int, int]  # seed, epoch and index of an image
Named = tuple[str, int, str]  # name, label and fingerprint of an image


@dataclass(frozen=True)
class Data:
    """Images for training, validation and testing, on the way to a device, and the names of the classes."""

    train: "Images"
    val: "Images"
    test: "Images"
    classes: list[str]
    left_out: dict[str, str]
    """What is wrong with each file that cannot be read, by its name."""
    input: Input
    device: torch.device
    workers: int

    @property
    def files(self) -> dict[str, list[Named]]:
        """The files of each part: path, label and fingerprint. Images of CIFAR are none."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {part: images.named for part, images in parts.items() if all(mark for _, _, mark in images.named)}


class Images(Dataset[tuple[Tensor, View, int, Key]]):
    """Images (3, H, W) of uint8 with labels, and what is seen of each as a batch with images of side `size`.

    What is random about one is a function of seed, epoch and index alone.
    """

    def __init__(
        self, sources: Sequence[Source | Tensor], named: list[Named], spec: TrainSpec, input: Input, training: bool
    ) -> None:
        self.sources, self.named = sources, named
        self.labels = torch.tensor([label for _, label, _ in named], dtype=torch.long)
        self.short_side = kept_short_side(spec, input)
        self.size = spec.image_size or input.size if training else input.size
        self.training, self.how, self.mirror = training, (self.size, spec.augment, spec.resize), spec.mirror
        self.randomly = vision().transforms.v2.RandAugment() if training and spec.augment == "randaugment" else None

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, key: Key) -> tuple[Tensor, View, int, Key]:
        index = key[2]
        source = self.sources[index]
        pixels = source if isinstance(source, Tensor) else read_image(source, self.short_side)
        _, height, width = pixels.shape
        if self.training:
            view = training_view(height, width, *self.how, Random(mix(*key)))
            view = view._replace(mirrored=view.mirrored and self.mirror)
        else:
            view = test_view(height, width, *self.how)
        return *cut_out(pixels, view, self.size), int(self.labels[index]), key

    def collate(self, items: Sequence[tuple[Tensor, View, int, Key]]) -> tuple[Tensor, Tensor, Tensor, Sequence[Key]]:
        """Make one batch of images as `stack` does, with their labels and keys."""
        images, views, labels, keys = zip(*items, strict=True)
        return *stack(images, views), torch.tensor(labels), keys

    def augmented(self, images: Tensor, keys: Sequence[Key]) -> Tensor:
        """Change the colours and shapes of images (B, 3, S, S) one by one, where that is asked for."""
        if self.randomly is None:
            return images
        made = images.round().to(torch.uint8)
        for place, key in zip(made, keys, strict=True):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(mix(*key))
                place.copy_(self.randomly(place))
        return made.float()

    @property
    def decoded(self) -> bool:
        """Whether the images are in memory."""
        return all(isinstance(source, Tensor) for source in self.sources)

    def in_order(self) -> list[list[Key]]:
        """Return the keys of all images once, in batches that fit into memory."""
        share = batch_share(self.size)
        keys = [(0, 0, index) for index in range(len(self))]
        return [keys[start : start + share] for start in range(0, len(keys), share)]


def batch_share(size: int) -> int:
    """Return how many images with side `size` make a batch without gradients."""
    return max(1, min(MAX_BATCH, BATCH_PIXELS // size**2))


def worker_count(spec: TrainSpec) -> int:
    """Return how many processes or threads read images."""
    return spec.workers or min(MAX_WORKERS, os.cpu_count() or 1)


def normalised(seen: Tensor, expected: Input) -> Tensor:
    """Return images (B, 3, S, S) of values from 0 to 255 as a network expects them."""
    mean, std = (torch.tensor(each, device=seen.device).view(3, 1, 1) for each in (expected.mean, expected.std))
    return (seen / 255 - mean) / std


def kept_short_side(spec: TrainSpec, input: Input) -> int:
    """Return the longest short side that decoded images keep: more than is shown, for random crops."""
    return math.ceil(max(spec.image_size or 0, input.size) * CROP_MARGIN * DETAIL)


def open_data(spec: TrainSpec, device: torch.device, *, progress: Progress | None = None) -> Data:
    """Open the images that a resolved spec names, as its network expects them."""
    assert spec.test_size is not None
    expected = replace(expected_input(spec.backbone, create_network(spec.backbone)), size=spec.test_size)
    listing = list_images(spec.data, val=spec.val, test=spec.test, skip_empty=spec.skip_empty)
    data = read_images(listing, spec, expected, device, progress=progress)
    counts = torch.bincount(data.train.labels, minlength=len(data.classes)).tolist()
    for name, count in zip(data.classes, counts, strict=True):
        if not count:
            raise ValueError(f"no training image of class {name!r} in {spec.data} can be read; every class needs some")
    single = [repr(name) for name, count in zip(data.classes, counts, strict=True) if count == 1]
    if single and is_first():
        warnings.warn(f"one training image is little to learn a class from: {shortened(single)}", stacklevel=2)
    warn_of(data.left_out)
    return data


def read_images(
    listing: Listing, spec: TrainSpec, expected: Input, device: torch.device, *, progress: Progress | None = None
) -> Data:
    """Read the images of a listing once. Files that cannot be read are left out.

    The images stay decoded on the device where they fit into a quarter of its memory. Otherwise processes read them
    again whenever they are needed.
    """
    short_side = kept_short_side(spec, expected)
    workers = worker_count(spec)
    given = [*listing.train, *listing.val, *listing.test]
    own_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else own_memory)
    images: dict[int, Tensor] = {}
    fingerprints: dict[int, str] = {}
    broken: dict[int, str] = {}

    def read(item: Labelled) -> tuple[Tensor, str] | str:
        try:
            return read_image(item[0], short_side), fingerprint(item[0])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(workers) as pool:
        for index, found in enumerate(pool.map(read, given)):
            if isinstance(found, str):
                broken[index] = found
            else:
                pixels, fingerprints[index] = found
                room -= pixels.nbytes
                images[index] = pixels.to(device) if room >= 0 else pixels
            if room < 0:
                images.clear()
            if progress is not None:
                progress("reading images", index + 1, len(given))

    def part(start: int, labelled: Sequence[Labelled], training: bool = False) -> Images:
        kept = [i for i in range(start, start + len(labelled)) if i not in broken]
        named = [(name_of(given[i][0], i - start, listing.root), given[i][1], fingerprints[i]) for i in kept]
        sources = [images.get(i, given[i][0]) for i in kept]
        return Images(sources, named, spec, expected, training)

    train, val = part(0, listing.train, training=True), part(len(listing.train), listing.val)
    test = part(len(listing.train) + len(listing.val), listing.test)
    if not len(test):
        raise ValueError(f"no image to test on can be read ({next(iter(broken.values()), 'there are none')})")
    left_out = {str(given[i][0]): sentence for i, sentence in broken.items()}
    return Data(train, val, test, list(listing.classes), left_out, expected, device, workers)


def fingerprint(source: Source) -> str:
    """Return what tells a file from all others, whatever its name is; nothing for an image in memory."""
    return hashlib.blake2b(source.read_bytes(), digest_size=8).hexdigest() if isinstance(source, Path) else ""


def problems(name: str, progress: Progress | None = None) -> list[str]:
    """Say in a phrase each how a data set differs from the official one; nothing where it is complete."""
    if not data_path(name).exists():
        raise FileNotFoundError(f"there is no {data_path(name)}; get it with 'kernelhead data get {name}'")
    listing = list_images(name)
    counts = len(listing.classes), len(listing.train), len(listing.test)
    what = zip(("classes", "training images", "test images"), counts, DATA_SETS[name], strict=True)
    found = [f"{count} {kind} instead of {wanted}" for kind, count, wanted in what if count != wanted]
    if name in MEANS:
        mean = load_cifar(name).x_train.mean((0, 1, 2)) / 255
        if not np.allclose(mean, MEANS[name], atol=1e-4):
            found.append(f"mean colour {mean.round(4).tolist()} instead of {list(MEANS[name])}")
    small = Input(MIN_SIDE, (0.0,) * 3, (1.0,) * 3)
    read = read_images(listing, TrainSpec(name), small, torch.device("cpu"), progress=progress)
    return found + list(read.left_out.values())


def warn_of(left_out: Iterable[str]) -> None:
    """Warn of files that cannot be read, in the first process alone."""
    names = list(left_out)
    if names and is_first():
        warnings.warn(f"{len(names)} images cannot be read and are left out: {shortened(names)}", stacklevel=3)


def shortened(names: Sequence[str]) -> str:
    """Return the first of many names."""
    return ", ".join(names[:NAMED]) + (", .." if len(names) > NAMED else "")


def batches(images: Images, keys: Iterable[list[Key]], data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images (B, 3, S, S) and labels (B,) on the device of `data`, a batch per list of keys.

    Worker processes read and cut out; the device resizes and normalises whole batches.
    """
    device = data.device
    loader: Iterable[Any] = (images.collate([images[key] for key in batch]) for batch in keys)
    if not images.decoded:
        loader = DataLoader(
            images,
            batch_sampler=keys,
            collate_fn=images.collate,
            num_workers=data.workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=ignore_interrupts,  # the main process ends its workers itself
            generator=torch.Generator(),  # else it would draw from the network's
        )
    for pixels, about, labels, own_keys in loader:
        moved = (each.to(device, non_blocking=True) for each in (pixels, about, labels))
        pixels, about, labels = moved
        yield normalised(images.augmented(resample(pixels, about, images.size), own_keys), data.input), labels
