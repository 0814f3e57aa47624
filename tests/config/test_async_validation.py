"""What sampling beside training is combined with, and what corrects for it."""

from dataclasses import replace

import pytest

from rloo import RLOOConfig


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, None),
        ({"max_staleness": 1}, "sequence_truncate"),
        ({"max_staleness": 1, "importance_sampling_level": "token"}, "token_truncate"),
        ({"max_staleness": 1, "importance_sampling_level": "sequence_mean"}, "token_truncate"),
        ({"max_staleness": 2, "preset": "verl"}, "token_truncate"),
        ({"max_staleness": 2, "preset": "areal"}, "token_mask"),
        (
            {"max_staleness": 1, "rollout_importance_sampling_mode": "sequence_mask"},
            "sequence_mask",
        ),
        ({"rollout_importance_sampling_mode": "off"}, None),
        ({"sampler_processes": 1}, None),
    ],
)
def test_the_correction_follows_from_the_ratios_of_the_loss(options, mode):
    config = RLOOConfig(**options)
    assert config.rollout_importance_sampling_mode == mode
    assert config.samples_beside == bool({"max_staleness", "sampler_processes"} & set(options))
    assert RLOOConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_staleness": 1, "rollout_importance_sampling_mode": "off"},
            "max_staleness is 1 and rollout_importance_sampling_mode is off; what older weights",
        ),
        ({"max_staleness": -1}, "max_staleness is -1; it must be at least 0"),
        ({"max_staleness": 2000}, "it must be at most 1,024"),
        ({"async_kwargs": {"ess_guard": True}}, "there are no weights to see a sample size in"),
        (
            {"async_kwargs": {"ess_guard": True}, "max_staleness": 1, "parallel": "zero2"},
            "DeepSpeed's step has its own learning rate",
        ),
        (
            {"sampler_processes": 1, "rollout_engine": "vllm"},
            "whose servers are processes of their own",
        ),
        ({"max_staleness": 1, "sampler_processes": 0}, "in one process nothing is sampled while"),
        (
            {"async_kwargs": {"reward_workers": 2}},
            "the run's own process samples and calls rewards",
        ),
        (
            {"async_kwargs": {"remote_workers": "sample"}},
            "remote_workers is sample, and the run's own process",
        ),
        (
            {
                "max_staleness": 1,
                "async_kwargs": {"remote_workers": "both"},
                "rollout_engine": "vllm",
            },
            "are given by address",
        ),
        (
            {"async_kwargs": {"reward_workers": 0}, "max_staleness": 1},
            "reward_workers is 0; it must be at least 1",
        ),
        (
            {"sampler_processes": 1, "engine_kwargs": {"copy_weights": False}},
            "which always has a copy",
        ),
        ({"async_kwargs": {"partial_rollouts": True}}, "it is about what vLLM has under way"),
        (
            {"async_kwargs": {"partial_rollouts": True}, "rollout_engine": "vllm"},
            "and max_staleness above 0",
        ),
        (
            {"max_staleness": 1, "rollout_engine": "vllm", "vllm_enable_sleep_mode": True},
            "has no time to sleep",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(options, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(**options)


def test_what_goes_together_is_taken():
    for options in (
        {"max_staleness": 1, "async_kwargs": {"ess_guard": True, "reward_workers": 4}},
        {"max_staleness": 2, "rollout_engine": "vllm", "async_kwargs": {"partial_rollouts": True}},
        {"max_staleness": 1, "rollout_engine": "hf"},
        {"max_staleness": 1, "dynamic_sample": True},
        {"max_staleness": 1, "parallel": "zero3"},
    ):
        RLOOConfig(**options)
    corrected = RLOOConfig(max_staleness=1)
    assert replace(corrected, max_staleness=3).max_staleness == 3
