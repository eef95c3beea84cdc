import base64
import csv
import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from kernelhead.data.synthetic import draw
from kernelhead.paper.table import Table
from kernelhead.report.sphere import Panel, view_rotation, write_html, write_png
from kernelhead.report.tables import show, to_csv, to_markdown

TABLE = Table("t", "A title", ["Method", "a, b"], [["Kernel", "1.00 ± 0.50"], ["Softmax", "not run"]], ["A note."])


def test_markdown():
    assert to_markdown(TABLE).splitlines() == [
        "## A title",
        "",
        "| Method | a, b |",
        "|---|--:|",
        "| Kernel | 1.00 ± 0.50 |",
        "| Softmax | not run |",
        "",
        "A note.  ",
    ]


def test_csv_reads_back():
    assert list(csv.reader(io.StringIO(to_csv(TABLE)))) == [TABLE.columns, *TABLE.rows]


def test_terminal_shows_every_cell():
    console = Console(file=io.StringIO(), width=100)
    show(TABLE, console)
    text = console.file.getvalue()
    for cell in ["A title", *TABLE.columns, *TABLE.rows[0], *TABLE.rows[1], "A note."]:
        assert cell in text


def test_view_is_a_rotation_with_the_eye_in_front():
    rotation = view_rotation()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1)
    assert rotation[1, 2] > 0


def hemisphere(u):
    return (u[:, 2] > 0).astype(float)


def test_png_shows_regions_where_they_are(tmp_path):
    from matplotlib.image import imread

    data = draw(0, per_class=50)
    path = tmp_path / "new" / "a.png"
    write_png(path, [Panel("Upper half", hemisphere)], data.x_train[:0], data.y_train[:0], "Title")
    image = imread(path)[..., :3]
    height, width = image.shape[:2]
    blue = image[..., 2] - image[..., 0]
    middle = blue[int(0.2 * height) : int(0.9 * height), width // 2]
    assert middle[0] < -0.1  # orange above
    assert middle[-1] > 0.1  # blue below


def test_html_needs_no_network_and_holds_the_map(tmp_path):
    data = draw(0, per_class=5000)
    path = tmp_path / "a.html"
    write_html(path, [Panel("<b>&", hemisphere)], data.x_train, data.y_train, "Kernels & <spheres>", "Caption")
    page = path.read_text()
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", page)
    assert "/*DATA*/" not in page
    assert "<h1>Kernels &amp; &lt;spheres&gt;</h1>" in page
    content = json.loads(re.search(r"const data = (\{.*\});", page).group(1))
    decoded = np.frombuffer(base64.b64decode(content["panels"][0]["map"]), np.uint8)
    assert (decoded.reshape(180, 360) == np.repeat([0, 255], 90)[:, None]).all()
    points = np.frombuffer(base64.b64decode(content["points"]), "<i2").reshape(-1, 3) / 32767
    np.testing.assert_allclose(points, data.x_train[:: len(data.x_train) // 3000], atol=2e-5)
