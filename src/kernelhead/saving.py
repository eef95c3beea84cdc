"""Heads and kernelized networks as folders: a configuration, weights in safetensors and a model card. No pickle."""

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kernelhead.files import needing, plain_file, temporary_beside, write_bytes
from kernelhead.finetune.backbones import create_network, without_memory
from kernelhead.finetune.checkpoint import load_checkpoint, misfit, read_tensors, save_checkpoint
from kernelhead.finetune.saved import load_classifier
from kernelhead.finetune.settings import MODEL_FILE
from kernelhead.heads import Head, create_head
from kernelhead.heads._base import CONFIG_KEY, difference
from kernelhead.surgery import changes, kernelize
from kernelhead.surgery._record import CONFIG_FILE, KEY, RECORD_VERSION, TRANSFORMERS, heads_of, outline, record_of

MAX_JSON_BYTES = 2**24
logger = logging.getLogger("kernelhead")


def save(
    model: nn.Module, folder: str | Path, *, data: str | None = None, figures: Mapping[str, float] | None = None
) -> None:
    """Write a head, or a network with heads, into a folder that `load` reads.

    Networks of torchvision, timm and transformers that `kernelize` changed are recorded by their name and by what it
    did. Any other network has to be given to `load`, and the logger "kernelhead" says so.

    Args:
        model: the head or the network itself, not wrapped by DistributedDataParallel or torch.compile.
        folder: gets config.json, model.safetensors and a model card, README.md.
        data: what the model was trained on, for the card.
        figures: numbers by their names, such as accuracy, for the card.

    Example:
        >>> kernelhead.save(kernelhead.KernelHead(64, 10), "head", figures={"accuracy": 92.7})
    """
    folder, owner, state = Path(folder), type(model).__name__, model.state_dict()
    if not heads_of(model):
        raise ValueError(f"save needs a head of kernelhead; {owner} has none, call kernelize first")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ValueError(f"save takes the network itself; got it wrapped into {owner}")
    for name, tensor in state.items():
        if type(tensor) is not Tensor:
            kind = type(tensor).__name__
            raise ValueError(f"save takes plain tensors; {name} is a {kind}, so save before quantising or sharding")
    source = None if isinstance(model, Head) else _source(model)
    if source and source["name"] is None:
        logger.warning("kernelhead cannot make this %s by itself: only load(folder, model=...) will read it", owner)
    if source and str(source["name"]).startswith(TRANSFORMERS):
        with temporary_beside(folder / CONFIG_FILE) as whole:  # transformers writes in place
            model.save_pretrained(whole)  # type: ignore[operator]
            for each in sorted(whole.iterdir(), reverse=True):
                each.replace(folder / each.name)
    else:
        computed = {name: str(each.dtype)[6:] for name, each in model.named_buffers() if name not in state}
        config = {KEY: {**record_of(model, source), "computed": computed}}
        save_checkpoint(folder / MODEL_FILE, state, {})
        write_bytes(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
    write_bytes(folder / "README.md", _card(model, source, data, figures or {}).encode())


def load(folder: str | Path, *, model: nn.Module | None = None, revision: str | None = None) -> nn.Module:
    """Read what `save` wrote, or a kernelized network of transformers that its own `save_pretrained` wrote.

    The model is in evaluation mode, on the CPU, and gives the logits of the one that was saved, to the bit. Folders of
    `kernelhead train` are read too. A release reads what it and the previous major release wrote.

    Args:
        folder: the folder, or the name `owner/name` of a repository on the Hub, which needs the extra "hub".
        model: for a network of your own: what it was before `kernelize`, or as it was saved. It is filled.
        revision: a branch, a tag or a commit of the repository.

    Example:
        >>> kernelhead.save(kernelhead.KernelHead(64, 10), "head")
        >>> kernelhead.load("head")(torch.randn(8, 64)).shape
        torch.Size([8, 10])
    """
    path = Path(folder) if Path(folder).is_dir() else _fetched(str(folder), revision)
    file = path / CONFIG_FILE
    if not file.exists() and path == Path(folder):
        return load_classifier(path).model
    try:
        record = json.loads(plain_file(file, MAX_JSON_BYTES).read_bytes()).get(KEY)
        if record is None:
            raise ValueError("it has no record of kernelhead, as kernelhead.save and kernelized networks write it")
        if record["version"] != RECORD_VERSION:
            raise ValueError(f"it has version {record['version']}; this kernelhead reads version {RECORD_VERSION}")
        if model is None and record["network"] and str(record["network"]["name"]).startswith(TRANSFORMERS):
            return _from_transformers(path, record).eval()
        read = load_checkpoint if "computed" in record else read_tensors  # transformers writes no checksum
        tensors, _ = read(path / MODEL_FILE)
        if model is None:
            most = sum(tensor.numel() for tensor in tensors.values())
            for option, value in (pair for config in record["heads"].values() for pair in config.items()):
                if isinstance(value, int | float) and value > most:
                    raise ValueError(f"{option} is {value}, and there are only {most} weights")
            with without_memory():
                _compare(_made(record), record["heads"], tensors)
            with torch.random.fork_rng(devices=[]):
                model = _made(record)
        elif "kernelize" in record and not heads_of(model):
            _again(model, record)
        _compare(model, record["heads"], tensors)
        kinds = {name: getattr(torch, kind) for name, kind in record.get("computed", {}).items()}
        kinds |= {name: tensor.dtype for name, tensor in tensors.items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(kinds.get(name))
        model.load_state_dict(tensors)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"{file} cannot be loaded: {reason}") from error
    return model.eval()


def push_to_hub(model: nn.Module, repository: str, *, private: bool | None = None, **card: Any) -> str:
    """Save a model into the repository `owner/name` on the Hub and return its address. It needs the extra "hub".

    The repository is made if it is missing, private or not. `card` are `data` and `figures` as of `save`.

    Example:
        >>> push_to_hub(KernelHead(64, 10), "somebody/digits")  # doctest: +SKIP
    """
    api = _hub().HfApi()
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, **card)
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model of kernelhead")
    return str(address)


