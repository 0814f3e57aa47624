"""What scripts for TRL do with their options besides giving them: harmless, and it works."""

from __future__ import annotations

import pytest

from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line


def test_options_under_names_of_other_values_are_read():
    config = RLOOConfig(preset="grpo", loss_type="dapo", warmup_ratio=0.1)
    assert (config.warmup_ratio, config.loss_type) == (0.1, "dapo")
    config.warmup_steps = 7
    config.loss_aggregation = "constant"
    assert (config.warmup_ratio, config.loss_type) == (0.0, "dr_grpo")
    assert (config.train_sampling_strategy, RLOOConfig().loss_type) == ("random", "sequence")
    made = to_training_arguments(RLOOConfig(warmup_ratio=0.2))
    assert (made.loss_type, made.warmup_steps) == ("sequence", 0.2)


def test_a_script_s_own_attributes_stay_on_its_options_and_reach_callbacks():
    config = RLOOConfig()
    config.curriculum_stage = {"level": 3}
    fixed = config.fixed()
    fixed.curriculum_stage_two = 2  # also when a trainer has them
    assert (fixed.curriculum_stage, fixed.curriculum_stage_two) == ({"level": 3}, 2)
    assert fixed == RLOOConfig() and "curriculum_stage" not in fixed.to_dict()
    assert to_training_arguments(fixed).curriculum_stage == {"level": 3}
    for name in ("learning_rat", "num_generation", "temprature", "max_step", "betaa"):
        with pytest.raises(ValueError, match=f"unknown option {name}; did you mean"):
            setattr(RLOOConfig(), name, 1)


def test_transformers_words_are_options():
    assert RLOOConfig(report_to=None).report_to == "none"
    given = RLOOConfig(model_init_kwargs={"torch_dtype": "bfloat16", "revision": "v1"})
    assert given.model_init_kwargs == {"dtype": "bfloat16", "revision": "v1"}
    ordered = RLOOConfig(train_sampling_strategy="sequential")
    assert (ordered.shuffle_dataset, ordered.train_sampling_strategy) == (False, "sequential")
    assert parse_command_line(["--train_sampling_strategy", "sequential"]).shuffle_dataset is False
    assert RLOOConfig(train_sampling_strategy="random").shuffle_dataset is True
    with pytest.raises(ValueError, match="train_sampling_strategy is 'sequential'; prompts are"):
        RLOOConfig(train_sampling_strategy="sequential", shuffle_dataset=True)
    with pytest.raises(ValueError, match="train_sampling_strategy is 'group_by_length'"):
        RLOOConfig(train_sampling_strategy="group_by_length")


def test_transformers_methods_that_set_options_set_ours():
    config = RLOOConfig().set_save(strategy="steps", steps=7, total_limit=2)
    config = config.set_training(learning_rate=1e-5, batch_size=4, max_steps=9)
    config = config.set_logging(strategy="steps", steps=3, report_to="none")
    config = config.set_evaluate(strategy="no")
    saved = (config.save_strategy, config.save_steps, config.save_total_limit)
    assert saved == ("steps", 7, 2)
    assert (config.learning_rate, config.max_steps, config.logging_steps) == (1e-5, 9, 3)
    assert config.per_device_train_batch_size == 4
    with pytest.raises(AttributeError, match="set_trainin"):
        _ = config.set_trainin
