"""`finetune.train`, the function: it equals the command line, reports, stops and goes on."""

import dataclasses
import subprocess
import sys
import threading

import pytest

from kernelhead.finetune import TrainSpec, train
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.saved import load_classifier

EPOCHS = 4


@pytest.fixture(scope="module")
def spec(colours):
    options = {"landmarks": 8}
    own = {"epochs": EPOCHS, "val": 0.2, "device": "cpu", "report": False, "checkpoint_seconds": 0.0}
    return TrainSpec(str(colours / "images"), "tiny_networks:tiny", "landmarks", options, **own)


@pytest.fixture(scope="module")
def whole(spec, tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("function") / "run", []
    return folder, train(spec, report=said.append, checkpoint=folder), said


class StoppedError(Exception):
    """What a search raises to end a trial."""


def weights(folder):
    return {name: tensor.numpy().tobytes() for name, tensor in load_checkpoint(folder / "model.safetensors")[0].items()}


def test_it_reports_every_epoch(whole):
    folder, result, said = whole
    assert [each["epoch"] for each in said] == [1, 2, 3, 4]
    for name in ("loss", "val_loss", "val_accuracy"):
        assert [each[name] for each in said] == result.curve[name]
    assert [each["accuracy"] for each in said] == pytest.approx(result.curve["accuracy"])
    assert result.images == {"train": 36, "val": 12, "test": 12, "left_out": 0}
    assert load_classifier(folder).spec.head == "landmarks"


def test_without_a_folder_nothing_stays(spec, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = train(spec)
    assert not list(tmp_path.iterdir())
    for name in ("accuracy", "nll", "parameters"):
        assert getattr(result, name) == getattr(whole[1], name)


@pytest.mark.parametrize("main", [True, False])
def test_what_a_report_raises_ends_the_run_which_goes_on_later(spec, whole, tmp_path, main):
    """In the main thread, and in another, as a search has it."""

    def stop(now):
        if now["epoch"] == 2:
            raise StoppedError

    caught, said = [], []

    def begin():
        try:
            train(spec, report=stop, checkpoint=tmp_path)
        except StoppedError as error:
            caught.append(error)

    if main:
        begin()
    else:
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    assert caught
    assert not (tmp_path / "result.json").exists()
    train(spec, report=said.append, checkpoint=tmp_path)
    assert said[-1]["epoch"] == EPOCHS
    assert len(said) == 3  # the second epoch's last step came after its checkpoint
    assert weights(tmp_path) == weights(whole[0])


def test_a_finished_run_is_read_again(spec, whole, tmp_path):
    train(spec, checkpoint=tmp_path)
    again = train(spec, report=lambda now: pytest.fail("an epoch was trained"), checkpoint=tmp_path)
    assert (again.accuracy, again.curve) == (whole[1].accuracy, whole[1].curve)
    with pytest.raises(ValueError, match=r"belongs to another run: label_smoothing is 0\.1 here and 0\.0 there"):
        train(dataclasses.replace(spec, label_smoothing=0.1), checkpoint=tmp_path)


def test_it_equals_the_command_line(spec, whole, tmp_path):
    command = [sys.executable, "-m", "kernelhead", "train", "--data", spec.data, "--backbone", spec.backbone]
    command += ["--head-option", "landmarks=8", "--epochs", EPOCHS, "--val", 0.2, "--device", "cpu", "--no-report"]
    command += ["--out", tmp_path / "run"]
    code = f"import sys; sys.path[:0] = {sys.path!r}; from kernelhead.cli import main; import torch; "
    code += "torch.set_num_threads(1); main()"
    command[1:3] = ["-c", code]
    subprocess.run([str(each) for each in command], check=True, timeout=120)
    assert weights(tmp_path / "run") == weights(whole[0])


def test_importing_it_leaves_torch_alone():
    """The command line names every setting in its help, and torch takes seconds to import."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import kernelhead.finetune; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
