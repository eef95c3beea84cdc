"""Search the settings of a training with Ray Tune, on held-out images.

    python examples/tune_with_ray.py IMAGES OUT [BACKBONE [TRIALS [EPOCHS]]]

IMAGES is a folder of class folders. ASHA ends trials that fall behind. The same command goes on after an interruption:
finished trials stay, and the others continue from their checkpoints. OUT gets trials.csv and trials.png. The test
images decide nothing: train with the best settings and look at the result once.

Needs pip install 'kernelhead[plot,ray,vision]'.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from ray import tune

from kernelhead.finetune import TrainSpec, train

LOGARITHMIC = {"learning_rate": (1e-3, 0.3), "head_rate": (0.1, 10), "weight_decay": (1e-5, 1e-3)}
SPACE = {
    **{name: tune.loguniform(*ends) for name, ends in LOGARITHMIC.items()},
    "landmarks": tune.choice([128, 512, 2048]),
    "augment": tune.choice(["auto", "randaugment", "none"]),
}


def trial(settings: dict[str, Any], images: str, out: Path, backbone: str, epochs: int) -> None:
    own = {name: value for name, value in settings.items() if name != "landmarks"}
    options = {"landmarks": settings["landmarks"]}
    own |= {"epochs": epochs, "val": 0.2, "report": False, "checkpoint_seconds": 10.0}
    spec = TrainSpec(images, backbone, "landmarks", options, **own)
    train(spec, report=tune.report, checkpoint=out / tune.get_context().get_trial_id())


def main(images: str, out: str, backbone: str = "torchvision/resnet18", trials: int = 20, epochs: int = 10) -> None:
    folder = Path(out).resolve()
    fixed = tune.with_parameters(
        trial, images=str(Path(images).resolve()), out=folder, backbone=backbone, epochs=int(epochs)
    )
    runs = tune.with_resources(fixed, {"cpu": 1, "gpu": int(torch.cuda.is_available())})
    asha = tune.schedulers.ASHAScheduler(time_attr="epoch", max_t=int(epochs), grace_period=2)
    search = tune.TuneConfig(
        metric="val_accuracy", mode="max", scheduler=asha, num_samples=int(trials), reuse_actors=True
    )
    kept = str(folder / "search")
    if tune.Tuner.can_restore(kept):
        tuner = tune.Tuner.restore(kept, runs, resume_unfinished=True, restart_errored=True)
    else:
        place = tune.RunConfig(name="search", storage_path=str(folder), verbose=0)
        tuner = tune.Tuner(runs, param_space=SPACE, tune_config=search, run_config=place)
    found = tuner.fit().get_dataframe()

    columns = [f"config/{name}" for name in SPACE]
    table = found.sort_values("val_accuracy", ascending=False)[["trial_id", *columns, "epoch", "val_accuracy"]]
    table.to_csv(folder / "trials.csv", index=False)
    print(table.to_string(index=False))
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for panel, (name, ends) in zip(figure.subplots(1, 3, sharey=True), LOGARITHMIC.items(), strict=True):
        panel.scatter(table[f"config/{name}"], table["val_accuracy"], c=table["epoch"])
        panel.set(xscale="log", xlim=ends, xlabel=name)
    figure.supylabel("accuracy on held-out images, %")
    figure.savefig(folder / "trials.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
