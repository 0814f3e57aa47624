"""Reward models beside an independent computation: every text alone, without padding."""

import json
import math

import pytest
import torch
import transformers
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer, plugins
from rloo.algorithm.rank_rollout import RewardScorer
from rloo.config.parsing import parse_command_line
from rloo.distributed import World
from rloo.rewards import RewardSet
from rloo.rewards.reward_model import RewardModel, as_reward
from rloo.rewards.running_norm import RunningNormReward
from rloo.trainer.build import make_rewards
from rloo.trainer.evaluate import EvaluationSettings, evaluate
from rloo.trainer.preflight import check_inputs
from rloo.types import Completion, Prompt, Sampling
from support.models import CPU, make_model
from support.reward_models import (
    COMPLETIONS,
    PROMPTS,
    joined,
    make_reward_model,
    make_reward_tokenizer,
)
from support.text import make_tokenizer


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "judges" / "tiny-rm"
    make_reward_model().save_pretrained(path)
    make_reward_tokenizer().save_pretrained(path)
    return str(path)


def alone(model, tokenizer, texts):
    """The head on the decoder's last state of each text, one at a time."""
    model = model.eval()
    scores = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model.score(model.model(ids).last_hidden_state[0, -1]).item())
    return scores


@pytest.mark.parametrize("batch_tokens", [1, 8, 10_000])
def test_scores_are_those_of_each_text_alone(batch_tokens):
    reward = RewardModel(make_reward_model(), make_reward_tokenizer(), batch_tokens=batch_tokens)
    expected = alone(make_reward_model(), make_reward_tokenizer(), joined())
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_a_batch_holds_at_most_its_tokens_and_the_longest_come_first():
    model = make_reward_model()
    shapes = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(args[0].shape)), with_kwargs=True
    )
    RewardModel(model, make_reward_tokenizer(), batch_tokens=10)(PROMPTS, COMPLETIONS)
    assert shapes == [(1, 8), (2, 5), (2, 3)]


def test_messages_go_through_the_template_of_the_reward_models_tokenizer():
    prompts = [
        [{"role": "system", "content": "w9"}, {"role": "user", "content": "w3 w4"}],
        [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6 "}],
    ]
    completions = [
        [{"role": "assistant", "content": "w7"}],
        [{"role": "assistant", "content": "w6 w8"}],  # begun in the prompt
    ]
    texts = ["w1 : w9 w2 : w3 w4 w3 : w7 w40", "w1 : w5 w2 : w6 w8 w40"]
    reward = RewardModel(
        make_reward_model(), make_reward_tokenizer(), chat_template_kwargs={"mood": "w40"}
    )
    expected = alone(make_reward_model(), make_reward_tokenizer(), texts)
    assert reward(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert prompts[1][-1]["role"] == "assistant"


def test_without_a_padding_token_the_end_of_sequence_pads():
    tokenizer = make_reward_tokenizer(pad_token=None)
    model = make_reward_model()
    reward = RewardModel(model, tokenizer)
    expected = alone(make_reward_model(), make_reward_tokenizer(), joined())
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-5)
    assert model.config.pad_token_id == 0 and tokenizer.pad_token is None
    with pytest.raises(ValueError, match="neither a padding nor an end-of-sequence token"):
        RewardModel(make_reward_model(), make_reward_tokenizer(pad_token=None, eos_token=None))


def test_dropout_and_autocast_do_not_reach_the_scores():
    model = make_reward_model(attention_dropout=0.9).train()
    reward = RewardModel(model, make_reward_tokenizer())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = reward(PROMPTS, COMPLETIONS)
    expected = alone(make_reward_model(), make_reward_tokenizer(), joined())
    assert scores == pytest.approx(expected, abs=1e-5)


def test_an_encoder_with_absolute_positions_is_scored_too():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_labels=1,
        num_attention_heads=2, max_position_embeddings=9, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    tokenizer = make_reward_tokenizer()
    scores = RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS)
    with torch.no_grad():
        expected = [
            model(torch.tensor([tokenizer(t, add_special_tokens=False)["input_ids"]])).logits.item()
            for t in joined()
        ]
    assert scores == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"have 10 tokens and the reward model .* sees 9"):
        RewardModel(model, tokenizer)(["w1 w2 w3 w4 w5"], [" w1 w2 w3 w4 w5"])


