"""Choose what to label next: at random, by margin, or by k-center (the paper's Appendix C)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead.finetune.data import Progress
from kernelhead.finetune.evaluation import classified, finite, open_files
from kernelhead.finetune.saved import SavedClassifier

STRATEGIES = {"random": "samples", "margin": "probabilities", "k-center": "embeddings"}  # and what each needs


def select(
    strategy: str,
    budget: int,
    *,
    probabilities: Tensor | None = None,
    embeddings: Tensor | None = None,
    samples: int | None = None,
    labelled: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Return indices (budget,) of the samples to label next, in the order of choice, without those in `labelled` (m,).

    "random" needs the number n of `samples`. "margin" takes the smallest differences between the two largest
    `probabilities` (n, C). "k-center" takes greedily the sample whose cosine distance from all that are labelled or
    chosen is largest, by `embeddings` (n, D).
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    given = {"random": samples, "margin": probabilities, "k-center": embeddings}[strategy]
    if given is None or not torch.as_tensor(given).isfinite().all():
        raise ValueError(f"strategy {strategy!r} needs {STRATEGIES[strategy]}, all of them finite")
    taken = torch.zeros(given if isinstance(given, int) else len(given), dtype=torch.bool)
    if labelled is not None:
        taken[labelled.cpu()] = True
    candidates = (~taken).nonzero().squeeze(1)
    free = len(candidates)
    if not 0 <= budget <= free:
        raise ValueError(f"budget is {budget}, and {free} samples are not labelled yet; choose at most {free}")

    if isinstance(given, int):
        return candidates[torch.randperm(free, generator=torch.Generator().manual_seed(seed))[:budget]]
    if strategy == "margin":
        largest = given.topk(min(2, given.shape[1]), dim=1).values
        margin = (largest[:, 0] - largest[:, -1]).cpu()[candidates]
        return candidates[margin.argsort(stable=True)[:budget]]
    return _k_center(F.normalize(given.detach().float(), dim=1), budget, taken)


def _k_center(points: Tensor, budget: int, taken: Tensor) -> Tensor:
    """Choose greedily on unit vectors (n, D) by cosine distance; memory is linear in n.

    `nearest` holds the largest cosine of each point with a center; the next center is where it is smallest. Where
    nothing is labelled, the first center is the point farthest from the mean.
    """
    centers = points[taken.to(points.device)]
    if len(centers):
        nearest = torch.stack([(points @ block.T).amax(1) for block in torch.split(centers, 256)]).amax(0)
    else:
        nearest = points @ points.mean(0)
    nearest[taken.to(points.device)] = torch.inf
    chosen = torch.empty(budget, dtype=torch.long, device=points.device)
    for i in range(budget):
        chosen[i] = best = nearest.argmin()
        similarity = points @ points[best]
        nearest = torch.maximum(nearest, similarity) if i or len(centers) else similarity
        nearest[best] = torch.inf
    return chosen.cpu()


def select_images(
    saved: SavedClassifier,
    paths: Sequence[Path],
    budget: int,
    strategy: str,
    device: torch.device,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[list[Path], list[str]]:
    """Return the image files to label next, and a sentence per file that cannot be read."""
    data, readable, broken = open_files(saved, paths, device, progress)
    logits, embeddings = [], []
    for features, scores in classified(saved.model, data, data.test, amp=saved.spec.amp, progress=progress):
        logits.append(scores.float())
        pooled = features.mean((2, 3)) if features.dim() == 4 else features.mean(1) if features.dim() == 3 else features
        embeddings.append(pooled.float())
    given = {"probabilities": finite(torch.cat(logits)).softmax(1), "embeddings": torch.cat(embeddings)}
    chosen = select(strategy, budget, **given, samples=len(readable), seed=seed)
    return [readable[index] for index in chosen.tolist()], broken
