"""Heads as modules: one node in graphs of torch.fx, as of torchvision's feature extractors; half precision."""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, fx, nn

from kernelhead.ops.precision import real_dtype


class Leaf(nn.Module):
    """A module that is one node of a traced graph, as layers of PyTorch are: its forward pass looks at shapes.

    A tracer takes layers of torch.nn for such nodes, and looks into all others unless told not to.
    """

    precise: tuple[str, ...] = ()
    """Buffers that stay float32 at least, whatever the module is converted to."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: self.get_buffer(name) for name in self.precise}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # `to`, `half`, `cuda`: all come down to this
        for name, kept in before.items():
            owner, _, own_name = name.rpartition(".")
            made = self.get_buffer(name)
            if made is not None and made.dtype != real_dtype(made.dtype):
                setattr(self.get_submodule(owner), own_name, kept.to(made.device, real_dtype(made.dtype)))
        return self

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
