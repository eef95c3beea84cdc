"""What heads give on feature maps that do not learn with them: a ResNet-50 of ImageNet, Oxford-IIIT Pets.

    python lab/benchmarks/frozen.py --weights resnet50-v1.safetensors [--points 256] [--rectified]
        [--json lab/results/bench/frozen.json]

The maps of all images, centre crops, are computed once: before the last ReLU, or behind it. Each head is trained on
four fifths of the training images at each rate and tested on the rest. At its best rate it is then trained on all of
them with three seeds, and tested on the test images. Training is SGD with momentum, batch 64, a weight decay of 1e-4,
and `--epochs` with one of warm-up and cosine decay.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.files import environment, write_bytes
from kernelhead.finetune.results import FORMAT
from kernelhead.finetune.schedule import epoch_order
from kernelhead.heads import Head, create_head
from kernelhead.metrics import summary
from kernelhead.optim import parameter_groups
from kernelhead_lab.data.images import Images, hold_out
from kernelhead_lab.data.open import open_data
from kernelhead_lab.engine.schedule import rate_factors, steps_per_epoch
from kernelhead_lab.networks import Backbone, count_parameters, create_backbone
from kernelhead_lab.spec import LabSpec

NETWORK, BATCH, DECAY, HELD_OUT, SEEDS = "torchvision/resnet50", 64, 1e-4, 0.2, 3
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "the paper's layer": ("kernel", {}),
    "expansion": ("expansion", {}),
    "landmarks": ("landmarks", {}),
    "landmarks, pooled feature": ("landmarks", {"pool": None}),
}


def make(name: str, features: int, classes: int, points: int) -> Head:
    head, options = HEADS[name]
    options = {**options, **{"expansion": {"width": points}, "landmarks": {"landmarks": points}}.get(head, {})}
    return create_head(head, features, classes, **options)


@torch.no_grad()
def maps_of(images: Images, network: Backbone) -> Tensor:
    """Return maps (n, D, h, w) in half precision: they are read many times."""
    wanted = torch.split(torch.arange(len(images)), 32)
    return torch.cat([network.feature_map(batch).half() for batch, _ in images.batches((i, None) for i in wanted)])


def logits_of(head: Head, maps: Tensor) -> Tensor:
    """Return the logits of a head that pools by itself, or of the mean over positions."""
    maps = maps.float()
    logits: Tensor = head(maps if head.pools else maps.mean((2, 3)))
    return logits


def trained(name: str, maps: Tensor, labels: Tensor, classes: int, rate: float, seed: int, options: Any) -> Head:
    torch.manual_seed(seed)
    head = make(name, maps.shape[1], classes, options.points).to(maps.device).train()
    steps = steps_per_epoch(len(maps), BATCH)
    factors = iter(rate_factors(steps, options.epochs, warmup_epochs=1))
    optimizer = torch.optim.SGD(parameter_groups(head, DECAY), lr=rate, momentum=0.9)
    for epoch in range(options.epochs):
        order = epoch_order(len(maps), seed, epoch).to(maps.device)
        for batch in order.split(BATCH)[:steps]:
            factor = next(factors)
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad()
            F.cross_entropy(logits_of(head, maps[batch]), labels[batch]).backward()
            optimizer.step()
    return head.eval()


@torch.no_grad()
def tested(head: Head, maps: Tensor, labels: Tensor) -> dict[str, Any]:
    return summary(torch.cat([logits_of(head, batch) for batch in maps.split(256)]).cpu(), labels.cpu())


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    titles = ["head", "rate", "held-out accuracy, %", "test accuracy, %", "NLL", "head's parameters"]
    lines = [titles, ["---", *["--:"] * (len(titles) - 1)]]
    for name, row in rows.items():
        runs = row["test"]
        mean, deviation = (f([run["accuracy"] for run in runs]) for f in (statistics.mean, statistics.stdev))
        nll = statistics.mean(run["nll"] for run in runs)
        held = row["held_out"][str(row["rate"])]
        figures = [f"{row['rate']:g}", f"{held:.1f}", f"{mean:.1f} ± {deviation:.1f}", f"{nll:.2f}"]
        lines.append([name, *figures, f"{row['parameters']:,}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="local safetensors file of a ResNet-50")
    parser.add_argument("--data", default="pets")
    parser.add_argument("--rectified", action="store_true", help="maps behind the last ReLU")
    parser.add_argument("--points", type=int, default=256, help="landmarks, and channels of the expansion")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS), metavar="HEAD")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened = open_data(options.data, device)
    spec = LabSpec(options.data, NETWORK, rectified=options.rectified, weights=options.weights)
    network = create_backbone(spec).to(device).eval()
    maps, test_maps = (maps_of(images, network) for images in (opened.train, opened.test))
    labels, test_labels, classes = opened.train.labels, opened.test.labels, len(opened.classes)
    kept, held = (index.to(device) for index in hold_out(labels.cpu().numpy(), HELD_OUT, seed=0))
    rows: dict[str, dict[str, Any]] = {}
    for name in options.heads:
        found: dict[str, float] = {}
        for rate in RATES:
            head = trained(name, maps[kept], labels[kept], classes, rate, 0, options)
            found[str(rate)] = tested(head, maps[held], labels[held])["accuracy"]
        best = max(RATES, key=lambda rate: found[str(rate)])
        heads = [trained(name, maps, labels, classes, best, seed, options) for seed in range(SEEDS)]
        rows[name] = {
            "rate": best,
            "held_out": found,
            "test": [tested(head, test_maps, test_labels) for head in heads],
            "parameters": count_parameters(heads[0]),
        }
        print(markdown(rows).splitlines()[-1], flush=True)
        if options.json:
            asked = {name: getattr(options, name) for name in ("data", "rectified", "points", "epochs")}
            found_here = {"left_out": len(opened.left_out), "rows": rows, **environment()}
            made = {"format": FORMAT, "benchmark": "frozen", **asked, **found_here}
            write_bytes(options.json, (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
