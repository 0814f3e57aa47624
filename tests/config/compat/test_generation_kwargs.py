"""Sampling options: generation_kwargs, stop strings, evaluation's own; prompts and printing."""

from __future__ import annotations

import functools
import io
import json
import warnings
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import GenerationConfig

from rloo import RLOOConfig, RLOOTrainer
from rloo.config.compat import generation_kwargs as generation
from rloo.config.compat.unsupported import WITHOUT_EFFECT
from rloo.data.tokenization import encode_prompt
from rloo.engines.hf_engine import HFEngine
from rloo.engines.native.native_engine import NativeEngine
from rloo.engines.sampling import StopStringMatcher
from rloo.model.policy import Policy
from rloo.tracking.sample_text import completions_table
from rloo.trainer.build import make_sampling
from rloo.trainer.prompt_loading import prompt_limit
from rloo.types import Completion, Group, Prompt, Sampling
from support.models import make_model
from support.text import CHAT_TEMPLATE, make_tokenizer

ENGINES = {
    "native": NativeEngine,
    "module": functools.partial(NativeEngine, fused=False),
    "hf": HFEngine,
}
TOKENIZER = make_tokenizer()
ROWS = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(6)]})


def decode(rows: list[list[int]]) -> list[str]:
    return TOKENIZER.batch_decode(rows)


def make_prompts(number: int = 4) -> list[Prompt]:
    return [Prompt(i, [5, 6, 7 + i], "") for i in range(number)]


def count_words(completions, **_):
    return [float(sum(int(word[1:]) < 40 for word in c.split())) for c in completions]


def make_trainer(folder: Path, **options) -> RLOOTrainer:
    defaults = {
        "output_dir": str(folder / "run"),
        "bf16": False,
        "gradient_checkpointing": False,
        "num_generations": 4,
        "num_prompts": 3,
        "max_steps": 2,
        "max_completion_length": 12,
        "learning_rate": 1e-2,
        "seed": 7,
        "disable_tqdm": True,
        "num_threads": 1,
        "save_strategy": "no",
    }
    return RLOOTrainer(
        model=make_model("qwen3"),
        reward_funcs=count_words,
        args=RLOOConfig(**{**defaults, **options}),
        train_dataset=ROWS,
        eval_dataset=ROWS.select(range(2)),
        processing_class=make_tokenizer(),
    )


def records(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


# -- generation_kwargs ----------------------------------------------------------------------------


def test_generation_kwargs_win_over_the_options_and_become_them():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_new_tokens": 33,
        "stop_strings": "END",
        "do_sample": True,
        "num_beams": 1,
    }
    config = RLOOConfig(temperature=0.9, top_p=0.5, generation_kwargs=given)
    assert (config.temperature, config.top_p, config.top_k) == (0.5, 0.9, 7)
    assert (config.min_p, config.repetition_penalty) == (0.1, 1.2)
    assert (config.max_completion_length, config.stop_strings) == (33, ["END"])
    assert config.generation_kwargs == given
    assert RLOOConfig(**config.to_dict()) == config


def test_null_in_generation_kwargs_switches_a_filter_off():
    given = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "num_beams": None}
    config = RLOOConfig(temperature=0.9, top_p=0.5, top_k=3, min_p=0.2, generation_kwargs=given)
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (1.0, 1.0, 0, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "num_beams is 4; completions are sampled one token after the other"),
        ({"length_penalty": 0.8}, "length_penalty is 0.8; completions are sampled one token"),
        ({"penalty_alpha": 0.6}, "penalty_alpha is 0.6; completions are sampled one token"),
        ({"do_sample": False}, "do_sample is False; training samples from the policy"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3; .*num_generations"),
        ({"max_length": 100}, "max_length is 100; the longest completion is max_new_tokens"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size is 2; the filters of this version"),
        ({"suppress_tokens": [3]}, r"suppress_tokens is \[3\]; the filters of this version"),
        ({"min_new_tokens": 4}, "min_new_tokens is 4; a completion ends when the policy ends it"),
        ({"temprature": 0.5}, "unknown option generation_kwargs.temprature; did you mean temper"),
        ({"max_tokens": 5}, "unknown option generation_kwargs.max_tokens; here it is called max_n"),
        ({"temperature": "warm"}, "generation_kwargs.temperature is 'warm'; it must be a number"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"eos_token_id": -1}, "eos_token_id is -1; it must be a token"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]; it must be a token"),
        ({"stop_strings": [""]}, "stop_strings contains an empty text"),
    ],
)
def test_what_generation_kwargs_cannot_ask_for_is_refused_before_anything_runs(given, message):
    with pytest.raises(ValueError, match=message):
        RLOOConfig(generation_kwargs=given)


