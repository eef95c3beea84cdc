"""`kernelhead-lab reproduce` and `report` on images, as far as nothing is trained; see tables/test_runner.py."""

import re
import urllib.request
from urllib.error import URLError

import numpy as np
import pytest
from typer.testing import CliRunner

from kernelhead_lab.cli import app
from kernelhead_lab.tables import EXPERIMENTS, runner
from kernelhead_lab.tables.experiment import adapted
from kernelhead_lab.tables.store import Store

COUNTS = {
    "cifar10": (50, 70),
    "cifar100": (50, 70),
    "transfer": (60, 108),
    "distillation": (74, 138),
    "active": (99, 111),
    "kernels": (18, 30),
    "rectification": (24, 40),
    "activations": (24, 40),
    "landmarks": (195, 312),
    "saturation": (128, 224),
    "beyond": (100, 140),
    "mixup": (70, 110),
    "epochs": (84, 132),
    "transfer-long": (70,),
}


@pytest.fixture(autouse=True)
def empty_place(tmp_path, monkeypatch):
    """No data, no runs, no network, and no training by mistake."""

    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setattr(runner, "train", lambda *_, **__: pytest.fail("trained"))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_part_of_a_data_set_does_not_pass_for_it(tmp_path):
    (tmp_path / "data").mkdir()
    labels = np.arange(30, dtype=np.uint8) % 10
    images = np.zeros((30, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "data" / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    done = invoke("reproduce", "cifar10", "--device", "cpu")
    assert "cifar10 has 30 images to train on and 20 to test on, not all of them; " in str(done.exception)


def test_a_file_is_no_folder_for_a_report(tmp_path):
    (tmp_path / "here").touch()
    done = invoke("report", "--out", "here")
    assert isinstance(done.exception, NotADirectoryError)
    assert "here is a file" in str(done.exception)


def listed(*options):
    """{(table, protocol): (done, total, time left)} as the listing has it."""
    done = invoke("reproduce", "list", *options)
    assert done.exit_code == 0, (done.output, done.exception)
    found, name = {}, ""
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if len(cells) == 5 and " of " in cells[3]:
            name = cells[0] or name
            first, total = map(int, cells[3].split(" of "))
            found[name, cells[2]] = first, total, cells[4]
    return found


def test_the_listing_has_every_table(tmp_path):
    found = listed()
    assert list(dict.fromkeys(name for name, _ in found)) == ["synthetic", *EXPERIMENTS]
    for name, counts in COUNTS.items():
        protocols = ("paper", "tuned")[-len(counts) :]
        assert [each for listed, each in found if listed == name] == list(protocols)
        assert [found[name, each] for each in protocols] == [(0, count, "none measured yet") for count in counts]
    assert listed("--seeds", 3)["kernels", "paper"][1] == 3 * (4 + 2 * 3)
    assert listed("--epochs", 60)["synthetic", "both"][2] == "240 s, on two cores"
    assert "450 for the others" in invoke("reproduce", "list", "--epochs", 450).stdout
    assert not list(tmp_path.iterdir())  # to look changes nothing


def test_the_listing_counts_what_is_done_and_tells_the_time_left(tmp_path, write_runs):
    store, experiment = Store(tmp_path / "runs", 200), EXPERIMENTS["kernels"]
    paper = experiment.protocols["paper"]
    for cell in experiment.cells[:2]:  # two of the three kernels with ResNet-56, chosen with ResNet-20
        write_runs(store, cell, paper, {0: 50.0}, seconds=60.0)
    found = listed()
    assert found["kernels", "paper"] == (2 * 4 + 2, 18, "0:08:00")
    assert found["kernels", "tuned"] == (2 * 4, 30, "0:22:00")
    write_runs(store, experiment.cells[2], paper, {0: 50.0}, seconds=60.0)
    found = listed()
    assert found["kernels", "paper"] == (3 * 4 + 3, 18, "0:03:00")
    assert found["cifar100", "paper"][:2] == (4 + 1, 50)  # the learned kernel is a cell of both
    assert found["cifar100", "paper"][2] == "none measured yet"
    assert found["rectification", "paper"] == (4 + 1, 24, "0:19:00")
    assert listed("--epochs", 100)["kernels", "paper"][0] == 0
    for cell in experiment.cells[3:]:
        write_runs(store, cell, paper, {0: 50.0})
    assert listed()["kernels", "paper"] == (18, 18, "none")


def test_the_listing_names_a_damaged_file(tmp_path, write_runs):
    store, experiment = Store(tmp_path / "runs", 200), EXPERIMENTS["kernels"]
    write_runs(store, experiment.cells[0], experiment.protocols["paper"], {0: 50.0})
    damaged = store.result_path(experiment.cells[0], experiment.protocols["paper"], 0)
    damaged.write_text("{")
    done = invoke("reproduce", "list")
    assert done.exit_code == 0
    assert "kernel_rbf/lr0.05-wd0.0001-seed0.json" in done.stderr
    assert "left out:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["imagenet"], "unknown table 'imagenet'; choose one of synthetic, cifar10, cifar100, transfer, "),
        (["kernels", "imagenet"], "unknown table 'imagenet'; choose one of synthetic, cifar10, cifar100, transfer, "),
        (["kernels", "synthetic"], "'synthetic' goes with no other table, got kernels synthetic; ask for it alone"),
        (["list", "kernels"], "'list' goes with no other table, got list kernels; ask for it alone"),
        (["rectification", "kernels", "--only", "SM"], "kernels has no row or column 'SM'; it has "),
        (["kernels", "cifar10", "--weights", "w"], "'transfer' and 'transfer-long', got kernels cifar10; leave"),
        (["cifar10", "--protocol", "mine"], "unknown protocol 'mine'; choose one of paper, tuned, both"),
        (["cifar10", "--only", "ResNet-9"], "cifar10 has no row or column 'ResNet-9'; it has KER, LIN, Ours, "),
        (["active", "--only", "30%"], "active has no row or column '30%'; it has 30 %, 40 %"),
        (["cifar10", "--draws", "3"], "the table 'cifar10' has no --draws; leave it out"),
        (
            ["cifar10", "--weights", "w.safetensors"],
            "--weights is for 'transfer' and 'transfer-long', got cifar10; leave it out",
        ),
        (["list", "--only", "SM"], "the list has no --only; leave it out"),
        (["transfer", "--weights", "w.safetensors"], "there is no weights file w.safetensors; give a safetensors file"),
        (["synthetic", "--seeds", "3"], "the table 'synthetic' has no --seeds; leave it out"),
        (["synthetic", "--only", "SM"], "the table 'synthetic' has no --only; leave it out"),
        (["cifar10", "--quick", "--epochs", "3"], "--quick has its own epochs, draws and seeds; leave them out"),
        (["cifar10", "--quick", "--seeds", "3"], "--quick has its own epochs, draws and seeds; leave them out"),
        (["cifar10", "--device", "tpu"], "unknown device 'tpu'; choose auto, cpu, cuda, or one GPU such as cuda:1"),
        (["cifar10", "--device", "cpu"], "cifar10.npz there by hand"),
        (["kernels", "--device", "cpu", "--protocol", "both"], "cifar100.npz there by hand"),
        (["transfer", "--device", "cpu"], "oxford-iiit-pet needs images, annotations/trainval.txt"),
    ],
)
def test_errors_are_one_sentence(tmp_path, arguments, sentence):
    done = invoke("reproduce", *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, Exception)
    assert sentence in str(done.exception)
    assert "\n" not in str(done.exception).strip()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--seeds", "0"], ["--at-once", "0"], ["--seeds", "x"]])
