"""What accelerate's own launcher puts into the environment, read as options or refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from transformers.integrations import is_deepspeed_zero3_enabled

from rloo import RLOOConfig
from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.kwargs_options import ParallelKwargs
from rloo.config.launcher_env import check_launch, unseen

LAUNCHERS = {
    "multi_gpu_launcher": prepare_multi_gpu_env,
    "deepspeed_launcher": lambda args: prepare_deepspeed_cmd_env(args)[1],
}
FILE = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""
FSDP = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: {offload}
  fsdp_reshard_after_forward: {reshard}
  fsdp_state_dict_type: {state}
  fsdp_version: {version}
"""
FSDP_AS_PUBLISHED = FSDP.format(offload="false", reshard="true", state="FULL_STATE_DICT", version=1)
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  offload_optimizer_device: {offload}
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: {stage}
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Sets the environment of a process that accelerate starts by a configuration file."""

    def start(text: str, *words: str) -> None:
        file = tmp_path / "accelerate.yaml"
        file.write_text(FILE + text, encoding="utf-8")
        made: dict[str, str] = {}
        for name, environment_of in LAUNCHERS.items():  # what would start the processes
            monkeypatch.setattr(launch, name, lambda args, of=environment_of: made.update(of(args)))
        parser = launch.launch_command_parser()
        launch.launch_command(parser.parse_args(["--config_file", str(file), *words, "x.py"]))
        for name, value in made.items():
            if name.startswith(("ACCELERATE_", "FSDP_", "PARALLEL")) and name not in os.environ:
                monkeypatch.setenv(name, value)

    return start


def fsdp(offload="false", reshard="true", state="FULL_STATE_DICT", version=2) -> str:
    return FSDP.format(offload=offload, reshard=reshard, state=state, version=version)


def sizes(replicas: int, shards: int, slices: int = 1, tensors: int = 1) -> str:
    return fsdp() + (
        "parallelism_config:\n  parallelism_config_cp_size: 1\n"
        f"  parallelism_config_dp_replicate_size: {replicas}\n"
        f"  parallelism_config_dp_shard_size: {shards}\n"
        f"  parallelism_config_sp_size: {slices}\n  parallelism_config_tp_size: {tensors}\n"
    )


def zero(stage=3, offload="none") -> str:
    return DEEPSPEED.format(stage=stage, offload=offload)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fsdp(), {}),
        (fsdp(version=1, reshard="FULL_SHARD"), {}),
        (
            fsdp(state="SHARDED_STATE_DICT"),
            {"parallel_options": ParallelKwargs(state_dict_type="sharded")},
        ),
        (fsdp(offload="true"), {"offload": ["params"]}),
        (sizes(2, 4), {"parallel_options": ParallelKwargs(dp_shard_size=4)}),
        (sizes(2, 2, 2), {"parallel_options": ParallelKwargs(dp_shard_size=4, sp_size=2)}),
        (sizes(1, 4, 2), {"parallel_options": ParallelKwargs(sp_size=2)}),
    ],
)
def test_fsdp(launched, text, expected):
    launched(text)
    config = RLOOConfig()
    known = {"parallel": "fsdp2", "parallel_options": ParallelKwargs(), "offload": []} | expected
    assert {name: getattr(config, name) for name in known} == known
    check_launch(config)


def test_sizes_of_groups_that_contradict_or_are_unknown_are_refused(launched):
    launched(sizes(1, 2, 2, tensors=2))
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE 2, which is not taken"):
        RLOOConfig()
    os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "1"
    assert RLOOConfig(sp_size=2).sp_size == 2
    with pytest.raises(ValueError, match="sp_size is 4, and accelerate was told 2"):
        RLOOConfig(sp_size=4)


def test_a_class_of_layers_that_is_named_is_gathered_as_all_are(launched):
    launched(fsdp() + "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n")
    assert RLOOConfig().parallel == "fsdp2"


@pytest.mark.parametrize("text", (FSDP_AS_PUBLISHED, DEEPSPEED))
def test_transformers_leaves_to_this_program_what_accelerate_was_told(launched, text):
    launched(text.format(stage=3, offload="none"))
    told = {name for name in os.environ if name.startswith(("ACCELERATE_USE", "FSDP_"))}
    arguments = to_training_arguments(RLOOConfig(use_cpu=True))
    assert not is_deepspeed_zero3_enabled() and arguments.deepspeed_plugin is None
    assert told == {name for name in os.environ if name.startswith(("ACCELERATE_USE", "FSDP_"))}
    with unseen():
        assert "ACCELERATE_USE_FSDP" not in os.environ


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_deepspeed(launched, stage):
    launched(zero(stage, offload="cpu"))
    config = RLOOConfig()
    assert config.parallel == f"zero{stage}"
    offload = {"device": "cpu"}
    assert config.deepspeed["zero_optimization"] == {"stage": stage, "offload_optimizer": offload}
    check_launch(config)


def test_a_file_of_deepspeed_s(launched, tmp_path):
    file: Path = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    launched(
        f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {file}\n"
        "  deepspeed_multinode_launcher: standard\n  zero3_init_flag: false\n"
    )
    assert (config := RLOOConfig()).parallel == "zero1"
    assert replace(config, seed=3).seed == 3 and RLOOConfig(**config.to_dict()) == config
    other: Path = tmp_path / "other.json"
    other.write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"accelerate was told .*zero\.json, which says something"):
        RLOOConfig(deepspeed=str(other))
    with pytest.raises(ValueError, match=r"parallel is zero3 and zero_optimization\.stage is 1"):
        RLOOConfig(parallel="zero3")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (fsdp(reshard="false"), {}, "FSDP_RESHARD_AFTER_FORWARD false.*freed after each forward"),
        (fsdp(), {"parallel": "replicate"}, "parallel is replicate, and accelerate was told fsdp2"),
        (zero(2), {"parallel": "fsdp2"}, "parallel is fsdp2, and accelerate was told zero2"),
        (zero(2, offload="nvme"), {}, "offload_optimizer.device is nvme"),
        (
            zero(2),
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            "parallel is zero2 and zero_optimization.stage is 3",
        ),
    ],
)
def test_what_contradicts_or_is_not_taken_is_refused(launched, text, options, said):
    launched(text)
    with pytest.raises(ValueError, match=said):
        RLOOConfig(**options)