def test_a_folder_an_option_set_and_a_module_score_alike(folder):
    expected = alone(make_reward_model(), make_reward_tokenizer(), joined())
    module = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    for spec in (folder, folder + "/", {"name": folder, "batch_tokens": 20}, module):
        reward = as_reward(spec)
        assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=1e-5)
        assert reward.__name__ == "tiny-rm"
    half = as_reward({"name": folder, "dtype": "bfloat16", "device": "cpu"})
    assert half(PROMPTS, COMPLETIONS) == pytest.approx(expected, rel=0.05, abs=0.05)
    assert half(PROMPTS, COMPLETIONS) != pytest.approx(expected, abs=1e-4)
    as_saved = make_reward_model().to(torch.bfloat16)
    as_saved.save_pretrained(folder)
    assert as_reward(folder)(PROMPTS, COMPLETIONS) == half(PROMPTS, COMPLETIONS)


def test_names_of_rewards_are_told_from_names_of_models(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "countdown").mkdir()  # a folder that happens to have a built-in name
    assert as_reward("countdown").__name__ == "countdown_reward"
    monkeypatch.setitem(plugins.REGISTERED["rewards"], "searched", lambda pattern: short)
    assert as_reward("searched(pattern='a/b')").__name__ == "short"
    assert as_reward("rloo.data.tasks.countdown:countdown_reward").__name__ == "countdown_reward"
    (tmp_path / "judges" / "mine.py").write_text("def f(completions):\n    return []\n")
    assert as_reward("judges/mine.py:f").__name__ == "f"
    with pytest.raises(ValueError, match=r"names no function; write judges/mine.py:function"):
        as_reward("judges/mine.py")
    assert as_reward("judges/tiny-rm").__name__ == "tiny-rm"
    with pytest.raises(ValueError, match=r"unknown reward 'tiny-rm'.*a folder or owner/name"):
        as_reward("tiny-rm")
    with pytest.raises(ValueError, match=r"the reward model judges/absent cannot be loaded: "):
        as_reward("judges/absent")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"normalise": True},
            "has no option normalise .options: allow_missing_weights, batch_tokens, device, dtype",
        ),
        (
            {"dtype": "int8"},
            "dtype of the reward model .* is 'int8'; it must be one of auto, float",
        ),
        (
            {"allow_missing_weights": 1},
            "allow_missing_weights of the reward model .* is 1; it must be true or false",
        ),
        ({"normalize": "yes"}, "normalize of the reward model .* is 'yes'; it must be true or"),
        (
            {"batch_tokens": 0},
            "batch_tokens of the reward model 'tiny-rm' is 0; it must be a whole",
        ),
        ({"device": "gpu"}, "device of the reward model"),
    ],
)
def test_bad_options_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        as_reward({"name": folder, **options})


def test_what_is_no_reward_model_is_refused_with_the_reason(folder, tmp_path):
    with pytest.raises(ValueError, match="has 3 labels; a reward is one number, so it needs exact"):
        RewardModel(make_reward_model(num_labels=3), make_reward_tokenizer())
    make_reward_model(num_labels=3).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="three has 3 labels"):
        as_reward(str(tmp_path / "three"))
    causal = make_model("llama")
    causal.config.num_labels = 1
    causal.save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match=r"no weights for score.weight, which would be random"):
        as_reward(str(tmp_path / "causal"))
    with pytest.warns(UserWarning, match=r"no weights for score.weight.*no place: lm_head.weight"):
        spec = {"name": str(tmp_path / "causal"), "allow_missing_weights": True}
        as_reward(spec, make_reward_tokenizer())
    with pytest.raises(ValueError, match=r"gave an array of shape \(1, 2, 97\) for 1 texts"):
        RewardModel(causal, make_reward_tokenizer())(["w1"], [" w2"])
    with pytest.raises(ValueError, match="Linear is a module without a configuration"):
        as_reward(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded; give one"):
        as_reward(make_reward_model())
    with pytest.raises(ValueError, match="a prompt and its completion have 0 tokens"):
        as_reward(folder)([""], [" "])
    broken = make_reward_model()
    broken.score.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="gave nan; a score must be finite"):
        RewardModel(broken, make_reward_tokenizer())(["w1"], [" w2"])