def _hub() -> Any:
    with needing("the Hub", "hub"):
        return import_module("huggingface_hub")


def _fetched(name: str, revision: str | None) -> Path:
    """Return a folder with what a repository on the Hub holds."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FileNotFoundError(f"there is no folder {name}")
    try:
        return Path(_hub().snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"there is no folder {name}, and the Hub gives no repository: {reason}") from error


def _sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state, without what heads add to it."""
    return {name: tuple(each.shape) for name, each in model.state_dict().items() if not name.endswith(CONFIG_KEY)}


def _compare(model: nn.Module, heads: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse heads or tensors that are not those of the model."""
    for name, config in heads_of(model).items():
        if different := difference(config, heads.get(name, {})):
            raise ValueError(f"the head {name!r} is another: {different}")
    if wrong := misfit(model, tensors):
        raise ValueError(f"its {wrong}")


# --- where a network comes from, and how it is made again -------------------------------------------------------------


def _source(model: nn.Module) -> dict[str, Any]:
    """Return where a network comes from. Its name is None where no library makes the same by itself."""
    kind = type(model)
    if hasattr(model, "_kernelhead_changes"):
        if kind.__module__.startswith("transformers.") and hasattr(model, "save_pretrained"):
            return {"name": TRANSFORMERS + kind.__name__}
        done, own = changes(model), _sizes(model)
        replaced = tuple(f"{name}." for name in done.layers)
        for name in _names(model):
            source: dict[str, Any] = {"name": name, "stride_first": bool(getattr(model, "stride_first", False))}
            with without_memory():
                twin = create_network(**source)
                other = [part for part, size in _sizes(twin).items() if own.get(part, size) != size]
                if not all(part.startswith(replaced) for part in other):
                    continue
                try:
                    _again(twin, record_of(model, source))
                except ValueError:
                    continue
            if repr(twin) == repr(model) and _sizes(twin) == own:
                return source
    return {"name": None, "class": kind.__name__}


def _names(model: nn.Module) -> Iterator[str]:
    """Yield names of networks that may be this one."""
    timm: Any = getattr(model, "pretrained_cfg", None)
    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "timm" in libraries and timm:
        yield f"timm/{timm['architecture']}" + (f".{timm['tag']}" if timm.get("tag") else "")
    elif "torchvision" in libraries:
        models = import_module("torchvision.models")
        for name in models.list_models(module=models):
            if signature(models.get_model_builder(name)).return_annotation in type(model).__mro__:
                yield f"torchvision/{name}"


def _made(record: Mapping[str, Any]) -> nn.Module:
    """Make the head or the network of a record."""
    source = record["network"]
    if source is None:
        config = {**record["heads"][""]}
        frozen = config.pop("frozen", False)
        return create_head(**config).freeze() if frozen else create_head(**config)
    if source["name"] is None:
        kind = source["class"]
        raise ValueError(f"it is a {kind} of somebody's own; make that network and call load(folder, model=...)")
    if not re.fullmatch(r"(torchvision|timm)/[\w.-]+", source["name"]):  # functions that a file names are not called
        raise ValueError(f"it names a network {source['name']!r} that is not of torchvision, timm or transformers")
    return _again(create_network(source["name"], stride_first=source["stride_first"]), record)


def _again(network: nn.Module, record: Mapping[str, Any]) -> nn.Module:
    """Do to a network what `kernelize` did to the one of the record, or raise ValueError."""
    options = {**next(iter(record["heads"].values())), **record["kernelize"]}
    sizes = {name: options.pop(name) for name in ("version", "in_features", "num_classes", "name")}
    device = next(network.parameters()).device

    def example(value: Any) -> Any:
        known = isinstance(value, dict)
        return torch.ones(value["shape"], dtype=getattr(torch, value["dtype"]), device=device) if known else value

    options["inputs"] = tree_map(
        example, options["inputs"], is_leaf=lambda value: isinstance(value, dict) and "shape" in value
    )
    kernelize(network, sizes["num_classes"], head=sizes["name"], **options)
    own, theirs = outline(changes(network)), record["changes"]
    if own != theirs:
        raise ValueError(f"kernelize does something else to it now: {difference(own, theirs)}")
    return network


def _from_transformers(path: Path, record: Mapping[str, Any]) -> nn.Module:
    """Let transformers load a class of its own that kernelizes itself when it is made."""
    transformers, source = import_module("transformers"), record["network"]
    name = source["name"].removeprefix(TRANSFORMERS)
    known = getattr(transformers, name, None)
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        raise ValueError(f"transformers has no network {name!r}")
    kind: Any = known

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            kind.__init__(self, *arguments, **options)
            _again(self, record)
        except ValueError:  # on the meta device, and to run it needs numbers
            with torch.device("cpu"):
                kind.__init__(self, *arguments, **options)
                _again(self, record)
        for head in (module for module in self.modules() if isinstance(module, Head)):
            for module in head.modules():
                module._is_hf_initialized = True  # type: ignore[assignment]  # its initialisation is not for heads

    config = kind.config_class.from_pretrained(path)
    config.transformers_weights = None
    options = {"use_safetensors": True, "output_loading_info": True}
    options |= {"attn_implementation": source["attention"]} if source.get("attention") else {}
    itself: Any = type(name, (kind,), {"__init__": init, "__module__": kind.__module__})
    network, found = itself.from_pretrained(path, config=config, **options)
    for word in ("missing_keys", "unexpected_keys"):
        if found[word]:
            raise ValueError(f"{name} has {word.replace('_', ' ')}: {', '.join(sorted(found[word])[:3])}")
    network.__class__ = kind
    return network  # type: ignore[no-any-return]


def _card(model: nn.Module, source: Mapping[str, Any] | None, data: str | None, figures: Mapping[str, float]) -> str:
    """Return the model card: network, data, figures, and the head with its kernel drawn."""
    head = next(module for module in model.modules() if isinstance(module, Head))
    name = "A head alone" if source is None else source["name"] or source["class"]
    done = getattr(model, "_kernelhead_changes", None)
    argument = ", model=..." if source and source["name"] is None else ""
    drawn = hasattr(head, "kernel") and all(parameter.isfinite().all() for parameter in head.parameters())
    parts = [
        f"---\nlibrary_name: kernelhead\ntags:\n- kernelhead\n- {head.name}\n---",
        f"# {type(head).__name__} for {head.num_classes} classes",
        f"{name}." if done is None else f"{name}, kernelized. {done}.",
        f'```python\nmodel = kernelhead.load("this folder or repository"{argument})\n```',
        f"## Data\n{data or 'Not stated.'}",
        "\n".join(["## Figures", *(f"- {name}: {value:.4g}" for name, value in figures.items())]) if figures else "",
        f"## Head\n```\n{head.describe() if drawn else head}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
