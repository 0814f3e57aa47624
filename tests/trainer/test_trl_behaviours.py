"""What TRL's tests of its RLOOTrainer exercise, with values where those check that weights moved.

TRL's own file runs in tests/peers/test_trl_own_tests.py.
"""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm import stages
from rloo.types import Completion
from support.models import CONFIGS, make_model
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    weights,
)
from support.trl_own import FAILS, NOT_JUDGED

DOCUMENT = Path(__file__).parents[2] / "docs" / "trl.md"


def recorded(reward):
    """A reward that scores as `reward`, and the arguments of each of its calls."""
    calls = []

    def recording(**given):
        calls.append(given)
        return reward(given["completions"])

    return recording, calls


def train_recording_updates(trainer, monkeypatch):
    """The samples of each optimizer step."""
    steps = []
    original = stages.update

    def recording(policy, samples, *arguments, **options):
        steps.append(list(samples))
        return original(policy, samples, *arguments, **options)

    monkeypatch.setattr(stages, "update", recording)
    trainer.train()
    return steps


def sampling_always(trainer, completions):
    """Have the engine return these for every prompt."""
    trainer.engine.sample = lambda prompts, count, *_: [list(completions) for _ in prompts]


def completion(*tokens, finish="stop"):
    return Completion(list(tokens), finish, [-1.0] * len(tokens), [-1.0] * len(tokens))


# -- models and prompts ---------------------------------------------------------------------------


def test_a_model_a_reward_model_and_prompts_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model("qwen3").save_pretrained("policy")
    make_tokenizer().save_pretrained("policy")
    options = CONFIGS["llama"]()
    options.num_labels = 1
    judge = transformers.AutoModelForSequenceClassification.from_config(options).eval()
    judge.save_pretrained("judges/words")
    make_tokenizer().save_pretrained("judges/words")
    trainer = RLOOTrainer("policy", "judges/words", train_dataset=ROWS)
    # What is written is in the precision of the files that were read.
    assert trainer.args == RLOOConfig("policy-RLOO", model="policy", save_dtype="float32")
    assert trainer.rewards.names == ["words"]
    scores = trainer.rewards.score(["w1 w2 ", "w3 "], ["w4", "w5 w6"], [[8], [9, 10]], {}, None)
    texts = [make_tokenizer()(text)["input_ids"] for text in ("w1 w2 w4", "w3 w5 w6")]
    expected = [judge(torch.tensor([ids])).logits.item() for ids in texts]
    assert scores.totals == pytest.approx(expected, abs=1e-5)


CUSTOM = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class WordsConfig(Qwen3Config):
    model_type = "words"


class WordsModel(Qwen3ForCausalLM):
    config_class = WordsConfig
