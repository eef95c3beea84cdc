"""What is shown while something goes on."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kernelhead.cli._console import messages, say

if TYPE_CHECKING:
    from kernelhead.train.job import Epoch

Steps = Callable[[str, int, int], None]  # what, done, total


@contextmanager
def steps_bar(interrupted: str = "what was done is kept, and the same command goes on from there") -> Iterator[Steps]:
    """A bar for each thing that goes on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with _leaving(interrupted), Progress(*columns, console=messages, transient=not messages.is_terminal) as bars:
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
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with _leaving(interrupted), Progress(*columns, console=messages, expand=True) as bars:
        task = bars.add_task("training", epoch="..", figures="starting", total=None)
        test = ""

        def show(now: "Epoch") -> None:
            nonlocal test
            if now.test_accuracy is not None:
                test = f"  test {now.test_accuracy:.2f} %"
            moment = now.moment
            text = f"{moment.epoch}/{now.epochs}"
            bars.update(task, completed=moment.step, total=moment.steps, epoch=text, figures=_figures(now) + test)

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
        test = "" if now.test_accuracy is None else f"  test {now.test_accuracy:.2f} %"
        left = ""
        if moment.step > first[0]:
            pace = (time.monotonic() - first[1]) / (moment.step - first[0])
            left = f"  {timedelta(seconds=round(pace * (moment.steps - moment.step)))} left"
        say(f"epoch {moment.epoch}/{now.epochs}  {_figures(now)}{test}{left}", style="")

    return show


def _figures(now: "Epoch") -> str:
    moment = now.moment
    rate = moment.learning_rates[0]
    return f"loss {moment.losses[0]:.4f}  accuracy {100 * moment.accuracies[0]:.2f} %  rate {rate:.3g}"


@contextmanager
def _leaving(sentence: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {sentence}")
        raise typer.Exit(130) from None
