"""Grey pictures of more than 8 bits a pixel: how bright they are, and those that cannot be told."""

import struct

import numpy as np
import pytest
from PIL import Image

from kernelhead.data.packed import PictureFiles
from kernelhead.data.picture import open_picture

RAMP = np.linspace(0, 65535, 12 * 16).astype(np.uint16).reshape(12, 16)


def tiff(bits, sample_format, pixels, width=16, height=12, order="<"):
    """A TIFF of one uncompressed strip of grey pixels, by hand."""
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, 1), (273, 0), (277, 1), (278, height)]
    tags += [(279, len(pixels)), (339, sample_format)]
    start = 8 + 2 + 12 * len(tags) + 4
    entries = [struct.pack(f"{order}HHIH2x", tag, 3, 1, start if tag == 273 else value) for tag, value in tags]
    begin = b"II*\0" if order == "<" else b"MM\0*"
    return begin + struct.pack(f"{order}IH", 8, len(tags)) + b"".join(entries) + bytes(4) + pixels


def twelve_bits(values):
    """Two values in three bytes, the first one's highest bits first."""
    first, second = values.reshape(-1, 2).T.astype(np.int64)
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8).tobytes()


SIXTEEN = {
    "little.tif": tiff(16, 1, RAMP.astype("<u2").tobytes()),
    "big.tif": tiff(16, 1, RAMP.astype(">u2").tobytes(), order=">"),
    "twelve.tif": tiff(12, 1, twelve_bits(RAMP >> 4)),
    "deep.ppm": b"P5 16 12 65535\n" + RAMP.astype(">u2").tobytes(),
}


@pytest.mark.parametrize("name", [*SIXTEEN, "deep.png", "lzw.tif", "positive.tif"])
def test_up_to_16_bits_keep_their_brightness(tmp_path, name):
    expected = RAMP // 256
    if name in SIXTEEN:
        (tmp_path / name).write_bytes(SIXTEEN[name])
    elif name == "positive.tif":  # with a sign, of which Pillow makes 32 bits
        (tmp_path / name).write_bytes(tiff(16, 2, (RAMP // 2).astype("<i2").tobytes()))
        expected = RAMP // 512
    else:
        Image.fromarray(RAMP).save(tmp_path / name, **({"compression": "tiff_lzw"} if name == "lzw.tif" else {}))
    pixels = open_picture(tmp_path / name, None)
    np.testing.assert_array_equal(pixels, np.repeat(expected[..., None], 3, axis=2))


def test_16_bits_in_the_mode_of_32(tmp_path, monkeypatch):
    """Pillow 10 and 11 open a PNG of 16 bits so."""
    from PIL import PngImagePlugin

    Image.fromarray(RAMP).save(tmp_path / "deep.png")
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    with Image.open(tmp_path / "deep.png") as opened:
        assert opened.mode == "I"
    np.testing.assert_array_equal(open_picture(tmp_path / "deep.png", None)[..., 0], RAMP // 256)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize(
    "pixels", [(RAMP / 65535).astype(np.float32), (RAMP / 257).astype(np.float32), (RAMP // 257).astype(np.int32)]
)
def test_32_bits_are_not_read_and_the_sentence_says_why(tmp_path, pixels, compression):
    path = tmp_path / "x.tif"
    Image.fromarray(pixels).save(path, compression=compression)
    with pytest.raises(
        ValueError, match=r"x\.tif is not a readable picture \(it has 32 bits a pixel, and nothing says"
    ):
        open_picture(path, 8)
    files = PictureFiles([path], short_side=8)
    files.image(0)
    assert "32 bits a pixel" in files.broken[0]


def test_32_bits_without_a_sign(tmp_path):
    (tmp_path / "x.tif").write_bytes(tiff(32, 1, (RAMP.astype("<u4") // 257).tobytes()))
    with pytest.raises(ValueError, match="32 bits a pixel"):
        open_picture(tmp_path / "x.tif", None)
