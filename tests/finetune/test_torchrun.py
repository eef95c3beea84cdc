"""`torchrun`: several processes equal one, and what happens when one of them is killed.

Everything goes over the loopback interface, at ports that were free.
"""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from kernelhead import HEADS
from kernelhead.cli import main
from kernelhead.finetune import trainer
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.data import open_data
from kernelhead.finetune.distributed import join_world
from kernelhead.finetune.results import load_result
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec

CHECKPOINT = "checkpoint.safetensors"
OPTIONS = {"landmarks": {"landmarks": 8}, "expansion": {"width": 8}, "attentive": {"queries": 3}}
# At larger rates second moments amplify rounding: with 0.05, one process whose initial weights are changed by a unit in
# the last place differs by 1e-2 after six epochs.
RATES = {"second_order": 3e-4}
LOST = "error: another process of this training ended or cannot be reached; start all of them again with --resume"
STEP = 7  # of nine, in the third of three epochs


def train(colours, folder, head, world=None):
    """Train a network with BatchNorm for six epochs in float64."""
    options = {"epochs": 6, "batch_size": 16, "learning_rate": RATES.get(head, 0.05), "seed": 1, "report": False}
    spec = TrainSpec(f"{colours}/images", "tiny_networks:exact", head, OPTIONS.get(head, {}), device="cpu", **options)
    spec = resolved(spec)
    trainer.train(spec, open_data(spec, torch.device("cpu")), folder / head, world=world)


def command(*arguments, processes=2, nodes=("--standalone",)):
    launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, "--local-addr", "127.0.0.1"]
    return [*launcher, "--nproc-per-node", str(processes), *map(str, arguments)]


def environment(colours):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER"))}
    return {**own, "PYTHONPATH": os.pathsep.join([str(colours), *sys.path]), "OMP_NUM_THREADS": "1"}


def torchrun(colours, *arguments, **options):
    return subprocess.run(
        command(*arguments, **options), env=environment(colours), capture_output=True, text=True, timeout=300
    )


def arguments(colours, out):
    """A training of three epochs with a checkpoint after every step."""
    run = ["train", "--data", colours / "images", "--backbone", "tiny_networks:tiny", "--head", "kernel"]
    run += ["--epochs", 3, "--batch-size", 16, "--learning-rate", 0.02, "--no-report", "--device", "cpu"]
    return [*run, "--checkpoint-seconds", 0, "--out", out]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, colours):
    """That training in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "kernelhead", *arguments(colours, out)]
    subprocess.run(list(map(str, command)), env=environment(colours), check=True, capture_output=True, timeout=300)
    return out


def assert_equal(found, expected, tolerance):
    (own, state), (its, its_state) = (load_checkpoint(each / CHECKPOINT) for each in (found, expected))
    assert state["step"] == its_state["step"]
    assert own.keys() == its.keys()
    for name in own:
        torch.testing.assert_close(own[name], its[name], rtol=tolerance, atol=tolerance, msg=f"{found}: {name}")


@pytest.mark.slow
def test_two_processes_equal_one_in_float64_with_every_head(tmp_path, colours):
    done = torchrun(colours, __file__, "heads", colours, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    for head in HEADS:
        train(colours, tmp_path / "one", head)
        own, its = (load_checkpoint(tmp_path / each / head / CHECKPOINT)[0] for each in ("two", "one"))
        weights = [name for name in own if name.startswith("model.") and own[name].is_floating_point()]
        assert weights
        assert own["model.features.0.weight"].dtype == torch.float64
        for name in weights:
            torch.testing.assert_close(own[name], its[name], rtol=1e-9, atol=1e-9, msg=f"{head}: {name}")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_group_with_a_sentence(victim, tmp_path, colours):
    logs = ["--log-dir", tmp_path / "logs", "--redirects", "3"]
    killed = ["kill", victim, *arguments(colours, tmp_path / "run")]
    done = torchrun(colours, *logs, __file__, *killed)
    assert done.returncode != 0
    (said,) = tmp_path.glob(f"logs/*/attempt_0/{1 - victim}/stderr.log")
    lines = [line for line in said.read_text().splitlines() if not line.startswith("epoch")]
    assert lines == [LOST]
    assert load_checkpoint(tmp_path / "run" / CHECKPOINT)[1]["step"] == STEP


@pytest.mark.slow
def test_restarted_processes_go_on_from_the_last_checkpoint(tmp_path, colours, alone):
    done = torchrun(colours, "--max-restarts", 2, __file__, "kill", 1, *arguments(colours, tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("epoch 1/3") == 1
    assert_equal(tmp_path / "run", alone, 1e-3)


@pytest.mark.slow
def test_two_launchers_train_like_one_process(tmp_path, colours, alone):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]
    run = command("-m", "kernelhead", *arguments(colours, tmp_path / "run"), processes=1, nodes=nodes)
    launchers = [subprocess.Popen(run, env=environment(colours), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [each.communicate(timeout=300)[1] for each in launchers]
    finally:
        for each in launchers:
            each.kill()
    assert [each.returncode for each in launchers] == [0, 0], said
    assert_equal(tmp_path / "run", alone, 1e-3)
    assert load_result(tmp_path / "run" / "result.json", TrainSpec).accuracy is not None


def kill_in_the_middle(victim, mix=trainer.mix):
    """Let a process be killed, the first time that it begins the last but one step."""

    def killing(*values):
        if values[1:] == (STEP, victim) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return mix(*values)

    trainer.mix = killing


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "kill":
        kill_in_the_middle(int(sys.argv[2]))
        sys.argv[1:3] = []
        main()
    else:
        from pathlib import Path

        together = join_world(torch.device("cpu"))
        for each in HEADS:
            train(sys.argv[2], Path(sys.argv[3]), each, together)
