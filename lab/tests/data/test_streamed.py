"""Streamed images against torch's and Pillow's own resizing, and the threads behind them."""

import threading
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.stats import norm
from torchvision.transforms.v2 import functional

from kernelhead.finetune.views import training_view
from kernelhead_lab.data import decoded
from kernelhead_lab.data.packed import Source, pack
from kernelhead_lab.data.streamed import IMAGENET, StreamedImages, colour_shift

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
CPU = torch.device("cpu")
MIDDLE = 0.5  # no shift of colour
LAST = 1 - 2**-24  # the largest float32 below 1


class Arrays:
    """Images in memory."""

    def __init__(self, images):
        self.images = images
        self.labels = np.arange(len(images)) % 3
        self.short_side = max(min(image.shape[:2]) for image in images)

    def __len__(self):
        return len(self.images)

    def image(self, index):
        return self.images[index]


def noise_image(height, width, seed=0):
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def in_bytes(batch):
    """Undo the normalisation."""
    mean, std = (255 * torch.tensor(each).view(3, 1, 1) for each in (IMAGENET.mean, IMAGENET.std))
    return batch.cpu().double() * std + mean


def resized(image, short):
    """The whole image by torch's antialiased bilinear filter, its short side `short`."""
    height, width = image.shape[:2]
    sides = [round(side * short / min(height, width)) for side in (height, width)]
    pixels = torch.from_numpy(image.astype(np.float64)).permute(2, 0, 1)[None]
    return F.interpolate(pixels, sides, mode="bilinear", antialias=True, align_corners=False)[0]


def by_hand(image, row, size):
    """One augmented image: resize all of it, crop, flip."""
    lengths = np.arange(round(256 / 224 * size), round(480 / 224 * size) + 1)
    whole = resized(image, int(lengths[int(np.floor(row[0] * len(lengths)))]))
    top = int(np.floor(row[1] * (whole.shape[1] - size + 1)))
    left = int(np.floor(row[2] * (whole.shape[2] - size + 1)))
    crop = whole[:, top : top + size, left : left + size]
    return crop.flip(-1) if row[3] < 0.5 else crop


