"""Rows as they are published elsewhere, and rows that a transform makes."""

import itertools
import json

import pytest
from datasets import Dataset

from rloo.data.dataset_formats import with_conversation, with_reference
from rloo.data.dataset_loading import load_rows
from rloo.data.prompt_dataset import with_prompts
from rloo.data.tokenization import encode_prompt
from support.addons import needs_addons
from support.text import make_tokenizer
from support.training import make_config, make_trainer

USER = {"role": "user", "content": "w1 w2"}
SYSTEM = {"role": "system", "content": "w3"}
ANSWER = {"role": "assistant", "content": "w4"}
HUMAN, GPT = {"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w4"}
TOOL = {"role": "tool", "content": "w5"}


def prompts_of(column, values, template=None, **others):
    rows = Dataset.from_dict({column: values, **others})
    found, note = with_conversation(rows, template)
    return found["prompt"][:], note


def plain(messages):
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


@pytest.mark.parametrize(
    "given, expected",
    [
        ([USER, ANSWER], [USER]),
        ([SYSTEM, USER, ANSWER, USER, ANSWER], [SYSTEM, USER, ANSWER, USER]),
        ([USER], [USER]),
        ([USER, ANSWER, TOOL, ANSWER, ANSWER], [USER, ANSWER, TOOL]),
    ],
)
@pytest.mark.parametrize("column", ["messages", "conversation", "context_messages"])
def test_a_conversation_is_a_prompt_without_the_assistants_last_turn(column, given, expected):
    prompts, note = prompts_of(column, [given, [USER, ANSWER]])
    assert plain(prompts[0]) == expected and plain(prompts[1]) == [USER]
    assert note.startswith(f"prompts are the messages in column '{column}'")
    assert f"(in {1 + (given != expected)} of 2 rows)" in note


def test_sharegpt_has_other_names_and_a_column_for_the_system():
    prompts, _ = prompts_of("conversations", [[HUMAN, GPT], [HUMAN]], system=["w3", ""])
    assert prompts == [[SYSTEM, USER], [USER]]


def test_a_template_that_is_the_column_of_a_conversation_takes_its_messages():
    prompts, _ = prompts_of("messages", [[USER, ANSWER]], "{messages}")
    assert plain(prompts[0]) == [USER]
    rows = Dataset.from_dict({"messages": [[USER, ANSWER]]})
    with pytest.raises(ValueError, match=r"row 0: column 'messages' has messages, with the answer"):
        with_prompts(rows, "Talk: {messages}")


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "Human", "value": "w1 w2"}, {"from": "GPT", "value": "w4"}],
        [{"from": "user", "content": "w1 w2"}, {"from": "bing", "content": "w4"}],
        [{"role": "human", "content": "w1 w2"}, {"role": "AI", "content": "w4"}],
        [{"role": "user", "value": "w1 w2"}, {"role": "model", "value": "w4"}],
        [{"speaker": "user", "text": "w1 w2"}, {"speaker": "assistant", "text": "w4"}],
        json.dumps([USER, ANSWER]),
    ],
)
def test_conversations_have_other_words_for_turns_and_may_be_text(turns):
    for column, template in (("messages", None), ("dialog", "{dialog}")):
        prompts, _ = prompts_of(column, [turns, turns], template)
        assert [plain(prompt) for prompt in prompts] == [[USER], [USER]]
    prompts, _ = prompts_of("prompt", [turns])  # which is not cut
    assert plain(prompts[0]) == [USER, ANSWER]


@pytest.mark.parametrize(
    "value",
    [
        [USER, ANSWER], json.dumps([USER, ANSWER]), {"messages": [USER, ANSWER]},
        [{"user": "w1", "assistant": "w4"}], [[HUMAN, GPT]],
    ],
)  # fmt: skip
def test_turns_are_never_filled_in_as_python_writes_them(value):
    rows = Dataset.from_dict({"said": [value]})
    with pytest.raises(ValueError, match=r"row 0: column 'said' has messages, with the answer"):
        with_prompts(rows, "Talk: {said}")


