import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from kernelhead.finetune.select import select


def brute_k_center(x, budget, labelled):
    """Every distance again for every pick."""
    x = np.asarray(x, dtype=np.float64)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    centers, picks = list(labelled), []
    for _ in range(budget):
        free = [i for i in range(len(x)) if i not in centers]
        if centers:
            distance = [min(1 - x[i] @ x[c] for c in centers) for i in free]
        else:
            distance = [1 - x[i] @ x.mean(0) for i in free]
        picks.append(free[int(np.argmax(distance))])
        centers.append(picks[-1])
    return picks


@pytest.mark.parametrize("labelled", [[], [3], [5, 0, 21]])
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_k_center_is_the_greedy_one(rng, labelled, budget):
    x = rng.normal(size=(33, 5))
    chosen = select("k-center", budget, embeddings=torch.tensor(x), labelled=torch.tensor(labelled, dtype=torch.long))
    assert chosen.tolist() == brute_k_center(x, budget, labelled)


def test_k_center_takes_all_that_are_left(rng):
    x = torch.tensor(rng.normal(size=(50, 3)))
    chosen = select("k-center", 45, embeddings=x, labelled=torch.arange(5))
    assert sorted(chosen.tolist()) == list(range(5, 50))


def test_k_center_with_copies_and_zero_vectors():
    x = torch.zeros(10, 4)
    x[3:, 0] = 1.0
    chosen = select("k-center", 10, embeddings=x)
    assert sorted(chosen.tolist()) == list(range(10))


def test_k_center_looks_at_directions_alone(rng):
    x = torch.tensor(rng.normal(size=(40, 6)))
    scaled = x * torch.tensor(rng.uniform(0.1, 10, size=(40, 1)))
    assert torch.equal(select("k-center", 20, embeddings=x), select("k-center", 20, embeddings=scaled))


def test_margin_takes_the_least_certain():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.05, 0.05], [0.4, 0.35, 0.25], [0.6, 0.3, 0.1], [0.48, 0.5, 0.02]])
    assert select("margin", 3, probabilities=p).tolist() == [0, 4, 2]
    assert select("margin", 3, probabilities=p, labelled=torch.tensor([0])).tolist() == [4, 2, 3]


def test_random_is_a_function_of_the_seed_and_spares_the_labelled():
    labelled = torch.arange(0, 100, 2)
    one = select("random", 20, samples=100, labelled=labelled, seed=1)
    assert one.tolist() == select("random", 20, samples=100, labelled=labelled, seed=1).tolist()
    assert one.tolist() != select("random", 20, samples=100, labelled=labelled, seed=2).tolist()
    assert len(set(one.tolist())) == 20
    assert all(i % 2 for i in one.tolist())


def gradients(p, h):
    """The gradients (n, C D) of the cross-entropy with the predicted class by the weights of a linear layer."""
    found = []
    for probabilities, features in zip(p, h, strict=True):
        weight = torch.zeros(p.shape[1], h.shape[1], dtype=h.dtype, requires_grad=True)
        logits = weight @ features + probabilities.log()
        torch.nn.functional.cross_entropy(logits, probabilities.argmax()).backward()
        found.append(weight.grad.flatten())
    return torch.stack(found)


def brute_badge(g, budget, seed):
    """k-means++ as it is defined, on vectors that are there."""
    generator = torch.Generator().manual_seed(seed)
    picks = [int(g.square().sum(1).argmax())]
    while len(picks) < budget:
        nearest = torch.stack([(g - g[each]).square().sum(1) for each in picks]).amin(0)
        draw = torch.rand((), generator=generator, dtype=torch.float64) * nearest.sum()
        picks.append(int((nearest.cumsum(0) > draw).nonzero()[0]))
    return picks


@pytest.mark.parametrize("seed", range(5))
def test_badge_is_k_means_plus_plus_on_gradients(rng, seed):
    p = torch.tensor(rng.dirichlet(np.ones(4), size=60))
    h = torch.tensor(rng.normal(size=(60, 5)))
    free = [index for index in range(60) if index not in (7, 0, 31)]
    chosen = select("badge", 20, probabilities=p, embeddings=h, labelled=torch.tensor([7, 0, 31]), seed=seed)
    assert chosen.tolist() == [free[each] for each in brute_badge(gradients(p[free], h[free]), 20, seed)]


def test_badge_draws_in_proportion_to_squared_distances(rng):
    """The second pick over many seeds, by a chi-squared test."""
    p, h = torch.tensor(rng.dirichlet(np.ones(3), size=8)), torch.tensor(rng.normal(size=(8, 4)))
    g = gradients(p, h)
    first = int(g.square().sum(1).argmax())
    share = (g - g[first]).square().sum(1)
    share = (share / share.sum()).numpy()
    drawn = [int(select("badge", 2, probabilities=p, embeddings=h, seed=seed)[1]) for seed in range(2000)]
    counts, others = np.bincount(drawn, minlength=8), np.arange(8) != first
    assert counts[first] == 0
    assert chisquare(counts[others], 2000 * share[others]).pvalue > 0.01


def test_badge_takes_copies_and_certain_samples_last():
    """And each once, also where every distance is 0."""
    p = torch.tensor([[0.6, 0.4]] * 5 + [[1.0, 0.0]] * 5)
    h = torch.ones(10, 3)
    h[1] = -1
    chosen = select("badge", 10, probabilities=p, embeddings=h).tolist()
    assert sorted(chosen) == list(range(10))
    assert set(chosen[:3]) >= {0, 1}
    assert select("badge", 0, probabilities=p, embeddings=h).tolist() == []


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("entropy", {}, "unknown strategy 'entropy'; choose one of random, margin, k-center, badge"),
        ("margin", {"embeddings": torch.zeros(3, 2)}, "strategy 'margin' needs probabilities"),
        ("k-center", {"probabilities": torch.zeros(3, 2)}, "strategy 'k-center' needs embeddings"),
        ("random", {}, "strategy 'random' needs samples"),
        ("badge", {"embeddings": torch.zeros(9, 2)}, "strategy 'badge' needs probabilities and embeddings"),
        ("margin", {"probabilities": torch.full((3, 2), torch.nan)}, "needs probabilities, all of them finite"),
        ("random", {"samples": 3}, "budget is 5, and 3 samples are not labelled yet; choose at most 3"),
    ],
)
def test_errors_are_one_sentence(strategy, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        select(strategy, 5, **options)
