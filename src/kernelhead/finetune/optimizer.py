"""What is trained at which rate: a frozen backbone, rates by layer, SGD or AdamW, and averaged weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from kernelhead.finetune.spec import TrainSpec
from kernelhead.heads import Head
from kernelhead.optim import parameter_groups

PREFIX = "optimizer."
CONTAINERS = (nn.Sequential, nn.ModuleList)


def freeze_backbone(model: nn.Module) -> None:
    """Leave only the heads of a network to train. What is frozen keeps its statistics and drops nothing."""
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Head):
            module.train().requires_grad_(True)


def create_optimizer(model: nn.Module, spec: TrainSpec) -> torch.optim.Optimizer:
    """Make the optimiser of a resolved spec, with a rate for the head and a smaller one for each layer further below.

    With a layer decay d, the layer n from the top of the backbone has d^n times the network's rate.
    """
    assert spec.learning_rate
    assert spec.head_rate
    assert spec.weight_decay is not None
    groups: list[dict[str, Any]] = []
    depths = depths_of(model)
    for group in parameter_groups(model, spec.weight_decay, head_lr=spec.learning_rate * spec.head_rate):
        if "lr" in group or spec.layer_decay == 1:
            groups.append(group)
            continue
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depths[parameter], []).append(parameter)
        for depth, parameters in by_depth.items():
            groups.append({**group, "params": parameters, "lr": spec.learning_rate * spec.layer_decay**depth})
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=spec.learning_rate)
    return torch.optim.SGD(groups, lr=spec.learning_rate, momentum=spec.momentum)


def depths_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many layers of the backbone are above that of each of its parameters.

    A layer is a child of a Sequential or a ModuleList, or a child of the network outside of these.
    """
    heads = [name for name, module in model.named_modules() if isinstance(module, Head)]
    layers: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not name.startswith(tuple(heads)):
            layers.setdefault(_layer_of(model, name), []).append(parameter)
    return {parameter: depth for depth, own in enumerate(reversed(layers.values())) for parameter in own}


def _layer_of(model: nn.Module, name: str) -> str:
    parts, module = name.split("."), model
    for length, part in enumerate(parts[:-1], 1):
        if isinstance(module, CONTAINERS):
            return ".".join(parts[:length])
        module = module.get_submodule(part)
    return parts[0]


def move_average(average: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Move averaged weights and statistics towards a network; faster in the first steps, which are soon forgotten."""
    pairs = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
    own, new = zip(*(pair for pair in pairs if pair[0].is_floating_point()), strict=True)
    update: Any = get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))  # type: ignore[no-untyped-call]
    update(own, new, None)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimiser's state by the names of the parameters."""
    return {
        f"{PREFIX}{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Take back what `tensors_of` gave."""
    named = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name.startswith(PREFIX):
            key, _, parameter = name.removeprefix(PREFIX).partition(".")
            moved = tensor.clone() if key == "step" else tensor.to(named[parameter].device, copy=True)
            optimizer.state[named[parameter]][key] = moved
