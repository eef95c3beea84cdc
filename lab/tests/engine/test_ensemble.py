import copy
import math

import pytest
import torch
from torch.nn import functional as F

from kernelhead import LandmarkHead, create_head
from kernelhead_lab.engine.ensemble import ensemble_logits, train_ensemble

LENGTH = {"epochs": 4, "batch_size": 16, "warmup_epochs": 1}
RATES = torch.tensor([0.1, 0.5])
DECAYS = torch.tensor([0.0, 1e-2])


def problem(members=2, samples=70):
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(members, samples, 3, generator=generator), dim=2)
    return x, (x[:, :, 0] * x[:, :, 1] > 0).long()


def make_heads(options):
    torch.manual_seed(1)
    name = "landmarks" if "landmarks" in options else "prototypes" if "prototypes" in options else "kernel"
    return [create_head(name, 3, 2, **options) for _ in range(2)]


def plain_loop(head, x, y, rate, decay):
    """SGD as torch has it, one head at a time."""
    undecayed = getattr(head, "coefficients", None) in ("sigmoid", "softmax")
    groups = [
        {"params": [p for n, p in head.named_parameters() if n != "kernel.raw_alpha"], "weight_decay": decay},
        {"params": [head.raw_alpha], "weight_decay": 0.0 if undecayed else decay},
    ]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
    steps = x.shape[0] // 16
    for epoch in range(4):
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(5 * 1_000_003 + epoch))
        for index in range(steps):
            step = epoch * steps + index
            factor = (
                (step + 1) / steps if step < steps else 0.5 * (1 + math.cos(math.pi * (step - steps) / (3 * steps)))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            batch = order[16 * index : 16 * (index + 1)]
            optimizer.zero_grad()
            F.cross_entropy(head(x[batch]), y[batch]).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"coefficients": "sigmoid"}, {"landmarks": 6, "pool": None}, {"prototypes": 3}]
)
def test_agrees_with_one_plain_loop_per_head(options):
    x, y = problem()
    heads = make_heads(options)
    expected = copy.deepcopy(heads)
    train_ensemble(heads, x, y, **LENGTH, learning_rate=RATES, weight_decay=DECAYS, seed=5)
    for member, head in enumerate(expected):
        plain_loop(head, x[member], y[member], RATES[member].item(), DECAYS[member].item())
        for name, tensor in head.state_dict().items():
            torch.testing.assert_close(heads[member].state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_run_continues_to_the_bit(tmp_path, at):
    x, y = problem()
    options = {"landmarks": 5, "pool": None}
    whole, interrupted = make_heads(options), make_heads(options)
    rates = {"learning_rate": RATES, "weight_decay": DECAYS}
    train_ensemble(whole, x, y, **LENGTH, **rates)

    def stop(done, total):
        if done == at:
            raise Interruption

    path = tmp_path / "state.safetensors"
    with pytest.raises(Interruption):
        train_ensemble(interrupted, x, y, **LENGTH, **rates, checkpoint=path, progress=stop)
    seen = []
    interrupted = make_heads(options)
    train_ensemble(
        interrupted, x, y, **LENGTH, **rates, checkpoint=path, progress=lambda done, total: seen.append(done)
    )
    assert seen == list(range(at + 1, 5))
    for one, other in zip(whole, interrupted, strict=True):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_finished_run_is_not_repeated(tmp_path):
    x, y = problem()
    rates = {"learning_rate": RATES, "weight_decay": DECAYS, "checkpoint": tmp_path / "state.safetensors"}
    first, second = make_heads({}), make_heads({})
    train_ensemble(first, x, y, **LENGTH, **rates)
    seen = []
    train_ensemble(second, x, y, **LENGTH, **rates, progress=lambda done, total: seen.append(done))
    assert seen == []
    assert torch.equal(first[0].weight, second[0].weight)


@pytest.mark.parametrize("damage", ["other rates", "other labels", "other start", "cut short"])
def test_a_checkpoint_of_something_else_is_not_used(tmp_path, damage):
    x, y = problem()
    path = tmp_path / "state.safetensors"
    train_ensemble(make_heads({}), x, y, **LENGTH, learning_rate=RATES, weight_decay=DECAYS, checkpoint=path)
    seen = []
    rates = RATES * 2 if damage == "other rates" else RATES
    labels = 1 - y if damage == "other labels" else y
    heads = make_heads({})
    if damage == "other start":
        heads.reverse()

    def again():
        train_ensemble(
            heads,
            x,
            labels,
            **LENGTH,
            learning_rate=rates,
            weight_decay=DECAYS,
            checkpoint=path,
            progress=lambda done, total: seen.append(done),
        )

    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.warns(UserWarning, match="training starts anew"):
            again()
    else:
        again()
    assert seen == [1, 2, 3, 4]


def test_a_member_that_diverges_leaves_the_others_alone():
    x, y = problem()
    alone, beside = make_heads({"coefficients": "none"}), make_heads({"coefficients": "none"})
    train_ensemble(alone, x, y, **LENGTH, learning_rate=torch.tensor([0.1, 0.1]), weight_decay=torch.zeros(2))
    train_ensemble(beside, x, y, **LENGTH, learning_rate=torch.tensor([0.1, math.inf]), weight_decay=torch.zeros(2))
    assert not torch.isfinite(ensemble_logits(beside, x)[1]).all()
    assert torch.equal(alone[0].weight, beside[0].weight)


def test_too_few_samples_for_a_batch():
    x, y = problem(samples=10)
    with pytest.raises(ValueError, match="10 samples do not fill a batch of 16"):
        train_ensemble(make_heads({}), x, y, **LENGTH, learning_rate=RATES, weight_decay=DECAYS)


def test_logits_are_those_of_each_head_in_evaluation_mode():
    x, _ = problem()
    heads = [LandmarkHead(3, 2, landmarks=4).train() for _ in range(2)]
    logits = ensemble_logits(heads, x)
    assert not any(head.training for head in heads)
    assert torch.equal(logits[1], heads[1](x[1]))


def test_frozen_parameters_stay():
    x, y = problem()
    heads = make_heads({})
    for head in heads:
        head.raw_alpha.requires_grad_(False)
    weight = heads[0].weight.detach().clone()
    train_ensemble(heads, x, y, **LENGTH, learning_rate=RATES, weight_decay=DECAYS)
    assert torch.equal(heads[1].raw_alpha, torch.ones(10))
    assert not torch.equal(heads[0].weight, weight)
