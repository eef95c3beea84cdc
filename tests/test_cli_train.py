"""`kernelhead train | evaluate | predict` on pictures whose class is their colour.

Most commands run in this process; those that are killed, and those of several processes, in their own.
"""

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from torch.nn import functional as F
from typer.testing import CliRunner

from kernelhead.backbones import Input
from kernelhead.cli import _progress, app
from kernelhead.cli import train as cli
from kernelhead.cli._console import console
from kernelhead.results import load_result
from kernelhead.train import job
from kernelhead.train.checkpoint import load_checkpoint
from kernelhead.train.config import make_config
from kernelhead.train.member import Member
from kernelhead.train.pictures import open_other
from kernelhead.train.saved import load_classifier, save_classifier

COLOURS = {"blue": (60, 60, 170), "green": (60, 170, 60), "red": (170, 60, 60)}
EACH = 20
SMALL = ["--backbone", "cifar_resnet8", "--batch-size", "12", "--device", "cpu"]
LONG = [*SMALL, "--epochs", "20", "--evaluate-every", "0", "--checkpoint-seconds", "0", "--learning-rate", "0.05"]


def picture(name, rng, side):
    return Image.fromarray((np.array(COLOURS[name]) + rng.integers(-60, 60, size=(side, side, 3))).astype(np.uint8))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder to work in, with pictures in it; data sets are kept there too."""
    folder = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    for name in COLOURS:
        (folder / "pictures" / name).mkdir(parents=True)
        for index in range(EACH):
            picture(name, rng, 36 + index % 3).save(folder / "pictures" / name / f"{index}.jpg", quality=95)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELHEAD_DATA", str(folder / "data"))
        patch.chdir(folder)
        yield folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def sentence(*arguments):
    """The error of a command; `main` prints it."""
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, Exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def environment(**others):
    return {**os.environ, "OMP_NUM_THREADS": "1", **others}  # the number of threads changes the last bits


def weights(folder):
    return load_checkpoint(folder / "model.safetensors")[0]


def assert_same_weights(folder, other):
    own, others = weights(folder), weights(other)
    assert own.keys() == others.keys()
    for name, tensor in own.items():
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name


def read_log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def trained(work):
    """A training in the folder `small`, and what it said."""
    return work / "small", succeed("train", "--data", "pictures", *SMALL, "--epochs", 6, "--out", "small")


# --- train ------------------------------------------------------------------------------------------------------------


def test_a_small_network_learns(trained):
    folder, said = trained
    assert load_result(folder / "result.json")["accuracy"] > 90
    assert "12 test images" in said.stdout
    assert "Kept in small; 'kernelhead predict small PICTURES' uses it" in said.stdout
    lines = said.stderr.splitlines()
    assert [line.split()[1] for line in lines] == [f"{epoch}/6" for epoch in range(1, 7)]
    pattern = r"epoch \d/6  loss \d\.\d{4}  train \d+\.\d\d %(  test \d+\.\d\d %)?  rate [\d.e-]+(  0:00:\d\d left)?"
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert ["left" in line for line in lines[1:]] == [True] * 4 + [False]


def test_a_network_of_torchvision_learns(work):
    options = ["--backbone", "resnet18", "--no-pretrained", "--size", 32, "--batch-size", 8, "--learning-rate", 0.01]
    options += ["--epochs", 6, "--evaluate-every", 0, "--device", "cpu"]
    succeed("train", "--data", "pictures", *options, "--out", "resnet18")
    result = load_result(work / "resnet18" / "result.json")
    assert result["accuracy"] > 90
    assert result["config"]["size"] == 32
    assert json.loads(succeed("evaluate", "resnet18", "--json").stdout)["accuracy"] == result["accuracy"]


def test_without_a_folder_it_goes_to_runs(work):
    succeed("train", "--data", "pictures", *SMALL, "--epochs", 1, "--head", "linear", "--seed", 4)
    assert (work / "runs" / "train" / "pictures-cifar_resnet8-linear-seed4" / "model.safetensors").exists()


def test_settings_shown_can_be_given_back(work):
    options = ["--data", "pictures", *SMALL, "--head-option", "degree=5", "--head-option", "temperature=2e1"]
    shown = succeed("train", *options, "--show-config").stdout
    (work / "shown.yaml").write_text(shown)
    assert succeed("train", "--config", "shown.yaml", "--show-config").stdout == shown
    changed = succeed("train", "--config", "shown.yaml", "--head-option", "degree=7", "--show-config").stdout
    assert changed == shown.replace("degree: 5", "degree: 7")
    assert "temperature: 20.0" in shown
    assert not (work / "runs" / "train" / "pictures-cifar_resnet8-kernel-seed0").exists()


def test_a_batch_size_that_nobody_chose_is_not_among_the_settings_shown(work):
    options = ["--data", "pictures", "--backbone", "cifar_resnet8", "--epochs", 1, "--device", "cpu"]
    shown = succeed("train", *options, "--show-config").stdout
    assert "batch_size: null" in shown
    assert "batch_size: 128" in succeed("train", "--data", "cifar10", "--show-config").stdout
    (work / "fitted.yaml").write_text(shown)
    succeed("train", "--config", "fitted.yaml", "--out", "fitted")
    assert load_result(work / "fitted" / "result.json")["config"]["batch_size"] < 64


@pytest.mark.parametrize("option", [("--head", "foo"), ("--head-option", "foo=1")])
def test_a_head_that_cannot_be_is_said_before_weights_are_fetched(work, monkeypatch, option):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("fetched"))
    assert "'foo'" in sentence("train", "--data", "pictures", "--backbone", "resnet18", "--pretrained", *option)


def test_a_training_is_not_written_over(trained):
    folder, _ = trained
    before = contents(folder)
    for options in ([], SMALL, [*SMALL, "--seed", 1]):
        assert "already holds a training; --resume" in sentence(
            "train", "--data", "pictures", *options, "--out", "small"
        )
    assert "was begun with epochs 6, not 9" in sentence("train", "--resume", "--out", "small", "--epochs", 9)
    assert "begun with head_options {}, not {'degree': 2}" in sentence(
        "train", "--resume", "--out", "small", "--head-option", "degree=2"
    )
    assert contents(folder) == before


def test_a_finished_training_may_be_resumed(trained, monkeypatch):
    folder, said = trained
    before = contents(folder)
    monkeypatch.setattr(Member, "step", lambda self: pytest.fail("trained again"))
    again = succeed("train", "--resume", "--out", "small", "--evaluate-every", 3)
    assert again.stdout == said.stdout
    assert again.stderr == ""
    after = contents(folder)
    assert after["metrics.jsonl"] == before["metrics.jsonl"]
    assert b"evaluate_every: 3" in after["config.yaml"]
    succeed("train", "--resume", "--out", "small", "--evaluate-every", 1)
    assert contents(folder)["config.yaml"] == before["config.yaml"]


def test_a_resumed_training_that_never_began(work):
    succeed("train", "--data", "pictures", *SMALL, "--epochs", 1, "--resume", "--out", "begun")
    assert (work / "begun" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data", "nowhere"], "there is no data set, folder or file 'nowhere'"),
        (["--epochs", 0], "epochs must be positive, got 0"),
        (["--head", "relu"], "unknown head 'relu'; choose one of softmax, linear"),
        (["--head-option", "degree"], "--head-option 'degree' has to be NAME=VALUE, such as degree=9"),
        (["--head-option", "degree=["], "--head-option 'degree=[' has a value that is not readable YAML"),
        (["--head-option", "degre=3"], "head 'kernel' has no option 'degre'; it takes degree"),
        (["--backbone", "resnet20"], "unknown backbone 'resnet20'"),
        (["--backbone", "timm/none"], "timm has no network called 'none'"),
        (["--batch-size", 100], "48 training images, fewer than a batch of 100"),
        (["--holdout", 2], "the share to hold out is 2.0; it has to lie between 0 and 1"),
        (["--config", "none.yaml"], "there is no file none.yaml"),
        (["--device", "gpu"], "unknown device 'gpu'; choose auto, cpu or cuda"),
        (["--learning-rate", "1e30", "--epochs", 2], "a smaller learning rate than 1e+30 may help"),
        (["--out", "pictures/red/1.jpg"], "pictures/red/1.jpg is a file; --out names a folder"),
        (
            ["--backbone", "timm/vit_tiny_patch16_224", "--no-pretrained", "--size", 64],
            "(64) doesn't match model (224)",
        ),
    ],
)
def test_mistakes_are_one_sentence(work, tmp_path, options, expected):
    out = [] if "--out" in options else ["--out", tmp_path / "out"]
    assert expected in sentence("train", "--data", "pictures", *SMALL, *options, *out)
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--backbone", "resnet19"], "unknown backbone 'resnet19'"),
        (["--head-option", "degree=a"], "needs degree to be a positive integer, got 'a'"),
        (["--head-option", "degre=3"], "head 'kernel' has no option 'degre'"),
        (["--backbone", "resnet18", "--weights", "none.safetensors"], "there is no weights file none.safetensors"),
        (["--teacher", "nobody"], "there is no trained classifier in nobody"),
        (["--holdout", 2], "the share to hold out is 2.0"),
        (["--out", "pictures/red/1.jpg/out"], "pictures/red/1.jpg/out cannot be made or written to"),
    ],
)
def test_what_is_quickly_seen_is_said_before_pictures_are_read(work, monkeypatch, options, expected):
    monkeypatch.setattr(job, "open_data", lambda *_, **__: pytest.fail("the pictures were read"))
    assert expected in sentence("train", "--data", "pictures", *SMALL, *options)


def test_a_few_pictures_make_small_batches(work):
    """Of 48 images for training; 64 would be the batch size."""
    start = ["train", "--data", "pictures", "--backbone", "cifar_resnet8", "--device", "cpu", "--seed", 9]
    said = succeed(*start, "--epochs", 1)
    assert said.stderr.splitlines()[0] == "batches of 16, for 48 training images; --batch-size chooses another number"
    folder = work / "runs" / "train" / "pictures-cifar_resnet8-kernel-seed9"
    assert load_result(folder / "result.json")["config"]["batch_size"] == 16
    assert load_checkpoint(folder / "checkpoint.safetensors")[0]["0.losses"].shape == (3,)
    again = succeed(*start, "--epochs", 1, "--resume")  # the same command, which does not say the folder
    assert again.stdout == said.stdout
    assert again.stderr == ""
    (work / "few.yaml").write_text("epochs: 1\n")
    assert succeed(*start, "--resume", "--config", "few.yaml").stdout == said.stdout
    chosen = sentence(*start, "--batch-size", 64, "--out", "chosen")
    assert chosen.endswith("48 training images, fewer than a batch of 64; choose a smaller one with --batch-size")


def test_a_network_that_the_last_step_broke(trained, work):
    broken = ["--batch-size", 48, "--epochs", 1, "--learning-rate", "1e38", "--out", "broken"]
    assert "not finite any more after the last step, 0; a smaller learning rate than 1e+38 may help" in sentence(
        "train", "--data", "pictures", *SMALL, *broken
    )
    assert load_result(work / "broken" / "result.json")["diverged_at"] == 0
    assert "diverged and left no classifier" in sentence("predict", "broken", "pictures")
    for more in ([], ["--resume"]):
        again = sentence("train", "--data", "pictures", *SMALL, "--out", "broken", *more)
        assert again == "broken holds a training that diverged, see its result.json; --out names another place"
    saved = load_classifier(trained[0])  # as it was kept once
    with torch.no_grad():
        saved.model.head.weight.fill_(math.nan)
    save_classifier(work / "nan.safetensors", saved)
    for command in (["predict", "nan.safetensors", "pictures"], ["evaluate", "nan.safetensors"]):
        assert sentence(*command).startswith("nan.safetensors has weights that are not finite")
    torch.save(saved.model.state_dict(), work / "own.pt")
    for command in (["predict", "own.pt", "pictures"], ["evaluate", "own.pt"], ["export", "own.pt"]):
        assert sentence(*command).startswith("own.pt was not written by kernelhead train")


def test_without_pillow_training_names_the_remedy(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    remedy = "pictures need Pillow; pip install 'kernelhead[vision]' brings it"
    assert sentence("train", "--data", "pictures", *SMALL, "--out", "none") == remedy
    assert sentence("data", "pack", "pictures", "--out", "none.safetensors") == remedy


# --- packed folders ---------------------------------------------------------------------------------------------------


def test_packed_folders_are_listed_and_removed_when_they_are_of_no_use(work, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(console, "width", 400)  # a line a file, however long the names of the folders
    packed = tmp_path / "data" / "packed"
    parts = tmp_path / "parts"
    for part in ("train", "test"):
        shutil.copytree(work / "pictures", parts / part)
    for name in ("kept", "changed", "gone"):
        shutil.copytree(work / "pictures", tmp_path / name)
        os.utime(tmp_path / name / "red" / "2.jpg", (len(name), len(name)))  # no two have the same state
    for name in ("parts", "kept", "changed", "gone"):
        job.open_for(make_config(None, {"data": str(tmp_path / name), "backbone": "lenet5"}), torch.device("cpu"))
    saved = SimpleNamespace(settings={"short_side": 30}, input=Input(32, (0.5,) * 3, (0.5,) * 3))
    open_other(saved, str(tmp_path / "kept"), torch.device("cpu"), None)  # another size, as `evaluate` may need
    os.utime(tmp_path / "changed" / "red" / "2.jpg", (99, 99))
    shutil.rmtree(tmp_path / "gone")
    before = {path.name: path for path in packed.glob("*.safetensors")}
    assert len(before) == 6
    shutil.copyfile(before[min(before)], packed / "old-0123.safetensors")  # made when nothing was noted

    def rows(*command):
        """Of the table of packed files, start of the name -> state."""
        cells = [line.split("│")[1:-1] for line in succeed("data", *command).stdout.splitlines()]
        files = [[cell.strip() for cell in line] for line in cells if len(line) == 4]
        return sorted((file.rpartition("-")[0], state) for file, _, _, state in files)

    fine = "as its folder is"
    useless = [("changed", "its folder has changed"), ("gone", "its folder is gone")]
    others = [
        ("kept", fine),
        ("kept", fine),
        ("old", "of an unknown folder"),
        ("parts-test", fine),
        ("parts-train", fine),
    ]
    assert rows("list") == useless + others
    assert rows("clean") == useless
    assert "nothing was removed; the same command with --yes" in succeed("data", "clean").stdout
    assert set(before) < {path.name for path in packed.iterdir()}
    assert rows("clean", "--yes") == useless
    assert rows("list") == others
    assert len(list(packed.iterdir())) == 5 + 4  # a note beside each but the old one
    assert f"nothing to remove in {packed}" in succeed("data", "clean", "--yes").stdout
    assert f"removed 5 from {packed}" in succeed("data", "clean", "--all", "--yes").stdout
    assert list(packed.iterdir()) == []
    assert "packed file" not in succeed("data", "list").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here(trained):
    for command in (["train", "--data", "pictures"], ["evaluate", "small"], ["predict", "small", "pictures"]):
        assert "there is no CUDA device here" in sentence(*command, "--device", "cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--epochs", "many"],
        ["train", "--lr", "3"],
        ["predict", "small"],
        ["predict", "small", "x", "--top", "0"],
    ],
)
def test_wrong_usage_has_its_own_exit_code(work, arguments):
    assert invoke(*arguments).exit_code == 2


def test_of_several_processes_that_fail_the_first_speaks(work, monkeypatch):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    for rank, waits in (("0", []), ("1", [cli.PATIENCE])):
        monkeypatch.setenv("RANK", rank)
        assert "epochs must be positive" in sentence("train", "--data", "pictures", "--epochs", 0)
        assert waited == waits


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(work):
    succeed("train", "--data", "pictures", *LONG, "--out", "uninterrupted")
    return work / "uninterrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_and_resumed_it_is_the_same_to_the_bit(work, uninterrupted, number):
    folder = work / f"interrupted-{number.name}"
    command = [sys.executable, "-m", "kernelhead", "train", "--data", "pictures", *LONG, "--out", folder.name]
    # A shell that runs the tests in the background has them ignore SIGINT, and a child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    signal.signal(signal.SIGINT, before)
    while not (folder / "metrics.jsonl").exists():  # an epoch is done
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(number)
    printed, messages = process.communicate(timeout=60)
    assert printed == ""
    assert "Traceback" not in messages
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        kept = f"interrupted; the training is kept in {folder.name}, and the same command with --resume goes on"
        assert messages.count(kept) == 1
    assert not (folder / "model.safetensors").exists()
    assert "is not finished; 'kernelhead train --resume" in sentence("evaluate", folder)
    succeed("train", "--resume", "--out", folder)
    assert_same_weights(folder, uninterrupted)
    figures = [load_result(out / "result.json") for out in (folder, uninterrupted)]
    for name in ("accuracy", "nll", "ece", "alpha", "images"):
        assert figures[0][name] == figures[1][name]
    for own, other in zip(read_log(folder), read_log(uninterrupted), strict=True):
        assert {**own, "seconds": 0} == {**other, "seconds": 0}


# --- several processes ------------------------------------------------------------------------------------------------


def test_two_processes_train_like_one(work):
    options = ["train", "--data", "pictures", *SMALL, "--epochs", "2", "--tensorboard"]
    succeed(*options, "--out", "one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "kernelhead", *options, "--out", "two"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Kept in two") == 1
    assert len(re.findall(r"^epoch \d/2", done.stderr, re.MULTILINE)) == 2
    assert len(list((work / "two" / "tensorboard").iterdir())) == 1
    for one, two in zip(read_log(work / "one"), read_log(work / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    own, other = weights(work / "one"), weights(work / "two")
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor.float(), other[name].float(), rtol=0.02, atol=0.002)


# --- evaluate and predict ---------------------------------------------------------------------------------------------


def by_hand(saved, path):
    """The probabilities of the classes for a square picture, by torch's own resizing."""
    with Image.open(path) as opened:
        pixels = torch.from_numpy(np.array(opened)).permute(2, 0, 1)[None].double() / 255
    resized = F.interpolate(pixels, (37, 37), mode="bilinear", antialias=True)[:, :, 2:34, 2:34]
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (saved.input.mean, saved.input.std))
    with torch.no_grad():
        return saved.model(((resized - mean) / std).float()).softmax(1)[0]


