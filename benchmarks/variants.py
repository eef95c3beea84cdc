"""Which head is best: many of them for a short time, those that are not in the library too.

    python benchmarks/variants.py 20 "2048 landmarks, dropout 0.5 @ 0.1 1e-3" "second-order @ 0.3 5e-4"
        [--epochs 100] [--warmup 5] [--images 40000] [--csv results/variants.csv]

Trains a CIFAR ResNet of that depth with each head, all at once, at the learning rate and weight decay behind the @, on
40,000 of CIFAR-100's training images, and tests on the other 10,000: no test image is looked at. One seed, so that
differences of less than a point say little. A head is a kind and what is special about it:

    softmax, second-order, Q landmarks (softplus, pooled in the RKHS), Q channels (the expansion)
    dropout P; label smoothing; mixup
    windows W; eps E; degree M; polynomial of degree M           of landmarks, as options of `KernelClassifier`
    places normalised; standardised; normalised                  of channels: places of unit length; means; both
    times S                      standardised values times S: another learning rate for the last layer
    centred                      features less their mean over the batch
    half of the places           in training, drawn anew for every image; or: quarter of the places
    two depths                   512 landmarks, otherwise alike, on the map of the second stage too
    beside second-order          its logits are added
    two layers                   kernel values with 256 landmarks at every place, standardised, are the features
    own coefficients             of each landmark
    times lengths                kernel values times the length of the features
    and maxima, and variances    over places, beside the means
"""

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead import KernelClassifier, create_head, kernels
from kernelhead.backbones import Classifier, count_parameters, create_backbone, expected_input
from kernelhead.data.folder import hold_out
from kernelhead.data.open import open_data
from kernelhead.heads import ExpansionHead, SecondOrderHead
from kernelhead.heads._places import as_places
from kernelhead.metrics import summary
from kernelhead.ops.kernel_mean import kernel_mean
from kernelhead.train.loop import Run, predict, train
from kernelhead.train.schedule import Schedule

HELD_OUT = 0.2
EARLIER = 32, 512  # features of the second stage, and landmarks there
PLACES = {"half of the places": 0.5, "quarter of the places": 0.25}
PLAIN = {"own coefficients": "own", "times lengths": "lengths", "and maxima": "maxima", "and variances": "variances"}
CHANNELS = {"dropout", "windows", "times", "normalised", "places normalised", "standardised", "mixup"}
LANDMARKS = {"dropout", "windows", "times", "eps", "degree", "polynomial of degree", "mixup", "label smoothing"}
LANDMARKS |= {"centred", "two depths", "beside second-order", "two layers", *PLACES}
WORDS = {
    "softmax": {"mixup"},
    "second-order": {"mixup", "dropout"},
    "channels": CHANNELS,
    "landmarks": LANDMARKS,
    "landmarks as written": {"mixup", "dropout", *PLAIN},
}
COLUMNS = ["network", "epochs", "head", "rate", "decay", "accuracy", "nll", "training_accuracy", "head_parameters"]


