"""What a classifier makes of test images: predictions as CSV, and one page of figures that needs no network."""

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from kernelhead import page
from kernelhead.files import write_bytes
from kernelhead.finetune.data import Images
from kernelhead.finetune.images import Source, read_image
from kernelhead.finetune.saved import SavedClassifier, load_classifier
from kernelhead.inspection.plot import kernel_charts
from kernelhead.metrics import summary
from kernelhead.page import BLUE, GREY
from kernelhead.tables import Table

PREDICTIONS_FILE, REPORT_FILE = "predictions.csv", "report.html"
COLUMNS = ("image", "class", "predicted", "probability", "class_probability", "seen_in_training")
BINS = 15  # of confidence
ERRORS, CONFUSIONS, THUMBNAIL = 24, 12, 112  # errors and pairs of classes that are shown; pixels
NAMED_CLASSES = 40  # a confusion matrix of more has no room for their names


def write_predictions(path: Path, saved: SavedClassifier, images: Images, logits: Tensor) -> None:
    """Write one line per image: its class, the predicted one, and the probabilities of both."""
    probabilities = logits.double().softmax(1)
    likeliest, predicted = (each.tolist() for each in probabilities.max(1))
    own = probabilities.gather(1, images.labels[:, None]).squeeze(1).tolist()
    trained_on = saved.trained_on()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (name, label, mark), guess, high, probability in zip(images.named, predicted, likeliest, own, strict=True):
        seen = "yes" if mark in trained_on else "no"
        writer.writerow([name, saved.classes[label], saved.classes[guess], f"{high:.6g}", f"{probability:.6g}", seen])
    write_bytes(path, text.getvalue().encode())


def write_report(
    folder: Path, saved: SavedClassifier, images: Images, logits: Tensor, records: Sequence[dict[str, Any]] = ()
) -> None:
    """Write report.html about test images (n) with logits (n, C), and the records of a training."""
    labels, classes = images.labels, saved.classes
    count, predicted = len(classes), logits.argmax(1)
    confusion = torch.bincount(labels * count + predicted, minlength=count**2).view(count, count)
    title = f"{Path(saved.spec.data).name}: {saved.spec.head} on {saved.spec.backbone}"
    parts = [_figures(saved, images, logits)]
    if records:
        parts += ["<h2>Learning curves</h2>", _curves({"": records})]
    parts += ["<h2>Confusion matrix</h2>", _matrix(confusion, classes), _most_confused(confusion, classes)]
    parts += ["<h2>Classes</h2>", _per_class(confusion, classes)]
    parts += ["<h2>Reliability</h2>", _reliability(logits, labels)]
    if hasattr(saved.head, "kernel"):
        parts += ["<h2>Kernel</h2>", kernel_charts(saved.head.describe())]
    parts += ["<h2>Most confident errors</h2>", _errors(images, logits, classes)]
    settings = html.escape(yaml.safe_dump(saved.spec.as_dict(), sort_keys=False, allow_unicode=True))
    parts += [f"<h2>Settings</h2><details><summary>All settings of the run</summary><pre>{settings}</pre></details>"]
    write_bytes(folder / REPORT_FILE, page.document(title, "".join(parts)))


def figure(source: Source | Tensor, name: str, caption: str) -> str:
    """Return a thumbnail of an image (3, H, W); its name and its caption are HTML."""
    from PIL import Image

    pixels = source.cpu() if isinstance(source, Tensor) else read_image(source, THUMBNAIL)
    image, buffer = Image.fromarray(pixels.permute(1, 2, 0).numpy()), io.BytesIO()
    image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    kind = "png" if max(image.size) <= THUMBNAIL else "jpeg"
    image.save(buffer, format=kind, quality=85)
    return f"<figure>{_inline(buffer.getvalue(), kind, name)}<figcaption>{caption}</figcaption></figure>"


def write_comparison(folder: Path, table: Table, runs: Mapping[str, Path]) -> None:
    """Write report.html about heads beside one another: their table, and figures from the folder of a run of each."""
    lines = {head: (run / "metrics.jsonl").read_text().splitlines() for head, run in runs.items()}
    records = {head: [each for each in map(json.loads, found) if "epoch" in each] for head, found in lines.items()}
    parts = [page.table(table.columns, table.rows), *(f"<p>{html.escape(note)}</p>" for note in table.notes)]
    parts += ["<h2>Learning curves</h2>", _curves(records)]
    for head, run in runs.items():
        saved, text = load_classifier(run), (run / PREDICTIONS_FILE).read_text(encoding="utf-8")
        index = {name: number for number, name in enumerate(saved.classes)}
        confusion = torch.zeros(len(index), len(index), dtype=torch.int64)
        for row in csv.DictReader(io.StringIO(text, newline="")):
            confusion[index[row["class"]], index[row["predicted"]]] += 1
        words = html.escape(head)
        parts += [f"<h2>Confusion matrix of {words}</h2>", _matrix(confusion, saved.classes, f"matrix-{words}")]
        if hasattr(saved.head, "kernel"):
            parts += [f"<h2>Kernel of {words}</h2>", kernel_charts(saved.head.describe(), words)]
    write_bytes(folder / REPORT_FILE, page.document(f"Heads beside one another: {table.title}", "".join(parts)))


