"""One run in training: everything that its step reads and writes, on the device."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernelhead.backbones import Classifier
from kernelhead.data.resident import ResidentImages
from kernelhead.heads import loss_and_hits
from kernelhead.losses import distillation_loss, mixup_cross_entropy
from kernelhead.parameters import parameter_groups
from kernelhead.train.distributed import World, synchronize_batch_norm
from kernelhead.train.run import Run
from kernelhead.train.saved import load_classifier
from kernelhead.train.schedule import Schedule, epoch_noise, epoch_order, mix

if TYPE_CHECKING:
    from kernelhead.data.images import Batch, Images

P = ParamSpec("P")
R = TypeVar("R")


class Member:
    """A network, its optimiser and its place in the data.

    A step (augmentation, forward, backward, update) takes all that changes from step to step, the place in the epoch,
    the learning rate and the random numbers, from tensors on the device, so that it can be captured as a CUDA graph.
    Images that are not on the device come through `feed`, which is called before each step.
    """

    def __init__(
        self, run: Run, data: "Images", num_classes: int, schedule: Schedule, *, compiled: bool, world: World
    ) -> None:
        device = data.labels.device
        self.run, self.data, self.schedule, self.world = run, data, schedule, world
        self.model = run.create(num_classes).to(device).train()
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.teacher = None if run.teacher is None else _teacher(run.teacher, num_classes, device)
        self.groups = parameter_groups(
            self.model, run.weight_decay, head_lr=None if run.head_rate == 1 else run.head_rate
        )
        self.parameters: list[Tensor] = [parameter for group in self.groups for parameter in group["params"]]
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

        objective: nn.Module = _Objective(self.model, run.temperature, mixup=run.mixup)
        if world.size > 1:
            synchronize_batch_norm(self.model)
            objective = DistributedDataParallel(_Compiled(objective) if compiled else objective)
        self.objective = objective
        self.forward = _compile(self._forward) if compiled and world.size == 1 else self._forward

        self.steps = schedule.steps(len(data))
        rates = schedule.factors(len(data))
        self.rates = run.learning_rate * torch.tensor(rates, device=device)
        self.losses = torch.full_like(self.rates, torch.nan)
        self.accuracies = torch.full_like(self.rates, torch.nan)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        self.part = world.part(schedule.batch_size)
        if run.mixup and len(range(schedule.batch_size)[self.part]) < 2:
            raise ValueError("mixup mixes the images of a batch, and there is one a process: make batches larger")
        self.resident = isinstance(data, ResidentImages)
        if self.resident:
            sizes = self.steps, len(range(schedule.batch_size)[self.part])
            self.order = torch.empty(sizes, dtype=torch.long, device=device)
            self.noise = torch.empty(*sizes, data.draws, device=device)
        self.stream: Iterator[Batch] | None = None
        self.fed: list[Tensor] = []
        self.prepared: tuple[int, Tensor, Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All that a later continuation needs; the place in the data is a function of seed and step."""
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"velocity.{number}": tensor for number, tensor in enumerate(self.velocity)},
            "losses": self.losses,
            "accuracies": self.accuracies,
            "step_index": self.step_index,
        }

    def prepare_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Order and random numbers of an epoch, on the host: best called while the device is still busy."""
        if self.prepared is None or self.prepared[0] != epoch:
            order = epoch_order(len(self.data), self.run.seed, epoch)
            noise = epoch_noise(len(self.data), self.data.draws, self.run.seed, epoch)
            self.prepared = epoch, order, noise
        return self.prepared[1:]

    def start_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to the step `first_step` of an epoch."""
        order, noise = self.prepare_epoch(epoch)
        size = self.schedule.batch_size
        if self.resident:
            for place, values in ((self.order, order), (self.noise, noise)):
                batches = values[: self.steps * size].view(self.steps, size, *values.shape[1:])
                place.copy_(batches[:, self.part], non_blocking=True)
            return
        places = [slice(step * size, (step + 1) * size) for step in range(first_step, self.steps)]
        self.stream = self.data.batches((order[at][self.part], noise[at][self.part]) for at in places)

    def feed(self) -> None:
        """Bring the next batch to the place from which the step reads it."""
        if self.resident:
            return
        assert self.stream is not None
        batch = next(self.stream)
        if not self.fed:
            self.fed = [tensor.clone() for tensor in batch]
        for place, tensor in zip(self.fed, batch, strict=True):
            place.copy_(tensor)

    def close(self) -> None:
        """End what decodes images ahead of the training."""
        if isinstance(self.stream, Generator):
            self.stream.close()

    def _forward(self) -> tuple[Tensor, Tensor]:
        """Loss and share of correct answers of the next batch."""
        if self.resident:
            step = self.step_index.remainder(self.steps)
            index, noise = (epoch.index_select(0, step).squeeze(0) for epoch in (self.order, self.noise))
            images, labels = self.data.augmented(index, noise)
        else:
            images, labels = self.fed
        device = labels.device.type
        if device == "cuda":
            images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            scores = None
            if self.teacher is not None:
                with torch.no_grad():
                    scores = self.teacher(images)
            loss, hits = self.objective(images, labels, scores)
        return loss, hits.float().mean()

    def step(self) -> None:
        """One step of SGD with momentum, weight decay and the head's rate where `parameter_groups` puts them."""
        loss, accuracy = self.forward()
        if self.world.size > 1:  # the hooks of DistributedDataParallel are in backward() alone
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            self.objective.zero_grad()
        else:
            gradients = list(torch.autograd.grad(loss, self.parameters))
        with torch.no_grad():
            rate, first = self.rates[self.step_index].squeeze(), 0
            for group in self.groups:
                own = slice(first, first := first + len(group["params"]))
                torch._fused_sgd_(
                    self.parameters[own],
                    [_laid_out(*pair) for pair in zip(gradients[own], self.parameters[own], strict=True)],
                    self.velocity[own],
                    weight_decay=group["weight_decay"],
                    momentum=self.schedule.momentum,
                    lr=rate * group["lr"] if "lr" in group else rate,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,  # velocities begin as zeros
                )
            figures = self.world.mean(torch.stack([loss.detach().float(), accuracy]))
            self.losses.index_copy_(0, self.step_index, figures[:1])
            self.accuracies.index_copy_(0, self.step_index, figures[1:])
            self.step_index += 1

    def seed_step(self, step: int) -> None:
        """What a network draws by itself, as for dropout, is a function of seed, step and process."""
        torch.manual_seed(mix(self.run.seed, step, self.world.rank))


