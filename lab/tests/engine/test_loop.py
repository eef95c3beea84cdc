import functools
import itertools
import math
import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.schedule import mix
from kernelhead_lab.data.resident import ResidentImages, channel_statistics
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.loop import predict, train
from kernelhead_lab.engine.member import Member
from kernelhead_lab.engine.schedule import epoch_noise
from kernelhead_lab.networks import build
from kernelhead_lab.spec import LabSpec

PER_EPOCH, STEPS = 4, 8


def spec(backbone, head, learning_rate, **settings):
    usual = {"epochs": 2, "batch_size": 16, "warmup_epochs": 1, "weight_decay": 1e-4, "head_rate": 1.0}
    name = f"kernelhead_lab.networks:{backbone}"
    return LabSpec("cifar10", name, head, learning_rate=learning_rate, **{**usual, **settings})


SIGMOID = {"coefficients": "sigmoid"}
SPECS = [
    spec("cifar_resnet8", "linear", 0.1, seed=1),
    spec("cifar_resnet8", "kernel", 0.05, weight_decay=5e-4, seed=2, head_options=SIGMOID),
    spec("lenet5", "cosine", 0.1, seed=1),
    spec("lenet5", "linear", 0.1, seed=4, mixup=True),
    spec("lenet5", "kernel", 0.02, seed=5, head_options=SIGMOID, head_rate=10.0),
]
DROPPED = spec("lenet5", "landmarks_variant", 0.05, seed=3, head_options={"landmarks": 8, "dropout": 0.5})
LENETS = [SPECS[2], replace(SPECS[2], head="linear", learning_rate=0.05), DROPPED, SPECS[3]]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    labels = np.arange(70) % 3
    images = rng.integers(100, size=(70, 32, 32, 3))
    images[np.arange(70), :, :, labels] += 120  # the class is the colour
    images = images.astype(np.uint8)
    mean, std = channel_statistics(images)
    return ResidentImages(images, labels, mean=mean, std=std, device=torch.device("cpu"))


def plain_loop(spec, data):
    """As one writes it without this package's loop: torch's own SGD, one step after the other."""
    model = build(spec, 3).train()
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name == "head.kernel.raw_alpha" and spec.head_options else spec.weight_decay,
            "factor": spec.head_rate if name.startswith("head.") else 1.0,
        }
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=spec.learning_rate, momentum=0.9)
    losses = []
    for epoch in range(2):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(spec.seed * 1_000_003 + epoch))
        noise = epoch_noise(70, 3, spec.seed, epoch)
        for i, batch in enumerate(order[:64].split(16)):
            step = len(losses)
            factor = (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / 4))
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * factor * group["factor"]
            images, labels = data.augmented(batch, noise[i * 16 : i * 16 + 16])
            optimizer.zero_grad()
            logits = model(images)
            if spec.mixup:
                torch.manual_seed(mix(spec.seed, step, 0))
                s = torch.rand(16)[:, None]
                one_hot = F.one_hot(labels, 3).float()
                targets = s * one_hot + (1 - s) * one_hot.flip(0)
                loss = F.cross_entropy(s * logits + (1 - s) * logits.flip(0), targets)
            else:
                loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def test_several_runs_at_once_give_the_losses_of_plain_loops(data):
    seen = []
    trained = train(SPECS, data, 3, progress=seen.append)
    moments = [moment for moment in seen if moment.epoch_done]
    assert [moment.epoch for moment in moments] == [1, 2]
    assert [moment.step for moment in moments] == [4, 8]
    np.testing.assert_allclose(moments[1].losses, [result.losses[4:].mean() for result in trained])
    np.testing.assert_allclose(moments[1].accuracies, [result.accuracies[4:].mean() for result in trained])
    for result, spec in zip(trained, SPECS, strict=True):
        model, losses = plain_loop(spec, data)
        np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        assert result.diverged_at is None
    alone = train(SPECS[1:2], data, 3)[0]
    assert torch.equal(alone.losses, trained[1].losses)  # a run is the same alone and beside others


KINDS = {
    "linear": {},
    "cosine": {},
    "expansion": {"width": 8},
    "kernel": {"coefficients": "relu"},
    "kernel of degree 3": {"degree": 3},
    "kernel, sigmoid": SIGMOID,
    "prototypes": {"prototypes": 2},
    "landmarks": {"landmarks": 8},
}


