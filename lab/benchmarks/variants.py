"""Which head is best: many of them for a short time, those that are not in the library too.

    python lab/benchmarks/variants.py 20 "2048 landmarks, dropout 0.5 @ 0.1 1e-3" "second-order @ 0.3 5e-4"
        [--epochs 100] [--warmup 5] [--images 40000] [--csv lab/results/variants.csv]

Trains a CIFAR ResNet of that depth with each head, all at once, at the learning rate and weight decay behind the @. It
trains on 40,000 of CIFAR-100's training images and tests on the other 10,000: no test image is looked at. One seed, so
that differences of less than a point say little. A head is a kind and what is special about it:

    linear, second-order, Q landmarks (softplus, pooled in the RKHS), Q channels (the expansion)
    dropout P; mixup
    windows W; eps E; degree M; polynomial of degree M           of landmarks, as options of `LandmarkVariant`
    positions normalised; standardised; normalised               of channels: positions of unit length; means; both
    times S                      standardised values times S: another learning rate for the last layer
    centred                      features less their mean over the batch
    half of the positions        in training, drawn anew for every image; or: quarter of the positions
    two depths                   512 landmarks, otherwise alike, on the map of the second stage too
    beside second-order          its logits are added
    two layers                   kernel values with 256 landmarks at every position, standardised, are the features
    own coefficients             of each landmark
    times lengths                kernel values times the length of the features
    and maxima, and variances    over positions, beside the means
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead import kernels
from kernelhead.functional import kernel_mean
from kernelhead.heads import Head, create_head
from kernelhead.heads._inputs import as_positions
from kernelhead.metrics import summary
from kernelhead_lab.data.images import hold_out
from kernelhead_lab.data.open import open_data
from kernelhead_lab.engine import member
from kernelhead_lab.engine.loop import predict, train
from kernelhead_lab.heads import VARIANTS, ExpansionVariant, LandmarkVariant, SecondOrderVariant
from kernelhead_lab.networks import Classifier, build, count_parameters
from kernelhead_lab.spec import NETWORKS, LabSpec

HELD_OUT, BATCH = 0.2, 128
EARLIER = 32, 512  # features of the second stage, and landmarks there
SHARES = {"half of the positions": 0.5, "quarter of the positions": 0.25}
PLAIN = {"own coefficients": "own", "times lengths": "lengths", "and maxima": "maxima", "and variances": "variances"}
CHANNELS = {"dropout", "times", "normalised", "positions normalised", "standardised", "mixup"}
LANDMARKS = {"dropout", "windows", "times", "eps", "degree", "polynomial of degree", "mixup"}
LANDMARKS |= {"centred", "two depths", "beside second-order", "two layers", *SHARES}
WORDS = {
    "linear": {"mixup"},
    "second-order": {"mixup", "dropout"},
    "channels": CHANNELS,
    "landmarks": LANDMARKS,
    "landmarks as written": {"mixup", "dropout", *PLAIN},
}
COLUMNS = ["network", "epochs", "head", "rate", "decay", "accuracy", "nll", "training_accuracy", "head_parameters"]


class Landmarks(LandmarkVariant):
    """Landmarks that are given other features."""

    def __init__(
        self,
        *sizes: int,
        centred: bool = False,
        share: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, **options)
        self.centre = nn.BatchNorm2d(sizes[0], affine=False) if centred else nn.Identity()
        self.share = share

    def points(self, features: Tensor) -> Tensor:
        points = super().points(self.centre(features))
        if not self.training or self.share == 1:
            return points
        drawn = torch.rand(points.shape[:2], device=points.device).argsort(1)[:, : int(self.share * points.shape[1])]
        return points.gather(1, drawn[:, :, None].expand(-1, -1, points.shape[2]))


class Plain(nn.Module):
    """Landmarks as one writes them down, for kernels and poolings that the library has no code for."""

    pools = True

    def __init__(self, features: int, classes: int, *, landmarks: int, dropout: float = 0.0, **special: bool) -> None:
        super().__init__()
        self.features, self.special = features, special
        self.weight = nn.Parameter(torch.randn(landmarks, features) * features**-0.5)
        self.raw = nn.Parameter(torch.ones(7, landmarks if special.get("own") else 1))
        wide = landmarks * (2 if special.get("maxima") or special.get("variances") else 1)
        self.norm = nn.BatchNorm1d(wide, affine=False)
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(wide, classes))

    def forward(self, maps: Tensor) -> Tensor:
        positions = as_positions(maps, self.features, "Plain").float()
        t = (F.normalize(positions, dim=2) @ F.normalize(self.weight, dim=1).t()).float()
        values = kernels.horner(t, [torch.zeros_like(self.raw[0]), *F.softplus(self.raw)])
        if self.special.get("lengths"):
            values = values * positions.norm(dim=2, keepdim=True)
        pooled = [values.mean(1)]
        pooled += [values.amax(1)] if self.special.get("maxima") else []
        pooled += [values.var(1)] if self.special.get("variances") else []
        logits: Tensor = self.last(self.norm(torch.cat(pooled, 1)))
        return logits


class TwoLayers(nn.Module):
    """Landmarks whose features are kernel values with others at every position."""

    pools = True

    def __init__(self, features: int, classes: int, *, first: int = 256, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(first, features) * features**-0.5)
        self.raw = nn.Parameter(torch.ones(10))
        self.norm = nn.BatchNorm1d(first)
        self.second = Landmarks(first, classes, **options)

    def forward(self, maps: Tensor) -> Tensor:
        vectors = maps.permute(0, 2, 3, 1)
        values = self.norm(kernel_mean(vectors.flatten(0, 2), self.weight, F.softplus(self.raw)).float())
        logits: Tensor = self.second(values.view(*vectors.shape[:3], -1).permute(0, 3, 1, 2).to(maps.dtype))
        return logits


class Sum(nn.Module):
    """Logits of several heads, on the last map or on that of the stage before it, which a hook puts into `earlier`."""

    pools = True
    earlier: Tensor

    def __init__(self, last: Sequence[nn.Module], before: Sequence[nn.Module]) -> None:
        super().__init__()
        self.last, self.before = nn.ModuleList(last), nn.ModuleList(before)

    def forward(self, maps: Tensor) -> Tensor:
        logits = [head(maps) for head in self.last] + [head(self.earlier) for head in self.before]
        return torch.stack(logits).sum(0)


def make_head(name: str, features: int, classes: int) -> nn.Module:
    """Return the head that the words describe."""
    kind, *words = name.split(", ")
    said = {word.rsplit(" ", 1)[0]: word.rsplit(" ", 1)[1] for word in words if word[-1].isdigit()}
    special = {PLAIN[word]: True for word in words if word in PLAIN}
    known = WORDS.get(kind.split()[-1] + (" as written" if special else ""))
    if known is None:
        raise ValueError(f"unknown kind {kind!r} in {name!r}; choose linear, second-order, Q landmarks or Q channels")
    unknown = [word for word in words if word not in known and word.rsplit(" ", 1)[0] not in known]
    if unknown:
        raise ValueError(f"unknown words {unknown[0]!r} in {name!r}; {kind!r} takes {', '.join(sorted(known))}")
    options: dict[str, Any] = {"dropout": float(said.get("dropout", 0))}
    if kind == "linear":
        return create_head("linear", features, classes)
    if kind == "second-order":
        return SecondOrderVariant(features, classes, **options)
    count = int(kind.split()[0])
    if "windows" in said:
        options["window"] = int(said["windows"])
    if kind.endswith("channels"):
        both = "normalised" in words
        options |= {
            "normalized": both or "positions normalised" in words,
            "standardized": both or "standardised" in words,
        }
        return ExpansionVariant(features, classes, width=count, scale=float(said.get("times", 1)), **options)
    options["landmarks"] = count
    if special:
        return Plain(features, classes, **options, **special)
    options |= {key: number(said[key]) for key, number in (("eps", float), ("degree", int)) if key in said}
    if "polynomial of degree" in said:
        options |= {"kernel": "polynomial", "degree": int(said["polynomial of degree"])}
    options["scale"] = float(said.get("times", 1))
    options["share"] = min((SHARES[word] for word in words if word in SHARES), default=1.0)
    options["centred"] = "centred" in words
    if "two layers" in words:
        return TwoLayers(features, classes, **options)
    head = Landmarks(features, classes, **options)
    beside = []
    if "beside second-order" in words:
        beside.append(SecondOrderVariant(features, classes, dropout=options["dropout"]))
    before = [Landmarks(EARLIER[0], classes, **{**options, "landmarks": EARLIER[1]})] if "two depths" in words else []
    return Sum([head, *beside], before) if beside or before else head


class Written(Head):
    """A head that `make_head` makes of words, as the engine's specs name it."""

    name = "written"

    def __init__(self, in_features: int, num_classes: int, *, words: str = "linear") -> None:
        super().__init__()
        self._configure(in_features, num_classes, words=words)
        self.head = make_head(words, in_features, num_classes)
        self.pool = "auto" if self.head.pools else None

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits


