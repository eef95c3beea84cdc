"""Pets and Cars in the layout of torchvision, made small."""

import hashlib
import io
import json
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets
from typer.testing import CliRunner

from kernelhead.cli import app
from kernelhead.data import large

PETS = {
    "train": ["Abyssinian_1 1 1 1", "american_bulldog_20 2 2 1", "Abyssinian_3 1 1 1", "Maine_Coon_1 3 1 2"],
    "test": ["Maine_Coon_7 3 1 2", "american_bulldog_2 2 2 1", "Abyssinian_9 1 1 1"],
}
CARS = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"]


def picture(seed, width=60, height=40):
    coarse = np.random.default_rng(seed).integers(256, size=(3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def lay_out_pets(root):
    base = root / "oxford-iiit-pet"
    (base / "images").mkdir(parents=True)
    (base / "annotations").mkdir()
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        (base / "annotations" / file).write_text("\n".join(PETS[split]) + "\n")
        for line in PETS[split]:
            name = line.split()[0]
            picture(sum(name.encode())).save(base / "images" / f"{name}.jpg", quality=97)
    return base


def lay_out_cars(root):
    base = root / "stanford_cars"
    labels = {"train": [2, 1, 2], "test": [1, 2]}
    savemat_in = {"train": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
    (base / "devkit").mkdir(parents=True)
    names = np.empty((1, len(CARS)), dtype=object)
    names[0] = CARS
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    for split, classes in labels.items():
        (base / f"cars_{split}").mkdir()
        rows = np.zeros((1, len(classes)), dtype=[("bbox_x1", "O"), ("class", "O"), ("fname", "O")])
        for i, label in enumerate(classes):
            rows[0, i] = (7, label, f"{i + 1:05}.jpg")
            picture(10 * label + i, 80, 50).save(base / f"cars_{split}" / f"{i + 1:05}.jpg")
        savemat(base / savemat_in[split], {"annotations": rows})
    return base


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def small(monkeypatch):
    """The official numbers are those of the small sets."""
    pets = replace(large.SETS["pets"], num_classes=3, images={"train": 4, "test": 3})
    cars = replace(large.SETS["cars"], num_classes=2, images={"train": 3, "test": 2})
    monkeypatch.setattr(large, "SETS", {"pets": pets, "cars": cars})


def test_official_numbers():
    assert large.SETS["pets"].num_classes == 37
    assert sum(large.SETS["pets"].images.values()) == 7349
    assert large.SETS["cars"].num_classes == 196
    assert sum(large.SETS["cars"].images.values()) == 16185


def test_pets_have_the_official_order_and_readable_names(root, small):
    base = lay_out_pets(root)
    made = large.get("pets", 100)
    assert made["train"].classes == made["test"].classes == ["Abyssinian", "American Bulldog", "Maine Coon"]
    assert made["train"].labels.tolist() == [0, 1, 0, 2]
    assert made["test"].labels.tolist() == [2, 1, 0]
    assert made["test"].jpeg(1) == (base / "images" / "american_bulldog_2.jpg").read_bytes()
    assert (root / "pets-train-100.safetensors").exists()
    assert large.load("pets", "test", 100).jpeg(0) == made["test"].jpeg(0)
    assert large.problems("pets", 100, decode=True) == []


def test_torchvision_reads_the_same(root, small):
    lay_out_pets(root)
    lay_out_cars(root)
    pets, cars = large.get("pets")["train"], large.get("cars")
    reference = datasets.OxfordIIITPet(root, split="trainval")
    assert pets.classes == reference.classes
    for index, (image, label) in enumerate(reference):
        assert pets.labels[index] == label
        np.testing.assert_array_equal(pets.image(index), np.asarray(image))
    for split, packed in cars.items():
        official = datasets.StanfordCars(root, split=split)
        assert packed.classes == official.classes == CARS
        for index, (image, label) in enumerate(official):
            assert packed.labels[index] == label
            np.testing.assert_array_equal(packed.image(index), np.asarray(image))
    assert large.problems("cars", decode=True) == []


def test_images_are_packed_at_the_short_side_asked_for(root, small):
    lay_out_cars(root)
    assert large.get("cars", 25)["test"].image(0).shape == (25, 40, 3)
    assert large.get("cars", 30)["test"].image(0).shape == (30, 48, 3)
    assert [path.name for path in large.packed_files("cars", "test")] == [
        "cars-test-25.safetensors",
        "cars-test-30.safetensors",
    ]
    assert [path.name for path in large.packed_files("pets", "test")] == ["pets-test-480.safetensors"]


def test_missing_broken_and_odd_images(root, small):
    base = lay_out_pets(root) / "images"
    (base / "Abyssinian_1.jpg").unlink()
    whole = (base / "Abyssinian_3.jpg").read_bytes()
    (base / "Abyssinian_3.jpg").write_bytes(whole[: len(whole) // 2])
    picture(0).convert("RGBA").save(base / "Maine_Coon_1.jpg", "PNG")  # as some of the real ones are
    picture(0).convert("L").save(base / "american_bulldog_20.jpg")
    packed = large.get("pets")["train"]
    assert packed.labels.tolist() == [1, 2]
    assert [packed.image(index).shape for index in range(2)] == [(40, 60, 3)] * 2
    assert large.problems("pets") == [
        "2 train images instead of 4",
        "train images of 2 classes, 3 names of classes, instead of 3",
        "2 train images were left out, Abyssinian_1.jpg, Abyssinian_3.jpg",
    ]


def test_problems_against_the_official_numbers(root):
    lay_out_cars(root)
    large.get("cars")
    assert large.problems("cars") == [
        "3 train images instead of 8144",
        "train images of 2 classes, 2 names of classes, instead of 196",
        "2 test images instead of 8041",
        "test images of 2 classes, 2 names of classes, instead of 196",
    ]


def test_damage_inside_a_packed_file_is_found_by_decoding(root, small):
    lay_out_cars(root)
    path = large.get("cars")["train"].path
    content = bytearray(path.read_bytes())
    second = content.find(b"\xff\xd8\xff", content.find(b"\xff\xd8\xff") + 3)
    content[second : second + 3] = b"\0\0\0"
    path.write_bytes(content)
    assert large.problems("cars") == []
    assert large.problems("cars", decode=True) == ["1 train images cannot be decoded, number 1"]
    with pytest.raises(ValueError, match=r"image 1 of .*cars-train-480.safetensors cannot be decoded"):
        large.load("cars", "train").image(1)


def test_what_is_packed_is_not_packed_again(root, small):
    lay_out_cars(root)
    path = large.get("cars")["train"].path
    written = path.stat().st_mtime_ns
    seen = []
    large.get("cars", progress=lambda *report: seen.append(report))
    assert path.stat().st_mtime_ns == written
    assert seen == []
    large.get("cars", 20, progress=lambda *report: seen.append(report))
    assert seen == [("packing cars train", done, 3) for done in (1, 2, 3)] + [
        ("packing cars test", done, 2) for done in (1, 2)
    ]


@pytest.fixture
def server(tmp_path):
    """The address of a web server of what is in tmp_path."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_missing_pets_are_downloaded_and_checked(root, small, tmp_path, monkeypatch, server):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    base = lay_out_pets(tmp_path / "archives")
    resources = []
    for part in ("images", "annotations"):
        archive = tmp_path / f"{part}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(base / part, part)
        resources.append((f"{server}/{archive.name}", hashlib.md5(archive.read_bytes()).hexdigest()))
    monkeypatch.setattr(datasets.OxfordIIITPet, "_RESOURCES", [resources[0], (resources[1][0], "0" * 32)])
    with pytest.raises(OSError, match=r"pets could not be downloaded .*oxford-iiit-pet needs images, annotations"):
        large.get("pets")
    monkeypatch.setattr(datasets.OxfordIIITPet, "_RESOURCES", resources)
    assert len(large.get("pets")["train"]) == 4
    assert large.problems("pets", decode=True) == []


def test_missing_cars_are_asked_for_in_one_sentence(root):
    base = lay_out_cars(root)
    (base / "devkit" / "cars_meta.mat").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        large.get("cars")
    sentence = str(caught.value)
    assert "not offered for download any more" in sentence
    assert f"{base} needs cars_train, cars_test, devkit/cars_meta.mat" in sentence
    assert sentence.endswith("has no devkit/cars_meta.mat")


@pytest.mark.parametrize("file", ["devkit/cars_meta.mat", "cars_test_annos_withlabels.mat"])
def test_broken_annotations_are_one_sentence(root, file):
    base = lay_out_cars(root)
    (base / file).write_bytes(b"no matrix")
    with pytest.raises(ValueError, match=r"the annotations in .*stanford_cars cannot be read"):
        large.get("cars")


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown data set 'birds'; choose one of pets, cars"):
        large.load("birds", "train")
    with pytest.raises(ValueError, match="unknown split 'val'; choose one of train, test"):
        large.load("pets", "val")


def test_a_set_that_is_not_packed(root):
    with pytest.raises(FileNotFoundError, match="'kernelhead data get cars' makes it"):
        large.load("cars", "train")
    with pytest.raises(FileNotFoundError, match="'kernelhead data get cars --short-side 64' makes it"):
        large.load("cars", "train", 64)


# --- the command line -------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["data", *arguments])


def test_commands(root, small):
    base = lay_out_cars(root)
    (base / "cars_test" / "00002.jpg").unlink()
    assert [line.split()[-2] for line in run("list").output.splitlines() if "cars-" in line] == ["no", "no"]
    got = run("get", "cars", "--short-side", "30")
    assert got.exit_code == 0, got.output
    assert f"{root}/cars-test-30.safetensors: 1 images of 2 classes, 1 left out" in got.output
    assert f"left out, since it cannot be read: {base}/cars_test/00002.jpg" in got.output
    sizes = [f"{(root / f'cars-{split}-30.safetensors').stat().st_size / 1024:.0f}" for split in ("train", "test")]
    shown = [line.split()[-3:-1] for line in run("list").output.splitlines() if "cars-" in line]
    assert shown == [[size, "KiB"] for size in sizes]
    verified = run("verify", "cars", "--short-side", "30")
    assert str(verified.exception) == (
        f"cars in {root} is not the official cars: 1 test images instead of 2; test images of 1 classes, 2 names of "
        "classes, instead of 2; 1 test images were left out, 00002.jpg"
    )
    picture(3).save(base / "cars_test" / "00002.jpg")
    assert run("get", "cars").exit_code == 0
    assert f"cars in {root} is complete and unharmed" in run("verify", "cars").output


@pytest.mark.parametrize("verb", ["get", "verify"])
def test_wrong_names_and_options(root, verb):
    assert str(run(verb, "birds").exception) == (
        "unknown data set 'birds'; choose one of cifar10, cifar100, pets, cars"
    )
    assert "leave out --short-side" in str(run(verb, "cifar10", "--short-side", "64").exception)


def test_the_packed_file_is_plain_safetensors(root, small):
    from safetensors.numpy import load_file

    lay_out_cars(root)
    packed = large.get("cars")["train"]
    arrays = load_file(packed.path)
    assert arrays["labels"].tolist() == packed.labels.tolist()
    begin, end = arrays["offsets"][1:3]
    np.testing.assert_array_equal(Image.open(io.BytesIO(arrays["jpeg"][begin:end].tobytes())), packed.image(1))
    content = packed.path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(header[name]["data_offsets"][0] % 8 == 0 for name in ("jpeg", "offsets", "labels"))  # for memory maps
