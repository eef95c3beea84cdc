"""The ReLU before the features, taken away without a change to the name of any weight."""

import sys
from collections.abc import Callable

from torch import nn

from kernelhead.surgery._hooks import rectified
from kernelhead.surgery._trace import Call, Node, Trace

Edit = Callable[[nn.Module], None]  # a change to a network, or to a copy of it


def find_removal(trace: Trace, model: nn.Module, relu: Node) -> tuple[str, Edit] | None:
    """The module that a ReLU of the trace belongs to, and what takes the ReLU away; None where nothing can.

    A ReLU module that runs once becomes an identity. One that runs several times, as in many residual blocks, becomes
    one too, and the modules whose results it rectified elsewhere do that themselves, by a hook. Where a function is
    called instead of a module, a class of torchvision can be changed into one without; of others we know nothing.
    """
    name = relu.scope[-1]
    module = model.get_submodule(name)
    if isinstance(module, nn.ReLU | nn.ReLU6):
        others = [call for call in trace.calls_of(name) if call.output is not relu]
        makers = [_maker(trace, call.input) for call in others]
        if (isinstance(module, nn.ReLU6) and makers) or None in makers:
            return None
        names = [maker.name for maker in makers if maker is not None]

        def edit(model: nn.Module) -> None:
            replace(model, name, nn.Identity())
            for each in names:
                model.get_submodule(each).register_forward_hook(rectified)

        return name, edit
    if "torchvision" in sys.modules:
        from kernelhead.surgery._torchvision import UNRECTIFIED

        unrectified = UNRECTIFIED.get(type(module))
        if unrectified is not None:
            return name, lambda model: setattr(model.get_submodule(name), "__class__", unrectified)
    return None


def _maker(trace: Trace, node: Node | None) -> Call | None:
    """The call that made a tensor which nothing but the ReLU uses, where its module runs this once."""
    if node is None or sum(node in other.inputs for other in trace.nodes) != 1:
        return None
    made = [call for call in trace.calls if call.output is node]
    return made[-1] if made and len(trace.calls_of(made[-1].name)) == 1 else None


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` in the place of a module, under every name that it has."""
    old = model.get_submodule(name)
    new.train(old.training)
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, child_name, new)
