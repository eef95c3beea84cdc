"""Choosing what to label: at random, by margin, or by k-center (the paper's Appendix C).

A model that was trained on a few labelled samples gives the probabilities and embeddings of all; no labels are looked
at. All samples of a budget are chosen at once.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

STRATEGIES = ("random", "margin", "k-center")
_TAKEN = 2.0  # above every cosine


def select(
    strategy: str,
    budget: int,
    *,
    probabilities: Tensor | None = None,
    embeddings: Tensor | None = None,
    labelled: Tensor | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Indices (budget,) of the samples to label next, none of them in `labelled`, in the order of choice.

    Args:
        strategy: "random", "margin" (the smallest difference between the two largest probabilities first), or
            "k-center" (greedily the sample farthest from all that are labelled or chosen, by cosine distance).
        budget: how many.
        probabilities: (n, C), for "margin".
        embeddings: (n, D), for "k-center".
        labelled: indices (m,) of samples that are labelled already.
        samples: n, for "random" alone, where neither of the others says it.
        seed: of "random".
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    known = {"margin": probabilities, "k-center": embeddings}
    source = known.get(strategy, next((x for x in known.values() if x is not None), None))
    if source is None and (strategy != "random" or samples is None):
        needed = {"margin": "probabilities", "k-center": "embeddings", "random": "samples"}[strategy]
        raise ValueError(f"strategy {strategy!r} needs {needed}")
    count = samples if source is None else len(source)
    assert count is not None
    if source is not None and (source.dim() != 2 or not torch.isfinite(source).all()):
        raise ValueError(f"strategy {strategy!r} needs finite numbers (n, ..), got shape {tuple(source.shape)}")

    taken = torch.zeros(count, dtype=torch.bool)
    if labelled is not None:
        if len(labelled) and not (labelled.min() >= 0 and labelled.max() < count):
            raise ValueError(f"labelled goes from {labelled.min()} to {labelled.max()}, samples from 0 to {count - 1}")
        taken[labelled.cpu()] = True
    free = int((~taken).sum())
    if not 0 <= budget <= free:
        raise ValueError(f"a budget of {budget} does not fit {free} samples that are not labelled yet")

    candidates = (~taken).nonzero().squeeze(1)
    if strategy == "random":
        return candidates[torch.randperm(free, generator=torch.Generator().manual_seed(seed))[:budget]]
    if strategy == "margin":
        assert probabilities is not None
        largest = probabilities.topk(min(2, probabilities.shape[1]), dim=1).values
        margin = (largest[:, 0] - largest[:, -1]).cpu()[candidates]
        return candidates[margin.argsort(stable=True)[:budget]]
    assert embeddings is not None
    return _k_center(F.normalize(embeddings.detach().float(), dim=1), budget, taken)


def _k_center(points: Tensor, budget: int, taken: Tensor) -> Tensor:
    """Greedy k-center on unit vectors (n, D) by cosine distance; memory is linear in n.

    `nearest` holds, for each point that can still be chosen, its largest cosine with a center; the next center is where
    it is smallest. The first one, where nothing is labelled, is the point farthest from the mean. Each center takes
    one product with the points that are left, and those that were chosen are dropped now and then.
    """
    device = points.device
    index = (~taken).nonzero().squeeze(1).to(device)
    centers = points[taken.to(device)]
    points = points[index].contiguous()
    if len(centers):
        nearest = torch.stack([(points @ block.T).amax(1) for block in torch.split(centers, 256)]).amax(0)
    else:
        nearest = points @ points.mean(0)

    chosen = torch.empty(budget, dtype=torch.long, device=device)
    dropped = 0  # chosen ones among the points that are left
    for i in range(budget):
        best = nearest.argmin()
        chosen[i] = index[best]
        similarity = points @ points[best]
        if i == 0 and not len(centers):
            nearest = similarity
        else:
            torch.maximum(nearest, similarity, out=nearest)
        nearest[best] = _TAKEN
        dropped += 1
        if 4 * dropped > len(points):
            left = (nearest < _TAKEN).nonzero().squeeze(1)
            points, nearest, index, dropped = points[left].contiguous(), nearest[left], index[left], 0
    return chosen.cpu()
