"""RLOOArguments: TRL's options for HfArgumentParser and other parsers of dataclasses."""

import copy
import json
import pickle
from dataclasses import dataclass, fields

import pytest
from transformers import HfArgumentParser

from rloo import RLOOArguments, RLOOConfig, RLOOTrainer
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT
from support.models import make_model
from support.text import make_tokenizer
from support.training import ROWS, count_words


def parse(text: str, *flags: str) -> RLOOArguments:
    (arguments,) = HfArgumentParser(RLOOArguments).parse_args_into_dataclasses(
        [*text.split(), *flags], look_for_args_file=False
    )
    return arguments


def test_without_flags_the_options_are_the_defaults_of_the_config():
    assert parse("") == RLOOArguments()
    assert parse("").to_config() == RLOOConfig()
    assert HfArgumentParser(RLOOArguments).format_help().count("--hub_strategy") == 2


def test_flags_of_every_kind_reach_the_config():
    flags = (
        "--output_dir out --learning_rate 3e-5 --num_generations 4 --gradient_checkpointing false "
        "--log_completions --no_log_multimodal --bf16 True --eval_strategy steps --eval_steps 0.5 "
        "--reward_weights 1 0.5 --reward_clip_range -5 5 --report_to wandb "
        "--resume_from_checkpoint true --save-total-limit 2 --hub_model_id none --min_p 0.1"
    )
    given = {"dtype": "float32", "nested": {"a": [1, True, None]}}
    arguments = parse(flags, "--model_init_kwargs", json.dumps(given))
    assert arguments.model_init_kwargs == given  # scripts update it
    assert arguments.resume_from_checkpoint is True  # scripts hand it to `train`
    assert arguments.eval_strategy == "steps"
    assert arguments.to_config() == RLOOConfig(
        output_dir="out",
        learning_rate=3e-5,
        num_generations=4,
        gradient_checkpointing=False,
        log_completions=True,
        log_multimodal=False,
        bf16=True,
        eval_strategy="steps",
        eval_steps=0.5,
        reward_weights=[1.0, 0.5],
        reward_clip_range=(-5.0, 5.0),
        report_to="wandb",
        resume_from_checkpoint=True,
        save_total_limit=2,
        min_p=0.1,
        model_init_kwargs=given,
    )


def test_every_option_parses_at_its_default_written_out():
    for field in fields(RLOOArguments):
        default = getattr(RLOOArguments(), field.name)
        if default is None or default in ("", []):
            continue
        flags = f"--{field.name} {default}"
        assert parse(flags).to_config() == RLOOConfig(), flags


def test_what_is_refused_parses_and_is_refused_by_the_config_with_its_reason():
    with pytest.raises(ValueError, match="vllm_structured_outputs_regex is 'x'; completions are"):
        parse("--vllm_structured_outputs_regex x").to_config()
    with pytest.raises(ValueError, match=r"fsdp is 'full_shard'; weights are divided by"):
        parse("--fsdp full_shard").to_config()
    with pytest.warns(UserWarning, match="per_device_eval_batch_size is 2, which has no effect"):
        parse("--per_device_eval_batch_size 2").to_config()
    # At the values that change nothing they are accepted, also at those that are not the default.
    assert parse("--tf32 none --fsdp", "").to_config() == RLOOConfig()
    names = {field.name for field in fields(RLOOArguments)}
    assert {"vllm_structured_outputs_regex", "fsdp_config"} <= names & set(REFUSED)
    assert "use_cache" in names & set(WITHOUT_EFFECT)


def test_wrong_values_are_refused_when_they_are_parsed():
    with pytest.raises(ValueError, match="model_init_kwargs is 'x'; it must be a mapping"):
        parse("--model_init_kwargs x")
    with pytest.raises(ValueError, match=r"reward_clip_range is .*; it must be a pair of numbers"):
        parse("--reward_clip_range 1")


def test_options_can_be_read_and_set_and_a_misspelt_one_is_an_error():
    arguments = RLOOArguments(output_dir="out")
    assert (arguments.push_to_hub, arguments.world_size, arguments.should_save) == (False, 1, True)
    arguments.model_init_kwargs = {"revision": "main"}
    arguments.max_steps = 3
    config = arguments.to_config()
    assert (config.max_steps, config.model_init_kwargs) == (3, {"revision": "main"})
    with pytest.raises(AttributeError, match="max_stepz"):
        arguments.max_stepz = 3
    with pytest.raises(TypeError, match="preset"):
        RLOOArguments(preset="paper")
    assert copy.deepcopy(arguments) == pickle.loads(pickle.dumps(arguments)) == arguments
    assert "secret" not in repr(RLOOArguments(hub_token="secret"))


def test_a_subclass_adds_options_of_ours_changes_defaults_and_keeps_its_own_fields():
    @dataclass
    class Arguments(RLOOArguments):
        beta: float = 0.0
        preset: str | None = None
        system_prompt: str | None = None

    parser = HfArgumentParser(Arguments)
    flags = ["--preset", "areal", "--system_prompt", "Think.", "--epsilon", "0.3"]
    (arguments,) = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    config = arguments.to_config()
    assert config == RLOOConfig(preset="areal", beta=0.0, epsilon=0.3)
    assert config.normalize_advantages  # the preset says so, and no default overrules it
    assert Arguments().to_config() == RLOOConfig(beta=0.0)


def test_yaml_values_that_skip_the_command_line_are_read_as_by_the_config():
    parser = HfArgumentParser(RLOOArguments)
    written = {"eval_strategy": False, "learning_rate": "1e-5", "reward_clip_range": [-1, 1]}
    (arguments,) = parser.parse_dict(written | {"report_to": ["wandb", "trackio"]})
    assert (arguments.eval_strategy, arguments.learning_rate) == ("no", 1e-5)
    assert arguments.to_config() == RLOOConfig(
        learning_rate=1e-5, reward_clip_range=(-1, 1), report_to=["wandb", "trackio"]
    )


def test_the_trainer_takes_them_with_what_trls_script_puts_into_model_init_kwargs(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    arguments = parse("--max_steps 1 --use_cpu --output_dir", str(tmp_path / "out"))
    arguments.model_init_kwargs = {
        "revision": "main",
        "trust_remote_code": arguments.trust_remote_code,
        "attn_implementation": None,
        "dtype": "float32",
    }
    trainer = RLOOTrainer(str(tmp_path / "tiny"), count_words, arguments, ROWS)
    assert isinstance(trainer.args, RLOOConfig) and trainer.args.max_steps == 1
    assert trainer.args.output_dir == str(tmp_path / "out")
    with pytest.raises(ValueError, match="max_steps cannot be changed"):
        trainer.args.max_steps = 2
    with pytest.raises(ValueError, match=r"it must be a rloo\.RLOOConfig \(or RLOOArguments\)"):
        RLOOTrainer(str(tmp_path / "tiny"), count_words, {"max_steps": 1}, ROWS)
