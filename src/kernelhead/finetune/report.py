"""What a classifier makes of test images: predictions as CSV, and one page of figures that needs no network."""

import base64
import csv
import html
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from kernelhead.files import needing, write_bytes
from kernelhead.finetune.data import Images
from kernelhead.finetune.images import read_image
from kernelhead.finetune.saved import SavedClassifier
from kernelhead.inspection.plot import BLUE, GREY, ORANGE, write_plot
from kernelhead.metrics import summary

CURVES_FILE, KERNEL_FILE = "curves.png", "kernel.png"
PREDICTIONS_FILE, REPORT_FILE = "predictions.csv", "report.html"
COLUMNS = ("image", "class", "predicted", "probability", "class_probability", "seen_in_training")
BINS = 15  # of confidence
ERRORS, CONFUSIONS, THUMBNAIL = 24, 12, 112  # errors and pairs of classes that are shown; pixels
NAMED_CLASSES = 40  # a confusion matrix of more has no room for their names
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; max-width: 1060px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #d8dde3 }
table { border-collapse: collapse } td, th { padding: .15em .9em .15em 0; text-align: right }
td:first-child, th:first-child { text-align: left } tbody tr:hover { background: #eef3f8 }
img { max-width: 100% } .scroll { max-height: 30em; overflow: auto; display: inline-block }
.errors { display: flex; flex-wrap: wrap; gap: 12px } figure { margin: 0; width: 150px; font-size: 12px }
figure img { height: 112px } figcaption { overflow-wrap: anywhere } b { color: #1a5aa0 } .note { color: #a04a05 }
pre { background: #f4f6f8; padding: 1em; overflow: auto }
"""


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
    """Write report.html and its charts about test images (n) with logits (n, C), and the records of a training."""
    labels, classes = images.labels, saved.classes
    count, predicted = len(classes), logits.argmax(1)
    confusion = torch.bincount(labels * count + predicted, minlength=count**2).view(count, count)
    title = f"{Path(saved.spec.data).name}: {saved.spec.head} on {saved.spec.backbone}"
    parts = [f"<h1>{html.escape(title)}</h1>", _figures(saved, images, logits)]
    if records:
        content = _curves(records)
        write_bytes(folder / CURVES_FILE, content)
        parts += ["<h2>Learning curves</h2>", _inline(content)]
    parts += ["<h2>Confusion matrix</h2>", _inline(_matrix(confusion, classes)), _most_confused(confusion, classes)]
    parts += ["<h2>Classes</h2>", _per_class(confusion, classes)]
    parts += ["<h2>Reliability</h2>", _inline(_reliability(logits, labels))]
    if hasattr(saved.head, "kernel"):
        write_plot(folder / KERNEL_FILE, saved.head.describe(classes=classes))
        parts += ["<h2>Kernel</h2>", _inline((folder / KERNEL_FILE).read_bytes())]
    parts += ["<h2>Most confident errors</h2>", _errors(images, logits, classes)]
    settings = html.escape(yaml.safe_dump(saved.spec.as_dict(), sort_keys=False, allow_unicode=True))
    parts += [f"<h2>Settings</h2><details><summary>All settings of the run</summary><pre>{settings}</pre></details>"]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    page = f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
    write_bytes(folder / REPORT_FILE, page.encode())


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
    return _table((), rows) + note


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _inline(content: bytes, kind: str = "png") -> str:
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'


def _panels(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    with needing("a report", "plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # of letters that the font lacks; the page's tables have them
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curves(records: Sequence[dict[str, Any]]) -> bytes:
    figure, panels = _panels(3, 12, 3.4)
    pairs = (("loss", "val_loss"), ("accuracy", "val_accuracy"), ("learning_rate",))
    for panel, names, what in zip(panels, pairs, ("loss", "accuracy, %", "learning rate"), strict=True):
        for name, color in zip(names, (BLUE, ORANGE), strict=False):
            seen = [(each["epoch"], each[name]) for each in records if each.get(name) is not None]
            if seen:
                label = "validation" if name.startswith("val_") else "training"
                panel.plot(*zip(*seen, strict=True), color=color, label=label, marker="." if len(seen) < 40 else None)
        panel.set(xlabel="epoch", ylabel=what)
    panels[0].legend(frameon=False)
    return _png(figure)


def _matrix(confusion: Tensor, classes: Sequence[str]) -> bytes:
    side = min(11.0, 3.5 + 0.28 * len(classes))
    figure, (panel,) = _panels(1, side + 1, side)
    shares = confusion / confusion.sum(1, keepdim=True).clamp_min(1)
    shown = panel.imshow((100 * shares).numpy(), cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(shown, ax=panel, label="% of the images of a class", shrink=0.7)
    panel.set(xlabel="predicted", ylabel="class")
    if len(classes) <= NAMED_CLASSES:
        names = [name.replace("$", r"\$") for name in classes]
        panel.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        panel.set_yticks(range(len(names)), names, fontsize=8)
        for row, column in confusion.nonzero().tolist() if len(classes) <= NAMED_CLASSES // 2 else ():
            color = "white" if shares[row, column] > 0.5 else "black"
            panel.text(column, row, int(confusion[row, column]), ha="center", va="center", fontsize=7, color=color)
    return _png(figure)


def _most_confused(confusion: Tensor, classes: Sequence[str]) -> str:
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    most = [index for index in wrong.argsort(descending=True, stable=True)[:CONFUSIONS].tolist() if wrong[index]]
    rows = [(classes[index // len(classes)], classes[index % len(classes)], int(wrong[index])) for index in most]
    return _table(("class", "taken for", "images"), rows) if rows else "<p>No image is taken for another class.</p>"


def _per_class(confusion: Tensor, classes: Sequence[str]) -> str:
    right, own, taken = confusion.diag(), confusion.sum(1), confusion.sum(0)
    rows = []
    for label, name in enumerate(classes):
        hits, of, guesses = int(right[label]), int(own[label]), int(taken[label])
        precision, recall = (f"{100 * hits / each:.1f} %" if each else "" for each in (guesses, of))
        f1 = f"{200 * hits / (of + guesses):.1f} %" if of + guesses else ""
        rows.append((name, of, guesses, precision, recall, f1))
    return _table(("class", "images", "predicted", "precision", "recall", "F1"), rows)


def _reliability(logits: Tensor, labels: Tensor) -> bytes:
    confidence, predicted = logits.double().softmax(1).max(1)
    bin_of = (confidence * BINS).long().clamp_max(BINS - 1)
    counts = torch.bincount(bin_of, minlength=BINS)
    sums = [torch.bincount(bin_of, each, minlength=BINS) for each in (confidence, (predicted == labels).double())]
    full = counts > 0
    mean, accuracy = (each[full] / counts[full] for each in sums)
    figure, (diagram, histogram) = _panels(2, 9, 3.6)
    diagram.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    diagram.plot(mean.numpy(), accuracy.numpy(), color=BLUE, marker="o", markersize=4)
    diagram.set(xlabel="probability of the predicted class", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    centres = (torch.arange(BINS) + 0.5) / BINS
    histogram.bar(centres.numpy(), (100 * counts / len(labels)).numpy(), width=0.9 / BINS, color=BLUE)
    histogram.set(xlabel="probability of the predicted class", ylabel="% of the images", xlim=(0, 1))
    return _png(figure)


def _errors(images: Images, logits: Tensor, classes: Sequence[str]) -> str:
    from PIL import Image

    confidence, predicted = logits.double().softmax(1).max(1)
    wrong = torch.where(predicted != images.labels, confidence, -1.0)
    shown = []
    for index in wrong.argsort(descending=True, stable=True)[:ERRORS].tolist():
        if wrong[index] < 0:
            break
        source = images.sources[index]
        pixels = source.cpu() if isinstance(source, Tensor) else read_image(source, THUMBNAIL)
        image, buffer = Image.fromarray(pixels.permute(1, 2, 0).numpy()), io.BytesIO()
        image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
        image.save(buffer, format="PNG" if max(image.size) <= THUMBNAIL else "JPEG", quality=85)
        kind = "png" if max(image.size) <= THUMBNAIL else "jpeg"
        name, label, _ = images.named[index]
        words = [html.escape(each) for each in (classes[label], classes[int(predicted[index])], name)]
        said = f"{words[0]}, taken for <b>{words[1]}</b>, {100 * confidence[index]:.1f} %<br>{words[2]}"
        shown.append(f"<figure>{_inline(buffer.getvalue(), kind)}<figcaption>{said}</figcaption></figure>")
    return f"<div class=errors>{''.join(shown)}</div>" if shown else "<p>There are none.</p>"
