"""Kernelized networks on two processes: DDP, FSDP2, Lightning and Accelerate equal one process with every head.

One launch of torchrun does all of it, in float64 on CPUs with gloo.
"""

import copy
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

from kernelhead import HEADS, kernelize
from kernelhead.finetune.distributed import join_world, synchronize_batch_norm

PROCESSES, BATCH, STEPS, CLASSES = 2, 8, 6, 4
CPU = torch.device("cpu")
OPTIONS = {"landmarks": {"landmarks": 6}, "expansion": {"width": 6}, "attentive": {"queries": 2}}
KINDS = ("ddp", "fsdp2", "lightning", "accelerate")


def network(head):
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(6, 5)).double()
    return kernelize(model, CLASSES, head=head, **OPTIONS.get(head, {}))


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 3, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (STEPS * BATCH,), generator=generator)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model, optimizer, steps, backward=torch.Tensor.backward):
    for x, y in steps:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()


def own_steps(rank):
    """The part of a process in each batch."""
    x, y = (each.unflatten(0, (STEPS, PROCESSES, -1))[:, rank] for each in batches())
    return zip(x, y, strict=True)


def ddp(model, rank):
    train(nn.parallel.DistributedDataParallel(model), optimizer_of(model), own_steps(rank))
    return model.state_dict()


def fsdp2(model, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    fully_shard(model[-1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, optimizer_of(model), own_steps(rank))
    state = model.state_dict()
    assert all(isinstance(state[name], DTensor) for name, _ in model.named_parameters())
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def lightning(model, rank):
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = model

        def training_step(self, pair, index):
            return F.cross_entropy(self.network(pair[0]), pair[1])

        def configure_optimizers(self):
            return optimizer_of(self)

    order = torch.utils.data.TensorDataset(*batches())
    sampler = [step * BATCH + rank * BATCH // PROCESSES + n for step in range(STEPS) for n in range(BATCH // PROCESSES)]
    loader = torch.utils.data.DataLoader(order, BATCH // PROCESSES, sampler=sampler)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=PROCESSES, strategy="ddp", use_distributed_sampler=False,
        enable_checkpointing=False, precision="64-true", **quiet,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    return model.state_dict()


def accelerate(model, rank):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == PROCESSES
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(model, optimizer, own_steps(rank), accelerator.backward)
    return accelerator.unwrap_model(model).state_dict()


def process():
    rank = join_world(CPU).rank
    for head in HEADS:
        expected = network(head)
        x, y = (each.unflatten(0, (STEPS, BATCH)) for each in batches())
        train(expected, optimizer_of(expected), zip(x, y, strict=True))
        assert not torch.equal(expected[0].weight, network(head)[0].weight)
        for kind in KINDS:
            model = copy.deepcopy(network(head))
            synchronize_batch_norm(model, CPU)
            found = globals()[kind](model, rank)
            for name, tensor in expected.state_dict().items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=f"{kind}, {head}: {name}")
        if rank == 0:
            print(f"{head} is equal")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one_under_trainers_of_others(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(PROCESSES), __file__]
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{head} is equal" for head in HEADS]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # those of trainers
    process()
