"""TRL's ways of asking for vLLM, and what vLLM does not sample."""

import pytest

from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.config.show import render_resolved
from rloo.config.vllm_options import has_separate_gpus, memory_share
from rloo.trainer.resume import changed_options

SERVER = {"rollout_engine": "vllm_server", "vllm_server_base_url": "http://a:1"}


@pytest.mark.parametrize(
    ("options", "engine", "url"),
    [
        ({"use_vllm": True}, "vllm", None),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vllm", None),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_server", ["http://127.0.0.1:8000"]),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "node7",
             "vllm_server_port": 9000},
            "vllm_server", ["http://node7:9000"],
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://b:2"},
            "vllm_server", ["http://b:2"],
        ),
        ({"vllm_mode": "server", "vllm_server_host": "node7"}, "auto", None),
        ({"use_vllm": False, "vllm_tensor_parallel_size": 4}, "auto", None),
        (SERVER, "vllm_server", ["http://a:1"]),
    ],
)  # fmt: skip
def test_trls_options_say_what_samples(options, engine, url):
    config = RLOOConfig(**options)
    assert (config.rollout_engine, config.vllm_server_base_url) == (engine, url)
    assert RLOOConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"rollout_engine": "vllm_server"}, "vllm_server_base_url is null; say where"),
        ({**SERVER, "rollout_engine": "vllm"}, "to use that one set rollout_engine vllm_server"),
        ({**SERVER, "vllm_server_base_url": "a:1"}, "an address begins with http"),
        ({**SERVER, "top_p": 0.9}, "top_p is 0.9 and rollout_engine is vllm_server"),
        ({**SERVER, "eval_kwargs": {"top_k": 5}}, "eval_kwargs.top_k is 5"),
        ({**SERVER, "min_p": 0.1}, "min_p is 0.1"),
        ({**SERVER, "repetition_penalty": 1.2}, "repetition_penalty is 1.2"),
        ({**SERVER, "temperature": 0.001}, "temperature is 0.001; vLLM samples from 0.01 to 2"),
        ({**SERVER, "eval_kwargs": {"temperature": 3.0}}, "temperature is 3; vLLM samples"),
        ({**SERVER, "engine_kwargs": {"copy_weights": True}}, "it is about the native engine"),
        ({"engine_kwargs": {"devices": ["1"]}}, "engine_kwargs.devices is .* it is about vLLM"),
        ({**SERVER, "engine_kwargs": {"devices": ["1"]}}, "a given server has its devices"),
        ({"rollout_engine": "vllm", "engine_kwargs": {"devices": []}}, "devices is empty"),
        (
            {"rollout_engine": "vllm", "engine_kwargs": {"devices": ["1", "2", "3"]},
             "vllm_tensor_parallel_size": 2},
            "every server takes as many",
        ),
        (
            {"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2, "num_processes": 3},
            "vllm_tensor_parallel_size is 2 and 3 processes train; each server takes the GPUs",
        ),
        (
            {"rollout_engine": "vllm", "vllm_max_model_length": 512},
            "vllm_max_model_length is 512 and max_completion_length 512",
        ),
        (
            {"rollout_engine": "vllm", "vllm_max_model_length": 611, "max_prompt_length": 100},
            r"vllm_max_model_length is 611, and the longest prompt and completion have 100 \+ 512 ",
        ),
        (
            {"rollout_engine": "vllm", "vllm_max_model_length": 600,
             "eval_kwargs": {"max_completion_length": 600}},
            r"vllm_max_model_length is 600, .* 1 \+ 600 tokens; a server must hold",
        ),
        ({"use_vllm": True, "rollout_engine": "native"}, "both say what samples"),
        ({"vllm_gpu_memory_utilization": 1.5}, "must be above 0 and at most 1"),
        ({"vllm_server_port": 0}, "must be from 1 to 65535"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options, fact):
    with pytest.raises(ValueError, match=fact):
        RLOOConfig(**options)


def test_ranks_that_cannot_share_servers_are_refused_before_a_model_is_loaded(monkeypatch):
    options = {"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2}
    assert RLOOConfig(**options)  # one process, with two GPUs
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="2 and 3 processes train"):
        RLOOConfig(**options)
    assert RLOOConfig(**options, max_staleness=1)
    assert RLOOConfig(**options, engine_kwargs={"devices": ["3", "4"]})
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert RLOOConfig(**options)


def test_a_context_of_the_longest_sequence_is_enough():
    lengths = {"max_prompt_length": 100, "max_completion_length": 512}
    assert RLOOConfig(rollout_engine="vllm", vllm_max_model_length=612, **lengths)


OWN = {"rollout_engine": "vllm", "engine_kwargs": {"devices": ["1"]}}


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 0.3),
        ({"rollout_engine": "vllm"}, 0.3),
        ({"use_vllm": True, "vllm_mode": "colocate"}, 0.3),
        ({"use_vllm": True, "vllm_mode": "server"}, 0.9),
        (SERVER, 0.9),
        (OWN, 0.9),
        ({**OWN, "vllm_gpu_memory_utilization": 0.3}, 0.3),
        ({"rollout_engine": "vllm", "vllm_gpu_memory_utilization": 0.9}, 0.9),
    ],
)
def test_the_share_of_memory_follows_from_the_placement_unless_it_is_set(options, share, tmp_path):
    config = RLOOConfig(**options)
    assert memory_share(config, separate=has_separate_gpus(config)) == share
    path = tmp_path / "config.yaml"
    path.write_text(render_resolved(config))
    again = parse_command_line([str(path)])
    assert again == config
    assert again.vllm_gpu_memory_utilization == options.get("vllm_gpu_memory_utilization")


def test_a_run_that_recorded_the_former_default_has_equal_options():
    config = RLOOConfig(**OWN)
    before = {**config.to_dict(), "vllm_gpu_memory_utilization": 0.3}
    assert changed_options(before, config) == []
    assert RLOOConfig(**before).vllm_gpu_memory_utilization == 0.3
