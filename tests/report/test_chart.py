import math
import random
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from kernelhead.report.axes import round_step, ticks, usual_range
from kernelhead.report.chart import BarChart, Chart, DotChart, Series
from kernelhead.report.drawing import figure, thin
from kernelhead.report.text import number


def draw(*series, notes=()):
    return ET.fromstring(figure(Chart("Title", "epoch", "loss", series, notes)))


def chart_of(root):
    return root.find("svg")


def lines_of(root):
    return [group.findall("polyline") for group in chart_of(root).findall("g")]


def read(polyline):
    return np.array([[float(v) for v in pair.split(",")] for pair in polyline.get("points").split()])


def value_of(text):
    return float(text.replace("\N{MINUS SIGN}", "-"))


def axis(root, kind):
    """Slope and offset from places to numbers, by a straight line through the ticks' labels."""
    svg = chart_of(root)
    labels = [value_of(text.text) for text in svg.findall("text") if text.get("class") == kind]
    a, b = ("y1", "y2") if kind == "y" else ("x1", "x2")
    grid = [line for line in svg.findall("line") if line.get("class") == "grid" and line.get(a) == line.get(b)]
    places = [float(line.get(a)) for line in grid]
    assert len(labels) == len(places) >= 2
    slope, offset = np.polyfit(places, labels, 1)
    np.testing.assert_allclose(np.array(places) * slope + offset, labels, atol=abs(slope) * 0.1)
    return slope, offset


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 90.0, 1e9])
@pytest.mark.parametrize("n", [2, 6, 30, 200])
def test_points_land_where_the_ticks_say(scale, n):
    rng = random.Random(n)
    y = [scale * rng.uniform(-1, 2) for _ in range(n)]
    x = list(range(1, n + 1))
    root = draw(Series("a", x, y))
    points = read(lines_of(root)[0][0])
    for column, kind, wanted in ((0, "x", x), (1, "y", y)):
        slope, offset = axis(root, kind)
        np.testing.assert_allclose(points[:, column] * slope + offset, wanted, atol=abs(slope) * 0.2)


def test_everything_is_inside_the_plot_and_clear_of_the_words():
    y = [math.sin(i) * 1e3 for i in range(100)]
    root = draw(Series("a", range(100), y))
    points = read(lines_of(root)[0][0])
    labels = [text for text in chart_of(root).findall("text") if text.get("class") == "y"]
    _, _, width, height = map(float, chart_of(root).get("viewBox").split())
    assert points[:, 0].min() > max(float(text.get("x")) for text in labels)
    assert points[:, 0].max() < width
    assert points[:, 1].min() > 14
    assert points[:, 1].max() < height - 30


def test_tooltips_say_the_values():
    root = draw(Series("a & b", [8, 14], [91.25, 92.5]))
    titles = [title.text for title in chart_of(root).iter("title")]
    assert titles == ["a & b\nepoch 8: 91.25", "a & b\nepoch 14: 92.5"]


def test_few_places_are_their_own_ticks():
    depths = [8, 14, 20, 32, 44, 56]
    root = draw(Series("a", depths, depths))
    labels = [text.text for text in chart_of(root).findall("text") if text.get("class") == "x"]
    assert labels == [str(depth) for depth in depths]


def test_epochs_have_whole_ticks():
    root = draw(Series("a", range(1, 10), range(1, 10)))
    labels = [text.text for text in chart_of(root).findall("text") if text.get("class") == "x"]
    assert all("." not in label for label in labels)
    assert len(labels) >= 3


def test_a_gap_cuts_the_line_and_lonely_points_stay_visible():
    nan, inf = math.nan, math.inf
    y = [1, 2, None, 3, nan, 4, 5, 6, inf, -inf]
    root = draw(Series("a", range(10), y))
    assert [len(read(line)) for line in lines_of(root)[0]] == [2, 3]
    assert len(chart_of(root).find("g").findall("path")) == 6
    long = [float(i) for i in range(100)]
    long[50] = long[52] = None
    root = draw(Series("a", range(100), long))
    titles = {path.find("title").text: path.get("class") for path in chart_of(root).find("g").findall("path")}
    assert titles["a\nepoch 51: 51"] is None  # not one of those that only the mouse finds


