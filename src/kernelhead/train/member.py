"""One run in training: everything that its step reads and writes, on the device."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernelhead.backbones import Classifier
from kernelhead.heads import loss_and_hits
from kernelhead.losses import distillation_loss, mixup_cross_entropy
from kernelhead.parameters import parameter_groups
from kernelhead.train.compiled import compile_whole
from kernelhead.train.distributed import World, synchronize_batch_norm
from kernelhead.train.feed import Feed
from kernelhead.train.run import Run
from kernelhead.train.schedule import Schedule, mix


class Member:
    """A network and its optimiser, which take the batches of a `Feed`.

    A step (forward, backward, update) takes what changes from step to step, the batch and the learning rate, from
    tensors on the device, so that it can be captured as a CUDA graph.
    """

    def __init__(
        self, run: Run, feed: Feed, num_classes: int, schedule: Schedule, *, compiled: bool, world: World
    ) -> None:
        data = feed.data
        device = data.labels.device
        self.run, self.feed, self.schedule, self.world = run, feed, schedule, world
        self.model = run.create(num_classes).to(device).train()
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        # Rates change from step to step: that of a group here is a multiple of the step's.
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
        self.forward = compile_whole(self._forward) if compiled and world.size == 1 else self._forward

        rates = schedule.factors(len(data))
        self.rates = run.learning_rate * torch.tensor(rates, device=device)
        self.losses = torch.full_like(self.rates, torch.nan)
        self.accuracies = torch.full_like(self.rates, torch.nan)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)
        if run.mixup and len(range(schedule.batch_size)[feed.part]) < 2:
            raise ValueError("mixup mixes the images of a batch, and there is one a process: make batches larger")

    def tensors(self) -> dict[str, Tensor]:
        """All that a later continuation needs; the place in the data is a function of seed and step."""
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"velocity.{number}": tensor for number, tensor in enumerate(self.velocity)},
            "losses": self.losses,
            "accuracies": self.accuracies,
            "step_index": self.step_index,
        }

    def _forward(self, images: Tensor, labels: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """Loss and share of correct answers of a batch."""
        device = labels.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss, hits = self.objective(images, labels, scores)
        return loss, hits.float().mean()

    def step(self) -> None:
        """One step of SGD on the feed's batch, weight decay and the head's rate where `parameter_groups` puts them."""
        loss, accuracy = self.forward(*self.feed.batch)
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
        self.compiled = compile_whole(objective.forward)

    def forward(self, images: Tensor, labels: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        loss, hits = self.compiled(images, labels, scores)
        return loss, hits


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with its elements in the order of the parameter's, as the fused update walks through both."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