def test_evaluation_prediction_and_torch_agree(trained):
    folder, _ = trained
    own = json.loads(succeed("evaluate", "small", "--json").stdout)
    result = load_result(folder / "result.json")
    assert own == {"images": 12, "accuracy": result["accuracy"], "nll": result["nll"], "ece": result["ece"]}
    whole = json.loads(succeed("evaluate", "small", "--data", "pictures", "--json").stdout)
    assert whole["images"] == 3 * EACH
    rows = json.loads(succeed("predict", "small", "pictures", "--format", "json", "--top", 3).stdout)
    assert len(rows) == 3 * 3 * EACH
    probabilities = {(row["picture"], row["class"]): row["probability"] for row in rows}
    best = rows[::3]
    right = [row["class"] == row["picture"].split("/")[1] for row in best]
    assert whole["accuracy"] == pytest.approx(100 * np.mean(right))
    losses = [-math.log(probabilities[row["picture"], row["picture"].split("/")[1]]) for row in best]
    assert whole["nll"] == pytest.approx(np.mean(losses), rel=1e-3)
    saved = load_classifier(folder)
    for row in best[::7]:
        expected = by_hand(saved, row["picture"])
        assert row["class"] == saved.classes[int(expected.argmax())]
        for name, probability in zip(saved.classes, expected.tolist(), strict=True):
            assert probabilities[row["picture"], name] == pytest.approx(probability, abs=1e-4)


