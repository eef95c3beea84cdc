"""The training loop for images that live on the device: one run, or several at once.

A step (augmentation, forward, backward, update) takes all that changes from step to step, the place in the epoch, the
learning rate and the random numbers, from tensors on the device. On a CPU it is called step by step. On CUDA the steps
of all runs are captured as parallel branches of one graph, and training is replaying it: a small network alone leaves
a modern GPU idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernelhead.backbones import Classifier, create_backbone
from kernelhead.data.resident import ResidentImages
from kernelhead.heads import create_head
from kernelhead.parameters import parameter_groups
from kernelhead.train.schedule import Schedule, epoch_order


@dataclass(frozen=True)
class Run:
    """What may differ between runs that are trained at once."""

    backbone: str
    head: str
    learning_rate: float
    weight_decay: float = 1e-4
    seed: int = 0
    head_options: dict[str, Any] = field(default_factory=dict)
    backbone_options: dict[str, Any] = field(default_factory=dict)

    def create(self, num_classes: int) -> Classifier:
        """The network at its start, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            backbone = create_backbone(self.backbone, **self.backbone_options)
            return Classifier(backbone, create_head(self.head, backbone.num_features, num_classes, **self.head_options))


@dataclass
class Trained:
    """A run's network after training, its loss at every step, and the step at which it diverged, if it did."""

    run: Run
    model: nn.Module
    losses: Tensor
    diverged_at: int | None = None


class _Member:
    """One run in training: everything that its step reads and writes, on the device."""

    def __init__(self, run: Run, data: ResidentImages, num_classes: int, schedule: Schedule, compiled: bool) -> None:
        device = data.labels.device
        self.run, self.data, self.schedule = run, data, schedule
        self.model: nn.Module = run.create(num_classes).to(device).train()
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.call: Callable[[Tensor], Tensor] = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.groups = parameter_groups(self.model, run.weight_decay)
        self.parameters: list[Tensor] = [parameter for group in self.groups for parameter in group["params"]]
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.generator = torch.Generator(device).manual_seed(run.seed)

        self.steps = schedule.steps(len(data))
        self.rates = run.learning_rate * torch.tensor(schedule.factors(len(data)), device=device)
        self.losses = torch.full_like(self.rates, torch.nan)
        self.order = torch.empty(len(data), dtype=torch.long, device=device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.lane = torch.arange(schedule.batch_size, device=device)

    def shuffle(self, epoch: int) -> None:
        """A new order of the samples."""
        self.order.copy_(epoch_order(len(self.data), self.run.seed, epoch))

    def step(self) -> None:
        """One step of SGD with momentum, weight decay where `parameter_groups` puts it."""
        position = self.step_index.remainder(self.steps) * self.schedule.batch_size + self.lane
        images, labels = self.data.augmented(self.order[position], self.generator)
        device = labels.device.type
        if device == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(self.call(images), labels)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_mul_(self.velocity, self.schedule.momentum)
            torch._foreach_add_(self.velocity, gradients)
            first = 0
            for group in self.groups:
                own = slice(first, first := first + len(group["params"]))
                torch._foreach_add_(self.velocity[own], self.parameters[own], alpha=group["weight_decay"])
            change = torch._foreach_mul(self.velocity, self.rates[self.step_index].squeeze())
            torch._foreach_sub_(self.parameters, change)
            self.losses.index_copy_(0, self.step_index, loss.detach().float().view(1))
            self.step_index += 1


def train(
    runs: Sequence[Run],
    data: ResidentImages,
    num_classes: int,
    schedule: Schedule,
    *,
    compiled: bool = False,
    progress: Callable[[int, Sequence[float]], None] | None = None,
) -> list[Trained]:
    """Train several runs at once on the device where `data` lives.

    A run whose loss is not finite stops at the end of that epoch, with the step recorded; the others go on.
    `compiled` uses torch.compile. `progress(epochs done, mean loss of the epoch for each run)` is called each epoch.
    """
    steps = schedule.steps(len(data))
    members = [_Member(run, data, num_classes, schedule, compiled) for run in runs]
    results = [Trained(member.run, member.model, member.losses) for member in members]
    graph: torch.cuda.CUDAGraph | None = None

    for epoch in range(schedule.epochs):
        alive = [m for m, result in zip(members, results, strict=True) if result.diverged_at is None]
        if not alive:
            break
        for member in alive:
            member.shuffle(epoch)
        if data.labels.is_cuda and graph is None:
            graph = _capture(alive)
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                for member in alive:
                    member.step()
        means = []
        for member, result in zip(members, results, strict=True):
            losses = member.losses[epoch * steps : (epoch + 1) * steps]
            means.append(losses.mean().item())
            if member in alive and not torch.isfinite(losses).all():
                result.diverged_at = epoch * steps + int((~torch.isfinite(losses)).nonzero()[0])
                graph = None  # captured anew, without this run
        if progress is not None:
            progress(epoch + 1, means)
    return results


def _capture(members: Sequence[_Member]) -> torch.cuda.CUDAGraph:
    """One step of every member as parallel branches of a CUDA graph. Nothing is trained by capturing."""
    tensors = [
        tensor
        for member in members
        for tensor in (*member.model.state_dict().values(), *member.velocity, member.losses, member.step_index)
    ]
    kept = [tensor.clone() for tensor in tensors]
    states = [member.generator.get_state() for member in members]
    streams = [torch.cuda.Stream() for _ in members]  # type: ignore[no-untyped-call]

    def fork_and_join() -> None:
        main = torch.cuda.current_stream()
        for member, stream in zip(members, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                member.step()
        for stream in streams:
            main.wait_stream(stream)

    for _ in range(3):  # libraries choose their algorithms, torch.compile compiles
        fork_and_join()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for member in members:
        graph.register_generator_state(member.generator)
    with torch.cuda.graph(graph):
        fork_and_join()
    torch.cuda.synchronize()
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)
    for member, state in zip(members, states, strict=True):
        member.generator.set_state(state)
    return graph


def predict(model: nn.Module, data: ResidentImages, *, batch_size: int = 1000) -> Tensor:
    """Logits (n, C) of a network in evaluation mode, float32, on the CPU."""
    device = data.labels.device
    model.eval()
    logits = []
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        for index in torch.split(torch.arange(len(data), device=device), batch_size):
            logits.append(model(data.plain(index)[0]).float().cpu())
    return torch.cat(logits)
