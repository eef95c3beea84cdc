"""Heads in graphs of torch.fx, which the feature extractors of torchvision are made of."""

from typing import Any

from torch import fx, nn


class Leaf(nn.Module):
    """A module that is one node of a traced graph, as layers of PyTorch are: its forward pass looks at shapes.

    A tracer takes layers of torch.nn for such nodes, and looks into all others unless told not to.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            if isinstance(value, fx.Proxy):
                return self._node(value.tracer, arguments, options)
        return super().__call__(*arguments, **options)

    def _node(self, tracer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        usual = tracer.is_leaf_module
        tracer.is_leaf_module = lambda module, name: module is self or usual(module, name)
        try:
            return super().__call__(*arguments, **options)
        finally:
            tracer.is_leaf_module = usual
