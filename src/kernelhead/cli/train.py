"""`kernelhead train`."""

import dataclasses
import inspect
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Column
from rich.table import Table as RichTable

from kernelhead.cli._console import about, app, check_folder, console, print_plain, say
from kernelhead.cli._progress import steps_bar, training_bar
from kernelhead.finetune.spec import TrainResult, TrainSpec

TASK = "Data and network"
TRAINING = "Training"
MACHINE = "Machine and files"
PATIENCE_SECONDS = 5.0
LOST = "another process of this training ended or cannot be reached; start all of them again with --resume"
REPEATED = ("head", "seed")  # settings that several runs beside one another may differ in
FIGURES = {"accuracy": "accuracy, %", "top5": "top-5 accuracy, %", "nll": "NLL", "ece": "ECE, %"}

# The settings of a run by their names in `TrainSpec`: panel, help, and the default where other settings decide it.
SETTINGS: dict[str, tuple[str, str, str | None]] = {
    "data": (TASK, "cifar10, cifar100, pets, cars, or a folder of class folders.", None),
    "backbone": (TASK, "torchvision/NAME, timm/NAME, or package.module:function for your own.", None),
    "head": (TASK, "kernel, prototypes, landmarks, linear, cosine, second_order, expansion or attentive.", None),
    "rectified": (TASK, "Keep the ReLU before the features.", None),
    "pretrained": (TASK, "Start from the library's weights.", "unless --weights or your own network"),
    "weights": (TASK, "Start from the weights in a local safetensors file.", None),
    "freeze_backbone": (TASK, "Train the head alone.", None),
    "augment": (TASK, "none, light, imagenet or randaugment; auto is light up to 64 pixels, else imagenet.", None),
    "mirror": (TASK, "Mirror training images at random; not for digits or text.", None),
    "image_size": (TASK, "Side of the network's input in pixels.", "the network's"),
    "test_size": (TASK, "Side of the input after training.", "that of training"),
    "resize": (TASK, "How an image becomes a square: crop the centre, squash, or pad with black.", None),
    "val": (TASK, "Share of the images for validation, unless a folder has its own.", None),
    "test": (TASK, "Share of the images for testing, unless a folder has its own.", None),
    "skip_empty": (TASK, "Leave out class folders without images.", None),
    "mixup": (TASK, "Mix the logits of images in pairs.", None),
    "label_smoothing": (TASK, "Share of a label that is spread over all classes.", None),
    "class_weight": (TASK, "none, or balanced: rare classes weigh more in the loss.", None),
    "teacher": (TASK, "Learn from the scores of a trained run or saved network, not from labels.", None),
    "temperature": (TASK, "What scores are divided by when a student learns from its teacher.", None),
    "epochs": (TRAINING, "Passes over the training images.", "30 with trained weights, else 200"),
    "batch_size": (TRAINING, "Images per step.", "64 with trained weights, else 128; less for few images"),
    "accumulate": (TRAINING, "Pieces of a batch that pass one after the other, for less memory.", None),
    "optimizer": (TRAINING, "sgd or adamw.", None),
    "learning_rate": (TRAINING, "Learning rate after the warm-up.", "0.01 or 0.003 with trained weights, else 0.1"),
    "head_rate": (
        TRAINING,
        "The head's learning rate as a multiple of the network's.",
        "10, 1 or 0.1, by head and epochs",
    ),
    "weight_decay": (TRAINING, "Weight decay.", "1e-4 with trained weights, else 5e-4"),
    "momentum": (TRAINING, "Momentum of SGD.", None),
    "layer_decay": (TRAINING, "Factor on the learning rate from each layer to the one below.", None),
    "clip": (TRAINING, "Largest norm of the gradient; 0 is none.", None),
    "ema": (TRAINING, "Decay of averaged weights, such as 0.999, which are kept instead; 0 is none.", None),
    "warmup_epochs": (TRAINING, "Epochs of rising learning rate.", None),
    "keep": (TRAINING, "last, or best: the epoch with the best validation accuracy.", None),
    "patience": (TRAINING, "Epochs without a better validation accuracy that end the run; 0 is none.", None),
    "seed": (TRAINING, "Random seed of initialisation, data order and augmentation.", None),
    "amp": (TRAINING, "Mixed precision: none, bfloat16 or float16; auto is bfloat16 on a GPU.", None),
    "evaluate_every": (TRAINING, "Epochs between looks at the validation images; 0 is none.", None),
    "device": (MACHINE, "auto, cpu or cuda.", None),
    "compile": (MACHINE, "Use torch.compile.", None),
    "deterministic": (MACHINE, "Repeat a run to the bit on a GPU too, which is slower there.", None),
    "workers": (MACHINE, "Processes that read images.", "one per CPU core, at most 8"),
    "checkpoint_seconds": (MACHINE, "Seconds between checkpoints, more where saving is slow.", None),
    "tensorboard": (MACHINE, "Write for TensorBoard too.", None),
    "report": (MACHINE, "Write report.html, a page with curves, errors and figures.", None),
}


