"""Heads whose classes are shared out over processes: training, prediction and checkpoints as in one process."""

import sys

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

from kernelhead import create_head

PROCESSES, BATCH, FEATURES, CLASSES = 3, 4, 5, 7
HEADS = {"kernel": {}, "prototypes": {"prototypes": 2, "aggregate": "logsumexp", "coefficients": "softplus"}}


def head(name):
    torch.manual_seed(1)
    return create_head(name, FEATURES, CLASSES, dtype=torch.float64, **HEADS[name])


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
        torch.testing.assert_close(own.raw_alpha, whole.raw_alpha, rtol=1e-9, atol=1e-9)

        features = torch.randn(2, 3, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        with torch.no_grad():
            values, classes = own.top_k(features, 4)
            expected = whole(features).topk(4)
            torch.testing.assert_close(values, expected.values)
            assert torch.equal(classes, expected.indices)
            assert torch.equal(whole.top_k(features, 4)[1], expected.indices)

        checkpoint.save({"head": own.state_dict()}, checkpoint_id=f"{folder}/{name}")
        if rank < 2:  # loaded by fewer processes
            other = create_head(name, FEATURES, CLASSES, dtype=torch.float64, device="meta", **HEADS[name])
            other.shard(pair)
            assert not other.weight.is_meta
            state = {"head": other.state_dict()}
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}", process_group=pair)
            other.load_state_dict(state["head"])
            rows = slice(rank * 4 * other.prototypes, (rank + 1) * 4 * other.prototypes)
            torch.testing.assert_close(other.weight, whole.weight[rows], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(other.alpha, whole.alpha, rtol=1e-9, atol=1e-9)

        with pytest.raises(ValueError, match=r"has \d of 7 classes here, so it has no logits; use loss or top_k"):
            own(features)
        with pytest.raises(ValueError, match="has some of the classes here; freeze a whole one"):
            own.freeze()
        with pytest.raises(ValueError, match="shard needs a whole head with a fused loss; got a share"):
            own.shard(group)
    with pytest.raises(ValueError, match="with a fused loss; got a KernelHead without one"):
        create_head("kernel", 2, 2, bias=True).shard(group)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_heads_with_classes_on_several_processes_equal_those_of_one(run_processes, tmp_path):
    run_processes(__file__, PROCESSES, str(tmp_path))


if __name__ == "__main__":
    process(int(sys.argv[1]), sys.argv[2])
