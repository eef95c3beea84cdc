"""Folders with pictures that are unusual, through the command line."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kernelhead.cli import app

TRAIN = ["train", "--backbone", "cifar_resnet8", "--epochs", "1", "--device", "cpu"]


def kernelhead(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "g" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(256, size=(32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "g" / name / f"{index}.png")
    return tmp_path / "g"


def test_a_class_without_a_readable_picture_is_refused(folder, tmp_path):
    (folder / "c").mkdir()
    (folder / "c" / "x.jpg").write_text("no picture")
    out = tmp_path / "g.safetensors"
    for command in ([*TRAIN, "--data", folder, "--out", tmp_path / "o"], ["data", "pack", folder, "--out", out]):
        done = kernelhead(*command)
        assert isinstance(done.exception, ValueError)
        assert "no image of class 'c' could be read" in str(done.exception)
        assert "every class needs some" in str(done.exception)
    assert not out.exists()
    assert not (tmp_path / "o" / "model.safetensors").exists()


def test_a_picture_is_no_data_to_train_on(folder, tmp_path):
    done = kernelhead(*TRAIN, "--data", folder / "a" / "0.png", "--out", tmp_path / "o")
    assert "expected is a folder of class folders of pictures" in str(done.exception)


def test_unusual_pictures_are_packed_or_named(folder, tmp_path):
    Image.new("P", (32, 32)).save(folder / "a" / "x.gif")
    Image.fromarray(np.ones((32, 32), np.float32)).save(folder / "b" / "x.tif")
    done = kernelhead("data", "pack", folder, "--out", tmp_path / "g.safetensors")
    assert done.exit_code == 0
    assert "9 images of 2 classes, 1 left out" in done.stdout
    assert f"left out, since it cannot be read: {folder / 'b' / 'x.tif'}" in done.output


def test_the_list_of_packed_folders_says_how_they_are_removed(folder, tmp_path):
    (tmp_path / "data" / "packed").mkdir(parents=True)
    (tmp_path / "data" / "packed" / "g-0123456789abcdef.safetensors").write_bytes(b"")
    listed = " ".join(kernelhead("data", "list").stdout.split())
    assert "'kernelhead data clean' shows those that are of no use any more, and --yes removes them" in listed