"""


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "c"))
    monkeypatch.syspath_prepend(str(tmp_path / "c"))
    folder = tmp_path / "words"
    model = make_model("qwen3")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "words.py").write_text(CUSTOM)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "words", "architectures": ["WordsModel"]}
    config["auto_map"] = {
        "AutoConfig": "words.WordsConfig",
        "AutoModelForCausalLM": "words.WordsModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="custom code"):
        RLOOTrainer(str(folder), count_words, make_config(tmp_path), ROWS)
    trainer = RLOOTrainer(
        str(folder), count_words, make_config(tmp_path, trust_remote_code=True), ROWS
    )
    assert type(trainer.model).__name__ == "WordsModel"
    assert equal(weights(trainer), dict(model.named_parameters()))


@pytest.mark.slow
def test_string_prompts_reach_rewards_as_strings_and_messages_as_messages(tmp_path):
    reward, calls = recorded(count_words)
    config = make_config(tmp_path / "text", max_steps=1, num_prompts=2, shuffle_dataset=False)
    trainer = make_trainer(config, reward)
    trainer.train()
    texts = ROWS["prompt"][:2]
    assert calls[0]["prompts"] == [texts[0]] * 4 + [texts[1]] * 4
    tokenizer = trainer.processing_class
    decoded = tokenizer.batch_decode(calls[0]["completion_ids"], skip_special_tokens=True)
    assert calls[0]["completions"] == decoded

    chats = [[{"role": "user", "content": text}] for text in texts]
    in_chat, chat_calls = recorded(lambda answers: count_words([a[0]["content"] for a in answers]))
    config = make_config(tmp_path / "chat", max_steps=1, num_prompts=2, shuffle_dataset=False)
    trainer = make_trainer(config, in_chat, Dataset.from_dict({"prompt": chats}))
    prompts = trainer._source.all_prompts()
    rendered = f"user {texts[0]} assistant"
    assert prompts[0].token_ids == tokenizer(rendered)["input_ids"]
    trainer.train()
    assert chat_calls[0]["prompts"] == [chats[0]] * 4 + [chats[1]] * 4
    decoded = tokenizer.batch_decode(chat_calls[0]["completion_ids"], skip_special_tokens=True)
    assert chat_calls[0]["completions"] == [
        [{"role": "assistant", "content": text}] for text in decoded
    ]


@pytest.mark.slow
def test_an_adapter_on_experts_trains_and_the_base_stays(tmp_path):
    peft = pytest.importorskip("peft")
    experts = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
    )
    config = make_config(tmp_path, max_steps=3)
    trainer = RLOOTrainer(
        make_model("qwen3_moe"),
        count_words,
        config,
        ROWS,
        processing_class=make_tokenizer(),
        peft_config=experts,
    )
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[0].split(".")[-1] for name in trained} == {"q_proj", "experts"}
    before = weights(trainer)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            assert torch.equal(parameter, before[name]) != (name in trained), name
        else:
            assert torch.equal(parameter, before[name]), name
    assert [row["kl"] == 0 for row in metrics_of(config)] == [True, False, False]


# -- rewards --------------------------------------------------------------------------------------


def by_length(completions, **_):
    return [float(len(c.split())) for c in completions]


def test_rewards_are_weighted_summed_and_logged_one_by_one(tmp_path):
    first, first_calls = recorded(count_words)
    second, second_calls = recorded(by_length)
    first.__name__, second.__name__ = "words", "length"
    config = make_config(tmp_path, max_steps=1, reward_weights=[0.7, 0.3], logging_steps=1)
    trainer = make_trainer(config, [first, second])
    trainer.train()
    words = torch.tensor(count_words(first_calls[0]["completions"]), dtype=torch.float64)
    lengths = torch.tensor(by_length(second_calls[0]["completions"]), dtype=torch.float64)
    expected = {
        "rewards/words/mean": words.mean().item(),
        "rewards/words/std": words.std().item(),
        "rewards/length/mean": lengths.mean().item(),
        "rewards/length/std": lengths.std().item(),
        "reward": (0.7 * words + 0.3 * lengths).mean().item(),
        "reward_std": (0.7 * words + 0.3 * lengths).std().item(),
    }
    (logged, _) = trainer.state.log_history
    for name, value in expected.items():
        assert metrics_of(config)[0][name] == pytest.approx(value, abs=1e-12), name
        assert logged[name] == pytest.approx(value, abs=1e-12), name


def test_constant_rewards_of_1_and_0_weighted_7_to_3_are_logged_as_their_sum(tmp_path):
    def one(completions, **_):
        return [1.0] * len(completions)

    def nothing(completions, **_):
        return [0.0] * len(completions)

    config = make_config(tmp_path, max_steps=1, reward_weights=[0.7, 0.3])
    make_trainer(config, [one, nothing]).train()
    assert metrics_of(config)[0]["reward"] == pytest.approx(0.7, abs=1e-12)


@pytest.mark.slow
def test_coroutine_functions_train_as_plain_ones(tmp_path):
    async def words(completions, **_):
        return count_words(completions)

    def plain(completions, **_):
        return count_words(completions)

    results = []
    for name, functions in (("plain", [by_length, plain]), ("async", [by_length, words])):
        trainer = make_trainer(make_config(tmp_path / name), functions)
        trainer.train()
        trainer.end()
        results.append(weights(trainer))
    assert equal(*results)


@pytest.mark.slow
def test_a_function_that_never_applies_changes_nothing(tmp_path):
    def never(completions, **_):
        return [None] * len(completions)

    results = []
    for name, functions in (("one", [count_words]), ("two", [count_words, never])):
        config = make_config(tmp_path / name, logging_steps=1)
        trainer = make_trainer(config, functions)
        trainer.train()
        results.append(weights(trainer))
    assert equal(*results)
    assert metrics_of(config)[0]["rewards/never/mean"] is None
    assert "rewards/never/mean" not in trainer.state.log_history[0]


def test_completions_that_no_function_scored_are_told_of_once(tmp_path):
    def some(completions, **_):
        return [None if i < 3 else r for i, r in enumerate(count_words(completions))]

    config = make_config(tmp_path)
    trainer = make_trainer(config, some)
    trainer.train()
    assert [row["reward/unscored"] for row in metrics_of(config)] == [3.0] * 4
    told = [note for note in trainer.monitor.notes if "returned None for 3 completions" in note]
    assert len(told) == 1 and told[0].startswith("in step 1 every reward function")


def test_columns_the_state_and_the_two_logs_reach_a_reward(tmp_path):
    seen = []

    def reward(completions, level, trainer_state, log_extra, log_metric, **_):
        seen.append((list(level), trainer_state.global_step))
        log_extra("word_count", [len(c.split()) for c in completions])
        log_metric("custom_accuracy", trainer_state.global_step / 4)
        return count_words(completions)

    rows = ROWS.add_column("level", list(range(12)))
    config = make_config(
        tmp_path, shuffle_dataset=False, max_steps=2, log_completions=True, logging_steps=1
    )
    trainer = make_trainer(config, reward, rows)
    trainer.train()
    repeated = [level for level in range(6) for _ in range(4)]
    assert seen == [(repeated[:12], 0), (repeated[12:], 1)]
    logged = [e["custom_accuracy"] for e in trainer.state.log_history if "custom_accuracy" in e]
    assert logged == [0.0, 0.25]
    lines = Path(config.output_dir, "completions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 24
    for record in records:
        assert record["extras"] == {"word_count": len(record["completion"].split())}


# -- the objective --------------------------------------------------------------------------------


def test_without_beta_there_is_no_reference_and_rewards_alone_make_the_advantages(
    tmp_path, monkeypatch
):
    """One step of plain gradient descent, by hand."""
    config = make_config(
        tmp_path,
        beta=0.0,
        num_prompts=1,
        num_generations=3,
        max_steps=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        shuffle_dataset=False,
    )
    trainer = make_trainer(config, lambda completions, **_: [1.0, 2.0, 6.0])
    assert trainer.policy.reference.model is None
    answers = [[5, 2], [6, 7, 2], [8, 9, 10, 2]]
    sampling_always(trainer, [completion(*answer) for answer in answers])
    expected = step_by_hand(trainer, answers, [1 - 4, 2 - 3.5, 6 - 1.5])
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    row = metrics_of(config)[0]
    assert "kl" not in row and row["frac_reward_zero_std"] == 0


def step_by_hand(trainer, answers, advantages, rate=0.5):
    """Parameters after p - rate * gradient of -mean(advantage * log p(answer | first prompt))."""
    model = copy.deepcopy(trainer.model)
    prompt = trainer._source.all_prompts(1)[0].token_ids
    loss = 0.0
    for answer, advantage in zip(answers, advantages, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(answer)), answer]
        loss = loss - advantage * logprobs.sum() / len(answers)
    loss.backward()
    return {n: p.detach() - rate * p.grad for n, p in model.named_parameters()}


def test_of_one_cut_and_two_ended_completions_only_the_cut_one_is_masked(tmp_path):
    """One that ends early, and one whose end is exactly at the limit, are trained on."""
    config = make_config(
        tmp_path,
        beta=0.0,
        num_prompts=1,
        num_generations=3,
        max_steps=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        mask_truncated_completions=True,
        shuffle_dataset=False,
    )
    trainer = make_trainer(config, lambda completions, **_: [1.0, 2.0, 6.0])
    cut, early, exact = [5] * 8, [6, 2], [7] * 7 + [2]
    sampling_always(
        trainer,
        [completion(*cut, finish="length"), completion(*early), completion(*exact)],
    )
    expected = step_by_hand(trainer, [cut, early, exact], [0.0, 2 - 3.5, 6 - 1.5])
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=1e-6), name
    row = metrics_of(config)[0]
    assert row["completions/clipped_ratio"] == pytest.approx(1 / 3, abs=1e-12)
    assert row["completions/mean_terminated_length"] == 5


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_where_all_completions_are_cut_no_parameter_moves(tmp_path, beta):
    config = make_config(tmp_path, beta=beta, mask_truncated_completions=True, max_steps=2)
    trainer = make_trainer(config, lambda completions, **_: [float(i) for i in range(12)])
    sampling_always(trainer, [completion(*[5 + i] * 8, finish="length") for i in range(4)])
    before = weights(trainer)
    trainer.train()
    assert equal(before, weights(trainer))
    assert metrics_of(config)[0]["completions/clipped_ratio"] == 1


# -- batches --------------------------------------------------------------------------------------


def test_a_group_may_be_larger_than_the_batch_of_a_device(tmp_path, monkeypatch):
    config = make_config(
        tmp_path,
        num_prompts=None,
        num_generations=6,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        shuffle_dataset=False,
        max_steps=3,
    )
    trainer = make_trainer(config)
    prompts = [p.token_ids for p in trainer._source.all_prompts(3)]
    steps = train_recording_updates(trainer, monkeypatch)
    assert [[s.prompt_ids for s in step] for step in steps] == [[p] * 6 for p in prompts]


def test_each_step_learns_from_its_part_of_the_rollout_in_every_pass(tmp_path, monkeypatch):
    """Accumulation 2, 4 accumulation steps a rollout, 4 completions a prompt, batches of 6 and 2
    passes: a rollout has 24 completions of 6 prompts and serves 4 steps of 12."""
    options = {
        "num_prompts": None,
        "num_generations": 4,
        "per_device_train_batch_size": 6,
        "num_iterations": 2,
        "shuffle_dataset": False,
        "beta": 0.05,
    }
    config = make_config(
        tmp_path, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=8, **options
    )
    trainer = make_trainer(config)
    prompts = [p.token_ids for p in trainer._source.all_prompts()]
    steps = train_recording_updates(trainer, monkeypatch)
    halves = [prompts[start : start + 3] for start in (0, 3, 0, 3, 6, 9, 6, 9)]
    assert [[s.prompt_ids for s in step] for step in steps] == [
        [prompt for prompt in half for _ in range(4)] for half in halves
    ]
    for first, second in ((0, 2), (1, 3), (4, 6), (5, 7)):  # the passes see the same answers
        assert [s.token_ids for s in steps[first]] == [s.token_ids for s in steps[second]]
    with pytest.raises(ValueError, match="steps_per_generation is 4, not a multiple of"):
        make_config(tmp_path, gradient_accumulation_steps=3, steps_per_generation=4, **options)


IDLE = {
    "pad_to_multiple_of": 8,
    "dataloader_num_workers": 4,
    "dataloader_persistent_workers": True,
    "dataloader_multiprocessing_context": "spawn",
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, ROWS.to_iterable_dataset()], ids=["rows", "stream"])
def test_padding_and_loader_workers_change_nothing_and_that_is_said(tmp_path, rows):
    with pytest.warns(UserWarning) as told:
        config = make_config(tmp_path / "idle", **IDLE)
    for name in IDLE:
        assert any(str(w.message).startswith(f"{name} is ") for w in told), name
    results = []
    for options in (config, make_config(tmp_path / "plain")):
        trainer = make_trainer(options, rows=rows)
        trainer.train()
        results.append(weights(trainer))
    assert equal(*results)


def test_prompts_are_rendered_with_the_options_of_the_chat_template(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}w90{% else %}w91{% endif %}"
    )
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1 w2"}]]})
    for options, last in (({}, "w91"), ({"enable_thinking": False}, "w90")):
        trainer = RLOOTrainer(
            make_model("qwen3"),
            count_words,
            make_config(tmp_path, chat_template_kwargs=options),
            rows,
            processing_class=tokenizer,
        )
        (prompt,) = trainer._source.all_prompts()
        assert tokenizer.convert_ids_to_tokens(prompt.token_ids) == ["w1", "w2", last]


# -- the table ------------------------------------------------------------------------------------


def test_the_documents_say_which_of_trls_tests_do_not_pass_and_why():
    _, text = DOCUMENT.read_text(encoding="utf-8").split("## TRL's tests")
    reasons = re.findall(r"^\| (?:`\w+`(?:, )?)+ \| (.*) \|$", text, flags=re.MULTILINE)
    assert set(reasons) == {*NOT_JUDGED.values(), *FAILS.values()}
