import collections
import json
from functools import partial

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rloo.data.dataset_loading import load_rows
from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit, with_prompts
from rloo.data.tokenization import encode_prompt, encode_prompts

CHAT = (
    "{% if system %}[{{ system }}]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}{% if 'tool_calls' in m %}!{% endif %}/"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer(chat_template=CHAT, begin=True):
    """One token a character; '^' begins every text when `begin`."""
    vocabulary = {chr(code): code for code in range(32, 127)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single="^ $A", special_tokens=[("^", ord("^"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", bos_token="^")
    tokenizer.chat_template = chat_template
    return tokenizer


def text_of(ids):
    return "".join(chr(i) for i in ids)


def encode(content, tokenizer=None, **kwargs):
    return text_of(
        encode_prompt(content, tokenizer or make_tokenizer(), chat_template_kwargs=kwargs)
    )


def user(content):
    return {"role": "user", "content": content}


def source(texts, *, limit=100, overlong="error", **options):
    rows = Dataset.from_dict({"prompt": texts, "answer": list(range(len(texts)))})
    options = {"seed": 1, **options}
    return PromptDataset(rows, letters, limit=PromptLengthLimit(limit, overlong), **options)


def letters(texts):
    return [[ord(letter) for letter in text] for text in texts]


# Reading


def test_a_part_of_a_split_is_read_as_from_the_hub(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(10)))
    rows = load_rows(file)
    for spec in (file, rows, DatasetDict({"train": rows})):
        assert load_rows(spec, split="train[:80%]")["prompt"][:] == list("01234567")
        assert load_rows(spec, split="train[80%:]")["prompt"][:] == list("89")
        assert load_rows(spec, split="train[-3:-1]")["prompt"][:] == list("78")
        with pytest.raises(ValueError, match=r"no part 'train\[a:\]'.*written 'train\[:90%\]'"):
            load_rows(spec, split="train[a:]")
        with pytest.raises(ValueError, match="no split 'test'"):
            load_rows(spec, split="test[:2]")
        with pytest.raises(ValueError, match="0 rows"):
            load_rows(spec, split="train[:1%]")
    stream = IterableDatasetDict({"train": rows.to_iterable_dataset()})
    with pytest.raises(ValueError, match="a stream has no parts"):
        load_rows(stream, split="train[:80%]")


def test_every_file_format_gives_the_same_rows(tmp_path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b\nNA", "answer": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text("\n".join(map(json.dumps, rows)))
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('prompt,answer\na,1\n"b\nNA",2\n')
    for name in ("a.jsonl", "a.json", "b.json", "a.parquet", "a.csv"):
        assert load_rows(tmp_path / name).to_list() == rows, name


def test_a_byte_order_mark_and_newlines_in_values_across_blocks_are_read(tmp_path):
    for name, text in (("a.json", '[{"prompt": "a"}]'), ("a.jsonl", '{"prompt": "a"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load_rows(tmp_path / name).to_list() == [{"prompt": "a"}]
    value = "x" * 50 + "\n" + "y" * 50
    (tmp_path / "a.csv").write_text("prompt,answer\n" + f'"{value}",1\n' * 20_000)  # 2 MB
    assert set(load_rows(tmp_path / "a.csv")["prompt"]) == {value}


def test_a_dataset_is_returned_as_it_is_and_a_dict_gives_the_split():
    rows = Dataset.from_dict({"prompt": ["a"]})
    assert load_rows(rows) is rows
    assert load_rows(DatasetDict({"test": rows}), split="test") is rows
    with pytest.raises(ValueError, match=r"no split 'train'.*it has test"):
        load_rows(DatasetDict({"test": rows}))


def test_a_folder_from_save_to_disk_is_read(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"]})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"test": rows}).save_to_disk(tmp_path / "many")
    assert load_rows(str(tmp_path / "one")).to_list() == [{"prompt": "a"}]
    assert load_rows(tmp_path / "many", split="test").to_list() == [{"prompt": "a"}]


def test_a_folder_of_files_gives_the_files_of_the_split(tmp_path):
    for name in ("train-00000", "train-00001", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    (tmp_path / "LICENSE").write_text("free")
    assert load_rows(tmp_path)["prompt"][:] == ["train-00000", "train-00001"]
    assert load_rows(tmp_path, split="test")["prompt"][:] == ["test"]
    with pytest.raises(ValueError, match=r"no split 'validation'.*test\.jsonl"):
        load_rows(tmp_path, split="validation")


def test_what_has_no_splits_is_never_taken_for_the_test_split(tmp_path):
    (tmp_path / "easy.jsonl").write_text('{"prompt": "easy"}')
    (tmp_path / "hard.jsonl").write_text('{"prompt": "hard"}')
    assert load_rows(tmp_path)["prompt"][:] == ["easy", "hard"]
    for spec in (tmp_path, tmp_path / "easy.jsonl", Dataset.from_dict({"prompt": ["a"]})):
        with pytest.raises(ValueError, match="no split 'test'"):
            load_rows(spec, split="test")


def test_a_column_that_the_first_row_lacks_is_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "hint": "h"}\n')
    assert load_rows(tmp_path / "a.jsonl")["hint"][:] == [None, "h"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"a\.jsonl: line 2: Expecting value"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"a\.jsonl: line 2: .*utf-8"),
        ("a.jsonl", '{"prompt": "a"}\n["b"]\n', r"a\.jsonl: line 2 is a list"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 1}\n', r"values of 'prompt' have different types"),
        ("a.json", '[{"prompt": "a"},\n 7]', r"a\.json: element 1 is a int"),
        ("a.json", '[{"prompt": "a"},\n', r"a\.json: .*line 2"),
        (
            "a.csv",
            "prompt,answer\na,1\nb\n",
            r"a\.csv cannot be loaded: .*2 columns, got 1",
        ),
        ("a.csv", 'prompt\na\n"b\nc\n', r"a\.csv: line 3 has a value that begins with a quote and"),
        ("a.csv", 'prompt,x\n"a,1\n"b",2\n', r"a\.csv: line 2 has a value that begins with a quo"),
        ("a.csv", "prompt\na\nb\0c\n", r"a\.csv: line 3 has a NUL byte, which is no text \(datase"),
        *(
            (
                "a.jsonl",
                '{"prompt": "a"}\n{"prompt": "b", "x": ' + "[" * deep + "]" * deep + "}\n",
                r"a\.jsonl: line 2 has a value in column 'x' that is nested deeper than 20 levels",
            )
            for deep in (22, 100, 200, 400)
        ),
        ("a.json", '[{"x": ' + '{"a":' * 60 + "1" + "}" * 60 + "}]", r"json: element 0 .* deeper"),
        ("a.parquet", "no parquet", r"a\.parquet cannot be loaded: "),
        ("a.txt", "a", r"a\.txt is not a \.jsonl, \.json, \.parquet, \.csv file"),
        ("a.jsonl", "\n", r"a\.jsonl has 0 rows; training needs at least 1 \(dataset\)"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / name)


def test_quotes_of_a_csv_and_levels_of_an_object_are_taken_as_far_as_they_are_clear(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbf"prompt",x\r\n"a ""b"", c\nd",5" wide\r\n"","""q"""\r\n'
    )
    wanted = [{"prompt": 'a "b", c\nd', "x": '5" wide'}, {"prompt": "", "x": '"q"'}]
    assert load_rows(tmp_path / "a.csv").to_list() == wanted
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "x": ' + "[" * 20 + "1" + "]" * 20 + "}")
    (value,) = load_rows(tmp_path / "a.jsonl")["x"][:]
    assert str(value) == "[" * 20 + "1" + "]" * 20


def test_a_faulty_dataset_argument_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the dataset is a list"):
        load_rows([{"prompt": "a"}])
    with pytest.raises(ValueError, match=r"no\.jsonl does not exist"):
        load_rows("no.jsonl")
    with pytest.raises(ValueError, match=r"has no \.jsonl, \.json, \.parquet, \.csv file"):
        load_rows(tmp_path)
    with pytest.raises(ValueError, match="dataset_config"):
        load_rows(tmp_path, config_name="main")


def test_a_hub_id_goes_to_the_hub_with_its_configuration_and_split(monkeypatch):
    calls = []

    def fake(*args, **kwargs):
        calls.append((args, kwargs))
        if args[0] == "nobody/nothing":
            raise ConnectionError("no network")
        return Dataset.from_dict({"question": ["1+1"]})

    monkeypatch.setattr("rloo.data.dataset_loading.load_dataset", fake)
    load_rows("openai/gsm8k", split="test", config_name="main")
    assert calls == [(("openai/gsm8k", "main"), {"split": "test"})]
    with pytest.raises(ValueError, match=r"no file or folder here.*no network"):
        load_rows("nobody/nothing")


# Templates


def test_a_template_fills_in_columns_as_text_and_nothing_else():
    rows = Dataset.from_dict({"q": ["{a.__class__} {}"], "a": [[1, 2]]})
    filled = with_prompts(rows, r"Q {q} from {a}: \boxed{} {{q}}")
    assert filled[0]["prompt"] == r"Q {a.__class__} {} from [1, 2]: \boxed{} {q}"
    assert filled.column_names == ["q", "a", "prompt"]


def test_a_template_may_be_messages_and_may_wrap_the_prompt_there_is():
    rows = Dataset.from_dict({"prompt": ["1+1"]})
    template = [{"role": "system", "content": "Add."}, user("{prompt}=")]
    assert with_prompts(rows, template)[0]["prompt"] == [template[0], user("1+1=")]


def test_without_a_template_the_prompt_column_is_taken_or_asked_for():
    rows = Dataset.from_dict({"prompt": ["a"]})
    assert with_prompts(rows, None) is rows
    with pytest.raises(ValueError, match=r"columns are question, answer.*'\{question\}'"):
        with_prompts(Dataset.from_dict({"question": ["a"], "answer": ["b"]}), None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{questoin}", r"\{questoin\}, which is no column \(did you mean \{question\}\?\)"),
        ("{question.__class__}", "which is no column"),
        ("{hint}", "row 1: column 'hint' is empty"),
        (7, "prompt_template is a int"),
        ([{"content": "a"}], "a message needs the keys role and content"),
    ],
)
def test_a_faulty_template_is_refused(template, message):
    rows = Dataset.from_dict({"question": ["a", "b"], "hint": ["h", None]})
    with pytest.raises(ValueError, match=message):
        with_prompts(rows, template)


def test_a_column_of_another_meaning_is_not_proposed():
    rows = Dataset.from_dict({"task": ["a"], "solution": ["b"]})
    with pytest.raises(ValueError, match=r"which is no column\. The columns are task, solution; "):
        with_prompts(rows, "{question}")


# Tokenising


def test_a_string_keeps_the_tokenizers_own_beginning_and_never_gets_two():
    assert encode("ab") == "^ab"
    assert encode("^ab") == "^ab"
    assert encode("ab", make_tokenizer(begin=False)) == "ab"
    assert encode("") == "^"


def test_messages_go_through_the_chat_template_with_its_arguments():
    assert encode([user("hi")]) == "u:hi/a:"
    assert encode([user("hi")], system="be brief") == "[be brief]u:hi/a:"


def test_a_last_message_of_the_assistant_is_continued():
    assert encode([user("hi"), {"role": "assistant", "content": "so"}]) == "u:hi/a:so"


def test_keys_that_other_messages_have_do_not_reach_the_template():
    # Arrow gives every row of the column every key.
    call = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f"}]}
    rows = Dataset.from_dict({"prompt": [[user("hi"), call, {"role": "tool", "content": "1"}]]})
    assert rows[0]["prompt"][0] == {**user("hi"), "tool_calls": None}
    assert encode(rows[0]["prompt"]) == "u:hi/a:x!/t:1/a:"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (7, "the prompt is a int"),
        (None, "the prompt is a NoneType"),
        ([], "empty list of messages"),
        (["hi"], "this one is str"),
        ([{"from": "human", "value": "hi"}], r"needs the keys role and content.*'from', 'value'"),
        ([{"role": "human", "content": "hi"}], "role 'human'; roles are system"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of a message is a list"),
        ([{"role": "system", "content": "hi"}], "template refuses the messages: no system here"),
    ],
)
def test_a_faulty_prompt_is_refused_with_its_row(content, message):
    with pytest.raises(ValueError, match=message):
        encode(content)


def test_prompts_without_tokens_or_without_a_chat_template_are_refused():
    with pytest.raises(ValueError, match="0 tokens"):
        encode("", make_tokenizer(begin=False))
    with pytest.raises(ValueError, match="no chat template"):
        encode([user("hi")], make_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="chat_template_kwargs has tokenize"):
        encode([user("hi")], tokenize=False)


# The cursor


def test_a_fault_in_a_row_is_found_at_construction_and_names_the_row():
    rows = Dataset.from_dict({"prompt": ["a", "b", ""]})
    tokenizer = make_tokenizer(begin=False)
    with pytest.raises(ValueError, match="row 2: the prompt has 0 tokens"):
        PromptDataset(
            rows,
            partial(encode_prompts, processing_class=tokenizer, chat_template_kwargs={}),
            seed=0,
            limit=PromptLengthLimit(9),
        )


@pytest.mark.slow
def test_rows_that_are_tokenised_together_are_what_each_is_alone():
    tokenizer = make_tokenizer()
    texts = ["a" * (1 + row % 7) if row % 3 else f"^{row}" for row in range(2500)]
    encode_all = partial(encode_prompts, processing_class=tokenizer, chat_template_kwargs={})
    made = PromptDataset(
        Dataset.from_dict({"prompt": texts}),
        encode_all,
        seed=0,
        shuffle=False,
        limit=PromptLengthLimit(9),
    )
    tokens = [prompt.token_ids for prompt in made.next(len(texts))]
    assert tokens == [encode_prompt(text, tokenizer, chat_template_kwargs={}) for text in texts]
    turns = [texts[0], [user("a")], [user("b")], *texts[1:3]]
    assert [*encode_all(turns)] == [next(encode_all([turn])) for turn in turns]
    letters_alone = make_tokenizer(begin=False)
    faulty = Dataset.from_dict({"prompt": [*["a"] * 2100, "", "b"]})
    with pytest.raises(ValueError, match="row 2100: the prompt has 0 tokens"):
        PromptDataset(
            faulty,
            partial(encode_prompts, processing_class=letters_alone, chat_template_kwargs={}),
            seed=0,
            limit=PromptLengthLimit(9),
        )


def test_rows_may_be_formatted_but_not_as_tables():
    rows = Dataset.from_dict({"prompt": ["ab", "c"]})
    encode_all = partial(encode_prompts, processing_class=make_tokenizer(), chat_template_kwargs={})
    for form in (None, "numpy", "torch"):
        made = PromptDataset(rows.with_format(form), encode_all, seed=0, limit=PromptLengthLimit(9))
        assert sorted(p.token_ids for p in made.next(2)) == [[94, 97, 98], [94, 99]]
    with pytest.raises(ValueError, match="row 0: the prompt is a Series"):
        PromptDataset(rows.with_format("pandas"), encode_all, seed=0, limit=PromptLengthLimit(9))


def test_a_prompt_carries_its_row_its_tokens_and_the_other_columns():
    (prompt,) = source(["ab"]).next(1)
    assert (prompt.id, prompt.token_ids, prompt.content) == (0, [97, 98], "ab")
    assert prompt.columns == {"answer": 0}
    assert type(prompt.token_ids) is list


def test_each_epoch_has_every_row_once_in_another_order_and_no_tail_is_lost():
    prompts = source([chr(97 + i) for i in range(10)])
    drawn = [prompt.id for _ in range(5) for prompt in prompts.next(4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert drawn[:10] != list(range(10))
    assert prompts.epoch == 2.0
    prompts.next(5)
    assert prompts.epoch == 2.5


def test_the_order_depends_on_seed_and_epoch_alone():
    texts = [chr(97 + i) for i in range(20)]
    by_ones = source(texts)
    ones = [by_ones.next(1)[0].id for _ in range(60)]
    assert ones == [prompt.id for prompt in source(texts).next(60)]
    assert ones != [prompt.id for prompt in source(texts, seed=2).next(60)]
    key = np.array([1, 2], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(20)
    assert ones[40:] == sorted(range(20), key=raw.__getitem__)


def test_shuffling_puts_every_row_first_equally_often():
    firsts = collections.Counter(
        source(["a", "b", "c", "d"], seed=seed).next(1)[0].id for seed in range(200)
    )
    # Expected 50 each, standard deviation 6.1.
    assert all(20 < firsts[row] < 80 for row in range(4))


def test_without_shuffling_rows_come_in_order():
    assert [prompt.id for prompt in source(["a", "b", "c"], shuffle=False).next(5)] == [
        0,
        1,
        2,
        0,
        1,
    ]


def test_all_prompts_are_in_order_and_do_not_move_the_cursor():
    prompts = source(["a", "b", "c"])
    assert [prompt.id for prompt in prompts.all_prompts()] == [0, 1, 2]
    assert [prompt.id for prompt in prompts.all_prompts(2)] == [0, 1]
    assert prompts.epoch == 0.0


@pytest.mark.parametrize("drawn", [0, 1, 6, 7, 8, 20])
def test_a_restored_cursor_goes_on_where_the_saved_one_was(drawn):
    texts = [chr(97 + i) for i in range(7)]
    saved = source(texts)
    saved.next(drawn)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = source(texts)
    restored.load_state_dict(state)
    assert restored.epoch == saved.epoch
    assert restored.next(15) == saved.next(15)


def test_a_position_in_other_prompts_is_refused_and_says_what_differs():
    state = source(["a", "bcd"]).state_dict()
    for other, difference in [
        (source(["a", "bcd"], seed=2), "seed is 1 in the checkpoint and 2 now"),
        (source(["a", "bcd"], shuffle=False), "shuffle is True in the checkpoint"),
        (
            source(["a", "bcd"], limit=2, overlong="drop"),
            "prompts is 2 in the checkpoint and 1 now",
        ),
        (source(["a", "bcd", "e"]), "prompts is 2 in the checkpoint and 3 now"),
        (source(["a", "bce"]), "content is"),
    ]:
        with pytest.raises(ValueError, match=difference):
            other.load_state_dict(state)
    rows = Dataset.from_dict({"prompt": ["a", "bcd"], "result": [0, 1]})
    renamed = PromptDataset(
        rows, lambda texts: [[1] for _ in texts], seed=1, limit=PromptLengthLimit(9)
    )
    with pytest.raises(ValueError, match=r"columns is .*answer.*result"):
        renamed.load_state_dict(state)


def test_the_content_is_the_same_however_the_rows_are_stored(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [0, 1, 2]})
    rows.save_to_disk(tmp_path)
    reordered = Dataset.from_dict({"answer": [9, 0, 1, 2], "prompt": ["z", "a", "b", "c"]})
    states = [
        PromptDataset(
            r, lambda texts: [[1] for _ in texts], seed=1, limit=PromptLengthLimit(9)
        ).state_dict()
        for r in (rows, load_rows(tmp_path), reordered.select([1, 2, 3]))
    ]
    assert states[0] == states[1] == states[2]


def test_overlong_prompts_are_an_error_that_names_rows_lengths_and_choices():
    texts = ["ok"] + ["x" * n for n in range(4, 11)]
    with pytest.raises(ValueError) as error:
        source(texts, limit=3)
    assert str(error.value) == (
        "7 prompts have more than 3 tokens (row 1: 4, row 2: 5, row 3: 6, row 4: 7, row 5: 8, "
        "...). Choose: a larger max_prompt_length, overlong_prompts 'drop' (leave these rows out) "
        "or 'left' (keep the last tokens) (max_prompt_length, overlong_prompts)"
    )


def test_dropped_prompts_are_counted_and_the_others_keep_their_numbers():
    prompts = source(["ab", "abcd", "abc"], limit=3, overlong="drop")
    assert (len(prompts), prompts.dropped, prompts.truncated) == (2, 1, 0)
    assert sorted(prompt.id for prompt in prompts.next(2)) == [0, 2]
    assert [prompt.id for prompt in prompts.all_prompts()] == [0, 2]
    with pytest.raises(ValueError, match="no prompt of 1 row has at most 3 tokens"):
        source(["abcd"], limit=3, overlong="drop")


def test_cut_prompts_keep_their_last_tokens_and_are_counted():
    prompts = source(["ab", "abcd"], limit=3, overlong="left")
    assert (len(prompts), prompts.dropped, prompts.truncated) == (2, 0, 1)
    assert [text_of(prompt.token_ids) for prompt in prompts.all_prompts()] == ["ab", "bcd"]
    assert prompts.all_prompts()[1].content == "abcd"


def test_a_limit_below_one_token_is_refused():
    with pytest.raises(ValueError, match="max_prompt_length is 0"):
        source(["a"], limit=0)
