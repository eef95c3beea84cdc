"""The order of what is captured, without a GPU: streams that only note what is asked of them."""

import contextlib

import numpy as np
import torch

from kernelhead_lab.data.resident import ResidentImages, channel_statistics
from kernelhead_lab.engine.feed import Feed
from kernelhead_lab.engine.graph import Graph
from kernelhead_lab.engine.member import Member
from kernelhead_lab.spec import LabSpec


def spec(seed):
    settings = {"epochs": 1, "batch_size": 4, "warmup_epochs": 0, "learning_rate": 0.1, "head_rate": 1.0}
    return LabSpec("cifar10", "kernelhead_lab.networks:lenet5", "linear", weight_decay=1e-4, seed=seed, **settings)


class Stream:
    """What was done on it, and on streams that it has waited for."""

    current = None

    def __init__(self):
        self.done = set()

    def wait_stream(self, other):
        self.done |= other.done


def test_a_member_comes_after_its_feed_and_capturing_trains_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(256, size=(8, 32, 32, 3), dtype=np.uint8), np.arange(8) % 2
    mean, std = channel_statistics(images)
    data = ResidentImages(images, labels, mean=mean, std=std, device=torch.device("cpu"))
    specs = [spec(seed) for seed in (1, 2, 1, 1)]
    feeds = {seed: Feed(data, seed=seed, batch_size=4) for seed in (1, 2)}
    members = [Member(each, feeds[each.seed], 2) for each in specs]
    for feed in feeds.values():
        feed.start_epoch(0)
    main, order = Stream(), []

    @contextlib.contextmanager
    def on(stream):
        Stream.current = stream
        yield
        Stream.current = None

    def noted(owner):
        def step(self, real=owner.step):
            order.append(self)
            if isinstance(self, Member):
                assert self.feed in Stream.current.done  # also where the feed is on another stream
            Stream.current.done.add(self)
            real(self)

        monkeypatch.setattr(owner, "step", step)

    noted(Feed)
    noted(Member)

    @contextlib.contextmanager
    def capture(graph):
        graph.captured = len(order)
        yield
        assert main.done == {*members, *feeds.values()}  # all is joined

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {}))
    graph = Graph(members, 0)
    each = len(members) + len(feeds)
    assert graph._graph.captured == 3 * each
    assert len(order) == 4 * each
    assert [order.count(one) for one in (*members, *feeds.values())] == [4] * each
    # The last time is that of capture, in which a GPU does nothing; here it is a step like others.
    assert [int(feed.step_index) for feed in feeds.values()] == [1, 1]
    assert all(int(member.step_index) == 1 and member.losses[1:].isnan().all() for member in members)
    losses = [member.losses[0].item() for member in members]
    assert losses[0] == losses[2] == losses[3] != losses[1]  # the first batch, with the weights of the start
    fresh = Member(specs[0], feeds[1], 2)
    feeds[1].start_epoch(0)
    Stream.current = main
    feeds[1].step()
    fresh.step()
    assert fresh.losses[0].item() == losses[0]
