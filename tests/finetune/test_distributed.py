"""Several processes train like one.

Processes come from a fork server that has torch loaded already, and run this file.
"""

import copy
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from kernelhead.finetune import checkpoint, trainer
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.data import open_data
from kernelhead.finetune.distributed import SharedBatchNorm, World, choose_device, join_world, synchronize_batch_norm
from kernelhead.finetune.settings import make_spec, resolved, to_yaml
from kernelhead.finetune.spec import TrainSpec

CPU = torch.device("cpu")
SIZE = 2
STEPS = 9
CHECKPOINT = "checkpoint.safetensors"
PIECES = {"accumulate": 4, "clip": 0.1, "ema": 0.5, "patience": 1, "keep": "best", "val": 0.1, "evaluate_every": 1}


def go_on(folder, name, world=None, **changes):
    """Train, or continue, in `folder/name`."""
    spec = replace(make_spec(folder / "settings.yaml", {}), **changes)
    return trainer.train(spec, open_data(spec, CPU), folder / name, world=world)


# What the processes do


def train_in_several_ways(folder, world):
    go_on(folder, "two", world)
    go_on(folder, "pieces", world, **PIECES)
    go_on(folder, "statistics", world, backbone="tiny_networks:tiny")
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compile = functools.partial(torch.compile, backend=backend)
    go_on(folder, "compiled", world, compile=True)
    assert graphs
    with pytest.raises(ValueError, match="2 processes cannot share a batch of 15 equally"):
        go_on(folder, "uneven", world, batch_size=15)


def interrupt_one(folder, world):
    """Tell only the second process to stop, in the middle of its sixth step."""

    def seeded(*values, real=trainer.mix):
        if world.rank == 1 and values[1:] == (5, 1):
            signal.raise_signal(signal.SIGTERM)
        return real(*values)

    trainer.mix = seeded
    with pytest.raises(KeyboardInterrupt):
        go_on(folder, "stopped", world)


def continue_it(folder, world):
    go_on(folder, "stopped", world)
    with pytest.raises(ValueError, match="the processes found different checkpoints"):
        go_on(folder, ["stopped", "nowhere"][world.rank], world)


def train_slowly(folder, world):
    def seeded(*values, real=trainer.mix):
        if values[1:] == (3, world.rank):
            (folder / f"started-{world.rank}").touch()
        if len(values) == 3 and values[1] >= 3:
            time.sleep(0.3)
        return real(*values)

    trainer.mix = seeded
    try:
        go_on(folder, "slow", world)
    except KeyboardInterrupt:
        (folder / f"interrupted-{world.rank}").touch()


def refuse_to_write(*_):
    raise AssertionError("only the first process saves")


def child(task, folder, rank=None):
    torch.set_num_threads(1)
    if rank is not None:  # not from torchrun
        os.environ |= {"WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank)}
        distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=SIZE)
    world = join_world(CPU)
    if world.rank:
        checkpoint.save_checkpoint = trainer.write_bytes = trainer.save_result = refuse_to_write
        trainer.write_predictions = refuse_to_write
    globals()[task](folder, world)
    distributed.destroy_process_group()


