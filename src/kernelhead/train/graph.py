"""A training step of several runs as one CUDA graph."""

from collections.abc import Sequence

import torch

from kernelhead.train.feed import Feed
from kernelhead.train.member import Member
from kernelhead.train.schedule import mix


class Graph:
    """One step of every feed, then of its members, captured as parallel branches, at `step` of training.

    Capturing trains nothing.
    """

    def __init__(self, members: Sequence[Member], step: int) -> None:
        streams: dict[Feed | Member, torch.cuda.Stream] = {}
        for member in members:
            for each in (member.feed, member):
                if each not in streams:
                    streams[each] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        tensors = [each.step_index for each in streams if isinstance(each, Feed)]
        tensors += [tensor for member in members for tensor in member.tensors().values()]
        kept = [tensor.clone() for tensor in tensors]

        def fork_and_join() -> None:
            main = torch.cuda.current_stream()
            for each, stream in streams.items():  # a feed comes before its members
                stream.wait_stream(streams[each.feed] if isinstance(each, Member) else main)
                with torch.cuda.stream(stream):
                    each.step()
            for stream in streams.values():
                main.wait_stream(stream)

        def restore() -> None:
            with torch.no_grad():
                for tensor, value in zip(tensors, kept, strict=True):
                    tensor.copy_(value)

        # For networks that draw by themselves, as for dropout; a training that goes on does not draw the same again.
        torch.cuda.manual_seed(mix(members[0].run.seed, step))
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
