"""What a trained classifier is for: `kernelhead evaluate | predict | select | inspect | export`."""

import csv
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from kernelhead.cli._console import app, check_folder, console, print_plain, printable, say, sentence_of
from kernelhead.cli._progress import steps_bar
from kernelhead.cli.train import show_figures

Format = StrEnum("Format", ["table", "json", "csv"])

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a run, or its model.safetensors.")]
ImagesArgument = Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Image files, or folders of them.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.command()
def evaluate(
    model: ModelArgument,
    data: Annotated[str | None, typer.Option(help="Data set or folder, instead of its own test images.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, a page, and predictions.csv.")] = None,
    device: DeviceOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a trained classifier on test images.

    Its own test images are the files that it was tested with at the end of its training, whatever was added since.
    """
    from kernelhead.finetune.data import shortened
    from kernelhead.finetune.distributed import choose_device
    from kernelhead.finetune.evaluation import evaluate_classifier
    from kernelhead.finetune.saved import load_classifier

    if out is not None:
        check_folder(out)
    saved = load_classifier(model)
    with steps_bar("nothing was changed") as progress:
        result = evaluate_classifier(saved, data, choose_device(device), progress, out)
    seen = result["seen_in_training"]
    if seen:
        say(f"{len(seen)} of the {result['images']} images were in the training: {shortened(seen)}")
    if json_output:
        print(json.dumps(result, indent=1))
    else:
        show_figures(f"{data or saved.spec.data}, {result['images']} images", result)
        if out is not None:
            print_plain(f"Written {out / 'report.html'} and {out / 'predictions.csv'}")


@app.command()
def predict(
    model: ModelArgument,
    images: ImagesArgument,
    output: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    out: Annotated[Path | None, typer.Option(help="File to write instead, .csv or .parquet.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to name per image.")] = 1,
    device: DeviceOption = "auto",
) -> None:
    """Name the class of images, with its probability.

    With --out, any number of images takes the same memory, and the same command goes on after an interruption. An
    image that cannot be read has a row without a class there.
    """
    from kernelhead.finetune import prediction
    from kernelhead.finetune.data import shortened
    from kernelhead.finetune.distributed import choose_device
    from kernelhead.finetune.images import expand
    from kernelhead.finetune.saved import load_classifier

    saved, place = load_classifier(model), choose_device(device)
    total = sum(1 for _ in expand(images))
    if out is not None:
        with steps_bar() as progress:
            broken = prediction.predict_into(out, saved, expand(images), place, total, top, progress)
        print_plain(f"Written {out}, {total:,} images")
        exit_if([f"{len(broken)} images cannot be read: {shortened(broken)}"] if broken else [])
        return
    with steps_bar("nothing was changed") as progress:
        seen = prediction.classify_files(saved, expand(images), place, total=total, progress=progress)
        found = list(prediction.predictions(saved, seen, top))
    rows = [dict(zip(prediction.COLUMNS, row, strict=True)) for wrong, own in found if not wrong for row in own]
    if output == "json":
        print(json.dumps(rows, indent=1))
    elif output == "csv":
        writer = csv.DictWriter(sys.stdout, prediction.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: printable(str(value)) for name, value in each.items()} for each in rows)
    else:
        table = RichTable(*(Column(name, overflow="fold") for name in prediction.COLUMNS))
        for each in rows:
            image, named = (Text(printable(str(each[name]))) for name in ("image", "class"))
            table.add_row(image, named, f"{each['probability']:.4f}")
        console.print(table)
    exit_if([wrong for wrong, _ in found if wrong])


@app.command()
def select(
    model: ModelArgument,
    images: ImagesArgument,
    budget: Annotated[int, typer.Option(min=1, help="Number of images to select.")],
    strategy: Annotated[str, typer.Option(help="margin, k-center, badge or random.")] = "margin",
    out: Annotated[
        Path | None, typer.Option(help="Folder for selected.csv, and selected.html with a thumbnail of each.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of random and badge.")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Select images to label next, and print their paths. Images of the training are left out.

    margin selects the images whose two most probable classes are closest, and k-center images that lie far apart.
    badge selects images that lie far apart and are uncertain.
    """
    from kernelhead.finetune.distributed import choose_device
    from kernelhead.finetune.images import expand
    from kernelhead.finetune.saved import load_classifier
    from kernelhead.finetune.select import select_images, write_selection

    if out is not None:
        check_folder(out)
    saved, place = load_classifier(model), choose_device(device)
    with steps_bar("nothing was changed") as progress:
        chosen, broken = select_images(saved, [*expand(images)], budget, strategy, place, seed=seed, progress=progress)
    for path, *_ in chosen:
        print_plain(str(path))
    if out is not None:
        write_selection(out, chosen, f"{budget} images to label, by {strategy}")
        say(f"Written {out / 'selected.csv'} and {out / 'selected.html'}", style="")
    exit_if(broken)


@app.command()
def inspect(
    model: ModelArgument,
    data: Annotated[str | None, typer.Option(help="Data set or folder: count its images by nearest point.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Page of charts to write, such as kernel.html.")] = None,
    device: DeviceOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a kernel head has learned.

    The kernel, the worth of its coefficients, whether it is positive definite, and how the head's points are used.
    """
    from kernelhead.finetune.distributed import choose_device
    from kernelhead.finetune.evaluation import feature_batches
    from kernelhead.finetune.saved import load_classifier

    saved = load_classifier(model)
    with steps_bar("nothing was changed") as progress:
        features = None if data is None else feature_batches(saved, data, choose_device(device), progress)
        description = saved.head.describe(features)
    if json_output:
        print(json.dumps({**description.as_dict(), "classes": saved.classes}, indent=1))
    else:
        print_plain(str(description))
    if plot is not None:
        from kernelhead.inspection.plot import write_plot

        write_plot(plot, description)
        say(f"Drawn to {plot}", style="")


@app.command()
def export(
    model: ModelArgument,
    format: Annotated[str, typer.Option(help="onnx, or pt2 for PyTorch.")] = "onnx",
    part: Annotated[str, typer.Option(help="network, or head, which takes features.")] = "network",
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="beside the classifier")] = None,
) -> None:
    """Write a trained classifier as a file that runs without kernelhead, and check it.

    The file takes batches of any size. Its metadata name the classes and say how an image becomes its input.
    """
    from kernelhead.finetune.export import export_classifier
    from kernelhead.finetune.saved import load_classifier
    from kernelhead.finetune.settings import MODEL_FILE

    saved = load_classifier(model)
    file = model / MODEL_FILE if model.is_dir() else model
    path = out or file.with_name(f"{file.stem}{'-head' if part == 'head' else ''}.{format}")
    if path.suffix == ".safetensors" and path.exists():
        raise FileExistsError(f"{path} is a checkpoint; give the {format} file another name")
    exported = export_classifier(saved, path, format=format, part=part)
    runner = "onnxruntime" if format == "onnx" else "PyTorch"
    print_plain(f"Written {exported.path}, {exported.bytes:,} bytes")
    print_plain(f"Its logits on random input, run by {runner}, differ by at most {exported.difference:.1e}")


def exit_if(broken: Sequence[str]) -> None:
    """Say of each file what is wrong with it, and leave where there is one."""
    for sentence in broken:
        say(f"error: {sentence_of(ValueError(sentence))}", style="red")
    if broken:
        raise typer.Exit(1)
