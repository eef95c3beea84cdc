"""Inputs that a network might take, where the user gives none."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernelhead.surgery._trace import Inputs, tensors_of

SIDES = (224, 32, 28, 64, 256, 128, 384, 299)  # of images, where the network doesn't say
LENGTHS = (64, 16, 1024, 16000)  # of signals
PLACES = 5
TOKENS = 8


def as_inputs(inputs: Any) -> Inputs:
    """What the user gave as arguments of the network: one, a tuple of them, or a dictionary of named ones."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def guesses(model: nn.Module) -> Iterator[Inputs]:
    """Inputs that are worth a try, the likeliest first."""
    floating = [tensor for tensor in tensors_of(model) if tensor.is_floating_point()]
    dtype, device = (floating[0].dtype, floating[0].device) if floating else (torch.float32, torch.device("cpu"))
    named = getattr(model, "main_input_name", None)  # of transformers
    for batch in (2, 1):  # some networks of transformers take a single text where no padding token is set
        for shape in _shapes(model, batch, named):
            is_text = shape[1:] == (TOKENS,)
            tensor = _tokens(model, shape, device) if is_text else torch.zeros(shape, dtype=dtype, device=device)
            yield ((), {named: tensor}) if isinstance(named, str) else ((tensor,), {})


def _tokens(model: nn.Module, shape: tuple[int, ...], device: torch.device) -> Tensor:
    ids = torch.ones(shape, dtype=torch.int64, device=device)
    end = getattr(getattr(model, "config", None), "eos_token_id", None)
    if isinstance(end, int):
        ids[:, -1] = end  # where some networks look for the end of the text
    return ids


def _shapes(model: nn.Module, batch: int, named: object) -> Iterator[tuple[int, ...]]:
    kinds = nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d
    first = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if named == "input_ids" or (named is None and isinstance(first, nn.Embedding)):
        yield batch, TOKENS
        return
    if named is None and isinstance(first, nn.Linear):
        yield batch, first.in_features
        yield batch, PLACES, first.in_features
    if isinstance(first, nn.Conv1d):
        yield from ((batch, first.in_channels, length) for length in LENGTHS)
    if isinstance(first, nn.Conv3d):
        yield batch, first.in_channels, 16, 112, 112
    said = getattr(model, "pretrained_cfg", None)  # of timm
    size = said.get("input_size") if isinstance(said, Mapping) else None
    channels = [size[0]] if size else [first.in_channels, 3] if isinstance(first, nn.Conv2d) else [3]
    for side in _sides(model, size[1:] if size else None):
        yield from ((batch, each, *side) for each in dict.fromkeys(channels))


def _sides(model: nn.Module, said: Any) -> Iterator[tuple[int, int]]:
    """Height and width of images: what the network says about itself in any of the usual ways, then the usual sizes."""
    config = getattr(model, "config", None)
    owners = [getattr(model, "patch_embed", None), model, config, getattr(config, "vision_config", None)]
    sizes = [getattr(owner, name, None) for owner in owners for name in ("img_size", "image_size")]
    for size in [*sizes, said, *SIDES]:
        pair = (size, size) if isinstance(size, int) else size
        if isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(side, int) for side in pair):
            yield pair[0], pair[1]
