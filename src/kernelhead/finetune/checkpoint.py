"""Checkpoints: safetensors with a JSON state and a digest inside, written atomically. No pickle is ever loaded."""

import hashlib
import json
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from kernelhead.files import plain_file, write_bytes


class BrokenCheckpointError(ValueError):
    """A checkpoint that is cut short, tampered with, or not a checkpoint."""


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a state of JSON values as one file, whole or not at all."""
    text = json.dumps(state, sort_keys=True)
    whole = torch.contiguous_format  # safetensors refuses views and tied weights
    stored = {name: tensor.detach().cpu().clone(memory_format=whole) for name, tensor in tensors.items()}
    write_bytes(path, safetensors.torch.save(stored, {"state": text, "sha256": digest(stored, text)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote, equal to the bit."""
    tensors, metadata = read_tensors(path)
    if "sha256" not in metadata:
        raise BrokenCheckpointError(f"{path} was not written by kernelhead; it holds weights alone")
    if metadata["sha256"] != digest(tensors, metadata.get("state", "")):
        raise BrokenCheckpointError(f"{path} does not match its own checksum: it was changed or damaged")
    try:
        return tensors, {**json.loads(metadata["state"])}
    except (KeyError, ValueError, RecursionError, TypeError) as error:
        raise BrokenCheckpointError(f"{path} has no readable state; it was changed or damaged") from error


def misfit(model: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Count the tensors of a file that are missing, unknown or of another shape, and name the first three of each."""
    states = (model.state_dict(), tensors)  # without what heads add, which says itself what is wrong
    own, found = ({name: tuple(x.shape) for name, x in each.items() if "_extra_state" not in name} for each in states)
    kinds = {
        "missing": [name for name in own if name not in found],
        "unknown": [name for name in found if name not in own],
        "of another shape": [f"{x} {found[x]} instead of {own[x]}" for x in own if found.get(x, own[x]) != own[x]],
    }
    said = [f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in kinds.items() if names]
    return f"tensors do not fit: {'; '.join(said)}" if said else ""


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    try:
        with safetensors.safe_open(plain_file(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, ValueError, AttributeError, safetensors.SafetensorError) as error:
        raise BrokenCheckpointError(f"{path} is not a readable safetensors file ({error})") from error


def digest(tensors: dict[str, Tensor], state: str = "") -> str:
    """Return a checksum over names, types, shapes and bytes of tensors on the CPU, and a text."""
    checksum = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


class History:
    """The newest checkpoint of a run and the one before it. A run continues where its `identity` is theirs."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path, self.previous = path, path.with_suffix(f".previous{path.suffix}")
        self.identity = json.loads(json.dumps(identity, default=str))  # as it reads back: tuples become lists
        self.damaged = False  # a damaged newest checkpoint must not replace the one before it

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint; the newest so far becomes the previous one."""
        if self.path.exists() and not self.damaged:
            self.path.replace(self.previous)
        save_checkpoint(self.path, tensors, {**state, "identity": self.identity, "step": step})
        self.damaged = False

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensors and state of the newest readable checkpoint, with its "step", or None where there is none."""
        for path in (self.path, self.previous):
            if not path.exists():
                continue
            try:
                tensors, state = load_checkpoint(path)
            except BrokenCheckpointError as error:
                self.damaged |= path == self.path
                older = path == self.path and self.previous.exists()
                then = "the one before it is tried" if older else "the run starts anew"
                warnings.warn(f"{error}; {then}", stacklevel=3)
                continue
            begun = state.get("identity", {})
            for name in {**self.identity, **begun}:
                if self.identity.get(name) != begun.get(name):
                    own, its = (textwrap.shorten(str(each.get(name)), 80) for each in (self.identity, begun))
                    raise ValueError(
                        f"{path} belongs to another run: {name} is {own} here and {its} there; "
                        f"leave {name} as it was, or choose another folder"
                    )
            return tensors, state
        return None
