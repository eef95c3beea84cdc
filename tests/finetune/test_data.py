"""Batches of images: augmented as seed, epoch and index say, the same however they are read."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from kernelhead.finetune import data as module
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.data import batches, open_data, read_images
from kernelhead.finetune.images import Listing, list_images
from kernelhead.finetune.spec import TrainSpec

CPU = torch.device("cpu")
INPUT = Input(16, (0.5, 0.4, 0.3), (0.25, 0.5, 0.6))


@pytest.fixture
def spec(colours):
    return TrainSpec(
        str(colours / "images"), "tiny_networks:tiny", augment="imagenet", image_size=16, test_size=16, seed=3
    )


def keys(epoch=0, seed=3):
    return [[(seed, epoch, index) for index in range(start, start + 8)] for start in (0, 8)]


def gathered(data, epoch=0, images=None):
    return torch.cat([batch for batch, _ in batches(images or data.train, keys(epoch), data)])


def test_what_is_read_again_equals_what_stays_decoded(spec, monkeypatch):
    """With any number of processes that read, to the bit."""
    decoded = open_data(spec, CPU)
    assert decoded.train.decoded
    assert not torch.is_tensor(list_images(spec.data).train[0][0])
    expected = gathered(decoded)
    assert not torch.equal(expected, gathered(decoded, epoch=1))
    torch.rand(3)  # nothing depends on random numbers drawn elsewhere
    assert torch.equal(expected, gathered(decoded))
    monkeypatch.setattr(module, "MEMORY_SHARE", 0.0)
    for workers in (1, 2):
        read = open_data(TrainSpec(**{**spec.as_dict(), "workers": workers}), CPU)
        assert not read.train.decoded
        assert torch.equal(expected, gathered(read))
    other = torch.cat([batch for batch, _ in batches(decoded.train, keys(seed=4), decoded)])
    assert not torch.equal(expected, other)


@pytest.mark.parametrize("augment", ["light", "imagenet"])
def test_mirroring_can_be_left_out(spec, augment):
    """The crops stay; about half of the images were mirrored."""
    both = [open_data(replace(spec, augment=augment, mirror=mirror), CPU) for mirror in (True, False)]
    with_it, without = (gathered(each) for each in both)
    same = [torch.equal(*pair) for pair in zip(with_it, without, strict=True)]
    assert 2 < sum(same) < 14
    for one, other, equal in zip(with_it, without, same, strict=True):
        torch.testing.assert_close(one if equal else one.flip(2), other, atol=1e-4, rtol=0)


def test_random_numbers_around_a_batch_are_their_own(spec):
    opened = open_data(spec, CPU)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    gathered(opened)
    assert torch.equal(torch.rand(3), expected)


def test_a_test_image_is_resized_cropped_and_normalised(tmp_path):
    rng = np.random.default_rng(0)
    pixels = np.asarray(
        Image.fromarray(rng.integers(256, size=(5, 6, 3), dtype=np.uint8)).resize((24, 18), Image.Resampling.BICUBIC)
    )
    Image.fromarray(pixels).save(tmp_path / "x.png")
    for name, short, size in (("imagenet", 16, 14), ("light", 16, 16)):
        given = Input(size, INPUT.mean, INPUT.std)
        data = read_images(Listing(test=[(tmp_path / "x.png", 0)]), TrainSpec("", augment=name), given, CPU)
        ((images, labels),) = batches(data.test, data.test.in_order(), data)
        wide = 24 * short // 18
        expected = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].double()
        expected = F.interpolate(expected, (short, wide), mode="bilinear", antialias=True)
        top, left = round((short - size) / 2), round((wide - size) / 2)
        expected = expected[..., top : top + size, left : left + size].round() / 255
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (INPUT.mean, INPUT.std))
        assert labels.tolist() == [0]
        assert (images - (expected - mean) / std).abs().max() <= 1.01 / 255 / min(INPUT.std)  # of one byte, by rounding


def test_randaugment_changes_the_colours_of_single_images(spec):
    spec = TrainSpec(**{**spec.as_dict(), "augment": "randaugment"})
    changed, plain = open_data(spec, CPU), open_data(TrainSpec(**{**spec.as_dict(), "augment": "imagenet"}), CPU)
    found, crops = gathered(changed), gathered(plain)
    assert torch.equal(found, gathered(changed))
    far = [bool((own - crop).abs().mean() > 0.05) for own, crop in zip(found, crops, strict=True)]
    assert sum(far) > 5  # it may draw to do nothing


def test_test_images_may_be_larger(spec):
    opened = open_data(TrainSpec(**{**spec.as_dict(), "test_size": 24}), CPU)
    assert opened.input.size == 24
    assert next(batches(opened.train, keys(), opened))[0].shape == (8, 3, 16, 16)
    assert next(batches(opened.test, opened.test.in_order(), opened))[0].shape == (12, 3, 24, 24)


def test_unreadable_files_are_left_out_and_named(colours, spec, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(colours / "images", folder)
    bad = [path for path, _ in list_images(str(folder)).train[:3]]
    for path in bad:
        path.write_text("no image")
    spec = TrainSpec(**{**spec.as_dict(), "data": str(folder)})
    with pytest.warns(UserWarning, match=rf"^3 images cannot be read and are left out: {bad[0]}") as caught:
        opened = open_data(spec, CPU)
    assert len(caught) == 1
    assert set(opened.left_out) == {str(path) for path in bad}
    assert (len(opened.train), len(opened.test)) == (45, 12)
    for path in (folder / "red").iterdir():
        path.write_text("no image")
    with pytest.raises(ValueError, match=r"no training image of class 'red' in .* can be read; every class needs some"):
        open_data(spec, CPU)


def test_a_class_of_one_image_is_named(colours, spec, tmp_path):
    folder = tmp_path / "images"
    shutil.copytree(colours / "images", folder)
    for path in [*(folder / "red").iterdir()][1:]:
        path.unlink()
    spec = TrainSpec(**{**spec.as_dict(), "data": str(folder)})
    with pytest.warns(UserWarning, match=r"^one training image is little to learn a class from: 'red'$"):
        opened = open_data(spec, CPU)
    assert opened.classes[2] == "red"
    assert (opened.train.labels == 2).sum() == 1
    assert not (opened.test.labels == 2).any()


def test_the_first_of_several_processes_warns(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    module.warn_of(["a.png"])  # warnings are errors here
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=r"^6 images cannot be read and are left out: 0, 1, 2, 3, 4, \.\.$"):
        module.warn_of([str(number) for number in range(6)])


def test_progress_is_told(spec):
    told = []
    open_data(spec, CPU, progress=lambda *what: told.append(what))
    assert told == [("reading images", done, 60) for done in range(1, 61)]
