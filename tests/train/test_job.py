"""A training from its settings to its files, and what a trained classifier says."""

import json
import math
import sys
import types
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from kernelhead.backbones import Input
from kernelhead.data.cifar import NAMES
from kernelhead.data.open import open_data
from kernelhead.results import load_result
from kernelhead.train import job
from kernelhead.train.checkpoint import load_checkpoint
from kernelhead.train.config import TrainConfig, make_config, save_config
from kernelhead.train.log import MetricsLog
from kernelhead.train.member import Member
from kernelhead.train.run import Run
from kernelhead.train.saved import MODEL_FILE, SavedClassifier, load_classifier

CPU = torch.device("cpu")
PER_EPOCH, EPOCHS = 3, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of data sets with a small CIFAR-10 in it, whose classes are colours."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 65), ("test", 30)):
        labels = rng.permutation(count) % 10
        colours = np.random.default_rng(5).integers(40, 215, size=(10, 3))
        pixels = colours[labels][:, None, None] + rng.integers(-40, 40, size=(count, 32, 32, 3))
        made |= {f"x_{part}": pixels.clip(0, 255).astype(np.uint8), f"y_{part}": labels.astype(np.uint8)}
    np.savez(folder / "cifar10.npz", **made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELHEAD_DATA", str(folder))
        yield folder


def settings(**changes):
    given = {"data": "cifar10", "backbone": "lenet5", "head": "kernel", "head_options": {"degree": 3}, "device": "cpu"}
    given |= {"epochs": EPOCHS, "batch_size": 20, "evaluate_every": 2, "warmup_epochs": 1, "seed": 3}
    return make_config(None, given | changes)


def train(config, out, watch=None):
    return job.train_classifier(config, out, job.open_for(config, CPU), watch=watch)


def read_log(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_seconds(records):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted training: settings, folder, result, and what was seen meanwhile."""
    out, seen = tmp_path_factory.mktemp("runs") / "whole", []
    config = settings()
    result = train(config, out, seen.append)
    return config, out, result, seen


# --- what a training leaves -------------------------------------------------------------------------------------------


def test_the_files(whole):
    config, out, _, _ = whole
    names = ["checkpoint.safetensors", "config.yaml", "metrics.jsonl", "model.safetensors", "result.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert make_config(out / "config.yaml", {}) == config


def test_a_line_an_epoch(whole):
    config, out, result, _ = whole
    records = read_log(out)
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    tensors, _ = load_checkpoint(out / "checkpoint.safetensors")
    for number, record in enumerate(records):
        steps = slice(number * PER_EPOCH, (number + 1) * PER_EPOCH)
        assert record["loss"] == pytest.approx(tensors["0.losses"][steps].mean().item(), rel=1e-6)
        assert record["accuracy"] == pytest.approx(100 * tensors["0.accuracies"][steps].mean().item(), rel=1e-6)
        assert record["seconds"] > 0
    rates = config.schedule().factors(65)
    expected = [config.learning_rate * rates[step - 1] for step in (3, 6, 9, 12)]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected, rel=1e-6)
    # Every second epoch the test images are looked at, and at the end in any case.
    assert [record["test_accuracy"] is None for record in records] == [True, False, True, False]
    assert records[-1]["test_accuracy"] == result["accuracy"]


def test_what_was_seen_meanwhile(whole):
    _, out, _, seen = whole
    ends = [epoch for epoch in seen if epoch.moment.epoch_done]
    assert [epoch.moment.epoch for epoch in ends] == [1, 2, 3, 4]
    assert {epoch.epochs for epoch in seen} == {EPOCHS}
    shown = [epoch.test_accuracy for epoch in ends[:-1]]
    assert shown == [record["test_accuracy"] for record in read_log(out)[:-1]]


def test_the_result_is_complete(whole):
    config, out, result, _ = whole
    written = load_result(out / "result.json")
    assert written.items() >= json.loads(json.dumps(result)).items()
    assert (written["experiment"], written["method"], written["seed"]) == ("train", "kernel", 3)
    assert TrainConfig(**written["config"]) == config
    assert written["images"] == {"train": 65, "test": 30, "left_out": 0}
    assert written["diverged_at"] is None
    assert written["seconds"] == pytest.approx(sum(record["seconds"] for record in read_log(out)))
    assert {"accuracy", "top5", "nll", "ece", "version", "libraries", "hardware"} <= written.keys()
    model = load_classifier(out).model
    assert written["parameters"] == {
        part: sum(parameter.numel() for parameter in getattr(model, part).parameters()) for part in ("backbone", "head")
    }


def test_the_coefficients_of_the_kernel_are_in_the_result(whole):
    alpha = load_classifier(whole[1]).model.head.alpha
    assert whole[2]["alpha"] == pytest.approx(alpha.tolist())
    assert len(set(whole[2]["alpha"])) > 1  # they were trained


def test_the_classifier_that_is_kept_is_the_trained_one(whole):
    config, out, result, _ = whole
    saved = load_classifier(out)
    opened = open_data("cifar10", Input(1, (), ()), CPU)
    assert saved.classes == opened.classes == NAMES["cifar10"]
    assert saved.input == opened.input
    assert saved.settings == asdict(config)
    assert saved.run == config.run()
    tensors, _ = load_checkpoint(out / "checkpoint.safetensors")
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(tensor, tensors[f"0.model.{name}"])
    images, labels = opened.test.plain(torch.arange(30))  # by hand
    with torch.no_grad():
        logits = saved.model(images)
    assert result["accuracy"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert result["nll"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_evaluation_gives_the_figures_of_the_training(whole):
    _, out, result, _ = whole
    seen = []
    own = job.evaluate_classifier(load_classifier(out), None, CPU, lambda *report: seen.append(report))
    assert own == {"images": 30, **{name: result[name] for name in ("accuracy", "top5", "nll", "ece")}}
    assert seen == [("evaluating", 1, 1)]
    named = job.evaluate_classifier(load_classifier(out), "cifar10", CPU)
    assert named == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize(("every", "looks"), [(0, 1), (1, EPOCHS), (3, 2), (EPOCHS, 1), (100, 1)])
def test_the_test_images_are_looked_at_as_often_as_asked(data, tmp_path, monkeypatch, every, looks):
    calls = []
    monkeypatch.setattr(job, "predict", lambda *given, real=job.predict, **options: calls.append(1) or real(*given))
    train(settings(evaluate_every=every), tmp_path)
    assert len(calls) == looks


def test_looking_at_the_test_images_changes_nothing(data, whole, tmp_path):
    train(settings(evaluate_every=0), tmp_path)
    own, other = (load_checkpoint(out / MODEL_FILE)[0] for out in (tmp_path, whole[1]))
    assert all(torch.equal(own[name], other[name]) for name in other)
    assert [record["test_accuracy"] is None for record in read_log(tmp_path)] == [True, True, True, False]


# --- going on ---------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """What ends a training in the middle."""


@pytest.mark.parametrize("steps", [1, 4, 6, 11])
def test_an_interrupted_training_ends_with_the_same_files(data, whole, tmp_path, monkeypatch, steps):
    calls = []

    def step(self, real=Member.step):
        calls.append(self)
        if len(calls) > steps:
            raise StoppedError
        real(self)

    config = settings(checkpoint_seconds=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Member, "step", step)
        with pytest.raises(StoppedError):
            train(config, tmp_path)
    done = steps // PER_EPOCH
    assert [record["epoch"] for record in (read_log(tmp_path) if done else [])] == list(range(1, done + 1))
    # Lines of epochs that a process had finished, and a crash then took back to an older checkpoint.
    stale = [{"epoch": epoch, "seconds": 1e9, "test_accuracy": 1e9} for epoch in range(done + 1, EPOCHS + 1)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in stale)
    result = train(config, tmp_path)
    assert without_seconds(read_log(tmp_path)) == without_seconds(read_log(whole[1]))
    assert result["seconds"] < 1e8
    tensors = load_checkpoint(tmp_path / MODEL_FILE)[0]
    for name, tensor in load_checkpoint(whole[1] / MODEL_FILE)[0].items():
        assert torch.equal(tensors[name], tensor)


def test_a_finished_training_is_not_trained_again(data, tmp_path, monkeypatch):
    config = settings()
    first = train(config, tmp_path)
    weights, _ = load_checkpoint(tmp_path / MODEL_FILE)
    names = ("metrics.jsonl", "result.json", "config.yaml")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    monkeypatch.setattr(Member, "step", lambda self: pytest.fail("trained again"))
    assert train(config, tmp_path) == first
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
    for name, tensor in load_checkpoint(tmp_path / MODEL_FILE)[0].items():
        assert torch.equal(tensor, weights[name])
    (tmp_path / "metrics.jsonl").unlink()
    assert train(config, tmp_path)["accuracy"] == first["accuracy"]


def test_a_place_is_not_harmed(data, tmp_path):
    config, out = settings(), tmp_path / "run"
    job.check_place(out, config, resume=False)
    job.check_place(out, config, resume=True)
    train(config, out)
    with pytest.raises(FileExistsError, match="already holds a training; --resume goes on with it, --out names"):
        job.check_place(out, config, resume=False)
    job.check_place(out, config, resume=True)
    with pytest.raises(ValueError, match="begun with epochs 4, not 5"):
        job.check_place(out, replace(config, epochs=5), resume=True)
    # A crash may leave the previous checkpoint alone.
    (out / "checkpoint.safetensors").rename(out / "checkpoint.previous.safetensors")
    (out / MODEL_FILE).unlink()
    (out / "result.json").unlink()
    with pytest.raises(FileExistsError, match="already holds a training"):
        job.check_place(out, config, resume=False)
    job.check_place(out, config, resume=True)
    (out / "checkpoint.previous.safetensors").unlink()
    job.check_place(out, config, resume=False)  # nothing but settings: they may change
    (out / MODEL_FILE).touch()
    with pytest.raises(FileExistsError, match="already holds a training"):
        job.check_place(out, config, resume=False)
    with pytest.raises(FileExistsError, match="without a checkpoint to go on from"):
        job.check_place(out, config, resume=True)
    with pytest.raises(FileExistsError, match="is a file; --out names a folder"):
        job.check_place(out / MODEL_FILE, config, resume=False)
    with pytest.raises(
        PermissionError, match=r"model.safetensors/new cannot be made or written to, because of .*tensors"
    ):
        job.check_place(out / MODEL_FILE / "new", config, resume=False)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_training_that_diverges_is_recorded(data, tmp_path):
    config = settings(backbone="cifar_resnet8", learning_rate=1e30, epochs=3, evaluate_every=1)
    seen = []
    with pytest.raises(
        job.DivergedError, match=r"not finite any more at step \d+; a smaller learning rate than 1e\+30"
    ):
        train(config, tmp_path, seen.append)
    result = load_result(tmp_path / "result.json")
    losses = load_checkpoint(tmp_path / "checkpoint.safetensors")[0]["0.losses"]
    assert result["diverged_at"] == int((~losses.isfinite()).nonzero()[0])
    assert result["diverged_at"] > 0
    assert result["accuracy"] is None
    records = read_log(tmp_path)
    assert [record["epoch"] for record in records] == [1]
    assert records[0]["loss"] is None
    assert records[0]["test_accuracy"] is None
    assert math.isnan(seen[-1].moment.losses[0])
    assert not (tmp_path / MODEL_FILE).exists()
    with pytest.raises(job.DivergedError, match="not finite any more"):
        train(config, tmp_path)
    with pytest.raises(FileNotFoundError, match="diverged and left no classifier"):
        load_classifier(tmp_path)


def test_a_network_that_its_last_step_broke_is_not_kept(data, tmp_path):
    """Every loss was finite: only the network itself says that it is of no use."""
    config = settings(backbone="cifar_resnet8", learning_rate=1e38, batch_size=65, epochs=1)
    for _ in range(2):  # trained, and gone on with
        with pytest.raises(job.DivergedError, match="not finite any more after the last step, 0; a smaller learning"):
            train(config, tmp_path)
        result = load_result(tmp_path / "result.json")
        assert (result["diverged_at"], result["accuracy"]) == (0, None)
        assert "nll" not in result
        assert not (tmp_path / MODEL_FILE).exists()
        with pytest.raises(FileNotFoundError, match="diverged and left no classifier"):
            load_classifier(tmp_path)
        assert read_log(tmp_path)[-1]["test_accuracy"] is None


def test_scores_that_are_not_finite_are_refused(folder):
    saved = classifier(Run("cifar_resnet8", "softmax", 0.1))
    assert job.evaluate_classifier(saved, str(folder), CPU)["images"] == 8
    next(module for module in saved.model.modules() if isinstance(module, nn.BatchNorm2d)).running_mean.fill_(math.nan)
    with pytest.raises(ValueError, match="scores are not finite for 8 of 8 images: its training diverged"):
        job.evaluate_classifier(saved, str(folder), CPU)
    with pytest.raises(ValueError, match="scores are not finite for 1 of 1 images: its training diverged"):
        job.predict_pictures(saved, sorted(folder.rglob("*.jpg"))[:1], CPU)


def test_a_test_accuracy_of_scores_that_are_not_finite_is_not_shown(data, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "predict", lambda model, images, **_: torch.full((len(images), 10), math.nan))
    seen = []
    with pytest.raises(job.DivergedError, match="after the last step, 5"):
        train(settings(epochs=2, evaluate_every=1), tmp_path, seen.append)
    assert [epoch.test_accuracy for epoch in seen if epoch.moment.epoch_done] == [None, None]


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        ({"backbone": "resnet19"}, ValueError, "unknown backbone 'resnet19'"),
        ({"head_options": {"degree": "a"}}, ValueError, "needs degree to be a positive integer, got 'a'"),
        (
            {"head_options": {"temperature": [1]}},
            ValueError,
            r"no head 'kernel' can be made with {'temperature': \[1\]}",
        ),
        ({"backbone": "resnet18", "weights": "none"}, FileNotFoundError, "there is no weights file none"),
        ({"teacher": "nobody"}, FileNotFoundError, "there is no trained classifier in nobody"),
        ({"data": "nowhere"}, FileNotFoundError, "there is no data set, folder or file 'nowhere'; the data sets are"),
    ],
)
def test_what_needs_no_data_is_checked_without(changes, error, expected):
    job.check_network(settings())
    with pytest.raises(error, match=expected):
        job.check_network(settings(**changes))


def test_weights_that_cannot_be_downloaded(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.models.get_model", unreachable)
    config = settings(backbone="resnet18", pretrained=True)
    with pytest.raises(OSError, match=r"could not be downloaded .* \(--weights FILE, --no-pretrained\)$"):
        job.check_network(config)


def test_without_pillow_it_is_one_sentence(folder, monkeypatch):
    saved = classifier()
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    sentence = r"^pictures need Pillow; pip install 'kernelhead\[vision\]' brings it$"
    pictures = replace(settings(), data=str(folder))
    for act in (
        lambda: job.check_network(pictures),
        lambda: job.open_for(pictures, CPU),
        lambda: job.evaluate_classifier(saved, str(folder), CPU),
        lambda: job.predict_pictures(saved, [folder / "cow" / "1.jpg"], CPU),
    ):
        with pytest.raises(ModuleNotFoundError, match=sentence):
            act()
    job.check_network(settings())  # CIFAR does without


def test_too_large_a_batch_leaves_nothing_behind(data, tmp_path):
    config = settings(batch_size=66)
    with pytest.raises(
        ValueError, match="cifar10 has 65 training images, fewer than a batch of 66; choose a smaller one with --b"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_devices(monkeypatch):
    assert job.choose_device("cpu") == CPU
    for name in ("gpu", "mps", "meta", ""):
        with pytest.raises(ValueError, match=f"unknown device '{name}'; choose auto, cpu or cuda"):
            job.choose_device(name)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert job.choose_device("auto") == CPU
    with pytest.raises(ValueError, match="there is no CUDA device here; --device cpu does without one"):
        job.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert job.choose_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert job.choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="there is no CUDA device 2 here: they go from 0 to 1"):
        job.choose_device("cuda", local_rank=2)
    assert chosen == [torch.device("cuda", 1)] * 2


# --- other pictures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Pictures in two of the classes, their places in the list of classes not those in the folder."""
    monkeypatch.setenv("KERNELHEAD_DATA", str(tmp_path / "data"))
    rng = np.random.default_rng(2)
    for name in ("cow", "ant"):
        (tmp_path / "other" / name).mkdir(parents=True)
        for index in range(4):
            pixels = rng.integers(256, size=(40 + index, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "other" / name / f"{index}.jpg", quality=90)
    return tmp_path / "other"


def classifier(run=None, *, size=32, **changes):
    """One that was trained on nothing, with the mean and deviation of another library."""
    run = run or Run("lenet5", "softmax", 0.1)
    saved = {"data": "my pictures", "short_side": 480} | changes
    expected = Input(size, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))
    return SavedClassifier(run.create(3).eval(), run, ["ant", "bee", "cow"], expected, saved)


def by_hand(path, saved, margin=256 / 224):
    """Resized with antialiasing by torch, cropped and normalised (3, size, size)."""
    pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None].double()
    size = saved.input.size
    height, width = pixels.shape[2:]
    short = round(margin * size)
    rows, columns = (round(side * short / min(height, width)) for side in (height, width))
    resized = F.interpolate(pixels, (rows, columns), mode="bilinear", antialias=True)
    top, left = (rows - size) // 2, (columns - size) // 2
    mean, std = (torch.tensor(each).view(3, 1, 1).double() for each in (saved.input.mean, saved.input.std))
    return ((resized[0, :, top : top + size, left : left + size] / 255 - mean) / std).float()


@pytest.mark.parametrize(
    ("saved", "margin"),
    [
        (classifier(), 256 / 224),
        (classifier(data="cifar-like pictures"), 256 / 224),
        (classifier(data="cifar10"), 1.0),  # trained on whole images
        (classifier(Run("timm/test_resnet", "kernel", 0.1), size=48), 256 / 224),
    ],
    ids=["small", "named like cifar", "cifar", "timm"],
)
def test_evaluation_prediction_and_torch_agree(folder, saved, margin):
    paths = sorted(folder.rglob("*.jpg"))
    labels = torch.tensor([saved.classes.index(path.parent.name) for path in paths])
    with torch.no_grad():
        logits = saved.model(torch.stack([by_hand(path, saved, margin) for path in paths]))
    probabilities, broken = job.predict_pictures(saved, paths, CPU)
    assert broken == {}
    torch.testing.assert_close(probabilities.float(), logits.softmax(1), atol=1e-4, rtol=1e-3)
    figures = job.evaluate_classifier(saved, str(folder), CPU)
    assert figures["images"] == 8
    assert figures["nll"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-3)
    assert figures["accuracy"] == pytest.approx(100 * (probabilities.argmax(1) == labels).float().mean().item())


def test_pictures_that_cannot_be_read_are_named(folder):
    (folder / "ant" / "broken.jpg").write_text("no picture")
    paths = [*sorted(folder.rglob("*.jpg")), folder / "none.jpg"]
    saved = classifier()
    probabilities, broken = job.predict_pictures(saved, paths, CPU)
    assert sorted(broken) == [paths.index(folder / "ant" / "broken.jpg"), len(paths) - 1]
    assert all("is not a readable picture" in sentence for sentence in broken.values())
    others = [index for index in range(len(paths)) if index not in broken]
    alone, _ = job.predict_pictures(saved, [paths[index] for index in others], CPU)
    torch.testing.assert_close(probabilities[others], alone)
    with pytest.warns(UserWarning, match=r"1 pictures are missing or cannot be read: .*broken.jpg"):
        assert job.evaluate_classifier(saved, str(folder), CPU)["images"] == 8


def test_an_unknown_class_is_refused(folder):
    (folder / "ant").rename(folder / "wasp")
    with pytest.raises(ValueError, match="the classifier knows no class 'wasp'; its classes are ant, bee, cow"):
        job.evaluate_classifier(classifier(), str(folder), CPU)


def test_settings_of_another_version_need_data(folder):
    saved = classifier(new_setting=3)
    with pytest.raises(ValueError, match=r"its own data are not known .*; name some to evaluate it on"):
        job.evaluate_classifier(saved, None, CPU)
    assert job.evaluate_classifier(saved, str(folder), CPU)["images"] == 8


def test_large_pictures_come_in_small_batches(folder, monkeypatch):
    """A batch of four million pixels at the size of a small network would be gigabytes of pictures."""
    sizes = []

    def predict(model, images, *, batch_size, progress):
        sizes.append(batch_size)
        return torch.zeros(len(images), 3)

    monkeypatch.setattr(job, "predict", predict)
    for size in (8, 32, 512, 4096):
        job.predict_pictures(classifier(size=size), sorted(folder.rglob("*.jpg")), CPU)
    assert sizes == [128, 128, 16, 1]


# --- the log ----------------------------------------------------------------------------------------------------------


def record(epoch, **others):
    return {"epoch": epoch, "loss": epoch / 8, "test_accuracy": None, "seconds": 2.0, **others}


def test_the_log_is_read_again_and_its_end_replaced(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    for epoch in (1, 2, 3):
        log.write(record(epoch))
    again = MetricsLog(tmp_path / "m.jsonl")
    assert again.records == [record(1), record(2), record(3)]
    assert again.seconds() == 6.0
    again.start_from(2)
    assert again.seconds() == 2.0
    again.write(record(2, loss=None))
    assert read_log_of(tmp_path) == [record(1), record(2, loss=None)]
    again.add({"test_accuracy": 50.0})
    assert read_log_of(tmp_path) == [record(1), record(2, loss=None, test_accuracy=50.0)]


def read_log_of(folder):
    return [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]


def test_a_damaged_log_is_one_sentence(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(ValueError, match=r"m.jsonl is not lines of JSON .*; mend it, or move it away"):
        MetricsLog(tmp_path / "m.jsonl")


def test_without_tensorboard_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    MetricsLog(tmp_path / "m.jsonl")
    with pytest.raises(ModuleNotFoundError, match="--tensorboard needs tensorboard; 'pip install tensorboard'"):
        MetricsLog(tmp_path / "m.jsonl", tmp_path / "tensorboard")


def test_tensorboard_is_told_every_figure_once(tmp_path, monkeypatch):
    told = []

    class Writer:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, *figure):
            told.append((self.folder, *figure))

        def flush(self):
            told.append("flush")

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = MetricsLog(tmp_path / "m.jsonl", tmp_path / "t")
    log.write(record(4))
    log.add({"test_accuracy": 90.0})
    place = str(tmp_path / "t")
    assert told == [
        (place, "loss", 0.5, 4),
        (place, "seconds", 2.0, 4),
        "flush",
        (place, "test_accuracy", 90.0, 4),
        "flush",
    ]


def test_tensorboard_itself(data, tmp_path):
    pytest.importorskip("tensorboard")
    train(settings(tensorboard=True, epochs=2), tmp_path)
    assert [path.name.startswith("events.out.tfevents") for path in (tmp_path / "tensorboard").iterdir()] == [True]


def test_the_settings_are_written_before_the_first_step(data, tmp_path, monkeypatch):
    def step(self):
        raise StoppedError

    monkeypatch.setattr(Member, "step", step)
    config = settings()
    with pytest.raises(StoppedError):
        train(config, tmp_path)
    save_config(tmp_path / "expected.yaml", config)
    assert (tmp_path / "config.yaml").read_bytes() == (tmp_path / "expected.yaml").read_bytes()
