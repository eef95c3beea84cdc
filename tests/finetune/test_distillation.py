"""A student learns a teacher's scores: of a run or of a saved network, whose classes are compared."""

import dataclasses
import json
import shutil

import pytest
import torch
from torch.nn import functional as F
from torchvision.models import squeezenet1_0
from typer.testing import CliRunner

import kernelhead
from kernelhead.cli import app
from kernelhead.finetune import TrainSpec, train
from kernelhead.finetune.backbones import Input
from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.data import batches, open_data
from kernelhead.finetune.distillation import load_teacher
from kernelhead.finetune.saved import create_classifier, load_classifier
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.trainer import batch_keys

CPU = torch.device("cpu")
CLASSES = ["blue", "green", "red"]
OWN = {"device": "cpu", "report": False, "batch_size": 12}


@pytest.fixture(scope="module")
def teacher(colours, tmp_path_factory):
    """A run on images of 24 pixels."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    spec = TrainSpec(str(colours / "images"), "tiny_networks:tiny", "linear", epochs=12, image_size=24, **OWN)
    return folder, train(spec, checkpoint=folder)


def student(colours, teacher, **changes):
    own = {**OWN, "epochs": 3, "teacher": str(teacher), "temperature": 4.0, **changes}
    return TrainSpec(str(colours / "images"), "tiny_networks:tiny", "linear", **own)


def test_the_first_loss_is_that_of_the_formula(colours, teacher, tmp_path):
    """By hand, from the network as it is before training and the teacher's own probabilities."""
    folder, _ = teacher
    spec = resolved(student(colours, folder, temperature=3.0), images=48)
    train(spec, checkpoint=tmp_path)
    data = open_data(spec, CPU)
    images, _ = next(batches(data.train, batch_keys(len(data.train), spec, slice(0, 12), 0), data))
    with torch.no_grad():
        scores = create_classifier(spec, 3).train()(images)
        larger = F.interpolate(images, (24, 24), mode="bilinear", antialias=True)  # both normalise alike
        own = load_classifier(folder).model(larger)
    logs, target = F.log_softmax(scores.double() / 3, 1), F.softmax(own.double() / 3, 1)
    expected = -9 * (target * logs).sum(1).mean().item()
    assert load_checkpoint(tmp_path / "checkpoint.safetensors")[0]["losses"][0].item() == pytest.approx(
        expected, rel=1e-5
    )


def test_a_student_agrees_with_its_teacher_whatever_the_labels_say(colours, teacher, tmp_path):
    """Labels are shuffled in the folder: what is learned is the teacher's."""
    folder, _ = teacher
    for index, path in enumerate(sorted((colours / "images").glob("*/*.png"))):
        place = tmp_path / "images" / CLASSES[index % 3] / f"{path.parent.name}-{path.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    spec = dataclasses.replace(student(colours, folder, epochs=15), data=str(tmp_path / "images"))
    result = train(spec, checkpoint=tmp_path / "run")
    assert result.accuracy < 75
    lines = (tmp_path / "run" / "predictions.csv").read_text().splitlines()[1:]
    pairs = [line.split(",")[:3] for line in lines]
    assert sum(name.split("/")[1].startswith(predicted) for name, _, predicted in pairs) >= len(pairs) - 1
    assert load_classifier(tmp_path / "run").spec.teacher == str(folder)


@pytest.mark.parametrize("kind", ["file", "saved"])
def test_other_forms_of_a_teacher_give_the_same_scores(colours, teacher, tmp_path, kind):
    folder, _ = teacher
    given, images = Input(24, (0.5,) * 3, (0.25,) * 3), torch.randn(5, 3, 24, 24)
    path = folder / "model.safetensors"
    if kind == "saved":
        path = tmp_path / "saved"
        network = kernelhead.kernelize(squeezenet1_0(num_classes=4), 3, head="linear", inputs=torch.zeros(2, 3, 64, 64))
        kernelhead.save(network, path)
        images = torch.randn(2, 3, 64, 64)
        own = network.eval()(images)
    else:
        own = load_classifier(folder).model(images)
    logits = load_teacher(str(path), CLASSES, given, CPU, "none")(images)
    torch.testing.assert_close(logits, own.detach())
    assert not logits.requires_grad


def test_a_teacher_sees_images_normalised_its_own_way(teacher):
    folder, _ = teacher
    images = torch.rand(5, 3, 24, 24)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 1.0, 2.0])
    given = (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    logits = load_teacher(str(folder), CLASSES, Input(24, (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)), CPU, "none")(given)
    own = load_classifier(folder).model((images - 0.5) / 0.25)
    torch.testing.assert_close(logits, own.detach(), atol=1e-4, rtol=1e-4)


def test_classes_in_another_order_are_put_in_order(teacher):
    images = torch.randn(5, 3, 24, 24)
    logits = load_teacher(str(teacher[0]), ["red", "blue", "green"], Input(24, (0.5,) * 3, (0.25,) * 3), CPU, "none")
    torch.testing.assert_close(logits(images), load_classifier(teacher[0]).model(images).detach()[:, [2, 0, 1]])


def test_classes_are_compared(colours, teacher, tmp_path):
    folder, _ = teacher
    given = Input(16, (0.5,) * 3, (0.25,) * 3)
    for classes, which in (
        (["blue", "green"], "'red' is only the teacher's"),
        ([*CLASSES, "white"], "'white' is not the teacher's"),
    ):
        with pytest.raises(ValueError, match=f"the classes of the teacher .* differ from those of the images: {which}"):
            load_teacher(str(folder), classes, given, CPU, "none")
    head = kernelhead.KernelHead(4, 5)
    kernelhead.save(head, tmp_path / "head")
    with pytest.raises(ValueError, match="is a head alone; a teacher is a network"):
        load_teacher(str(tmp_path / "head"), CLASSES, given, CPU, "none")


def test_what_cannot_be_is_one_sentence(colours, teacher, tmp_path):
    folder, _ = teacher
    with pytest.raises(
        ValueError, match="teacher has a loss of its own; leave out class_weight, label_smoothing, mixup"
    ):
        train(student(colours, folder, label_smoothing=0.1))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        train(student(colours, folder, temperature=0.0))
    with pytest.raises(
        FileNotFoundError, match=r"there is no teacher .*none; give a run, or a folder of kernelhead\.save"
    ):
        train(student(colours, tmp_path / "none"))
    train(student(colours, folder), checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"belongs to another run: temperature is 2\.0 here and 4\.0 there"):
        train(student(colours, folder, temperature=2.0), checkpoint=tmp_path / "run")


def test_the_command_line(colours, teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(teacher[0].parent)
    options = ["--backbone", "tiny_networks:tiny", "--head", "linear", "--epochs", "3", "--batch-size", "12"]
    options += ["--teacher", "run", "--temperature", "4", "--device", "cpu", "--no-report"]
    command = ["train", "--data", str(colours / "images"), *options, "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, command).exit_code == 0
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["spec"]
    assert (stored["teacher"], stored["temperature"]) == (str(teacher[0]), 4.0)
    train(student(colours, teacher[0]), checkpoint=tmp_path / "same")
    states = [load_checkpoint(tmp_path / name / "model.safetensors")[0] for name in ("run", "same")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
