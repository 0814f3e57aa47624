"""One process alone is the identity of every collective."""

import torch

from rloo.dist import World, make_world


def test_alone_every_collective_returns_what_it_was_given():
    world = World(torch.device("cpu"))
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert world.sum({"loss": 0.5, "tokens": 7.0}) == {"loss": 0.5, "tokens": 7.0}
    assert world.gather(["a", "b"]) == [["a", "b"]]
    assert (world.any(True), world.any(False), world.min(3)) == (True, False, 3)


def test_only_the_first_rank_is_main():
    assert not World(torch.device("cpu"), rank=1, size=2).is_main


def test_the_device_is_the_cpu_where_it_is_asked_for():
    assert make_world(use_cpu=True).device == torch.device("cpu")
