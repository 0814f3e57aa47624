"""Streams: the cursor by literal rows, training from one, and going on to the last bit."""

import json

import pytest
from datasets import Dataset, IterableDataset, IterableDatasetDict

from rloo.data import iterable_dataset as module
from rloo.data.iterable_dataset import IterablePromptDataset
from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit
from support.markers import in_pairs
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    weights,
    without_times,
)


@pytest.fixture
def block(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)


def encode(texts):
    return [list(text.encode()) for text in texts]


def make_source(rows, *, seed=0, shuffle=False, limit=20, overlong="error"):
    def source_of(block, block_seed):
        most = PromptLengthLimit(limit, overlong, may_be_empty=True)
        return PromptDataset(block, encode, seed=block_seed, shuffle=shuffle, limit=most)

    return IterablePromptDataset(rows, source_of, seed=seed)


def numbered(count, **columns):
    """A stream of p0, p1, ... out of a function, without known columns."""

    def rows():
        for number in range(count):
            yield {"prompt": f"p{number}", **columns}

    return IterableDataset.from_generator(rows)


def texts(prompts):
    return [prompt.content for prompt in prompts]


def test_rows_come_in_order_and_the_next_pass_begins_where_the_stream_ends(block):
    source = make_source(numbered(6, answer=7))
    prompts = source.next(5) + source.next(4)
    assert texts(prompts) == ["p0", "p1", "p2", "p3", "p4", "p5", "p0", "p1", "p2"]
    assert [(p.epoch, p.id) for p in prompts] == [
        *((0, number) for number in range(6)),
        *((1, number) for number in range(3)),
    ]
    assert prompts[5].columns == {"answer": 7}
    assert prompts[5].token_ids == [112, 53]


def test_epochs_are_passes_that_are_complete(block):
    source = make_source(numbered(6))
    seen = [source.epoch]
    for _ in range(3):
        source.next(3)
        seen.append(source.epoch)
    assert seen == [0.0, 0.0, 1.0, 1.0]


def test_rows_are_shuffled_within_their_block_anew_in_every_pass(block):
    source = make_source(numbered(8), shuffle=True)
    passes = [texts(source.next(8)) for _ in range(4)]
    for one in passes:
        assert sorted(one[:4]) == ["p0", "p1", "p2", "p3"]
        assert sorted(one[4:]) == ["p4", "p5", "p6", "p7"]
    assert len({tuple(one) for one in passes}) == 4
    assert texts(make_source(numbered(8), shuffle=True).next(8)) == passes[0]
    assert texts(make_source(numbered(8), shuffle=True, seed=1).next(8)) != passes[0]


def buffered():
    return Dataset.from_dict({"prompt": [f"p{n}" for n in range(11)]}).to_iterable_dataset()


STREAMS = {
    "function": lambda: numbered(11),
    "shards": lambda: Dataset.from_dict(
        {"prompt": [f"p{n}" for n in range(11)]}
    ).to_iterable_dataset(num_shards=3),
    "mapped": lambda: numbered(11).map(lambda row: {"prompt": row["prompt"] + "!"}),
    # datasets restores neither its buffer nor what was in it.
    "buffer": lambda: buffered().shuffle(seed=3, buffer_size=7),
}


@pytest.mark.parametrize(("name", "drawn"), in_pairs(STREAMS, [0, 1, 4, 7, 11, 15, 26]))
def test_a_restored_cursor_goes_on_where_the_saved_one_was(block, name, drawn):
    first = make_source(STREAMS[name](), shuffle=True)
    first.next(drawn)
    state = json.loads(json.dumps(first.state_dict()))
    expected = first.next(20)
    second = make_source(STREAMS[name](), shuffle=True)
    second.load_state_dict(state)
    assert second.next(20) == expected
    assert second.epoch == first.epoch


def test_a_position_in_another_stream_is_refused(block):
    source = make_source(numbered(9))
    source.next(6)
    other = make_source(IterableDataset.from_generator(lambda: ({"prompt": "q"} for _ in range(9))))
    with pytest.raises(ValueError, match="the saved position is in other prompts"):
        other.load_state_dict(source.state_dict())


def test_overlong_prompts_are_refused_dropped_or_cut(block):
    rows = IterableDataset.from_generator(
        lambda: ({"prompt": "x" * (9 if n in (0, 4, 5, 6, 7) else 2)} for n in range(9))
    )
    with pytest.raises(ValueError, match=r"in the stream's rows from 0 on.*1 prompt has more"):
        make_source(rows, limit=3)
    source = make_source(rows, limit=3, overlong="drop")
    assert [(p.epoch, p.id) for p in source.next(5)] == [(0, 1), (0, 2), (0, 3), (0, 8), (1, 1)]
    assert source.dropped == 6  # one of them is met again in the second pass
    cut = make_source(rows, limit=3, overlong="left")
    assert texts(cut.next(1)) == ["x" * 9]
    assert cut.truncated == 1
    with pytest.raises(ValueError, match="all prompts of the stream were too long and dropped"):
        make_source(rows, limit=1, overlong="drop")


def test_a_stream_without_rows_is_refused():
    with pytest.raises(ValueError, match="the stream has 0 rows"):
        make_source(IterableDataset.from_generator(lambda: iter(())))


# -- training -------------------------------------------------------------------------------------


def test_training_needs_the_number_of_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps is -1 and the dataset is a stream"):
        make_trainer(make_config(tmp_path, max_steps=-1), rows=ROWS.to_iterable_dataset())


def test_a_stream_trains_exactly_as_the_same_rows_in_memory(tmp_path):
    results = []
    for name, rows in (("rows", ROWS), ("stream", ROWS.to_iterable_dataset())):
        config = make_config(tmp_path / name, shuffle_dataset=False, max_steps=6)
        trainer = make_trainer(config, rows=rows)
        trainer.train()
        table = [{**row, "epoch": None} for row in without_times(metrics_of(config))]
        results.append((weights(trainer), table))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert trainer.state.epoch == 1.0


def test_a_split_of_streams_is_chosen_by_name(tmp_path):
    rows = IterableDatasetDict({"train": ROWS.to_iterable_dataset(), "test": numbered(3)})
    trainer = make_trainer(make_config(tmp_path, dataset_split="train"), rows=rows)
    assert {len(p.token_ids) for p in trainer._source.next(12)} == {3, 4, 5, 6}


def test_a_reward_gets_the_columns_of_a_stream_and_a_missing_one_is_refused_at_once(tmp_path):
    seen = []

    def reward(completions, answer, **_):
        seen.extend(answer)
        return count_words(completions)

    rows = ROWS.add_column("answer", list(range(12))).to_iterable_dataset()
    make_trainer(
        make_config(tmp_path / "a", max_steps=1, shuffle_dataset=False), reward, rows
    ).train()
    assert seen == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(ValueError, match="requires the parameter 'answer'"):
        make_trainer(make_config(tmp_path / "b"), reward, ROWS.to_iterable_dataset())


def test_a_template_makes_the_prompts_of_a_stream(tmp_path):
    rows = ROWS.rename_column("prompt", "question").to_iterable_dataset()
    config = make_config(tmp_path, prompt_template="w1 {question}", shuffle_dataset=False)
    prompts = make_trainer(config, rows=rows)._source.next(2)
    assert texts(prompts) == ["w1 w0 w1 w2", "w1 w1 w2 w3 w4"]
