import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernelhead.backbones import Input
from kernelhead.data.resident import ResidentImages, channel_statistics
from kernelhead.ops import cross_entropy
from kernelhead.train.feed import Feed
from kernelhead.train.loop import Run, predict, train
from kernelhead.train.saved import SavedClassifier, save_classifier
from kernelhead.train.schedule import Schedule, epoch_noise, mix

SCHEDULE = Schedule(epochs=2, batch_size=16, warmup_epochs=1)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    labels = np.arange(70) % 3
    images = rng.integers(100, size=(70, 32, 32, 3))
    images[np.arange(70), :, :, labels] += 120  # the class is the colour
    images = images.astype(np.uint8)
    mean, std = channel_statistics(images)
    return ResidentImages(images, labels, mean=mean, std=std, device=torch.device("cpu"))


def plain_loop(run, data):
    """As one writes it without this package's loop: torch's own SGD, one step after the other."""
    model = run.create(3).train()
    groups = [
        {
            "params": [parameter],
            "weight_decay": 0.0 if name == "head.raw_alpha" and run.head_options else run.weight_decay,
            "factor": run.head_rate if name.startswith("head.") else 1.0,
        }
        for name, parameter in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=run.learning_rate, momentum=0.9)
    losses = []
    for epoch in range(2):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(run.seed * 1_000_003 + epoch))
        noise = epoch_noise(70, 3, run.seed, epoch)
        for i, batch in enumerate(order[:64].split(16)):
            step = len(losses)
            factor = (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * (step - 4) / 4))
            for group in optimizer.param_groups:
                group["lr"] = run.learning_rate * factor * group["factor"]
            images, labels = data.augmented(batch, noise[i * 16 : i * 16 + 16])
            optimizer.zero_grad()
            logits = model(images)
            if run.mixup:
                torch.manual_seed(mix(run.seed, step, 0))
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


RUNS = [
    Run("cifar_resnet8", "softmax", 0.1, seed=1),
    Run("cifar_resnet8", "kernel", 0.05, weight_decay=5e-4, seed=2, head_options={"coefficients": "sigmoid"}),
    Run("lenet5", "linear", 0.1, seed=1),
    Run("lenet5", "softmax", 0.1, seed=4, mixup=True),
    Run("lenet5", "kernel", 0.02, seed=5, head_options={"coefficients": "sigmoid"}, head_rate=10.0),
]


def test_several_runs_at_once_give_the_losses_of_plain_loops(data):
    seen = []
    trained = train(RUNS, data, 3, SCHEDULE, progress=seen.append)
    moments = [moment for moment in seen if moment.epoch_done]
    assert [moment.epoch for moment in moments] == [1, 2]
    assert [moment.step for moment in moments] == [4, 8]
    np.testing.assert_allclose(moments[1].losses, [result.losses[4:].mean() for result in trained])
    np.testing.assert_allclose(moments[1].accuracies, [result.accuracies[4:].mean() for result in trained])
    for result, run in zip(trained, RUNS, strict=True):
        model, losses = plain_loop(run, data)
        np.testing.assert_allclose(result.losses, losses, rtol=1e-4)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        assert result.diverged_at is None


def test_a_run_is_the_same_alone_and_beside_others(data):
    alone = train(RUNS[1:2], data, 3, SCHEDULE)[0]
    beside = train(RUNS, data, 3, SCHEDULE)[1]
    assert torch.equal(alone.losses, beside.losses)


def test_a_run_that_diverges_is_recorded_and_the_others_go_on(data):
    runs = [Run("cifar_resnet8", "softmax", math.inf, seed=1), RUNS[0]]
    diverged, fine = train(runs, data, 3, SCHEDULE)
    assert diverged.diverged_at == 1
    assert torch.isfinite(diverged.losses[:1]).all()
    assert torch.equal(fine.losses, train(RUNS[:1], data, 3, SCHEDULE)[0].losses)


def test_it_learns(data):
    schedule = Schedule(epochs=8, batch_size=16, warmup_epochs=1)
    trained = train([Run("cifar_resnet8", "kernel", 0.1)], data, 3, schedule)[0]
    logits = predict(trained.model, data)
    assert logits.shape == (70, 3)
    assert (logits.argmax(1) == data.labels).float().mean() > 0.9


def test_mixup_needs_others_and_labels(data):
    run = Run("lenet5", "softmax", 0.1, mixup=True)
    with pytest.raises(ValueError, match="mixup mixes the images of a batch, and there is one a process"):
        train([run], data, 3, Schedule(1, 1))
    with pytest.raises(ValueError, match="mixup mixes labels, and with a teacher its scores are learned instead"):
        Run("lenet5", "softmax", 0.1, mixup=True, teacher="model.safetensors")


def test_too_few_images(data):
    with pytest.raises(ValueError, match="70 samples do not fill one batch of 128"):
        train(RUNS, data, 3, Schedule(epochs=1))