def test_evaluation_as_a_table(trained):
    said = succeed("evaluate", "small", "--data", "pictures")
    figures = json.loads(succeed("evaluate", "small", "--data", "pictures", "--json").stdout)
    assert "pictures, 60 images" in said.stdout
    assert f"{figures['accuracy']:.2f}" in said.stdout
    assert f"{figures['nll']:.4f}" in said.stdout
    assert said.stderr == ""


def test_evaluation_on_fewer_classes(trained, work):
    rng = np.random.default_rng(3)
    for name in ("blue", "red"):
        (work / "[b] :cat: fewer" / name).mkdir(parents=True)
        for index in range(3):
            picture(name, rng, 40).save(work / "[b] :cat: fewer" / name / f"{index}.png")
    said = succeed("evaluate", "small", "--data", "[b] :cat: fewer").stdout
    assert "[b] :cat: fewer, 6 images" in said
    assert "100.00" in said
    (work / "[b] :cat: fewer" / "red").rename(work / "[b] :cat: fewer" / "more")
    assert "the classifier knows no class 'more'" in sentence("evaluate", "small", "--data", "[b] :cat: fewer")


def test_evaluation_from_another_folder(trained, tmp_path, monkeypatch):
    folder, _ = trained
    here = succeed("evaluate", "small", "--json").stdout
    monkeypatch.chdir(tmp_path)
    assert succeed("evaluate", folder, "--json").stdout == here


