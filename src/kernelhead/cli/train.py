"""`kernelhead train | evaluate | predict`."""

import csv
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.table import Table as RichTable
from rich.text import Text

from kernelhead.cli._console import app, console, print_plain, say
from kernelhead.cli._progress import steps_bar, training_bar

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from torch import Tensor

TASK = "Data and network"
TRAINING = "Training"
MACHINE = "Machine and files"
FORMATS = ("table", "json", "csv")
PATIENCE = 5.0  # seconds
FIGURES = {"accuracy": "accuracy, %", "top5": "top-5 accuracy, %", "nll": "NLL", "ece": "ECE, %"}

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a training, or its model.safetensors.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def _option(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


@contextmanager
def _first_speaks() -> Iterator[None]:
    """Of several processes that fail alike the first says why, and torchrun ends the others while they wait."""
    try:
        yield
    except Exception:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise


@app.command()
@_first_speaks()
def train(
    data: Annotated[
        str | None, _option(TASK, "cifar10, cifar100, pets, cars, a folder of class folders, or a packed file.")
    ] = None,
    backbone: Annotated[
        str | None, _option(TASK, "cifar_resnet20 (or another depth), lenet5, timm/NAME, or a torchvision network.")
    ] = None,
    head: Annotated[str | None, _option(TASK, "softmax, linear, second_order, expansion, kernel or best.")] = None,
    head_option: Annotated[
        list[str] | None, _option(TASK, "NAME=VALUE, an option of the head, such as degree=9; may be repeated.")
    ] = None,
    rectified: Annotated[bool | None, _option(TASK, "Keep the ReLU before the features, or not.")] = None,
    kervolution: Annotated[str | None, _option(TASK, "first or all, for cifar_resnet backbones.")] = None,
    pretrained: Annotated[bool | None, _option(TASK, "Start from the library's own weights, or not.")] = None,
    weights: Annotated[str | None, _option(TASK, "Start from a local safetensors file of weights.")] = None,
    teacher: Annotated[
        str | None, _option(TASK, "Learn the scores of this classifier (as for evaluate) instead of the labels.")
    ] = None,
    temperature: Annotated[float | None, _option(TASK, "That softens the teacher's scores.")] = None,
    mixup: Annotated[bool | None, _option(TASK, "Train on images mixed in pairs, in the head, or not.")] = None,
    size: Annotated[int | None, _option(TASK, "Side of the network's input, for large images.")] = None,
    short_side: Annotated[int | None, _option(TASK, "Short side that large images are kept at.")] = None,
    holdout: Annotated[float | None, _option(TASK, "Share of a folder to hold out for testing.")] = None,
    epochs: Annotated[int | None, _option(TRAINING, "How often every image is seen.")] = None,
    batch_size: Annotated[int | None, _option(TRAINING, "Images a step, of all processes together.")] = None,
    learning_rate: Annotated[float | None, _option(TRAINING, "The highest, after the warm-up.")] = None,
    head_rate: Annotated[
        float | None,
        _option(TRAINING, "The head's learning rate, as a multiple of the backbone's; 10 or 1, by head and start."),
    ] = None,
    weight_decay: Annotated[float | None, _option(TRAINING, "Of the weights.")] = None,
    momentum: Annotated[float | None, _option(TRAINING, "Of SGD.")] = None,
    warmup_epochs: Annotated[int | None, _option(TRAINING, "Epochs of rising learning rate.")] = None,
    seed: Annotated[int | None, _option(TRAINING, "Of start, order and augmentation.")] = None,
    evaluate_every: Annotated[
        int | None, _option(TRAINING, "Epochs between looks at the test images; 0: at the end alone.")
    ] = None,
    config: Annotated[Path | None, _option(MACHINE, "YAML file of settings; a flag outweighs it.")] = None,
    show_config: Annotated[bool, _option(MACHINE, "Print every setting as YAML, and stop.", "--show-config")] = False,
    out: Annotated[
        Path | None, _option(MACHINE, "Folder of the training; by default runs/train/DATA-BACKBONE-HEAD-SEED.")
    ] = None,
    resume: Annotated[
        bool, _option(MACHINE, "Go on with the training in that folder, if there is one.", "--resume")
    ] = False,
    device: Annotated[str | None, _option(MACHINE, "auto, cpu or cuda.")] = None,
    compile: Annotated[bool | None, _option(MACHINE, "Use torch.compile, or not.")] = None,
    workers: Annotated[int | None, _option(MACHINE, "Threads that decode pictures.")] = None,
    checkpoint_seconds: Annotated[
        float | None, _option(MACHINE, "Seconds between checkpoints, more where saving one takes long.")
    ] = None,
    tensorboard: Annotated[bool | None, _option(MACHINE, "Write for TensorBoard too, or not.")] = None,
) -> None:
    """Train a classifier on images and keep it.

    Every setting but --data has a default, which --show-config shows; that of the batch size follows the pictures.
    On several GPUs: torchrun --nproc-per-node N -m kernelhead train ..
    """
    given = dict(locals())
    own = {name: given.pop(name) for name in ("config", "show_config", "out", "resume", "head_option")}

    from kernelhead.train import job
    from kernelhead.train.config import make_config, says
    from kernelhead.train.distributed import join_world

    if resume and config is None and out is not None and (out / job.CONFIG_FILE).exists():
        config = out / job.CONFIG_FILE
    given["head_options"] = head_options(own["head_option"])
    settings = make_config(config, given)
    chosen_batch = says(config, given, "batch_size")
    if show_config:
        fitted = not chosen_batch and not settings.small  # to the pictures that there are, if nobody chooses it
        print((replace(settings, batch_size=None) if fitted else settings).to_yaml(), end="")
        return
    folder = out or Path("runs", "train", settings.name)
    if resume and not chosen_batch and (folder / job.CONFIG_FILE).exists():  # it was fitted to the data
        settings = replace(settings, batch_size=make_config(folder / job.CONFIG_FILE, {}).batch_size)
    job.check_place(folder, settings, resume)
    chosen = job.choose_device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
    job.check_network(settings)
    world = join_world(chosen)
    later = f"the training is kept in {folder}, and the same command with --resume goes on from there"
    with steps_bar("nothing was changed") if world.rank == 0 else nullcontext(None) as packing:
        opened = job.open_for(settings, chosen, world=world, progress=packing)
        opened.keep_decoded(packing)
    if not chosen_batch:
        usual, settings = settings.batch_size, settings.fitted(len(opened.train), world.size)
        if settings.batch_size != usual and world.rank == 0:
            count = f"{len(opened.train)} training images"
            say(f"batches of {settings.batch_size}, for {count}; --batch-size chooses another number", style="")
    with training_bar(later) if world.rank == 0 else nullcontext(None) as watch:
        result = job.train_classifier(settings, folder, opened, world=world, watch=watch)
    if world.rank == 0:
        _show_figures(f"{settings.data}, {result['images']['test']} test images", result)
        print_plain(f"Kept in {folder}; 'kernelhead predict {folder} PICTURES' uses it")


@app.command()
def evaluate(
    model: ModelArgument,
    data: Annotated[
        str | None,
        typer.Option(help="Other data than its own: a name, a folder, or a packed file.", show_default=False),
    ] = None,
    device: DeviceOption = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a trained classifier on test images."""
    from kernelhead.train import job
    from kernelhead.train.saved import load_classifier

    saved = load_classifier(model)
    with steps_bar("nothing was changed") as progress:
        result = job.evaluate_classifier(saved, data, job.choose_device(device), progress)
    if json_output:
        print(json.dumps(result, indent=1))
    else:
        _show_figures(f"{data or saved.settings['data']}, {result['images']} images", result)


@app.command()
def predict(
    model: ModelArgument,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES", help="Picture files, or folders of them.")],
    output: Annotated[str, typer.Option("--format", help="table, json or csv.")] = "table",
    top: Annotated[int, typer.Option(min=1, help="How many classes to name for each picture.")] = 1,
    device: DeviceOption = "auto",
) -> None:
    """Say what is in pictures: class and probability."""
    from kernelhead.data.packed import find_pictures
    from kernelhead.train import job
    from kernelhead.train.saved import load_classifier

    if output not in FORMATS:
        raise ValueError(f"unknown format {output!r}; choose one of {', '.join(FORMATS)}")
    saved = load_classifier(model)
    paths = find_pictures(pictures)
    with steps_bar("nothing was changed") as progress:
        probabilities, broken = job.predict_pictures(saved, paths, job.choose_device(device), progress)
    rows = [
        {"picture": str(path), "class": saved.classes[label], "probability": round(probability, 6)}
        for index, path in enumerate(paths)
        if index not in broken
        for label, probability in _largest(probabilities[index], top)
    ]
    _PRINTERS[output](rows)
    for _, sentence in sorted(broken.items()):
        say(sentence)
    if broken:
        raise typer.Exit(1)


def _largest(probabilities: "Tensor", top: int) -> list[tuple[int, float]]:
    values, labels = probabilities.topk(min(top, len(probabilities)))
    return list(zip(labels.tolist(), values.tolist(), strict=True))


def head_options(given: Sequence[str] | None) -> dict[str, Any] | None:
    """NAME=VALUE, the value as YAML reads it: 9, 0.5, true, relu."""
    if not given:
        return None
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--head-option {text!r} has to be NAME=VALUE, such as degree=9")
        try:
            options[name.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--head-option {text!r} has a value that is not readable YAML") from error
    return options


def _show_figures(title: str, result: dict[str, Any]) -> None:
    print_plain(title)
    table = RichTable()
    names = [name for name in FIGURES if result.get(name) is not None]
    for name in names:
        table.add_column(FIGURES[name], justify="right")
    table.add_row(*(f"{result[name]:.4f}" if name == "nll" else f"{result[name]:.2f}" for name in names))
    console.print(table)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = RichTable()
    for column in ("picture", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left", overflow="fold")
    for row in rows:
        table.add_row(Text(row["picture"]), Text(row["class"]), f"{row['probability']:.4f}")
    console.print(table)


def _print_json(rows: list[dict[str, Any]]) -> None:
    print(json.dumps(rows, indent=1, ensure_ascii=False))


def _print_csv(rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, ("picture", "class", "probability"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


_PRINTERS = {"table": _print_table, "json": _print_json, "csv": _print_csv}
