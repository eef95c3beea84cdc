"""Search the settings of a training with Optuna, on held-out images.

    python examples/tune_with_optuna.py IMAGES OUT [BACKBONE [TRIALS [EPOCHS]]]

IMAGES is a folder of class folders. Successive halving ends trials that fall behind. The same command goes on after an
interruption, and the trial that was interrupted continues from its checkpoint. OUT gets trials.csv and trials.png. The
test images decide nothing: train with the best settings and look at the result once.

Needs pip install 'kernelhead[plot,ray,vision]'.
"""

import sys
from pathlib import Path
from typing import Any

import optuna
from matplotlib.figure import Figure

from kernelhead.finetune import TrainSpec, train

LOGARITHMIC = {"learning_rate": (1e-3, 0.3), "head_rate": (0.1, 10), "weight_decay": (1e-5, 1e-3)}


def main(images: str, out: str, backbone: str = "torchvision/resnet18", trials: int = 20, epochs: int = 10) -> None:
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def objective(trial: optuna.Trial) -> float:
        own: dict[str, Any] = {name: trial.suggest_float(name, *ends, log=True) for name, ends in LOGARITHMIC.items()}
        own["augment"] = trial.suggest_categorical("augment", ["auto", "randaugment", "none"])
        options = {"landmarks": trial.suggest_categorical("landmarks", [128, 512, 2048])}
        own |= {"epochs": int(epochs), "val": 0.2, "report": False, "checkpoint_seconds": 10.0}
        spec = TrainSpec(images, backbone, "landmarks", options, **own)

        def report(now: dict[str, Any]) -> None:
            trial.report(now["val_accuracy"], now["epoch"])
            if trial.should_prune():
                raise optuna.TrialPruned

        name = "-".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in trial.params.values())
        return train(spec, report=report, checkpoint=folder / name).curve["val_accuracy"][-1] or 0.0

    halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=2)
    storage = f"sqlite:///{folder / 'study.db'}"
    study = optuna.create_study(
        storage=storage, study_name="search", load_if_exists=True, direction="maximize", pruner=halving
    )
    for cut in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(cut.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(cut.params)
    done = study.get_trials(states=[optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED])
    study.optimize(objective, n_trials=max(0, int(trials) - len(done)))

    table = study.trials_dataframe(attrs=("number", "value", "params", "state")).sort_values("value", ascending=False)
    table.to_csv(folder / "trials.csv", index=False)
    print(table.to_string(index=False))
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for panel, (name, ends) in zip(figure.subplots(1, 3, sharey=True), LOGARITHMIC.items(), strict=True):
        panel.scatter(table[f"params_{name}"], table["value"])
        panel.set(xscale="log", xlim=ends, xlabel=name)
    figure.supylabel("accuracy on held-out images, %")
    figure.savefig(folder / "trials.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
