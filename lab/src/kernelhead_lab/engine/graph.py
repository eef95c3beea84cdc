"""A step of several runs as one CUDA graph."""

from collections.abc import Sequence

import torch

from kernelhead.finetune.schedule import mix
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.member import Member


class Graph:
    """One step of every feed, then of its members, captured as parallel branches at step `step`.

    Capturing trains nothing.
    """

    def __init__(self, members: Sequence[Member], step: int) -> None:
        by_feed: dict[Feed, list[Member]] = {}
        for member in members:
            by_feed.setdefault(member.feed, []).append(member)
        streams = {member: torch.cuda.Stream() for member in members}  # type: ignore[no-untyped-call]
        tensors = [feed.step_index for feed in by_feed]
        tensors += [tensor for member in members for tensor in member.tensors().values()]
        kept = [tensor.clone() for tensor in tensors]

        def fork_and_join() -> None:
            main = torch.cuda.current_stream()
            for feed, own in by_feed.items():
                first = streams[own[0]]  # there are few streams: a feed shares that of a member
                first.wait_stream(main)
                with torch.cuda.stream(first):
                    feed.step()
                for member in own[1:]:  # now: they need the batch, and not the first member's step
                    streams[member].wait_stream(first)
                for member in own:
                    with torch.cuda.stream(streams[member]):
                        member.step()
            for stream in streams.values():
                main.wait_stream(stream)

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)

        # Networks may draw by themselves, as for dropout. A run that goes on does not draw the same again.
        torch.cuda.manual_seed(mix(members[0].spec.seed, step))
        for _ in range(3):  # libraries choose their algorithms, torch.compile compiles
            fork_and_join()
            restore()  # each time: there may be fewer steps left than these
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            fork_and_join()
        torch.cuda.synchronize()

    def replay(self) -> None:
        self._graph.replay()