@pytest.mark.parametrize(
    "series",
    [
        [],
        [Series("a", [], [])],
        [Series("a", [1, 2, 3], [None, None, math.nan])],
        [Series("a", [1], [2.0])],
        [Series("a", [0], [0.0])],
        [Series("a", [1, 2, 3], [5.0, 5.0, 5.0])],
        [Series("a", range(450), [0.0] * 450)],
        [Series("a", [1, 2], [1.0, 1.0 + 1e-15])],
        [Series("a", [1, 2], [1e-310, 2e-310])],
        [Series("a", [1, 2], [-1.7e308, 1.7e308])],
        [Series("a", [1, 2, 3], [-9e299, 1.0, 9e299])],
        [Series("a", [math.nan, math.inf, 3], [1.0, 2.0, 3.0])],
        [Series("a", [1, 2], [1e16, 1e16 + 4])],
        [Series("a", [], []), Series("b", [1, 2], [3.0, 4.0])],
        [Series(f"s{i}", range(450), np.random.default_rng(i).normal(size=450)) for i in range(60)],
    ],
)
def test_odd_series_give_a_sound_chart(series):
    root = draw(*series)
    text = ET.tostring(root, encoding="unicode")
    for word in ("nan", "inf", "None", "np."):
        assert word not in text
    assert len(root.findall("ul/li")) == len(series)
    _, _, width, height = map(float, chart_of(root).get("viewBox").split())
    for line in [line for found in lines_of(root) for line in found]:
        points = read(line)
        assert (points >= 0).all()
        assert (points <= [width, height]).all()


def test_no_values_is_said():
    root = draw(Series("a", [1], [None]))
    assert "no values yet" in [text.text for text in chart_of(root).iter("text")]
    assert "(no values)" in "".join(root.find("ul").itertext())


def test_a_diverged_run_is_off_the_chart_and_says_so():
    fine = [4.6 * math.exp(-i / 20) for i in range(100)]
    diverged = [*fine[:40], 40.0, 1e4, 1e12, 1e30, *[None] * 56]
    root = draw(Series("fine", range(100), fine), Series("diverged", range(100), diverged))
    note = "Off the chart: 4 of 44 values of diverged, the farthest 1e30."
    assert [p.text for p in root.findall("p")] == [note]
    slope, offset = axis(root, "y")
    points = read(lines_of(root)[0][0])
    np.testing.assert_allclose(points[:, 1] * slope + offset, fine, atol=abs(slope) * 0.2)
    assert abs(slope) < 0.1  # the good run still fills the chart
    (line,) = lines_of(root)[1]
    assert len(read(line)) == 41  # up to the edge, not along it
    arrows = [path for path in chart_of(root).findall("g")[1].findall("path") if path.get("d").endswith("h-7.2z")]
    seen = [path.find("title").text for path in arrows if path.get("class") is None]
    assert seen[-2:] == ["diverged\nepoch 40: 40", "diverged\nepoch 43: 1e30"]


@pytest.mark.parametrize(
    "values",
    [
        [1.0] * 300 + [70.0] * 100,  # accuracy that rises late
        [math.exp(-40 * (1 - i / 100)) for i in range(101)],  # a narrow Gaussian kernel
        [4.6] + [1e-3] * 400,  # a loss that falls at once
        [10.0 + 0.2 * i for i in range(400)],
    ],
)
def test_what_is_no_divergence_stays_on_the_chart(values):
    assert usual_range([values], 20) == (min(values), max(values))


def test_thinning_keeps_ends_and_extremes():
    rng = random.Random(0)
    for n, most in [(450, 300), (5000, 300), (301, 300), (50, 4), (50, 3), (50, 0)]:
        points = [(i, rng.gauss(0, 1)) for i in range(n)]
        kept = thin(points, most)
        assert len(kept) <= max(most, 4)
        assert kept == sorted(set(kept) & set(points))
        assert kept[0] == points[0]
        assert kept[-1] == points[-1]
        lowest, highest = (find(points, key=lambda point: point[1]) for find in (min, max))
        assert lowest in kept
        assert highest in kept
    assert thin(points[:3], 0) == points[:3]


