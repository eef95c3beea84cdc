"""Heads whose classes are shared out over processes: training, prediction and checkpoints as in one process."""

import copy
import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

from kernelhead import create_head

PROCESSES, BATCH, FEATURES, CLASSES = 3, 4, 5, 7
HEADS = {
    "kernel": ("kernel", {}),
    "kernel with bias": ("kernel", {"bias": True, "coefficients": "sigmoid"}),
    "mixture": ("prototypes", {"prototypes": 2, "aggregate": "logsumexp", "coefficients": "softplus"}),
    "expansion": ("prototypes", {"prototypes": 2, "aggregate": "sum", "bias": True}),
    "landmarks": ("landmarks", {"landmarks": 6}),
}


def head(name, **options):
    torch.manual_seed(1)
    kind, own = HEADS[name]
    return create_head(kind, FEATURES, CLASSES, dtype=torch.float64, **own, **options)


def backbone():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, FEATURES)).double()


def batches():
    """(step, process) -> images and labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, PROCESSES, BATCH, 8, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (5, PROCESSES, BATCH), generator=generator)


def train(network, own, steps):
    parameters = [*network.parameters(), *own.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=1e-3)
    losses = []
    for x, y in steps:
        loss = own.loss(network(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_one_process(name):
    network, whole = backbone(), head(name)
    x, y = batches()
    losses = train(network, whole, zip(x.flatten(1, 2), y.flatten(1, 2), strict=True))
    return network, whole, losses


def pools_and_masks(rank, group):
    """Tokens, of which some do not count; every reduction; labels that do not count; a share without classes."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randn(PROCESSES, BATCH, 3, FEATURES, dtype=torch.float64, generator=generator)
    mask = torch.rand(PROCESSES, BATCH, 3, generator=generator) < 0.7
    mask[:, :, 0] = True
    target = torch.randint(4, (PROCESSES, BATCH), generator=generator)
    target[1, 2] = -100
    for reduction in ("mean", "sum", "none"):
        for classes in (4, 7):  # of 4, the third process has none
            torch.manual_seed(1)
            whole = create_head("landmarks", FEATURES, classes, landmarks=5, dtype=torch.float64)
            own = copy.deepcopy(whole).shard(group)
            options = {"reduction": reduction, "label_smoothing": 0.2}
            expected = whole.loss(tokens.flatten(0, 1), target.flatten(), mask=mask.flatten(0, 1), **options)
            found = own.loss(tokens[rank], target[rank], mask=mask[rank], **options)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            expected.sum().backward()
            found.sum().backward()
            for each in (own.weight, own.raw_alpha):
                theirs = whole.weight if each is own.weight else whole.raw_alpha
                torch.testing.assert_close(each.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def begins_apart(rank, group):
    """A head made by its processes has other points for each class, though all have the same seed."""
    torch.manual_seed(0)
    own = create_head("landmarks", FEATURES, 9, landmarks=4, device="meta").shard(group)
    mixing, points = ([torch.empty_like(x) for _ in range(PROCESSES)] for x in (own.mixing, own.weight))
    distributed.all_gather(mixing, own.mixing.detach())
    distributed.all_gather(points, own.weight.detach())
    assert len(torch.cat(mixing).unique(dim=0)) == 9
    assert all(torch.equal(each, points[0]) for each in points)


def process(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    pair = distributed.new_group([0, 1])  # all make it
    group = distributed.group.WORLD
    for name in HEADS:
        network, whole, losses = in_one_process(name)
        replica, own = DistributedDataParallel(backbone()), head(name).shard(group)
        x, y = batches()
        found = train(replica, own, zip(x[:, rank], y[:, rank], strict=True))
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(replica.parameters(), network.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        rows = slice(3 * rank, min(CLASSES, 3 * rank + 3))  # of 7 classes: 3, 3 and 1
        for part, tensor in own.named_parameters():
            theirs = whole.get_parameter(part)
            if part in own.by_class:
                per_class = len(theirs) // CLASSES
                theirs = theirs[rows.start * per_class : rows.stop * per_class]
            torch.testing.assert_close(tensor, theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(own.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

        own.eval()
        whole.eval()
        shape = (6, 3, FEATURES) if own.pools else (2, 3, FEATURES)  # tokens, and vectors
        features = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            values, classes = own.top_k(features, 4)
            expected = whole(features).topk(4)
            torch.testing.assert_close(values, expected.values)
            assert torch.equal(classes, expected.indices)
            assert torch.equal(whole.top_k(features, 4)[1], expected.indices)

        checkpoint.save({"head": own.state_dict()}, checkpoint_id=f"{folder}/{name}")
        if rank < 2:  # loaded by fewer processes
            other = head(name, device="meta").shard(pair)
            assert not any(each.is_meta for each in other.parameters())
            state = {"head": other.state_dict()}
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}", process_group=pair)
            other.load_state_dict(state["head"])
            for part in other.by_class:
                theirs = getattr(whole, part)
                if theirs is not None:
                    theirs = theirs[rank * len(theirs) * 4 // CLASSES :][: len(theirs) * 4 // CLASSES]
                    torch.testing.assert_close(getattr(other, part), theirs, rtol=1e-9, atol=1e-9)
            for ours, theirs in zip(other.buffers(), whole.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(other.alpha, whole.alpha, rtol=1e-9, atol=1e-9)

        with pytest.raises(ValueError, match=r"has \d of 7 classes here, so it has no logits; use loss or top_k"):
            own(features)
        with pytest.raises(ValueError, match="has some of the classes here; freeze a whole one"):
            own.freeze()
        with pytest.raises(ValueError, match=r"shard needs a whole \w+; got a share of the classes"):
            own.shard(group)
        with pytest.raises(ValueError, match=r"need batches of the same size; got \[1, 2, 3\]"):
            own.loss(features[:1, 0].expand(1 + rank, -1), torch.zeros(1 + rank, dtype=torch.long))
        with pytest.raises(ValueError, match=r"labels need to lie in 0 .. 6; got 7 to 7"):
            own.loss(features[:2, 0], torch.tensor([7, 7]))
    pools_and_masks(rank, group)
    begins_apart(rank, group)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_heads_with_classes_on_several_processes_equal_those_of_one(run_processes, tmp_path):
    run_processes(__file__, PROCESSES, str(tmp_path))


if __name__ == "__main__":
    process(int(sys.argv[1]), sys.argv[2])
