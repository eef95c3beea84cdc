import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("entropy", {}, "unknown strategy 'entropy'; choose one of random, margin, k-center"),
        ("margin", {"embeddings": torch.zeros(3, 2)}, "strategy 'margin' needs probabilities"),
        ("k-center", {"probabilities": torch.zeros(3, 2)}, "strategy 'k-center' needs embeddings"),
        ("random", {}, "strategy 'random' needs samples"),
        ("margin", {"probabilities": torch.full((3, 2), torch.nan)}, "needs probabilities, all of them finite"),
        ("random", {"samples": 3}, "budget is 5, and 3 samples are not labelled yet; choose at most 3"),
    ],
)
def test_errors_are_one_sentence(strategy, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        select(strategy, 5, **options)
