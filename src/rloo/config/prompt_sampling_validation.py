"""Checks of `prompt_sampling`: options that do not combine with weighted prompts."""

from __future__ import annotations

from collections.abc import Iterator

from rloo.config.estimator_config import estimator_config_of
from rloo.config.loss_validation import without_effect
from rloo.config.options import TrainingOptions
from rloo.config.presets import preset_options

# (option, the values that combine with weights, the reason why others do not)
_COMBINED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("dynamic_sample", (False,), "which draws until groups differ: a draw then depends on rewards "
     "of this rollout, and its probability is not known"),
    ("shuffle_dataset", (True,), "and prompts are drawn at random"),
    ("loss_aggregation", ("sequence", "sequence_token_mean", "constant"), "whose denominator is "
     "the number of tokens, which depends on the drawn prompts (loss_aggregation constant)"),
    ("mean_level", ("group", "none"), "whose baseline is a mean over the drawn prompts"),
    ("std_level", ("group", "none"), "whose deviation is over the drawn prompts"),
    ("normalize_advantages", (False,), "whose mean and deviation are over the drawn prompts"),
    ("normalize_rewards", ("none",), "whose mean and deviation are over drawn prompts"),
    ("dataset_kwargs.curriculum", (False,), "and a curriculum draws the prompts itself"),
    ("kl_kwargs.target", (None,), "which adapts beta to the KL of the drawn prompts"),
    ("async_kwargs.ess_guard", (False,), "which scales a step by the drawn prompts' weights"),
)  # fmt: skip


def check_prompt_sampling(config: TrainingOptions) -> None:
    """Raise ValueError for the first option that has no effect, or that does not combine with
    `prompt_sampling` variance: with it the expected gradient would not be that of uniform
    drawing."""
    for fault in _faults(config):
        raise ValueError(fault)


def refused_with_weights(name: str, value: object, why: str) -> str:
    """The text of an error: the option `name` has a value that does not combine with weights."""
    return (
        f"{name} is {value} and prompt_sampling is variance, {why}; with weighted prompts the "
        f"expected gradient would not be that of uniform drawing ({name.split(' ')[0]}, or "
        "prompt_sampling uniform)"
    )


def _faults(config: TrainingOptions) -> Iterator[str]:
    weighted = config.prompt_sampling == "variance"
    most, pilot = config.prompt_options.max_generations, config.prompt_options.pilot
    rules = (
        ("column", weighted, "prompt_sampling variance"),
        ("floor", weighted, "prompt_sampling variance"),
        ("half_life", weighted, "prompt_sampling variance"),
        ("probe", weighted, "prompt_sampling variance"),
        ("max_generations", weighted, "prompt_sampling variance"),
        ("pilot", most is not None, "prompt_sampling_kwargs.max_generations"),
        ("max_resample_times", config.dynamic_sample, "dynamic_sample"),
    )
    usual = preset_options(config.preset).get("prompt_sampling_kwargs") or {}
    yield from without_effect(config.prompt_options, rules, usual, "prompt_sampling_kwargs.")
    if not weighted:
        return
    mappings = {
        "dataset_kwargs": config.dataset_options,
        "kl_kwargs": config.kl_options,
        "async_kwargs": config.async_options,
    }
    for name, combined, why in _COMBINED:
        option, dot, key = name.partition(".")
        value = getattr(mappings[option], key) if dot else getattr(config, name)
        if value not in combined:
            yield refused_with_weights(name, value, why)
    if most is not None:
        yield from _group_faults(config, most)
    if pilot is not None:
        yield from _pilot_faults(config, pilot)
    groups = config.parallel_options
    if config.prompt_options.probe == "policy":
        for name, value, needed in (
            ("parallel", config.parallel, "replicate"),
            ("sp_size", groups.sp_size, 1),
            ("tp_size", groups.tp_size, 1),
        ):
            if value != needed:
                yield (
                    f"prompt_sampling_kwargs.probe is policy and {name} is {value}; each process "
                    "reads other candidates, and needs all weights for it (prompt_sampling_kwargs."
                    f"probe text, or {name} {needed})"
                )


def _group_faults(config: TrainingOptions, most: int) -> Iterator[str]:
    """Faults of `max_generations`: numbers that leave no choice, and objectives whose expected
    gradient depends on the number of completions."""
    size, name = config.num_generations, f"prompt_sampling_kwargs.max_generations is {most}"
    if size < 3:
        yield (
            f"{name} and num_generations is {size}; each prompt has at least 2 completions, so "
            "none is left for another prompt (num_generations at least 3)"
        )
    if most <= size:
        yield (
            f"{name} and num_generations is {size}, the mean number of completions; the largest "
            "number is above the mean (prompt_sampling_kwargs.max_generations)"
        )
    for option, value, why in _depends_on_size(config):
        yield (
            f"{option} is {value} and {name}, {why}; with other numbers of completions the "
            f"expected gradient would not be that of num_generations ({option}, or "
            "prompt_sampling_kwargs.max_generations null)"
        )


def _pilot_faults(config: TrainingOptions, pilot: int) -> Iterator[str]:
    """Faults of `pilot`: numbers that leave no choice, and rollouts that are not sampled in two
    stages."""
    size, name = config.num_generations, f"prompt_sampling_kwargs.pilot is {pilot}"
    if pilot < 2:
        yield (
            f"{name}; the baseline of a pilot's completion is the mean reward of the pilot's other "
            "completions, so a pilot has at least 2 (prompt_sampling_kwargs.pilot)"
        )
    if pilot > size - 2:
        yield (
            f"{name} and num_generations is {size}; each prompt has at least 1 further completion, "
            f"and with fewer than {pilot + 2} on average none is left for another prompt "
            "(prompt_sampling_kwargs.pilot at most num_generations - 2)"
        )
    for option, value, needed in (
        ("max_staleness", config.max_staleness, 0),
        ("sampler_processes", config.sampler_processes, "null"),
    ):
        if value:
            yield (
                f"{name} and {option} is {value}; other processes sample the completions of a "
                "prompt in one stage, before any of its rewards is known "
                f"(prompt_sampling_kwargs.pilot null, or {option} {needed})"
            )


def _depends_on_size(config: TrainingOptions) -> Iterator[tuple[str, object, str]]:
    """Options (name, value, reason) with which a group's expected gradient depends on its size."""
    given = config.estimator_kwargs or {}
    left_in = "whose baseline includes the completion itself"
    if config.estimator == "grpo":
        yield "estimator", "grpo", left_in
    if given.get("leave1out", True) is not True:
        yield "estimator_kwargs.leave1out", given["leave1out"], left_in
    if config.estimator != "composed":
        return
    form = estimator_config_of(config)
    if form.std_level == "group":
        yield "std_level", "group", "whose deviation is over the completions of the group"
    if form.mean_level != "group":
        return
    if not form.mean_leave1out:
        yield "mean_leave1out", False, left_in
    if form.mean_over == "tokens":
        yield "estimator_kwargs.mean_over", "tokens", left_in
    if form.advantage_clip_range is not None:
        clipped = "which clips advantages, whose distribution depends on the size of the group"
        yield "estimator_kwargs.advantage_clip_range", form.advantage_clip_range, clipped
