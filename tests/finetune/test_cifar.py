import hashlib
import pickle

import numpy as np
import pytest
from torchvision import datasets

from kernelhead.finetune import cifar
from kernelhead.finetune.data import problems


def arrays(n_train=40, n_test=20, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(256, size=(n_train, 32, 32, 3), dtype=np.uint8),
        "y_train": (np.arange(n_train) % classes).astype(np.uint8),
        "x_test": rng.integers(256, size=(n_test, 32, 32, 3), dtype=np.uint8),
        "y_test": (np.arange(n_test) % classes).astype(np.uint8),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def write(folder, made):
    folder.mkdir()
    np.savez(folder / "cifar10.npz", **made)
    return folder / "cifar10.npz"


def test_folder_is_the_users_choice_or_their_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path))
    assert cifar.data_folder() == tmp_path
    monkeypatch.delenv("KERNELHEAD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cifar.data_folder() == tmp_path / "cache" / "kernelhead"


def test_reads_what_is_there(folder):
    made = arrays()
    write(folder, made)
    read = cifar.load_cifar("cifar10")
    for name, array in made.items():
        np.testing.assert_array_equal(getattr(read, name), array)


def lay_out_archive(root, made, monkeypatch):
    """The official CIFAR-10 layout of pickled batches, its checksums put where torchvision looks for them."""
    base = root / datasets.CIFAR10.base_folder
    base.mkdir(parents=True)

    def batch(name, x, y):
        content = pickle.dumps({"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), "labels": y.tolist()})
        (base / name).write_bytes(content)
        return [name, hashlib.md5(content).hexdigest()]

    train = [batch("data_batch_1", made["x_train"], made["y_train"])]
    test = [batch("test_batch", made["x_test"], made["y_test"])]
    meta = pickle.dumps({"label_names": [str(i) for i in range(10)]})
    (base / "batches.meta").write_bytes(meta)
    monkeypatch.setattr(datasets.CIFAR10, "train_list", train)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", test)
    names = {"filename": "batches.meta", "key": "label_names", "md5": hashlib.md5(meta).hexdigest()}
    monkeypatch.setattr(datasets.CIFAR10, "meta", names)


def test_missing_data_come_through_torchvision(folder, tmp_path, monkeypatch):
    made = arrays()
    lay_out_archive(tmp_path / "archive", made, monkeypatch)
    # Where torchvision would download into, it finds the archive unpacked, and checks it.
    original = datasets.CIFAR10.__init__
    monkeypatch.setattr(
        datasets.CIFAR10, "__init__", lambda self, root, **options: original(self, tmp_path / "archive", **options)
    )
    read = cifar.load_cifar("cifar10")
    for name, array in made.items():
        np.testing.assert_array_equal(getattr(read, name), array)
    assert [path.name for path in folder.iterdir()] == ["cifar10.npz"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a.pop("y_test"), "is damaged .*y_test"),
        (lambda a: a.update(x_train=a["x_train"].astype(np.float32)), "x_train is float32"),
        (lambda a: a.update(x_test=a["x_test"][:, :16]), r"x_test is uint8 \(20, 16, 32, 3\)"),
        (lambda a: a.update(y_train=a["y_train"][:-1]), "not one integer per image for 40 images"),
        (lambda a: a.update(y_train=a["y_train"] + 1), "labels from 1 to 10, cifar10 has 0 to 9"),
        (lambda a: a.update(x_train=np.array([{}], dtype=object)), "is damaged"),  # no pickle is loaded
    ],
)
def test_wrong_files_are_refused(folder, change, sentence):
    made = arrays()
    change(made)
    write(folder, made)
    with pytest.raises(ValueError, match=sentence):
        cifar.load_cifar("cifar10")


@pytest.mark.parametrize("keep", [0, 10, 5000])
def test_damaged_files_are_refused(folder, keep):
    path = write(folder, arrays())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is damaged"):
        cifar.load_cifar("cifar10")


def test_problems_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"cifar10\.npz; get it with 'kernelhead data get cifar10'"):
        problems("cifar10")
    write(folder, arrays())
    counts, test_counts, colour = problems("cifar10")
    assert counts == "40 training images instead of 50000"
    assert test_counts == "20 test images instead of 10000"
    assert "mean colour" in colour


def test_a_set_with_the_official_counts_and_colour_has_none(folder, monkeypatch):
    monkeypatch.setattr("kernelhead.finetune.data.DATA_SETS", {"cifar10": (10, 5000, 20)})
    made = arrays(5000)
    colour = (255 * np.array(cifar.MEANS["cifar10"])).astype(np.uint8)
    lighter = 255 * np.array(cifar.MEANS["cifar10"]) - colour  # the share of images one byte lighter
    made["x_train"] = np.broadcast_to(colour, (5000, 32, 32, 3)).copy()
    for channel in range(3):
        made["x_train"][: round(5000 * lighter[channel]), :, :, channel] += 1
    write(folder, made)
    assert problems("cifar10") == []