@pytest.mark.slow
def test_runs_share_compilations_and_there_may_be_many_kinds(data, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        assert all(isinstance(value, torch.Tensor) for value in inputs)  # no sizes that are left open
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    usual = {"epochs": 1, "warmup_epochs": 0}
    specs = [
        spec("lenet5", re.split("[ ,]", kind)[0], 0.01 * (seed + 1), seed=seed, head_options=options, **usual)
        for seed in (0, 1)
        for kind, options in KINDS.items()
    ]
    compiled = train(specs, data, 3, compiled=True)
    assert len(graphs) == len(KINDS) + 1  # and one of the feeds, which differ in values alone
    for result, eager in zip(compiled, train(specs, data, 3), strict=True):
        torch.testing.assert_close(result.losses[0], eager.losses[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(result.losses, eager.losses, rtol=1e-4, atol=0)  # rounding grows with the steps
    train([replace(specs[0], batch_size=8)], data, 3, compiled=True)  # one more of either, and none dynamic
    assert len(graphs) == len(KINDS) + 3
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_losses_are_those_of_eager_steps(data):
    torch.compiler.reset()
    specs = [spec("lenet5", "kernel", 0.05, seed=seed) for seed in (1, 2)]
    compiled = train(specs, data, 3, compiled=True)
    for result, eager in zip(compiled, train(specs, data, 3), strict=True):
        torch.testing.assert_close(result.losses, eager.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.accuracies, eager.accuracies)
    torch.compiler.reset()


def test_it_learns(data):
    trained = train([replace(SPECS[0], head="kernel", epochs=8)], data, 3)[0]
    logits = predict(trained.model, data)
    assert logits.shape == (70, 3)
    assert (logits.argmax(1) == data.labels).float().mean() > 0.9


def test_runs_may_have_images_and_classes_of_their_own(data):
    parts = [data.restricted(torch.arange(0, 40)), data.restricted(torch.arange(30, 70))]
    together = train(LENETS[:2], parts, (3, 5))
    for spec, part, classes, result in zip(LENETS, parts, (3, 5), together, strict=False):
        assert result.model.head.num_classes == classes
        assert torch.equal(train([spec], part, classes)[0].losses, result.losses)


# --- runs that diverge -----------------------------------------------------------------------------------------------


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(data):
    specs = [replace(SPECS[0], learning_rate=math.inf), SPECS[0]]
    diverged, fine = train(specs, data, 3)
    assert diverged.diverged_at == 1
    assert torch.isfinite(diverged.losses[:1]).all()
    assert fine.diverged_at is None
    assert torch.equal(fine.losses, train(SPECS[:1], data, 3)[0].losses)


def test_the_last_update_counts_as_the_last_step(data, monkeypatch):
    """All losses are finite, and the network after the last step is not."""

    def step(self, real=Member.step):
        real(self)
        if self.step_index == STEPS:
            self.model.backbone.fc1.bias.data[0] = math.inf

    monkeypatch.setattr(Member, "step", step)
    (result,) = train(LENETS[:1], data, 3)
    assert torch.isfinite(result.losses).all()
    assert result.diverged_at == STEPS - 1


# --- teachers --------------------------------------------------------------------------------------------------------


def teacher(classes=3):
    return build(spec("lenet5", "linear", 0.1, seed=5), classes).eval()


def test_a_student_learns_the_teachers_scores_by_hand(data):
    network = teacher()
    student = spec("lenet5", "kernel", 0.1, seed=3, epochs=1, warmup_epochs=0, temperature=7.0)
    trained = train([student], data, 3, teachers=[network])[0]
    model = build(student, 3).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3 * 1_000_003))
    noise = epoch_noise(70, 3, 3, 0)
    for i, batch in enumerate(order[:64].split(16)):
        images, _ = data.augmented(batch, noise[i * 16 : i * 16 + 16])
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * i / 4))
        with torch.no_grad():
            target = torch.softmax(network(images).double() / 7, 1)
        loss = -49 * (target * torch.log_softmax(model(images).double() / 7, 1)).sum(1).mean()
        assert math.isclose(loss.item(), trained.losses[i].item(), rel_tol=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_runs_see_alike_is_made_once(data, monkeypatch):
    """Batches of one seed and images, and what one teacher says of them; nothing of it changes a run."""
    network = teacher()
    specs = [spec("lenet5", head, rate, seed=3) for head, rate in (("linear", 0.1), ("kernel", 0.05))]
    specs += [spec("lenet5", "linear", 0.1, seed=4), spec("lenet5", "linear", 0.1, seed=3)]
    teachers = [network, network, network, None]
    looked = []

    def look(self, real=Feed._look):
        looked.append((self.seed, self.teacher is not None))
        return real(self)

    monkeypatch.setattr(Feed, "_look", look)
    together = train(specs, data, 3, teachers=teachers)
    assert sorted(looked) == sorted([(3, True), (4, True), (3, False)] * 8)
    for each, taught, result in zip(specs, teachers, together, strict=True):
        assert torch.equal(train([each], data, 3, teachers=[taught])[0].losses, result.losses)


# --- interruption ----------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """What ends a run in the middle, without a process of its own."""


def stop():
    raise StoppedError


def on_call(number, action, monkeypatch):
    """Do something just before a run takes its step for the `number`-th time, counted over all runs."""
    calls = itertools.count(1)

    def step(self, real=Member.step):
        if next(calls) == number:
            action()
        real(self)

    monkeypatch.setattr(Member, "step", step)


def contents(path):
    """All that a checkpoint holds, as bytes: NaN equals NaN, and 0 is not -0."""
    tensors, state = load_checkpoint(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}, state


@pytest.mark.parametrize("step", [1, PER_EPOCH, STEPS - 1])
def test_a_run_that_was_stopped_goes_on_to_the_bit(data, tmp_path, monkeypatch, step):
    whole = train(LENETS, data, 3, checkpoint=tmp_path / "whole.safetensors")
    path = tmp_path / "c.safetensors"
    with monkeypatch.context() as patch:
        on_call(step * len(LENETS) + 2, stop, patch)
        with pytest.raises(StoppedError):
            train(LENETS, data, 3, checkpoint=path, checkpoint_seconds=0)
    assert load_checkpoint(path)[1]["step"] == step
    again = train(LENETS, data, 3, checkpoint=path, checkpoint_seconds=0)
    assert contents(path) == contents(tmp_path / "whole.safetensors")
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.losses, other.losses)