def test_generation_kwargs_that_cannot_matter_are_accepted_with_a_warning():
    with pytest.warns(UserWarning, match="use_cache has no effect: the engines keep their own"):
        RLOOConfig(generation_kwargs={"use_cache": False})


def test_every_field_of_transformers_generation_config_is_known():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - {"transformers_version"} <= set(generation._KNOWN)


def test_eos_token_id_replaces_the_models_own():
    config = RLOOConfig(generation_kwargs={"eos_token_id": [5, 9]})
    assert make_sampling(config, (2,)).stop_token_ids == (5, 9)
    assert make_sampling(RLOOConfig(), (2,)).stop_token_ids == (2,)
    assert make_sampling(RLOOConfig(generation_kwargs={"eos_token_id": 5}), ()).stop_token_ids == (
        5,
    )


def test_the_temperature_of_generation_kwargs_is_that_of_all_log_probs(tmp_path, monkeypatch):
    seen = []
    original = Policy.logprobs

    def watched(self, batch, *args, **options):
        result = original(self, batch, *args, **options)
        seen.append((batch, result.logprobs.detach().clone(), self.model.state_dict()))
        return result

    monkeypatch.setattr(Policy, "logprobs", watched)
    trainer = make_trainer(tmp_path, max_steps=1, generation_kwargs={"temperature": 0.25}, beta=0.0)
    assert make_sampling(trainer.args, ()).temperature == 0.25
    before = make_model("qwen3")
    trainer.train()
    record = records(tmp_path, "completions.jsonl")[0]
    prompt = trainer.processing_class(record["prompt"])["input_ids"]
    completion = trainer.processing_class(record["completion"])["input_ids"]
    logits = before(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    wanted = (logits / 0.25).log_softmax(-1)[range(len(completion)), completion]
    trained = torch.cat([logprobs for _, logprobs, _ in seen])
    # Every one of the completion's log-probs is among those that were trained on.
    assert all((trained - value).abs().min() < 1e-4 for value in wanted)
    metrics = records(tmp_path, "metrics.jsonl")[0]
    assert metrics["mismatch/mean"] < 1e-5


# -- stop strings ---------------------------------------------------------------------------------


def stopping(*strings: str, **options) -> Sampling:
    values = {"max_tokens": 24, "stop_token_ids": (2,), "decode": decode, **options}
    return Sampling(stop_strings=strings, **values)


@functools.cache
def sampled(engine: str) -> tuple[list, list]:
    """Completions without and with stop strings, the second of which spans two words."""
    sampler = ENGINES[engine](make_model("qwen3"), pad_token_id=0)
    plain = sampler.sample(make_prompts(), 6, stopping(), noise=3)
    return plain, sampler.sample(make_prompts(), 6, stopping("w12", "2 w5"), noise=3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(engine):
    plain, stopped = sampled(engine)
    ended = 0
    for whole, cut in zip(chain(*plain), chain(*stopped), strict=True):
        text = TOKENIZER.decode(cut.token_ids)
        # The same draws, up to the stop string.
        size = len(cut.token_ids)
        assert cut.token_ids == whole.token_ids[:size]
        assert cut.policy_logprobs == pytest.approx(whole.policy_logprobs[:size], abs=1e-5)
        assert cut.behavior_logprobs == pytest.approx(whole.behavior_logprobs[:size], abs=1e-5)
        before = TOKENIZER.decode(cut.token_ids[:-1])
        found = any(stop in text for stop in ("w12", "2 w5"))
        assert not any(stop in before for stop in ("w12", "2 w5"))
        if found:
            ended += 1
            assert cut.finish == "stop"
        else:
            assert (cut.finish, size) == (whole.finish, len(whole.token_ids))
    assert ended >= 3


def test_all_engines_stop_at_the_same_token():
    native, module, hf = (sampled(name)[1] for name in ENGINES)
    ids = [[c.token_ids for g in groups for c in g] for groups in (native, module, hf)]
    assert ids[0] == ids[1] == ids[2]
    finishes = [[c.finish for g in groups for c in g] for groups in (native, module, hf)]
    assert finishes[0] == finishes[1] == finishes[2]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_string_at_the_length_limit_counts_as_a_stop(engine):
    plain, _ = sampled(engine)
    sampler = ENGINES[engine](make_model("qwen3"), pad_token_id=0)
    last = TOKENIZER.decode(plain[0][0].token_ids[3])
    limit = stopping(f" {last}", max_tokens=4)
    completion = sampler.sample(make_prompts(), 6, limit, noise=3)[0][0]
    assert completion.token_ids == plain[0][0].token_ids[:4]
    assert completion.finish == "stop"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prompt_is_not_searched_and_special_tokens_are_text(engine):
    sampler = ENGINES[engine](make_model("qwen3"), pad_token_id=0)
    prompt = [Prompt(0, [5, 6, 16], "")]  # it ends with w12
    longest = sampler.sample(prompt, 8, stopping("w2 w12", stop_token_ids=()), noise=1)[0]
    assert {c.finish for c in longest} == {"length"}
    never = stopping("<bos>", stop_token_ids=(), max_tokens=60)
    ended = [c for c in sampler.sample(prompt, 8, never, noise=1)[0] if c.finish == "stop"]
    assert ended and all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in ended)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_sampled_after_the_last_row_has_stopped(engine, monkeypatch):
    drawn, update = [], StopStringMatcher.update
    monkeypatch.setattr(
        StopStringMatcher, "update", lambda *given: drawn.append(given[3]) or update(*given)
    )
    sampler = ENGINES[engine](make_model("qwen3"), pad_token_id=0)
    sampling = stopping("w", stop_token_ids=())
    groups = sampler.sample(make_prompts(), 6, sampling, noise=3)
    longest = max(len(c.token_ids) for group in groups for c in group)
    assert drawn == list(range(longest)) and longest < sampling.max_tokens


def test_stop_strings_are_found_across_many_small_tokens():
    # A tokenizer of single bytes: the stop string and a character of it are several tokens.
    def bytes_decode(rows):
        return [bytes(row).decode("utf-8", "replace") for row in rows]

    text = "a" * 50 + "…ende…"
    tokens = torch.tensor([list(text.encode()), list(b"b" * len(text.encode()))])
    watch = StopStringMatcher(
        Sampling(80, (), stop_strings=("…ende…",), decode=bytes_decode), 2, torch.device("cpu")
    )
    index = torch.arange(2)
    for position in range(tokens.shape[1]):
        found = watch.update(tokens, index, position)
    assert found.tolist() == [True, False]
    assert watch.lengths.tolist() == [tokens.shape[1], 81]


def test_the_update_trains_exactly_the_kept_tokens(tmp_path, monkeypatch):
    trained = []
    original = Policy.batch

    def watched(self, samples):
        trained.extend((tuple(s.prompt_ids), tuple(s.token_ids), s.truncated) for s in samples)
        return original(self, samples)

    monkeypatch.setattr(Policy, "batch", watched)
    trainer = make_trainer(tmp_path, stop_strings=["w3", "w4"], max_steps=1, log_completions=True)
    kept = []
    sample = trainer.engine.sample

    def recorded(prompts, *args):
        groups = sample(prompts, *args)
        for prompt, group in zip(prompts, groups, strict=True):
            for c in group:
                kept.append((tuple(prompt.token_ids), tuple(c.token_ids), c.finish == "length"))
        return groups

    trainer.engine.sample = recorded
    trainer.train()
    kept = kept[:12]  # what follows is the evaluation
    assert set(trained) <= set(kept) and trained
    texts = [TOKENIZER.decode(ids) for _, ids, _ in kept]
    stopped = [text for text in texts if "w3" in text or "w4" in text]
    assert stopped and all(
        "w3" not in text.rpartition(" ")[0] and "w4" not in text.rpartition(" ")[0]
        for text in stopped
    )
    shown = [row["completion"] for row in records(tmp_path, "completions.jsonl")]
    # The rewards see the stop string too.
    assert any("w3" in text or "w4" in text for text in shown)


# -- evaluation -----------------------------------------------------------------------------------


def test_evaluation_has_its_own_sampling_settings():
    own = {
        "eval_kwargs": {"temperature": 0.3, "top_p": 0.8, "top_k": 5, "max_completion_length": 700},
    }
    config = RLOOConfig(temperature=0.9, top_p=0.95, stop_strings=["x"], **own)
    training = make_sampling(config, (2,), TOKENIZER)
    evaluation = make_sampling(config, (2,), TOKENIZER, evaluation=True)
    assert (training.temperature, training.top_p, training.top_k) == (0.9, 0.95, 0)
    assert (evaluation.temperature, evaluation.top_p, evaluation.top_k) == (0.3, 0.8, 5)
    assert (training.max_tokens, evaluation.max_tokens) == (512, 700)
    assert training.stop_strings == evaluation.stop_strings == ("x",)
    plain = RLOOConfig(temperature=0.9, generation_kwargs={"top_k": 4})
    assert make_sampling(plain, (2,)) == make_sampling(plain, (2,), evaluation=True)


def test_longer_completions_of_evaluation_need_their_room():
    model = make_model("qwen3")
    model.config.max_position_embeddings = 100
    config = RLOOConfig(max_completion_length=40, eval_kwargs={"max_completion_length": 70})
    assert prompt_limit(model, config).max_tokens == 60
    assert prompt_limit(model, config, evaluation=True).max_tokens == 30
    config = RLOOConfig(max_completion_length=40, eval_kwargs={"max_completion_length": 100})
    with pytest.raises(
        ValueError, match="max_completion_length is 100 and the model's context has 100"
    ):
        prompt_limit(model, config, evaluation=True)


def test_the_trainer_evaluates_with_them_and_one_sample_is_enough(tmp_path):
    trainer = make_trainer(
        tmp_path,
        num_generations_eval=1,
        eval_kwargs={
            "temperature": 0.5,
            "top_k": 3,
            "max_completion_length": 5,
            "pass_threshold": 3.0,
        },
    )
    calls = []
    sample = trainer.engine.sample

    def recorded(prompts, number, sampling, noise):
        calls.append((number, sampling))
        return sample(prompts, number, sampling, noise)

    trainer.engine.sample = recorded
    metrics = trainer.evaluate()
    assert [number for number, _ in calls] == [1, 1]
    sampled, greedy = (sampling for _, sampling in calls)
    assert (sampled.temperature, sampled.top_k, sampled.max_tokens) == (0.5, 3, 5)
    assert not sampled.greedy and greedy.greedy and greedy.max_tokens == 5
    assert metrics["eval_num_samples"] == 1
    low, high = metrics["eval_pass@1_interval"]
    assert 0 <= low <= metrics["eval_pass@1"] <= high <= 1
    assert metrics["eval_completions/mean_length"] <= 5
    trainer.train()
    assert max(len(r["completion"].split()) for r in records(tmp_path, "completions.jsonl")) > 5


# -- prompts --------------------------------------------------------------------------------------


def test_conversations_of_several_messages_with_a_system_prompt_are_templated_once():
    messages = [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": "w3"},
        {"role": "user", "content": "w4"},
    ]
    ids = encode_prompt(messages, TOKENIZER, chat_template_kwargs={})
    # Roles and `assistant` at the end are no words of this tokenizer: unknown, 3.
    assert ids == [3, 5, 3, 6, 3, 7, 3, 8, 3]


def test_chat_template_kwargs_reach_the_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 'w1 ' if thinking else 'w2 ' }}{{ messages[0]['content'] }}"
    messages = [{"role": "user", "content": "w7"}]
    for thinking, first in ((True, 5), (False, 6)):
        options = {"thinking": thinking}
        ids = encode_prompt(messages, tokenizer, chat_template_kwargs=options)
        assert ids == [first, 11]