def test_a_template_is_shown_that_has_the_whole_question():
    rows = Dataset.from_dict({"instruction": ["w1"], "input": ["w2"], "output": ["w4"]})
    text = r"\{instruction\} \{input\}"
    forms = rf"prompt_template: '{text}'; .* '\[\{{role: user, content: \"{text}\"\}}\]'$"
    with pytest.raises(ValueError, match=forms):
        with_prompts(rows, None)


def test_parts_of_text_are_a_text_for_a_model_without_images():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    rendered = [
        encode_prompt([{"role": "user", "content": content}], tokenizer, chat_template_kwargs={})
        for content in ("w1 w2", parts)
    ]
    assert rendered[0] == rendered[1]
    with pytest.raises(ValueError, match="the content of a message is a list"):
        image = [{"role": "user", "content": [*parts, {"type": "image"}]}]
        encode_prompt(image, tokenizer, chat_template_kwargs={})


def test_a_list_that_is_no_conversation_stays_text():
    rows = Dataset.from_dict({"numbers": [[3, 4]], "messages": ["w1"]})
    assert with_conversation(rows, None) == (rows, None)
    assert with_prompts(rows, "{numbers} {messages}")["prompt"][:] == ["[3, 4] w1"]


def test_a_prompt_in_sharegpts_words_is_read_and_not_cut():
    prompts, note = prompts_of("prompt", [[HUMAN, GPT]])
    assert prompts == [[USER, ANSWER]] and note is None
    rows = Dataset.from_dict({"prompt": [[USER, ANSWER]]})  # to be continued, as it says
    assert with_conversation(rows, None) == (rows, None)


@pytest.mark.parametrize(
    "turns, fault",
    [
        ([SYSTEM, ANSWER], "row 1: the conversation has no turn of the user's"),
        ([], "row 1: the conversation has no turn of the user's"),
        ([{"role": None, "content": None}], "row 1: a turn has the keys"),
    ],
)
def test_a_faulty_conversation_is_told_with_its_row(turns, fault):
    with pytest.raises(ValueError, match=f"{fault}.*column 'messages'"):
        prompts_of("messages", [[USER, ANSWER], turns])
    with pytest.raises(ValueError, match="row 1: a turn is from 'narrator'; known are system"):
        prompts_of("conversations", [[HUMAN], [{"from": "narrator", "value": "w1"}]])


VERL = {"reward_model": [{"ground_truth": "7", "style": "rule"}, None], "prompt": ["w1", "w2"]}


@pytest.mark.parametrize(
    "columns, path, expected, noted",
    [
        (VERL, None, ["7", None], "reward_model.ground_truth"),
        (VERL, "reward_model.style", ["rule", None], None),
        ({"label": ["1", "2"], "prompt": ["w1", "w2"]}, None, ["1", "2"], "label"),
        ({"a.b": ["1"], "a": [{"b": "2"}]}, "a.b", ["1"], None),
        ({"a.b": [{"c": "1"}], "a": ["2"]}, "a.b.c", ["1"], None),
        ({"gold": [3], "answer": [4]}, "gold", [3], None),
        ({"solutions": [["1", "2"], ["3"]]}, "solutions.0", ["1", "3"], None),
        ({"reward_model": ['{"ground_truth": "7"}']}, None, ["7"], "reward_model.ground_truth"),
        ({"meta": ['[{"gold": 5}]', None]}, "meta.0.gold", [5, None], None),
    ],
)
def test_references_are_found_where_they_are_published_or_named(columns, path, expected, noted):
    rows, note = with_reference(Dataset.from_dict(columns), path, {"answer"}.__contains__)
    assert rows["answer"][:] == expected
    assert note == (noted and f"the references are those in {noted} (reference)")


def test_a_format_of_some_columns_hides_none():
    rows = Dataset.from_dict({"prompt": ["w1", "w2"], "x": [1, 2]})
    found = load_rows(rows.with_format("numpy", columns=["x"]))
    assert found[0]["prompt"] == "w1" and type(found[0]["x"]).__module__ == "numpy"
    assert load_rows(rows.with_format("numpy"))[1]["x"].item() == 2


def test_references_are_not_looked_for_where_none_is_read_or_one_is_there():
    rows = Dataset.from_dict({"label": ["1"], "solution": ["2"]})
    assert with_reference(rows, None, {"answer"}.__contains__) == (rows, None)
    rows = rows.remove_columns("solution")
    assert with_reference(rows, None, {"label"}.__contains__) == (rows, None)


