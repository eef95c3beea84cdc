"""A record of what `kernelize` did, as plain data, from which the network can be made again."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kernelhead._version import __version__
from kernelhead.heads import Head

RECORD_VERSION = 1
CONFIG_FILE = "config.json"
KEY = "kernelhead"  # of the record in that file
TRANSFORMERS = "transformers/"
# A file that does not exist: `from_pretrained` knows no heads, fails to find it and says this name.
REFUSAL = {"transformers_weights": "kernelhead.load reads this folder.safetensors"}


def heads_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what the heads of a network are, by their names."""
    return {name: module.identity for name, module in model.named_modules() if isinstance(module, Head)}


def record_of(model: nn.Module, network: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the record of a model; `network` says where it comes from, None that it is a head alone."""
    record = {"version": RECORD_VERSION, "release": __version__, "network": network, "heads": heads_of(model)}
    done = getattr(model, "_kernelhead_changes", None)
    if done is not None:
        record |= {"kernelize": done.arguments, "changes": outline(done)}
    read: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return read


def outline(done: Any) -> dict[str, list[str]]:
    """Return where `kernelize` changed a network, from its `Changes`."""
    return {name: list(getattr(done, name)) for name in ("layers", "relus_removed", "pooled")}


def described(inputs: Any) -> Any:
    """Replace tensors among the arguments of a network by their types and shapes."""
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map_only(Tensor, lambda each: {"dtype": str(each.dtype)[6:], "shape": list(each.shape)}, inputs)


def keep_with_transformers(model: Any) -> None:
    """Keep the record of a network of transformers in its configuration, which is saved with it."""
    attention = getattr(model.config, "_attn_implementation", None)
    source = {"name": TRANSFORMERS + type(model).__name__, "attention": attention}
    setattr(model.config, KEY, record_of(model, source))
    model.save_pretrained = partial(_save_pretrained, model)


def _save_pretrained(model: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
    """Save a network of transformers by its own method, so that its `from_pretrained` refuses the folder."""
    keep_with_transformers(model)
    saved = type(model).save_pretrained(model, save_directory, *arguments, **options)
    path = Path(save_directory) / CONFIG_FILE
    if path.is_file():  # the first of several processes writes it
        path.write_text(json.dumps({**json.loads(path.read_text()), **REFUSAL}, indent=2) + "\n")
    return saved
