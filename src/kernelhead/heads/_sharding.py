"""Heads whose classes are shared out over processes."""

from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, distributed, nn

from kernelhead.functional import sharded_cross_entropy
from kernelhead.fused.cross_entropy.sharded import Share
from kernelhead.heads._base import Head
from kernelhead.heads._inputs import as_labels

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import ProcessGroup


class ShardableHead(Head):
    """A head that can keep the classes of one process alone."""

    share: Share | None = None
    """Which classes this process has, where `shard` gave it a part of them."""
    by_class: ClassVar[tuple[str, ...]]
    """Parameters with a row per class, or `prototypes` of them."""
    prototypes = 1

    def shard(self, group: "ProcessGroup", *, device: torch.device | str | None = None) -> Self:
        """Keep this process's classes alone: an equal part of all, in the order of ranks.

        `loss` then takes the samples that each process has, and gives the mean over all of them. A head on the meta
        device is made on `device` here, so that no process ever holds all classes. Everything else becomes what the
        first process has. The state has the parameters of classes as DTensors, which torch.distributed.checkpoint saves
        and loads with any number of processes. See docs/scale.md.
        """
        if self.share is not None:
            raise ValueError(f"shard needs a whole {type(self).__name__}; got a share of the classes")
        part = -(-self.num_classes // group.size())
        first, last = (min(self.num_classes, part * rank) for rank in (group.rank(), group.rank() + 1))
        self.share = Share(group, first, last - first, self.num_classes)
        for name, whole in self._of_classes().items():
            rows = self.prototypes if whole.dim() > 1 else 1
            own = whole.detach()[first * rows : last * rows].clone()
            setattr(self, name, nn.Parameter(own, whole.requires_grad))
        if next(self.parameters()).is_meta:
            place, seed = torch.device(device or "cpu"), int(torch.randint(2**62, (), device="cpu"))
            with torch.random.fork_rng([place] if place.type == "cuda" else []):
                torch.manual_seed(seed + group.rank())  # classes of equal seeds would begin alike
                self.to_empty(device=place).reset_parameters()
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name not in self.by_class:
                distributed.broadcast(tensor.detach(), group=group, group_src=0)
        self.register_state_dict_post_hook(_as_sharded)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_as_local)  # type: ignore[no-untyped-call]
        return self

    def top_k(self, features: Tensor, k: int = 1, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the k largest logits (..., k) and their classes, over all processes that share out the classes.

        All processes call this with the same features.
        """
        if self.share is None:
            whole: tuple[Tensor, Tensor] = (self(features) if mask is None else self(features, mask=mask)).topk(k)
            return whole
        best = self._own_logits(features, mask).topk(min(k, self.share.classes))
        missing = 0, k - best.values.shape[1]
        values = nn.functional.pad(best.values, missing, value=-torch.inf)
        indices = nn.functional.pad(best.indices + self.share.first, missing)
        found, classes = (self.share.gather(each, 1) for each in (values, indices))
        best = found.topk(k)
        shape = *self._leading(features), k
        return best.values.view(shape), classes.gather(1, best.indices).view(shape)

    def loss(self, features: Tensor, target: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the cross-entropy of this head's logits with labels. Arguments as of `Head.loss`."""
        if self.share is None:
            return super().loss(features, target, mask=mask, **options)
        labels, logits = self._gathered_labels(features, target), self._gathered_logits(features, mask)
        options = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean", **options}
        found = sharded_cross_entropy(logits, labels, self.share, **options)
        return found.view(-1, *target.shape[1:]) if found.dim() else found

    def _gathered_labels(self, features: Tensor, target: Tensor) -> Tensor:
        """Return the labels (R N,) of all R processes, which need to have as many each."""
        labels = as_labels(target, self._leading(features), type(self).__name__)
        if self.share is None:
            return labels
        counts = self.share.gather(torch.tensor([len(labels)], device=labels.device)).tolist()
        if len(set(counts)) > 1:
            raise ValueError(f"processes that share out the classes need batches of the same size; got {counts}")
        return self.share.gather(labels)

    def _leading(self, features: Tensor) -> tuple[int, ...]:
        """Return the shape of the labels of features."""
        return (len(features),) if self.pools else tuple(features.shape[:-1])

    def _own_logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits (N, K) of own classes, for the features that this process has."""
        raise NotImplementedError

    def _gathered_logits(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Return the logits (R N, K) of own classes, for the features of all R processes."""
        raise NotImplementedError

    def _of_classes(self) -> dict[str, nn.Parameter]:
        found = {name: getattr(self, name) for name in self.by_class}
        return {name: parameter for name, parameter in found.items() if parameter is not None}


def _as_sharded(head: ShardableHead, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Give what belongs to classes as a DTensor with a row per class, on the memory of the parameter."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert head.share is not None
    assert head.share.group is not None
    for name, parameter in head._of_classes().items():
        width = [head.prototypes * parameter.shape[1]] if parameter.dim() > 1 else []
        own = parameter.detach().view(head.share.classes, *width)
        mesh = DeviceMesh.from_group(head.share.group, own.device.type)
        size, stride = torch.Size((head.num_classes, *width)), (*width, 1)
        state[f"{prefix}{name}"] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=size, stride=stride)


def _as_local(head: ShardableHead, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Take the rows of this process from such DTensors."""
    from torch.distributed.tensor import DTensor

    for name, parameter in head._of_classes().items():
        given = state.get(f"{prefix}{name}")
        if isinstance(given, DTensor):
            state[f"{prefix}{name}"] = given.to_local().view_as(parameter)