class Landmarks(KernelClassifier):
    """Landmarks that are given other features, or other labels."""

    def __init__(
        self,
        *sizes: int,
        centred: bool = False,
        share: float = 1.0,
        smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(*sizes, coefficients="softplus", pool="rkhs", **options)
        self.centre = nn.BatchNorm2d(sizes[0], affine=False) if centred else nn.Identity()
        self.share, self.smoothing = share, smoothing

    def points(self, features: Tensor) -> Tensor:
        points = super().points(self.centre(features))
        if not self.training or self.share == 1:
            return points
        drawn = torch.rand(points.shape[:2], device=points.device).argsort(1)[:, : int(self.share * points.shape[1])]
        return points.gather(1, drawn[:, :, None].expand(-1, -1, points.shape[2]))

    def loss_and_hits(self, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if not self.smoothing:
            return super().loss_and_hits(features, target)
        logits = self(features)
        hits = logits.detach().argmax(1) == target
        return F.cross_entropy(logits, target, label_smoothing=self.smoothing), hits


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
        places = as_places(maps, self.features, "Plain").float()
        t = (F.normalize(places, dim=2) @ F.normalize(self.weight, dim=1).t()).float()
        values = kernels.horner(t, [torch.zeros_like(self.raw[0]), *F.softplus(self.raw)])
        if self.special.get("lengths"):
            values = values * places.norm(dim=2, keepdim=True)
        pooled = [values.mean(1)]
        pooled += [values.amax(1)] if self.special.get("maxima") else []
        pooled += [values.var(1)] if self.special.get("variances") else []
        logits: Tensor = self.last(self.norm(torch.cat(pooled, 1)))
        return logits


class TwoLayers(nn.Module):
    """Landmarks whose features are kernel values with others at every place."""

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
    """The head that the words say."""
    kind, *words = name.split(", ")
    said = {word.rsplit(" ", 1)[0]: word.rsplit(" ", 1)[1] for word in words if word[-1].isdigit()}
    special = {PLAIN[word]: True for word in words if word in PLAIN}
    known = WORDS.get(kind.split()[-1] + (" as written" if special else ""))
    if known is None:
        raise ValueError(f"{name!r}: {kind!r} is no head; choose softmax, second-order, Q landmarks or Q channels")
    unknown = [word for word in words if word not in known and word.rsplit(" ", 1)[0] not in known]
    if unknown:
        raise ValueError(f"{name!r}: {unknown[0]!r} is not known, or not with the others")
    options: dict[str, Any] = {"dropout": float(said.get("dropout", 0))}
    if kind == "softmax":
        return create_head("softmax", features, classes)
    if kind == "second-order":
        return SecondOrderHead(features, classes, **options)
    count = int(kind.split()[0])
    if "windows" in said:
        options["window"] = int(said["windows"])
    if kind.endswith("channels"):
        both = "normalised" in words
        options |= {"normalized": both or "places normalised" in words, "standardized": both or "standardised" in words}
        return ExpansionHead(features, classes, width=count, scale=float(said.get("times", 1)), **options)
    options["landmarks"] = count
    if special:
        return Plain(features, classes, **options, **special)
    options |= {key: number(said[key]) for key, number in (("eps", float), ("degree", int)) if key in said}
    if "polynomial of degree" in said:
        options |= {"kernel": "polynomial", "degree": int(said["polynomial of degree"])}
    options["scale"] = float(said.get("times", 1))
    options["share"] = min((PLACES[word] for word in words if word in PLACES), default=1.0)
    options |= {"centred": "centred" in words, "smoothing": 0.1 if "label smoothing" in words else 0.0}
    if "two layers" in words:
        return TwoLayers(features, classes, **options)
    head = Landmarks(features, classes, **options)
    beside = [SecondOrderHead(features, classes, dropout=options["dropout"])] if "beside second-order" in words else []
    before = [Landmarks(EARLIER[0], classes, **{**options, "landmarks": EARLIER[1]})] if "two depths" in words else []
    return Sum([head, *beside], before) if beside or before else head


@dataclass(frozen=True)
class Variant(Run):
    """A run whose head is made by `make_head`."""

    def create(self, num_classes: int) -> Classifier:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            backbone: Any = create_backbone(self.backbone)
            head = make_head(self.head, backbone.num_features, num_classes)
        if isinstance(head, Sum):
            stage_end = backbone.blocks[len(backbone.blocks) * 2 // 3 - 1]
            stage_end.register_forward_hook(lambda block, given, maps: setattr(head, "earlier", maps))
        return Classifier(backbone, head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("depth", type=int)
    parser.add_argument("heads", nargs="+", metavar="HEAD @ RATE DECAY")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5, help="epochs of it")
    parser.add_argument("--images", type=int, help="drawn of the 40,000 that it trains on")
    parser.add_argument("--csv", type=Path, help="where a line is added for each")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = open_data("cifar100", expected_input("resnet50"), device).train
    kept, held = (images.restricted(part) for part in hold_out(images.labels.cpu().numpy(), HELD_OUT, seed=0))
    if options.images is not None:
        drawn = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))
        kept = kept.restricted(drawn[: options.images])
    runs = []
    for head, rates in (words.split(" @ ") for words in options.heads):
        rate, decay = map(float, rates.split())
        runs.append(Variant(f"cifar_resnet{options.depth}", head, rate, decay, mixup=head.endswith(", mixup")))
    schedule = Schedule(options.epochs, warmup_epochs=options.warmup)
    rows = []
    for result in train(runs, kept, 100, schedule):
        run, found = result.run, summary(predict(result.model, held), held.labels.cpu())
        trained = 100 * result.accuracies[-schedule.steps(len(kept)) :].mean().item()
        row = [f"ResNet-{options.depth}", options.epochs, run.head, f"{run.learning_rate:g}", f"{run.weight_decay:g}"]
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
