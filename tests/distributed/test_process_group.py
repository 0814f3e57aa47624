"""What several ranks exchange over gloo: the values, and the collectives and bytes it costs."""

import time

import pytest

from rloo.distributed.group_setup import FREE_PADDING, common_length
from rloo.distributed.process_group import RankError
from rloo.distributed.pytree import encode
from support.process_groups import gloo_worlds, of_each

LARGE = 1_000_000


def gathered(values, seconds: float = 60):
    """The collectives of each rank, with the bytes of each, in one exchange of these values."""
    size = len(values)
    with gloo_worlds(size, seconds) as (groups, worlds):
        found = of_each(size, lambda rank: worlds[rank].all_gather_object(values[rank]))
        assert found == [values] * size
        for group, world in zip(groups, worlds, strict=True):
            assert world.collectives.received == sum(written for _, written in group.noted)
        return [group.noted for group in groups]


@pytest.mark.parametrize("size", (2, 4, 8))
def test_what_one_rank_has_is_received_once_by_each_of_the_others(size):
    values = ["x" * LARGE] + ["y"] * (size - 1)
    large, small = len(encode(values[0])), len(encode("y"))
    main, *others = gathered(values)
    sizes = ("all_gather", 8 * (size - 1))
    assert main == [sizes, ("all_gather", small * (size - 1)), ("of 0", 0)]
    assert others == [[sizes, main[1], ("of 0", large - small)]] * (size - 1)
    need = large + small * (size - 2)
    assert sum(written for _, written in others[0]) == need + 8 * (size - 1) < 1.001 * need


@pytest.mark.parametrize("size", (2, 4, 8))
def test_parts_of_about_one_length_need_no_broadcast(size):
    values = ["x" * (LARGE + LARGE // 20 * (rank % 2)) for rank in range(size)]
    longest = len(encode(values[1]))
    noted = [("all_gather", 8 * (size - 1)), ("all_gather", longest * (size - 1))]
    assert gathered(values) == [noted] * size


def test_every_part_that_is_much_longer_is_broadcast_by_its_rank():
    values = ["a" * 1000, "b" * 50_000, "c" * 1000, "d" * 90_000]
    short, middle, _, long = (len(encode(value)) for value in values)
    for rank, noted in enumerate(gathered(values)):
        rests = {1: middle - short, 3: long - short}
        rests[rank] = 0
        assert noted == [
            ("all_gather", 24), ("all_gather", 3 * short), ("of 1", rests[1]), ("of 3", rests[3])
        ]  # fmt: skip


def test_flags_cost_as_many_collectives_as_values_of_one_length():
    values = [None, True, "a reason", ("another", 2)]
    assert [name for name, _ in gathered(values)[0]] == ["all_gather"] * 2


@pytest.mark.parametrize(
    ("lengths", "common"),
    [
        ([7], 7),
        ([100, 100 + FREE_PADDING], 100 + FREE_PADDING),
        ([100, 101 + FREE_PADDING], 100),
        ([100_000, 110_000], 110_000),
        ([100_000, 110_001], 100_000),
        ([10**6, 400, 404, 404], 404),  # the few bytes of padding cost less than two broadcasts
        ([10**6, 10**6, 10**6, 2 * 10**6], 10**6),
        ([10**6, 900_000, 950_000, 2 * 10**6], 10**6),
    ],
)
def test_padding_is_at_most_a_tenth_of_what_a_rank_receives(lengths, common):
    for rotated in (lengths, lengths[::-1], lengths[1:] + lengths[:1]):
        assert common_length(rotated) == common


def test_a_rank_that_fails_between_two_collectives_ends_the_waits_of_all():
    with gloo_worlds(4, seconds=5) as (groups, worlds):

        def fail(*_):
            raise ValueError("mine")

        groups[1].broadcast = fail
        values = ["x" * LARGE, "", "", ""]

        def work(rank):
            began = time.monotonic()
            error = ValueError if rank == 1 else RankError
            with pytest.raises(error) as raised, worlds[rank].reporting_failure():
                for _ in range(2):  # the main rank may have sent all before rank 1 fails
                    worlds[rank].all_gather_object(values[rank])
            return str(raised.value), time.monotonic() - began

        for rank, (said, seconds) in enumerate(of_each(4, work)):
            known = "mine" if rank == 1 else "rank 1 has failed in the start: ValueError: mine"
            assert said == known and seconds < 30
        for group in groups:  # no other test is to meet one that is pending
            while not all(work.is_completed() for work in group.works):
                time.sleep(0.01)
