"""Images: how files are read, which a data set has, and which are held out."""

import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision import datasets

from kernelhead.finetune.data import problems
from kernelhead.finetune.images import expand, list_images, read_image

RAMP = np.linspace(0, 65535, 12 * 16).astype(np.uint16).reshape(12, 16)


def read(path, short_side=None):
    return read_image(path, short_side).permute(1, 2, 0).numpy()


# --- reading ----------------------------------------------------------------------------------------------------------


def tiff(pixels, width=16, height=12, order="<"):
    """A TIFF of one uncompressed strip of grey pixels, by hand."""
    tags = [(256, width), (257, height), (258, 16), (259, 1), (262, 1), (273, 0), (277, 1), (278, height)]
    tags += [(279, len(pixels)), (339, 1)]
    start = 8 + 2 + 12 * len(tags) + 4
    entries = [struct.pack(f"{order}HHIH2x", tag, 3, 1, start if tag == 273 else value) for tag, value in tags]
    begin = b"II*\0" if order == "<" else b"MM\0*"
    return begin + struct.pack(f"{order}IH", 8, len(tags)) + b"".join(entries) + bytes(4) + pixels


DEEP = {
    "little.tif": tiff(RAMP.astype("<u2").tobytes()),
    "big.tif": tiff(RAMP.astype(">u2").tobytes(), order=">"),
    "deep.ppm": b"P5 16 12 65535\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", [*DEEP, "deep.png", "lzw.tif"])
