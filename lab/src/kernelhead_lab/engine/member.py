"""One run: everything that its step reads and writes, on the device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.finetune.schedule import mix
from kernelhead.functional import distillation_loss, mixup_cross_entropy
from kernelhead.optim import parameter_groups
from kernelhead_lab.engine.compiled import compile_whole
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.schedule import rate_factors
from kernelhead_lab.networks import build
from kernelhead_lab.spec import LabSpec


class Member:
    """A network and its optimiser, which take the batches of a `Feed`.

    A step (forward, backward, update) reads the batch and the learning rate from tensors on the device, so that it can
    be captured as a CUDA graph.
    """

    def __init__(self, spec: LabSpec, feed: Feed, num_classes: int, *, compiled: bool = False) -> None:
        needed = ("epochs", "learning_rate", "head_rate", "weight_decay")
        missing = [name for name in needed if getattr(spec, name) is None]
        if missing:
            raise ValueError(f"a spec that is trained needs {missing[0]}; got {missing[0]}=None")
        if spec.mixup and feed.teacher is not None:
            raise ValueError("mixup=True and a teacher exclude each other: both replace the labels; use one of them")
        if spec.mixup and feed.batch_size < 2:
            raise ValueError(f"mixup needs batches of two images or more; got batch_size={feed.batch_size}")
        assert spec.epochs is not None
        assert spec.learning_rate is not None
        assert spec.weight_decay is not None
        device = feed.data.labels.device
        self.spec, self.feed = spec, feed
        self.model = build(spec, num_classes).to(device).train()
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)
        # Rates change from step to step: that of a group here is a multiple of the step's.
        head_rate = None if spec.head_rate == 1 else spec.head_rate
        self.groups = parameter_groups(self.model, spec.weight_decay, head_lr=head_rate)
        self.parameters: list[Tensor] = [parameter for group in self.groups for parameter in group["params"]]
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.forward = compile_whole(self._forward) if compiled else self._forward

        factors = rate_factors(feed.steps, spec.epochs, spec.warmup_epochs)
        self.rates = spec.learning_rate * torch.tensor(factors, device=device)
        self.losses = torch.full_like(self.rates, torch.nan)
        self.accuracies = torch.full_like(self.rates, torch.nan)
        self.step_index = torch.zeros(1, dtype=torch.long, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a later continuation needs; which images come next follows from seed and step."""
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"velocity.{number}": tensor for number, tensor in enumerate(self.velocity)},
            "losses": self.losses,
            "accuracies": self.accuracies,
            "step_index": self.step_index,
        }

    def _forward(self, images: Tensor, labels: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss and the share of correct answers; `scores` are a teacher's, learned instead of the labels."""
        device = labels.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = self.model(images)
            if scores is not None:
                loss = distillation_loss(logits, scores, temperature=self.spec.temperature)
            elif self.spec.mixup:
                loss = mixup_cross_entropy(logits, labels)
            else:
                loss = F.cross_entropy(logits, labels)
        return loss, (logits.detach().argmax(1) == labels).float().mean()

    def step(self) -> None:
        """Take one step of SGD on the feed's batch."""
        loss, accuracy = self.forward(*self.feed.batch)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            rate, first = self.rates[self.step_index].squeeze(), 0
            for group in self.groups:
                own = slice(first, first := first + len(group["params"]))
                # torch.optim.SGD takes rates as numbers, and a captured graph needs them as tensors.
                torch._fused_sgd_(
                    self.parameters[own],
                    [_laid_out(*pair) for pair in zip(gradients[own], self.parameters[own], strict=True)],
                    self.velocity[own],
                    weight_decay=group["weight_decay"],
                    momentum=self.spec.momentum,
                    lr=rate * group["lr"] if "lr" in group else rate,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,  # velocities begin as zeros
                )
            self.losses.index_copy_(0, self.step_index, loss.detach().float().view(1))
            self.accuracies.index_copy_(0, self.step_index, accuracy.view(1))
            self.step_index += 1

    def seed_step(self, step: int) -> None:
        """Make what a network draws by itself, as for dropout, a function of seed and step."""
        torch.manual_seed(mix(self.spec.seed, step, 0))


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Give a gradient the memory layout of its parameter, as the fused update walks through both."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)