def test_wrong_usage_is_refused(arguments):
    assert invoke("reproduce", "cifar10", *arguments).exit_code == 2


def test_what_was_asked_for_reaches_the_runner(tmp_path, monkeypatch, write_runs):
    seen = []

    def note(experiments, root, settings, progress):
        seen.append(([experiment.name for experiment in experiments], root, settings))
        protocol = adapted(experiments[0].protocols["paper"], settings.quick)
        write_runs(Store(root, settings.epochs), experiments[0].cells[0], protocol, {0: 50.0})

    monkeypatch.setattr(runner, "run", note)
    assert invoke("reproduce", "cifar10", "--device", "cpu").exit_code == 0
    options = ["--epochs", 7, "--seeds", 3, "--protocol", "both", "--only", "SM", "--only", "Ours", "--at-once", 5]
    (tmp_path / "w").touch()
    options += ["--compile", "--weights", "w", "--runs", "other", "--device", "cpu"]
    assert invoke("reproduce", "cifar100", "transfer", "cifar100", *options).exit_code == 0
    assert invoke("reproduce", "kernels", "--quick", "--device", "cpu").exit_code == 0
    (_, first_root, first), (names, root, settings), (_, quick_root, quick) = seen
    assert str(first_root) == "runs"
    assert first == runner.Settings(epochs=200)
    assert (names, str(root)) == (["cifar100", "transfer"], "other")
    assert settings == runner.Settings(7, 3, ("paper", "tuned"), ("SM", "Ours"), 5, True, False, "w", "cpu")
    assert str(quick_root) == "runs/quick"
    assert quick == runner.Settings(epochs=1, quick=True)


def test_the_tables_that_were_asked_for_are_shown(monkeypatch, write_runs):
    """And no other, though there are runs of others."""

    def note(experiments, root, settings, progress):
        for name in ("cifar10", "kernels", "activations"):
            experiment = EXPERIMENTS[name]
            write_runs(Store(root, settings.epochs), experiment.cells[0], experiment.protocols["paper"], {0: 50.0})

    monkeypatch.setattr(runner, "run", note)
    done = invoke("reproduce", "kernels", "activations", "--device", "cpu")
    assert done.exit_code == 0, (done.output, done.exception)
    words = " ".join(done.stdout.split())
    assert "Learned and fixed kernels, CIFAR-100" in words
    assert "Activation of the kernel's coefficients" in words
    assert "CIFAR-10 (the paper's Table 2)" not in words


def test_made_up_numbers_do_not_get_into_the_report(tmp_path, write_runs):
    experiment = EXPERIMENTS["kernels"]
    cell, paper = experiment.cells[0], experiment.protocols["paper"]
    write_runs(Store(tmp_path / "runs" / "quick", 1), cell, adapted(paper, True), {0: 50.0})
    done = invoke("report")
    assert done.exit_code == 1
    assert "no results in runs (runs/quick has those of quick runs); 'kernelhead" in str(done.exception)
    done = invoke("report", "--runs", "runs/quick")
    assert done.exit_code == 0
    assert re.search(r"made-up data: that it ran is all", done.stdout)
    write_runs(Store(tmp_path / "runs", 9), cell, paper, {0: 50.0})
    done = invoke("report")
    assert done.exit_code == 0
    assert "made-up" not in done.stdout
    assert not list((tmp_path / "runs" / "report").glob("*-1-epochs*"))
