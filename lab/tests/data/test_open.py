"""Data by name, as a network expects them."""

import numpy as np
import pytest
import torch
from PIL import Image

from kernelhead.finetune.cifar import NAMES
from kernelhead_lab.data import large, streamed
from kernelhead_lab.data.open import open_data
from kernelhead_lab.data.packed import Source, pack
from kernelhead_lab.data.streamed import IMAGENET

CPU = torch.device("cpu")
COLOURS = {"blue": (10, 20, 200), "green": (0, 180, 60), "red": (250, 30, 40)}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The folder of data sets."""
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def normalised(bytes_, mean, std):
    return ((bytes_ / 255.0 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)


def test_cifar_brings_its_own_mean_and_deviation(data, rng):
    made = {
        "x_train": rng.integers(200, size=(40, 32, 32, 3), dtype=np.uint8),
        "y_train": (np.arange(40) % 10).astype(np.uint8),
        "x_test": rng.integers(256, size=(20, 32, 32, 3), dtype=np.uint8),
        "y_test": (np.arange(20)[::-1] % 10).astype(np.uint8),
    }
    np.savez(data / "cifar10.npz", **made)
    opened = open_data("cifar10", CPU)
    assert opened.classes == NAMES["cifar10"]
    assert opened.left_out == []
    pixels = made["x_train"].reshape(-1, 3) / 255.0
    mean, std = pixels.mean(0), pixels.std(0)
    assert opened.input.size == 32
    np.testing.assert_allclose(opened.input.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(opened.input.std, std, rtol=1e-6)
    for images, part in ((opened.train, "train"), (opened.test, "test")):
        assert images.labels.tolist() == made[f"y_{part}"].tolist()
        plain, _ = images.plain(torch.arange(len(images)))
        np.testing.assert_allclose(plain, normalised(made[f"x_{part}"], mean, std), atol=2e-5)


def pack_colours(folder, split, counts):
    """Images of one colour each, so that every crop of one is known; the last cannot be read."""
    sources = []
    for label, (name, count) in enumerate(counts.items()):
        for index in range(count):
            sources.append(Source(folder / f"{split}-{name}-{index}.png", label))
            Image.new("RGB", (30 + index, 20), COLOURS[name]).save(sources[-1].path)
    sources.append(Source(folder / f"{split}-broken.jpg", 0))
    pack(sources, list(counts), large.packed_path("pets", split), short_side=24)


def assert_colours(images, labels):
    pixels, given = images.plain(torch.arange(len(images)))
    assert given.tolist() == images.labels.tolist() == labels
    assert pixels.shape == (len(labels), 3, 224, 224)
    colours = np.array([list(COLOURS.values())[label] for label in labels]) / 255
    wanted = (colours - np.array(IMAGENET.mean)) / np.array(IMAGENET.std)
    assert np.abs(pixels.numpy() - wanted[:, :, None, None]).max() < 0.05  # a byte or two, lost in the JPEG


def test_pets_from_their_packed_files(tmp_path, data, monkeypatch):
    pack_colours(tmp_path, "train", {"blue": 3, "green": 1, "red": 2})
    pack_colours(tmp_path, "test", {"blue": 1, "green": 2, "red": 1})
    opened = open_data("pets", CPU)
    assert opened.classes == ["blue", "green", "red"]
    assert opened.input == IMAGENET
    assert opened.left_out == [str(tmp_path / f"{split}-broken.jpg") for split in ("test", "train")]
    assert_colours(opened.train, [0, 0, 0, 1, 2, 2])
    assert_colours(opened.test, [0, 1, 1, 2])
    monkeypatch.setattr(streamed, "room_on", lambda device: 10**9)
    told = []
    opened.keep_decoded(lambda *report: told.append(report))
    assert told == [("decoding", 6, 6), ("decoding", 4, 4)]
    assert_colours(opened.train, [0, 0, 0, 1, 2, 2])
    assert_colours(opened.test, [0, 1, 1, 2])


def test_an_unknown_name_is_one_sentence(data):
    with pytest.raises(ValueError, match="unknown data set 'mnist'; choose one of cifar10, cifar100, pets, cars"):
        open_data("mnist", CPU)
