"""The page: one sound file with every table and chart, which needs no network."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from kernelhead.tables import Table
from kernelhead_lab.report.charts import curves_chart
from kernelhead_lab.report.page import Section, write_page
from kernelhead_lab.report.sphere import Panel, sphere_figure, view_rotation, write_png
from kernelhead_lab.tables.synthetic_data import draw

TABLE = Table(
    "cifar10",
    "CIFAR-10 & <others>",
    ["Network", "paper", "ours"],
    [["ResNet-8, SM", "83.73", "84.01 ± 0.20"], ["ResNet-8, <Ours>", "86.93", "not run"], ["none", "71.0", "diverged"]],
    ["A note & more.", "Another."],
)
VOID = {"meta", "link"}


class Page(HTMLParser):
    """Every element is closed in order, no id comes twice, and every link leads somewhere on the page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.words = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)
        assert all(link[0] == "#" and link[1:] in self.ids for link in self.links)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src") if name in found and found[name] != "data:,"]
        kind = f"{tag}.{found['class']}" if "class" in found else tag
        if tag not in VOID:
            self.open.append((tag, kind))
            self.words.setdefault(kind, []).append("")

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.words[self.open[-1][1]][-1] += data


def written(path, sections, title="Ours & <the paper's>"):
    write_page(path, title, sections)
    return path.read_text(encoding="utf-8")


def test_the_page_holds_plotly_once_and_asks_for_nothing(tmp_path):
    chart = curves_chart("Loss", {"SM": [3.0, 2.0]}, "loss")
    text = written(tmp_path / "new" / "page.html", [Section(TABLE, [chart, chart]), Section(TABLE, [chart])])
    script = get_plotlyjs()
    assert text.count(script) == 1
    rest = text.replace(script, "")
    asks = r"<script[^>]+src|<link(?![^>]+data:,)|<img|@import|url\(|/\*[A-Z]+\*/|https?://(?!plot\.ly)"
    assert not re.search(asks, rest)
    page = Page(rest)
    assert page.words["title"] == page.words["h1"] == ["Ours & <the paper's>"]
    charts = [name.removeprefix("table-cifar10-") for name in page.ids if "chart" in name]
    assert charts == ["chart-1", "chart-2", "2-chart-1"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_a_page_without_charts_has_no_script(tmp_path):
    assert "<script" not in written(tmp_path / "page.html", [Section(TABLE)])
    assert "no tables yet" in written(tmp_path / "page.html", [])


def test_navigation_leads_to_every_section(tmp_path):
    tables = [TABLE, TABLE, Table("Tables/ä", "Odd", ["a"], []), Table("?", "Odder", [], [])]
    page = Page(written(tmp_path / "page.html", [Section(table) for table in tables]))
    assert page.words["a"] == page.words["h2"] == [table.title for table in tables]
    assert len(page.links) == 4


def test_tables_are_tables(tmp_path):
    page = Page(written(tmp_path / "page.html", [Section(TABLE)]))
    assert page.words["th"] == [*TABLE.columns, *(row[0] for row in TABLE.rows)]
    assert page.words["td"] == ["83.73", "84.01 ± 0.20", "86.93", "71.0"]
    assert page.words["td.muted"] == ["not run", "diverged"]
    assert page.words["p.remark"] == TABLE.notes


def test_words_of_the_template_and_markup_are_left_alone(tmp_path):
    table = Table("t", "/*LINKS*/ \\1 \\g<0>", ["a"], [["/*TITLE*/"]])
    page = Page(written(tmp_path / "a", [Section(table)]))
    assert page.words["h2"] == [table.title]
    assert page.words["th"] == ["a", "/*TITLE*/"]
    chart = curves_chart("</script><b>", {"</script>": [1.0]}, "loss")
    text = written(tmp_path / "b", [Section(table, [chart])]).replace(get_plotlyjs(), "")
    assert text.count("</script>") == text.count("<script")


def hemisphere(u):
    return (u[:, 2] > 0).astype(float)


def test_view_is_a_rotation_with_the_eye_in_front():
    rotation = view_rotation()
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1)
    assert rotation[1, 2] > 0


def test_png_shows_regions_where_they_are(tmp_path):
    from matplotlib.image import imread

    data = draw(0, per_class=1)
    path = tmp_path / "new" / "a.png"
    write_png(path, [Panel("Upper half", hemisphere)], data)
    image = imread(path)[..., :3]
    height, width = image.shape[:2]
    blue = image[..., 2] - image[..., 0]
    middle = blue[int(0.2 * height) : int(0.9 * height), width // 2]
    assert middle[0] < -0.1  # orange above
    assert middle[-1] > 0.1  # blue below


def test_spheres_hold_the_regions_and_the_samples(tmp_path):
    data = draw(0, per_class=50)
    figure = sphere_figure([Panel("One", hemisphere), Panel("Two", lambda u: 1 - hemisphere(u))], data)
    one, two = (trace for trace in figure.data if trace.type == "surface")
    x, y, z = (np.array(getattr(one, name), dtype=np.float64) for name in "xyz")
    np.testing.assert_allclose(x**2 + y**2 + z**2, 1, atol=1e-6)
    assert ((np.array(one.surfacecolor) == 1) == (z > 0)).all()
    assert (np.array(two.surfacecolor) == 1 - np.array(one.surfacecolor)).all()
    blue, orange = [trace for trace in figure.data if trace.type == "scatter3d" and trace.scene == "scene"]
    assert (len(blue.x), len(orange.x)) == (50, 50)
    np.testing.assert_allclose(blue.x, 1.005 * data.x_train[data.y_train == 0][:, 0], atol=1e-6)
    text = written(tmp_path / "page.html", [Section(TABLE, [figure])])
    assert "plotly_relayouting" in text
    assert json.dumps("Two")[1:-1] in text
