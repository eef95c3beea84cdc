import io

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from kernelhead_lab.data.packed import PackedImages, Source, pack


def image(width=40, height=30, seed=0):
    coarse = np.random.default_rng(seed).integers(256, size=(3, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def sources(tmp_path):
    made = [Source(tmp_path / f"{label}-{index}.jpg", label) for label in range(2) for index in range(3)]
    for seed, source in enumerate(made):
        image(seed=seed).save(source.path, quality=97)
    return made


def packed(sources, short_side=256):
    return pack(sources, ["cat", "dog"], sources[0].path.parent / "a.safetensors", short_side=short_side)


def pack_one(folder, made, name, **options):
    made.save(folder / name, **options)
    return packed([Source(folder / name, 0)], options.pop("short_side", 256))


def test_round_trip_keeps_bytes_labels_and_classes(sources):
    opened = PackedImages(packed(sources).path)
    assert opened.classes == ["cat", "dog"]
    assert opened.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert opened.jpeg(4) == sources[4].path.read_bytes()
    np.testing.assert_array_equal(opened.image(4), np.asarray(Image.open(sources[4].path)))
    assert opened.left_out == []
    assert opened.short_side == 30


def test_the_file_is_plain_safetensors(sources):
    opened = packed(sources)
    arrays = safetensors.numpy.load_file(opened.path)
    assert arrays["labels"].tolist() == opened.labels.tolist()
    begin, end = arrays["offsets"][1:3]
    np.testing.assert_array_equal(Image.open(io.BytesIO(arrays["jpeg"][begin:end].tobytes())), opened.image(1))


def test_large_images_are_made_smaller_on_their_short_side(tmp_path):
    made = []
    for name, size in (("wide", (100, 60)), ("tall", (60, 100)), ("tiny", (20, 10))):
        made.append(Source(tmp_path / f"{name}.png", 0))
        image(*size).save(made[-1].path)
    opened = packed(made, 30)
    assert [opened.image(index).shape for index in range(3)] == [(30, 50, 3), (50, 30, 3), (10, 20, 3)]
    small = np.asarray(image(100, 60).resize((50, 30), Image.Resampling.BICUBIC), dtype=float)
    assert np.abs(opened.image(0) - small).mean() < 4
    with Image.open(io.BytesIO(opened.jpeg(1))) as again:
        assert again.format == "JPEG"


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    name = "x.jpg" if mode in ("L", "CMYK") else "x.png"
    assert pack_one(tmp_path, image().convert(mode), name).image(0).shape == (30, 40, 3)


def test_turned_photographs_stand_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = pack_one(tmp_path, image(), "x.jpg", exif=exif, quality=97).image(0)
    assert pixels.shape == (40, 30, 3)
    assert np.abs(pixels - np.rot90(np.asarray(image(), dtype=float), -1)).mean() < 4


def test_missing_and_broken_images_are_named_and_left_out(sources, tmp_path):
    whole = sources[1].path.read_bytes()
    sources[1].path.write_bytes(whole[: len(whole) // 2])
    sources[3].path.write_bytes(b"no image at all")
    gone = Source(tmp_path / "gone.jpg", 1)
    opened = packed([*sources, gone])
    assert opened.labels.tolist() == [0, 0, 1, 1]
    assert opened.left_out == [str(source.path) for source in (sources[1], sources[3], gone)]
    assert opened.jpeg(0) == sources[0].path.read_bytes()


def test_nothing_readable_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"none of 1 images can be read, such as .*gone\.jpg; get them again"):
        packed([Source(tmp_path / "gone.jpg", 0)])
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("keep", [0, 6, 50, -1])
def test_files_cut_short_are_refused(sources, keep):
    path = packed(sources).path
    path.write_bytes(path.read_bytes()[:keep])
    reason = "it has .* bytes, .* expected" if keep == -1 else "it has no header of one"
    with pytest.raises(ValueError, match=rf"not a readable file of packed images \({reason}\)"):
        PackedImages(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    whole = safetensors.numpy.save({"jpeg": np.zeros(3, np.uint8)})
    for content in (whole, b"\xff" * 100, (8).to_bytes(8, "little") + b"\xff" * 8):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a readable file of packed images \(it has no header of one\)"):
            PackedImages(path)
    path.write_bytes(safetensors.numpy.save({"jpeg": np.zeros(3, np.uint8)}, {"format": "another"}))
    with pytest.raises(ValueError, match=r"not a readable file of packed images \(its format is 'another'\)"):
        PackedImages(path)
    with pytest.raises(FileNotFoundError, match="there is no"):
        PackedImages(tmp_path / "none.safetensors")


def test_damage_inside_is_said_where_it_is_met(sources):
    path = packed(sources).path
    content = bytearray(path.read_bytes())
    second = content.find(b"\xff\xd8\xff", content.find(b"\xff\xd8\xff") + 3)
    content[second : second + 3] = b"\0\0\0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"image 1 of .*a\.safetensors cannot be decoded"):
        PackedImages(path).image(1)
