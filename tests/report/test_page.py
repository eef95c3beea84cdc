import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

from kernelhead import kernels
from kernelhead.paper.table import Table
from kernelhead.report.chart import Chart, Series
from kernelhead.report.page import Section, coefficients_chart, curves_chart, kernel_chart, write_page

TABLE = Table(
    "cifar10",
    "CIFAR-10 & <others>",
    ["Network", "paper", "ours"],
    [["ResNet-8, SM", "83.73", "84.01 ± 0.20"], ["ResNet-8, <Ours>", "86.93", "not run"], ["none", "71.0", "diverged"]],
    ["A note & more.", "Another."],
)
VOID = {"meta"}


class Checker(HTMLParser):
    """Every element is closed in order, no id comes twice, and every link leads somewhere on the page."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.names = [], [], [], set()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        assert len(found) == len(attributes)
        self.names.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.links += [f"#{found['aria-labelledby']}"] if "aria-labelledby" in found else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def written(path, title, sections):
    """The page as text and as a tree: it is XML too."""
    write_page(path, title, sections)
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert all(link[0] == "#" and link[1:] in checker.ids for link in checker.links)
    return page, ET.fromstring(page)


def test_page_is_one_sound_file_without_network_or_script(tmp_path):
    sections = [Section(TABLE, [curves_chart("Loss", {"SM": [3.0, 2.0]}, "loss")]), Section(TABLE, [])]
    page, root = written(tmp_path / "new" / "page.html", "Ours & <the paper's>", sections)
    assert page.startswith("<!DOCTYPE html>\n")
    assert not re.search(r"https?:|@import|url\(|<script|<link|<img|/\*[A-Z]+\*/", page)
    assert root.find("head/title").text == root.find("body/header/h1").text == "Ours & <the paper's>"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


def test_navigation_leads_to_every_section(tmp_path):
    tables = [TABLE, TABLE, Table("Tables/ä", "Odd", ["a"], []), Table("?", "Odder", [], [])]
    _, root = written(tmp_path / "page.html", "T", [Section(table) for table in tables])
    links = root.findall(".//nav//a")
    sections = root.findall(".//main/section")
    assert [link.get("href")[1:] for link in links] == [section.get("id") for section in sections]
    assert [link.text for link in links] == [section.find("h2").text for section in sections]
    assert [link.text for link in links] == [table.title for table in tables]


def test_tables_are_tables(tmp_path):
    _, root = written(tmp_path / "page.html", "T", [Section(TABLE)])
    table = root.find(".//table")
    heads = table.findall("thead/tr/th")
    assert [head.text for head in heads] == TABLE.columns
    assert {head.get("scope") for head in heads} == {"col"}
    rows = table.findall("tbody/tr")
    assert [[cell.text for cell in row] for row in rows] == TABLE.rows
    assert all(row[0].tag == "th" and row[0].get("scope") == "row" for row in rows)
    assert [[cell.get("class") for cell in row.findall("td")] for row in rows] == [
        [None, None],
        [None, "muted"],
        [None, "muted"],
    ]
    assert [p.text for p in root.findall(".//section/p")] == TABLE.notes


def test_no_tables_is_a_page_too(tmp_path):
    _, root = written(tmp_path / "page.html", "T", [])
    assert root.find(".//nav//li").text == "no tables yet"


def test_same_input_same_bytes_and_templates_words_are_left_alone(tmp_path):
    table = Table("t", "/*LINKS*/ \\1 \\g<0>", ["a"], [["/*TITLE*/"]])
    sections = [Section(table, [kernel_chart("k", {"a": [0, 0, 0, 1.0]})])]
    for name in ("a", "b"):
        page, root = written(tmp_path / name, "T", sections)
        assert root.find(".//h2").text == table.title
        assert root.find(".//tbody//th").text == "/*TITLE*/"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == page.encode()


def test_a_large_page_stays_small(tmp_path):
    rng = np.random.default_rng(0)
    curves = {f"run {i}, of a long name": rng.uniform(0, 5, 450).tolist() for i in range(60)}
    write_page(tmp_path / "page.html", "T", [Section(TABLE, [curves_chart("Loss", curves, "loss")])])
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_curves_count_epochs_from_one():
    chart = curves_chart("Loss", {"a": [3.0, None, 1.0], "b": []}, "loss")
    assert [list(series.x) for series in chart.series] == [[1, 2, 3], []]
    assert chart.series[0].y == [3.0, None, 1.0]
    assert (chart.x_label, chart.y_label) == ("epoch", "loss")


def test_kernels_go_from_zero_to_one():
    alphas = {
        "ours": [7.0, 5.0, 0.5, 1.0, 0.0, 2.5],
        "rbf": kernels.rbf_coefficients(1.0).tolist(),
    }
    ours, rbf = kernel_chart("k", alphas).series
    t = np.array(ours.x)
    assert (t[0], t[-1]) == (-1, 1)
    np.testing.assert_allclose(ours.y, (t + 2.5 * t**3) / 3.5, atol=1e-12)  # a_{-2}, a_{-1} and a_0 left out
    np.testing.assert_allclose(rbf.y, (np.exp(2 * t) - 1) / (np.exp(2) - 1), atol=1e-8)


@pytest.mark.parametrize(
    ("alpha", "value"),
    [([1.0, 1.0, 0.0, 0.0], "0"), ([1.0, 1.0], "0"), ([0, 0, 1.0, -3.0], "\N{MINUS SIGN}3"), ([], "0")],
)
def test_a_kernel_that_is_not_positive_at_one_is_left_out_with_a_note(alpha, value, tmp_path):
    chart = kernel_chart("k", {"dead": alpha, "alive": [0, 0, 0, 1.0]})
    assert set(chart.series[0].y) == {None}
    assert None not in chart.series[1].y
    assert chart.notes == [f"dead is left out: its k(1) \N{MINUS SIGN} k(0) is {value}."]
    written(tmp_path / "page.html", "T", [Section(TABLE, [chart])])


def test_a_diverged_kernel_is_left_out(tmp_path):
    chart = kernel_chart("k", {"a": [0, 0, 0, float("nan")], "b": [0, 0, 0, float("inf")]})
    assert len(chart.notes) == 2
    written(tmp_path / "page.html", "T", [Section(TABLE, [chart])])


def test_coefficients_have_their_names(tmp_path):
    alphas = {"ours": [1.0] * 10, "polynomial": [1.0] * 13}
    chart = coefficients_chart("a", alphas)
    assert chart.groups[:3] == ["a₋₂", "a₋₁", "a₀"]
    assert chart.groups[-1] == "a₁₀"
    page, root = written(tmp_path / "page.html", "T", [Section(TABLE, [chart, coefficients_chart("a", {})])])
    assert len(root.findall(".//svg[@class='chart']/rect")) == 23
    assert "ours\na₇: 1" in page


def test_charts_stand_below_their_table(tmp_path):
    chart = Chart("C", "x", "y", [Series("a", [1, 2], [1.0, 2.0])])
    _, root = written(tmp_path / "page.html", "T", [Section(TABLE, [chart, chart]), Section(TABLE)])
    first, second = root.findall(".//section")
    assert len(first.findall("div[@class='charts']/figure")) == 2
    assert second.find(".//figure") is None


# Machado, Oliveira and Fernandes (2009): what the three kinds of dichromats see, in linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color):
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    x, y, z = np.cbrt(XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_stay_apart_for_colour_blind_readers(scheme):
    style = resources.files("kernelhead.report").joinpath("page.html").read_text(encoding="utf-8")
    colors = [re.findall(rf"--s{i}: (#[0-9a-f]{{6}})", style)[scheme] for i in range(8)]
    background = (XYZ @ linear(re.findall(r"--paper: (#[0-9a-f]{6})", style)[scheme]))[1]
    for color in colors:
        darker, lighter = sorted((background, (XYZ @ linear(color))[1]))
        assert (lighter + 0.05) / (darker + 0.05) > 2.5
    for matrix in BLINDNESS.values():
        seen = [lab(np.array(matrix) @ linear(color)) for color in colors]
        assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 20
