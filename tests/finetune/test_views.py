"""What a network sees of an image, beside torchvision and torch, and beside sums written out."""

from random import Random

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch.nn import functional as F
from torchvision.transforms import RandomResizedCrop, v2

from kernelhead.finetune.views import View, cut_out, resample, stack, training_view
from kernelhead.finetune.views import test_view as plain_view


def noise(height, width, seed=0):
    return torch.randint(256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def shown(images, views, size):
    parts = [cut_out(image, view, size) for image, view in zip(images, views, strict=True)]
    return resample(*stack(*zip(*parts, strict=True)), size)


def by_sums(image, view, size):
    """Every output pixel as a sum over the whole image, in float64, without matrices for a batch."""
    made = torch.zeros(3, size, size, dtype=torch.float64)
    axes = []
    for start, length, full in ((view.top, view.height, image.shape[1]), (view.left, view.width, image.shape[2])):
        rows = []
        for i in range(size):
            centre, scale = start + (i + 0.5) * length / size, max(1.0, length / size)
            near = [max(0.0, 1 - abs(j + 0.5 - centre) / scale) for j in range(full)]
            rows.append([each / sum(near) for each in near] if 0 <= centre < full else [0.0] * full)
        axes.append(torch.tensor(rows, dtype=torch.float64))
    made = torch.einsum("yh,chw,xw->cyx", axes[0], image.double(), axes[1])
    return made.flip(2) if view.mirrored else made


SIZES = [(20, 30), (31, 17), (16, 16), (9, 40), (200, 131)]


def test_a_batch_of_any_sides_is_what_sums_say():
    images = [noise(*sides, seed) for seed, sides in enumerate(SIZES)]
    views = [View(2, 3, 10, 7.5, True), View(-4, -2, 30, 16), View(0, 0, 16, 16, True), View(-3.2, 5, 11, 40)]
    views.append(View(20.3, 11, 150, 100))
    found = shown(images, views, 12)
    for image, view, own in zip(images, views, found, strict=True):
        torch.testing.assert_close(own.double(), by_sums(image, view, 12), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("augment", "margin"), [("light", 1.0), ("imagenet", 8 / 7)])
def test_a_test_image_is_that_of_torchvision(augment, margin):
    images = [noise(*sides, seed) for seed, sides in enumerate(SIZES)]
    found = shown(images, [plain_view(*sides, 16, augment, "crop") for sides in SIZES], 16)
    peer = v2.Compose([v2.Resize(round(16 * margin)), v2.CenterCrop(16)])
    for image, own in zip(images, found, strict=True):
        assert (own - peer(image.float())).abs().max() < 0.01


def test_squashed_and_padded_test_images_are_seen_whole():
    images = [noise(*sides, seed) for seed, sides in enumerate(SIZES)]
    squashed = shown(images, [plain_view(*sides, 16, "imagenet", "squash") for sides in SIZES], 16)
    for image, own in zip(images, squashed, strict=True):
        expected = F.interpolate(image[None].float(), (16, 16), mode="bilinear", antialias=True)[0]
        assert (own - expected).abs().max() < 0.01
    padded = shown(images, [plain_view(*sides, 16, "light", "pad") for sides in SIZES], 16)
    wide = padded[3]  # of 9 x 40
    assert (wide[:, :6] == 0).all()
    assert (wide[:, 10:] == 0).all()
    assert (wide[:, 7:9].mean((0, 2)) > 60).all()
    assert (padded[2] == images[2]).all()  # a square one


def test_padding_and_cropping_keeps_pixels_to_the_bit():
    image, seen = noise(24, 24), set()
    for seed in range(400):
        view = training_view(24, 24, 24, "light", "crop", Random(seed))
        assert view[2:4] == (24, 24)
        made = shown([image], [view], 24)[0]
        top, left = int(view.top), int(view.left)
        expected = torch.roll(F.pad(image, (3, 3, 3, 3)), (-top, -left), (1, 2))[:, 3:27, 3:27].float()
        assert torch.equal(made, expected.flip(2) if view.mirrored else expected)
        seen.add((top, left, view.mirrored))
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(-3, 4))
    assert len(seen) > 90  # of 98 offsets and mirrorings


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
def test_random_crops_have_the_areas_and_sides_they_should(resize):
    height, width = 200, 320
    views = [training_view(height, width, 64, "imagenet", resize, Random(seed)) for seed in range(2000)]
    stretch = height / width if resize == "squash" else 1.0
    whole = {"crop": 200 * 320, "squash": 200 * 320, "pad": 320 * 320}[resize]
    shares = torch.tensor([view.height * view.width for view in views]) / whole
    ratios = torch.tensor([view.width * stretch / view.height for view in views])
    assert 0.24 < shares.min() < 0.28
    assert 0.8 < shares.max() <= 1
    assert 0.74 < ratios.min() < 0.78
    assert 1.3 < ratios.max() < 1.35
    assert 900 < sum(view.mirrored for view in views) < 1100
    low, high = (-60, 260) if resize == "pad" else (0, 200)
    assert min(view.top for view in views) >= low
    assert max(view.top + view.height for view in views) <= high
    assert max(view.left + view.width for view in views) <= width
    assert len({view.top for view in views}) > 50


def test_a_strip_has_a_crop_too():
    view = training_view(10, 80, 8, "imagenet", "crop", Random(0))
    assert view.height == 10
    assert view.width == pytest.approx(10 * 4 / 3)


def test_an_image_of_one_pixel_fills_the_view():
    image = torch.full((3, 1, 1), 77, dtype=torch.uint8)
    for augment in ("imagenet", "none"):
        view = training_view(1, 1, 8, augment, "crop", Random(0))
        torch.testing.assert_close(shown([image], [view], 8), torch.full((1, 3, 8, 8), 77.0))


def test_random_crops_are_distributed_as_torchvisions():
    random = Random(0)
    ours = np.array([training_view(60, 90, 32, "imagenet", "crop", random)[:4] for _ in range(4000)], dtype=float)
    torch.manual_seed(0)
    image, scale, ratio = torch.zeros(3, 60, 90), [0.25, 1.0], [3 / 4, 4 / 3]
    theirs = np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(4000)], dtype=float)
    for view in (ours, theirs):
        view[:, :2] += view[:, 2:] / 2  # the centre of the box
    for one, other in zip((*ours.T, ours[:, 2] / ours[:, 3]), (*theirs.T, theirs[:, 2] / theirs[:, 3]), strict=True):
        assert ks_2samp(one, other).pvalue > 0.01
