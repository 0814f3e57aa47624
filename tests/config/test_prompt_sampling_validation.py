"""What does not combine with weighted prompts is refused, with the reason and the knob."""

import pytest

from rloo.config.config import RLOOConfig

VARIANCE = {"prompt_sampling": "variance"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prompt_sampling": "varianc"}, "it must be one of uniform, variance"),
        ({**VARIANCE, "dynamic_sample": True}, "dynamic_sample is True and prompt_sampling is var"),
        ({**VARIANCE, "shuffle_dataset": False}, "shuffle_dataset is False and prompt_sampling is"),
        ({**VARIANCE, "loss_aggregation": "token_mean"}, "the number of tokens, which depends on"),
        ({**VARIANCE, "preset": "verl"}, "loss_aggregation is token_mean and prompt_sampling is"),
        ({**VARIANCE, "mean_level": "batch"}, "whose baseline is a mean over the drawn prompts"),
        ({**VARIANCE, "mean_level": "running"}, "mean_level is running and prompt_sampling is var"),
        ({**VARIANCE, "std_level": "batch"}, "whose deviation is over the drawn prompts"),
        ({**VARIANCE, "normalize_advantages": True}, "normalize_advantages is True and prompt_sam"),
        ({**VARIANCE, "normalize_rewards": "running"}, "normalize_rewards is running and prompt_s"),
        (
            {**VARIANCE, "dataset": "gym:gcd", "dataset_kwargs": {"curriculum": True}},
            r"dataset_kwargs.curriculum is True and .* \(dataset_kwargs.curriculum, or prom",
        ),
        ({**VARIANCE, "kl_kwargs": {"target": 0.1}}, "adapts beta to the KL of the drawn prompts"),
        (
            {**VARIANCE, "max_staleness": 1, "async_kwargs": {"ess_guard": True}},
            "async_kwargs.ess_guard is True and prompt_sampling is variance",
        ),
        ({"prompt_sampling_kwargs": {"floor": 0.5}}, "no effect without prompt_sampling variance"),
        ({"prompt_sampling_kwargs": {"column": "a"}}, "prompt_sampling_kwargs.column is a but has"),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"max_resample_times": 5}},
            "max_resample_times is 5 but has no effect without dynamic_sample",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"floors": 0.5}},
            "unknown key floors of prompt_sampling_kwargs; did you mean floor",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"floor": 0.0}},
            "prompt_sampling_kwargs.floor is 0.0; it must be above 0 and at most 1",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"half_life": 0}},
            "prompt_sampling_kwargs.half_life is 0.0; it must be above 0",
        ),
    ],
)
def test_what_does_not_combine_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        RLOOConfig(**options)


@pytest.mark.parametrize("preset", ["paper", "trl", "ms_swift", "grpo", "dr_grpo", "areal_page"])
def test_objectives_of_single_groups_combine(preset):
    assert RLOOConfig(**VARIANCE, preset=preset).prompt_options.floor == 0.25