def test_an_adapter_is_no_reward_model_and_it_is_told_how_it_becomes_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for ask in (as_reward, lambda name: check_inputs(RLOOConfig(reward=[name], use_cpu=True))):
        with pytest.raises(ValueError, match=r"is an adapter, and .* \(peft: merge_and_unload"):
            ask(str(tmp_path))


def test_an_object_with_get_rewards_is_a_reward():
    class Judge:
        def get_rewards(self, texts, answers):
            return torch.tensor([float(len(t + a)) for t, a in zip(texts, answers, strict=True)])

    rewards = make_rewards(Judge(), RLOOConfig(), device=CPU)
    scores = rewards.score(["p", "qq"], ["a", "b"], [[1], [2]], {}, None)
    assert rewards.names == ["Judge"] and scores.totals == [2.0, 3.0]


def test_a_model_named_in_a_file_is_found_beside_it_with_its_options(folder, tmp_path):
    options = "{name: judges/tiny-rm, normalize: true, dtype: bfloat16, batch_tokens: 64}"
    (tmp_path / "run.yaml").write_text(f"reward: [{options}, judges/tiny-rm, countdown]\n")
    (tmp_path / "countdown").mkdir()
    config = parse_command_line([str(tmp_path / "run.yaml")])
    assert config.reward == [
        {"name": folder, "normalize": True, "dtype": "bfloat16", "batch_tokens": 64},
        folder,
        "countdown",
    ]
    names = ["tiny-rm", "tiny-rm_2", "countdown_reward"]
    assert make_rewards(None, config, device=CPU).names == names


def short(completions):
    return [1.0 if len(c.split()) < 3 else None for c in completions]


def test_models_and_functions_are_mixed_and_weighted(folder):
    module = make_reward_model(seed=6)
    config = RLOOConfig(reward_weights=[2.0, 1.0, 0.5])
    tokenizers = [None, None, make_reward_tokenizer()]
    rewards = make_rewards([folder, short, module], config, tokenizers, device=CPU)
    assert rewards.names == ["tiny-rm", "short", "LlamaForSequenceClassification"]
    scores = rewards.score(PROMPTS, COMPLETIONS, [[1]] * 5, {}, None)
    first = alone(make_reward_model(), make_reward_tokenizer(), joined())
    third = alone(make_reward_model(seed=6), make_reward_tokenizer(), joined())
    second = [1.0, 0.0, 1.0, 1.0, 0.0]
    expected = [2 * a + b + 0.5 * c for a, b, c in zip(first, second, third, strict=True)]
    assert scores.totals == pytest.approx(expected, abs=1e-5)
    assert scores.by_function["short"] == [1.0, None, 1.0, 1.0, None]


def test_tokenizers_must_be_one_per_reward(folder):
    two = [folder, make_reward_model()]
    with pytest.raises(ValueError, match=r"1 reward_processing_classes and 2 .* must match"):
        make_rewards(two, RLOOConfig(), make_reward_tokenizer(), device=CPU)
    with pytest.raises(ValueError, match=r"3 reward_processing_classes and 2 .* must match"):
        make_rewards(two, RLOOConfig(), [None] * 3, device=CPU)
    with pytest.warns(UserWarning, match=r"function short .* has no effect: that is no reward mod"):
        make_rewards(short, RLOOConfig(), make_reward_tokenizer(), device=CPU)
    single = make_rewards(make_reward_model(), RLOOConfig(), make_reward_tokenizer(), device=CPU)
    scores = single.score(["w1"], [" w2"], [[1]], {}, None)
    assert scores.totals == pytest.approx(
        alone(make_reward_model(), make_reward_tokenizer(), ["w1 w2"]), abs=1e-5
    )


def given(prompts, completions):
    return [None if c == "-" else float(c) for c in completions]


