"""Options with invalid values: some written by hand, some generated for random options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.chaos.bad_inputs.cases import Case, write_options
from rloo.config.compat.parser_fields import option_types
from rloo.config.fields import kinds_of

# An option and its value on the command line.
_WRONG: tuple[tuple[str, str], ...] = (
    ("num_generations", "1000000"),
    ("num_generations", "1"),
    ("num_generations", "-2"),
    ("num_generations", "2.5"),
    ("num_generations", "nan"),
    ("num_generations", "1e6"),
    ("num_generations", "9" * 5000),
    ("num_prompts", "1000000000"),
    ("num_prompts", "0"),
    ("max_completion_length", "1000000000"),
    ("max_completion_length", "0"),
    ("max_prompt_length", "0"),
    ("eval_kwargs.max_completion_length", "-1"),
    ("per_device_train_batch_size", "1000000000"),
    ("gradient_accumulation_steps", "1000000000"),
    ("generation_batch_size", "1000000000"),
    ("steps_per_generation", "1000000000"),
    ("num_iterations", "1000000000000"),
    ("max_steps", "0"),
    ("max_steps", "1" + "0" * 400),
    ("prompt_sampling_kwargs.max_resample_times", "1000000000"),
    ("num_generations_eval", "1000000000"),
    ("num_threads", "100000"),
    ("num_threads", "0"),
    ("max_tokens_per_micro_batch", "0"),
    ("seed", "1:30"),
    ("seed", "010"),
    ("seed", "-1"),
    ("seed", "4294967296"),
    ("seed", "٤٢"),
    ("seed", "1_000"),
    ("temperature", "0"),
    ("temperature", "nan"),
    ("temperature", "inf"),
    ("temperature", "-1"),
    ("temperature", "1e-320"),
    ("top_p", "1.5"),
    ("top_k", "-1"),
    ("learning_rate", "-1e-6"),
    ("learning_rate", "1e400"),
    ("learning_rate", "fast"),
    ("beta", "nan"),
    ("beta", "-0.1"),
    ("epsilon", "-0.2"),
    ("warmup_steps", "-5"),
    ("adam_beta1", "1"),
    ("reward_weights", "nan"),
    ("reward_clip_range", "[1, -1]"),
    ("reward", "lenght"),
    ("reward", "length(target_max=)"),
    ("reward", "length(" + "(" * 5000),
    ("reward", "rewards.py:missing"),
    ("estimator", "no.such.module:function"),
    ("preset", "trll"),
    ("optim", "adamw_nonsense"),
    ("optim_args", "betas"),
    ("lr_scheduler_type", "linaer"),
    ("lr_scheduler_kwargs", '{"min_lr": "x"}'),
    ("report_to", "nonsense"),
    ("model_init_kwargs", '{"nonsense": 1}'),
    ("chat_template_kwargs", "["),
    ("prompt_template", "{questoin}"),
    ("eval_kwargs.pass_k", "0"),
    ("logging_steps", "0"),
    ("output_dir", ""),
    ("output_dir", "rows.jsonl"),
    ("output_dir", "/proc/nowhere"),
    ("output_dir", "model"),
    ("output_dir", "x" * 5000),
    ("output_dir", "a\x00b"),
    ("resume_from_checkpoint", "nowhere"),
    ("lora_r", "1000000000"),
    ("dataloader_num_workers", "4"),
    ("use_vllm", "true"),
    ("stop_strings", ""),
    ("model", "nowhere/at/all"),
    ("model", "rows.jsonl"),
    ("model", "a\x00b"),
    ("dataset", "missing.jsonl"),
    ("dataset", "a\x00b"),
    ("dataset", "x" * 5000),
    ("no_such_option", "1"),
)
_NEEDED = {
    "lora_r": ("--use_peft",),
    "prompt_sampling_kwargs.max_resample_times": ("--dynamic_sample",),
}
# Accepted, with a warning that has the reason why the option has no effect.
_MAY_RUN = ("dataloader_num_workers",)


def _case(option: str, text: str) -> Case:
    return Case(
        f"--{option} {text[:20]!r}",
        "options",
        (option,),
        (f"--{option}={text}", *_NEEDED.get(option, ())),
        surely_wrong=option not in _MAY_RUN,
    )


OPTIONS = tuple(_case(option, text) for option, text in _WRONG)

# Options that refer to files or code, or that determine the length of the run.
_NOT_DRAWN = ("model", "output_dir", "reward", "resume_from_checkpoint", "push_to_hub")


def generated(count: int) -> list[Case]:
    """`count` options files in which one or two options have random values: of wrong types, at and
    beyond bounds, unicode, nested. The random values are equal in every call."""
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    names = sorted(set(option_types()) - set(_NOT_DRAWN))
    texts = st.text(max_size=20) | st.sampled_from(["nan", "-inf", "1e999", "null", "\x00", "٣"])
    numbers = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 10**30, -1, 0, 1e308])
    plain = st.none() | st.booleans() | numbers | texts
    nested = st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    )
    drawn: list[dict[str, Any]] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    @given(st.dictionaries(st.sampled_from(names), plain | nested, min_size=1, max_size=2))
    def draw(options: dict[str, Any]) -> None:
        drawn.append(options)

    draw()
    return [_drawn_case(number, options) for number, options in enumerate(drawn)]


def _drawn_case(number: int, options: dict[str, Any]) -> Case:
    def spoil(folder: Path) -> None:
        write_options(folder / "run.yaml", options)

    wrong = any(_no_such_thing(name, value) for name, value in options.items())
    shown = json.dumps(options)[:80]
    names = ("run.yaml", *options)
    return Case(f"drawn {number}: {shown}", "drawn", names, spoil=spoil, surely_wrong=wrong)


def _no_such_thing(name: str, value: Any) -> bool:
    """Whether `value` is certainly wrong for the option, according to a rule of this module."""
    allowed = {getattr(kind, "__origin__", kind) for kind in kinds_of(option_types()[name])}
    if isinstance(value, float) and not math.isfinite(value):
        return True
    if isinstance(value, dict):
        return bool(value) and dict not in allowed and list not in allowed
    if isinstance(value, str) and allowed <= {int, float, type(None)}:
        return not any(character.isdigit() for character in value) and value.lower() not in (
            "null", "none", "",
        )  # fmt: skip
    return isinstance(value, bool) and allowed <= {int, float, type(None)}