SHAPES = [(480, 640), (640, 480), (100, 130), (224, 224), (333, 500), (1, 1), (1, 300), (700, 2), (1000, 1000)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [32, 33])
@pytest.mark.parametrize("kept", [False, True])
def test_augmented_images_are_those_of_resizing_cropping_and_flipping(device, size, kept):
    images = [noise_image(*shape, seed) for seed, shape in enumerate(SHAPES)]
    data = StreamedImages(Arrays(images), size=size, device=torch.device(device))
    assert not kept or data.keep_decoded(10**9)
    index = torch.arange(len(images)).repeat(6)
    noise = torch.rand(len(index), data.draws, generator=torch.Generator().manual_seed(1))
    noise[: len(images), :4] = 0  # the corners of everything
    noise[len(images) : 2 * len(images), :4] = LAST
    noise[:, 4:] = MIDDLE
    batch, labels = data.augmented(index, noise)
    assert batch.shape == (len(index), 3, size, size)
    assert batch.dtype == torch.float32
    assert batch.device.type == labels.device.type == device
    assert labels.tolist() == (index % 3).tolist()
    for result, which, row in zip(in_bytes(batch), index.tolist(), noise.double().tolist(), strict=True):
        torch.testing.assert_close(result, by_hand(images[which], row, size), atol=0.01, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", [False, True])
def test_boxes_of_random_area_and_ratio_are_resized_as_torchvision_does(device, kept):
    images = [noise_image(*shape, seed) for seed, shape in enumerate(SHAPES)]
    # Those of few pixels have one colour: near the border of a box the filter reads what is beyond.
    images[5:8] = [np.full_like(image, 7) for image in images[5:8]]
    data = StreamedImages(Arrays(images), size=32, augment="imagenet", device=torch.device(device))
    assert not kept or data.keep_decoded(10**9)
    index = torch.arange(len(images)).repeat(6)
    noise = torch.rand(len(index), data.draws, generator=torch.Generator().manual_seed(1))
    noise[:2] = torch.tensor([[0.0], [LAST]])
    batch, _ = data.augmented(index, noise)
    seen = set()
    for result, which, row in zip(in_bytes(batch), index.tolist(), noise.tolist(), strict=True):
        view = training_view(*images[which].shape[:2], 32, "imagenet", "crop", Random(row[0]))
        seen.add(view)
        pixels = torch.from_numpy(images[which].astype(np.float64)).permute(2, 0, 1)
        expected = functional.resized_crop(pixels, *(round(side) for side in view[:4]), [32, 32], antialias=True)
        expected = expected.flip(-1) if view.mirrored else expected
        inner = slice(3, -3)  # at its border torchvision's filter ends with the box, ours reads on
        torch.testing.assert_close(result[:, inner, inner], expected[:, inner, inner], atol=0.01, rtol=0)
    assert len(seen) > 30


def test_a_larger_test_size_shows_the_whole_square():
    image = noise_image(100, 130)
    data = StreamedImages(Arrays([image]), size=56, augment="imagenet", device=CPU)
    batch, _ = data.resized(80).plain(torch.tensor([0]))
    whole = resized(image, 80)
    left = (whole.shape[2] - 80) // 2
    torch.testing.assert_close(in_bytes(batch)[0], whole[:, :, left : left + 80], atol=0.01, rtol=0)
    assert data.plain(torch.tensor([0]))[0].shape[-1] == 56


def test_full_size_images_agree_with_pillow():
    images = [noise_image(480, 640), noise_image(300, 200, 1)]
    data = StreamedImages(Arrays(images), device=CPU)
    batch, _ = data.plain(torch.arange(2))
    for image, result in zip(images, in_bytes(batch), strict=True):
        height, width = image.shape[:2]
        sides = [round(side * 256 / min(height, width)) for side in (width, height)]
        whole = Image.fromarray(image).resize(sides, Image.Resampling.BILINEAR)
        left, top = ((side - 224) // 2 for side in sides)
        expected = np.asarray(whole.crop((left, top, left + 224, top + 224)), dtype=float).transpose(2, 0, 1)
        assert np.abs(result.numpy() - expected).max() < 1.1  # Pillow rounds to bytes twice
        assert abs((result.numpy() - expected).mean()) < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_images_are_the_centre(shape):
    image = noise_image(*shape)
    batch, _ = StreamedImages(Arrays([image]), size=56, device=CPU).plain(torch.tensor([0]))
    whole = resized(image, 64)
    top, left = ((side - 56) // 2 for side in whole.shape[1:])
    expected = whole[:, top : top + 56, left : left + 56]
    torch.testing.assert_close(in_bytes(batch)[0], expected, atol=0.01, rtol=0)


def test_a_large_image_among_small_ones_fits_its_canvas():
    """The box is longest where the short side is resized least; the least canvas has to hold it for every shape."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        shape = rng.integers(1, 400, size=2)
        data = StreamedImages(Arrays([np.full((*shape, 3), 7, np.uint8)]), size=int(rng.integers(8, 40)), device=CPU)
        noise = torch.cat([torch.zeros(4, 1), torch.rand(4, 6)], 1)
        noise[:, 4:] = MIDDLE
        batch, _ = data.augmented(torch.zeros(4, dtype=torch.long), noise)
        torch.testing.assert_close(in_bytes(batch), torch.full_like(in_bytes(batch), 7), atol=1e-4, rtol=0)


def test_half_of_the_images_are_mirrored():
    data = StreamedImages(Arrays([noise_image(40, 50)]), size=32, device=CPU)
    noise = torch.full((2, data.draws), MIDDLE)
    noise[:, 3] = torch.tensor([0.49, 0.51])
    (mirrored, straight), _ = data.augmented(torch.zeros(2, dtype=torch.long), noise)
    torch.testing.assert_close(mirrored, straight.flip(-1), atol=1e-4, rtol=0)
    assert not torch.allclose(mirrored, straight, atol=0.1)


# --- colour -----------------------------------------------------------------------------------------------------------

AXES = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
SPREAD = 255 * np.array([0.2175, 0.0188, 0.0045])


def test_the_axes_are_a_basis_and_the_first_is_grey():
    np.testing.assert_allclose(AXES.T @ AXES, np.eye(3), atol=2e-3)
    bright = colour_shift(torch.tensor([[0.1, 0.5, 0.5]]))[0]
    assert bright.min() > 0.9 * bright.max() > 0


def test_colour_shifts_have_a_tenth_of_the_spread_of_the_colours(rng):
    noise = torch.from_numpy(rng.random((200_000, 3)))
    shift = colour_shift(noise).double().numpy()
    np.testing.assert_allclose(shift.mean(0), 0, atol=0.05)
    covariance = AXES @ np.diag((0.1 * SPREAD) ** 2) @ AXES.T
    np.testing.assert_allclose(np.cov(shift.T), covariance, rtol=0.02)


def test_a_colour_shift_is_added_to_every_pixel():
    data = StreamedImages(Arrays([noise_image(60, 60)]), size=32, device=CPU)
    noise = torch.full((2, data.draws), MIDDLE)
    noise[1, 4:] = torch.tensor([0.9, 0.2, 0.7])
    before, after = in_bytes(data.augmented(torch.zeros(2, dtype=torch.long), noise)[0])
    expected = AXES @ (0.1 * SPREAD * norm.ppf([0.9, 0.2, 0.7]))
    np.testing.assert_allclose((after - before).amin((1, 2)), expected, atol=1e-3)
    np.testing.assert_allclose((after - before).amax((1, 2)), expected, atol=1e-3)


def test_the_ends_of_the_noise_are_finite():
    shift = colour_shift(torch.tensor([[0.0, 0.0, 0.0], [LAST, LAST, LAST]]))
    assert shift.isfinite().all()
    assert shift.abs().max() < 0.6 * SPREAD[0]


# --- a pure function --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder, sources = tmp_path_factory.mktemp("images"), []
    for label in range(3):
        for seed in range(4):
            coarse = noise_image(5 + seed, 7, 10 * label + seed)
            sources.append(Source(folder / f"{label}-{seed}.jpg", label))
            Image.fromarray(coarse).resize((80 - 10 * seed, 60)).save(sources[-1].path)
    return pack(sources, ["cat", "dog", "fox"], folder / "packed.safetensors", short_side=256)


def test_an_image_depends_on_its_index_and_noise_alone(packed):
    data = StreamedImages(packed, size=32, device=CPU, workers=3)
    index = torch.tensor([5, 0, 5, 11])
    noise = torch.rand(4, data.draws)
    noise[2] = noise[0]
    together, labels = data.augmented(index, noise)
    assert labels.tolist() == [1, 0, 1, 2]
    torch.testing.assert_close(together[0], together[2], rtol=0, atol=0)
    other = StreamedImages(packed, size=32, device=CPU, workers=1)
    for position in range(4):
        alone, _ = other.augmented(index[position : position + 1], noise[position : position + 1])
        torch.testing.assert_close(alone[0], together[position], atol=1e-5, rtol=0)


def test_a_subset_is_a_data_set_of_its_own(packed):
    whole = StreamedImages(packed, size=32, device=CPU)
    part = StreamedImages(packed, size=32, device=CPU, subset=torch.tensor([8, 1, 4]))
    assert len(part) == 3
    assert part.labels.tolist() == [2, 0, 1]
    images, labels = part.plain(torch.tensor([0, 2]))
    expected, _ = whole.plain(torch.tensor([8, 4]))
    assert torch.equal(images, expected)
    assert labels.tolist() == [2, 1]


def test_autocast_does_not_touch_the_pixels(packed):
    data = StreamedImages(packed, size=32, device=CPU)
    expected, _ = data.plain(torch.arange(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images, _ = data.plain(torch.arange(4))
    assert torch.equal(images, expected)


def test_wrong_arguments_are_refused(packed):
    data = StreamedImages(packed, size=32, device=CPU)
    with pytest.raises(ValueError, match=r"noise needs the shape \(2, 7\); got \(2, 3\)"):
        data.augmented(torch.arange(2), torch.rand(2, 3))
    with pytest.raises(IndexError, match="indices have to be 0 to 11; got some from 0 to 12"):
        data.plain(torch.tensor([0, 12]))
    with pytest.raises(IndexError, match="got some from -1 to -1"):
        data.plain(torch.tensor([-1]))
    with pytest.raises(ValueError, match="subset needs indices from 0 to 11; got others"):
        StreamedImages(packed, device=CPU, subset=torch.tensor([12]))


# --- images that are kept decoded -------------------------------------------------------------------------------------


class Counted(Arrays):
    """Counts how often an image is asked for."""

    def __init__(self, images):
        super().__init__(images)
        self.asked = [0] * len(images)

    def image(self, index):
        self.asked[index] += 1
        return super().image(index)


def counted(count):
    return Counted([noise_image(20 + seed % 7, 30 - seed % 11, seed) for seed in range(count)])


def test_kept_images_are_the_same_to_the_bit_and_decoded_once():
    count = decoded.TOGETHER + 3  # they go to the device in two parts
    streamed, source, told = StreamedImages(counted(count), size=16, device=CPU), counted(count), []
    kept = StreamedImages(source, size=16, device=CPU)
    assert kept.keep_decoded(10**9, lambda *report: told.append(report))
    assert told == [("decoding", decoded.TOGETHER, count), ("decoding", count, count)]
    asked = list(source.asked)
    assert set(asked) == {1, 2}  # twice those by which the size of all was judged
    assert asked.count(2) == decoded.SAMPLE
    index = torch.randperm(count)
    noise = torch.rand(count, kept.draws)
    for one, other in zip(kept.augmented(index, noise), streamed.augmented(index, noise), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(kept.plain(index)[0], streamed.plain(index)[0])
    assert source.asked == asked


def test_batches_on_their_way_may_be_overtaken():
    data = StreamedImages(counted(12), size=16, device=CPU)
    expected, _ = data.plain(torch.arange(12))
    batches = data.batches([(each, None) for each in torch.arange(12).split(2)], ahead=2)
    seen = [next(batches)[0]]
    assert data.keep_decoded(10**9)
    seen.append(next(batches)[0])
    assert not data.keep_decoded(1)
    assert torch.equal(torch.cat([*seen, *(images for images, _ in batches)]), expected)


def test_parts_share_what_is_kept():
    source = counted(12)
    whole = StreamedImages(source, size=16, device=CPU, subset=torch.tensor([11, 3, 7, 5, 3]))
    assert whole.keep_decoded(10**9)
    assert [index for index, times in enumerate(source.asked) if times] == [3, 5, 7, 11]
    asked = list(source.asked)
    part = whole.restricted(torch.tensor([4, 0, 2]))
    images, labels = part.plain(torch.arange(3))
    assert source.asked == asked
    expected, expected_labels = StreamedImages(counted(12), size=16, device=CPU).plain(torch.tensor([3, 11, 7]))
    assert torch.equal(images, expected)
    assert labels.tolist() == expected_labels.tolist()


def test_what_has_no_room_is_not_kept():
    source = counted(12)
    size = sum(image.size for image in source.images)
    data = StreamedImages(source, size=16, device=CPU)
    assert not data.keep_decoded()  # on a CPU
    assert sum(source.asked) == 0
    assert not data.keep_decoded(size - 1)
    assert data.keep_decoded(size)
    images, _ = data.plain(torch.arange(12))
    assert not data.keep_decoded(size - 1)  # and streams again
    assert torch.equal(data.plain(torch.arange(12))[0], images)
    empty = StreamedImages(source, size=16, device=CPU, subset=torch.arange(0))
    assert not empty.keep_decoded(size)


def test_a_sample_that_is_too_small_does_not_take_the_room_of_others():
    """Images that look small where they are judged, and are not."""
    count = 2 * decoded.TOGETHER
    looked_at = np.linspace(0, count - 1, decoded.SAMPLE).astype(int)
    source = Arrays([noise_image(*((4, 4) if index in looked_at else (40, 40))) for index in range(count)])
    assert not StreamedImages(source, size=16, device=CPU).keep_decoded(48 * count)
    assert not decoders()


# --- batches and their threads ----------------------------------------------------------------------------------------


def decoders():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kernelhead-decode")]


def test_batches_come_in_order(packed):
    data = StreamedImages(packed, size=32, device=CPU, workers=3)
    wanted = [(torch.randint(12, (n,)), torch.rand(n, data.draws) if n % 2 else None) for n in (3, 1, 4, 2, 5, 3, 1)]
    results = list(data.batches(wanted, ahead=2))
    assert len(results) == len(wanted)
    for (index, noise), (images, labels) in zip(wanted, results, strict=True):
        expected = data.plain(index) if noise is None else data.augmented(index, noise)
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])
    assert list(data.batches([])) == []


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_just_so_many_batches_are_started_ahead(packed, ahead):
    data = StreamedImages(packed, size=32, device=CPU, workers=2)
    taken = []

    def wanted():
        for number in range(10):
            taken.append(number)
            yield torch.tensor([number]), None

    stream = data.batches(wanted(), ahead=ahead)
    assert taken == []
    next(stream)
    assert len(taken) == ahead + 1
    next(stream)
    assert len(taken) == ahead + 2
    stream.close()
    assert decoders() == []


class Slow(Arrays):
    """A source that waits at a gate, from image `first` on, or fails, and counts what it was asked for."""

    def __init__(self, images, gate=None, first=0, fails=()):
        super().__init__(images)
        self.gate, self.first, self.fails, self.asked = gate, first, fails, []

    def image(self, index):
        self.asked.append(index)
        if self.gate is not None and index >= self.first:
            self.gate.wait(timeout=10)
        if index in self.fails:
            raise ValueError(f"image {index} is broken")
        return super().image(index)


def test_one_batch_keeps_all_workers_busy():
    """Each decoding waits for three others: one thread, or one batch a thread, would wait for ever."""
    source = Slow([noise_image(10, 10)] * 8, gate=threading.Barrier(4))
    StreamedImages(source, size=8, device=CPU, workers=4).plain(torch.arange(8))
    assert sorted(source.asked) == list(range(8))


def test_an_error_in_a_worker_reaches_the_consumer_and_ends_the_threads():
    source = Slow([noise_image(10, 10)] * 40, fails={5})
    data = StreamedImages(source, size=8, device=CPU, workers=2)
    stream = data.batches(([torch.arange(4 * k, 4 * k + 4), None] for k in range(10)), ahead=2)
    next(stream)
    with pytest.raises(ValueError, match="image 5 is broken"):
        next(stream)
    assert decoders() == []


def test_an_error_of_the_caller_ends_the_threads(packed):
    data = StreamedImages(packed, size=8, device=CPU, workers=2)

    def wanted():
        yield torch.arange(4), None
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(data.batches(wanted()))
    assert decoders() == []


def test_stopping_early_drops_what_has_not_begun():
    gate = threading.Event()
    source = Slow([noise_image(10, 10)] * 100, gate=gate, first=10)
    data = StreamedImages(source, size=8, device=CPU, workers=2)
    stream = data.batches(((torch.arange(10 * k, 10 * k + 10), None) for k in range(10)), ahead=8)
    next(stream)
    opened = threading.Timer(0.1, gate.set)  # the decoding that is under way may end then
    opened.start()
    stream.close()
    opened.join()
    assert decoders() == []
    assert len(source.asked) <= 10 + 2


def test_restricted_to_some():
    data = StreamedImages(Arrays([noise_image(40, 50, seed) for seed in range(5)]), size=32, device=CPU)
    part = data.restricted(torch.tensor([4, 1, 2])).restricted(torch.tensor([0, 2]))
    assert len(part) == 2
    assert part.labels.tolist() == [1, 2]
    for ours, whole in zip(part.plain(torch.tensor([1, 0])), data.plain(torch.tensor([2, 4])), strict=True):
        assert torch.equal(ours, whole)
