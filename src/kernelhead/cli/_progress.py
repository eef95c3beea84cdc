"""Bars and lines that show how far a command is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from kernelhead.cli._console import messages, say
from kernelhead.finetune.interrupt import ignore_interrupts

if TYPE_CHECKING:
    from kernelhead.finetune.trainer import Moment

Steps = Callable[[str, int, int], None]  # what, done, total
LINE_SECONDS = 60.0  # between lines within an epoch, where there is no bar
PACE_SECONDS = 3600  # the remaining time follows from the pace over that long


@contextmanager
def steps_bar(interrupted: str = "what is done stays, and the same command continues from there") -> Iterator[Steps]:
    """Show a bar per thing that goes on."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with _leaving(interrupted), Progress(*columns, console=messages, disable=not messages.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield show


@contextmanager
def training_bar(interrupted: str) -> Iterator[Callable[["Moment"], None]]:
    """Show loss, accuracy, speed and remaining time: a bar on a terminal, a line per epoch or minute elsewhere."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
    )
    lines = not messages.is_terminal
    bar = Progress(*columns, console=messages, expand=True, speed_estimate_period=PACE_SECONDS, disable=lines)
    with _leaving(interrupted), bar as bars:
        task = bars.add_task("training", epoch="..", figures="starting", total=None)
        val: float | None = None
        said = time.monotonic()

        def show(now: "Moment") -> None:
            nonlocal val, said
            val = val if now.val_accuracy is None else now.val_accuracy
            epoch = f"{now.epoch}/{now.epochs}"
            figures = _figures(now, val, digits=1)  # with the bar, they fit into 80 columns
            bars.update(task, completed=now.step, total=now.steps, epoch=epoch, figures=figures)
            if lines and (now.epoch_done or time.monotonic() - said > LINE_SECONDS):
                seconds = bars.tasks[0].time_remaining
                left = f"  {timedelta(seconds=seconds)} left" if seconds else ""
                part = "" if now.epoch_done else f"  step {now.step}/{now.steps}"
                figures = f"{_figures(now, now.val_accuracy, digits=2)}  rate {now.learning_rate:.3g}"
                say(f"epoch {epoch}{part}  {figures}{left}", style="")
                said = time.monotonic()

        yield show


def _figures(now: "Moment", val: float | None, digits: int) -> str:
    shown = [f"loss {now.loss:.{digits + 2}f}", f"train {100 * now.accuracy:.{digits}f} %"]
    if val is not None:
        shown.append(f"val {val:.{digits}f} %")
    pace = now.images_per_second
    return "  ".join([*shown, f"{pace:.{0 if pace >= 10 else 1}f} images/s"])


@contextmanager
def _leaving(sentence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interruption:
        ignore_interrupts()  # another signal would interrupt the leaving
        say(f"interrupted; {str(interruption) or sentence}")
        raise typer.Exit(130) from None
