"""A folder of pictures as data: the split, and packing once."""

import os
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from kernelhead.data import packed as packed_module
from kernelhead.data.folder import hold_out, open_folder
from kernelhead.data.packed import Source, find_images, pack


def fill(folder, counts, seed=0):
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(256, size=(12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def packed_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "packed"


@pytest.fixture
def folder(tmp_path, packed_folder):
    return fill(tmp_path / "my pets", {"ant": 10, "bee": 2, "cat": 1, "dog": 5})


def labels(split):
    return split.images.labels[split.index.numpy()]


# --- holding out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holdout", [0.01, 0.2, 0.5, 0.99])
def test_every_class_is_in_both_parts(folder, holdout):
    train, test, classes = open_folder(folder, short_side=64, holdout=holdout)
    assert classes == ["ant", "bee", "cat", "dog"]
    assert train.images is test.images
    assert sorted(np.concatenate([train.index, test.index]).tolist()) == list(range(18))
    kept, held = (np.bincount(labels(split), minlength=4) for split in (train, test))
    assert (held[[0, 1, 3]] >= 1).all()
    assert (kept >= 1).all()
    assert held[2] == 0  # a single image is for training
    assert abs(held[0] - 10 * holdout) <= 1


def test_the_seed_decides():
    of = np.repeat(np.arange(3), 50)
    one, again, other = (hold_out(of, 0.2, seed)[1].tolist() for seed in (3, 3, 4))
    assert one == again
    assert one != other
    counted = np.zeros(150)
    for seed in range(300):
        counted[hold_out(of, 0.2, seed)[1]] += 1
    assert (counted.reshape(3, 50).sum(1) == 300 * 10).all()
    assert counted.min() > 30  # of 60 expected: every image is held out at times
    assert counted.max() < 90


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1, float("nan")])
def test_shares_that_make_no_sense(folder, holdout):
    with pytest.raises(ValueError, match="it has to lie between 0 and 1"):
        open_folder(folder, short_side=64, holdout=holdout)


def test_nothing_to_hold_out(tmp_path, packed_folder):
    with pytest.raises(ValueError, match="no class of two images or more"):
        open_folder(fill(tmp_path / "x", {"a": 1, "b": 1}), short_side=64)


# --- folders of splits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_two_folders_are_the_split(tmp_path, packed_folder, name):
    folder = tmp_path / "pets"
    fill(folder / "train", {"cat": 3, "dog": 2})
    fill(folder / name, {"cat": 1, "dog": 2}, seed=1)
    train, test, classes = open_folder(folder, short_side=64)
    assert classes == ["cat", "dog"]
    assert labels(train).tolist() == [0, 0, 0, 1, 1]
    assert labels(test).tolist() == [0, 1, 1]
    for split, part in ((train, "train"), (test, name)):
        stored = np.asarray(Image.open(folder / part / "dog" / "1.png"), dtype=float)
        assert np.abs(split.images.image(int(split.index[-1])) - stored).mean() < 12  # once through JPEG
    assert sorted(path.name.rsplit("-", 1)[0] for path in packed_folder.iterdir()) == sorted(
        [f"pets-{name}", "pets-train"]
    )


def test_the_test_folder_goes_before_the_validation_folder(tmp_path, packed_folder):
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        fill(tmp_path / "pets" / part, {"cat": count, "dog": count})
    _, test, _ = open_folder(tmp_path / "pets", short_side=64)
    assert len(test.index) == 2


def test_both_parts_need_the_same_classes(tmp_path, packed_folder):
    fill(tmp_path / "train", {"cat": 1, "dog": 1})
    fill(tmp_path / "test", {"cat": 1, "cow": 1, "dog": 1})
    with pytest.raises(ValueError, match=r"test has a class 'cow' and .*train has not; both need the same"):
        open_folder(tmp_path, short_side=64)


def test_a_training_folder_alone_is_no_class(tmp_path, packed_folder):
    fill(tmp_path / "x" / "train", {"cat": 2, "dog": 2})
    with pytest.raises(ValueError, match="x has one class folder only, 'train'"):
        open_folder(tmp_path / "x", short_side=64)