def build_variant(spec: LabSpec, num_classes: int) -> Classifier:
    """Make the network of a spec; a head on two depths sees the second stage as well."""
    model = build(spec, num_classes)
    head: Any = model.head
    if isinstance(head.head, Sum):
        blocks: Any = model.backbone.blocks
        stage_end = blocks[len(blocks) * 2 // 3 - 1]
        stage_end.register_forward_hook(lambda block, given, maps: setattr(head.head, "earlier", maps))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("depth", type=int)
    parser.add_argument("heads", nargs="+", metavar="HEAD @ RATE DECAY")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5, help="epochs of warm-up")
    parser.add_argument("--images", type=int, help="how many of the 40,000 are trained on")
    parser.add_argument("--csv", type=Path, help="the file that a line per head is added to")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = open_data("cifar100", device).train
    kept, held = (images.restricted(part) for part in hold_out(images.labels.cpu().numpy(), HELD_OUT, seed=0))
    if options.images is not None:
        drawn = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))
        kept = kept.restricted(drawn[: options.images])
    VARIANTS["written"] = Written
    member.build = build_variant
    length = {"epochs": options.epochs, "batch_size": BATCH, "warmup_epochs": options.warmup, "head_rate": 1.0}
    specs = []
    for words, rates in (given.split(" @ ") for given in options.heads):
        rate, decay = map(float, rates.split())
        own = {"learning_rate": rate, "weight_decay": decay, "mixup": words.endswith(", mixup")}
        backbone = f"{NETWORKS}cifar_resnet{options.depth}"
        specs.append(LabSpec("cifar100", backbone, "written", {"words": words}, **own, **length))
    rows = []
    for spec, result in zip(specs, train(specs, kept, 100), strict=True):
        found = summary(predict(result.model, held), held.labels.cpu())
        trained = 100 * result.accuracies[-(len(kept) // BATCH) :].mean().item()
        row = [f"ResNet-{options.depth}", options.epochs, spec.head_options["words"]]
        row += [f"{spec.learning_rate:g}", f"{spec.weight_decay:g}"]
        row += [
            f"{found['accuracy']:.2f}",
            f"{found['nll']:.4f}",
            f"{trained:.2f}",
            count_parameters(result.model.head),
        ]
        rows.append(row)
        print(*row, sep="  ", flush=True)
    if options.csv:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS] * new + rows)


if __name__ == "__main__":
    main()