def test_a_long_line_is_thinned_and_its_extremes_can_be_read():
    y = [math.sin(i / 30) for i in range(2000)]
    y[777], y[1500] = 3.0, -4.0
    root = draw(Series("a", range(2000), y))
    assert len(read(lines_of(root)[0][0])) <= 300
    titles = [title.text for title in chart_of(root).iter("title")]
    for wanted in ("epoch 0: 0", "epoch 777: 3", "epoch 1500: \N{MINUS SIGN}4", "epoch 1999: "):
        assert any(wanted in title for title in titles)
    assert len(titles) < 60


def test_round_steps():
    assert round_step(0, 6, 6) == 1
    assert round_step(0, 7, 6) == 2
    assert round_step(0, 29, 6) == 5
    assert round_step(0, 0.6, 6) == pytest.approx(0.1)
    assert round_step(-1e30, 1e30, 6) == pytest.approx(5e29)
    assert [label for _, label in ticks(-0.3, 0.3, 0.1)] == [
        text.replace("-", "\N{MINUS SIGN}") for text in ["-0.3", "-0.2", "-0.1", "0", "0.1", "0.2", "0.3"]
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (93.126, "93.126"),
        (-3, "-3"),
        (271117, "271117"),
        (1.25e6, "1.25e6"),
        (2e30, "2e30"),
        (1.5e-7, "1.5e-7"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text.replace("-", "\N{MINUS SIGN}")


def test_lines_can_be_told_apart():
    root = draw(*[Series(f"s{i}", range(3), [i, i, i]) for i in range(24)])
    looks = [group.get("class") for group in chart_of(root).findall("g")]
    assert len(set(looks)) == 24
    keys = [key.get("class") for key in root.findall("ul/li/svg/g")]
    assert keys == looks


def test_the_papers_line_has_the_colour_of_ours():
    root = draw(
        Series("SM", [1, 2], [1, 2]),
        Series("SM random", [1, 2], [1, 2]),
        Series("SM random (paper)", [1, 2], [1, 2], dashed=True),
        Series("SMALL", [1, 2], [1, 2], dashed=True),
        Series("SM", [1, 2], [1, 2], dashed=True),
    )
    looks = [group.get("class").split() for group in chart_of(root).findall("g")]
    assert [color for color, _ in looks] == ["c0", "c1", "c1", "c2", "c0"]
    assert [dash for _, dash in looks] == ["d0", "d0", "paper", "paper", "paper"]


def test_lines_of_an_order_look_alike_in_all_charts():
    def looks(*labels):
        lines = [Series(label, [1, 2], [1, 2], dashed="paper" in label) for label in labels]
        root = ET.fromstring(figure(Chart("T", "x", "y", lines, order=["SM", "LIN", "SOP"])))
        keys = [key.find("path").get("d") for key in root.findall("ul/li/svg/g")]
        colors = [group.get("class").split()[0] for group in chart_of(root).findall("g")]
        return dict(zip(labels, zip(colors, keys, strict=True), strict=True))

    every, some = looks("SM", "LIN", "SOP", "more"), looks("SOP", "more", "SM", "SOP (paper)")
    assert len(set(every.values())) == 4
    assert all(some[label] == every[label] for label in ("SOP", "SM", "more"))
    assert some["SOP (paper)"] == some["SOP"]


def test_any_text_is_escaped():
    ugly = "<b>&\"'</svg>\x00\x1b\ud800é"
    chart = Chart(ugly, ugly, ugly, [Series(ugly, [1, 2], [1, 2])], [ugly])
    bars = BarChart(ugly, ugly, ugly, [ugly], {ugly: [1.0]}, [ugly])
    dots = DotChart(ugly, ugly, [ugly], {ugly: [1.0]}, [ugly])
    for made in map(figure, (chart, bars, dots)):
        made.encode()
        root = ET.fromstring(made)
        shown = "<b>&\"'</svg>\ufffd\ufffd\ufffdé"
        assert root.find("figcaption").text == shown
        assert root.find("svg").get("aria-label") == shown
        assert root.find("p").text == shown
        assert "".join(root.find("ul").itertext()).strip() == shown
        assert next(root.iter("title")).text.startswith(shown)


def test_bars_are_as_high_as_their_values():
    values = {"a": [1.0, 2.5, None], "b": [0.0, -1.5, 4.0]}
    root = ET.fromstring(figure(BarChart("Title", "coefficient", "value", ["x", "y", "z"], values)))
    svg = chart_of(root)
    slope, offset = axis(root, "y")
    bars = {bar.find("title").text: bar for bar in svg.findall("rect")}
    wanted = {"a\nx": 1.0, "a\ny": 2.5, "b\nx": 0.0, "b\ny": -1.5, "b\nz": 4.0}
    assert len(bars) == len(wanted)
    zero = -offset / slope
    for title, bar in bars.items():
        value = wanted[title.rpartition(":")[0]]
        assert value_of(title.rpartition(": ")[2]) == value
        top, height = float(bar.get("y")), float(bar.get("height"))
        assert height == pytest.approx(abs(value / slope), abs=0.7)
        assert (top if value < 0 else top + height) == pytest.approx(zero, abs=0.7)
    # Each bar in the room of its group, a before b.
    names = {text.text: float(text.get("x")) for text in svg.findall("text") if text.get("class") == "x"}
    room = names["y"] - names["x"]
    for title, bar in bars.items():
        group = title.partition("\n")[2].partition(":")[0]
        middle = float(bar.get("x")) + float(bar.get("width")) / 2
        assert abs(middle - names[group]) < room / 2
        assert (middle < names[group]) == title.startswith("a")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"a": []},
        {"a": [None, None]},
        {"a": [0.0, 0.0]},
        {"a": [math.nan, 1.0]},
        {"a": [1.0, 1e300], "b": [2.0, 3.0]},
        {f"k{i}": [1.0, 2.0] for i in range(40)},
    ],
)
def test_odd_bars_give_a_sound_chart(values):
    root = ET.fromstring(figure(BarChart("Title", "x", "y", ["p", "q"], values)))
    text = ET.tostring(root, encoding="unicode")
    assert "nan" not in text
    assert "inf" not in text
    assert len(root.findall("ul/li")) == len(values)