# --- packing ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_packed_once_and_again_when_it_changes(folder, packed_folder):
    seen = []

    def opened(short_side=64):
        seen.clear()
        open_folder(folder, short_side=short_side, progress=lambda *report: seen.append(report))
        return len(list(packed_folder.iterdir()))

    assert opened() == 1
    assert seen == [(f"packing {folder}", done, 18) for done in range(1, 19)]
    assert opened() == 1
    assert seen == []
    assert opened(short_side=8) == 2
    os.utime(folder / "ant" / "0.png", (1, 1))
    assert opened() == 3
    shutil.copy2(folder / "ant" / "0.png", folder / "ant" / "new.png")
    assert opened() == 4
    (folder / "ant" / "new.png").rename(folder / "dog" / "new.png")
    assert opened() == 5
    assert all(path.name.startswith("my-pets-") for path in packed_folder.iterdir())


def test_broken_pictures_are_left_out_and_named(folder):
    (folder / "ant" / "3.png").write_text("no picture")
    (folder / "dog" / "link.png").symlink_to("nowhere.png")
    train, test, _ = open_folder(folder, short_side=64)
    assert len(train.index) + len(test.index) == 17
    assert train.images.left_out == [str(folder / "ant" / "3.png"), str(folder / "dog" / "link.png")]


def test_few_images_are_in_memory_at_a_time(tmp_path, monkeypatch):
    """Encoding must not run away from writing, however slow the disk is."""
    started, ahead = [], []

    def encode(path, short_side):
        started.append(path)
        return b"12345", 7

    monkeypatch.setattr(packed_module, "encode_jpeg", encode)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def progress(done, total):
        time.sleep(0.001)
        ahead.append(len(started) - done)

    sources = [Source(tmp_path / str(index), index % 2) for index in range(200)]
    packed = pack(sources, ["a", "b"], tmp_path / "a.safetensors", progress=progress)
    assert len(started) == len(packed) == 200
    assert max(ahead) <= 4 * 2 + 1
    assert packed.jpeg(199) == b"12345"
    assert packed.short_side == 7


def test_an_interrupted_packing_leaves_nothing_and_the_old_file_whole(folder, tmp_path):
    out = tmp_path / "out" / "a.safetensors"
    pack(*find_images(folder), out)
    before = out.read_bytes()

    def interrupt(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(*find_images(folder), out, short_side=5, progress=interrupt)
    assert [path.name for path in out.parent.iterdir()] == ["a.safetensors"]
    assert out.read_bytes() == before


def test_a_packed_file_will_do(folder, tmp_path):
    packed = pack(*find_images(folder), tmp_path / "a.safetensors")
    train, test, classes = open_folder(tmp_path / "a.safetensors", short_side=64, seed=5)
    expected = hold_out(packed.labels, 0.2, 5)
    assert (train.index.tolist(), test.index.tolist()) == tuple(part.tolist() for part in expected)
    assert classes == packed.classes


def test_what_is_no_folder(tmp_path, packed_folder):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        open_folder(tmp_path / "none", short_side=64)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="not a readable file of packed images"):
        open_folder(tmp_path / "a.txt", short_side=64)


def test_a_single_picture_is_no_data_and_the_sentence_says_what_would_be(folder):
    with pytest.raises(ValueError, match=r"0\.png is not a readable file of packed images") as caught:
        open_folder(folder / "ant" / "0.png", short_side=64)
    assert "__metadata__" not in str(caught.value)
    assert "expected is a folder of class folders of pictures, or a file that 'kernelhead data pack'" in str(
        caught.value
    )


def test_a_class_of_which_nothing_can_be_read_is_refused(folder, packed_folder):
    (folder / "cat" / "0.png").write_text("no picture")
    with pytest.raises(
        ValueError, match=r"no image of class 'cat' could be read, .*cat/0\.png .*every class needs some"
    ):
        open_folder(folder, short_side=64)
    assert list(packed_folder.iterdir()) == []
