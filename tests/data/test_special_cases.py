"""Tokenizers that add to the end, prompts that are huge, templates that fail."""

import time

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit
from rloo.data.tokenization import (
    encode_prompt,
    longest_token,
    note_of_special_tokens,
    tokens_behind,
)
from support.models import make_model
from support.training import make_config, make_trainer

WORDS = ["<s>", "</s>", "a", "w1", "w2"]


def make_ending(single: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    "single, expected, behind",
    [
        ("$A </s>", [3, 4], [1]),
        ("<s> $A </s> </s>", [0, 3, 4], [1, 1]),
        ("<s> $A", [0, 3, 4], []),
        ("$A", [3, 4], []),
    ],
)
def test_a_prompt_has_no_special_tokens_behind_it(single, expected, behind):
    tokenizer = make_ending(single)
    assert encode_prompt("w1 w2", tokenizer, chat_template_kwargs={}) == expected
    assert tokens_behind(tokenizer) == behind
    notes = note_of_special_tokens(["w1"], tokenizer)
    assert [note.count("</s>") for note in notes] == ([len(behind)] if behind else [])
    assert note_of_special_tokens([[{"role": "user", "content": "a"}]], tokenizer) == []
    # What the text itself ends with stays.
    assert encode_prompt("w1 </s>", tokenizer, chat_template_kwargs={})[-1] == 1


def words(texts):
    for text in texts:
        yield [int(word) for word in text.split()]


def make_source(texts, overlong, **options):
    rows = Dataset.from_dict({"prompt": texts})
    return PromptDataset(
        rows, words, seed=0, limit=PromptLengthLimit(4, overlong, max_characters=40), **options
    )


HUGE = ["1 2", "3 " * 21, "4"]


def test_a_huge_prompt_is_told_with_its_row_and_not_tokenised():
    with pytest.raises(ValueError, match=r"^row 1: the prompt has 42 characters, more than 4"):
        make_source(HUGE, "error")
    source = make_source(["1 2", "x " * 21, "4"], "drop")  # x would be no number
    assert (source.dropped, source.lengths) == (1, [2, 1])
    assert [p.id for p in source.all_prompts()] == [0, 2]
    source = make_source(HUGE, "left")
    assert source.truncated == 1
    assert source.all_prompts()[1].token_ids == [3, 3, 3, 3]


def test_a_faulty_row_behind_a_dropped_one_has_its_number():
    def encode(texts):
        for text in texts:
            if text == "bad":
                raise ValueError("no words")
            yield [1]

    rows = Dataset.from_dict({"prompt": ["1", "3 " * 21, "bad"]})
    with pytest.raises(ValueError, match="row 2: no words"):
        PromptDataset(rows, encode, seed=0, limit=PromptLengthLimit(4, "drop", max_characters=40))


def test_a_run_refuses_twenty_megabytes_at_once(tmp_path):
    rows = Dataset.from_dict({"prompt": ["w1", "w2 " * 7_000_000]})
    began = time.perf_counter()
    model = make_model("qwen3")
    model.config.max_position_embeddings = 64
    with pytest.raises(ValueError, match="row 1: the prompt has 21,000,000 characters"):
        make_trainer(make_config(tmp_path), rows=rows, model=model)
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize(
    "template, fault",
    [
        ("{% for i in range(999999999) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_told_with_the_row(template, fault, tmp_path):
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1"}]]})
    with pytest.raises(ValueError, match=rf"row 0: the chat template cannot render .*{fault}"):
        make_trainer(make_config(tmp_path, chat_template=template), rows=rows)


def test_the_longest_token_is_counted_in_characters():
    assert longest_token(make_ending("$A")) == 4
