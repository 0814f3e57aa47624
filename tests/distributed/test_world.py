"""One process alone is the identity of every collective; and what becomes of a broken one."""

import socket
import threading

import pytest
import torch
import torch.distributed as dist

from rloo.distributed import World, group_setup, make_world
from rloo.distributed.group_setup import in_thread
from rloo.distributed.process_group import Collectives, RankError
from rloo.distributed.pytree import decode, encode
from rloo.model.micro_batch import count_input_tokens, deal
from support.models import make_samples


def test_alone_every_collective_returns_what_it_was_given():
    world = World(torch.device("cpu"))
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert world.run_on_all_ranks(lambda: 7) == [7] and world.broadcast_object("a") == "a"
    assert world.all_gather_object(["a", "b"]) == [["a", "b"]]
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert world.gradient_buckets([parameter]) is None and list(world.share(3)) == [0, 1, 2]
    assert (world.any_rank(True), world.any_rank(False)) == (True, False)


@pytest.mark.parametrize(("count", "size"), [(8, 2), (7, 3), (2, 4), (0, 2)])
def test_shares_are_equal_parts_in_the_order_of_ranks(count, size):
    shares = [World(torch.device("cpu"), rank, size).share(count) for rank in range(size)]
    assert [number for share in shares for number in share] == [*range(count)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("whole", [True, False])
def test_samples_are_dealt_once_as_neighbours_with_about_as_many_tokens(processes, whole):
    samples = make_samples(6, 3)
    dealt = deal(samples, processes, whole_groups=whole)
    assert len(dealt) == processes and [s.key for part in dealt for s in part] == [
        s.key for s in samples
    ]
    if whole:
        cut = [{s.key[0] for s in part} for part in dealt]
        assert sum(map(len, cut)) == 6  # no group is in two parts
    units = len(samples) if not whole else 6
    if processes <= 3:
        tokens = [count_input_tokens(part, packed=True) for part in dealt]
        assert max(tokens) <= sum(tokens) / processes + sum(tokens) / units * 2


def test_nested_values_travel_to_the_last_bit():
    value = {
        "tensors": [torch.arange(3), torch.tensor([0.1, float("nan")], dtype=torch.float64)],
        ("a", 1): (None, True, 1e-300, 2**70, "\u00e9", {}),
        2: [],
    }
    found = decode(encode(value))
    assert repr(found) == repr(value) and found["tensors"][1][0] == value["tensors"][1][0]
    assert decode(encode(None)) is None
    with pytest.raises(ValueError, match="is a set, which is not saved"):
        encode({"x": {1}})


def test_the_main_process_needs_no_answer_to_what_it_tells_the_others():
    class Broken:
        def all_gather_object(self, value):
            raise RankError("rank 2 is gone")

    main, other = (World(torch.device("cpu"), rank, 3, Broken()) for rank in (0, 1))
    assert main.broadcast_object("mine") == "mine"
    for fails in (lambda: other.broadcast_object("mine"), lambda: main.all_gather_object("mine")):
        with pytest.raises(RankError, match="rank 2 is gone"):
            fails()


class Work:
    """An exchange that is over, or never will be."""

    def __init__(self, done):
        self.done = done

    def is_completed(self):
        return self.done

    def wait(self):
        return True


def test_a_failure_ends_the_waits_of_its_own_run_and_the_next_one_has_other_lines():
    store, used = dist.HashStore(), []
    main, other = (Collectives(rank, 2, store, 60, "first", lambda: "second") for rank in (0, 1))
    other.fail(ValueError("mine"))

    def exchange(done):
        def collective(*, group, async_op):
            used.append(group)
            return Work(done)

        main._wait(collective)

    for _ in range(2):
        with pytest.raises(RankError, match="rank 1 has failed in the start: ValueError: mine"):
            exchange(False)
    assert used == ["first"] and group_setup._STARTED.popitem()[1] == "first"
    for each in (main, other):
        each.end()
    exchange(True)
    assert used == ["first", "second"]
    for each in (main, other):
        each._over.set()


def test_a_group_with_an_exchange_that_hangs_is_not_waited_for_at_the_end():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = Work(False)
    group_setup._STARTED[work] = dist.group.WORLD
    group_setup.destroy_groups()
    assert dist.is_initialized()
    work.done = True
    group_setup.destroy_groups()
    assert not dist.is_initialized()
    group_setup._STARTED.clear()


def test_what_takes_too_long_in_a_thread_is_an_error():
    assert in_thread(lambda: 7, 60) == 7
    with pytest.raises(KeyError, match="mine"):
        in_thread(lambda: {}["mine"], 60)
    with pytest.raises(RuntimeError, match=r"longer than 0\.01 s"):
        in_thread(threading.Event().wait, 0.01)


def test_who_does_not_come_to_the_start_is_waited_for_as_long_as_ddp_timeout_says(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": port}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"0 of 2 has not met the others within 1 s.*ddp_timeout"):
        make_world(use_cpu=True, timeout=1)


def test_only_the_first_rank_is_main():
    assert not World(torch.device("cpu"), rank=1, size=2).is_main


def test_the_device_is_the_cpu_where_it_is_asked_for():
    assert make_world(use_cpu=True).device == torch.device("cpu")