@pytest.mark.parametrize(
    "path, fault",
    [
        ("rewards", r"no column 'rewards'; the columns are gold, reward_mo"),
        ("golden", r"no column 'golden' \(did you mean gold\?\); the columns are gold, reward_mo"),
        (
            "reward_model.truth",
            "row 0: reference is reward_model.truth, and there is no 'truth'",
        ),
        ("gold.truth", "row 0: reference is gold.truth, and there is no 'truth' in str"),
        ("several.2", "row 0: reference is several.2, and there is no '2' in list"),
    ],
)
def test_a_reference_that_is_not_there_is_told(path, fault):
    columns = {"gold": ["1"], "reward_model": [{"ground_truth": "7"}], "several": [["1", "2"]]}
    with pytest.raises(ValueError, match=fault):
        with_reference(Dataset.from_dict(columns), path, lambda _: True)


@pytest.mark.parametrize("streams", [False, True])
def test_verls_rows_train_as_they_are(streams, tmp_path):
    seen = []

    def reward(completions, answer, **_):
        seen.extend(answer)
        return [float(len(c[0]["content"])) for c in completions]

    rows = Dataset.from_list(
        [
            {
                "data_source": "x",
                "prompt": [{"role": "user", "content": f"w{n} w2"}],
                "reward_model": {"style": "rule", "ground_truth": f"w{n}"},
            }
            for n in range(3)
        ]
    )
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config = make_config(tmp_path, max_steps=1, chat_template=template)
    trainer = make_trainer(config, reward, rows.to_iterable_dataset() if streams else rows)
    trainer.train()
    assert sorted(set(seen)) == ["w0", "w1", "w2"]
    notes = trainer.monitor.notes
    assert any("references are those in reward_model.ground_truth" in note for note in notes)


def check_reference_is_missed(reward, folder):
    rows = Dataset.from_dict({"prompt": ["w1"], "id": [1], "final_answer": ["2"]})
    with pytest.raises(ValueError, match=r"column that has it.*: reference: final_answer$"):
        make_trainer(make_config(folder), reward, rows)


def test_messages_say_which_line_to_add(tmp_path):
    rows = Dataset.from_dict({"id": [1], "problem": ["w1"]})
    with pytest.raises(ValueError, match=r"prompt: prompt_template: '\{problem\}'"):
        with_prompts(rows, None)
    check_reference_is_missed(lambda completions, answer: [0.0 for _ in completions], tmp_path)


@needs_addons
def test_what_a_grader_misses_is_said(tmp_path):
    for reward in ("math", "exact_match", "gsm8k"):
        check_reference_is_missed(reward, tmp_path)


def make_random(rows: Dataset) -> Dataset:
    """A new problem at each access."""
    numbers = itertools.count()

    def draw(batch):
        drawn = [next(numbers) for _ in batch["index"]]
        return {"prompt": [f"w{n} w1" for n in drawn], "answer": [f"w{n}" for n in drawn]}

    rows.set_transform(draw)
    return rows


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_reward_sees_the_row_that_its_prompt_was_made_of(shuffle, tmp_path):
    seen = []

    def reward(prompts, completions, answer, **_):
        seen.extend(zip(prompts, answer, strict=True))
        return [float(len(c)) for c in completions]

    rows = make_random(Dataset.from_dict({"index": list(range(6))}))
    evaluated = make_random(Dataset.from_dict({"index": list(range(3))}))
    config = make_config(tmp_path, max_steps=3, shuffle_dataset=shuffle, eval_on_start=True)
    make_trainer(config, reward, rows, eval_dataset=evaluated).train()
    assert len(seen) >= 36
    assert all(prompt.split()[0] == answer for prompt, answer in seen)
    assert len(set(seen)) <= 9  # each of both sets was read once


def test_what_a_transform_gives_and_no_column_can_hold_is_told():
    rows = Dataset.from_dict({"index": [1]})
    rows.set_transform(lambda batch: {"prompt": ["w1"], "tool": [object()]})
    with pytest.raises(ValueError, match=r"transform gives cannot be kept.*Use map"):
        load_rows(rows)
