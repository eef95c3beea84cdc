"""Train kernel heads on points of the sphere, look at what they learned, and freeze one for inference.

python examples/inspect_head.py
"""

import torch
from torch.nn import functional as F

from kernelhead import PrototypeHead, parameter_groups
from kernelhead.metrics import accuracy


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two classes of three clusters each on the sphere in 3 dimensions, around the six ends of the axes."""
    centers = torch.cat([torch.eye(3), -torch.eye(3)])
    cluster = torch.randint(6, (count,), generator=generator)
    points = centers[cluster] + 0.25 * torch.randn(count, 3, generator=generator)
    return F.normalize(points), cluster % 2


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    x, y = draw(2000, generator)
    x_test, y_test = draw(2000, generator)

    head = PrototypeHead(3, 2, prototypes=5, aggregate="logsumexp")
    optimizer = torch.optim.SGD(parameter_groups(head, weight_decay=1e-4), lr=0.1, momentum=0.9)
    for _ in range(300):
        loss = F.cross_entropy(head(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.eval()

    # Show the kernel, the worth of each term, and which of the five prototypes of a class are in use.
    print(head.describe(x))

    # Freeze it for inference.
    with torch.no_grad():
        logits = head(x_test)
        print(f"\nhead: degree {head.degree}, accuracy {accuracy(logits, y_test):.1f} %")
        found = head.freeze()(x_test)
        change = (found - logits).abs().max().item()
        print(f"frozen: a logit changes by at most {change:.1e}, accuracy {accuracy(found, y_test):.1f} %")


if __name__ == "__main__":
    main()