def test_a_signal_waits_for_the_step_and_saves(data, tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    with monkeypatch.context() as patch:
        on_call(3, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        with pytest.raises(KeyboardInterrupt):
            train(LENETS[:1], data, 3, checkpoint=path)
    assert load_checkpoint(path)[1]["step"] == 3
    assert torch.equal(train(LENETS[:1], data, 3, checkpoint=path)[0].losses, train(LENETS[:1], data, 3)[0].losses)


def test_a_checkpoint_of_other_runs_is_refused(data, tmp_path):
    path = tmp_path / "c.safetensors"
    train(LENETS[:1], data, 3, checkpoint=path)
    for specs, teachers, what in ((LENETS[1:2], None, "runs"), (LENETS[:1], [teacher()], "teachers")):
        with pytest.raises(ValueError, match=f"belongs to another run.*{what}"):
            train(specs, data, 3, teachers=teachers, checkpoint=path)


# --- wrong arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rate": None}, "needs learning_rate; got learning_rate=None"),
        ({"epochs": None}, "needs epochs and batch_size; got None and 16"),
        ({"batch_size": 128}, "70 samples do not fill a batch of 128"),
        ({"batch_size": 1, "mixup": True}, "mixup needs batches of two images or more; got batch_size=1"),
    ],
)
def test_specs_that_cannot_be_trained(data, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        train([replace(LENETS[0], **changes)], data, 3)


def test_runs_that_do_not_fit_together(data):
    with pytest.raises(ValueError, match="need the same epochs; got 2, 3"):
        train([LENETS[0], replace(LENETS[0], epochs=3)], data, 3)
    with pytest.raises(ValueError, match=r"need as many images each; got \[40, 70\]"):
        train(LENETS[:2], [data.restricted(torch.arange(40)), data], 3)
    with pytest.raises(ValueError, match="2 runs need 2 numbers of classes; got 1"):
        train(LENETS[:2], data, [3])
    for classes in (2, (3, 2)):
        with pytest.raises(ValueError, match="labels of 2 classes have to be 0 to 1; got some from 0 to 2"):
            train(LENETS[:2], data, classes)
    with pytest.raises(ValueError, match="the teacher knows 4 classes, the data have 3"):
        train(LENETS[:1], data, 3, teachers=[teacher(4)])
    with pytest.raises(ValueError, match="mixup=True and a teacher exclude each other"):
        train([SPECS[3]], data, 3, teachers=[teacher()])
