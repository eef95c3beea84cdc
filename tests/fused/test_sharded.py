"""The loss with its classes on several processes, against the plain head's logits in one, in float64."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import distributed

from kernelhead import create_head, kernel_cross_entropy, kernel_mean

PROCESSES, SAMPLES, FEATURES = 4, 9, 6
CASES = {
    "plain": (10, 1, {}),
    "prototypes": (7, 3, {}),
    "smoothing": (10, 2, {"label_smoothing": 0.2}),
    "ignored": (10, 1, {"ignore_index": 5, "label_smoothing": 0.1}),
    "sum": (11, 1, {"reduction": "sum", "temperature": 0.05}),
    "each": (6, 1, {"reduction": "none"}),
    "fewer classes than processes": (3, 2, {}),
    "all negatives": (12, 2, {"negatives": 1.0}),
}


def made(classes, prototypes):
    """The same numbers in every process; some cosines are 1, some features zero, some labels -100."""
    generator = torch.Generator().manual_seed(classes)
    features = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    weight = torch.randn(classes * prototypes, FEATURES, dtype=torch.float64, generator=generator)
    features[0] = 3 * weight[1]
    features[1] = 0
    alpha = torch.rand(8, dtype=torch.float64, generator=generator)
    target = torch.randint(classes, (SAMPLES,), generator=generator)
    target[2] = -100
    return features.requires_grad_(), weight.requires_grad_(), alpha.requires_grad_(), target


def by_hand(features, weight, alpha, target, prototypes, options):
    """The loss of logits that are all there."""
    scores = kernel_mean(features, weight, alpha / options.get("temperature", 1.0))
    logits = torch.logsumexp(scores.view(len(target), -1, prototypes), 2)
    known = {name: value for name, value in options.items() if name not in ("temperature", "negatives")}
    return F.cross_entropy(logits, target, **known)


def check(rank, group, name):
    """Compare this process's part with the whole."""
    classes, prototypes, options = CASES[name]
    whole = made(classes, prototypes)
    whole[3][whole[3] == -100] = options.get("ignore_index", -100)
    expected = by_hand(*whole, prototypes, options)
    weights = torch.linspace(1, 2, SAMPLES, dtype=torch.float64) if expected.dim() else torch.ones(())
    (expected * weights).sum().backward()

    features, weight, alpha, target = made(classes, prototypes)
    target[target == -100] = options.get("ignore_index", -100)
    share = -(-classes // group.size())
    rows = slice(min(classes, share * rank) * prototypes, min(classes, share * (rank + 1)) * prototypes)
    own = weight.detach()[rows].clone().requires_grad_()
    found = kernel_cross_entropy(features, own, alpha, target, prototypes=prototypes, group=group, **options)
    (found * weights).sum().backward()
    for ours, theirs in ((found, expected), (features.grad, whole[0].grad), (alpha.grad, whole[2].grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own.grad, whole[1].grad[rows], rtol=1e-10, atol=1e-10)


def count_numbers(group):
    """What four processes send and keep in a step of training, as docs/scale.md says."""
    sent = []
    reduce, gather = distributed.all_reduce, distributed.all_gather
    distributed.all_reduce = lambda x, *rest, **more: (sent.append(("reduced", x.numel())), reduce(x, *rest, **more))
    distributed.all_gather = lambda to, x, *rest: (sent.append(("gathered", len(to) * x.numel())), gather(to, x, *rest))
    classes, points, samples = 8, 5, 3 * PROCESSES  # in all
    for name, width in (("kernel", FEATURES), ("landmarks", points)):
        head = create_head(name, FEATURES, classes, **({"landmarks": points} if name == "landmarks" else {}))
        head = head.shard(group)
        features = torch.randn(samples // PROCESSES, FEATURES, requires_grad=True)
        target = torch.zeros(len(features), dtype=torch.long)
        sent.clear()
        loss = head.loss(features, target, **({"mode": "speed"} if name == "kernel" else {}))
        assert sent[:2] == [("gathered", PROCESSES), ("gathered", samples)]  # how many labels, and the labels
        assert sent[2:] == [("gathered", samples * width), ("reduced", samples), ("reduced", 4 * samples)]
        if name == "kernel":
            losses = loss.grad_fn.next_functions[0][0].next_functions[0][0]
            assert losses.parts[0][3].kept.shape == (samples, classes // PROCESSES)  # cosines
        sent.clear()
        loss.backward()
        shared = [len(head.alpha)] if name == "kernel" else [len(head.alpha), points * FEATURES]
        assert sorted(sent) == sorted(("reduced", count) for count in [samples * width, *shared])
        kept = sum(each.numel() for each in head._of_classes().values())
        assert kept == classes // PROCESSES * (width if name == "kernel" else width + 1)
    distributed.all_reduce, distributed.all_gather = reduce, gather


def process(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    groups = [distributed.new_group(list(range(size))) for size in range(1, PROCESSES + 1)]  # all make all
    for group in groups[rank:]:
        for name in CASES:
            check(rank, group, name)
    count_numbers(groups[-1])
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_with_classes_of_their_own_equal_one_process(run_processes, tmp_path):
    run_processes(__file__, PROCESSES, str(tmp_path))


def test_a_sample_of_the_negatives_has_an_unbiased_sum():
    features, weight, alpha, target = (x.detach() for x in made(40, 1))
    target[2] = 0
    own = kernel_mean(features, weight, alpha).gather(1, target[:, None])[:, 0]
    whole = kernel_mean(features, weight, alpha).exp().sum(1)
    sums = torch.stack(
        [
            (kernel_cross_entropy(features, weight, alpha, target, reduction="none", negatives=0.25) + own).exp()
            for _ in range(3000)
        ]
    )
    deviation = sums.std(0) / math.sqrt(len(sums))
    assert ((sums.mean(0) - whole).abs() < 4.5 * deviation + 1e-9).all()
    assert (sums.std(0) > 0.01 * whole).sum() == SAMPLES - 1  # all scores of a zero vector are equal


def test_gradients_of_a_sample_are_those_of_its_value():
    features, weight, alpha, target = made(11, 2)

    def loss(features, weight, alpha):
        torch.manual_seed(3)
        options = {"prototypes": 2, "negatives": 0.3}
        return kernel_cross_entropy(features, weight, alpha, target, **options)

    inputs = [x.detach()[2:].requires_grad_() if x is features else x for x in (features, weight, alpha)]
    target = target[2:]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"negatives": 0.0},
            "negatives needs to be a share above 0, up to 1, without label_smoothing; got negatives=0.0",
        ),
        ({"negatives": 0.5, "label_smoothing": 0.1}, "without label_smoothing; got negatives=0.5, label_smoothing=0.1"),
        ({"negatives": 0.5, "backend": "eager"}, "group and negatives need a fused backend; got backend='eager'"),
    ],
)
def test_what_does_not_go_together_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        kernel_cross_entropy(*made(4, 1), **options)


if __name__ == "__main__":
    process(int(sys.argv[1]), sys.argv[2])
