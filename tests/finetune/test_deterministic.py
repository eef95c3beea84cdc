"""Trainings with `--deterministic` on a CPU. What it changes on a GPU shows there alone."""

import torch

from kernelhead.finetune.checkpoint import load_checkpoint
from kernelhead.finetune.data import open_data
from kernelhead.finetune.settings import resolved
from kernelhead.finetune.spec import TrainSpec
from kernelhead.finetune.trainer import train


def test_a_training_repeats_itself_and_is_the_usual_one_on_a_cpu(colours, tmp_path):
    given = {"backbone": "tiny_networks:dropped", "head_options": {"landmarks": 16}, "epochs": 2, "batch_size": 16}
    found = []
    for name, wanted in (("usual", False), ("first", True), ("second", True)):
        spec = resolved(TrainSpec(str(colours / "images"), **given, report=False, deterministic=wanted))
        train(spec, open_data(spec, torch.device("cpu")), tmp_path / name)
        assert not torch.are_deterministic_algorithms_enabled()
        found.append(load_checkpoint(tmp_path / name / "model.safetensors")[0])
    for other in found[1:]:
        assert all(torch.equal(other[part], tensor) for part, tensor in found[0].items())
