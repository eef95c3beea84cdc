"""Choose what to label next: at random, by margin, by k-center (the paper's Appendix C), or by BADGE."""

import csv
import html
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from kernelhead import page
from kernelhead.files import write_bytes
from kernelhead.finetune.data import Progress
from kernelhead.finetune.images import data_root
from kernelhead.finetune.prediction import classify_files
from kernelhead.finetune.report import figure
from kernelhead.finetune.saved import SavedClassifier

STRATEGIES = {  # and what each needs
    "random": ("samples",),
    "margin": ("probabilities",),
    "k-center": ("embeddings",),
    "badge": ("probabilities", "embeddings"),
}
CSV_FILE, SHEET_FILE = "selected.csv", "selected.html"
COLUMNS = ("image", "class", "probability", "margin")

Chosen = tuple[Path, str, float, float]  # file, predicted class, its probability, and by how much it leads


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
    chosen is largest, by `embeddings` (n, D). "badge" takes both (Ash et al., 2020).
    """
    given = {"samples": samples, "probabilities": probabilities, "embeddings": embeddings}
    needed = [given[name] for name in needs_of(strategy)]
    if any(each is None or not torch.as_tensor(each).isfinite().all() for each in needed):
        raise ValueError(f"strategy {strategy!r} needs {' and '.join(needs_of(strategy))}, all of them finite")
    (count,) = {each if isinstance(each, int) else len(each) for each in needed if each is not None}
    taken = torch.zeros(count, dtype=torch.bool)
    if labelled is not None:
        taken[labelled.cpu()] = True
    candidates = (~taken).nonzero().squeeze(1)
    free = len(candidates)
    if not 0 <= budget <= free:
        raise ValueError(f"budget is {budget}, and {free} samples are not labelled yet; choose at most {free}")

    generator = torch.Generator().manual_seed(seed)
    if strategy == "badge":
        assert probabilities is not None
        assert embeddings is not None
        p, h = (each.detach()[candidates.to(each.device)] for each in (probabilities, embeddings))
        return candidates[_badge(p.to(h.device), h, budget, generator)]
    if embeddings is not None and strategy == "k-center":
        return _k_center(F.normalize(embeddings.detach().float(), dim=1), budget, taken)
    if probabilities is not None and strategy == "margin":
        return candidates[margins(probabilities).cpu()[candidates].argsort(stable=True)[:budget]]
    return candidates[torch.randperm(free, generator=generator)[:budget]]


def needs_of(strategy: str) -> tuple[str, ...]:
    """Return what a strategy chooses by."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]


def margins(probabilities: Tensor) -> Tensor:
    """Return by how much the largest of each row leads (n,)."""
    largest = probabilities.topk(min(2, probabilities.shape[1]), dim=1).values
    return largest[:, 0] - largest[:, -1]


def _badge(probabilities: Tensor, embeddings: Tensor, budget: int, generator: torch.Generator) -> Tensor:
    """Choose by k-means++ on g = (p - e) x h: the longest one first, then in proportion to squared distances.

    p (n, C) are probabilities, e is 1 at the largest, h (n, D) are embeddings. g is the gradient of the cross-entropy
    with the predicted class by the weights of a linear layer on h. <g_i, g_j> = <p_i - e_i, p_j - e_j> <h_i, h_j>, so
    no g is ever made.
    """
    errors = probabilities - F.one_hot(probabilities.argmax(1), probabilities.shape[1])
    lengths = errors.square().sum(1) * embeddings.square().sum(1)
    chosen, weights = list[int](), lengths
    free = torch.ones(len(lengths), dtype=torch.bool, device=lengths.device)
    for _ in range(budget):
        best = int(lengths.argmax())
        if chosen:
            sums = torch.where(free, weights if weights.any() else 1.0, 0.0).double().cumsum(0)
            draw = sums[-1] * torch.rand((), generator=generator, dtype=torch.float64).item()
            best = min(int(torch.searchsorted(sums, draw, right=True)), int(sums.argmax()))
        inner = (errors @ errors[best]) * (embeddings @ embeddings[best])
        distances = (lengths + lengths[best] - 2 * inner).clamp_min(0)
        weights = torch.minimum(weights, distances) if chosen else distances
        weights[best], free[best] = 0, False
        chosen.append(best)
    return torch.tensor(chosen, dtype=torch.long)


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
) -> tuple[list[Chosen], list[str]]:
    """Return the image files to label next, and a sentence per file that cannot be read.

    Images of the training are never chosen. k-center keeps away from those too that are still where they were. The
    embeddings are the features that the head takes, averaged over positions, of unit length where it has a kernel.
    """
    needs, root, known, own = needs_of(strategy), data_root(saved.spec.data), saved.trained_on(), list[Path]()
    if strategy == "k-center":
        own = [root / name for name, *_ in saved.files.get("train", ()) if (root / name).is_file()]
    total, readable, marks, broken = len(own) + len(paths), list[Path](), list[str](), list[str]()
    scores, vectors = list[Tensor](), list[Tensor]()
    for seen in classify_files(saved, [*own, *paths], device, total=total, progress=progress):
        readable += [path for path in seen.paths if path not in seen.broken]
        marks += seen.marks
        broken += seen.broken.values()
        scores.append(seen.logits.softmax(1))
        if "embeddings" in needs and seen.marks:
            pooled = seen.features.float()
            pooled = pooled.mean((2, 3)) if pooled.dim() == 4 else pooled.mean(1) if pooled.dim() == 3 else pooled
            vectors.append(F.normalize(pooled) if hasattr(saved.head, "kernel") else pooled)
    if not readable:
        raise ValueError(f"no image can be read ({next(iter(broken))})")
    there = set(own)
    labelled = [i for i, pair in enumerate(zip(readable, marks, strict=True)) if pair[0] in there or pair[1] in known]
    probabilities = torch.cat(scores)
    given = {"probabilities": probabilities, "embeddings": torch.cat(vectors) if vectors else None}
    taken = torch.tensor(labelled, dtype=torch.long)
    chosen = select(strategy, budget, **given, samples=len(readable), labelled=taken, seed=seed)
    rows = probabilities.cpu()[chosen]
    figures = zip(chosen.tolist(), *(each.tolist() for each in (*rows.max(1)[::-1], margins(rows))), strict=True)
    return [(readable[i], saved.classes[label], high, lead) for i, label, high, lead in figures], broken


def write_selection(folder: Path, chosen: Sequence[Chosen], title: str) -> None:
    """Write the chosen images as CSV, and as a page with a thumbnail of each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((path, name, f"{high:.6g}", f"{lead:.6g}") for path, name, high, lead in chosen)
    write_bytes(folder / CSV_FILE, text.getvalue().encode())
    figures = [
        figure(path, at, f"{number}: <b>{html.escape(name)}</b> {100 * high:.0f} %<br>{at}")
        for number, (path, name, high, _) in enumerate(chosen, 1)
        for at in [html.escape(str(path))]
    ]
    write_bytes(folder / SHEET_FILE, page.document(title, f'<div class="errors">{"".join(figures)}</div>'))