def together(task, folder):
    """Do something in two processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.nn.parallel", "pytest"])
    processes = []
    for rank in range(SIZE):
        given = {"arguments": {"task": task, "folder": folder, "rank": rank}}
        processes.append(context.Process(target=runpy.run_path, args=(__file__, given, "__main__")))
        processes[-1].start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
        process.close()
    (folder / "store").unlink(missing_ok=True)
    assert codes == [0] * SIZE


# Training


def prepare(folder, colours):
    """Write the settings of the runs, whose network all processes can import."""
    options = {"coefficients": "relu"}
    spec = TrainSpec(str(colours / "images"), "tiny_networks:grouped", "kernel", options, device="cpu")
    spec = replace(spec, epochs=3, batch_size=16, learning_rate=0.05, evaluate_every=0, seed=1, report=False)
    (folder / "settings.yaml").write_text(to_yaml(resolved(spec)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, colours):
    """The runs of one process and of two."""
    folder = prepare(tmp_path_factory.mktemp("runs"), colours)
    go_on(folder, "one")
    go_on(folder, "pieces one", **{**PIECES, "accumulate": 1})
    go_on(folder, "statistics one", backbone="tiny_networks:tiny")
    together("train_in_several_ways", folder)
    together("interrupt_one", folder)
    assert load_checkpoint(folder / "stopped" / CHECKPOINT)[1]["step"] == 6
    return folder


def assert_near(actual, expected, rtol=2e-3):
    (tensors, state), (its, its_state) = (load_checkpoint(each / CHECKPOINT) for each in (actual, expected))
    assert state == its_state
    assert tensors.keys() == its.keys()
    assert {"model.fc.weight", "model.bn.weight", "optimizer.momentum_buffer.bn.weight", "losses"} <= tensors.keys()
    for name, tensor in tensors.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, its[name], rtol=rtol, atol=rtol / 10, msg=message)


@pytest.mark.slow
def test_two_processes_train_like_one(folder):
    assert_near(folder / "two", folder / "one")


@pytest.mark.slow
def test_pieces_averages_and_choices_are_those_of_one(folder):
    (own, state), (its, its_state) = (load_checkpoint(folder / each / CHECKPOINT) for each in ("pieces", "pieces one"))
    assert [state[name] for name in ("step", "best_epoch", "stopped")] == [
        its_state[name] for name in ("step", "best_epoch", "stopped")
    ]
    assert own.keys() == its.keys()
    assert {"average.fc.weight", "best.fc.weight"} <= own.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, its[name], rtol=5e-3, atol=5e-4, equal_nan=True, msg=name)


@pytest.mark.slow
def test_statistics_of_batch_norm_are_those_of_all_processes(folder):
    runs = (folder / "statistics", folder / "statistics one")
    (own, _), (its, _) = (load_checkpoint(each / CHECKPOINT) for each in runs)
    torch.testing.assert_close(own["losses"], its["losses"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(own["model.bn.running_var"], its["model.bn.running_var"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compiled_it_is_the_same(folder):
    losses, expected = (load_checkpoint(folder / each / CHECKPOINT)[0]["losses"] for each in ("compiled", "one"))
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)


@pytest.mark.slow
def test_interrupted_they_continue_to_the_bit(folder):
    """And one process continues where two were."""
    (folder / "alone").mkdir()
    (folder / "alone" / CHECKPOINT).write_bytes((folder / "stopped" / CHECKPOINT).read_bytes())
    go_on(folder, "alone")
    assert_near(folder / "alone", folder / "one")
    together("continue_it", folder)
    own, other = (load_checkpoint(folder / each / CHECKPOINT)[0] for each in ("stopped", "two"))
    assert all(torch.equal(own[name], other[name]) for name in other)
    result = json.loads((folder / "stopped" / "result.json").read_text())
    assert result["curve"]["loss"][-1] == json.loads((folder / "two" / "result.json").read_text())["curve"]["loss"][-1]


@pytest.mark.slow
def test_torchrun_and_its_signals(folder, tmp_path, colours):
    prepare(tmp_path, colours)
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(SIZE), __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(colours)])}
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            while not all((tmp_path / f"started-{rank}").exists() for rank in range(SIZE)):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
    assert all((tmp_path / f"interrupted-{rank}").exists() for rank in range(SIZE))
    assert 4 <= load_checkpoint(tmp_path / "slow" / CHECKPOINT)[1]["step"] < STEPS
    go_on(tmp_path, "slow")
    assert_near(tmp_path / "slow", folder / "one")


# The world and the device


def test_parts_of_a_batch():
    parts = [World(rank, 4).part(12) for rank in range(4)]
    assert [list(range(12))[part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    with pytest.raises(ValueError, match="4 processes cannot share a batch of 14 equally; choose a multiple"):
        World(0, 4).part(14)


def test_alone_there_is_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_world(CPU) == World(0, 1)
    assert not distributed.is_initialized()
    assert World().any(True, CPU) is True
    assert World().any(False, CPU) is False


def test_devices(monkeypatch):
    assert choose_device("cpu") == CPU
    for name in ("gpu", "mps", "meta", "", "cuda:x"):
        with pytest.raises(ValueError, match=f"unknown device '{name}'; choose auto, cpu or cuda"):
            choose_device(name)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == CPU
    with pytest.raises(ValueError, match="there is no CUDA device 0 here, which has 0; choose --device cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="there is no CUDA device 2 here, which has 2"):
        choose_device("cuda")
    assert chosen == [1, 1]


# BatchNorm alone


class OwnBatchNorm(nn.BatchNorm2d):
    """Nobody knows what this does with its statistics."""


def test_batch_norm_on_gpus_is_that_of_torch_under_the_same_names():
    cuda = torch.device("cuda")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4)), nn.BatchNorm1d(4, affine=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    synchronize_batch_norm(model, cuda)
    synchronize_batch_norm(model, cuda)  # once more does nothing, and warns of nothing
    assert [type(each) for each in (model[1][0], model[2])] == [nn.SyncBatchNorm] * 2
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batch_norm_whose_statistics_are_per_process_is_named(device):
    model = nn.Sequential(OwnBatchNorm(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
    with pytest.warns(UserWarning, match=r"^OwnBatchNorm take statistics per process"):
        synchronize_batch_norm(model, torch.device(device))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_one_process_is_that_of_torch(one_process, affine, momentum):
    """Forward, backward and statistics, in training and in evaluation mode. Several processes: tests with torchrun."""
    options = {"affine": affine, "momentum": momentum, "dtype": torch.float64}
    expected = nn.Sequential(nn.BatchNorm2d(3, **options), nn.Flatten(), nn.BatchNorm1d(60, **options))
    found = copy.deepcopy(expected)
    synchronize_batch_norm(found, CPU)
    assert [type(found[place]) for place in (0, 2)] == [SharedBatchNorm] * 2
    for _ in range(3):
        images = 5 + torch.randn(7, 3, 4, 5, dtype=torch.float64)
        weight, results = torch.randn(7, 60, dtype=torch.float64), []
        for model in (found, expected):
            x = images.clone().requires_grad_()
            y = model(x)
            results.append((y, *torch.autograd.grad((y * weight).sum(), [x, *model.parameters()])))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert list(found.state_dict()) == list(expected.state_dict())
    for ours, theirs in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.eval()(images), expected.eval()(images), rtol=1e-10, atol=1e-10)
    assert found.train()(images.bfloat16()).dtype == torch.bfloat16


if __name__ == "__main__":
    child(**globals().get("arguments") or {"task": "train_slowly", "folder": Path(sys.argv[-1])})