ODD_NAMES = ["a [x] b.png", "[red]bold.png", 'grün, "緑".png', ":cat:.png", "two\nlines.png"]


@pytest.fixture(scope="module")
def odd(work):
    """Pictures with odd names and of odd kinds; `broken.jpg` is none. Red is what they show."""
    folder = work / "odd"
    folder.mkdir()
    plain = picture("red", np.random.default_rng(1), 40)
    for name in ODD_NAMES:
        plain.save(folder / name)
    plain.convert("CMYK").save(folder / "cmyk.jpg")
    plain.convert("RGBA").save(folder / "rgba.png")
    plain.convert("P").save(folder / "palette.png")
    turned = plain.getexif()
    turned[0x0112] = 6
    plain.save(folder / "turned.jpg", exif=turned)
    Image.new("RGB", (1, 1), COLOURS["red"]).save(folder / "pixel.png")
    Image.new("RGB", (300, 2), COLOURS["red"]).save(folder / "thin.png")
    plain.convert("L").save(folder / "zz-grey.png")  # of no colour: that it is read is enough
    (folder / "broken.jpg").write_text("no picture")
    (folder / "note.txt").write_text("not a picture, and not named like one")
    return folder


def test_predictions_in_three_formats(trained, odd):
    names = {str(odd.relative_to(odd.parent) / path.name) for path in odd.iterdir()}
    names -= {"odd/broken.jpg", "odd/note.txt"}
    said = {name: invoke("predict", "small", "odd", "--format", name) for name in ("json", "csv", "table")}
    for result in said.values():
        assert result.exit_code == 1  # one could not be read
        assert [line.split(" (")[0] for line in result.stderr.splitlines()] == [
            "odd/broken.jpg is not a readable picture"
        ]
    rows = json.loads(said["json"].stdout)
    assert {row["picture"] for row in rows} == names
    assert [row["picture"] for row in rows] == sorted(row["picture"] for row in rows)
    assert {row["class"] for row in rows if "grey" not in row["picture"]} == {"red"}
    read = list(csv.DictReader(io.StringIO(said["csv"].stdout, newline="")))
    assert [{**row, "probability": float(row["probability"])} for row in read] == rows
    for row in rows:
        for line in row["picture"].split("\n"):
            assert line in said["table"].stdout
        assert f"{row['probability']:.4f}" in said["table"].stdout