def test_16_bits_keep_their_brightness(tmp_path, name):
    if name in DEEP:
        (tmp_path / name).write_bytes(DEEP[name])
    else:
        Image.fromarray(RAMP).save(tmp_path / name, **({"compression": "tiff_lzw"} if name == "lzw.tif" else {}))
    np.testing.assert_array_equal(read(tmp_path / name), np.repeat(RAMP[..., None] // 256, 3, axis=2))


def test_16_bits_in_the_mode_of_32(tmp_path, monkeypatch):
    """Pillow 10 and 11 open a PNG of 16 bits so."""
    from PIL import PngImagePlugin

    Image.fromarray(RAMP).save(tmp_path / "deep.png")
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    np.testing.assert_array_equal(read(tmp_path / "deep.png")[..., 0], RAMP // 256)


@pytest.mark.parametrize("pixels", [(RAMP / 65535).astype(np.float32), (RAMP // 257).astype(np.int32)])
def test_32_bits_are_refused(tmp_path, pixels):
    Image.fromarray(pixels).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"x\.tif is not a readable image \(its pixels have the mode [IF],"):
        read_image(tmp_path / "x.tif", 8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, rng, orientation):
    pixels = rng.integers(256, size=(6, 10, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    turns = [pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1]]
    turns += [np.swapaxes(each, 0, 1) for each in (pixels, pixels[::-1], pixels[::-1, ::-1], pixels[:, ::-1])]
    np.testing.assert_array_equal(read(tmp_path / "x.png"), turns[orientation - 1])


def test_palettes_grey_and_cmyk_become_rgb(tmp_path):
    plain = Image.new("RGB", (5, 4), (200, 40, 10))
    expected = np.broadcast_to(np.array([200, 40, 10], dtype=np.uint8), (4, 5, 3))
    plain.convert("RGBA").save(tmp_path / "alpha.png")
    plain.convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    plain.convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.gif")
    for name in ("alpha.png", "palette.png", "palette.gif"):
        np.testing.assert_array_equal(read(tmp_path / name), expected)
    plain.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(read(tmp_path / "cmyk.jpg").astype(int) - expected).max() <= 3
    Image.new("L", (5, 4), 77).save(tmp_path / "grey.jpg", quality=100)
    assert (read(tmp_path / "grey.jpg") == 77).all()
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bits.png")
    assert read(tmp_path / "bits.png")[0].tolist() == [[255] * 3, [0] * 3]


def test_what_is_transparent_is_white_whatever_colour_it_hides(tmp_path):
    pixels = np.zeros((1, 3, 4), dtype=np.uint8)
    pixels[0, :, 0], pixels[0, :, 3] = 200, [0, 51, 255]
    Image.fromarray(pixels).save(tmp_path / "rgba.png")
    assert read(tmp_path / "rgba.png")[0].tolist() == [[255, 255, 255], [244, 204, 204], [200, 0, 0]]
    Image.fromarray(pixels[..., [0, 3]], "LA").save(tmp_path / "la.png")
    assert read(tmp_path / "la.png")[0].tolist() == [[255] * 3, [244] * 3, [200] * 3]
    palette = Image.new("P", (2, 1), 1)
    palette.putpalette([9, 9, 9, 30, 60, 90])
    palette.putpixel((0, 0), 0)
    palette.save(tmp_path / "palette.png", transparency=0)
    assert read(tmp_path / "palette.png")[0].tolist() == [[255, 255, 255], [30, 60, 90]]


def test_16_bits_of_colour(tmp_path):
    """A PNG by hand."""
    pixels = np.array([[[65535, 256, 0], [25600, 12800, 511]]], dtype=">u2")
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0" + pixels.tobytes())),
    ]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    ]
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + b"\0\0\0\0IEND\xaeB`\x82")
    assert read(tmp_path / "x.png")[0].tolist() == [[255, 1, 0], [100, 50, 1]]


@pytest.mark.parametrize(("size", "short", "expected"), [((400, 200), 50, (50, 100)), ((30, 60), 50, (60, 30))])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_large_images_are_reduced_to_the_short_side(tmp_path, size, short, expected, suffix):
    coarse = np.random.default_rng(0).integers(256, size=(4, 8, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    image.save(tmp_path / f"x.{suffix}")
    found = read(tmp_path / f"x.{suffix}", short)
    assert found.shape[:2] == expected
    with Image.open(tmp_path / f"x.{suffix}") as whole:
        reference = np.asarray(whole.resize(expected[::-1], Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(found - reference).mean() < 3


def test_long_strips_lose_their_ends(tmp_path):
    pixels = np.zeros((2, 100, 3), dtype=np.uint8)
    pixels[:, 50] = 255
    Image.fromarray(pixels).save(tmp_path / "x.png")
    found = read(tmp_path / "x.png")
    assert found.shape == (2, 16, 3)
    assert found[0, :, 0].tolist() == [0] * 8 + [255] + [0] * 7


@pytest.mark.parametrize("content", [b"", b"no image", "cut"])
def test_what_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "x.jpg"
    if content == "cut":
        Image.effect_noise((64, 64), 50).save(path)
        content = path.read_bytes()[:-300]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jpg is not a readable image \("):
        read_image(path)


# --- folders ----------------------------------------------------------------------------------------------------------


def fill(folder, counts):
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            (folder / name / f"{index}.png").touch()
    return folder


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "my pets", {"ant": 10, "bee": 2, "cat": 1, "dog": 5})


def labels(part):
    return [label for _, label in part]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
def test_every_class_is_in_both_parts(folder, share):
    found = list_images(str(folder), test=share)
    assert found.classes == ["ant", "bee", "cat", "dog"]
    assert not found.val
    assert sorted([*found.train, *found.test]) == sorted(list_images(str(folder), test=None).test)
    assert all(path.parent.name == found.classes[label] for path, label in [*found.train, *found.test])
    kept, held = (np.bincount(labels(part), minlength=4) for part in (found.train, found.test))
    assert (held[[0, 1, 3]] >= 1).all()
    assert (kept >= 1).all()
    assert held[2] == 0  # a single image is for training
    assert abs(held[0] - 10 * share) <= 1


def test_three_shares_are_apart_and_of_every_class(tmp_path):
    folder = fill(tmp_path / "images", {"ant": 40, "bee": 20, "cat": 3})
    found = list_images(str(folder), val=0.1, test=0.25)
    parts = (found.train, found.val, found.test)
    assert [np.bincount(labels(part), minlength=3).tolist() for part in parts] == [[26, 13, 1], [4, 2, 1], [10, 5, 1]]
    assert len({path for part in parts for path, _ in part}) == 63
    assert found.test == list_images(str(folder), test=0.25).test  # validation comes out of the training images


def test_names_decide_what_is_held_out(folder, tmp_path):
    def held(data, share):
        return {path.relative_to(data).as_posix() for path, _ in list_images(str(data), test=share).test}

    shutil.copytree(folder, tmp_path / "copy")
    assert held(folder, 0.3) == held(tmp_path / "copy", 0.3)
    assert held(folder, 0.3) < held(folder, 0.6)
    chosen = [held(fill(tmp_path / f"{n}", {f"a{n}": 10, "b": 2}), 0.5) for n in range(30)]
    times = np.bincount([int(name.split("/")[1][0]) for each in chosen for name in each if name[0] == "a"])
    assert times.sum() == 150
    assert times.min() > 5  # of 15 expected
    assert times.max() < 25


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_two_folders_are_the_parts(tmp_path, name):
    fill(tmp_path / "train", {"cat": 3, "dog": 2})
    fill(tmp_path / name, {"cat": 1, "dog": 2})
    found = list_images(str(tmp_path))
    assert found.classes == ["cat", "dog"]
    assert (labels(found.train), labels(found.val), labels(found.test)) == ([0, 0, 0, 1, 1], [], [0, 1, 1])
    assert list_images(str(tmp_path), test=None).test == found.test
    found = list_images(str(tmp_path), val=0.3)
    assert (labels(found.train), labels(found.val), labels(found.test)) == ([0, 0, 1], [0, 1], [0, 1, 1])


def test_three_folders_are_the_parts(tmp_path):
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        fill(tmp_path / part, {"cat": count, "dog": count})
    found = list_images(str(tmp_path), val=0.5)  # which its folder goes before
    assert [len(part) for part in (found.train, found.val, found.test)] == [6, 4, 2]


def test_empty_class_folders_are_left_out_if_asked_for(tmp_path, folder):
    (folder / "empty").mkdir()
    with pytest.warns(UserWarning, match=r"class folders without images are skipped in .*my pets: empty"):
        found = list_images(str(folder), skip_empty=True)
    assert found.classes == ["ant", "bee", "cat", "dog"]
    fill(tmp_path / "train", {"cat": 3, "cow": 0, "dog": 2})
    fill(tmp_path / "test", {"cat": 0, "cow": 0, "dog": 2})
    with pytest.warns(UserWarning, match="are skipped in") as caught:
        found = list_images(str(tmp_path), skip_empty=True)
    assert [str(each.message).rpartition(": ")[2] for each in caught] == ["cow", "cat, cow"]
    assert (found.classes, labels(found.train), labels(found.test)) == (["cat", "dog"], [0, 0, 0, 1, 1], [1, 1])


def test_what_is_no_data_is_one_sentence(tmp_path, folder):
    with pytest.raises(ValueError, match="there is no data set or folder 'nowhere'; the data sets are cifar10"):
        list_images("nowhere")
    with pytest.raises(ValueError, match=r"there is no data set or folder .*0\.png"):
        list_images(str(folder / "ant" / "0.png"))
    with pytest.raises(ValueError, match=r"has no images in class folders; it should look like .*/ant/cat/1\.jpg"):
        list_images(str(folder / "ant"))
    (folder / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"my pets/empty has no images; add some, or leave such classes out with --skip-empty"
    ):
        list_images(str(folder))
    with pytest.raises(ValueError, match="has one image per class, so none can be held out"):
        list_images(str(fill(tmp_path / "single", {"a": 1, "b": 1})))
    fill(tmp_path / "alone" / "train", {"cat": 2, "dog": 2})
    with pytest.raises(ValueError, match="has the class folder 'train' alone; a classifier needs two or more"):
        list_images(str(tmp_path / "alone"))
    fill(tmp_path / "alone" / "test", {"cat": 1, "cow": 1, "dog": 1})
    with pytest.raises(ValueError, match=r"only one of .*alone/train and .*alone/test has a class 'cow'; give"):
        list_images(str(tmp_path / "alone"))


def test_files_and_folders_to_look_at(folder):
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "1.png").touch()
    (folder / "ant" / ".2.png").touch()
    (folder / "note.txt").touch()
    assert list(expand([folder])) == sorted(expand([folder]))
    assert len(list(expand([folder]))) == 18
    assert list(expand([folder / "note.txt", folder / "bee"])) == [
        folder / "note.txt",
        *sorted((folder / "bee").iterdir()),
    ]
    with pytest.raises(FileNotFoundError, match="there is no file or folder none"):
        list(expand([folder / "ant", folder.parent.relative_to(folder.parent) / "none"]))
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no images \(\.bmp"):
        list(expand([folder / "empty"]))


# --- Pets and Cars in the layout of torchvision -----------------------------------------------------------------------

PETS = {
    "train": ["Abyssinian_1 1 1 1", "american_bulldog_20 2 2 1", "Abyssinian_3 1 1 1", "Maine_Coon_1 3 1 2"],
    "test": ["Maine_Coon_7 3 1 2", "american_bulldog_2 2 2 1", "Abyssinian_9 1 1 1"],
}
CARS = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with both, whose official numbers are these."""
    root = tmp_path / "data"
    monkeypatch.setenv("KERNELHEAD_DATA", str(root))
    monkeypatch.setattr("kernelhead.finetune.data.DATA_SETS", {"pets": (3, 4, 3), "cars": (2, 3, 2)})
    pets, cars = root / "oxford-iiit-pet", root / "stanford_cars"
    for folder in (pets / "images", pets / "annotations", cars / "devkit", cars / "cars_train", cars / "cars_test"):
        folder.mkdir(parents=True)
    for split, file in (("train", "trainval.txt"), ("test", "test.txt")):
        (pets / "annotations" / file).write_text("\n".join(PETS[split]) + "\n")
        for index, line in enumerate(PETS[split]):
            Image.new("RGB", (60, 40), (index, 50, 90)).save(pets / "images" / f"{line.split()[0]}.jpg")
    names = np.empty((1, len(CARS)), dtype=object)
    names[0] = CARS
    savemat(cars / "devkit" / "cars_meta.mat", {"class_names": names})
    files = {"train": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
    for split, classes in {"train": [2, 1, 2], "test": [1, 2]}.items():
        rows = np.zeros((1, len(classes)), dtype=[("bbox_x1", "O"), ("class", "O"), ("fname", "O")])
        for index, label in enumerate(classes):
            rows[0, index] = (7, label, f"{index + 1:05}.jpg")
            Image.new("RGB", (80, 50), (99, index, label)).save(cars / f"cars_{split}" / f"{index + 1:05}.jpg")
        savemat(cars / files[split], {"annotations": rows})
    return root


def test_lists_are_the_official_ones(root):
    pets, cars = list_images("pets"), list_images("cars")
    assert (pets.classes, cars.classes) == (["Abyssinian", "American Bulldog", "Maine Coon"], CARS)
    for part, lines in PETS.items():
        expected = [(f"{line.split()[0]}.jpg", int(line.split()[1]) - 1) for line in lines]
        assert [(path.name, label) for path, label in getattr(pets, part)] == expected
    assert (labels(cars.train), labels(cars.test)) == ([1, 0, 1], [0, 1])
    assert all(path.exists() for found in (pets, cars) for path, _ in [*found.train, *found.test])


def test_complete_sets_have_no_problems_and_others_are_told(root, monkeypatch):
    assert problems("pets") == problems("cars") == []
    (root / "oxford-iiit-pet" / "images" / "Maine_Coon_1.jpg").write_text("no image")
    (found,) = problems("pets")
    assert "Maine_Coon_1.jpg is not a readable image" in found
    monkeypatch.setattr("kernelhead.finetune.data.DATA_SETS", {"cars": (196, 8144, 8041)})
    assert problems("cars") == [
        "2 classes instead of 196",
        "3 training images instead of 8144",
        "2 test images instead of 8041",
    ]


def test_missing_and_damaged_sets_are_one_sentence(root, monkeypatch):
    shutil.rmtree(root / "stanford_cars" / "cars_test")
    with pytest.raises(OSError, match=r"cars could not be opened .*; put cars_train, .* into .*stanford_cars"):
        list_images("cars")
    (root / "oxford-iiit-pet" / "annotations" / "test.txt").write_text("junk\n")
    with pytest.raises(ValueError, match=r"the annotations of pets in .*oxford-iiit-pet are damaged \("):
        list_images("pets")
    shutil.rmtree(root / "oxford-iiit-pet")
    with pytest.raises(FileNotFoundError, match=r"there is no .*oxford-iiit-pet; get it with 'kernelhead data get"):
        problems("pets")

    def unreachable(*arguments, **options):
        raise RuntimeError("no network")

    monkeypatch.setattr(datasets, "OxfordIIITPet", unreachable)
    with pytest.raises(OSError, match=r"pets could not be opened or downloaded \(no network\); put images and"):
        list_images("pets")


def test_cifar_by_its_name(tmp_path, monkeypatch, rng):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path))
    made = {"x_train": rng.integers(256, size=(20, 32, 32, 3), dtype=np.uint8), "y_train": np.arange(20) % 10}
    made |= {"x_test": made["x_train"][:4], "y_test": np.arange(4)}
    np.savez(tmp_path / "cifar10.npz", **made)
    found = list_images("cifar10")
    assert found.classes[:2] == ["airplane", "automobile"]
    assert labels(found.train) == made["y_train"].tolist()
    for (image, _), expected in zip(found.test, made["x_test"], strict=True):
        np.testing.assert_array_equal(read(image), expected)