def _option(panel: str, help: str, default: object = None, *names: str) -> Any:
    """An option that is None where it is not given; what `default` says is shown."""
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=False if default is None else str(default)
    )


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option per setting, in the place of its `**given`."""
    own = inspect.signature(command)
    settings = []
    for each in dataclasses.fields(TrainSpec):
        if each.name in SETTINGS:
            panel, help, shown = SETTINGS[each.name]
            default = None if each.default is dataclasses.MISSING else each.default
            if isinstance(default, bool):
                default = f"{'' if default else 'no-'}{each.name.replace('_', '-')}"
            kind: Any = list[each.type] if each.name in REPEATED else each.type  # type: ignore[name-defined]
            kind = Annotated[kind | None, _option(panel, help, default if shown is None else shown)]
            settings.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    taken = {each.name for each in settings}
    kept = [each for name, each in own.parameters.items() if name not in taken and name != "given"]
    command.__signature__ = own.replace(parameters=[*settings, *kept])  # type: ignore[attr-defined]
    return command


@contextmanager
def _first_speaks() -> Iterator[None]:
    """Let the first of several processes that fail alike say why; torchrun ends the others while they wait."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except Exception as error:
        from kernelhead.finetune.distributed import is_lost
        from kernelhead.finetune.interrupt import ignore_interrupts

        if is_lost(error):
            ignore_interrupts()  # of torchrun, which ends what is left of the group
            if rank > 1:  # one of the first two may be the one that is gone
                raise typer.Exit(1) from error
            raise RuntimeError(LOST) from error
        if rank:
            time.sleep(PATIENCE_SECONDS)
        raise


