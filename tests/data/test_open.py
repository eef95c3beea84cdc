"""Data by name, by folder and by file, as a network expects them."""

import numpy as np
import pytest
import torch
from PIL import Image

from kernelhead.backbones import Input
from kernelhead.data import large, streamed
from kernelhead.data.cifar import NAMES
from kernelhead.data.folder import hold_out
from kernelhead.data.open import open_data, open_for_testing
from kernelhead.data.packed import find_images, pack

CPU = torch.device("cpu")
EXPECTED = Input(16, (0.5, 0.25, 0.125), (0.5, 0.25, 2.0))
COLOURS = {"blue": (10, 20, 200), "green": (0, 180, 60), "red": (250, 30, 40)}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The folder of data sets."""
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def fill(folder, counts):
    """Pictures of one colour each, so that every crop of one is known."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (30 + index, 20), COLOURS[name]).save(folder / name / f"{index}.png")
    return folder


def expected_colours(labels, expected=EXPECTED, classes=tuple(COLOURS)):
    """By hand: the colour of each class, normalised (n, 3)."""
    colours = np.array([COLOURS[classes[label]] for label in labels]) / 255
    return (colours - np.array(expected.mean)) / np.array(expected.std)


def assert_colours(images, labels, expected=EXPECTED, classes=tuple(COLOURS)):
    assert images.labels.tolist() == labels
    pixels, given = images.plain(torch.arange(len(images)))
    assert given.tolist() == labels
    assert pixels.shape == (len(labels), 3, expected.size, expected.size)
    wanted = expected_colours(labels, expected, classes)[:, :, None, None]
    assert np.abs(pixels.numpy() - wanted).max() < 0.02  # a byte or two, lost in the JPEG of the packed file


# --- CIFAR ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar(data, rng):
    made = {
        "x_train": rng.integers(200, size=(40, 32, 32, 3), dtype=np.uint8),
        "y_train": (np.arange(40) % 10).astype(np.uint8),
        "x_test": rng.integers(256, size=(20, 32, 32, 3), dtype=np.uint8),
        "y_test": (np.arange(20)[::-1] % 10).astype(np.uint8),
    }
    np.savez(data / "cifar10.npz", **made)
    return made


