"""What torchvision, timm and transformers know about their networks beside the weights."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Names that a network of timm gives to its classifiers."""
    said = getattr(model, "pretrained_cfg", None)
    names = said.get("classifier") if isinstance(said, Mapping) else None
    return (names,) if isinstance(names, str) else tuple(names or ())


def is_timm(model: nn.Module) -> bool:
    return hasattr(model, "reset_classifier") and hasattr(model, "forward_features")


def stop_pooling(model: nn.Module) -> None:
    """Let a network of timm give its map or its tokens, by its own means."""
    model.reset_classifier(0, "")  # type: ignore[operator]


def unpooled_prefix(model: nn.Module) -> int:
    """Tokens that a network of timm leaves out when it averages. One that reads its class token leaves out none."""
    averages = getattr(model, "global_pool", None) in ("avg", "avgmax", "max")
    leaves_out = averages and not getattr(model, "pool_include_prefix", False)
    return int(getattr(model, "num_prefix_tokens", 0)) if leaves_out else 0


def reads_padded_sequences(model: nn.Module) -> bool:
    """Whether a network of transformers reads texts or sounds, which come padded to one length."""
    kind = getattr(model, "main_input_name", "pixel_values")
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    return kind == "input_ids" or (kind != "pixel_values" and masked)


def set_num_classes(model: nn.Module, num_classes: int) -> None:
    """Tell the network its new number of classes, where it keeps count of them."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label") and config.num_labels != num_classes:
        config.num_labels = num_classes  # makes new names of labels too
    for name in ("num_classes", "num_labels"):
        if isinstance(getattr(model, name, None), int):
            setattr(model, name, num_classes)
