"""Completions to micro-batches, by literal tokens."""

from dataclasses import replace

from rloo.model.micro_batch import exceeds, pack, pad, split
from rloo.types import Sample
from support.models import CPU, make_model, make_samples
from support.policies import make_policy


def small_samples() -> list[Sample]:
    """Two completions of the prompt 5 6 and, between them, one of the prompt 7."""
    given = [((0, 0), [5, 6], [10, 11, 2]), ((1, 0), [7], [12, 2]), ((0, 1), [5, 6], [13])]
    return [
        replace(sample, key=key, prompt_ids=prompt, token_ids=tokens, reward=float(number))
        for number, (sample, (key, prompt, tokens)) in enumerate(
            zip(make_samples(1, 3), given, strict=True)
        )
    ]


def assert_of_completions(batch) -> None:
    """What does not depend on the form: group by group, in the order of the samples."""
    assert batch.keys == [(0, 0), (0, 1), (1, 0)]
    assert batch.target_T.tolist() == [10, 11, 2, 13, 12, 2]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.group_N.tolist() == [0, 0, 1]
    assert batch.reward_N.tolist() == [0, 2, 1]
    assert batch.lengths == [3, 1, 2]


def test_packed_a_prompt_stands_once_before_its_completions():
    batch = pack(small_samples(), CPU)
    assert_of_completions(batch)
    # The last token of a completion is no input: it predicts nothing.
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 10, 11, 7, 12]]
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.multiplicity.tolist() == [[2, 2, 1, 1, 1, 1]]
    assert batch.source_T.tolist() == [1, 2, 3, 1, 4, 5]


def test_padded_a_completion_has_a_row_with_its_prompt():
    batch = pad(small_samples(), CPU, 9)
    assert_of_completions(batch)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 10, 11], [5, 6, 9, 9], [7, 12, 9, 9]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert batch.multiplicity.tolist() == batch.inputs["attention_mask"].tolist()
    assert batch.source_T.tolist() == [1, 2, 3, 5, 8, 9]


def test_whole_groups_stay_whole():
    samples = make_samples(4, 4)
    for budget in (10_000, 150, 10):
        parts = split(samples, budget, whole_groups=True)
        assert [s.key for part in parts for s in part] == [s.key for s in samples]
        for number in range(4):
            assert sum(any(s.key[0] == number for s in part) for part in parts) == 1
    assert exceeds(samples, 10)
    assert not exceeds(samples, 10_000)


def test_padded_micro_batches_count_their_padding():
    samples = make_samples(4, 4)
    policy = make_policy(make_model("llama"), packing=False)
    for whole_groups in (True, False):
        parts = split(samples, 300, whole_groups=whole_groups, packed=False)
        assert [s.key for part in parts for s in part] == [s.key for s in samples]
        assert len(parts) > 1
        assert all(policy.batch(part).multiplicity.numel() <= 300 for part in parts)
    # A prompt of 2 and completions of 1 and 9: 2 + 0 + 8 packed, 2 rows of 10 padded.
    group = [
        replace(samples[0], key=(0, k), prompt_ids=[5, 6], token_ids=[7] * length)
        for k, length in enumerate((1, 9))
    ]
    assert exceeds(group, 9, packed=True)
    assert not exceeds(group, 10, packed=True)
    assert exceeds(group, 19, packed=False)
    assert not exceeds(group, 20, packed=False)