@app.command()
@_first_speaks()
@_with_settings
def train(
    *,
    head_option: Annotated[list[str] | None, _option(TASK, "NAME=VALUE or HEAD.NAME=VALUE; may be repeated.")] = None,
    config: Annotated[Path | None, _option(MACHINE, "YAML file of settings; flags take precedence.")] = None,
    show_config: Annotated[bool, _option(MACHINE, "Print all settings and exit.", None, "--show-config")] = False,
    out: Annotated[Path | None, _option(MACHINE, "Folder of the run.", "runs/train/DATA-BACKBONE-HEAD-SEED")] = None,
    resume: Annotated[bool, _option(MACHINE, "Continue the run in that folder.", None, "--resume")] = False,
    head: list[str] | None = None,
    seed: list[int] | None = None,
    **given: Any,
) -> None:
    """Train a classifier on images and keep it.

    --data is the one setting without a default; --show-config shows all, and needs no data.
    A batch size that is not given follows from the number of images.
    Several --head, and several --seed, are trained on the same images in turn, and a table compares the heads.
    On several GPUs: torchrun --nproc-per-node N -m kernelhead train ..
    """
    from kernelhead.files import write_bytes, writing
    from kernelhead.finetune import settings as settings_of
    from kernelhead.finetune.beside import beside
    from kernelhead.finetune.data import open_data
    from kernelhead.finetune.distributed import RESTARTS, choose_device, is_first, join_world
    from kernelhead.finetune.images import check_data
    from kernelhead.finetune.report import write_comparison
    from kernelhead.finetune.saved import create_classifier
    from kernelhead.finetune.trainer import train as train_classifier
    from kernelhead.tables import show

    resume = resume or os.environ.get(RESTARTS, "0") != "0"
    if resume and config is None and out is not None and (out / settings_of.CONFIG_FILE).exists():
        config = out / settings_of.CONFIG_FILE
    specs = []
    names: list[str | None] = [*dict.fromkeys(head or ())] or [None]
    numbers: list[int | None] = [*dict.fromkeys(seed or ())] or [None]
    with about(config):
        for name, number in itertools.product(names, numbers):
            own = given | {"head": name, "seed": number, "head_options": head_options(head_option, name, head or ())}
            specs.append(settings_of.resolved(settings_of.make_spec(config, own, needs_data=not show_config)))
    if show_config:
        print("---\n".join(map(settings_of.to_yaml, specs)), end="")
        return
    folder = out or Path("runs", "train", settings_of.run_name(specs[0], [spec.head for spec in specs]))
    folders = [folder if len(specs) == 1 else folder / f"{spec.head}-seed{spec.seed}" for spec in specs]
    for each, spec in zip(folders, specs, strict=True):
        check_folder(each)
        check_data(spec.data)
        settings_of.check_run_folder(each, resume)
        create_classifier(spec, 2)  # what cannot be made is said before images are read
    place = choose_device(specs[0].device)
    runs: dict[str, list[tuple[Path, TrainResult]]] = {}
    with ExitStack() as held:
        for each in folders if is_first() else ():
            held.enter_context(writing(each))
            settings_of.check_run_folder(each, resume)  # another may just have ended
        world = join_world(place)
        with steps_bar("nothing was changed") if world.rank == 0 else nullcontext(None) as reading:
            opened = open_data(specs[0], place, progress=reading)
        for each, spec in zip(folders, specs, strict=True):
            chosen = spec.batch_size is not None
            spec = settings_of.resolved(spec, images=len(opened.train), processes=world.size)
            if world.rank == 0 and len(specs) > 1:
                say(f"head {spec.head}, seed {spec.seed}", style="bold")
            if not chosen and world.rank == 0 and not runs:
                say(f"batches of {spec.batch_size} for {len(opened.train)} images; choose with --batch-size", style="")
            later = f"the run is kept in {each}, and the same command with --resume continues it"
            with training_bar(later) if world.rank == 0 else nullcontext(None) as watch:
                result = train_classifier(spec, opened, each, world=world, watch=watch)
            runs.setdefault(spec.head, []).append((each, result))
    if world.rank == 0 and len(runs) > 1:
        table, plain = beside(runs)
        write_bytes(folder / "comparison.json", (json.dumps(plain, indent=1) + "\n").encode())
        show(table, console)
        if specs[0].report and all((each / "report.html").exists() for each in folders):  # else it was said why
            write_comparison(folder, table, {name: each[0][0] for name, each in runs.items()})
        print_plain(f"Kept in {folder}")
    elif world.rank == 0:
        for each, result in runs[specs[0].head]:
            show_figures(f"{specs[0].data}, {result.images['test']} test images", vars(result))
            print_plain(f"Kept in {each}; 'kernelhead predict {each} IMAGES' uses it")


def head_options(given: Sequence[str] | None, head: str | None, heads: Sequence[str]) -> dict[str, Any] | None:
    """Read NAME=VALUE, the value as YAML reads it: 9, 0.5, true, relu. What is for another of the heads is left out."""
    if not given:
        return None
    from kernelhead.finetune.settings import load_yaml

    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--head-option takes NAME=VALUE, such as degree=9; got {text!r}")
        owner, dot, rest = name.partition(".")
        if dot and owner not in heads:
            raise ValueError(f"--head-option {text!r} is for a head that is not trained; add --head {owner}")
        if dot and owner != head:
            continue
        try:
            options[(rest if dot else name).replace("-", "_")] = load_yaml(value)
        except yaml.YAMLError as error:
            raise ValueError(f"the value of --head-option {text!r} is not readable YAML; quote it") from error
    return options


def show_figures(title: str, result: dict[str, Any]) -> None:
    print_plain(title)
    names = [name for name in FIGURES if result.get(name) is not None]
    table = RichTable(*(Column(FIGURES[name], justify="right") for name in names))
    table.add_row(*(f"{result[name]:.4f}" if name == "nll" else f"{result[name]:.2f}" for name in names))
    console.print(table)
