"""A run and its engine: weights are given once, and any engine is recorded under its own name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from rloo import RLOOConfig, plugins
from rloo.config.engine_spec import EngineSpec
from rloo.engines.hf_engine import HFEngine
from rloo.trainer.build import make_engine
from rloo.types import Prompt, Sampling
from support.models import make_model
from support.policies import make_policy
from support.training import ROWS, make_config, make_trainer, metrics_of


def test_a_run_gives_each_version_of_the_weights_once(tmp_path, monkeypatch):
    config = make_config(
        tmp_path, max_steps=3, eval_on_start=True, eval_strategy="steps", eval_steps=1
    )
    trainer = make_trainer(config, eval_dataset=ROWS)
    given, weights = [], trainer.policy.weights
    monkeypatch.setattr(trainer.policy, "weights", lambda: given.append(1) or weights())
    trainer.train()
    # For the rehearsal, the evaluation at the start and the first rollout; then by each evaluation
    # that comes after a step, and by no rollout that comes after it.
    assert len(given) == 1 + 3
    assert trainer.engine.capabilities.copies_weights
    trainer.evaluate()
    assert len(given) == 1 + 3


@pytest.mark.parametrize("change", [lambda p: p.mul_(1.1), lambda p: p.data.mul_(1.1)])
def test_weights_that_a_callback_changes_between_evaluation_and_rollout_are_sampled(
    tmp_path, change
):
    class Change(transformers.TrainerCallback):
        @torch.no_grad()
        def on_evaluate(self, args, state, control, model, **kwargs):
            for parameter in model.parameters():
                change(parameter)

    config = make_config(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1)
    make_trainer(config, eval_dataset=ROWS, callbacks=[Change]).train()
    # The engine's log-probs are the trainer's.
    assert all(row["mismatch/max"] < 1e-4 for row in metrics_of(config))


@pytest.mark.parametrize(
    "options", [{"rollout_engine": "hf"}, {"engine_kwargs": {"copy_weights": False}}]
)
def test_the_engine_computes_in_the_precision_of_training(options):
    policy = make_policy(make_model("qwen3"), bf16=True, **options)
    engine = make_engine(policy, policy.config)
    prompts, sampling = [Prompt(0, [5, 6, 7], "")], Sampling(8, ())
    of_training, of_weights = (
        HFEngine(policy.model, pad_token_id=0, precision=precision).sample(prompts, 4, sampling, 0)
        for precision in (torch.bfloat16, None)
    )
    drawn = engine.sample(prompts, 4, sampling, 0)

    def distance(groups):
        pairs = zip(drawn[0], groups[0], strict=True)
        return sum(abs(a.policy_logprobs[0] - b.policy_logprobs[0]) for a, b in pairs)

    assert distance(of_training) < distance(of_weights)


class Third(HFEngine):
    """An engine that this package does not know."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.capabilities = replace(self.capabilities, name="third")


@pytest.fixture
def third(monkeypatch):
    made = []

    def make(inputs):
        made.append(Third(inputs.model, pad_token_id=inputs.pad_token_id))
        return made[-1], None

    monkeypatch.setitem(plugins.REGISTERED["engines"], "third", EngineSpec(make))
    return made


def test_a_third_engine_is_recorded_under_its_own_name_and_used_again(tmp_path, third, capsys):
    config = make_config(tmp_path, max_steps=1, rollout_engine="third")
    make_trainer(config).train()
    written = yaml.safe_load(Path(config.output_dir, "config.yaml").read_text())
    summary = json.loads(Path(config.output_dir, "summary.json").read_text())
    assert written["rollout_engine"] == summary["config"]["rollout_engine"] == "third"
    assert "third" in capsys.readouterr().out
    again = make_trainer(RLOOConfig(**{**written, "output_dir": str(tmp_path / "again")}))
    assert isinstance(again.engine, Third) and again.engine is third[1]


def test_options_of_a_copy_are_refused_for_an_engine_that_makes_none(tmp_path, third):
    for option in ({"engine_kwargs": {"copy_weights": True}}, {"rollout_dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="only the native engine's fused decoder"):
            make_trainer(make_config(tmp_path, rollout_engine="third", **option))
