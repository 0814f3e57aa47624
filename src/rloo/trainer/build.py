"""Builds the components of a run from its options, with all checks that need no sampling."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from transformers import PreTrainedTokenizerBase, TrainerState

from rloo.algorithm.estimator_registry import require_estimator
from rloo.config.batch_sizes import BatchSizes, batches_of
from rloo.config.compat.generation_kwargs import stop_tokens
from rloo.config.config import RLOOConfig, resolve_interval
from rloo.config.engine_spec import engine_spec
from rloo.config.validation import sharding_named
from rloo.data.iterable_dataset import IterablePromptDataset, Prompts
from rloo.data.prompt_dataset import PromptDataset
from rloo.distributed import GroupSizes, World, make_world
from rloo.distributed.sharded_tensor import is_sharded, shape_of
from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.kernels.bf16_rounding import reduced_precision
from rloo.model.policy import Policy
from rloo.model.quantization import quantised_layers
from rloo.model.token_budget import available_bytes, gigabytes
from rloo.rewards import RewardSet
from rloo.rewards.reward_model import RewardModel, as_reward
from rloo.rewards.running_norm import RunningNormReward
from rloo.tracking.jsonl import LOGS
from rloo.trainer.cpu_settings import let_segments_grow, set_arithmetic, set_threads
from rloo.types import Engine, Sampling

# A function, a reward model's module, an object with get_rewards, or the spec of such a reward.
RewardFunction: TypeAlias = Callable[..., Any] | str | Mapping[str, Any]
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None


def make_batches(args: RLOOConfig, world: World) -> BatchSizes:
    """The batch sizes of a run. Asynchronous training divides a generation batch into rollouts of
    one optimizer step, unless the estimator uses the whole batch. Raises ValueError as `batches_of`
    and `require_estimator`."""
    estimator = require_estimator(args)
    batches = batches_of(args, world.size)
    whole = not args.max_staleness or estimator.over_rollout
    return batches if whole else batches.in_steps(args.num_generations)


def make_rewards(
    given: RewardFunction | Sequence[RewardFunction] | None,
    args: RLOOConfig,
    processing_classes: Tokenizers = None,
    *,
    device: torch.device,
) -> RewardSet:
    """Load the given rewards, or the rewards that `args.reward` names. `as_reward` lists the
    accepted forms. `processing_classes` are the tokenizers of reward models, one per reward (None:
    the reward model's tokenizer). Raises ValueError if their number is not the number of
    rewards."""
    specs: Any = args.reward if given is None else given
    specs = list(specs) if isinstance(specs, (list, tuple)) else [specs]
    tokenizers: Any = [None] * len(specs) if processing_classes is None else processing_classes
    tokenizers = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(specs):
        raise ValueError(
            f"there are {len(tokenizers)} reward_processing_classes and {len(specs)} rewards; "
            "their numbers must match, None for a reward that needs no tokenizer"
        )
    functions = [
        as_reward(
            spec,
            tokenizer,
            device=str(device),
            trust_remote_code=args.trust_remote_code,
            chat_template_kwargs=args.chat_template_kwargs,
        )
        for spec, tokenizer in zip(specs, tokenizers, strict=True)
    ]
    return RewardSet(
        functions,
        weights=args.reward_weights,
        timeout=args.reward_timeout,
        on_error=args.reward_on_error,
        sources=[_source_of(*both) for both in zip(specs, functions, strict=True)],
    )


def _source_of(spec: Any, function: Any) -> Any:
    """The spec from which another process can load the function; None if there is no such spec."""
    of_a_model = isinstance(function, (RunningNormReward, RewardModel))
    named = isinstance(spec, (str, Mapping)) and not of_a_model
    return spec if named else None


def world_of(args: RLOOConfig) -> World:
    """Connect the processes that train together, with the options `args`; return their World."""
    groups = args.parallel_options
    world = make_world(
        use_cpu=args.use_cpu,
        timeout=args.ddp_timeout,
        divides=args.parallel != "replicate",
        groups=GroupSizes(groups.dp_shard_size, groups.sp_size, groups.tp_size),
        workers=args.output_dir if args.async_options.remote_workers else None,
    )
    let_segments_grow(world.device)
    return world


def seed_all(args: RLOOConfig) -> None:
    """Seed the global random generators. With `full_determinism` torch raises an error for an
    operation without a deterministic kernel. As with Trainer, this also holds after the run."""
    if args.full_determinism:
        transformers.enable_full_determinism(args.seed)
    else:
        transformers.set_seed(args.seed)


def make_state(source: Prompts | None, args: RLOOConfig, batches: BatchSizes) -> TrainerState:
    """The TrainerState of a run at step 0, with the number of steps and all intervals resolved.
    Raises ValueError if the number of steps would depend on the length of a stream."""
    steps = args.max_steps
    if isinstance(source, IterablePromptDataset) and steps <= 0:
        raise ValueError(
            "max_steps is -1 and the dataset is a stream, whose length is unknown; set the number "
            "of steps (max_steps)"
        )
    if isinstance(source, PromptDataset) and steps <= 0:
        rollouts = math.ceil(args.num_train_epochs * len(source) / batches.prompts_per_rollout)
        steps = rollouts * batches.steps_per_rollout
    return TrainerState(
        max_steps=max(steps, 0),
        num_train_epochs=math.ceil(args.num_train_epochs),
        logging_steps=resolve_interval(args.logging_steps, steps),
        eval_steps=resolve_interval(args.eval_steps or args.logging_steps, steps),
        save_steps=resolve_interval(args.save_steps, steps),
        train_batch_size=args.per_device_train_batch_size,
    )


def make_sampling(
    args: RLOOConfig,
    stop_token_ids: tuple[int, ...],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    evaluation: bool = False,
) -> Sampling:
    """The sampling options of training (with `evaluation`: of evaluations), with all stop
    conditions. Stop strings need the `tokenizer`."""

    def setting(name: str) -> Any:
        own = getattr(args.eval_options, name) if evaluation else None
        return getattr(args, name) if own is None else own

    return Sampling(
        max_tokens=setting("max_completion_length"),
        stop_token_ids=stop_tokens(args.generation_kwargs, stop_token_ids),
        temperature=setting("temperature"),
        top_p=setting("top_p"),
        top_k=setting("top_k"),
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        stop_strings=tuple(args.stop_strings or ()),
        decode=tokenizer.batch_decode if args.stop_strings and tokenizer is not None else None,
    )


def bias_of(sampling: Sampling) -> list[str]:
    """A list with a note if filters such as top_p change the distribution of the sampled tokens."""
    note = (
        "sampling is filtered (top_p, top_k, min_p or repetition_penalty): tokens are drawn from "
        "another distribution than the one that is trained, which biases the gradient"
    )
    return [note] if sampling.filtered else []


def _refuse_copies(policy: Policy, args: RLOOConfig) -> None:
    asked = {
        "rollout_dtype": args.rollout_dtype,
        "engine_kwargs.copy_weights": args.engine_options.copy_weights,
    }
    for option, value in asked.items():
        if value:
            raise ValueError(
                f"{option} is {value}; only the native engine's fused decoder has weights of its "
                f"own, and {type(policy.model).__name__} is not sampled by it "
                "(engine_kwargs.copy_weights, rollout_dtype, rollout_engine)"
            )


def make_engine(policy: Policy, args: RLOOConfig, owner: Any = None) -> Engine:
    """Build the rollout engine; adds a note if the engine is slow. An engine with servers reports
    server events to the monitor of its `owner`, a trainer, through a weak reference. Raises
    ValueError if the engine does not support the weight copy or the dtype of the options
    (`engine_kwargs.copy_weights`, `rollout_dtype`)."""
    set_arithmetic(policy, args)
    if engine_spec(args.rollout_engine).own_processes:
        return _engine_elsewhere(policy, args, owner)
    precision = reduced_precision(args)
    if args.samples_beside:
        from rloo.trainer.remote_engines import make_apart

        _settle_threads(policy, args)
        return make_apart(policy, precision)
    no_copy = None
    if args.engine_options.copy_weights is False:
        no_copy = "engine_kwargs.copy_weights is false"
    elif args.engine_options.copy_weights is None and any(quantised_layers(policy.model)):
        no_copy = (
            "a dequantised copy of the base would take several times its memory; "
            "engine_kwargs.copy_weights true makes one, with rollout_dtype bfloat16 at 2 bytes per "
            "weight"
        )
    inputs = EngineInputs(
        policy.model,
        policy.pad_token_id,
        weights=policy.weights,
        precision=precision,
        dtype=getattr(torch, args.rollout_dtype) if args.rollout_dtype else precision,
        no_copy=no_copy,
        whole=policy.gathered_weights,
        tell=_telling(owner),
    )
    _require_room(policy)
    _settle_threads(policy, args)
    with policy.gathered_weights(in_turn=True):
        engine, note = build_engine(args.rollout_engine, inputs)
    if not engine.capabilities.copies_weights:
        _refuse_copies(policy, args)
    policy.notes += [note] if note else []
    room = engine.capabilities.cache_bytes
    if policy.device.type == "cuda" and room is not None:
        policy.notes.append(
            f"keys and values of completions sampled at once may take {gigabytes(room)}: what is "
            "free of the GPU now but for a tenth, and asked again for each rollout"
        )
    return engine


def _engine_elsewhere(policy: Policy, args: RLOOConfig, owner: Any) -> Engine:
    """An engine with separate processes, to which the policy's weights are sent."""
    if args.num_threads is not None:
        policy.why_threads = set_threads(policy.model, args)
    inputs = EngineInputs(
        policy.model,
        policy.pad_token_id,
        weights=policy.weights,
        tell=_telling(owner),
        policy=policy,
        log_folder=Path(args.output_dir).absolute() / LOGS,
    )
    return build_engine(args.rollout_engine, inputs)[0]


def _settle_threads(policy: Policy, args: RLOOConfig) -> None:
    times = args.num_threads is None and policy.device.type == "cpu"
    with policy.gathered_weights() if times else nullcontext():
        policy.why_threads = set_threads(policy.model, args)
    torch.set_num_threads(policy.world.broadcast_object(torch.get_num_threads()))


def _telling(owner: Any) -> Callable[[str], None]:
    find = (lambda: None) if owner is None else weakref.ref(owner)

    def say(text: str) -> None:
        monitor = getattr(find(), "monitor", None)  # None while the trainer is being set up
        print(text, flush=True) if monitor is None else monitor.note(text)

    return say


def _require_room(policy: Policy) -> None:
    """Raise ValueError if a model is sharded and a rank has no memory for the full weights, which
    the engine needs."""
    parameters = list(policy.model.parameters())
    if not any(map(is_sharded, parameters)):
        return
    needed = sum(shape_of(p).numel() * p.itemsize for p in parameters)
    room = min(policy.world.all_gather_object(available_bytes(policy.device)))
    if needed > room:
        raise ValueError(
            f"{sharding_named(policy.config)} and an engine here needs all weights, "
            f"{gigabytes(needed)}, of which {gigabytes(room)} would fit beside this process's "
            "part; a model of this size needs vLLM on devices of its own (rollout_engine vllm, "
            "engine_kwargs.devices, parallel)"
        )