def test_the_running_scale_by_hand():
    rewards = RewardSet([RunningNormReward(given)])

    def score(*values, **options):
        texts = [str(v) for v in values]
        return rewards.score(["p"] * len(texts), texts, [[1]] * len(texts), {}, None, **options)

    first = score(1.0, 3.0)  # before it there is nothing
    assert first.totals == [1.0, 3.0] and first.metrics == {"rewards/given/raw_mean": 2.0}
    root = math.sqrt(2)  # 1, 3: mean 2, deviation sqrt(2)
    assert score(4.0, "-", 2.0).totals == pytest.approx([2 / root, None, 0.0])
    # 1, 3, 4, 2: mean 2.5, deviation sqrt(5 / 3)
    assert score(5.0).totals == pytest.approx([2.5 / math.sqrt(5 / 3)])
    state = rewards.state_dict()
    # 1, 3, 4, 2, 5: mean 3, squared deviations 10
    assert state == {"given": {"count": 5, "mean": pytest.approx(3), "squares": pytest.approx(10)}}
    evaluated = score(7.0, learn=False)
    assert evaluated.totals == [7.0] and evaluated.metrics == {}
    assert rewards.state_dict() == state

    resumed = RewardSet([short, RunningNormReward(given)])
    resumed.load_state_dict({**state, "gone": {"count": 1}})
    assert resumed.state_dict() == state
    later = resumed.score(["p"], ["5"], [[1]], {}, None)
    assert later.by_function["given"] == pytest.approx([2 / math.sqrt(2.5)])


def test_equal_scores_and_a_single_one_have_no_scale():
    scores = RunningNormReward(given)
    assert scores.normalize([2.0]) == [2.0]
    assert scores.normalize([2.0, 5.0]) == [0.0, 3.0]


class Fixed:
    """An engine that always says token 5."""

    def sample(self, prompts, num_samples, sampling, noise):
        return [[Completion([5, 2], "stop", [0.0] * 2, [0.0] * 2)] * num_samples for _ in prompts]


def test_evaluation_does_not_move_the_running_scale(folder):
    rewards = make_rewards({"name": folder, "normalize": True}, RLOOConfig(), device=CPU)
    rewards.score(["w1", "w2"], [" w1", " w3"], [[1]] * 2, {}, None)
    before = rewards.state_dict()
    judge = RewardScorer(rewards, make_tokenizer(), World(CPU))
    settings = EvaluationSettings(Sampling(4, (2,)), 2, noise=0, pass_threshold=1.0)
    report, _ = evaluate(Fixed(), [Prompt(0, [4], "w1 ")], judge, settings)
    assert rewards.state_dict() == before and before["tiny-rm"]["count"] == 2
    raw = alone(make_reward_model(), make_reward_tokenizer(), ["w1 w1"])  # token 5 is w1
    assert report["reward"] == pytest.approx(raw[0], abs=1e-5)


def test_a_policy_trains_against_a_model_with_another_tokenizer(folder, tmp_path):
    tokenizer, texts = make_tokenizer(), []

    def count_words(prompts, completions):
        for p, c in zip(prompts, completions, strict=True):
            texts.append(f"w1 : {p[0]['content']} w2 : {c[0]['content']} ")
        return [0.0] * len(prompts)

    asked = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(8)]
    args = RLOOConfig(
        str(tmp_path / "run"),
        num_generations=4,
        num_prompts=2,
        max_steps=2,
        max_completion_length=6,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = Dataset.from_dict({"prompt": asked})
    rewards = [{"name": folder, "normalize": True}, count_words]
    trainer = RLOOTrainer(make_model("qwen3"), rewards, args, rows, processing_class=tokenizer)
    trainer.train()
    state = trainer.rewards.state_dict()["tiny-rm"]
    assert len(texts) == state["count"] == 16
    assert state["mean"] == pytest.approx(
        sum(alone(make_reward_model(), make_reward_tokenizer(), texts)) / 16, abs=1e-5
    )
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["rewards/tiny-rm/mean"] == pytest.approx(line["rewards/tiny-rm/raw_mean"])
