"""A kernel head from a state dict that somebody saved, which holds its numbers but not how it was made."""

import pickle
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernelhead.coefficients import ACTIVATIONS
from kernelhead.heads import KernelClassifier, create_head
from kernelhead.kernels import END_POINTS


def head_of_weights(path: Path, options: dict[str, Any]) -> KernelClassifier:
    """The kernel head in a state dict, a safetensors file or one of `torch.save`, of a network or of the head alone.

    `options` are those that it was made with. The numbers tell in_features, num_classes, degree, landmarks and
    standardize; `coefficients` has to be said, and so has every other option that is not the default.
    """
    state = _read(path)
    prefixes = [name.removesuffix("raw_alpha") for name in state if name.rpartition(".")[2] == "raw_alpha"]
    prefixes = [prefix for prefix in prefixes if f"{prefix}weight" in state]
    if len(prefixes) != 1:
        names = ", ".join(prefix.rstrip(".") for prefix in prefixes)
        found = f"{len(prefixes)} kernel heads ({names}), and one can be shown" if prefixes else "no kernel head"
        raise ValueError(f"{path} holds {found}; describe() of a head shows it in Python")
    if "coefficients" not in options:
        raise ValueError(
            f"{path} was not written by kernelhead train, and does not say how its coefficients come from raw_alpha: "
            f"say --head-option coefficients={' or '.join(ACTIVATIONS)}, and any other option that was not the default"
        )
    own = {name.removeprefix(prefixes[0]): tensor for name, tensor in state.items() if name.startswith(prefixes[0])}
    points, features = own["weight"].shape
    known: dict[str, Any] = {}
    if "profile" not in own:
        known["degree"] = own["raw_alpha"].numel() - END_POINTS - 1
    if "mixing" in own:
        known |= {"landmarks": points, "standardize": "norm.running_mean" in own}
        classes = own["mixing"].shape[0]
    else:
        prototypes = options.get("prototypes", 1)
        classes = points // prototypes if isinstance(prototypes, int) and prototypes > 0 else points
    window = options.get("window", 1)
    if isinstance(window, int) and window > 1:
        if features % window**2:
            raise ValueError(
                f"{path} holds another head than the options say: {features} features are no window={window}"
            )
        features //= window**2
    head = create_head("kernel", features, classes, **{**known, **options})
    assert isinstance(head, KernelClassifier)
    profile = head.profile.clone() if head.profile is not None else None
    try:
        head.load_state_dict(own)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{path} holds another head than the options say ({words})") from error
    if profile is not None and not torch.equal(profile, own["profile"].to(profile.dtype)):
        raise ValueError(f"{path} holds another fixed kernel than the options say: its coefficients differ")
    return head


def _read(path: Path) -> dict[str, Tensor]:
    try:
        state: Any = load_file(path)
    except safetensors.SafetensorError:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(
                f"{path} is no state dict that can be read safely; torch.save(model.state_dict(), ..) makes one"
            ) from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):  # as Lightning and many scripts keep it
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__} and no state dict")
    return {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