def normalised(bytes_, mean, std):
    return ((bytes_ / 255.0 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)


def test_cifar_brings_its_own_mean_and_deviation(cifar):
    opened = open_data("cifar10", EXPECTED, CPU)
    assert opened.classes == NAMES["cifar10"]
    assert opened.left_out == []
    pixels = cifar["x_train"].reshape(-1, 3) / 255.0
    mean, std = pixels.mean(0), pixels.std(0)
    assert opened.input.size == 32
    np.testing.assert_allclose(opened.input.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(opened.input.std, std, rtol=1e-6)
    for images, part in ((opened.train, "train"), (opened.test, "test")):
        assert images.labels.tolist() == cifar[f"y_{part}"].tolist()
        plain, _ = images.plain(torch.arange(len(images)))
        np.testing.assert_allclose(plain, normalised(cifar[f"x_{part}"], mean, std), atol=2e-5)


def test_cifar_for_a_classifier_that_was_trained_on_something_else(cifar):
    expected = Input(32, (0.5, 0.25, 0.125), (0.5, 0.25, 2.0))
    images, classes, left_out = open_for_testing("cifar10", expected, CPU)
    assert (classes, left_out) == (NAMES["cifar10"], [])
    assert images.labels.tolist() == cifar["y_test"].tolist()
    plain, _ = images.plain(torch.arange(20))
    np.testing.assert_allclose(plain, normalised(cifar["x_test"], expected.mean, expected.std), atol=2e-5)
    with pytest.raises(ValueError, match="the images of cifar10 are 32x32, and the classifier takes 16x16"):
        open_for_testing("cifar10", EXPECTED, CPU)


# --- packed data sets -------------------------------------------------------------------------------------------------


def test_pets_from_their_packed_files(tmp_path, data, monkeypatch):
    for split, counts in (("train", {"blue": 3, "green": 1, "red": 2}), ("test", {"blue": 1, "green": 2, "red": 1})):
        folder = fill(tmp_path / split, counts)
        if split == "test":
            (folder / "red" / "broken.jpg").write_text("no picture")
        pack(*find_images(folder), large.packed_path("pets", split, 24), short_side=24)
    opened = open_data("pets", EXPECTED, CPU, short_side=24)
    assert opened.classes == ["blue", "green", "red"]
    assert opened.input == EXPECTED
    assert opened.left_out == [str(tmp_path / "test" / "red" / "broken.jpg")]
    assert_colours(opened.train, [0, 0, 0, 1, 2, 2])
    assert_colours(opened.test, [0, 1, 1, 2])
    monkeypatch.setattr(streamed, "room_on", lambda device: 10**9)
    told = []
    opened.keep_decoded(lambda *report: told.append(report))
    assert told == [("decoding", 6, 6), ("decoding", 4, 4)]
    assert_colours(opened.train, [0, 0, 0, 1, 2, 2])
    assert_colours(opened.test, [0, 1, 1, 2])
    images, classes, left_out = open_for_testing("pets", EXPECTED, CPU, short_side=24)
    assert (classes, left_out) == (opened.classes, opened.left_out)
    assert_colours(images, [0, 1, 1, 2])


# --- folders and files ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, data):
    return fill(tmp_path / "my pictures", {"blue": 5, "green": 4, "red": 6})


def test_a_folder_is_split_by_the_seed(folder, data):
    seen = []
    options = {"short_side": 24, "holdout": 0.4, "seed": 3}
    opened = open_data(str(folder), EXPECTED, CPU, progress=lambda *report: seen.append(report), **options)
    labels = np.repeat([0, 1, 2], [5, 4, 6])
    kept, held = hold_out(labels, 0.4, 3)
    assert_colours(opened.train, labels[kept.numpy()].tolist())
    assert_colours(opened.test, labels[held.numpy()].tolist())
    assert len(opened.test) == 2 + 2 + 2
    assert seen[-1] == (f"packing {folder}", 15, 15)
    again = open_data(str(folder), EXPECTED, CPU, progress=lambda *report: pytest.fail("packed again"), **options)
    assert torch.equal(again.test.plain(torch.arange(6))[0], opened.test.plain(torch.arange(6))[0])
    assert [path.parent for path in data.rglob("*.safetensors")] == [data / "packed"]


def test_a_folder_in_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(open_data("~/my pictures", EXPECTED, CPU).train) == 12


def test_a_folder_as_a_whole_for_testing(folder):
    (folder / "red" / "broken.png").write_text("no picture")
    images, classes, left_out = open_for_testing(str(folder), EXPECTED, CPU)
    assert classes == ["blue", "green", "red"]
    assert left_out == [str(folder / "red" / "broken.png")]
    assert_colours(images, [0] * 5 + [1] * 4 + [2] * 6)


def test_the_part_for_testing_where_there_is_one(tmp_path, data):
    fill(tmp_path / "parts" / "train", {"blue": 2, "red": 3})
    fill(tmp_path / "parts" / "val", {"blue": 2, "red": 1})
    opened = open_data(str(tmp_path / "parts"), EXPECTED, CPU)
    assert_colours(opened.train, [0, 0, 1, 1, 1], classes=("blue", "red"))
    assert_colours(opened.test, [0, 0, 1], classes=("blue", "red"))
    images, classes, _ = open_for_testing(str(tmp_path / "parts"), EXPECTED, CPU)
    assert classes == ["blue", "red"]
    assert_colours(images, [0, 0, 1], classes=("blue", "red"))


def test_a_packed_file(folder, tmp_path):
    file = tmp_path / "mine.safetensors"
    pack(*find_images(folder), file, short_side=24)
    opened = open_data(str(file), EXPECTED, CPU, holdout=0.2, seed=1)
    assert (len(opened.train), len(opened.test), opened.classes) == (12, 3, ["blue", "green", "red"])
    images, _, left_out = open_for_testing(str(file), EXPECTED, CPU)
    assert left_out == []
    assert_colours(images, [0] * 5 + [1] * 4 + [2] * 6)


def test_a_packed_file_that_lacks_a_class_is_not_for_training(folder, tmp_path):
    sources, classes = find_images(folder)
    pack([source for source in sources if source.label != 1], classes, tmp_path / "mine.safetensors")
    with pytest.raises(
        ValueError, match=r"mine\.safetensors has no image of class 'green' to train on; every class needs"
    ):
        open_data(str(tmp_path / "mine.safetensors"), EXPECTED, CPU)
    images, _, _ = open_for_testing(str(tmp_path / "mine.safetensors"), EXPECTED, CPU)
    assert_colours(images, [0] * 5 + [2] * 6)


def test_the_margin_says_how_much_of_a_picture_is_seen(tmp_path, data):
    """A white frame of two pixels around 32 is cut away, and seen with a margin of 1."""
    for name in ("blue", "red"):
        (tmp_path / "framed" / name).mkdir(parents=True)
        for index in range(2):
            picture = Image.new("RGB", (32, 32), "white")
            picture.paste(COLOURS[name], (2, 2, 30, 30))
            picture.save(tmp_path / "framed" / name / f"{index}.png")
    expected = Input(32, EXPECTED.mean, EXPECTED.std)
    white = (1 - np.array(EXPECTED.mean)) / np.array(EXPECTED.std)
    for margin, corner_is_white in ((1.0, True), (None, False)):
        images, _, _ = open_for_testing(str(tmp_path / "framed"), expected, CPU, margin=margin)
        corner = images.plain(torch.arange(4))[0][:, :, 0, 0].numpy()
        assert (np.abs(corner - white).max() < 0.2) == corner_is_white


def test_what_is_not_there_is_one_sentence(data):
    sentence = "there is no data set, folder or file 'mnist'; the data sets are cifar10, cifar100, pets, cars"
    for function in (open_data, open_for_testing):
        with pytest.raises(FileNotFoundError, match=sentence):
            function("mnist", EXPECTED, CPU)
