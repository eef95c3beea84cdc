"""Run what is missing of tables on a Ray cluster: a task per group of runs, one at a time per GPU or per CPU core.

The process that asks for a table chooses groups and claims them, as `runner.run` does; tasks train them and write the
results. All machines share the folder of runs. A task whose machine dies is begun again on another one, from the
checkpoint of its group, which is at most a minute old.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernelhead_lab.tables.experiment import Experiment
from kernelhead_lab.tables.queue import Progress, Queue, Settings, description
from kernelhead_lab.tables.runner import WAIT_SECONDS, Source, train_group
from kernelhead_lab.tables.store import Missing, Store

RETRIES = 10  # of a group whose machine, or process, dies
LEAVING_SECONDS = 60.0  # which tasks are given to save where they are


def run(
    experiments: Sequence[Experiment],
    root: Path,
    settings: Settings,
    progress: Callable[[Progress], None],
    address: str,
    at_once: int,
) -> None:
    """Run what is missing of tables on the cluster at `address`, at most `at_once` runs in a group on a GPU.

    Can be stopped and called again at any point, also without Ray.
    """
    ray = _connect(address)
    running: dict[Any, ExitStack] = {}
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        settings = replace(settings, device="cuda", at_once=at_once) if gpus else replace(settings, device="cpu")
        share = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        task = ray.remote(max_retries=RETRIES, **share)(_train)
        queue = Queue(experiments, root, settings)
        while True:
            idle = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0)) - len(running)
            with ExitStack() as held:
                missing, group = queue.take(held, settings.at_once, idle) if idle > 0 else (None, {})
                if group:
                    running[task.remote(group, root, settings)] = held.pop_all()
                    progress(Progress(*queue.count(), description(group)))
                    continue
            if not running:
                if missing == {}:
                    return
                progress(Progress(*queue.count(), "waiting for other processes, or for a machine", waits=True))
                time.sleep(WAIT_SECONDS)
                continue
            done, _ = ray.wait(list(running), timeout=WAIT_SECONDS)
            for each in done:
                with running.pop(each):
                    _see(ray, each)
    finally:
        for each in running:
            ray.cancel(each)  # as Ctrl-C: it saves a checkpoint
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=LEAVING_SECONDS)
        for held in running.values():
            held.close()
        ray.shutdown()


def _connect(address: str) -> Any:
    """Return Ray, connected to a cluster."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--ray needs Ray; install it with pip install 'kernelhead[ray]'") from error
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ConnectionError(
            f"no Ray cluster at {address!r} lets this process in ({why}); begin one with 'ray start --head', or give "
            "another --ray"
        ) from error
    return ray


def _see(ray: Any, task: Any) -> None:
    """Raise what a task raised, without the trace of Ray around it."""
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.WorkerCrashedError as error:
        raise RuntimeError(f"a group of runs ended its process {RETRIES + 1} times; see the logs of Ray") from error


def _train(group: Missing, root: Path, settings: Settings) -> None:
    """Train a group on a machine of the cluster."""
    if not root.is_dir():
        raise FileNotFoundError(f"a machine of the cluster has no folder {root}; give one that all share, with --runs")
    if settings.device == "cpu":
        torch.set_num_threads(1)
    train_group(group, Store(root, settings.epochs), _source(settings), settings, lambda now: None)


@cache
def _source(settings: Settings) -> Source:
    """Return the data sets that earlier groups of this process had open."""
    return Source(settings)
