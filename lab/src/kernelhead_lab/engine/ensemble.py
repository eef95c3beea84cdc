"""Many small heads trained at once on feature vectors.

A head on a few numbers is far too small to keep a processor busy: nearly all of a step is overhead. So R heads of one
architecture are stacked and trained as one by `vmap`, each with its own data, learning rate, weight decay and start.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn import functional as F

from kernelhead.finetune.checkpoint import BrokenCheckpointError, digest, load_checkpoint, save_checkpoint
from kernelhead.finetune.schedule import epoch_order
from kernelhead.optim import parameter_groups
from kernelhead_lab.engine.schedule import rate_factors, steps_per_epoch

CHECKPOINT_SECONDS = 10.0


def train_ensemble(
    heads: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: Tensor,
    weight_decay: Tensor,
    momentum: float = 0.9,
    warmup_epochs: int = 5,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train R heads of one architecture, each on its own data, by SGD on the softmax cross-entropy.

    x (R, n, D); y (R, n); learning_rate, weight_decay (R,). Weight decay goes where `parameter_groups` puts it. Every
    epoch has one order of the samples for all members, and leaves out the last incomplete batch.

    With `checkpoint`, the state is saved there every ten seconds, when interrupted and at the end. A later call with
    the same settings continues from it, to the bit on a CPU. `progress(done, total)` is called after each epoch.
    """
    samples = x.shape[1]
    steps = steps_per_epoch(samples, batch_size)
    factors = rate_factors(steps, epochs, warmup_epochs)

    for head in heads:
        head.train()
    model = heads[0]
    parameters, buffers = stack_module_state(list(heads))
    parameters = {name: stacked.detach() for name, stacked in parameters.items()}
    velocity = {name: torch.zeros_like(stacked) for name, stacked in parameters.items()}
    trainable, decayed = _trainable_names(model)

    def loss(own: dict[str, Tensor], own_buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, (own, own_buffers), (x,)), y)

    step_gradients = vmap(grad_and_value(loss))

    def column(values: Tensor, like: Tensor) -> Tensor:
        return values.view(-1, *[1] * (like.dim() - 1))

    stacks = {"parameter": parameters, "buffer": buffers, "velocity": velocity}
    identity = {
        "schedule": [epochs, batch_size, momentum, warmup_epochs],
        "seed": seed,
        "model": repr(model),
        "rates": [learning_rate.tolist(), weight_decay.tolist()],
        "start": digest({"x": x, "y": y, **parameters, **buffers}),
    }
    first_epoch = _resume(checkpoint, stacks, identity)

    def save(epoch: int, tensors: dict[str, Tensor]) -> None:
        if checkpoint is not None:
            save_checkpoint(checkpoint, tensors, {"epoch": epoch, "identity": identity})

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small gain nothing from a second thread, and lose much on a busy machine
    saved_at = time.monotonic()
    whole = (first_epoch, _flat(stacks))  # the state after the last whole epoch: what an interruption saves
    try:
        for epoch in range(first_epoch, epochs):
            order = epoch_order(samples, seed, epoch)
            for index in range(steps):
                batch = order[index * batch_size : (index + 1) * batch_size]
                gradients, _ = step_gradients(parameters, buffers, x[:, batch], y[:, batch])
                rate = learning_rate * factors[epoch * steps + index]
                for name in trainable:
                    parameter = parameters[name]
                    change = velocity[name].mul_(momentum).add_(gradients[name])
                    if name in decayed:
                        change.addcmul_(parameter, column(weight_decay, parameter))
                    parameter.addcmul_(change, column(rate, parameter), value=-1)
            whole = (epoch + 1, _flat(stacks))
            if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                save(*whole)
                saved_at = time.monotonic()
            if progress is not None:
                progress(epoch + 1, epochs)
    finally:
        torch.set_num_threads(threads)
        save(*whole)

    for member, head in enumerate(heads):
        head.load_state_dict({name: stacked[member] for name, stacked in {**parameters, **buffers}.items()})


def ensemble_logits(heads: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return logits of R heads in evaluation mode on their own data. x (R, n, D) -> (R, n, C)."""
    with torch.no_grad():
        return torch.stack([head.eval()(features) for head, features in zip(heads, x, strict=True)])


def _trainable_names(model: nn.Module) -> tuple[list[str], set[str]]:
    """Return the names of the parameters that are trained, and of those that are decayed."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    trainable, decayed = [], set()
    for group in parameter_groups(model, 1.0):
        names = [name_of[id(parameter)] for parameter in group["params"]]
        trainable += names
        if group["weight_decay"]:
            decayed.update(names)
    return trainable, decayed


def _flat(stacks: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{kind}:{name}": x.clone() for kind, tensors in stacks.items() for name, x in tensors.items()}


def _resume(checkpoint: Path | None, stacks: dict[str, dict[str, Tensor]], identity: dict[str, Any]) -> int:
    """Load a checkpoint of the same run, if there is one, and return the epoch at which to go on."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    try:
        tensors, state = load_checkpoint(checkpoint)
    except BrokenCheckpointError as error:
        warnings.warn(f"{error}; training starts anew", stacklevel=3)
        return 0
    if state["identity"] != identity:
        return 0
    for kind, stack in stacks.items():
        for name, tensor in stack.items():
            tensor.copy_(tensors[f"{kind}:{name}"])
    epoch: int = state["epoch"]
    return epoch
