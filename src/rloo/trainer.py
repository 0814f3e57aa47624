"""RLOOTrainer: the parts of a run put together behind the names that TRL's users know.

Everything static is checked when the trainer is made, before the first sample is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
)

from rloo.adapters import add_adapter, is_adapted, lora_config
from rloo.checkpoint import claim_output_dir, resume_path, save_checkpoint
from rloo.config import RLOOConfig
from rloo.config_text import render_resolved
from rloo.data import PromptSource
from rloo.engines.sampling import noise_key
from rloo.evaluate import evaluate
from rloo.modeling import load_model
from rloo.monitor import Monitor, versions
from rloo.policy import Policy
from rloo.records import write_text
from rloo.reporting import check_loggers
from rloo.resume import restore, snapshot
from rloo.setup import (
    RewardFunction,
    Rows,
    keep_freed_memory,
    make_engine,
    make_rewards,
    make_sampling,
    make_source,
    make_state,
    set_threads,
)
from rloo.train import ForcedInterrupt, Run, rehearse, train, uninterrupted
from rloo.types import Prompt, Sampling


class RLOOTrainer:
    """Trains a causal language model with REINFORCE Leave-One-Out.

    `model` is a hub id, a folder, a model with float32 weights or a PeftModel; `reward_funcs` one
    reward or a list: functions, built-in names, `module:function` or `file.py:function`.
    `peft_config` (a LoraConfig) puts an adapter into the model and trains that. Raises ValueError
    for anything that is known to be wrong before sampling.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        args: RLOOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        peft_config: Any = None,
    ) -> None:
        self.args = args or RLOOConfig()
        transformers.set_seed(self.args.seed)
        check_loggers(self.args)
        self._callbacks = list(callbacks or [])
        self.rewards = make_rewards(reward_funcs, self.args)
        self._load(model, processing_class)
        self._adapt(peft_config)
        given = self.args.dataset if train_dataset is None else train_dataset
        self._source = self._prompts(given, self.args.dataset_split)
        eval_source = self._eval_source(eval_dataset)
        if self._source is None and eval_source is None:
            raise ValueError("there is no dataset; give one to train on (train_dataset, dataset)")
        self._eval_prompts = eval_source.all_prompts(self.args.eval_size) if eval_source else None
        self._evaluates = self.args.eval_on_start or self.args.eval_strategy != "no"
        if self._evaluates and self._eval_prompts is None:
            raise ValueError(
                "evaluation is asked for (eval_on_start, eval_strategy) and there is nothing to "
                "evaluate on (eval_dataset, eval_split)"
            )
        self.state = make_state(self._source, self.args)
        self.control = TrainerControl()
        self.policy = Policy(
            self.model,
            self.processing_class,
            self.args,
            num_training_steps=max(self.state.max_steps, 1),
        )
        if self.policy.device.type == "cpu":
            keep_freed_memory()
        set_threads(self.policy.model, self.args)
        self.engine = make_engine(self.policy, self.args)
        self._note_sources(self._source, eval_source)
        self.monitor = Monitor(
            self.args, Path(self.args.output_dir), max_steps=self.state.max_steps
        )
        self._run: Run | None = None
        self._start: dict[str, Any] = {}
        self._seconds_before = 0.0

    # -- what a user calls -----------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, Any]:
        """Train, write everything to `args.output_dir`, and return the summary.

        Whatever ends it early, Ctrl-C or an error, a checkpoint is saved and the error raised.
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
        self._started = time.perf_counter()
        run = self._run = self.make_run()
        if path:
            self._resume(run, path)
        rehearse(run)
        again = replace(self._resolved(), resume_from_checkpoint=None, overwrite_output_dir=False)
        write_text(output_dir / "config.yaml", render_resolved(again))
        self.monitor.start(self._describe())
        for note in self.policy.notes:
            self.monitor.note(note)
        self._first_step = self.state.global_step
        self._status, end = "failed", {}
        try:
            self.monitor.on_train_begin(self.state, self.control, self.policy)
            if path is None and self.args.eval_on_start:
                self._start = self._evaluate_and_report(name="start")
            train(run)
            with uninterrupted():
                self.save_model()
            if self._evaluates:
                end = self._evaluate_and_report(name="end")
            self._status = "finished"
        except (KeyboardInterrupt, Exception) as error:
            self._save_what_is_done(error)
            raise
        finally:
            summary = self._summary(end)
            self.monitor.finish(summary)
        if self.args.dataset is not None:
            folder = self.args.output_dir
            self.monitor.say(f"Evaluate it: rloo eval {folder}/config.yaml --model {folder}")
        return summary

    def _save_what_is_done(self, error: BaseException) -> None:
        """The weights are those of the last finished step, whatever came after, unless a second
        Ctrl-C broke into a step."""
        self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if self.state.global_step > self._first_step and not isinstance(error, ForcedInterrupt):
            with uninterrupted():
                self._save_checkpoint()

    def evaluate(
        self, eval_dataset: Rows | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Metrics on `eval_dataset` (or the trainer's), each name prefixed as transformers does."""
        prompts = self._eval_prompts
        if eval_dataset is not None:
            source = self._eval_source(eval_dataset)
            prompts = source.all_prompts(self.args.eval_size) if source else None
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
        if isinstance(model, PreTrainedModel) or is_adapted(model):
            self.model: PreTrainedModel = model  # type: ignore[assignment] # or a PeftModel
            name = tokenizer or transformers.AutoTokenizer.from_pretrained(self.model.name_or_path)
            self.processing_class: PreTrainedTokenizerBase = name
            return
        if model is not None and not isinstance(model, str):
            raise ValueError(
                f"model is a {type(model).__name__}; it must be a hub id, a folder, a "
                "transformers model or a PeftModel"
            )
        self.args = replace(self.args, model=model or self.args.model)
        if self.args.model is None:
            raise ValueError("there is no model; name one (model): a hub id or a folder")
        self.model, self.processing_class = load_model(self.args, tokenizer)

    def _adapt(self, peft_config: Any) -> None:
        if peft_config is not None and self.args.use_peft:
            raise ValueError("peft_config is given and use_peft is true; both add an adapter")
        peft_config = peft_config or lora_config(self.args)
        if peft_config is not None:
            self.model = add_adapter(self.model, peft_config)

    def _prompts(self, spec: Rows | None, split: str) -> PromptSource | None:
        return make_source(
            spec,
            split,
            model=self.model,
            tokenizer=self.processing_class,
            rewards=self.rewards,
            args=self.args,
        )

    def _eval_source(self, eval_dataset: Rows | None) -> PromptSource | None:
        spec = self.args.eval_dataset if eval_dataset is None else eval_dataset
        if spec is None and self.args.eval_split is not None:
            spec = self.args.dataset
        return self._prompts(spec, self.args.eval_split or "train")

    def _note_sources(self, *sources: PromptSource | None) -> None:
        for source in sources:
            if source and source.dropped:
                self.policy.notes.append(f"{source.dropped} prompts are too long and left out")
            if source and source.truncated:
                self.policy.notes.append(f"{source.truncated} prompts are cut on the left")
        if self._eval_prompts and self._source and not self._evaluates:
            self.policy.notes.append(
                "the evaluation set is not used while training (eval_on_start, eval_strategy)"
            )

    def make_run(self) -> Run:
        """What `train` works with, before its first step."""
        assert self._source is not None
        if self._sampling().filtered:
            self.policy.notes.append(
                "sampling is filtered (top_p, top_k, min_p or repetition_penalty): tokens are "
                "drawn from another distribution than the one that is trained, which biases the "
                "gradient"
            )
        self.monitor.add_callbacks(self._callbacks)
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
        return make_sampling(self.args, self.policy.stop_token_ids)

    def _resolved(self) -> RLOOConfig:
        """The options with everything that was chosen automatically filled in."""
        return replace(
            self.args,
            num_threads=torch.get_num_threads(),
            max_tokens_per_micro_batch=self.policy.max_tokens,
            packing=self.policy.packed,
            rollout_engine="native" if self.engine.name == "native" else "hf",
        )

    def _describe(self) -> dict[str, Any]:
        assert self._source is not None
        return {
            "model": self.args.model or type(self.policy.model).__name__,
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
        self.engine.load(self.policy.weights())
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
            precision=self.policy.autocast,
            trainer_state=self.state,
        )
        return metrics

    def _evaluate_and_report(self, name: str) -> dict[str, Any]:
        assert self._eval_prompts is not None
        metrics = self._measure(self._eval_prompts)
        self.monitor.evaluation(self.state.global_step, name, metrics)
        self.monitor.on_evaluate(self.state, self.control, metrics)
        return metrics

    def _summary(self, end: dict[str, Any]) -> dict[str, Any]:
        assert self._run is not None
        return {
            "status": self._status,
            "steps": self.state.global_step,
            "start": self._start,
            "end": end,
            "wall_seconds": self._seconds(),
            "num_tokens": self._run.num_tokens,
            "seed": self.args.seed,
            "config": self._resolved().to_dict(),
            "versions": versions(),
        }

    def _seconds(self) -> float:
        """Wall time of this run, earlier sessions included."""
        return self._seconds_before + time.perf_counter() - self._started

    # -- checkpoints -----------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        assert self._run is not None
        save_checkpoint(
            Path(self.args.output_dir),
            snapshot(self._run, self._resolved(), start=self._start, seconds=self._seconds()),
            write_model=self.policy.save_pretrained,
            keep=self.args.save_total_limit,
        )
        self.monitor.on_save(self.state, self.control)

    def _resume(self, run: Run, path: Path) -> None:
        saved = restore(run, path)
        self._start, self._seconds_before = saved["start"], saved["seconds"]
        self.monitor.truncate_after(self.state.global_step)
        self.monitor.note(f"resumed from {path} at step {self.state.global_step}")
