"""Which parameters weight decay reaches, and which have a learning rate of their own."""

import pytest
import torch
from torch import nn

from kernelhead import KernelHead, LandmarkHead, kernelize, parameter_groups
from kernelhead.heads import HEADS, create_head


def decays(model, weight_decay=1e-4):
    """Name -> weight decay of every parameter that the groups hold."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    pairs = [(names[id(p)], g["weight_decay"]) for g in parameter_groups(model, weight_decay) for p in g["params"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("coefficients", ["relu", "softplus", "none"])
def test_unbounded_coefficients_are_decayed(coefficients):
    model = nn.Sequential(nn.Linear(4, 4), KernelHead(4, 3, coefficients=coefficients))
    assert decays(model) == dict.fromkeys(["0.weight", "0.bias", "1.kernel.raw_alpha", "1.weight"], 1e-4)
    assert len(parameter_groups(model, 1e-4)) == 1


@pytest.mark.parametrize("coefficients", ["sigmoid", "softmax"])
def test_bounded_coefficients_are_not(coefficients):
    model = nn.Sequential(nn.Linear(4, 4), LandmarkHead(4, 3, coefficients=coefficients, landmarks=5))
    expected = dict.fromkeys(["0.weight", "0.bias", "1.weight", "1.mixing", "1.bias"], 1e-4)
    assert decays(model) == expected | {"1.kernel.raw_alpha": 0.0}


def test_a_shared_parameter_appears_once():
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), KernelHead(4, 4)])
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    groups = parameter_groups(model, 1e-4)
    assert [id(p) for group in groups for p in group["params"]] == [id(model[0].weight), id(model[2].raw_alpha)]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), KernelHead(4, 3, coefficients="sigmoid"))
    model[0].requires_grad_(False)
    model[1].raw_alpha.requires_grad_(False)
    assert decays(model) == {"1.weight": 1e-4}


def test_a_frozen_model_has_no_groups():
    assert parameter_groups(nn.Linear(2, 2).requires_grad_(False), 1e-4) == []


@pytest.mark.parametrize("weight_decay", [-1e-4, float("nan")])
def test_negative_decay_is_refused(weight_decay):
    with pytest.raises(ValueError, match=f"weight_decay needs to be at least 0; got weight_decay={weight_decay}"):
        parameter_groups(nn.Linear(2, 2), weight_decay)


@pytest.mark.parametrize(("coefficients", "factor"), [("relu", 1 - 0.5 * 0.1), ("sigmoid", 1.0)])
def test_sgd_decays_what_the_groups_say(coefficients, factor):
    head = KernelHead(4, 3, coefficients=coefficients)
    weight = head.weight.detach().clone()
    optimizer = torch.optim.SGD(parameter_groups(head, 0.1), lr=0.5, momentum=0.9)
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(head.weight.detach(), weight * 0.95)
    torch.testing.assert_close(head.raw_alpha.detach(), torch.full((10,), factor))


def test_a_head_has_a_rate_of_its_own():
    head = KernelHead(4, 3, coefficients="sigmoid")
    model = nn.Sequential(nn.Linear(4, 4), head)
    optimizer = torch.optim.SGD(parameter_groups(model, 1e-4, head_lr=0.5), lr=0.1)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert [found[id(p)] for p in model[0].parameters()] == [(0.1, 1e-4)] * 2
    assert (found[id(head.weight)], found[id(head.raw_alpha)]) == ((0.5, 1e-4), (0.5, 0.0))
    assert all("lr" not in group for group in parameter_groups(model, 1e-4))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_kind_of_head_has_one(name):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), create_head(name, 4, 3))
    groups = parameter_groups(model, 1e-4, head_lr=0.5)
    assert [id(p) for g in groups if "lr" in g for p in g["params"]] == [id(p) for p in model[1].parameters()]


def test_the_head_of_a_network_that_was_changed_has_one():
    model = kernelize(
        nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)), 3, inputs=torch.ones(2, 12)
    )
    groups = parameter_groups(model, 1e-4, head_lr=0.5)
    assert {id(p) for g in groups if "lr" in g for p in g["params"]} == {id(p) for p in model[3].parameters()}


def test_rates_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"head_lr needs to be at least 0; got head_lr=-0\.1"):
        parameter_groups(KernelHead(2, 2), 1e-4, head_lr=-0.1)
    with pytest.raises(ValueError, match="head_lr needs a head of kernelhead; Linear has none"):
        parameter_groups(nn.Linear(2, 2), 1e-4, head_lr=0.1)
