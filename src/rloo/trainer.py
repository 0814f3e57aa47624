"""RLOOTrainer: the parts of a run put together behind the names that TRL's users know.

Everything static is checked when the trainer is made, before the first sample is drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, DatasetDict
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from rloo.checkpoint import (
    Checkpoint,
    claim_output_dir,
    load_checkpoint,
    resume_path,
    save_checkpoint,
)
from rloo.config import RLOOConfig, resolve_interval
from rloo.data import PromptSource, encode_prompt, with_prompts
from rloo.engines import build_engine
from rloo.engines.sampling import noise_key
from rloo.evaluate import evaluate
from rloo.monitor import Monitor, versions
from rloo.policy import Policy, load_model
from rloo.rewards import RewardSet, load_reward
from rloo.rows import load_rows
from rloo.state import (
    capture_rng,
    load_optimizer,
    optimizer_tensors,
    parameter_shapes,
    require_same_shapes,
    restore_rng,
)
from rloo.train import Run, train, uninterrupted
from rloo.types import Prompt, Sampling, Text

RewardFunction = Callable[..., Any] | str | Mapping[str, Any]


class RLOOTrainer:
    """Trains a causal language model with REINFORCE Leave-One-Out.

    `model` is a hub id, a folder or a model with float32 weights; `reward_funcs` one reward or a
    list: functions, built-in names, `module:function` or `file.py:function`. Raises ValueError for
    anything that is known to be wrong before sampling.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: RLOOConfig | None = None,
        train_dataset: Dataset | DatasetDict | str | None = None,
        eval_dataset: Dataset | DatasetDict | str | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
    ) -> None:
        self.args = args or RLOOConfig()
        _set_threads(self.args.num_threads)
        transformers.set_seed(self.args.seed)
        self.rewards = _make_rewards(reward_funcs, self.args)
        self._load(model, processing_class)
        given = self.args.dataset if train_dataset is None else train_dataset
        train_rows = self._rows(given, self.args.dataset_split)
        eval_rows = self._eval_rows(eval_dataset)
        if train_rows is None and eval_rows is None:
            raise ValueError("there is no dataset; give one to train on (train_dataset, dataset)")
        self._source = self._prompts(train_rows) if train_rows is not None else None
        eval_source = self._prompts(eval_rows) if eval_rows is not None else None
        self._eval_prompts = eval_source.all_prompts(self.args.eval_size) if eval_source else None
        self.state = self._make_state()
        self.control = TrainerControl()
        self.policy = Policy(
            self.model,
            self.processing_class,
            self.args,
            num_training_steps=max(self.state.max_steps, 1),
        )
        self.engine, note = build_engine(
            self.args.rollout_engine, self.model, pad_token_id=self.policy.pad_token_id
        )
        self.policy.notes += [note] if note else []
        self.monitor = Monitor(
            self.args, Path(self.args.output_dir), max_steps=self.state.max_steps
        )
        self._user_callbacks = list(callbacks or [])
        self._run: Run | None = None

    # -- what a user calls -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, Any]:
        """Train, write everything to `args.output_dir`, and return the summary.

        Ctrl-C saves a checkpoint and raises KeyboardInterrupt.
        """
        if self._source is None:
            raise ValueError("`train_dataset` is required to train (train_dataset, dataset)")
        output_dir = Path(self.args.output_dir)
        path = resume_path(resume_from_checkpoint or self.args.resume_from_checkpoint, output_dir)
        if self.args.model is not None and output_dir.resolve() == Path(self.args.model).resolve():
            raise ValueError(
                f"output_dir is the folder of the model, {output_dir}; it would be overwritten "
                "(output_dir, model)"
            )
        claim_output_dir(
            output_dir, overwrite=self.args.overwrite_output_dir, resuming=path is not None
        )
        started = time.perf_counter()
        run = self._run = self._make_run()
        start = self._resume(run, path) if path else {}
        self.monitor.start(self._describe())
        for note in self.policy.notes:
            self.monitor.note(note)
        self.monitor.on_train_begin(self.state, self.control, self.policy)
        if not start and self.args.eval_on_start:
            start = self._evaluate_and_report(name="start")
        self._start = start
        status = "interrupted"
        try:
            train(run)
            status = "finished"
        except KeyboardInterrupt:
            with uninterrupted():
                self._save_checkpoint()
            raise
        finally:
            summary = self._summary(status, started)
            self.monitor.finish(summary)
        return summary

    def evaluate(
        self, eval_dataset: Dataset | str | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Metrics on `eval_dataset` (or the trainer's), each name prefixed as transformers does."""
        prompts = self._eval_prompts
        if eval_dataset is not None:
            rows = self._rows(eval_dataset, self.args.eval_split or "train")
            assert rows is not None
            prompts = self._prompts(rows).all_prompts(self.args.eval_size)
        if prompts is None:
            raise ValueError("there is nothing to evaluate on (eval_dataset, eval_split)")
        prefix = f"{metric_key_prefix}_" if metric_key_prefix else ""
        return {prefix + name: value for name, value in self._measure(prompts).items()}

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model and tokenizer in Hugging Face format, to `args.output_dir` by default."""
        self.policy.save_pretrained(output_dir or self.args.output_dir)

    # -- putting it together ---------------------------------------------------------------------

    def _load(
        self, model: str | PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        if isinstance(model, PreTrainedModel):
            self.model = model
            name = tokenizer or transformers.AutoTokenizer.from_pretrained(model.name_or_path)
            self.processing_class: PreTrainedTokenizerBase = name
            return
        self.args = replace(self.args, model=model or self.args.model)
        if self.args.model is None:
            raise ValueError("there is no model; name one (model): a hub id or a folder")
        self.model, self.processing_class = load_model(self.args, tokenizer)

    def _rows(self, spec: Dataset | DatasetDict | str | None, split: str) -> Dataset | None:
        if spec is None:
            return None
        own = spec == self.args.dataset or self.args.dataset is None
        config_name = self.args.dataset_config if own else None
        rows = load_rows(spec, split=split, config_name=config_name)
        rows = with_prompts(rows, self.args.prompt_template)
        self.rewards.check(rows.column_names)
        return rows

    def _eval_rows(self, eval_dataset: Dataset | DatasetDict | str | None) -> Dataset | None:
        spec = self.args.eval_dataset if eval_dataset is None else eval_dataset
        if spec is None and self.args.eval_split is not None:
            spec = self.args.dataset
        return self._rows(spec, self.args.eval_split or "train")

    def _prompts(self, rows: Dataset) -> PromptSource:
        args = self.args

        def encode(content: Text) -> list[int]:
            return encode_prompt(
                content,
                self.processing_class,
                chat_template_kwargs=args.chat_template_kwargs or {},
            )

        return PromptSource(
            rows,
            encode,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.shuffle_dataset,
            max_prompt_length=_prompt_limit(self.model, args),
            overlong=args.overlong_prompts,
        )

    def _make_state(self) -> TrainerState:
        args, steps = self.args, self.args.max_steps
        if self._source is not None and steps <= 0:
            rollouts = math.ceil(
                args.num_train_epochs * len(self._source) / args.prompts_per_rollout()
            )
            steps = rollouts * args.steps_per_rollout()
        return TrainerState(
            max_steps=max(steps, 0),
            num_train_epochs=math.ceil(args.num_train_epochs),
            logging_steps=resolve_interval(args.logging_steps, steps),
            eval_steps=resolve_interval(args.eval_steps or args.logging_steps, steps),
            save_steps=resolve_interval(args.save_steps, steps),
            train_batch_size=args.per_device_train_batch_size,
        )

    def _make_run(self) -> Run:
        assert self._source is not None
        self.monitor.add_callbacks(self._user_callbacks)
        return Run(
            config=self.args,
            policy=self.policy,
            engine=self.engine,
            prompts=self._source,
            rewards=self.rewards,
            sampling=self._sampling(),
            monitor=self.monitor,
            state=self.state,
            control=self.control,
            save=self._save_checkpoint,
            evaluate=lambda: self._evaluate_and_report(name="during"),
        )

    def _sampling(self) -> Sampling:
        args = self.args
        sampling = Sampling(
            max_tokens=args.max_completion_length,
            stop_token_ids=self.policy.stop_token_ids,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            repetition_penalty=args.repetition_penalty,
        )
        if sampling.filtered:
            self.policy.notes.append(
                "sampling is filtered (top_p, top_k, min_p or repetition_penalty): tokens are "
                "drawn from another distribution than the one that is trained, which biases the "
                "gradient"
            )
        return sampling

    def _resolved(self) -> RLOOConfig:
        """The options with everything that was chosen automatically filled in."""
        return replace(
            self.args,
            num_threads=torch.get_num_threads(),
            max_tokens_per_micro_batch=self.policy.max_tokens,
            packing=self.policy.packed,
            rollout_engine=self.engine.name,
        )

    def _describe(self) -> dict[str, Any]:
        assert self._source is not None
        return {
            "model": self.args.model or type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.policy.parameters),
            "rows": len(self._source),
            "rewards": self.rewards.names,
            "engine": self.engine.name,
            "packing": self.policy.packed,
            "threads": torch.get_num_threads(),
            "device": str(self.policy.device),
        }

    # -- evaluating ------------------------------------------------------------------------------

    def _measure(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        args = self.args
        with self.policy.autocast():
            metrics, _ = evaluate(
                self.engine,
                prompts,
                self.rewards,
                tokenizer=self.processing_class,
                sampling=self._sampling(),
                num_samples=args.num_generations_eval or args.num_generations,
                noise=noise_key(args.seed, "eval", 0),
                pass_threshold=args.pass_threshold,
                pass_k=args.eval_pass_k,
                trainer_state=self.state,
            )
        return metrics

    def _evaluate_and_report(self, name: str) -> dict[str, Any]:
        if self._eval_prompts is None:
            raise ValueError("there is nothing to evaluate on (eval_dataset, eval_split)")
        metrics = self._measure(self._eval_prompts)
        self.monitor.evaluation(self.state.global_step, name, metrics)
        self.monitor.on_evaluate(self.state, self.control, metrics)
        return metrics

    def _summary(self, status: str, started: float) -> dict[str, Any]:
        run = self._run
        assert run is not None
        end: dict[str, Any] = {}
        evaluates = self.args.eval_on_start or self.args.eval_strategy != "no"
        if status == "finished":
            with uninterrupted():
                if evaluates and self._eval_prompts is not None:
                    end = self._evaluate_and_report(name="end")
                self.save_model()
        return {
            "status": status,
            "steps": self.state.global_step,
            "start": self._start,
            "end": end,
            "wall_seconds": time.perf_counter() - started,
            "num_tokens": run.num_tokens,
            "seed": self.args.seed,
            "config": self._resolved().to_dict(),
            "versions": versions(),
        }

    # -- checkpoints -----------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        run, policy = self._run, self.policy
        assert run is not None
        checkpoint = Checkpoint(
            step=self.state.global_step,
            optimizer=optimizer_tensors(policy.optimizer),
            scheduler=policy.scheduler.state_dict(),
            rng=capture_rng(),
            trainer_state={
                "state": asdict(self.state),
                "prompts": run.resume_point or run.prompts.state_dict(),
                "num_tokens": run.num_tokens,
                "config": self._resolved().to_dict(),
                "shapes": parameter_shapes(self.model),
                "start": self._start,
                "scaler": policy.scaler.state_dict() if policy.scaler else None,
            },
        )
        save_checkpoint(
            Path(self.args.output_dir),
            checkpoint,
            write_model=policy.save_pretrained,
            keep=self.args.save_total_limit,
        )
        self.monitor.on_save(self.state, self.control)

    def _resume(self, run: Run, path: Path) -> dict[str, Any]:
        """Put everything where the checkpoint left it; returns the evaluation of the start."""
        checkpoint, policy = load_checkpoint(path), self.policy
        saved = checkpoint.trainer_state
        require_same_shapes(saved["shapes"], parameter_shapes(self.model))
        weights = type(self.model).from_pretrained(path, dtype=torch.float32)
        self.model.load_state_dict(weights.state_dict())
        load_optimizer(policy.optimizer, *checkpoint.optimizer)
        policy.scheduler.load_state_dict(checkpoint.scheduler)
        if policy.scaler:
            policy.scaler.load_state_dict(saved["scaler"])
        restore_rng(checkpoint.rng)
        run.prompts.load_state_dict(saved["prompts"])
        run.num_tokens = saved["num_tokens"]
        policy.max_tokens = saved["config"]["max_tokens_per_micro_batch"]
        policy.packed = saved["config"]["packing"]
        if self.args.num_threads is None:
            torch.set_num_threads(saved["config"]["num_threads"])
        self.state.global_step = saved["state"]["global_step"]
        self.state.log_history = saved["state"]["log_history"]
        self.monitor.truncate_after(self.state.global_step)
        self.monitor.note(f"resumed from {path} at step {self.state.global_step}")
        start: dict[str, Any] = saved["start"]
        return start


def _make_rewards(
    given: RewardFunction | Sequence[RewardFunction] | None, args: RLOOConfig
) -> RewardSet:
    specs = args.reward if given is None else given
    if isinstance(specs, (str, Mapping)) or callable(specs):
        specs = [specs]
    return RewardSet([load_reward(spec) for spec in specs], weights=args.reward_weights)


def _prompt_limit(model: PreTrainedModel, args: RLOOConfig) -> int:
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


def _set_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