def test_pictures_that_are_named_and_the_best_classes(trained, odd):
    rows = json.loads(
        succeed("predict", "small", "odd/pixel.png", "pictures/blue/1.jpg", "--top", 9, "--format", "json").stdout
    )
    assert [row["picture"] for row in rows] == ["odd/pixel.png"] * 3 + ["pictures/blue/1.jpg"] * 3
    for group in (rows[:3], rows[3:]):
        assert {row["class"] for row in group} == set(COLOURS)
        chances = [row["probability"] for row in group]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1, abs=1e-5)


def test_mistakes_in_predicting_are_one_sentence(trained, odd, tmp_path):
    assert "there is no file or folder none.jpg" in sentence("predict", "small", "none.jpg")
    assert "has no pictures (.bmp" in sentence("predict", "small", tmp_path)
    assert "unknown format 'xml'; choose one of table, json, csv" in sentence(
        "predict", "small", "odd", "--format", "xml"
    )
    assert "there is no trained classifier in nowhere" in sentence("predict", "nowhere", "odd")
    (tmp_path / "m.safetensors").write_bytes((trained[0] / "model.safetensors").read_bytes()[:-9])
    assert "is not a readable checkpoint" in sentence("predict", tmp_path / "m.safetensors", "odd")


def test_as_a_person_sees_it(trained, odd):
    """In a process of its own: the rows to a parser, the sentences beside them, and nothing else."""
    command = [sys.executable, "-m", "kernelhead", "predict", "small", "odd", "--format", "csv"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.returncode == 1
    assert len(list(csv.DictReader(io.StringIO(done.stdout, newline="")))) == len(ODD_NAMES) + 7
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("odd/broken.jpg is not a readable picture")


# --- what is shown meanwhile ------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(_progress, "messages", console)
    monkeypatch.setattr(_progress, "say", lambda sentence, **_: console.print(sentence))
    return console


def moment(step, epoch=117, test_accuracy=None):
    figures = {"losses": [1.63704], "accuracies": [1.0], "learning_rates": [1.62e-6]}
    now = SimpleNamespace(step=step, steps=78000, epoch=epoch, epoch_done=False, **figures)
    return SimpleNamespace(moment=now, epochs=200, test_accuracy=test_accuracy)


def test_the_longest_bar_fits_into_80_columns(terminal):
    with _progress.training_bar("kept") as show:
        show(moment(100))
        time.sleep(0.01)
        show(moment(7000, test_accuracy=100.0))
        show(moment(7100))
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.file.getvalue()).replace("\r", "\n")
    last = [line for line in shown.splitlines() if "epoch" in line][-1]
    assert len(last) <= 80
    assert re.match(
        r"epoch 117/200 [━╸╺ ]+ loss 1\.637  train 100\.0 %  test 100\.0 %  rate 1\.6e-06 \d:\d\d:\d\d$", last
    )


