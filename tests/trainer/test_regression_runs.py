"""Runs whose baseline is a regression on earlier rollouts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset

from rloo.algorithm.regression import ReturnRegression
from rloo.algorithm.step_record import learn_baseline
from rloo.distributed import World
from rloo.model.micro_batch import make_sample
from rloo.types import Prompt
from support.policies import make_policy_config
from support.training import (
    ROWS,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    train_with_failure,
    weights,
)

REGRESSION = {"estimator": "regression"}
COLUMN = {**REGRESSION, "estimator_kwargs": {"column": "level"}}
LEVELS = ROWS.add_column("level", [n % 3 for n in range(12)])


def by_level(completions, level, **_):
    """Rows of level 0 never pay, those of level 1 always do, the others do now and then."""
    return [
        (0.0, 1.0, float(len(text) % 2))[row] for text, row in zip(completions, level, strict=True)
    ]


def test_the_fit_of_earlier_rollouts_is_in_the_samples_of_the_next(tmp_path):
    config = make_config(tmp_path, **COLUMN, num_prompts=6, max_steps=3, beta=0.05)
    trainer, seen = make_trainer(config, by_level, LEVELS), []
    parts, state = trainer.make_parts()
    update = parts.update

    def watched(parts, state, active, minibatch):
        groups = active.rollout.groups
        seen.append(
            {
                (groups[s.key[0]].prompt.columns["level"], s.coefficients): s.reward
                for s in active.samples
            }
        )
        return update(parts, state, active, minibatch)

    object.__setattr__(parts, "update", watched)
    trainer.make_parts = lambda *_, **__: (parts, state)
    trainer.train()
    assert {coefficients for _, coefficients in seen[0]} == {(0.0, 0.0)}
    by_row = dict(level_and_fit for level_and_fit in seen[2])
    assert len(set(by_row.values())) == len(by_row) > 1
    ratios = [row["baseline/variance_ratio"] for row in metrics_of(config)]
    assert ratios[0] == 1.0 and ratios[2] != 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "beta": 0.05},
        {"steps_per_generation": 3, "num_prompts": 1, "gradient_accumulation_steps": 1},
    ],
    ids=["one step", "several passes", "several parts"],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, options):
    options = {**COLUMN, "max_steps": 14 if options else 8, **options}
    whole = make_trainer(make_config(tmp_path / "whole", **options), by_level, LEVELS)
    whole.train()
    config = make_config(tmp_path / "parts", **options, save_strategy="steps", save_steps=3)
    resumed = train_with_failure(config, by_level, LEVELS)
    assert equal(weights(whole), weights(resumed))
    plain = {**options, "estimator": "rloo", "estimator_kwargs": None}
    usual = make_config(tmp_path / "usual", **plain)
    other = make_trainer(usual, by_level, LEVELS)
    other.train()
    assert not equal(weights(whole), weights(other))


def test_a_checkpoint_has_the_sums_of_each_pool(tmp_path):
    saved = {"num_prompts": 6, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    config = make_config(tmp_path, **COLUMN, **saved)
    make_trainer(config, by_level, LEVELS).train()
    (path,) = Path(config.output_dir).glob("checkpoint-2/trainer_state.json")
    pools = json.loads(path.read_text())["adaptive"]["regression"]["pools"]
    assert len(pools) > 1 and set(pools) <= {"0", "1", "2"}


def test_an_unknown_column_and_a_half_life_that_is_none_are_refused(tmp_path):
    config = make_config(tmp_path, **REGRESSION, estimator_kwargs={"column": "lvl"})
    with pytest.raises(ValueError, match=r"estimator_kwargs.column is lvl .* are prompt, level"):
        make_trainer(config, by_level, LEVELS)
    stream = IterableDataset.from_generator(lambda: iter(LEVELS))
    with pytest.raises(ValueError, match=r"estimator_kwargs.column is lvl .* are prompt, level"):
        make_trainer(config, by_level, stream)
    for half_life in (0, -1.0, "long"):
        with pytest.raises(ValueError, match=r"half_life is .* above 0"):
            make_config(tmp_path, **REGRESSION, estimator_kwargs={"half_life": half_life})
    with pytest.raises(ValueError, match="cannot be called with its returns and estimator_kwargs"):
        make_trainer(make_config(tmp_path, **REGRESSION, estimator_kwargs={"decay": 1}), by_level)


def test_the_weights_are_those_of_the_terms_of_the_loss():
    """The draw's weight enters with its square. With `sequence_token_mean` each term is divided by
    its length. What is not finite is left out."""
    samples = [
        replace(make_sample((0, 0), 2, 1), weight=3.0),
        make_sample((0, 1), 2, 4),
        replace(make_sample((0, 2), 2, 1), truncated=False),
        replace(make_sample((0, 3), 2, 1), truncated=False),
    ]
    observed = {(0, k): torch.tensor([2.0, 1.0 - k, 0.5]).double() for k in range(3)}
    observed[0, 3] = torch.tensor([2.0, torch.nan, torch.inf]).double()

    def sums(**options) -> list[float]:
        config = make_policy_config(**REGRESSION, **options)
        parts = SimpleNamespace(config=config, world=World(torch.device("cpu")))
        rollout = SimpleNamespace(groups=[SimpleNamespace(prompt=Prompt(0, [1], "x"))])
        credit = SimpleNamespace(observed=observed)
        fitted = ReturnRegression()
        learn_baseline(
            parts, fitted, SimpleNamespace(credit=credit, samples=samples, rollout=rollout)
        )
        return fitted.state_dict()["common"]

    assert sums()[0] == pytest.approx(2 * 9 + 2 + 2)
    assert sums(loss_aggregation="sequence_token_mean")[0] == pytest.approx(2 * 9 + 2 / 16 + 2)
    assert sums(mask_truncated_completions=True)[0] == pytest.approx(2)
