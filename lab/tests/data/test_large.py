"""Pets and Cars in the layout of torchvision, made small."""

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from kernelhead_lab.data import large

PETS = {
    "train": ["Abyssinian_1 1 1 1", "american_bulldog_20 2 2 1", "Abyssinian_3 1 1 1", "Maine_Coon_1 3 1 2"],
    "test": ["Maine_Coon_7 3 1 2", "american_bulldog_2 2 2 1", "Abyssinian_9 1 1 1"],
}
CARS = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"]


def made_up(seed, width=60, height=40):
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
            made_up(sum(name.encode())).save(base / "images" / f"{name}.jpg", quality=97)
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
            made_up(10 * label + i, 80, 50).save(base / f"cars_{split}" / f"{i + 1:05}.jpg")
        savemat(base / savemat_in[split], {"annotations": rows})
    return base


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_pets_have_the_official_order_and_readable_names(root):
    base = lay_out_pets(root)
    made = large.get("pets")
    assert made["train"].classes == made["test"].classes == ["Abyssinian", "American Bulldog", "Maine Coon"]
    assert made["train"].labels.tolist() == [0, 1, 0, 2]
    assert made["test"].labels.tolist() == [2, 1, 0]
    assert made["test"].jpeg(1) == (base / "images" / "american_bulldog_2.jpg").read_bytes()
    assert (root / "pets-train-480.safetensors").exists()


def test_torchvision_reads_the_same(root):
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


def test_missing_broken_and_odd_images(root):
    base = lay_out_pets(root) / "images"
    (base / "Abyssinian_1.jpg").unlink()
    whole = (base / "Abyssinian_3.jpg").read_bytes()
    (base / "Abyssinian_3.jpg").write_bytes(whole[: len(whole) // 2])
    made_up(0).convert("RGBA").save(base / "Maine_Coon_1.jpg", "PNG")  # as some of the real ones are
    made_up(0).convert("L").save(base / "american_bulldog_20.jpg")
    packed = large.get("pets")["train"]
    assert packed.labels.tolist() == [1, 2]
    assert [packed.image(index).shape for index in range(2)] == [(40, 60, 3)] * 2
    assert packed.left_out == [str(base / f"Abyssinian_{number}.jpg") for number in (1, 3)]


def test_what_is_packed_is_not_packed_again(root):
    lay_out_cars(root)
    seen = []
    path = large.get("cars", lambda *report: seen.append(report))["train"].path
    expected = [("packing cars train", done, 3) for done in (1, 2, 3)]
    assert seen == [*expected, *(("packing cars test", done, 2) for done in (1, 2))]
    written = path.stat().st_mtime_ns
    large.get("cars", lambda *report: pytest.fail("packed again"))
    assert path.stat().st_mtime_ns == written


def test_cars_that_are_not_there_are_one_sentence(root):
    base = lay_out_cars(root)
    (base / "devkit" / "cars_meta.mat").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        large.get("cars")
    sentence = str(caught.value)
    assert "no longer offered for download; put it there" in sentence
    assert f"{base} needs cars_train, cars_test, devkit/cars_meta.mat" in sentence
    assert sentence.endswith("has no devkit/cars_meta.mat")


def test_pets_that_cannot_be_downloaded_are_one_sentence(root, monkeypatch):
    def offline(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr(datasets, "OxfordIIITPet", offline)
    with pytest.raises(OSError, match=r"pets could not be downloaded \(no network\); put it there: .* has no images"):
        large.get("pets")


@pytest.mark.parametrize("file", ["devkit/cars_meta.mat", "cars_test_annos_withlabels.mat"])
def test_broken_annotations_are_one_sentence(root, file):
    base = lay_out_cars(root)
    (base / file).write_bytes(b"no matrix")
    with pytest.raises(ValueError, match=r"the annotations in .*stanford_cars cannot be read"):
        large.get("cars")
