"""Convert result files of format 1 to format 2: `python lab/tools/convert_format1.py OLD NEW`.

Every option becomes explicit: format 1 leaves out the defaults of its time, which `format1.py` knows. Figures are
copied as they are. Folders are named by `LabSpec.key`. The map of old to new keys goes to NEW/keys.json.

The files of format 1 are in the history. What this script makes of them is lab/results, to the byte:

    git archive 7f03e76 results | tar x -C /tmp
    python lab/tools/convert_format1.py /tmp/results /tmp/converted
    diff -r /tmp/converted lab/results
"""

import csv
import dataclasses
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from format1 import renamed

from kernelhead.finetune.results import save_result
from kernelhead.finetune.spec import TrainResult, TrainSpec
from kernelhead_lab.spec import NETWORKS, LabSpec, Subset

OLD, NEW = Path(sys.argv[1]), Path(sys.argv[2])
SIZES = {"cifar10": 32, "cifar100": 32, "pets": 224, "cars": 224}
STRATEGIES = {"random": "random", "margin": "margin", "kcenter": "k-center"}
ENVIRONMENT = ("version", "libraries", "hardware")
FIGURES = ("images", "parameters", "seconds", "curve", "diverged_at", "accuracy", "top5", "nll", "ece", "alpha")
SAID = {"format", "experiment", "method", "protocol", "seed", "config", "at_once", "selection", *ENVIRONMENT, *FIGURES}
SYNTHETIC: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "kernel": ("kernel", {}),
    "prototypes5": ("kernel", {"prototypes": 5}),
    "landmarks20": ("kernel", {"landmarks": 20}),
}
BENCH_HEADS = {"softmax": "linear", "linear": "cosine"}
BENCH = ("cost.json", "cost_4096.json", "cost_depths.json", "cost_sizes.json", "frozen.json", "frozen_rectified.json")


def common(config: dict[str, Any], data: str, hardware: dict[str, Any]) -> dict[str, Any]:
    """Settings that all specs have, from the configuration of a file."""
    head, options = renamed(config["head"], config["head_options"])
    own = config["backbone"].startswith(("cifar_", "lenet"))
    return {
        "data": data,
        "backbone": (NETWORKS if own else "torchvision/") + config["backbone"],
        "head": head,
        "head_options": options,
        "augment": "light" if own else "he",
        "image_size": SIZES[data],
        "mixup": config.get("mixup", False),
        "head_rate": config.get("head_rate", 1.0),
        "amp": "bfloat16" if hardware["gpu"] else "none",
        **{name: config[name] for name in ("epochs", "batch_size", "learning_rate", "weight_decay", "warmup_epochs")},
        "seed": config["seed"],
    }


@cache
def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["format"] == 1, path
    return found


@cache
def spec_of(path: Path) -> LabSpec:
    """The spec of a file of an experiment on images."""
    old = read(path)
    config, data = dict(old["config"]), old["experiment"]
    settings = common(config, data, old["hardware"])
    options = dict(config["backbone_options"])
    weights = options.pop("weights", None)
    settings["rectified"] = options.pop("rectified", False)
    settings["pretrained"] = bool(options.pop("pretrained", False)) and weights is None
    settings["weights"] = weights and weights["file"]
    if config["teacher"] is not None:
        settings["teacher"] = spec_of((OLD / config["teacher"]).with_suffix(".json"))
    subset = re.search(r"-(random|margin|kcenter)(\d+)$", old["method"])
    if subset:
        settings["subset"] = Subset(STRATEGIES[subset[1]], int(subset[2]))
        if path.parent.name != old["method"]:
            network, seed = old["method"].partition("-")[0], old["seed"]
            (seed_model,) = path.parents[1].glob(f"{network}-softmax-random10/*-seed{seed}.json")
            settings["seed_model"] = spec_of(seed_model)
    return LabSpec(**settings, backbone_options=options, temperature=config["temperature"])


def extra_of(old: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in old.items() if name not in SAID}
    weights = old["config"].get("backbone_options", {}).get("weights")
    more = {"weights": weights} if weights else {}
    more |= {"selection": old["selection"]} if "selection" in old else {}
    return {"environment": {name: old[name] for name in ENVIRONMENT}, **kept, **more}


def result_of(old: dict[str, Any], spec: TrainSpec, **more: Any) -> TrainResult:
    figures = {name: old[name] for name in FIGURES if name in old}
    empty = {"curve": {"loss": [], "accuracy": []}, "parameters": {"backbone": 0, "head": 0}}
    at_once, choosing = old.get("at_once", 1), old["config"].get("choosing", False)
    return TrainResult(**{**empty, **figures, "spec": spec, "at_once": at_once, "choosing": choosing, **more})


def images(keys: dict[str, str]) -> int:
    """Convert the experiments on images; `keys` is given the new folder of each old one."""
    paths = sorted(path for data in SIZES for path in (OLD / data).glob("*-epochs/*/*.json"))
    for path in paths:
        old, spec = read(path), spec_of(path)
        assert path.parent.name.startswith(old["method"])
        folder = spec.key + path.parent.name.removeprefix(old["method"])
        assert keys.setdefault(path.parent.name, folder) == folder
        target = NEW / path.parents[1].relative_to(OLD) / folder / path.name
        save_result(target, result_of(old, spec, extra=extra_of(old)))
    assert len(set(keys.values())) == len(keys)
    return len(paths)