class _Objective(nn.Module):
    """A network with its loss, which the head may have a faster way to than through its logits."""

    def __init__(self, model: Classifier, temperature: float, *, mixup: bool) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.mixup = mixup

    def forward(self, images: Tensor, labels: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss, and which images are classified as labelled; `scores` are a teacher's to learn instead."""
        features = self.model.features(images)
        if scores is None and not self.mixup:
            return loss_and_hits(self.model.head, features, labels)
        logits = self.model.head(features)
        if scores is None:
            loss = mixup_cross_entropy(logits, labels)
        else:
            loss = distillation_loss(logits, scores, temperature=self.temperature)
        return loss, logits.detach().argmax(1) == labels


class _Compiled(nn.Module):
    """A network to be compiled inside of DistributedDataParallel, which itself cannot be."""

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective
        self.compiled = _compile(objective.forward)

    def forward(self, images: Tensor, labels: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        loss, hits = self.compiled(images, labels, scores)
        return loss, hits


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Members that differ in values alone share one compilation; every other kind of network has its own.

    torch keeps eight for a function unless told otherwise, and would sooner make sizes that differ between kinds
    dynamic, which is slower than one compilation each.
    """
    from torch._dynamo import config  # slow to import, and not needed without

    limit = config.patch(recompile_limit=config.accumulated_recompile_limit)
    compiled: Callable[P, R] = limit(torch.compile(function, fullgraph=True, dynamic=False))
    return compiled


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with its elements in the order of the parameter's, as the fused update walks through both."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def _teacher(path: str, num_classes: int, device: torch.device) -> nn.Module:
    saved = load_classifier(Path(path))
    if len(saved.classes) != num_classes:
        raise ValueError(f"the teacher {path} knows {len(saved.classes)} classes, the data have {num_classes}")
    model = saved.model.to(device).requires_grad_(False)
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model