def test_strings_that_were_templated_beforehand_begin_once():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.chat_template = "{{ bos_token + ' ' }}" + CHAT_TEMPLATE
    messages = [{"role": "user", "content": "w7"}]
    string = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert string.startswith("<bos>")
    ids = encode_prompt(string, tokenizer, chat_template_kwargs={})
    assert ids == encode_prompt(messages, tokenizer, chat_template_kwargs={}) == [1, 3, 11, 3]
    # A plain string gets the beginning that the tokenizer adds by itself.
    assert encode_prompt("w7", tokenizer, chat_template_kwargs={}) == [1, 11]


# -- what is printed ------------------------------------------------------------------------------


def shown_completions(**options) -> list[str]:
    completion = Completion([1], "stop", [0.0], [0.0])
    groups = [
        Group(Prompt(i, [1], content), [completion] * 2, [f"{name}1", f"{name}2"], [1.0, 0.0])
        for i, (content, name) in enumerate([("p", "a"), ("q", "b"), ("p", "c")])
    ]
    table = completions_table(3, groups, encoding="utf-8", **options)
    printed = io.StringIO()
    Console(width=100, file=printed).print(table)
    text = printed.getvalue()
    return [name for name in ("a1", "a2", "b1", "b2", "c1", "c2") if name in text]


def test_completions_are_printed_up_to_a_number_and_once_a_prompt():
    assert shown_completions(limit=None) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert shown_completions(limit=3) == ["a1", "b1", "c1"]
    assert shown_completions(limit=None, unique_prompts=True) == ["a1", "b1"]
    assert shown_completions(limit=1, unique_prompts=True) == ["a1"]


# -- options that cannot matter -------------------------------------------------------------------

# A script asks for them, or gets what it asks for.
SILENT = ("do_train", "do_eval", "do_predict", "disable_dropout")


@pytest.mark.parametrize("name", [name for name in WITHOUT_EFFECT if name not in SILENT])
def test_an_option_that_cannot_matter_here_is_accepted_with_a_warning_that_says_why(name):
    default, reason = WITHOUT_EFFECT[name]
    other = {bool: not default, int: 7, float: 7.0, str: "other"}.get(type(default), 64)
    other = {"accelerator_config": {"even_batches": False}}.get(name, other)
    with pytest.warns(UserWarning, match=f"^{name} is .*, which has no effect: ") as caught:
        config = RLOOConfig(**{name: other})
    assert str(caught[0].message).endswith(reason)
    assert config == RLOOConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RLOOConfig(**{name: default}) == config
