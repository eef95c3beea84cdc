"""`kernelhead train | evaluate | predict | select | export` on images whose class is their colour.

Most commands run in this process; those that are killed, and those of several processes, in their own.
"""

import csv
import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from kernelhead.cli import _progress, app
from kernelhead.cli import train as cli
from kernelhead.finetune import trainer
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.results import load_result
from kernelhead.finetune.saved import load_classifier, save_classifier
from kernelhead.finetune.trainer import Moment

NAMES = {"blue", "green", "red"}
RED = (170, 60, 60)
EACH = 20
OWN = ["--backbone", "tiny_networks:tiny", "--head-option", "landmarks=16", "--device", "cpu", "--no-report"]
SMALL = [*OWN, "--batch-size", "12", "--epochs", "12"]
LONG = [*OWN, "--batch-size", "12", "--epochs", "40", "--evaluate-every", "0", "--checkpoint-seconds", "0"]


@pytest.fixture(scope="module")
def work(colours):
    """The folder of the images, to work in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELHEAD_DATA", str(colours / "data"))
        patch.chdir(colours)
        yield colours


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


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # the number of threads changes the last bits


def weights(folder):
    return load_checkpoint(folder / "model.safetensors")[0]


def read_log(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def trained(work):
    """A run in the folder `small`, and what it said."""
    return work / "small", succeed("train", "--data", "images", *SMALL, "--out", "small")


# --- train ------------------------------------------------------------------------------------------------------------


def test_a_small_network_learns(trained):
    folder, said = trained
    assert load_result(folder / "result.json").accuracy > 90
    assert "12 test images" in said.stdout
    assert "Kept in small; 'kernelhead predict small IMAGES' uses it" in said.stdout
    lines = said.stderr.splitlines()
    assert [line.split()[1] for line in lines] == [f"{epoch}/12" for epoch in range(1, 13)]
    pattern = r"epoch \d+/12  loss \d\.\d{4}  train \d+\.\d\d %  [\d.]+ images/s  rate [\d.e-]+(  0:00:\d\d left)?"
    assert all(re.fullmatch(pattern, line) for line in lines), lines
    assert ["left" in line for line in lines[1:]] == [True] * 10 + [False]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["resnet18", "timm/test_resnet"])
def test_a_network_of_a_library_learns(work, backbone):
    options = ["--backbone", backbone, "--no-pretrained", "--image-size", 32, "--batch-size", 8, "--head", "linear"]
    options += ["--learning-rate", 0.01, "--epochs", 12, "--evaluate-every", 0, "--device", "cpu"]
    succeed("train", "--data", "images", *options, "--out", backbone.replace("/", "-"))
    result = load_result(work / backbone.replace("/", "-") / "result.json")
    assert result.accuracy > 90
    assert result.spec.image_size == 32
    evaluated = json.loads(succeed("evaluate", backbone.replace("/", "-"), "--json").stdout)
    assert evaluated["accuracy"] == result.accuracy


def test_without_a_folder_it_goes_to_runs_with_a_report(work):
    succeed("train", "--data", "images", *SMALL[:2], "--epochs", 1, "--head", "linear", "--seed", 4)
    folder = work / "runs" / "train" / "images-tiny_networks-tiny-linear-seed4"
    assert {"model.safetensors", "report.html", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    said = succeed("evaluate", folder, "--data", "images", "--out", "seen").stdout
    assert f"Written {Path('seen', 'report.html')} and" in said
    assert "48 of these images were in the training" in (work / "seen" / "report.html").read_text()


def test_without_plotly_there_is_no_report_but_a_classifier(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    options = ["--backbone", "tiny_networks:tiny", "--device", "cpu", "--batch-size", 12, "--epochs", 1]
    with pytest.warns(UserWarning, match=r"there is no report: a report needs plotly.*; install it with pip install"):
        succeed("train", "--data", "images", *options, "--head", "linear", "--out", "plain")
    assert (work / "plain" / "predictions.csv").exists()
    assert not (work / "plain" / "report.html").exists()


def test_evaluation_keeps_its_test_images_whatever_is_added(work, tmp_path):
    shutil.copytree(work / "images", tmp_path / "mine")
    own = ["--backbone", "tiny_networks:tiny", "--head", "linear", "--device", "cpu", "--no-report", "--epochs", 1]
    succeed("train", "--data", tmp_path / "mine", *own, "--out", tmp_path / "run")
    before = json.loads(succeed("evaluate", tmp_path / "run", "--json").stdout)
    tested = [name for name, _, _ in load_classifier(tmp_path / "run").files["test"]]
    for index in range(30):
        shutil.copy(tmp_path / "mine" / "red" / "1.png", tmp_path / "mine" / "red" / f"a{index}.png")
    assert json.loads(succeed("evaluate", tmp_path / "run", "--json").stdout) == before
    trained = {name for name, _, _ in load_classifier(tmp_path / "run").files["train"]}
    found = json.loads(invoke("evaluate", tmp_path / "run", "--data", tmp_path / "mine", "--json").stdout)
    copies = {f"red/a{index}.png" for index in range(30)} if "red/1.png" in trained else set()
    assert set(found["seen_in_training"]) == trained | copies  # a copy is known by its content
    (tmp_path / "mine" / tested[0]).unlink()
    with pytest.warns(UserWarning, match="1 images cannot be read and are left out"):
        assert json.loads(invoke("evaluate", tmp_path / "run", "--json").stdout)["images"] == 11


def test_settings_shown_can_be_given_back(work):
    options = ["--data", "nowhere yet", "--head-option", "degree=5", "--head-option", "gamma=2e1"]
    shown = succeed("train", *options, "--show-config").stdout
    (work / "shown.yaml").write_text(shown)
    assert succeed("train", "--config", "shown.yaml", "--show-config").stdout == shown
    changed = succeed("train", "--config", "shown.yaml", "--head-option", "degree=7", "--show-config").stdout
    assert changed == shown.replace("degree: 5", "degree: 7")
    assert succeed("train", "--show-config", "--head-option", "degree=5").stdout.startswith("data: ''\n")  # needs none
    for line in ("gamma: 20.0", "backbone: torchvision/resnet50", "image_size: 224", "epochs: 30", "batch_size: null"):
        assert line in shown


@pytest.mark.parametrize("option", [("--head", "foo"), ("--head-option", "foo=1")])
def test_a_head_that_cannot_be_is_said_before_weights_are_fetched(work, monkeypatch, option):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("fetched"))
    assert "'foo'" in sentence("train", "--data", "images", "--backbone", "resnet18", "--pretrained", *option)


def test_a_run_is_not_written_over(trained):
    folder, _ = trained
    before = contents(folder)
    for options in ([], SMALL, [*SMALL, "--seed", 1]):
        assert "already holds a run; continue it with --resume" in sentence(
            "train", "--data", "images", *options, "--out", "small"
        )
    assert "epochs is 9 here and 12 there" in sentence("train", "--resume", "--out", "small", "--epochs", 9)
    assert "head_options is {'landmarks': 16, 'degree': 2} here and {'landmarks': 16} there" in sentence(
        "train", "--resume", "--out", "small", "--head-option", "degree=2"
    )
    assert contents(folder) == before


def test_a_finished_run_may_be_resumed(trained, monkeypatch):
    folder, said = trained
    before = contents(folder)
    monkeypatch.setattr(trainer, "mix", lambda *_: pytest.fail("trained again"))
    again = succeed("train", "--resume", "--out", "small", "--evaluate-every", 3)
    assert again.stdout == said.stdout
    assert again.stderr == ""
    after = contents(folder)
    assert after["metrics.jsonl"] == before["metrics.jsonl"]
    assert b"evaluate_every: 3" in after["config.yaml"]
    succeed("train", "--resume", "--out", "small", "--evaluate-every", 1)
    assert contents(folder)["config.yaml"] == before["config.yaml"]


def test_a_resumed_run_that_never_began(work):
    succeed("train", "--data", "images", *SMALL, "--epochs", 1, "--resume", "--out", "begun")
    assert (work / "begun" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--data", "nowhere"], "there is no data set or folder 'nowhere'"),
        (["--epochs", 0], "epochs must be positive, got 0"),
        (["--head", "relu"], "unknown head 'relu'; choose one of kernel, prototypes"),
        (["--head-option", "linear.degree=3"], "is for a head that is not trained; add --head linear"),
        (["--head-option", "degree"], "--head-option takes NAME=VALUE, such as degree=9; got 'degree'"),
        (["--head-option", "degree=["], "the value of --head-option 'degree=[' is not readable YAML"),
        (["--head-option", "degre=3"], "head 'landmarks' has no option 'degre'; it takes degree"),
        (["--head-option", "degree=a"], "degree"),
        (["--backbone", "resnet20"], "there is no network called 'resnet20'"),
        (["--backbone", "timm/none"], "there is no network called 'none' in timm"),
        (["--backbone", "tiny_networks:huge"], "module 'tiny_networks' has no function 'huge'"),
        (["--weights", "none.safetensors"], "there is no weights file none.safetensors"),
        (["--test", 2], "test and val must be shares below 1 together, test above 0; got 2.0 and 0.0"),
        (["--config", "none.yaml"], "there is no file none.yaml"),
        (["--device", "gpu"], "unknown device 'gpu'; choose auto, cpu or cuda"),
        (["--out", "images/red/1.png"], "--out takes a folder, and images/red/1.png is a file"),
        (["--out", "images/red/1.png/out"], "--out takes a folder, and images/red/1.png is a file"),
    ],
)
def test_what_is_quickly_seen_is_said_before_images_are_read(work, tmp_path, monkeypatch, options, expected):
    monkeypatch.setattr("kernelhead.finetune.data.read_images", lambda *_, **__: pytest.fail("the images were read"))
    out = [] if "--out" in options else ["--out", tmp_path / "out"]
    assert expected in sentence("train", "--data", "images", *SMALL, *options, *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", 100], "48 training images, fewer than a batch of 100"),
        (["--learning-rate", "1e30", "--head", "linear"], "choose a smaller --learning-rate than 1e+30"),
    ],
)
def test_mistakes_that_take_longer_are_one_sentence(work, tmp_path, options, expected):
    options = [each for each in SMALL if "landmarks" not in each and each != "--head-option"] + options
    assert expected in sentence("train", "--data", "images", *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_few_images_make_small_batches(work):
    """Of 48 images for training; 128 would be the batch size."""
    start = ["train", "--data", "images", *OWN, "--seed", 9]
    said = succeed(*start, "--epochs", 1)
    assert said.stderr.splitlines()[0] == "batches of 16 for 48 images; choose with --batch-size"
    folder = work / "runs" / "train" / "images-tiny_networks-tiny-landmarks-seed9"
    assert load_result(folder / "result.json").spec.batch_size == 16
    assert load_checkpoint(folder / "checkpoint.safetensors")[0]["losses"].shape == (3,)
    again = succeed(*start, "--epochs", 1, "--resume")  # the same command, which does not say the folder
    assert again.stdout == said.stdout
    (work / "few.yaml").write_text("epochs: 1\n")
    assert succeed(*start, "--resume", "--config", "few.yaml").stdout == said.stdout


def test_a_run_that_diverged(trained, work):
    broken = ["--backbone", "tiny_networks:tiny", "--device", "cpu", "--batch-size", 48, "--epochs", 1]
    broken += ["--head", "linear", "--learning-rate", "1e38", "--momentum", 0, "--out", "broken"]
    wrong = "not finite after step 0; choose a smaller --learning-rate than 1e+38"
    assert wrong in sentence("train", "--data", "images", *broken)
    assert load_result(work / "broken" / "result.json").diverged_at == 0
    assert "diverged and left no classifier" in sentence("predict", "broken", "images")
    assert "already holds a run" in sentence("train", "--data", "images", *broken)
    assert wrong in sentence("train", "--data", "images", *broken, "--resume")
    saved = load_classifier(trained[0])
    with torch.no_grad():
        saved.head.weight.fill_(torch.nan)
    save_classifier(work / "nan.safetensors", saved)
    for command in (["predict", "nan.safetensors", "images"], ["evaluate", "nan.safetensors"]):
        assert sentence(*command).startswith("nan.safetensors has weights that are not finite")


def test_without_pillow_it_names_the_remedy(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    remedy = "reading images needs PIL; install it with pip install 'kernelhead[vision]'"
    assert sentence("train", "--data", "images", *SMALL, "--out", "none") == remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here(trained):
    for command in (["train", "--data", "images", *OWN], ["evaluate", "small"], ["predict", "small", "images"]):
        assert "there is no CUDA device 0 here" in sentence(*command, "--device", "cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--epochs", "many"],
        ["train", "--lr", "3"],
        ["predict", "small"],
        ["predict", "small", "x", "--top", "0"],
        ["select", "small", "x"],
    ],
)
def test_wrong_usage_has_its_own_exit_code(work, arguments):
    assert invoke(*arguments).exit_code == 2


def test_of_several_processes_that_fail_the_first_speaks(work, monkeypatch):
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    for rank, waits in (("0", []), ("1", [cli.PATIENCE_SECONDS])):
        monkeypatch.setenv("RANK", rank)
        assert "epochs must be positive" in sentence("train", "--data", "images", *OWN, "--epochs", 0)
        assert waited == waits


def test_heads_beside_one_another(work):
    """The same as each by itself, and a table of differences that the predictions bear out."""
    heads = ["--head", "linear", "--head", "landmarks", "--head-option", "landmarks.landmarks=16"]
    own = ["--backbone", "tiny_networks:tiny", "--device", "cpu", "--no-report", "--batch-size", 12, "--epochs", 2]
    start = ["train", "--data", "images", *own]
    said = succeed(*start, *heads, "--seed", 1, "--seed", 2, "--out", "beside")
    runs = {(head, seed): work / "beside" / f"{head}-seed{seed}" for head in ("linear", "landmarks") for seed in (1, 2)}
    succeed(*start, "--head", "landmarks", "--head-option", "landmarks=16", "--seed", 2, "--out", "apart")
    for name, tensor in weights(work / "apart").items():
        assert torch.equal(tensor, weights(runs["landmarks", 2])[name])
    assert load_result(runs["linear", 1] / "result.json").spec.head_options == {}
    right = {}
    for key, folder in runs.items():
        rows = list(csv.DictReader(io.StringIO((folder / "predictions.csv").read_text())))
        right[key] = np.array([row["class"] == row["predicted"] for row in rows])
        assert 100 * right[key].mean() == pytest.approx(load_result(folder / "result.json").accuracy)
    gap = 100 * np.mean([right["landmarks", seed].mean() - right["linear", seed].mean() for seed in (1, 2)])
    told = json.loads((work / "beside" / "comparison.json").read_text())
    assert told["first"] == "linear"
    assert told["heads"]["landmarks"]["difference"]["points"] == pytest.approx(gap)
    assert f"{gap:+.2f} ±" in said.stdout
    assert "12 test images, 2 seeds" in said.stdout
    assert [line for line in said.stderr.splitlines() if line.startswith("head ")] == [
        f"head {head}, seed {seed}" for head, seed in runs
    ]
    again = succeed(*start, *heads, "--seed", 1, "--seed", 2, "--out", "beside", "--resume")
    assert again.stdout == said.stdout


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_and_resumed_it_is_the_same_to_the_bit(work, number):
    if not (work / "uninterrupted").exists():
        succeed("train", "--data", "images", *LONG, "--out", "uninterrupted")
    folder, whole = work / f"interrupted-{number.name}", work / "uninterrupted"
    command = [sys.executable, "-m", "kernelhead", "train", "--data", "images", *LONG, "--out", folder.name]
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
        kept = f"interrupted; the run is kept in {folder.name}, and the same command with --resume continues it"
        assert messages.count(kept) == 1
    assert not (folder / "model.safetensors").exists()
    assert "is unfinished; 'kernelhead train --resume" in sentence("evaluate", folder)
    succeed("train", "--resume", "--out", folder)
    own, other = weights(folder), weights(whole)
    assert {name: x.numpy().tobytes() for name, x in own.items()} == {n: x.numpy().tobytes() for n, x in other.items()}
    figures = [load_result(out / "result.json") for out in (folder, whole)]
    for name in ("accuracy", "nll", "ece", "alpha", "images"):
        assert getattr(figures[0], name) == getattr(figures[1], name)
    for mine, its in zip(read_log(folder), read_log(whole), strict=True):
        assert {**mine, "seconds": 0} == {**its, "seconds": 0}


@pytest.mark.slow
def test_two_processes_train_like_one(work):
    own = ["--backbone", "tiny_networks:grouped", "--head", "kernel", "--device", "cpu"]  # without BatchNorm
    options = ["train", "--data", "images", *own, "--batch-size", 12, "--epochs", "2", "--tensorboard"]
    succeed(*options, "--out", "one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "kernelhead", *options, "--out", "two"]
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=120, env=environment(), check=False
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


# --- evaluate, predict, select, export --------------------------------------------------------------------------------


def test_figures_as_json_and_as_a_table(trained):
    folder, _ = trained
    own = json.loads(succeed("evaluate", "small", "--json").stdout)
    result = load_result(folder / "result.json")
    assert own == {
        "images": 12,
        "seen_in_training": [],
        "accuracy": result.accuracy,
        "nll": result.nll,
        "ece": result.ece,
    }
    whole = json.loads(succeed("evaluate", "small", "--data", "images", "--json").stdout)
    assert whole["images"] == 3 * EACH
    said = succeed("evaluate", "small", "--data", "images")
    assert "images, 60 images" in said.stdout
    assert f"{whole['accuracy']:.2f}" in said.stdout
    assert f"{whole['nll']:.4f}" in said.stdout
    assert re.fullmatch(r"48 of the 60 images were in the training: \w+/\d+.png, .*, \.\.\n", said.stderr)
    rows = json.loads(succeed("predict", "small", "images", "--format", "json", "--top", 3).stdout)
    assert len(rows) == 3 * 3 * EACH
    right = [row["class"] == row["image"].split("/")[1] for row in rows[::3]]
    assert whole["accuracy"] == pytest.approx(100 * np.mean(right))
    losses = [-np.log(row["probability"]) for row in rows if row["class"] == row["image"].split("/")[1]]
    assert whole["nll"] == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-6)


def test_evaluation_on_fewer_classes(trained, work):
    other = work / "[b] :cat: fewer"
    for name in ("blue", "red"):
        (other / name).mkdir(parents=True)
        for index in range(3):
            (other / name / f"{index}.png").write_bytes((work / "images" / name / f"{index}.png").read_bytes())
    said = succeed("evaluate", "small", "--data", "[b] :cat: fewer").stdout
    assert "[b] :cat: fewer, 6 images" in said
    (other / "red").rename(other / "more")
    assert "the classifier has no class 'more'" in sentence("evaluate", "small", "--data", "[b] :cat: fewer")


def test_evaluation_from_another_folder(trained, tmp_path, monkeypatch):
    folder, _ = trained
    here = succeed("evaluate", "small", "--json").stdout
    monkeypatch.chdir(tmp_path)
    assert succeed("evaluate", folder, "--json").stdout == here


ODD_NAMES = ["a [x] b.png", "[red]bold.png", 'grün, "緑".png', ":cat:.png", "two\nlines.png"]


@pytest.fixture(scope="module")
def odd(work):
    """Images with odd names and of odd kinds; `broken.jpg` is none. Red is what they show."""
    folder = work / "odd"
    folder.mkdir()
    pixels = np.array(RED) + np.random.default_rng(1).integers(-60, 60, size=(20, 20, 3))
    plain = Image.fromarray(pixels.astype(np.uint8))
    for name in ODD_NAMES:
        plain.save(folder / name)
    plain.convert("CMYK").save(folder / "cmyk.jpg")
    plain.convert("RGBA").save(folder / "rgba.png")
    turned = plain.getexif()
    turned[0x0112] = 6
    plain.save(folder / "turned.jpg", exif=turned)
    Image.new("RGB", (1, 1), RED).save(folder / "pixel.png")
    Image.new("RGB", (300, 2), RED).save(folder / "thin.png")
    plain.convert("L").save(folder / "zz-grey.png")  # of no colour: that it is read is enough
    (folder / "broken.jpg").write_text("no image")
    (folder / "note.txt").write_text("not an image, and not named like one")
    return folder


def test_predictions_in_three_formats(trained, odd):
    names = {str(odd.relative_to(odd.parent) / path.name) for path in odd.iterdir()}
    names -= {"odd/broken.jpg", "odd/note.txt"}
    said = {name: invoke("predict", "small", "odd", "--format", name) for name in ("json", "csv", "table")}
    for result in said.values():
        assert result.exit_code == 1  # one could not be read
        sentences = [line.split(" (")[0] for line in result.stderr.splitlines()]
        assert sentences == ["error: odd/broken.jpg is not a readable image"]
    rows = json.loads(said["json"].stdout)
    assert {row["image"] for row in rows} == names
    assert [row["image"] for row in rows] == sorted(row["image"] for row in rows)
    assert {row["class"] for row in rows if row["image"][4:] in ODD_NAMES} == {"red"}
    read = list(csv.DictReader(io.StringIO(said["csv"].stdout, newline="")))
    assert [{**row, "probability": float(row["probability"])} for row in read] == rows
    for row in rows:
        for line in row["image"].split("\n"):
            assert line in said["table"].stdout
        assert f"{row['probability']:.4f}" in said["table"].stdout


def test_images_that_are_named_and_the_best_classes(trained, odd):
    rows = json.loads(
        succeed("predict", "small", "odd/pixel.png", "images/blue/1.png", "--top", 9, "--format", "json").stdout
    )
    assert [row["image"] for row in rows] == ["odd/pixel.png"] * 3 + ["images/blue/1.png"] * 3
    for group in (rows[:3], rows[3:]):
        assert {row["class"] for row in group} == NAMES
        chances = [row["probability"] for row in group]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1, abs=1e-5)


def test_mistakes_in_predicting_are_one_sentence(trained, odd, tmp_path):
    assert "there is no file or folder none.jpg" in sentence("predict", "small", "none.jpg")
    assert "has no images (.bmp" in sentence("predict", "small", tmp_path)
    assert "there is no trained classifier in nowhere" in sentence("predict", "nowhere", "odd")
    (tmp_path / "m.safetensors").write_bytes((trained[0] / "model.safetensors").read_bytes()[:-9])
    assert "is not a readable safetensors file" in sentence("predict", tmp_path / "m.safetensors", "odd")


def test_images_are_selected_one_path_per_line(trained, odd):
    said = invoke("select", "small", "odd", "--budget", 3)
    assert said.exit_code == 1  # one could not be read
    assert said.stderr.startswith("error: odd/broken.jpg is not a readable image")
    said = succeed("select", "small", "images", "--budget", 5, "--strategy", "k-center")
    assert len(set(said.stdout.split())) == 5
    assert all(line.startswith("images/") for line in said.stdout.split())
    assert "choose one of random, margin, k-center, badge" in sentence(
        "select", "small", "images", "--budget", 1, "--strategy", "best"
    )
    assert "choose at most 12" in sentence("select", "small", "images", "--budget", 13)  # 48 are in the training


@pytest.mark.parametrize("strategy", ["margin", "k-center", "random", "badge"])
def test_a_selection_as_csv_and_as_a_contact_sheet(trained, odd, tmp_path, strategy):
    out = tmp_path / "next"
    said = invoke("select", "small", "odd", "--budget", 4, "--strategy", strategy, "--out", out, "--seed", 3)
    assert said.exit_code == 1
    with (out / "selected.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert said.stdout == "".join(f"{row['image']}\n" for row in rows)
    sheet = (out / "selected.html").read_text()
    assert f"4 images to label, by {strategy}" in sheet
    assert sheet.count('src="data:image/png;base64,') == 4
    captions = [html.unescape(each) for each in re.findall("<br>(.*?)</figcaption>", sheet, re.DOTALL)]
    assert captions == [row["image"] for row in rows]
    certain = json.loads(invoke("predict", "small", "odd", "--format", "json").stdout)
    assert {(row["image"], row["class"]) for row in rows} <= {(row["image"], row["class"]) for row in certain}
    if strategy == "margin":
        assert [float(row["margin"]) for row in rows] == sorted(float(row["margin"]) for row in rows)


def test_predictions_go_to_a_file(trained, odd, tmp_path):
    printed = invoke("predict", "small", "odd", "--format", "csv", "--top", 2).stdout
    for name in ("found.csv", "found.parquet"):
        said = invoke("predict", "small", "odd", "--top", 2, "--out", tmp_path / name)
        assert said.exit_code == 1
        assert said.stdout == f"Written {tmp_path / name}, {len(ODD_NAMES) + 7} images\n"
        assert said.stderr.endswith("1 images cannot be read: odd/broken.jpg\n")
    text = (tmp_path / "found.csv").read_text()
    assert sorted(text.splitlines()) == sorted([*printed.splitlines(), "odd/broken.jpg,,"])
    read = pyarrow.parquet.read_table(tmp_path / "found.parquet").to_pylist()
    assert read == [
        {**row, "class": row["class"] or None, "probability": float(row["probability"]) if row["probability"] else None}
        for row in csv.DictReader(io.StringIO(text, newline=""))
    ]


@pytest.mark.slow
def test_a_killed_prediction_goes_on(trained, work, tmp_path):
    """Killed where it has written a part of its lines; the file is then the same as without."""
    many = work / "many"
    many.mkdir()
    for index in range(3000):
        (many / f"{index:04}.png").symlink_to(work / "images" / ("red", "blue")[index % 2] / f"{index % EACH}.png")
    command = [sys.executable, "-m", "kernelhead", "predict", "small", "many", "--out"]
    subprocess.run([*command, tmp_path / "whole.csv"], check=True, env=environment(), timeout=300)
    journal, size = [], 0
    for _ in range(2):
        started = subprocess.Popen([*command, tmp_path / "found.csv"], env=environment())
        deadline = time.monotonic() + 300
        while started.poll() is None and time.monotonic() < deadline:
            journal = list(tmp_path.glob(".found.csv.*"))
            if journal and journal[0].stat().st_size > size + 10_000:
                break
            time.sleep(0.002)
        started.kill()
        started.wait()
        assert not (tmp_path / "found.csv").exists()
        assert journal[0].stat().st_size > size
        size = journal[0].stat().st_size
    subprocess.run([*command, tmp_path / "found.csv"], check=True, env=environment(), timeout=300)
    assert (tmp_path / "found.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"found.csv", "whole.csv"}


@pytest.mark.slow
def test_export(trained, tmp_path):
    said = succeed("export", "small", "--out", tmp_path / "m.onnx").stdout
    assert said.startswith(f"Written {tmp_path / 'm.onnx'}, ")
    assert "run by onnxruntime, differ by at most" in said
    assert "small/model-head.pt2" in succeed("export", "small", "--format", "pt2", "--part", "head").stdout
    assert "is a checkpoint; give the onnx file another name" in sentence(
        "export", "small", "--out", trained[0] / "model.safetensors"
    )


@pytest.mark.slow
def test_as_a_person_sees_it(trained, odd):
    """In a process of its own: the rows to a parser, the sentences beside them, and nothing else."""
    command = [sys.executable, "-m", "kernelhead", "predict", "small", "odd", "--format", "csv"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.returncode == 1
    assert len(list(csv.DictReader(io.StringIO(done.stdout, newline="")))) == len(ODD_NAMES) + 6
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: odd/broken.jpg is not a readable image")


# --- what is shown meanwhile ------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(_progress, "messages", console)
    monkeypatch.setattr(_progress, "say", lambda sentence, **_: console.print(sentence))
    return console


def moment(step, val_accuracy=None):
    return Moment(step, 78000, 117, 200, False, 1.63704, 1.0, 1.62e-6, 12345.6, val_accuracy)


def test_the_longest_bar_fits_into_80_columns(terminal):
    with _progress.training_bar("kept") as show:
        show(moment(100))
        time.sleep(0.01)
        show(moment(7000, val_accuracy=100.0))
        show(moment(7100))
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.file.getvalue()).replace("\r", "\n")
    last = [line for line in shown.splitlines() if "epoch" in line][-1]
    assert len(last) <= 80
    assert re.match(
        r"epoch 117/200 [━╸╺ ]+ loss 1\.637  train 100\.0 %  val 100\.0 %  12346 images/s \d:\d\d:\d\d$", last
    )


def test_names_in_a_bar_are_not_markup(terminal):
    with _progress.steps_bar() as show:
        show("reading a[/b]", 1, 2)
    assert "reading a[/b]" in terminal.file.getvalue()


def test_without_a_terminal_a_bar_says_nothing(monkeypatch):
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(_progress, "messages", console)
    with _progress.steps_bar() as show:
        show("reading", 1, 2)
    assert console.file.getvalue() == ""


def test_leaving_says_what_is_kept(terminal):
    for bar in (_progress.training_bar, _progress.steps_bar):
        with pytest.raises(typer.Exit) as caught, bar("all is kept"):
            raise KeyboardInterrupt
        assert caught.value.exit_code == 130
    assert terminal.file.getvalue().count("interrupted; all is kept") == 2
