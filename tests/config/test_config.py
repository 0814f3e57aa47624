"""RLOOConfig: types, ranges, contradictions, aliases, batch arithmetic, agreement with TRL."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from rloo.config.batch_sizes import batches_of
from rloo.config.compat.aliases import ALIASES, CONVERSIONS, SECOND_FIELDS
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.config import DEVIATIONS, RLOOConfig, resolve_interval
from rloo.config.fields import default_of
from rloo.config.kwargs_options import KWARGS, key_types
from rloo.config.options import OPTIONS
from rloo.config.validation import RANGES


def message(*args, **options) -> str:
    with pytest.raises(ValueError) as error:
        RLOOConfig(*args, **options)
    return str(error.value)


# -- the dataclass --------------------------------------------------------------------------------


def test_importing_the_configuration_imports_neither_torch_nor_transformers():
    names = ("config", "parsing", "show", "compat.training_arguments")
    modules = ", ".join(f"rloo.config.{name}" for name in names)
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_alias_and_every_range_names_an_option_and_no_name_has_two_meanings():
    types = option_types()
    assert {ours for ours, _ in ALIASES.values()} <= set(types)
    keys = {f"{option}.{key}" for option in KWARGS for key in key_types(option)}
    assert {name for _, _, names in RANGES for name in names} <= {*types, *keys}
    assert set(CONVERSIONS) <= set(ALIASES)
    assert not set(types) & set(ALIASES) and not set(types) & set(REFUSED)
    assert not set(ALIASES) & set(REFUSED)
    assert not set(WITHOUT_EFFECT) & {*types, *ALIASES, *REFUSED}


def test_every_numeric_option_has_a_range():
    ranged = {name for _, _, names in RANGES for name in names}
    types = {f"{option}.{key}": t for option in KWARGS for key, t in key_types(option).items()}
    types |= option_types()
    numeric = {n for n, t in types.items() if t in (int, float, int | None, float | None)}
    # A reward may be any number, and so may the one from which a completion passes.
    assert numeric - {"eval_kwargs.pass_threshold"} == ranged


def test_to_dict_is_json_and_makes_an_equal_configuration():
    config = RLOOConfig(
        "out",
        reward=("math", "format"),
        reward_weights=[1, 0.5],
        reward_clip_range=[-1, 1],
        model_init_kwargs={"dtype": "float32", "sizes": (1, 2)},
        report_to=["tensorboard"],
        eval_strategy="steps",
    )
    assert RLOOConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.replace(config, beta=0.5).beta == 0.5
    assert (config.output_dir, config.eval_steps, config.bf16) == ("out", 10, True)
    assert config.reward_clip_range == (-1.0, 1.0)


def test_the_configuration_shares_no_mutable_value_with_its_maker():
    options = {"use_cache": False, "nested": {"a": 1}}
    config = RLOOConfig(model_init_kwargs=options)
    options["nested"]["a"] = 2
    config.to_dict()["model_init_kwargs"]["nested"]["a"] = 3
    assert config.model_init_kwargs == {"use_cache": False, "nested": {"a": 1}}
    assert RLOOConfig().reward is not RLOOConfig().reward


def test_bf16_is_on_unless_fp16_is():
    assert RLOOConfig().bf16 is True
    assert RLOOConfig(fp16=True).bf16 is False
    assert "choose one" in message(fp16=True, bf16=True)


def test_none_as_text_and_null_both_mean_none():
    config = RLOOConfig(mean_level=None, std_level="none", epsilon_high="none", bf16=False)
    assert (config.mean_level, config.std_level, config.epsilon_high) == ("none", "none", None)


# -- wrong values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"learnign_rate": 1}, "unknown option learnign_rate; did you mean learning_rate?"),
        ({"num_generations": 1}, "num_generations is 1 and mean_level is group; leave-one-out"),
        ({"num_generations": 8.0}, "num_generations is 8.0; it must be a whole number"),
        ({"num_generations": None}, "num_generations is null"),
        ({"beta": True}, "beta is True; it must be a number"),
        ({"beta": {"a": 1}}, "beta is {'a': 1}; it must be a number"),
        ({"beta": float("nan")}, "beta is nan; it must be a finite number"),
        ({"beta": 10**400}, "it must be a number"),
        ({"bf16": 1}, "bf16 is 1; it must be true or false"),
        ({"run_name": 2024}, "run_name is 2024; it must be text"),
        ({"temperature": 0}, "temperature is 0.0; it must be above 0"),
        ({"learning_rate": -1e-6}, "learning_rate is -1e-06; it must be at least 0"),
        ({"top_p": 0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1, or -1"),
        ({"save_steps": 1.5}, "save_steps is 1.5; it must be a whole number, or below 1"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"reward_clip_range": (1, -1)}, "the first must be below the second"),
        ({"reward_clip_range": [1]}, "reward_clip_range is [1]; it must be a pair"),
        ({"reward": ["math"], "reward_weights": [1, 2]}, "2 values for 1 rewards"),
        ({"reward": [1]}, "reward is 1; it must be text"),
        ({"mean_level": "groupe"}, "one of group, batch, running, none; did you mean group?"),
        ({"eval_strategy": "best"}, "eval_strategy is 'best'; it must be one of no, steps, epoch"),
        ({"loss_constant": 3.0}, "loss_aggregation is sequence"),
        (
            {"eval_kwargs": {"pass_k": [1, 4]}},
            "eval_kwargs.pass_k contains 4; with 2 completions per prompt k",
        ),
        ({"eval_kwargs": {"pass_k": []}}, "eval_kwargs.pass_k is empty"),
        ({"dataset_config": "main"}, "dataset_config is main but no dataset is named"),
        ({"model_init_kwargs": {"a": {"b": object}}}, "model_init_kwargs.a.b is <class"),
        ({"model_init_kwargs": {"a": float("inf")}}, "model_init_kwargs.a is inf"),
        ({"use_vllm": True, "rollout_engine": "hf"}, "use_vllm is true and rollout_engine is hf"),
        ({"token_level_kl": True}, "it never had an effect"),
        ({"advantage_estimator": "gae"}, "the estimator is set by its parts, or by a preset"),
        ({"advantage_estimator": "grpo"}, "that objective is a preset here: --preset grpo"),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, "--preset reinforce_pp (preset)"),
        ({"kl_in_reward": False, "kl_estimator": "k1"}, "kl_placement is loss and kl_estimator is"),
        ({"loss_type": "sigmoid"}, "there are grpo, dr_grpo, dapo, bnpo (loss_aggregation)"),
        ({"warmup_ratio": 1.0}, "warmup_ratio is 1.0; it must be at least 0 and below 1"),
        ({"beta": 0.1, "kl_coef": 0.05}, "beta is 0.1 and kl_coef is 0.05; both set beta"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "follows a metric"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_the_fact_and_the_rule(options, expected):
    assert expected in message(**options)


def test_all_unknown_options_are_listed_at_once():
    assert message(betaa=1, epsilonn=2).count("unknown option") == 2


def test_text_is_read_as_the_option_s_type():
    config = RLOOConfig(learning_rate="1e-6", num_generations="4", bf16="false", packing="none")
    assert (config.learning_rate, config.num_generations) == (1e-6, 4)
    assert (config.bf16, config.packing) == (False, None)


def test_refused_options_are_accepted_and_readable_at_their_default():
    assert (
        RLOOConfig(use_vllm="false", pad_to_multiple_of="auto", fsdp="", eval_delay=0).fsdp is None
    )
    assert RLOOConfig().use_vllm is False and RLOOConfig().vllm_server_port == 8000
    with pytest.raises(AttributeError, match="did you mean beta"):
        RLOOConfig().betaa  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no option get_training$"):  # no far name
        RLOOConfig().get_training  # noqa: B018


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "prompts", "completions", "steps"),
    [
        ({}, 4, 8, 1),
        ({"num_generations": 6, "per_device_train_batch_size": 3,
          "gradient_accumulation_steps": 2}, 1, 6, 1),
        ({"steps_per_generation": 4, "num_iterations": 2}, 16, 8, 8),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 16, 16, 2),
        ({"generation_batch_size": 32, "num_iterations": 3}, 16, 8, 12),
        ({"num_prompts": 32, "num_generations": 16}, 32, 512, 1),
        ({"num_prompts": 3, "num_generations": 5, "steps_per_generation": 2}, 6, 15, 2),
        ({"num_prompts": 3, "num_generations": 4, "generation_batch_size": 24}, 6, 12, 2),
        ({"num_prompts": 4, "per_device_train_batch_size": 4,
          "gradient_accumulation_steps": 2}, 4, 8, 1),
    ],
)  # fmt: skip
def test_batch_arithmetic(options, prompts, completions, steps):
    config = RLOOConfig(**options)
    batches = batches_of(config, world_size=1)
    assert batches.prompts_per_rollout == prompts
    assert batches.completions_per_step == completions
    assert batches.steps_per_rollout == steps


@pytest.mark.parametrize("processes", [1, 4])
def test_train_batch_size_counts_the_completions_of_a_step_over_all_devices(processes):
    config = RLOOConfig(train_batch_size=128, num_generations=4, num_processes=processes)
    assert (config.num_prompts, config.per_device_train_batch_size) == (32, 8)
    assert batches_of(config, processes).completions_per_step == 128
    assert RLOOConfig(train_batch_size=16).num_prompts == 8  # of the default group
    assert RLOOConfig(train_batch_size=16, preset="grpo", num_generations=8).num_prompts == 2
    config = RLOOConfig(num_generations=8)
    config.train_batch_size = 64
    assert config.num_prompts == 8
    assert config.train_batch_size == 8  # as TrainingArguments has it: of a device


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_batch_size": 6, "num_generations": 4}, "a step has whole groups"),
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"train_batch_size": 16, "num_prompts": 3}, "those of 8 prompts, and num_prompts is 3"),
        ({"train_batch_size": 16, "per_device_train_batch_size": 4}, "train_batch_size sets it"),
    ],
)
def test_a_train_batch_size_that_is_none_is_refused(options, expected):
    assert expected in message(**options)
    RLOOConfig(train_batch_size=16, num_prompts=8, per_device_train_batch_size=16)  # all agree


def test_a_kl_that_is_not_in_the_reward_is_k3_in_the_loss_as_in_ms_swift():
    config = RLOOConfig(kl_in_reward=False)
    assert (config.kl_placement, config.kl_estimator) == ("loss", "k3")
    assert RLOOConfig(kl_in_reward=False, kl_estimator="k2").kl_estimator == "k2"
    assert RLOOConfig(kl_in_reward=True).kl_estimator == "k1"


def test_processes_multiply_batch_sizes_but_not_num_prompts():
    assert batches_of(RLOOConfig(), 4).completions_per_step == 32
    assert batches_of(RLOOConfig(num_prompts=8), 4).completions_per_step == 16
    RLOOConfig(num_generations=16, num_processes=2)  # 8 completions on each
    with pytest.raises(ValueError, match="a rollout has 8 completions"):
        RLOOConfig(num_generations=16)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_generations": 3}, "a rollout has 8 completions (per_device_train_batch_size 8), "
         "not a multiple of num_generations 3; set num_prompts"),
        ({"num_prompts": 3, "per_device_train_batch_size": 4}, "is 6 completions per step, but"),
        ({"num_prompts": 3, "generation_batch_size": 8}, "not a multiple of the 6 completions"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "both set the size of"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3},
         "steps_per_generation is 3, not a multiple of gradient_accumulation_steps 2"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused(options, expected):
    assert expected in message(**options)


def test_an_interval_below_one_is_a_share_of_all_steps():
    assert [resolve_interval(steps, 30) for steps in (5.0, 1.0, 0.1, 0.001)] == [5, 1, 3, 1]


# -- transformers and TRL -------------------------------------------------------------------------


def test_training_arguments_work_on_a_cpu_with_the_default_precision():
    config = RLOOConfig(optim="adafactor", lr_scheduler_type="cosine", warmup_steps=0.1, seed=7)
    arguments = to_training_arguments(config)
    assert config.bf16 and arguments.bf16
    assert arguments.optim == "adafactor" and arguments.lr_scheduler_type == "cosine"
    assert arguments.get_warmup_steps(50) == 5
    assert (arguments.seed, arguments.learning_rate, arguments.device.type) == (7, 1e-6, "cpu")
    with pytest.raises(ValueError, match=r"optim is 'adamm'; did you mean \w+\?; transf"):
        to_training_arguments(RLOOConfig(optim="adamm"))
    with pytest.raises(ValueError, match="lr_scheduler_type is 'cosin'; did you mean cosine"):
        to_training_arguments(RLOOConfig(lr_scheduler_type="cosin"))


def test_accelerate_does_not_change_the_number_of_threads_of_a_rank(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "to be put back")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("rloo.config.compat.training_arguments.is_launched", lambda: True)
    to_training_arguments(RLOOConfig())
    assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())


def test_callbacks_and_loggers_are_given_every_option():
    config = RLOOConfig(beta=0.07, num_generations=4, gradient_checkpointing=True, hub_token="no")
    arguments = to_training_arguments(config)
    assert (arguments.beta, arguments.num_generations) == (0.07, 4)
    assert arguments.gradient_checkpointing is True
    recorded = json.loads(arguments.to_json_string())
    ours = {name: value for name, value in config.to_dict().items() if name != "hub_token"}
    ours["metric_for_best_model"] = "reward"
    differing = {name for name, value in ours.items() if recorded[name] != value}
    # What TrainingArguments fills in by itself.
    assert differing <= {"report_to", "disable_tqdm", "greater_is_better"}
    assert "no" not in (recorded["hub_token"], arguments.hub_token)


def test_what_scripts_for_trl_read_is_there():
    config = RLOOConfig(kl_coef=0.07, max_new_tokens=9)
    assert (config.kl_coef, config.max_new_tokens, config.rloo_k) == (0.07, 9, 2)
    assert config.world_size == 1 and config.should_save and config.process_index == 0
    assert config.deepspeed is None and config.use_vllm is False
    with pytest.raises(AttributeError, match="has no option kl_coeff_2"):
        _ = config.kl_coeff_2
    with pytest.raises(AttributeError, match="has no option kl_in_reward"):
        _ = config.kl_in_reward  # of other values than ours


def test_options_are_changed_by_assignment_until_a_trainer_has_them():
    config = RLOOConfig("out", per_device_train_batch_size=4, num_generations=2)
    config.num_generations = 8  # fits with the next line only
    config.per_device_train_batch_size = 16
    config.model_init_kwargs = {"revision": "main"}
    config.kl_coef = "0.2"
    assert (config.num_generations, config.beta) == (8, 0.2)
    assert batches_of(config, 1).prompts_per_rollout == 2
    for name, value, expected in (
        ("max_step", 3, "unknown option max_step; did you mean max_steps"),
        ("max_steps", "many", "max_steps is 'many'"),
        ("fsdp", "full_shard", "fsdp is 'full_shard'; weights are divided"),
        ("preset", "verl", "preset cannot be assigned; give it"),
    ):
        with pytest.raises(ValueError, match=expected):
            setattr(config, name, value)
    config.num_generations = 3
    with pytest.raises(ValueError, match="not a multiple of num_generations 3"):
        config.fixed()
    config.num_generations = 4
    fixed = config.fixed()
    assert fixed == config and fixed is not config
    with pytest.raises(ValueError, match="beta cannot be changed: these options belong to"):
        fixed.beta = 0.1
    config.beta = 0.1  # for another trainer; the first one says that it has other options
    assert config.fixed().beta == 0.1 != fixed.beta
    with pytest.raises(ValueError, match="beta cannot be changed: these options belong to"):
        fixed.with_asked()
    with pytest.raises(ValueError, match=r"beta is -1\.0; it must be at least 0"):
        config.beta = -1
    assert dataclasses.replace(fixed, beta=0.1).beta == 0.1
    dataclasses.replace(fixed).beta = 0.3


def test_what_is_unchanged_since_it_was_checked_is_fixed_without_checking_it_again(monkeypatch):
    config = RLOOConfig("out", reward=["math"], model_init_kwargs={"a": [1]}, seed=3)
    checks = []
    monkeypatch.setattr("rloo.config.config.check", checks.append)
    fixed = config.fixed().with_values(num_threads=2).fixed()
    assert fixed == dataclasses.replace(config, num_threads=2) and len(checks) == 1  # by replace
    assert fixed.model_init_kwargs is not config.model_init_kwargs
    with pytest.raises(ValueError, match="beta cannot be changed"):
        fixed.beta = 0.1


def test_a_list_changed_in_place_is_checked_again():
    config = RLOOConfig(reward=["math"], reward_weights=[1.0])
    config.reward.append("format")
    with pytest.raises(ValueError, match="reward_weights has 1 values for 2 rewards"):
        config.fixed()


def test_an_option_without_effect_reads_what_was_given():
    with pytest.warns(UserWarning, match="dataloader_num_workers is 4, which has no effect"):
        config = RLOOConfig(dataloader_num_workers=4)
    assert (config.dataloader_num_workers, RLOOConfig().dataloader_num_workers) == (4, 0)
    with pytest.warns(UserWarning, match="log_level is 'info', which has no effect"):
        config.log_level = "info"
    fixed = config.fixed()
    assert (fixed.dataloader_num_workers, fixed.log_level) == (4, "info")
    assert fixed.with_values(seed=1).dataloader_num_workers == 4


def test_flags_of_trls_script_are_understood():
    with pytest.warns(UserWarning, match="attn_implementation is 'sdpa', which has no effect"):
        RLOOConfig(attn_implementation="sdpa")
    config = RLOOConfig(
        model_name_or_path="m", reward_model_name_or_path="r", dtype="float32", model_revision=None
    )
    assert (config.model, config.reward) == ("m", ["r"])
    with pytest.warns(UserWarning, match="dtype is 'bfloat16', which has no effect: weights are"):
        assert RLOOConfig(dtype="bfloat16") == RLOOConfig()
    assert "model_init_kwargs" in message(model_revision="v2")
    assert "train_dataset" in message(dataset_streaming=True)


def test_of_accelerator_config_is_taken_what_changes_nothing(tmp_path):
    from transformers.trainer_pt_utils import AcceleratorConfig

    path = tmp_path / "file.json"
    path.write_text('{"even_batches": false}')
    said = {"dispatch_batches": False, "non_blocking": True}
    for given, shown in (
        (AcceleratorConfig(**said), said),
        (said, said),
        ('{"dispatch_batches": true}', {"dispatch_batches": True}),
        (str(path), {"even_batches": False}),
    ):
        with pytest.warns(UserWarning, match=re.escape(f"{shown}, which has no effect: prompts")):
            assert RLOOConfig(accelerator_config=given).accelerator_config == given
    for given in ({}, None, {"split_batches": False}, AcceleratorConfig()):
        RLOOConfig(accelerator_config=given)  # without a warning
    assert "accelerator_config has split_batches True; per_device_train_batch_size counts" in (
        message(accelerator_config=AcceleratorConfig(split_batches=True))
    )
    steps = {"gradient_accumulation_kwargs": {"num_steps": 4}}
    assert "over gradient_accumulation_steps" in message(accelerator_config=steps)
    assert "no dispatch; did you mean dispatch_batches?" in (
        message(accelerator_config={"dispatch": True})
    )
    assert "must be a mapping" in message(accelerator_config=AcceleratorConfig)
    assert "missing.json" in message(accelerator_config="missing.json")


def test_options_that_scripts_ask_are_kept_for_them():
    config = RLOOConfig(do_train=True, do_predict=True)
    assert (config.do_train, config.do_predict, config.do_eval) == (True, True, False)
    assert RLOOConfig(eval_strategy="epoch").do_eval  # as TrainingArguments says


def test_what_trl_leaves_out_without_vllm_is_left_out():
    with pytest.warns(UserWarning, match="regex is 'a', which has no effect: use_vllm is false"):
        RLOOConfig(vllm_structured_outputs_regex="a")
    assert "sampled from the policy alone" in message(
        vllm_structured_outputs_regex="a", use_vllm=True
    )


def test_the_second_name_of_a_field_sets_it_unless_it_is_null():
    config = RLOOConfig(activation_checkpointing=False, activation_checkpointing_kwargs=None)
    assert config.gradient_checkpointing is False
    assert dataclasses.replace(config, gradient_checkpointing=True).gradient_checkpointing
    assert "both set gradient_checkpointing" in message(
        activation_checkpointing=False, gradient_checkpointing=True
    )


def test_other_ways_to_write_a_value_are_read():
    assert RLOOConfig(top_k=None).top_k == 0
    grpo = {"loss_type": "dr_grpo", "scale_rewards": False}
    with pytest.warns(UserWarning, match="loss_type, scale_rewards: of TRL's GRPO"):
        config = RLOOConfig(**grpo, max_completion_length=7, reward_funcs=["a.b.c"])
    assert (config.loss_aggregation, config.loss_constant) == ("constant", 7.0)
    assert (config.std_level, config.reward) == ("none", ["a.b:c"])
    meant = {"preset": "trl"}
    assert RLOOConfig(scale_rewards="batch", loss_type="dapo", **meant).std_level == "batch"
    assert RLOOConfig(scale_rewards=True, **meant).std_level == "group"
    with pytest.warns(UserWarning, match="accuracy_reward is the built-in math here"):
        config = RLOOConfig(
            reward_funcs=["accuracy_reward", "think_format_reward", "math", "f.py:g"]
        )
    assert config.reward == ["math", "trl.rewards:think_format_reward", "math", "f.py:g"]
    assert RLOOConfig(reward=["a.b"]).reward == ["a.b"]  # a model, by the name that it has here


def check_defaults(theirs) -> None:
    ours = {field.name: default_of(field) for field in OPTIONS}
    for field in dataclasses.fields(theirs):
        default = default_of(field)
        if field.name in DEVIATIONS:
            assert DEVIATIONS[field.name][:2] == (default, ours[field.name])
        elif field.name in ours:
            assert ours[field.name] == default, field.name
        elif field.name in REFUSED:
            accepted, _ = REFUSED[field.name]
            assert accepted[0] == default, field.name
        elif field.name in SECOND_FIELDS:
            assert default is None
        else:
            assert WITHOUT_EFFECT[field.name][0] == default, field.name


def test_every_field_of_training_arguments_is_honoured_or_refused():
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names <= {*option_types(), *REFUSED, *WITHOUT_EFFECT, *SECOND_FIELDS}


@pytest.mark.peers
def test_every_option_of_trl_is_honoured_or_refused_and_has_its_default():
    from trl import RLOOConfig as Theirs

    check_defaults(Theirs)