def test_bars_keep_large_coefficients_and_leave_off_exploded_ones():
    large = figure(BarChart("T", "x", "y", list("pqr"), {"a": [0.0, 1.0, 240.0]}))
    assert "Off the chart" not in large
    exploded = figure(BarChart("T", "x", "y", list("pqr"), {"a": [1.0, 1.0, 1e20], "b": [1.0, 2.0, 3.0]}))
    assert "Off the chart: 1 of 3 values of a, the farthest 1e20." in exploded


def test_dots_stand_beside_their_rows_at_their_values():
    rows, values = ["long name of a row", "p", "q"], {"a": [61.25, None, 70.0], "b": [58.0, 64.5, math.nan]}
    root = ET.fromstring(figure(DotChart("Title", "accuracy", rows, values)))
    svg = chart_of(root)
    assert root.get("class") == "wide"
    ticks_at = {value_of(text.text): float(text.get("x")) for text in svg.findall("text") if text.get("class") == "x"}
    (low, left), *_, (high, right) = sorted(ticks_at.items())
    assert low <= 58 < 70 <= high
    names = {text.text: float(text.get("y")) for text in svg.findall("text") if text.get("class") == "y"}
    assert list(names) == rows
    dots = {dot.find("title").text: dot.get("d") for dot in svg.iter("path")}
    assert list(dots) == ["long name of a row\na: 61.25", "q\na: 70", "long name of a row\nb: 58", "p\nb: 64.5"]
    for title, path in dots.items():
        row, _, value = title.partition("\n")
        x, y = (float(part) for part in re.match(r"M([\d.]+) ([\d.]+)m", path).groups())
        assert x == pytest.approx(left + (value_of(value[3:]) - low) / (high - low) * (right - left), abs=0.2)
        assert y == pytest.approx(names[row] - 4)
    assert float(svg.get("viewBox").split()[3]) > max(names.values())


@pytest.mark.parametrize(
    "values", [{}, {"a": [None, None]}, {"a": [3.0, 3.0]}, {"a": [math.inf, 1.0], "b": [-1e299, 1e299]}]
)
def test_odd_dots_give_a_sound_chart(values):
    root = ET.fromstring(figure(DotChart("Title", "x", ["p", "q"], values)))
    text = ET.tostring(root, encoding="unicode")
    assert "nan" not in text
    assert "inf" not in text
    assert len(root.findall("ul/li")) == len(values)


def test_same_data_same_text():
    rng = np.random.default_rng(0)
    series = [Series(f"s{i}", range(450), rng.normal(size=450).tolist()) for i in range(5)]
    chart = Chart("Title", "x", "y", series)
    assert figure(chart) == figure(chart)
