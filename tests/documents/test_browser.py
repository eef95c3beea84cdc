"""The built site and the pages of runs, as a real browser shows them: light, dark, narrow, under the mouse."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernelhead.finetune.data import open_data
from kernelhead.finetune.evaluation import logits_of
from kernelhead.finetune.report import write_report
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec
from kernelhead.tables import Table

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-unsafe-swiftshader"
).split()
NARROW, WIDE = {"width": 400, "height": 800}, {"width": 1280, "height": 900}
PATIENCE = 300_000  # milliseconds that a busy machine may take
CONTRAST = """() => {
  const channels = (color) => { const c = document.createElement('canvas'); c.width = c.height = 1;
    const d = c.getContext('2d'); d.fillStyle = color; d.fillRect(0, 0, 1, 1);
    return [...d.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] / 255 + below[i] * (1 - top[3] / 255));
  const behind = (e) => { const all = []; for (; e; e = e.parentElement) all.push(getComputedStyle(e).backgroundColor);
    return all.reverse().map(channels).reduce((below, top) => over(top, below), [255, 255, 255]); };
  const poor = [];
  for (const e of document.querySelectorAll('p, li, td, th, h1, h2, h3, a, figcaption, code, dt, dd')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.offsetParent || e.closest('.headerlink, .plotly-graph-div')) continue;
    const style = getComputedStyle(e), ground = behind(e);
    const [a, b] = [light(over(channels(style.color), ground)), light(ground)].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    if ((a + .05) / (b + .05) < (large ? 3 : 4.5)) poor.push(`${e.textContent.trim().slice(0, 40)}: `
      + `${((a + .05) / (b + .05)).toFixed(2)} of ${style.color} on ${ground}`);
  }
  return poor;
}"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install 'kernelhead[dev]'")
    with playwright.sync_playwright() as found:
        opened = found.chromium.launch(executable_path=path, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="needs pip install 'kernelhead[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    yield from _served(folder)


@pytest.fixture(scope="module")
def pages(tmp_path_factory, colours):
    """The address of a folder with the page of a run, and a page of the laboratory with turning spheres."""
    from kernelhead_lab.report.charts import curves_chart
    from kernelhead_lab.report.page import Section, write_page
    from kernelhead_lab.report.sphere import Panel, sphere_figure
    from kernelhead_lab.tables.synthetic_data import draw

    folder = tmp_path_factory.mktemp("pages")
    spec = resolved(TrainSpec(str(colours / "images"), "tiny_networks:tiny", "landmarks", seed=1))
    data = open_data(spec, torch.device("cpu"))
    model = create_classifier(spec, 3).eval()
    saved = SavedClassifier(model, head_of(model), data.classes, spec, data.input, data.files)
    record = {"loss": 1.5, "accuracy": 50.0, "val_loss": 1.2, "val_accuracy": 60.0}
    records = [{"epoch": epoch, **record} for epoch in (1, 2, 3)]
    write_report(folder, saved, data.test, logits_of(model, data, data.test), records)
    (folder / "report.html").rename(folder / "run.html")
    spheres = sphere_figure(
        [Panel("Upper", lambda u: (u[:, 2] > 0) * 1.0), Panel("Lower", lambda u: (u[:, 2] < 0) * 1.0)],
        draw(0, per_class=50),
    )
    table = Table(
        "t", "A table", ["Network", "ours", "paper's"], [["ResNet-8", "84.01 ± 0.20", "not run"]], ["A note."]
    )
    curves = curves_chart("Loss", {"SM": [3.0, 2.0, 1.0], "Ours": [2.5, 1.5, 1.0]}, "loss")
    write_page(folder / "laboratory.html", "Tables", [Section(table, [curves]), Section(table, [spheres])])
    yield from _served(folder)


def _served(folder):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def visit(browser, address, *, viewport=WIDE, scheme="light"):
    """Open a page; return it with what went wrong on it, which later steps add to."""
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = ("data:", "blob:", address.rsplit("/", address.count("/") - 2)[0])
    page.on("request", lambda asked: None if asked.url.startswith(own) else wrong.append(f"asks {asked.url}"))
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page, wrong


def addresses(served):
    folder, address = served
    return [f"{address}/{path.relative_to(folder).as_posix()}" for path in sorted(folder.rglob("*.html"))]


def check_every_page(browser, served):
    """No page has an error, asks for anything elsewhere, is wider than a narrow window, or is hard to read."""
    faults = []
    for address in addresses(served):
        for viewport, scheme in ((WIDE, "light"), (NARROW, "dark")):
            page, wrong = visit(browser, address, viewport=viewport, scheme=scheme)
            wide = page.evaluate("document.documentElement.scrollWidth")
            faults += [f"{address}, {scheme}: {each}" for each in wrong]
            faults += [f"{address} is {wide} pixels wide in a window of {viewport['width']}"] * (
                wide > viewport["width"]
            )
            faults += [f"{address}, {scheme}: contrast of {each}" for each in page.evaluate(CONTRAST)]
            bare = page.evaluate(
                "[...document.querySelectorAll('img')].filter((e) => !e.alt).map((e) => e.src.slice(0, 80))"
            )
            faults += [f"{address}: no words for {each}" for each in bare]
            page.context.close()
    assert not faults, "\n".join(faults)


def test_every_page_of_the_site(browser, site):
    assert len(addresses(site)) > 40
    check_every_page(browser, site)


def test_every_page_of_figures(browser, pages):
    check_every_page(browser, pages)


def test_search_finds_landmarks(browser, site):
    page, wrong = visit(browser, site[1] + "/index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type("landmarks")
    found = page.locator(".md-search-result__item h1")
    found.first.wait_for()
    titles = " ".join(found.all_inner_texts()).lower()
    assert "landmarks" in titles
    assert not wrong
    page.context.close()


@pytest.mark.parametrize("name", ["run", "laboratory"])
def test_charts_show_values_under_the_mouse(browser, pages, name):
    page, wrong = visit(browser, f"{pages[1]}/{name}.html")
    chart = page.locator(".plotly-graph-div:has(.cartesianlayer .scatterlayer .trace)").first
    chart.scroll_into_view_if_needed()
    chart.locator(".scatterlayer .trace .point").first.hover(force=True)
    page.locator(".hoverlayer .hovertext").first.wait_for()
    shown = page.locator(".hoverlayer").all_text_contents()
    assert any(each.isdigit() for each in "".join(shown))
    assert not wrong
    page.context.close()


def test_the_confusion_matrix_shows_counts(browser, pages):
    page, _ = visit(browser, pages[1] + "/run.html")
    plot = page.locator("#matrix .draglayer .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 6, box["y"] + box["height"] / 6)
    page.locator("#matrix .hovertext").first.wait_for()
    assert "taken for" in page.locator("#matrix .hoverlayer").text_content()
    page.context.close()


def test_the_spheres_turn_together(browser, pages):
    page, wrong = visit(browser, pages[1] + "/laboratory.html")
    eyes = """() => { const plot = [...document.querySelectorAll('.plotly-graph-div')].find((e) => e.layout.scene2);
      return ['scene', 'scene2'].map((name) => plot._fullLayout[name]._scene.getCamera().eye); }"""
    before = page.evaluate(eyes)
    chart = page.locator(".plotly-graph-div:has(.gl-container canvas)").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    x, y = box["x"] + box["width"] / 4, box["y"] + box["height"] * 0.6
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 9):
        page.mouse.move(x + 12 * step, y + 3 * step)
    page.mouse.up()
    page.wait_for_function(
        f"(before) => {{ const now = ({eyes})(); return Math.abs(now[0].x - before[0].x) > 0.05"
        " && Math.abs(now[0].x - now[1].x) < 0.05 && Math.abs(now[0].z - now[1].z) < 0.05; }",
        arg=before,
    )
    assert not wrong
    page.context.close()