def test_runs_may_have_images_of_their_own(data):
    parts = [data.restricted(torch.arange(0, 40)), data.restricted(torch.arange(30, 70))]
    together = train(RUNS[:2], parts, 3, SCHEDULE)
    for run, part, result in zip(RUNS, parts, together, strict=False):
        assert torch.equal(train([run], part, 3, SCHEDULE)[0].losses, result.losses)
    with pytest.raises(ValueError, match=r"need as many images each, got \[40, 70\]"):
        train(RUNS[:2], [parts[0], data], 3, SCHEDULE)


def test_runs_may_have_classes_of_their_own(data):
    together = train(RUNS[:2], data, (3, 5), SCHEDULE)
    for run, classes, result in zip(RUNS, (3, 5), together, strict=False):
        assert result.model.head.num_classes == classes
        assert torch.equal(train([run], data, classes, SCHEDULE)[0].losses, result.losses)
    with pytest.raises(ValueError, match="there are 2 runs, and numbers of classes for 1"):
        train(RUNS[:2], data, [3], SCHEDULE)


def test_labels_that_are_no_class_are_said_before_training(data):
    for classes in (2, (3, 2)):
        with pytest.raises(ValueError, match="labels have to be 0 to 1, and there are some from 0 to 2"):
            train(RUNS[:2], data, classes, SCHEDULE)


def teacher(tmp_path, classes=("red", "green", "blue")):
    run = Run("lenet5", "softmax", 0.1, seed=5)
    expected = Input(32, (0.5,) * 3, (0.2,) * 3)
    save_classifier(tmp_path / "t.safetensors", SavedClassifier(run.create(3), run, list(classes), expected, {}))
    return run.create(3).eval(), str(tmp_path / "t.safetensors")


def test_a_student_learns_the_teachers_scores_by_hand(data, tmp_path):
    network, path = teacher(tmp_path)
    run = Run("lenet5", "kernel", 0.1, seed=3, teacher=path, temperature=7.0)
    schedule = Schedule(epochs=1, batch_size=16, warmup_epochs=0)
    trained = train([run], data, 3, schedule)[0]
    model = run.create(3).train()
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


def test_what_runs_see_alike_is_made_once(data, tmp_path, monkeypatch):
    """Batches of one seed and images, and what one teacher says of them; nothing of it changes a run."""
    _, path = teacher(tmp_path)
    runs = [Run("lenet5", head, rate, seed=3, teacher=path) for head, rate in (("softmax", 0.1), ("kernel", 0.05))]
    runs += [Run("lenet5", "softmax", 0.1, seed=4, teacher=path), Run("lenet5", "softmax", 0.1, seed=3)]
    looked = []

    def look(self, real=Feed._look):
        looked.append((self.seed, self.teacher is not None))
        return real(self)

    monkeypatch.setattr(Feed, "_look", look)
    together = train(runs, data, 3, SCHEDULE)
    assert sorted(looked) == sorted([(3, True), (4, True), (3, False)] * 8)
    for run, result in zip(runs, together, strict=True):
        assert torch.equal(train([run], data, 3, SCHEDULE)[0].losses, result.losses)


def test_batches_go_on_when_a_run_that_shares_them_diverges(data):
    runs = [Run("lenet5", "softmax", rate, seed=1) for rate in (1e30, 0.1)]
    broken, whole = train(runs, data, 3, SCHEDULE)
    assert broken.diverged_at < 4  # in the first of two epochs
    assert torch.equal(whole.losses, train(runs[1:], data, 3, SCHEDULE)[0].losses)


def test_a_teacher_of_other_classes_is_refused(data, tmp_path):
    _, path = teacher(tmp_path)
    with pytest.raises(ValueError, match="knows 3 classes, the data have 4"):
        train([Run("lenet5", "softmax", 0.1, teacher=path)], data, 4, SCHEDULE)


@pytest.mark.parametrize("options", [{}, {"prototypes": 2, "temperature": 0.5}], ids=str)
def test_the_fused_loss_trains_as_the_logits_do(monkeypatch, data, options):
    runs = [Run("cifar_resnet8", "kernel", 0.05, seed=2, head_options=options)]
    (plain,) = train(runs, data, 3, SCHEDULE)
    monkeypatch.setitem(cross_entropy.CROSSOVER, "cpu", 0)
    taken = []
    fused_nll = cross_entropy.fused_nll
    monkeypatch.setattr(cross_entropy, "fused_nll", lambda *a, **k: taken.append(k["backend"]) or fused_nll(*a, **k))
    (fused,) = train(runs, data, 3, SCHEDULE)
    assert taken == ["chunked"] * 8
    np.testing.assert_allclose(fused.losses, plain.losses, rtol=1e-4)
    np.testing.assert_allclose(fused.accuracies, plain.accuracies)
    torch.testing.assert_close(fused.model.head.raw_alpha, plain.model.head.raw_alpha, rtol=1e-3, atol=1e-4)
