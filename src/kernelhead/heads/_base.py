"""The base of all heads: a configuration, a loss, and how they behave as modules."""

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.fused.precision import real_dtype
from kernelhead.heads._inputs import as_labels, as_mask, as_positions, as_vectors, check_choice, check_sizes

if TYPE_CHECKING:
    from kernelhead.inspection import Description

CONFIG_VERSION = 1
CONFIG_KEY = "_extra_state"  # PyTorch's name for what a module adds to its state
POOLS = ("auto", None)


class Head(nn.Module):
    """A classification head: features in, logits out.

    Feature vectors `(..., D)` give logits `(..., C)`. A head with `pool="auto"` averages over the positions of a map
    `(N, D, H, W)` or of tokens `(N, L, D)` and gives `(N, C)`. It takes vectors `(N, D)` as single positions, and a
    mask `(N, H, W)` or `(N, L)` that is 0 or false at positions that do not count, such as padding.

    A subclass sets `name`, calls `_configure` in its constructor and defines `forward`.
    """

    name: ClassVar[str]
    """The word for this head in Python, on the command line and in tables."""
    precise: ClassVar[tuple[str, ...]] = ()
    """Buffers that stay float32 at least, whatever the module is converted to."""
    scaled: ClassVar[tuple[str, ...]] = ()
    """Parameters to which the logits are proportional, all of them together."""
    shown_below: ClassVar[tuple[str, ...]] = ()
    """Options that the line of a submodule shows in `repr`."""

    pool: str | None = None

    def _configure(self, in_features: int, num_classes: int, **options: Any) -> None:
        """Check the sizes, and keep every option as it was given."""
        check_sizes(type(self).__name__, in_features=in_features, num_classes=num_classes)
        self.in_features, self.num_classes = int(in_features), int(num_classes)
        # Numbers of NumPy and of torch become Python's, which JSON can hold.
        self._options = {name: value.item() if hasattr(value, "item") else value for name, value in options.items()}
        if "pool" in options:
            check_choice(type(self).__name__, "pool", options["pool"], POOLS)
            self.pool = options["pool"]

    @property
    def config(self) -> dict[str, Any]:
        """Everything that `create_head(**config)` needs to make the same head: a version, sizes and every option.

        It is part of the head's state. A release reads the versions that it and the previous major release wrote.
        """
        sizes = {"in_features": self.in_features, "num_classes": self.num_classes}
        return {"version": CONFIG_VERSION, "name": self.name, **sizes, **deepcopy(self._options)}

    @property
    def identity(self) -> dict[str, Any]:
        """The configuration as JSON gives it back, and what else decides whether weights belong to this head."""
        read: dict[str, Any] = json.loads(json.dumps(self.config, default=str))
        return read

    def get_extra_state(self) -> Tensor:
        """Return `identity` as the bytes of its JSON, which a state holds beside the weights, in safetensors too."""
        return torch.tensor(list(json.dumps(self.identity).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor, where: str = "") -> None:
        """Refuse the state of a head of another configuration."""
        if state.is_meta:
            return
        name = type(self).__name__ + (f" at {where!r}" if where else "")
        try:
            different = difference(self.identity, json.loads(state.to("cpu", torch.uint8).numpy().tobytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{name} cannot read the configuration of these weights ({error})") from error
        if different:
            raise ValueError(f"{name} cannot take these weights: {different}; make the head with their options")

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: Any
    ) -> None:
        """Look at the configuration before a weight is written. Weights alone, which carry none, are taken."""
        key = prefix + CONFIG_KEY
        if key in state_dict:
            self.set_extra_state(state_dict[key], prefix[:-1])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        if key in missing:
            missing.remove(key)

    @property
    def pools(self) -> bool:
        """Whether the head wants spatial positions or tokens rather than pooled feature vectors."""
        return self.pool is not None

    @property
    def has_fused_loss(self) -> bool:
        """Whether `loss` can do without the logits where there are many classes."""
        return False

    @property
    def undecayed(self) -> tuple[nn.Parameter, ...]:
        """Parameters that stay bounded on their own, and so take no weight decay."""
        return ()

    def reset_parameters(self) -> None:
        """Start anew."""
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply the logits by a positive number, which becomes part of the parameters."""
        if not self.scaled:
            raise ValueError(f"{type(self).__name__} has no parameters that its logits are proportional to")
        for name in self.scaled:
            self.get_parameter(name).mul_(factor)

    def freeze(self) -> "Head":
        """Return a copy for inference, in evaluation mode. Kernel heads become faster; see `FrozenHead`."""
        return deepcopy(self).eval()

    def describe(self, features: Tensor | Iterable[Tensor] | None = None) -> "Description":
        """Return what a kernel head has learned, in numbers; `print` shows them with the kernel drawn.

        With features as the head takes them, or batches of them, also how its points are used. See
        `kernelhead.inspection`.
        """
        from kernelhead.inspection import describe  # it is made of heads

        if not hasattr(self, "kernel"):
            raise ValueError(f"{type(self).__name__} has no kernel to describe; use a head such as kernel or landmarks")
        head: Any = self
        return describe(head, features)

    def loss(
        self,
        features: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the cross-entropy of this head's logits with labels.

        features and mask as `forward` takes them; target: integers of the logits' leading shape. `reduction="none"`
        gives losses of that shape.
        """
        logits = self(features) if mask is None else self(features, mask=mask)
        labels = as_labels(target, logits.shape[:-1], type(self).__name__)
        logits = logits.reshape(-1, self.num_classes)
        found = F.cross_entropy(
            logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        return found.view(target.shape) if found.dim() else found

    def _positions(self, features: Tensor, real: Tensor | None = None) -> Tensor:
        """Return `points` as (N, L, D), each vector as one position, with zeros at those that are not real."""
        points = self.points(features)
        if real is not None:
            return points.masked_fill(~real[..., None], 0)
        return points if points.dim() == 3 else points.unsqueeze(1)

    def _real(self, features: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return which positions are real, (N, L), or None for all."""
        return None if mask is None else as_mask(mask, features, self.pools, type(self).__name__)

    def points(self, features: Tensor) -> Tensor:
        """Return what a kernel compares with its points: vectors (N, D), or positions of each sample (N, L, D)."""
        view = as_positions if self.pools and features.dim() != 2 else as_vectors
        return view(features, self.in_features, type(self).__name__)

    def _as_given(self, logits: Tensor, features: Tensor) -> Tensor:
        """Give logits (N, C) the leading shape of the features they belong to."""
        return logits if self.pools or features.dim() == 2 else logits.view(*features.shape[:-1], self.num_classes)

    def extra_repr(self) -> str:
        own = {name: value for name, value in self._options.items() if name not in self.shown_below}
        shown = {"in_features": self.in_features, "num_classes": self.num_classes, **own}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value not in (None, False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module, as `to`, `half` and `cuda` do, but keep `precise` buffers in float32 at least."""
        before = {name: self.get_buffer(name) for name in self.precise}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, kept in before.items():
            owner, _, own_name = name.rpartition(".")
            made = self.get_buffer(name)
            if made is not None and made.dtype != real_dtype(made.dtype):
                setattr(self.get_submodule(owner), own_name, kept.to(made.device, real_dtype(made.dtype)))
        return self


def difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say in which entries two configurations differ."""
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    return ", ".join(f"{name} is {own.get(name)!r} here and {other.get(name)!r} there" for name in names)
