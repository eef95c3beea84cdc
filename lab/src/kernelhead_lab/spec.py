"""The run behind a cell of a table: a `TrainSpec` with what only the laboratory needs."""

from dataclasses import dataclass, field
from typing import Any, Self

from kernelhead.finetune.spec import TrainSpec

NETWORKS = "kernelhead_lab.networks:"
"""The prefix of the laboratory's own networks."""

_KERNEL: dict[str, Any] = {"degree": 7, "kernel": "learned", "gamma": 1.0}
_LAYER: dict[str, Any] = {**_KERNEL, "coefficients": "relu", "temperature": None, "bias": False}
_LANDMARKS: dict[str, Any] = {**_KERNEL, "coefficients": "softplus", "pool": "auto"}
USUAL: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "kernel": _LAYER,
    "pooled_kernel": {**_LAYER, "pool": "auto"},
    "prototypes": _LAYER,
    "pooled_prototypes": {**_LAYER, "pool": "auto"},
    "landmarks": _LANDMARKS,
    "landmarks_variant": {**_LANDMARKS, "window": 1, "standardize": True, "eps": 1e-5, "dropout": 0.0},
    "second_order": {"pool": "auto"},
    "second_order_variant": {"pool": "auto"},
    "expansion": {"pool": "auto"},
    "attentive": {"queries": 16, "pool": "auto"},
    "expansion_variant": {"pool": "auto", "dropout": 0.0},
}
"""Options of heads that a key leaves unsaid. Every table names all options; the library's defaults may change."""


@dataclass(frozen=True)
class Subset:
    """A share of the training images, chosen by `strategy` (see `kernelhead.finetune.select`)."""

    strategy: str
    percent: int


@dataclass(frozen=True)
class LabSpec(TrainSpec):
    """A network, its head, and the images it is trained on, as a table needs them.

    `seed_model` and `teacher` are networks that a run builds on, of the same seed: the one that chooses the subset, and
    the one whose scores, softened by `temperature`, are learned instead of the labels.
    """

    backbone_options: dict[str, Any] = field(default_factory=dict)
    subset: Subset | None = None
    seed_model: "LabSpec | None" = None
    teacher: "LabSpec | None" = None  # type: ignore[assignment]  # a spec, where the library has a folder
    temperature: float = 20.0

    @property
    def key(self) -> str:
        """A name that tells the network and its images from all others on the same data, fit for a folder."""
        words = [self.backbone.replace(":", "/").rpartition("/")[2].removeprefix("cifar_")]
        words += _words(self.backbone_options)
        words += ["pretrained"] * bool(self.pretrained or self.weights) + ["rectified"] * self.rectified
        words += ["crops"] * (self.augment == "imagenet")
        usual = USUAL.get(self.head, {})
        own = {name: value for name, value in self.head_options.items() if (name, value) not in usual.items()}
        words += [self.head, *_words(own)]
        if self.mixup:
            words.append("mixup")
        if self.teacher is not None:
            words.append(f"taught-by-{self.teacher.key}")
        if self.subset is not None:
            words.append(f"{self.subset.strategy.replace('-', '')}{self.subset.percent}")
        return "-".join(words)

    def recipe(self) -> dict[str, Any]:
        """The settings that decide what comes out, those of the networks below too."""
        below = {name: getattr(self, name) for name in ("seed_model", "teacher")}
        return {**super().recipe(), **{name: spec and spec.recipe() for name, spec in below.items()}}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Make the spec that `as_dict` or `recipe` described."""
        made = dict(settings)
        for name in ("seed_model", "teacher"):
            if made.get(name) is not None:
                made[name] = LabSpec.from_dict(made[name])
        if made.get("subset") is not None:
            made["subset"] = Subset(**made["subset"])
        return super().from_dict(made)


def head(name: str, **own: Any) -> dict[str, Any]:
    """Return a head with every option explicit: what is not said is `USUAL`."""
    return {"head": name, "head_options": {**USUAL[name], **own}}


def _words(options: dict[str, Any]) -> list[str]:
    """Options as words: {"kernel": "rbf", "window": 2} -> ["kernel_rbf", "window_2"]."""
    return [f"{name}_{value}" for name, value in sorted(options.items())]
