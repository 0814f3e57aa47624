"""The parts of a run made from its options. Everything static is checked here, before sampling."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from rloo.config import RLOOConfig, resolve_interval
from rloo.data import PromptSource, encode_prompt, with_prompts
from rloo.engines import NativeEngine, build_engine
from rloo.policy import Policy
from rloo.rewards import RewardSet, load_reward
from rloo.rows import load_rows
from rloo.tasks import load_task_rows
from rloo.types import Engine, Sampling, Text

Rows: TypeAlias = Dataset | DatasetDict | str
# Of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

RewardFunction: TypeAlias = Callable[..., Any] | str | Mapping[str, Any]


def make_rewards(
    given: RewardFunction | Sequence[RewardFunction] | None, args: RLOOConfig
) -> RewardSet:
    """The reward functions given, or else those that `args.reward` names."""
    specs: Any = args.reward if given is None else given
    if isinstance(specs, (str, Mapping)) or callable(specs):
        specs = [specs]
    return RewardSet([load_reward(spec) for spec in specs], weights=args.reward_weights)


def make_source(
    spec: Rows | None,
    split: str,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardSet,
    args: RLOOConfig,
) -> PromptSource | None:
    """The prompts of a dataset, tokenised; None for none. Raises ValueError for rows that cannot
    be prompts, prompts that do not fit, and columns that a reward needs and that are not there."""
    if spec is None:
        return None
    rows = load_task_rows(spec, split) if isinstance(spec, str) else None
    if rows is None:
        # A configuration belongs to the dataset that it was given with.
        own = isinstance(spec, str) and spec == (args.dataset or args.eval_dataset)
        rows = load_rows(spec, split=split, config_name=args.dataset_config if own else None)
    rows = with_prompts(rows, args.prompt_template)
    rewards.check([name for name in rows.column_names if name != "prompt"])

    def encode(content: Text) -> list[int]:
        template_options = args.chat_template_kwargs or {}
        return encode_prompt(content, tokenizer, chat_template_kwargs=template_options)

    return PromptSource(
        rows,
        encode,
        seed=args.seed if args.data_seed is None else args.data_seed,
        shuffle=args.shuffle_dataset,
        max_prompt_length=prompt_limit(model, args),
        overlong=args.overlong_prompts,
    )


def prompt_limit(model: PreTrainedModel, args: RLOOConfig) -> int:
    """Longest prompt that leaves room for the longest completion in the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return args.max_prompt_length or 2**31
    room = context - args.max_completion_length
    if room < 1:
        raise ValueError(
            f"max_completion_length is {args.max_completion_length} and the model sees {context} "
            "tokens; at least 1 must be left for the prompt (max_completion_length)"
        )
    return min(args.max_prompt_length or room, room)


def make_state(source: PromptSource | None, args: RLOOConfig) -> TrainerState:
    """Step 0 of a run, with the number of its steps and the intervals resolved."""
    steps = args.max_steps
    if source is not None and steps <= 0:
        rollouts = math.ceil(args.num_train_epochs * len(source) / args.prompts_per_rollout())
        steps = rollouts * args.steps_per_rollout()
    return TrainerState(
        max_steps=max(steps, 0),
        num_train_epochs=math.ceil(args.num_train_epochs),
        logging_steps=resolve_interval(args.logging_steps, steps),
        eval_steps=resolve_interval(args.eval_steps or args.logging_steps, steps),
        save_steps=resolve_interval(args.save_steps, steps),
        train_batch_size=args.per_device_train_batch_size,
    )


def make_sampling(args: RLOOConfig, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How training draws: the sampling options, and every token that ends a completion."""
    return Sampling(
        max_tokens=args.max_completion_length,
        stop_token_ids=stop_token_ids,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
    )


def make_engine(policy: Policy, args: RLOOConfig) -> Engine:
    """What samples; a note tells of a slow one. Raises ValueError for a `rollout_dtype` that it
    cannot have."""
    name = args.rollout_dtype or ("bfloat16" if args.bf16 else "float16" if args.fp16 else None)
    engine, note = build_engine(
        args.rollout_engine,
        policy.model,
        pad_token_id=policy.pad_token_id,
        weights=policy.weights,
        dtype=None if name is None else getattr(torch, name),
    )
    if args.rollout_dtype is not None and not (isinstance(engine, NativeEngine) and engine.fused):
        raise ValueError(
            f"rollout_dtype is {args.rollout_dtype}; only the native engine's fused decoder has a "
            f"dtype of its own, and {type(policy.model).__name__} is not sampled by it "
            "(rollout_dtype, rollout_engine)"
        )
    policy.notes += [note] if note else []
    return engine


def keep_freed_memory() -> None:
    """Have the C library keep large blocks that are freed, as a CPU update frees and asks for the
    same ones again and again: handed back, every page is cleared anew. glibc only; elsewhere
    nothing happens. The peak is the same; what is kept goes back when the process ends."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def set_threads(model: PreTrainedModel, args: RLOOConfig) -> None:
    """Use `num_threads` CPU threads, or the number that decodes fastest, measured for a moment.

    With small matrices a second thread can cost more in waiting than it computes, the more so when
    something else runs on the machine.
    """
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
        return
    available = torch.get_num_threads()
    if available == 1 or model.device.type != "cpu":
        return
    tokens = torch.zeros(64, 4, dtype=torch.long)
    seconds = {}
    for threads in (1, available):
        torch.set_num_threads(threads)
        with torch.no_grad():
            model(tokens, use_cache=False)
            start = time.perf_counter()
            for _ in range(3):
                model(tokens, use_cache=False)
        seconds[threads] = time.perf_counter() - start
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))