def _figures(saved: SavedClassifier, images: Images, logits: Tensor) -> str:
    from scipy.stats import binomtest

    found, right = summary(logits, images.labels), int((logits.argmax(1) == images.labels).sum())
    low, high = (100 * each for each in binomtest(right, len(images)).proportion_ci(method="wilson"))
    rows = [("accuracy", f"{found['accuracy']:.2f} % (95 % interval {low:.1f} to {high:.1f})")]
    rows += [("top-5 accuracy", f"{found['top5']:.2f} %")] if "top5" in found else []
    rows += [("NLL", f"{found['nll']:.4f}"), ("calibration error (ECE)", f"{found['ece']:.2f} %")]
    rows += [("test images", f"{len(images):,}"), ("wrong", f"{len(images) - right:,}")]
    rows += [(f"images for {part}", f"{len(each):,}") for part, each in saved.files.items() if part != "test"]
    seen = sum(mark in saved.trained_on() for _, _, mark in images.named)
    note = f'<p class="note">{seen:,} of these images were in the training.</p>' if seen else ""
    return page.table((), rows) + note


def _inline(content: bytes, kind: str, alt: str) -> str:
    return f'<img alt="{alt}" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'


def _curves(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Charts of loss and accuracy over epochs, with a colour per run and dots for validation."""
    drawn = []
    for what, unit in (("loss", ""), ("accuracy", ", %")):
        figure = page.plot("epoch", what + unit)
        for color, (run, records) in zip(page.COLORS, runs.items(), strict=False):
            for name, label, dash in ((what, "training", "solid"), (f"val_{what}", "validation", "dot")):
                seen = [(each["epoch"], each[name]) for each in records if each.get(name) is not None]
                if seen:
                    x, y = zip(*seen, strict=True)
                    line = {"color": color, "dash": dash}
                    figure.add_scatter(x=x, y=y, name=f"{run} {label}".strip(), line=line, mode="lines+markers")
        drawn.append(page.chart(figure, f"curves-{what}", f"{what} of each epoch"))
    return page.charts(*drawn)


def _matrix(confusion: Tensor, classes: Sequence[str], name: str = "matrix") -> str:
    """A chart of the share of each class that is taken for each class, with counts under the mouse."""
    shares = 100 * confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    figure = page.plot("predicted", "class", height=max(380, min(1100, 140 + 22 * len(classes))))
    names = [html.escape(each) for each in classes]
    shown = {"x": names, "y": names, "z": shares.tolist(), "text": confusion.tolist(), "colorscale": "Blues"}
    hover = "%{y} taken for %{x}: %{text} images, %{z:.1f} %<extra></extra>"
    figure.add_heatmap(**shown, zmin=0, zmax=100, hovertemplate=hover, colorbar={"title": "%", "thickness": 12})
    if len(classes) <= NAMED_CLASSES // 2:
        figure.update_traces(texttemplate="%{text}")
    figure.update_xaxes(type="category", showticklabels=len(classes) <= NAMED_CLASSES)
    figure.update_yaxes(type="category", showticklabels=len(classes) <= NAMED_CLASSES, autorange="reversed")
    return page.chart(figure, name, "Confusion matrix; the tables below name the largest errors")


def _reliability(logits: Tensor, labels: Tensor) -> str:
    confidence, predicted = logits.double().softmax(1).max(1)
    bin_of = (confidence * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(bin_of, minlength=BINS)
    sums = [torch.bincount(bin_of, each, minlength=BINS) for each in (confidence, (predicted == labels).double())]
    full = counts > 0
    mean, right = ((each[full] / counts[full]).tolist() for each in sums)
    diagram = page.plot("probability of the predicted class", "share that is right")
    diagram.add_scatter(x=[0, 1], y=[0, 1], line={"color": GREY, "width": 1}, mode="lines", name="calibrated")
    diagram.add_scatter(x=mean, y=right, line={"color": BLUE}, mode="lines+markers", name="measured")
    histogram = page.plot("probability of the predicted class", "% of the images")
    centres = ((torch.arange(BINS) + 0.5) / BINS).tolist()
    histogram.add_bar(x=centres, y=(100 * counts / len(labels)).tolist(), marker_color=BLUE)
    drawn = [page.chart(diagram, "reliability", "Share of right predictions over their probability")]
    return page.charts(*drawn, page.chart(histogram, "probabilities", "Histogram of the predicted probabilities"))


def _most_confused(confusion: Tensor, classes: Sequence[str]) -> str:
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    most = [index for index in wrong.argsort(descending=True, stable=True)[:CONFUSIONS].tolist() if wrong[index]]
    rows = [(classes[index // len(classes)], classes[index % len(classes)], int(wrong[index])) for index in most]
    return page.table(("class", "taken for", "images"), rows) if rows else "<p>No image is taken for another class.</p>"


def _per_class(confusion: Tensor, classes: Sequence[str]) -> str:
    right, own, taken = confusion.diag(), confusion.sum(1), confusion.sum(0)
    rows = []
    for label, name in enumerate(classes):
        hits, of, guesses = int(right[label]), int(own[label]), int(taken[label])
        precision, recall = (f"{100 * hits / each:.1f} %" if each else "" for each in (guesses, of))
        f1 = f"{200 * hits / (of + guesses):.1f} %" if of + guesses else ""
        rows.append((name, of, guesses, precision, recall, f1))
    return page.table(("class", "images", "predicted", "precision", "recall", "F1"), rows)


def _errors(images: Images, logits: Tensor, classes: Sequence[str]) -> str:
    confidence, predicted = logits.double().softmax(1).max(1)
    wrong = torch.where(predicted != images.labels, confidence, -1.0)
    shown = []
    for index in wrong.argsort(descending=True, stable=True)[:ERRORS].tolist():
        if wrong[index] < 0:
            break
        name, label, _ = images.named[index]
        words = [html.escape(each) for each in (classes[label], classes[int(predicted[index])], name)]
        said = f"{words[0]}, taken for <b>{words[1]}</b>, {100 * confidence[index]:.1f} %<br>{words[2]}"
        shown.append(figure(images.sources[index], words[2], said))
    return f'<div class="errors">{"".join(shown)}</div>' if shown else "<p>There are none.</p>"
