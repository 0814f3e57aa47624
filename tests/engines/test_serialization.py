"""Completions hold tokens as arrays, and travel and are saved without a changed bit."""

import sys
from array import array
from dataclasses import replace

import pytest

from rloo.algorithm.advantages import Advantages
from rloo.algorithm.state import ActiveRollout
from rloo.distributed.pytree import decode, encode
from rloo.engines.serialization import pack, unpack
from rloo.types import Completion, Rollout, Sample

IDS = [5, 0, 2**31 - 1]
POLICY, BEHAVIOR = [-0.1, -1 / 3, 0.0], [-0.2, -1e-300, -5.0]


def test_a_token_takes_20_bytes_or_12_with_one_list_of_log_probs():
    size = 10_000
    logprobs = [-float(n) for n in range(size)]

    def bytes_of(*columns):
        return sum(sys.getsizeof(column) for column in {id(c): c for c in columns}.values())

    for behavior, expected in (([-1.0 - x for x in logprobs], 20), (logprobs, 12)):
        c = Completion(list(range(size)), "stop", logprobs, behavior)
        s = Sample((0, 0), 0, [1], c.token_ids, c.policy_logprobs, 0.0, False, c.behavior_logprobs)
        assert s.token_ids is c.token_ids and s.behavior_logprobs is c.behavior_logprobs
        used = bytes_of(c.token_ids, c.policy_logprobs, c.behavior_logprobs)
        assert expected <= used / size < expected + 0.1
        (there,) = unpack(decode(encode(pack([c]))))
        used = bytes_of(there.token_ids, there.policy_logprobs, there.behavior_logprobs)
        assert expected <= used / size < expected + 0.1 and there == c


def test_lists_arrays_and_slices_are_one_completion():
    c = Completion(IDS, "stop", POLICY, BEHAVIOR)
    assert c == Completion(array("i", IDS), "stop", array("d", POLICY), array("d", BEHAVIOR))
    assert c != replace(c, token_ids=[5, 0, 1]) and c != replace(c, behavior_logprobs=POLICY)
    assert list(c.token_ids) == IDS and list(c.policy_logprobs[1:]) == POLICY[1:]
    assert [9, *c.token_ids[:-1]] == [9, 5, 0]
    cut = replace(c, token_ids=c.token_ids[:2])
    assert isinstance(cut.token_ids, array) and len(cut.token_ids) == 2


@pytest.mark.parametrize("behavior", (POLICY, BEHAVIOR, [*POLICY]))
def test_completions_travel_to_the_last_bit(behavior):
    some = [Completion(IDS, "stop", POLICY, behavior), Completion([], "length", [], [])]
    assert unpack(decode(encode(pack(some)))) == some
    assert unpack(decode(encode(pack([])))) == []


def test_a_checkpoint_has_lists_and_gives_back_the_samples():
    samples = [
        Sample((0, 0), 0, [1], IDS, POLICY, 1.0, True, BEHAVIOR, weight_versions=((3, 3),)),
        Sample((0, 1), 1, [1], IDS, POLICY, 0.0, False, trained=(True, False, True)),
    ]
    rollout = Rollout([], {}, 0, 3, {}, 0.5)
    saved = ActiveRollout(rollout, samples, Advantages({}), 1).state_dict()
    first = saved["samples"][0]
    assert (first["token_ids"], first["policy_logprobs"]) == (IDS, POLICY)
    assert first["behavior_logprobs"] == BEHAVIOR and first["home"] is None
    again = ActiveRollout.of_state(decode(encode(saved)), {})
    assert again.samples == samples and again.steps_done == 1
