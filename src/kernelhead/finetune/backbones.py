"""Networks by name: of torchvision, of timm, or made by a person's own function."""

import difflib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from kernelhead.finetune.checkpoint import misfit, read_tensors

IMAGENET = (224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LIBRARIES = {"torchvision": "torchvision.models", "timm": "timm"}  # and the modules with their networks
CLASSIFIERS = ("fc", "classifier", "head")  # where the usual networks keep their own classifier
FIRST_1X1 = "first 1x1 convolution of a bottleneck"  # metadata `stride` of a safetensors file of ResNet v1 weights


@dataclass(frozen=True)
class Input:
    """Images that a network expects: their side in pixels, mean and standard deviation per channel (values 0 to 1)."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def create_network(
    name: str, *, pretrained: bool = False, weights: str | Path | None = None, stride_first: bool = False
) -> nn.Module:
    """Make a network with its own classifier.

    Args:
        name: `torchvision/NAME`, `timm/NAME`, a bare NAME that is looked up in both, or `package.module:function`, a
            person's own network: a function without arguments that returns it.
        pretrained: download and load the library's weights.
        weights: a local safetensors file of weights instead. A classifier of another size is left out.
        stride_first: put the stride of torchvision's bottlenecks into their first 1x1 convolution, as in ResNet v1 of
            2015. A weights file whose metadata say so does it too. The network's `stride_first` remembers it.
    """
    if pretrained and weights is not None:
        raise ValueError(f"pretrained=True and weights={str(weights)!r} exclude each other; leave one of them out")
    if pretrained and ":" in name:
        raise ValueError(f"{name} has no weights to download; load them in the function, or give a weights file")
    network = _from_function(name) if ":" in name else _from_library(name, pretrained)
    if weights is not None:
        path = Path(weights)
        if not path.is_file():
            raise FileNotFoundError(f"there is no weights file {path}")
        state, metadata = read_tensors(path)
        for part, own in network.state_dict().items():
            if part in state and part.split(".")[0] in CLASSIFIERS and state[part].shape != own.shape:
                state[part] = own
        if wrong := misfit(network, state):
            raise ValueError(f"{path} is not of {name}, whose {wrong}")
        network.load_state_dict(state)
        stride_first |= metadata.get("stride") == FIRST_1X1
    if stride_first:
        from torchvision.models.resnet import Bottleneck

        for block in network.modules():
            if isinstance(block, Bottleneck):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    network.stride_first = stride_first  # type: ignore[assignment]
    return network


def expected_input(name: str, network: nn.Module) -> Input:
    """Return the input that a network expects: its own `expected_input` or timm's word for it, or as on ImageNet."""
    timm: dict[str, Any] = getattr(network, "pretrained_cfg", {})
    default = (timm["input_size"][-1], timm["mean"], timm["std"]) if timm else IMAGENET
    own = getattr(network, "expected_input", default)
    try:
        size, mean, std = own
        return Input(int(size), tuple(map(float, mean)), tuple(map(float, std)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected_input of {name} is {own!r}; make it (size, mean, std)") from error


@contextmanager
def without_memory() -> Iterator[None]:
    """Put the tensors of modules that are made on the meta device; what else they compute is computed."""

    def moved(module: nn.Module, name: str, tensor: Tensor | None) -> Any:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.to("meta"), tensor.requires_grad)
        return None if tensor is None else tensor.to("meta")

    hook: Any = moved
    parameters = modules.register_module_parameter_registration_hook(hook)
    buffers = modules.register_module_buffer_registration_hook(hook)
    with parameters, buffers, torch.random.fork_rng(devices=[]):
        yield


def _from_library(name: str, pretrained: bool) -> nn.Module:
    prefix, _, rest = name.partition("/")
    libraries, own_name = ([prefix], rest) if prefix in LIBRARIES else (list(LIBRARIES), name)
    names: list[str] = []
    network: nn.Module
    try:
        for library in libraries:
            module: Any = importlib.import_module(LIBRARIES[library])
            listed = module.list_models(module=module) if library == "torchvision" else module.list_models()
            if library == "torchvision" and own_name in listed:
                network = module.get_model(own_name, weights="DEFAULT" if pretrained else None)
                return network
            if library == "timm" and module.is_model(own_name):
                network = module.create_model(own_name, pretrained=pretrained)
                return network
            names += listed
    except ModuleNotFoundError as error:
        sentence = f"network {name!r} needs {error.name}; install it with pip install 'kernelhead[vision]'"
        raise ModuleNotFoundError(sentence, name=error.name) from error
    except OSError as error:  # errors of urllib and of the hub are among them
        sentence = f"the pretrained weights of {name} could not be downloaded ({error}); give a local file of weights"
        raise OSError(sentence) from error
    close = difflib.get_close_matches(own_name, dict.fromkeys(names), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "a network of your own is package.module:function"
    raise ValueError(f"there is no network called {own_name!r} in {' or '.join(libraries)}; {hint}")


def _from_function(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"network {name!r} is of Python's own library; name a function of yours")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        sentence = f"network {name!r} needs the module {error.name!r}; install it, or start in the folder that holds it"
        raise ModuleNotFoundError(sentence, name=error.name) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} has no function {attribute!r}; write package.module:function")
    try:
        network = function()
    except TypeError as error:
        raise ValueError(f"{name} cannot be called without arguments ({error}); give them defaults") from error
    if not isinstance(network, nn.Module):
        raise TypeError(f"{name} returned a {type(network).__name__}; let it return a torch.nn.Module")
    return network
