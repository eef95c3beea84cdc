"""The page about test images: all of it is in one file, and its figures are those of a count by hand."""

import base64
import csv
import html
import io
import re
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from plotly.offline import get_plotlyjs

from kernelhead.finetune.data import open_data
from kernelhead.finetune.evaluation import logits_of
from kernelhead.finetune.report import write_predictions, write_report
from kernelhead.finetune.saved import SavedClassifier, create_classifier, head_of
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(colours):
    """An untrained classifier of images, one of which is in training and in testing, and what it says."""
    spec = resolved(TrainSpec(str(colours / "images"), "tiny_networks:tiny", "kernel", seed=1))
    data = open_data(spec, CPU)
    model = create_classifier(spec, 3).eval()
    files = {"train": [*data.files["train"], data.files["test"][0]], "test": data.files["test"]}
    saved = SavedClassifier(model, head_of(model), ["<blue>", "$green", "红"], spec, data.input, files)
    return saved, data, logits_of(model, data, data.test)


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    saved, data, logits = made
    folder = tmp_path_factory.mktemp("page")
    record = {"loss": 1.5, "accuracy": 50.0, "learning_rate": 0.1, "val_loss": None, "val_accuracy": None}
    write_report(folder, saved, data.test, logits, [{"epoch": epoch, **record} for epoch in (1, 2)])
    return folder


def cells(text):
    """The rows of all tables of a page."""
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[html.unescape(each) for each in re.findall(r"<td>(.*?)</td>", row)] for row in rows if "<td>" in row]


def test_the_page_needs_nothing_else(page):
    text = (page / "report.html").read_text()
    assert {path.name for path in page.iterdir()} == {"report.html"}
    script = get_plotlyjs()
    assert text.count(script) == 1
    text = text.replace(script, "")
    assert not re.search(r"https?://(?!plot\.ly)|src=\"(?!data:)|<script[^>]+src|@import", text)
    ids = re.findall(r'<div id="([^"]+)"', text)
    assert ids[:3] == ["curves-loss", "curves-accuracy", "matrix"]
    assert {"reliability", "probabilities", "kernel-own", "coefficients-own"} < set(ids)
    assert text.count("Plotly.newPlot") == len(ids) == text.count('role="img" aria-label="')
    images = re.findall(r'src="data:image/(?:png|jpeg);base64,([^"]+)"', text)
    decoded = [Image.open(io.BytesIO(base64.b64decode(each))) for each in images]
    assert decoded
    assert all(min(image.size) > 10 for image in decoded)
    assert 'alt=""' not in text
    assert "<blue>" not in text
    assert "&lt;blue&gt;" in text


def test_its_figures_are_those_of_a_count(made, page):
    saved, data, logits = made
    rows = cells((page / "report.html").read_text())
    labels, predicted = data.test.labels.tolist(), logits.argmax(1).tolist()
    right = sum(a == b for a, b in zip(labels, predicted, strict=True))
    share, z = right / 12, 1.96  # Wilson's interval
    centre, half = share + z**2 / 24, z * (share * (1 - share) / 12 + z**2 / 576) ** 0.5
    low, high = (100 * each / (1 + z**2 / 12) for each in (centre - half, centre + half))
    assert rows[0] == ["accuracy", f"{100 * share:.2f} % (95 % interval {low:.1f} to {high:.1f})"]
    assert ["images for train", "49"] in rows
    for label, name in enumerate(saved.classes):
        hits = sum(a == b == label for a, b in zip(labels, predicted, strict=True))
        guesses = predicted.count(label)
        own = next(row for row in rows if row[0] == name and len(row) == 6)
        assert own[1:3] == [str(labels.count(label)), str(guesses)]
        assert own[4] == f"{100 * hits / labels.count(label):.1f} %"
        assert own[3] == (f"{100 * hits / guesses:.1f} %" if guesses else "")
    pairs = Counter((a, b) for a, b in zip(labels, predicted, strict=True) if a != b)
    confused = {tuple(row) for row in rows if len(row) == 3 and row[2].isdigit() and row[0] in saved.classes}
    assert confused == {(saved.classes[a], saved.classes[b], str(count)) for (a, b), count in pairs.items()}
    text = (page / "report.html").read_text()
    assert text.count("<figcaption>") == sum(pairs.values())
    assert "1 of these images were in the training" in text


def test_predictions_as_csv(made, tmp_path):
    saved, data, logits = made
    write_predictions(tmp_path / "predictions.csv", saved, data.test, logits)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "predictions.csv").read_text())))
    assert [row["image"] for row in rows] == [name for name, _, _ in data.test.named]
    assert [row["seen_in_training"] for row in rows] == ["yes"] + ["no"] * 11
    shares = np.exp(logits.double().numpy())
    shares /= shares.sum(1, keepdims=True)
    for row, label, own in zip(rows, data.test.labels.tolist(), shares, strict=True):
        assert row["class"] == saved.classes[label]
        assert row["predicted"] == saved.classes[own.argmax()]
        assert float(row["probability"]) == pytest.approx(own.max(), rel=1e-4)
        assert float(row["class_probability"]) == pytest.approx(own[label], rel=1e-4)


def test_a_perfect_classifier_with_many_classes(made, tmp_path):
    saved, data, _ = made
    logits = torch.full((12, 3), -9.0).scatter_(1, data.test.labels[:, None], 9.0)
    write_report(tmp_path, saved, data.test, logits)
    text = (tmp_path / "report.html").read_text()
    assert "No image is taken for another class." in text
    assert "There are none." in text
    assert "Learning curves" not in text


def test_without_plotly_it_is_one_sentence(made, tmp_path, monkeypatch):
    saved, data, logits = made
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ModuleNotFoundError, match=r"a report needs plotly.*; install it with pip install 'kern"):
        write_report(tmp_path, saved, data.test, logits)
