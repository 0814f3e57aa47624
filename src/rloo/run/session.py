"""Runs one training job: resume, loop, evaluate, checkpoint, final save.

The loop in `train.py` decides when; this module does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rloo.algorithm.interrupts import ForcedInterrupt, uninterrupted
from rloo.algorithm.train import Run, rehearse, train
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig
from rloo.config.rendering import render_resolved
from rloo.data.stream import Prompts, StreamSource
from rloo.model.policy import Policy
from rloo.report.callbacks import Events
from rloo.report.hub import Hub
from rloo.report.model_card import has_other_card
from rloo.report.monitor import Monitor, versions
from rloo.report.records import write_text
from rloo.rewards import RewardSet
from rloo.run.checkpoint import save_checkpoint, verify_checkpoint
from rloo.run.evaluate import Evaluator, Sets, flatten, is_better
from rloo.run.resume import restore, snapshot
from rloo.run.setup import make_sampling
from rloo.types import Engine


class Session:
    """Trains once. `sets` are the evaluation sets; `write_card` writes a model card."""

    def __init__(
        self,
        config: RLOOConfig,
        *,
        batches: Batches,
        policy: Policy,
        engine: Engine,
        prompts: Prompts,
        rewards: RewardSet,
        monitor: Monitor,
        events: Events,
        evaluator: Evaluator,
        sets: Sets,
        hub: Hub,
        write_card: Callable[[], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.monitor = monitor
        self.state = events.state
        sampling = make_sampling(config, policy.stop_token_ids, policy.tokenizer)
        if sampling.filtered:
            policy.notes.append(
                "sampling is filtered (top_p, top_k, min_p or repetition_penalty): tokens are "
                "drawn from another distribution than the one that is trained, which biases the "
                "gradient"
            )
        self.run = Run(
            config=config,
            batches=batches,
            policy=policy,
            engine=engine,
            prompts=prompts,
            rewards=rewards,
            sampling=sampling,
            monitor=monitor,
            events=events,
            state=events.state,
            control=events.control,
            save=self._save_checkpoint,
            evaluate=self._evaluate_when_due,
        )
        self._folder = Path(config.output_dir)
        self._evaluator = evaluator
        self._sets = sets
        self._hub = hub
        self._write_card = write_card
        self._status = "failed"
        self._start: dict[str, Any] = {}
        self._last: tuple[int, dict[str, Any]] = (-1, {})
        self._saved_at: int | None = None
        self._seconds_before = 0.0

    def train(self, checkpoint: Path | None) -> dict[str, float]:
        """Train, from a checkpoint or from the beginning; return Trainer's figures of the run.

        If Ctrl-C or an error ends it early, a checkpoint is saved and the error raised.
        """
        run, monitor = self.run, self.monitor
        self._started = time.perf_counter()
        if self.config.push_to_hub:
            self._hub.create()
        if checkpoint is not None:
            self._resume(checkpoint)
        rehearse(run)
        again = replace(self._resolved(), resume_from_checkpoint=None, overwrite_output_dir=False)
        write_text(self._folder / "config.yaml", render_resolved(again))
        monitor.start(self._describe(), run.batches)
        for note in self.policy.notes:
            monitor.note(note)
        self._first_step = self.state.global_step
        try:
            with run.events.of_optimizer():
                run.events.send("on_train_begin")
                if checkpoint is None and self.config.eval_on_start:
                    self._evaluate("start")
                train(run)
            totals = self._finish()
            self._status = "finished"
        except (KeyboardInterrupt, Exception) as error:
            self._save_what_is_done(error)
            raise
        finally:
            monitor.finish(self._summary())
        return totals

    # -- evaluating ------------------------------------------------------------------------------

    def _evaluate_when_due(self) -> bool:
        """Evaluate if it is due; returns True if a checkpoint must be saved now."""
        if not self.run.is_over:
            return self._evaluate("during")
        self._save_model()  # before an evaluation that may fail
        return self._evaluate("end")

    def _evaluate(self, name: str) -> bool:
        if not self._sets:
            raise ValueError(
                "a callback asked for an evaluation, and there is nothing to evaluate on "
                "(eval_dataset)"
            )
        results = self._evaluator.measure(self._sets)
        step = self.state.global_step
        for dataset, metrics in results.items():
            self.monitor.evaluation(step, name, metrics, dataset=dataset)
        flat = flatten(results, "eval")
        self.monitor.log_evaluation(flat)
        first = next(iter(results.values()))
        if name == "start":
            self._start = first
            return False
        self._last = step, first
        return is_better(self.state, flat, self.config) and self.config.compares_evaluations

    def _finish(self) -> dict[str, float]:
        run, config, step = self.run, self.config, self.state.global_step
        evaluates = config.eval_on_start or config.eval_strategy != "no"
        if evaluates and run.evaluated_at != step and self._evaluate_when_due():
            with uninterrupted():
                self._save_checkpoint()
        if config.load_best_model_at_end:
            self._load_best()
        if self._saved_at != step:
            self._save_model()
        seconds, steps = time.perf_counter() - self._started, step - self._first_step
        return self.monitor.log_totals(
            {
                "train_runtime": seconds,
                "train_steps_per_second": steps / seconds,
                "train_samples_per_second": steps * run.batches.completions_per_step / seconds,
            }
        )

    def _load_best(self) -> None:
        """Load the weights of the best evaluation, and evaluate them again."""
        state, step = self.state, self.state.best_global_step
        if state.best_model_checkpoint is None or step is None or step == state.global_step:
            return
        best = Path(state.best_model_checkpoint)
        verify_checkpoint(best)
        self.policy.load_pretrained(best)
        self._saved_at = None
        self.monitor.note(
            f"the model is that of {best.name}, which had the best evaluation: "
            f"{self.config.metric_for_best_model} {state.best_metric:g} (load_best_model_at_end)"
        )
        results = self._evaluator.measure(self._sets)
        for dataset, metrics in results.items():
            self.monitor.evaluation(step, "best", metrics, dataset=dataset)
        self._last = state.global_step, next(iter(results.values()))

    # -- what is written -------------------------------------------------------------------------

    def _save_model(self) -> None:
        other_card = has_other_card(self._folder)
        with uninterrupted():
            self.policy.save_pretrained(self._folder)
        if other_card:
            self.monitor.note("README.md in output_dir is not this program's and was left as it is")
        else:
            self._write_card()
        self._saved_at = self.state.global_step

    def _save_checkpoint(self, *, push: bool = True) -> None:
        state, config = self.state, self.config
        self._note_failed_pushes()  # uploads in progress read checkpoints that may be removed now
        path = self._folder / f"checkpoint-{state.global_step}"
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(path)
        best = state.best_model_checkpoint if config.compares_evaluations else None
        save_checkpoint(
            self._folder,
            snapshot(self.run, self._resolved(), start=self._start, seconds=self._seconds()),
            write_model=self.policy.save_checkpoint,
            keep=config.save_total_limit,
            best=Path(best) if best else None,
        )
        self.run.events.send("on_save")
        if push and config.push_to_hub and config.hub_strategy != "end":
            self._save_model()
            self._hub.push_checkpoint(self._folder, path, state.global_step)

    def _save_what_is_done(self, error: BaseException) -> None:
        """Save a checkpoint after an error. The weights are those of the last finished step, unless
        a second Ctrl-C interrupted a step."""
        self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if self.state.global_step > self._first_step and not isinstance(error, ForcedInterrupt):
            with uninterrupted():
                self._save_checkpoint(push=False)

    def _note_failed_pushes(self) -> None:
        for error in self._hub.finish():
            self.monitor.note(f"a push to the hub failed: {error}")

    def _resume(self, path: Path) -> None:
        saved = restore(self.run, path)
        self._start, self._seconds_before = saved["start"], saved["seconds"]
        self.monitor.truncate_after(self.state.global_step)
        self.monitor.note(f"resumed from {path} at step {self.state.global_step}")

    # -- what is said ----------------------------------------------------------------------------

    def _resolved(self) -> RLOOConfig:
        """The options, including everything that was chosen automatically."""
        return replace(
            self.config,
            num_threads=torch.get_num_threads(),
            max_tokens_per_micro_batch=self.policy.max_tokens,
            packing=self.policy.packed,
            rollout_engine="native" if self.run.engine.name == "native" else "hf",
        )

    def _describe(self) -> dict[str, Any]:
        prompts = self.run.prompts
        return {
            "model": self.config.model or type(self.policy.model).__name__,
            "parameters": sum(p.numel() for p in self.policy.parameters),
            "rows": "a stream" if isinstance(prompts, StreamSource) else len(prompts),
            "rewards": self.run.rewards.names,
            "engine": self.run.engine.name,
            "packing": self.policy.packed,
            "threads": torch.get_num_threads(),
            "device": str(self.policy.device),
        }

    def _summary(self) -> dict[str, Any]:
        step, metrics = self._last
        return {
            "status": self._status,
            "steps": self.state.global_step,
            "start": self._start,
            "end": metrics if step == self.state.global_step else {},
            "wall_seconds": self._seconds(),
            "num_tokens": self.run.num_tokens,
            "seed": self.config.seed,
            "config": self._resolved().to_dict(),
            "versions": versions(),
        }

    def _seconds(self) -> float:
        """Wall time of this run, including earlier sessions."""
        return self._seconds_before + time.perf_counter() - self._started