def synthetic() -> int:
    """Convert the experiment on the sphere."""
    paths = sorted((OLD / "synthetic").glob("*/*/*.json"))
    for path in paths:
        old = read(path)
        config, protocol, method = old["config"], old["protocol"], old["method"]
        plain = {"pretrained": False, "augment": "none", "mixup": False, "amp": "none", "seed": old["seed"]}
        extra = {**extra_of(old), "protocol": protocol, "per_class": config["per_class"]}
        if method == "bayes":
            spec = LabSpec("synthetic", "identity", "bayes", {}, **plain)
            epochs = 0
        else:
            head, own = SYNTHETIC[method]
            if head == "kernel":
                own = {**own, "coefficients": "relu" if protocol == "paper" else "softplus"}
                assert all(f"{name}={value!r}" in config["head"] for name, value in own.items()), path
            else:
                assert config["head"].startswith("SoftmaxHead("), path
            name, options = renamed(head, own)
            epochs = config["epochs"]
            told = ("epochs", "batch_size", "learning_rate", "weight_decay", "momentum", "warmup_epochs")
            spec = LabSpec(
                "synthetic",
                "identity",
                name,
                options,
                **{**plain, **{each: config[each] for each in told}},
                head_rate=1.0,
            )
            extra["start"] = config["start"]
        counts = {"train": 2 * config["per_class"] * bool(epochs), "test": 2 * config["per_class"], "left_out": 0}
        new = "linear" if method == "softmax" else method
        target = NEW / path.relative_to(OLD).with_name(path.name.replace(method, new, 1))
        save_result(target, result_of(old, spec, images=counts, extra=extra))
    return len(paths)


def train() -> int:
    """Convert the runs of the command `train`."""
    paths = sorted((OLD / "train").glob("*/result.json"))
    for path in paths:
        old = read(path)
        config = old["config"]
        settings = common(config, config["data"], old["hardware"])
        machine = ("compile", "device", "workers", "evaluate_every", "checkpoint_seconds", "tensorboard")
        spec = TrainSpec(**settings, rectified=config["rectified"], pretrained=config["pretrained"])
        assert config["kervolution"] is None
        assert config["weights"] is None
        assert (config["momentum"], config["holdout"]) == (spec.momentum, spec.test)
        name = path.parent.name.removesuffix(old["method"]) + spec.head
        records = [json.loads(line) for line in path.with_name("metrics.jsonl").read_text().splitlines()]
        curve = {key: [float(f"{each[key]:.4g}") for each in records] for key in ("loss", "accuracy")}
        save_result(NEW / "train" / name / path.name, result_of(old, spec, curve=curve, extra=extra_of(old)))
        complete = dataclasses.replace(spec, **{each: config[each] for each in machine})
        (NEW / "train" / name / "config.yaml").write_text(yaml.safe_dump(complete.as_dict(), sort_keys=False))
        shutil.copy(path.with_name("metrics.jsonl"), NEW / "train" / name)
    return len(paths)


def bench() -> int:
    """Rename heads in figures of benchmarks and in the CSV files. `linear` there is nn.Linear, except of students."""
    paths = sorted((OLD / "bench").iterdir())
    for path in paths:
        target = NEW / "bench" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".json":
            shutil.copy(path, target)
            continue
        found = json.loads(path.read_text())
        if path.name in BENCH:
            found["rows"] = {_last_word(name): row for name, row in found["rows"].items()}
        elif path.name == "students.json":
            rows = ((*name.partition(","), row) for name, row in found["rows"].items())
            found["rows"] = {BENCH_HEADS.get(head, head) + comma + rest: row for head, comma, rest, row in rows}
        elif path.name == "pool.json":
            for row in found["vectors"]:
                row["us"] = {BENCH_HEADS.get(name, name): time for name, time in row["us"].items()}
        target.write_text(json.dumps({"format": 2, **found}, indent=1) + "\n")
    for path in sorted(OLD.glob("*.csv")):
        with path.open(newline="") as source, (NEW / path.name).open("w", newline="") as file:
            reader = csv.DictReader(source)
            writer = csv.DictWriter(file, reader.fieldnames or [], lineterminator="\n")
            writer.writeheader()
            for line in reader:
                head = re.sub(r"\bplaces\b", "positions", line["head"])
                writer.writerow({**line, "head": "linear" if head == "softmax" else head})
    return len(paths)


def _last_word(name: str) -> str:
    before, comma, last = name.rpartition(", ") if name.startswith("ResNet-") else ("", "", name)
    return before + comma + ("linear" if last == "softmax" else last.replace("over places", "over positions"))


if __name__ == "__main__":
    keys: dict[str, str] = {}
    counts = {"images": images(keys), "synthetic": synthetic(), "train": train(), "bench": bench()}
    (NEW / "keys.json").write_text(json.dumps(keys, indent=1, sort_keys=True) + "\n")
    print(counts)
