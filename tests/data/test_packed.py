import io

import numpy as np
import pytest
from PIL import Image

from kernelhead.data.packed import PackedImages, Source, find_images, find_pictures, pack


def picture(width=40, height=30, seed=0):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(256, size=(3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(3):
            picture(seed=10 * label + index).save(tmp_path / "pictures" / name / f"{index}.jpg", quality=97)
    return tmp_path / "pictures"


def test_round_trip_keeps_bytes_labels_and_classes(folder, tmp_path):
    (folder / "notes.txt").write_text("not an image")
    packed = pack(*find_images(folder), tmp_path / "a.safetensors")
    assert packed.classes == ["cat", "dog"]
    assert packed.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert packed.jpeg(4) == (folder / "dog" / "1.jpg").read_bytes()
    expected = np.asarray(Image.open(folder / "dog" / "1.jpg"))
    np.testing.assert_array_equal(PackedImages(tmp_path / "a.safetensors").image(4), expected)
    assert packed.left_out == []


def test_large_images_are_made_smaller_on_their_short_side(tmp_path):
    (tmp_path / "p" / "a").mkdir(parents=True)
    picture(100, 60).save(tmp_path / "p" / "a" / "wide.png")
    picture(60, 100).save(tmp_path / "p" / "a" / "tall.png")
    picture(20, 10).save(tmp_path / "p" / "a" / "tiny.png")
    packed = pack(*find_images(tmp_path / "p"), tmp_path / "a.safetensors", short_side=30)
    assert [packed.image(index).shape for index in range(3)] == [(50, 30, 3), (10, 20, 3), (30, 50, 3)]
    small = np.asarray(picture(100, 60).resize((50, 30), Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(packed.image(2) - small).mean() < 4


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    (tmp_path / "p" / "a").mkdir(parents=True)
    picture().convert(mode).save(tmp_path / "p" / "a" / ("x.jpg" if mode in ("L", "CMYK") else "x.png"))
    packed = pack(*find_images(tmp_path / "p"), tmp_path / "a.safetensors")
    assert packed.image(0).shape == (30, 40, 3)


def test_turned_photographs_stand_upright(tmp_path):
    (tmp_path / "p" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture().save(tmp_path / "p" / "a" / "x.jpg", exif=exif)
    packed = pack(*find_images(tmp_path / "p"), tmp_path / "a.safetensors")
    assert packed.image(0).shape == (40, 30, 3)


def test_missing_and_broken_images_are_named_and_left_out(folder, tmp_path):
    whole = (folder / "cat" / "1.jpg").read_bytes()
    (folder / "cat" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "0.jpg").write_bytes(b"no image at all")
    sources, classes = find_images(folder)
    sources.append(Source(folder / "dog" / "gone.jpg", 1))
    packed = pack(sources, classes, tmp_path / "a.safetensors")
    assert packed.labels.tolist() == [0, 0, 1, 1]
    assert [name.rsplit("/", 2)[1:] for name in packed.left_out] == [
        ["cat", "1.jpg"],
        ["dog", "0.jpg"],
        ["dog", "gone.jpg"],
    ]
    assert packed.jpeg(0) == (folder / "cat" / "0.jpg").read_bytes()


def test_nothing_readable_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="none of the 1 images could be read"):
        pack([Source(tmp_path / "gone.jpg", 0)], ["a"], tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_class_of_which_nothing_can_be_read_is_refused_and_leaves_no_file(folder, tmp_path):
    (folder / "eel").mkdir()
    (folder / "eel" / "x.jpg").write_text("no picture")
    (folder / "eel" / "y.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"no image of class 'eel' could be read, .*x\.jpg .*; every class needs some"):
        pack(*find_images(folder), tmp_path / "a.safetensors", every_class=True)
    assert not (tmp_path / "a.safetensors").exists()
    picture().save(folder / "eel" / "z.jpg")
    packed = pack(*find_images(folder), tmp_path / "a.safetensors", every_class=True)
    assert packed.labels.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_gifs_count_with_their_first_picture(folder, tmp_path):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "cat" / "moving.GIF", save_all=True, append_images=frames[1:])
    assert find_pictures([folder / "cat"])[-1] == folder / "cat" / "moving.GIF"
    packed = pack(*find_images(folder), tmp_path / "a.safetensors")
    assert packed.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert np.abs(packed.image(3) - np.array([255.0, 0, 0])).max() <= 3  # once through JPEG


def test_pictures_of_32_bits_are_left_out(folder, tmp_path):
    for name, dtype in (("float", np.float32), ("whole", np.int32)):
        Image.fromarray(np.full((30, 40), 200, dtype)).save(folder / "cat" / f"{name}.tif")
    packed = pack(*find_images(folder), tmp_path / "a.safetensors")
    assert len(packed) == 6
    assert packed.left_out == [str(folder / "cat" / "float.tif"), str(folder / "cat" / "whole.tif")]


def test_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        find_images(tmp_path / "none")
    with pytest.raises(ValueError, match="no images in class folders"):
        find_images(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "empty").mkdir()
    picture().save(tmp_path / "full" / "x.jpg")
    with pytest.raises(ValueError, match="empty has no images"):
        find_images(tmp_path)


@pytest.mark.parametrize("keep", [0, 6, 50, -1])
def test_files_cut_short_are_refused(folder, tmp_path, keep):
    path = tmp_path / "a.safetensors"
    pack(*find_images(folder), path)
    path.write_bytes(path.read_bytes()[:keep])
    reason = "it has .* bytes, .* expected" if keep == -1 else "it has no header of one"
    with pytest.raises(ValueError, match=rf"not a readable file of packed images \({reason}\)"):
        PackedImages(path)


def test_other_files_are_refused(tmp_path):
    import safetensors.numpy

    path = tmp_path / "other.safetensors"
    whole = safetensors.numpy.save({"jpeg": np.zeros(3, np.uint8)})
    for content in (whole, b"\xff" * 100, (8).to_bytes(8, "little") + b"\xff" * 8):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a readable file of packed images \(it has no header of one\)"):
            PackedImages(path)
    path.write_bytes(safetensors.numpy.save({"jpeg": np.zeros(3, np.uint8)}, {"format": "another"}))
    with pytest.raises(ValueError, match=r"not a readable file of packed images \(its format is 'another'\)"):
        PackedImages(path)


def test_bytes_are_those_of_a_decodable_jpeg(folder, tmp_path):
    packed = pack(*find_images(folder), tmp_path / "a.safetensors", short_side=10)
    with Image.open(io.BytesIO(packed.jpeg(5))) as image:
        assert image.format == "JPEG"
        assert min(image.size) == 10
