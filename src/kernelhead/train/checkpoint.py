"""Checkpoints: safetensors with a JSON state and a digest inside, written atomically. No pickle is ever loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kernelhead.results import write_bytes


class BrokenCheckpointError(ValueError):
    """A checkpoint that is cut short, tampered with, or not one at all."""


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON-able state as one file, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, sort_keys=True)
    metadata = {"state": text, "sha256": digest(tensors, text)}
    write_bytes(path, safetensors.torch.save(tensors, metadata))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote, to the bit."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise BrokenCheckpointError(f"{path} is not a readable checkpoint ({error})") from error
    if metadata.get("sha256") != digest(tensors, metadata.get("state", "")):
        raise BrokenCheckpointError(f"{path} does not match its own checksum: it was changed or damaged")
    return tensors, json.loads(metadata["state"])


def digest(tensors: dict[str, Tensor], state: str = "") -> str:
    """A checksum over names, types, shapes and bytes of tensors, and a text."""
    checksum = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()
