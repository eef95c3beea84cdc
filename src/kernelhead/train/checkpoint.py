"""Checkpoints: safetensors with a JSON state and a digest inside, written atomically. No pickle is ever loaded."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import safetensors
import torch
from torch import Tensor

from kernelhead.results import replacing, sha256_of

if TYPE_CHECKING:
    from kernelhead.data.images import Images
    from kernelhead.train.member import Member
    from kernelhead.train.run import Run, Trained
    from kernelhead.train.schedule import Schedule


DTYPES = {  # as safetensors names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class BrokenCheckpointError(ValueError):
    """A checkpoint that is cut short, tampered with, or not one at all."""


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON-able state as one file, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, sort_keys=True)
    metadata = {"state": text, "sha256": digest(tensors, text)}
    with replacing(path) as file:
        try:
            _write(file, tensors, metadata)
        except OSError as error:
            raise OSError(f"{path} cannot be written ({error})") from error


def _write(file: IO[bytes], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The format of safetensors, tensor by tensor, into a file that is open.

    `safetensors.torch.save` doubles the memory, and `save_file` puts another file in the place of the one it is given.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each at a multiple of its size
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        file.write(_bytes(tensors[name]))


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
        checksum.update(_bytes(tensor))
    return checksum.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """Those of a contiguous tensor on the CPU, not copied."""
    content: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return content


def identify(
    runs: "Sequence[Run]", data: "Sequence[Images]", classes: Sequence[int], schedule: "Schedule"
) -> dict[str, Any]:
    """What must be the same for a training to go on from a checkpoint."""
    labels = {id(images): digest({"labels": images.labels.cpu()}) for images in data}  # most often one for all runs
    return {
        "runs": [_identity(run) for run in runs],
        "schedule": asdict(schedule),
        "classes": list(classes) if len(set(classes)) > 1 else classes[0],  # one for all, as it always was
        "images": len(data[0]),
        "size": data[0].size,
        "labels": [labels[id(images)] for images in data],
    }


def _identity(run: "Run") -> dict[str, Any]:
    """A run, with what its files contain in the place of their paths: they may be moved."""
    from kernelhead.train.saved import classifier_file  # which needs this module

    plain = asdict(run)
    for name, usual in (("mixup", False), ("head_rate", 1.0)):
        if plain[name] == usual:
            del plain[name]  # as in checkpoints from before there was any
    for settings, name in ((plain, "teacher"), (plain["backbone_options"], "weights")):
        if settings.get(name):
            settings[name] = sha256_of(classifier_file(Path(settings[name])))
    return plain


class History:
    """The newest checkpoint of a training and the one before it."""

    def __init__(self, path: Path | None, identity: dict[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity, default=str))  # as it reads back: tuples become lists
        self.damaged = False  # the newest: it must not take the place of the one before it

    @property
    def previous(self) -> Path:
        assert self.path is not None
        return self.path.with_suffix(f".previous{self.path.suffix}")

    def save(self, step: int, members: "Sequence[Member]", results: "Sequence[Trained]") -> None:
        """Write a checkpoint; the last one becomes the previous one."""
        if self.path is None:
            return
        tensors = {f"{i}.{name}": x for i, member in enumerate(members) for name, x in member.tensors().items()}
        state = {"identity": self.identity, "step": step, "diverged": [result.diverged_at for result in results]}
        if self.path.exists() and not self.damaged:
            self.path.replace(self.previous)
        save_checkpoint(self.path, tensors, state)
        self.damaged = False

    def load(self, members: "Sequence[Member]", results: "Sequence[Trained]") -> int:
        """Bring the newest readable checkpoint into the members, and say at which step to go on."""
        for path in [] if self.path is None else [self.path, self.previous]:
            if not path.exists():
                continue
            try:
                tensors, state = load_checkpoint(path)
            except BrokenCheckpointError as error:
                newest = path == self.path
                self.damaged |= newest
                then = "the one before it is tried" if newest and self.previous.exists() else "training starts anew"
                warnings.warn(f"{error}; {then}", stacklevel=3)
                continue
            different = [key for key, value in self.identity.items() if state.get("identity", {}).get(key) != value]
            if different:
                raise ValueError(
                    f"{path} belongs to another training: its {', '.join(different)} differ; "
                    "give this one another place, or delete that one"
                )
            for i, (member, result) in enumerate(zip(members, results, strict=True)):
                lacking = [name for name in member.tensors() if f"{i}.{name}" not in tensors]
                if lacking:
                    raise ValueError(f"{path} has no {lacking[0]}: another version of kernelhead wrote it; delete it")
                with torch.no_grad():
                    for name, tensor in member.tensors().items():
                        tensor.copy_(tensors[f"{i}.{name}"])
                result.diverged_at = state["diverged"][i]
            step: int = state["step"]
            return step
        return 0