def test_names_in_a_bar_are_not_markup(terminal):
    with _progress.steps_bar() as show:
        show("packing a[/b]", 1, 2)
    assert "packing a[/b]" in terminal.file.getvalue()


def test_without_a_terminal_a_bar_says_nothing(monkeypatch):
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(_progress, "messages", console)
    with _progress.steps_bar() as show:
        show("packing", 1, 2)
    assert console.file.getvalue() == ""


def test_leaving_says_what_is_kept(terminal):
    for bar in (_progress.training_bar, _progress.steps_bar):
        with pytest.raises(typer.Exit) as caught, bar("all is kept"):
            raise KeyboardInterrupt
        assert caught.value.exit_code == 130
    assert terminal.file.getvalue().count("interrupted; all is kept") == 2


# --- a teacher --------------------------------------------------------------------------------------------------------


def test_a_student_learns_from_a_teacher(trained, work):
    succeed(
        "train",
        "--data",
        "pictures",
        *SMALL,
        "--epochs",
        8,
        "--teacher",
        "small",
        "--temperature",
        "4",
        "--out",
        "student",
    )
    result = load_result(work / "student" / "result.json")
    assert result["accuracy"] > 90
    assert result["config"]["temperature"] == 4
    assert result["config"]["teacher"] == str(work / "small")
    assert json.loads(succeed("evaluate", "student", "--json").stdout)["accuracy"] == result["accuracy"]


def test_a_teacher_that_does_not_match_is_refused(trained, work):
    shutil.copytree(work / "pictures", work / "others")
    first = sorted(folder for folder in (work / "others").iterdir() if folder.is_dir())[0]
    first.rename(work / "others" / "zebra")
    start = ["train", "--data", "others", *SMALL]
    assert "knows other classes than the data" in sentence(*start, "--teacher", "small", "--out", "a")
    assert "there is no trained classifier in" in sentence(*start, "--teacher", "nothing", "--out", "b")
    larger = ["train", "--data", "pictures", *SMALL, "--size", 40]
    assert "expects other images: 32x32" in sentence(*larger, "--teacher", "small", "--out", "c")
