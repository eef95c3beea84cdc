"""What is shown while something goes on."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from kernelhead.cli._console import messages, say

if TYPE_CHECKING:
    from kernelhead.train.job import Epoch
    from kernelhead.train.loop import Moment

Steps = Callable[[str, int, int], None]  # what, done, total
PACE_SECONDS = 3600  # the remaining time is told from so many; on a GPU only the end of an epoch is reported


@contextmanager
def steps_bar(interrupted: str = "what was done is kept, and the same command goes on from there") -> Iterator[Steps]:
    """A bar for each thing that goes on."""
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
def training_bar(interrupted: str) -> Iterator[Callable[["Epoch"], None]]:
    """Loss, accuracy, learning rate and remaining time: a bar on a terminal, a line an epoch elsewhere."""
    if not messages.is_terminal:
        with _leaving(interrupted):
            yield _epoch_lines()
        return
    columns = (
        TextColumn("epoch {task.fields[epoch]}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
    )
    bar = Progress(*columns, console=messages, expand=True, speed_estimate_period=PACE_SECONDS)
    with _leaving(interrupted), bar as bars:
        task = bars.add_task("training", epoch="..", figures="starting", total=None)
        test: float | None = None

        def show(now: "Epoch") -> None:
            nonlocal test
            moment = now.moment
            test = test if now.test_accuracy is None else now.test_accuracy
            text = f"{moment.epoch}/{now.epochs}"
            figures = _figures(moment, test, digits=1)  # all of it, and a bar, fits into 80 columns
            bars.update(task, completed=moment.step, total=moment.steps, epoch=text, figures=figures)

        yield show


def _epoch_lines() -> Callable[["Epoch"], None]:
    first: tuple[int, float] | None = None

    def show(now: "Epoch") -> None:
        nonlocal first
        moment = now.moment
        if first is None:
            first = moment.step, time.monotonic()
        if not moment.epoch_done:
            return
        left = ""
        if first[0] < moment.step < moment.steps:
            pace = (time.monotonic() - first[1]) / (moment.step - first[0])
            left = f"  {timedelta(seconds=round(pace * (moment.steps - moment.step)))} left"
        figures = _figures(moment, now.test_accuracy, digits=2)
        say(f"epoch {moment.epoch}/{now.epochs}  {figures}{left}", style="")

    return show


def _figures(moment: "Moment", test: float | None, digits: int) -> str:
    shown = [f"loss {moment.losses[0]:.{digits + 2}f}", f"train {100 * moment.accuracies[0]:.{digits}f} %"]
    if test is not None:
        shown.append(f"test {test:.{digits}f} %")
    return "  ".join([*shown, f"rate {moment.learning_rates[0]:.{digits + 1}g}"])


@contextmanager
def _leaving(sentence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interruption:
        for number in (signal.SIGINT, signal.SIGTERM):  # one more would interrupt the leaving
            signal.signal(number, signal.SIG_IGN)
        say(f"interrupted; {str(interruption) or sentence}")
        raise typer.Exit(130) from None
