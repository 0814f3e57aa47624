"""Runs one training: resume, loop, evaluate, checkpoint, final save."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rloo.algorithm.oom_retry import fit_token_budget
from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.algorithm.step_record import begin_step, finish_step, note_pending_work
from rloo.algorithm.stop_signals import ForcedInterrupt, Stopped
from rloo.algorithm.train import train_on_rollout
from rloo.config.compat.deepspeed_config import division_named
from rloo.config.config import LENGTH, RLOOConfig
from rloo.config.show import render_resolved
from rloo.config.user_functions import NotAllowed
from rloo.distributed.standard_streams import counted
from rloo.model.memory_estimate import process_peaks
from rloo.model.policy import describe_parameters
from rloo.model.training_state import NotFiniteError, WeightsDiverged, capture_rng, restore_rng
from rloo.tracking.hub_upload import HubUploader
from rloo.tracking.jsonl import CONFIG, SUMMARY, run_facts, write_json, write_text
from rloo.tracking.profiler import StepProfile
from rloo.tracking.run_reader import read_object
from rloo.trainer.checkpoint import verify_checkpoint
from rloo.trainer.checkpoint_writer import renew_card, write_checkpoint, write_result
from rloo.trainer.cpu_settings import arithmetic
from rloo.trainer.evaluate import Evaluator, Results, Sets, is_better
from rloo.trainer.prompt_lengths import longest_completion
from rloo.trainer.rank_checks import check_same_weights
from rloo.trainer.resume import changed_options, named_since, restore
from rloo.trainer.run_dir import MARK, StartPoint
from rloo.trainer.trl_overrides import TrainerHooks

# The rollout that is profiled; the first two still fill caches and select kernels.
PROFILED_ROLLOUT = 3


@dataclass
class TrainingLoop:
    """The loop of one training. `sets` are the evaluation sets."""

    owner: TrainerHooks
    parts: TrainerComponents
    state: TrainState
    evaluator: Evaluator
    sets: Sets
    hub: HubUploader
    status: str = "failed"
    _start: dict[str, Any] = field(default_factory=dict)
    _totals: dict[str, float] = field(default_factory=dict)
    _last: tuple[int, dict[str, Any]] = (-1, {})
    _saved_at: int | None = None

    def __post_init__(self) -> None:
        self.config: RLOOConfig = self.parts.config
        self._folder = self.parts.monitor.output_dir
        self._named = self.config.named

    def has_finished(self, start: StartPoint) -> bool:
        """Whether the finished run in the folder has the same options; if so, prints a message.
        Raises ValueError if the options differ and there is no checkpoint to resume from."""
        before = start.finished["config"]
        changed = changed_options(before, self.config)
        lengths = [name for name in LENGTH if before.get(name) != getattr(self.config, name)]
        if changed or lengths:
            if start.checkpoint is None:
                raise ValueError(
                    f"output_dir {self._folder} holds a finished run with other options "
                    f"({', '.join(changed or lengths)}); name another folder (output_dir)"
                )
            return False
        steps = counted(start.finished["steps"], "step")
        self.parts.monitor.say(f"The run in {self.config.output_dir} has finished: {steps}.")
        self.parts.monitor.repeat()
        return True

    def train(self, start: StartPoint) -> dict[str, float]:
        """Train from a checkpoint or from step 0; return Trainer's metrics of the run.

        Every run ends here. After a stop or an error a checkpoint of the last finished step is
        saved (see `_save_what_is_done`). The terminal is restored; summary.json has the status.
        """
        parts, state, monitor = self.parts, self.state, self.parts.monitor
        parts.clock.start()
        parts.policy.stepper.clear()  # after a step whose error a script has caught
        if self.config.push_to_hub and parts.world.is_main:
            self.hub.create()
        if start.checkpoint is not None:
            self._resume(start.checkpoint, same_options=start.same_options)
        fit_token_budget(parts, state)
        parts.policy.files.try_save()
        again = {"resume_from_checkpoint": None, "overwrite_output_dir": False}
        shown = render_resolved(self._resolved().with_values(**again))
        if parts.world.is_main:
            write_text(self._folder / CONFIG, MARK + shown)
        monitor.start(self._describe(), parts.batches)
        for note in dict.fromkeys((*start.notes, *parts.policy.notes)):
            monitor.note(note)
        monitor.begin(parts, self.sets)
        self._first_step = self._saved_step = state.step
        try:
            with parts.events.of_optimizer():
                parts.events.send("on_train_begin")
                if start.checkpoint is None and self.config.eval_on_start:
                    self._evaluate(first=True)
                self._train_to_the_end()
            self._totals = self._finish()
            monitor.check_written()
            self.status = "finished"
        except BaseException as error:
            # The command line distinguishes errors of a run from errors in the input.
            error.in_run = True  # type: ignore[attr-defined]
            self._save_what_is_done(error)
            if isinstance(error, SystemExit) and not isinstance(error, Stopped):
                raise NotAllowed(
                    f"a function of the user's has called sys.exit({error.code!r}) in step "
                    f"{state.step + 1}; it must raise an error, or a callback should_training_stop"
                ) from error
            raise
        finally:
            with parts.stop.deferred():
                monitor.finish(self._summary())
        return self._totals

    def push(self) -> None:
        """Push the result to the hub if `push_to_hub` is set, and record the push in summary.json.
        A finished run without this record is pushed again."""
        if not self.config.push_to_hub:
            return
        with self.parts.policy.files.collected():
            if not self.parts.world.is_main:
                return
            self.owner.push_to_hub()
            path = self._folder / SUMMARY
            write_json(path, read_object(path) | {"pushed": True})

    def _resume(self, checkpoint: Path, *, same_options: bool) -> None:
        parts, state, monitor = self.parts, self.state, self.parts.monitor
        saved = restore(parts, state, checkpoint, same_options=same_options)
        self._start, parts.clock.before = saved["start"], saved["seconds"]
        self._last, self._named = saved["last"], named_since(saved, self.config)
        monitor.load_state_dict(saved["logs"], step=state.step, evaluated_at=state.evaluated_at)
        monitor.window = parts.world.broadcast_object(monitor.window)  # only main reads the files
        monitor.note(f"resumed from {checkpoint} at step {state.step}")

    def _train_to_the_end(self) -> None:
        """Train until `max_steps`, or until a callback requests a stop. Checkpoints and evaluations
        inside a rollout are delayed to its end, so that a resumed run does not repeat them."""
        parts, state = self.parts, self.state
        rollouts, epoch, pace = 0, None, None  # pace: seconds per token, without a profile
        if state.step_open:  # a callback ended an earlier session
            finish_step(parts, state)
        if state.active_rollout is None:
            self._settle()
        while not state.is_over:
            parts.stop.check()
            state.generators = capture_rng()
            if state.active_rollout is None:  # else it is set, and the data position is later
                state.open_epoch = int(parts.rollouts.epoch)
            if state.open_epoch != epoch:
                epoch = state.open_epoch
                parts.events.send("on_epoch_begin")
            begin_step(parts)
            rollouts += 1
            last = state.step + parts.batches.steps_per_rollout >= state.trainer.max_steps
            due = rollouts == PROFILED_ROLLOUT or (last and rollouts < PROFILED_ROLLOUT)
            if self.config.profile and due and parts.world.is_main:
                self._profile_rollout(rollouts, pace)
            else:
                began, tokens = time.perf_counter(), state.num_tokens
                train_on_rollout(parts, state, self._save_as_wanted)
                pace = (time.perf_counter() - began) / max(1, state.num_tokens - tokens)
            self._settle()

    def _settle(self) -> None:
        """Between two rollouts, do what is pending: evaluate, end the epoch, save."""
        parts, state = self.parts, self.state
        save_wanted = check_same_weights(parts, state)
        self._evaluate_if_due()
        over = state.is_over or int(parts.rollouts.epoch) != state.open_epoch
        if state.open_epoch is not None and over:
            parts.events.send("on_epoch_end")
            parts.monitor.log_if_asked()
            state.open_epoch = None
            note_pending_work(state)
            self._evaluate_if_due()
        if save_wanted or parts.stop.save_wanted or state.save_pending:
            state.save_pending = False
            self._save_as_wanted()

    def _save_as_wanted(self) -> None:
        self.parts.stop.save_wanted = False
        self._save_checkpoint()

    def _profile_rollout(self, number: int, pace: float | None) -> None:
        parts, state = self.parts, self.state
        first, tokens = state.step + 1, state.num_tokens
        with StepProfile(parts.world.device) as profile:
            parts.clock.profile = profile
            train_on_rollout(parts, state, self._save_as_wanted)
            parts.clock.profile = None
        slowdown = profile.total / max(1, state.num_tokens - tokens) / pace if pace else None
        title = f"Profile of rollout {number}, optimizer steps {first} to {state.step}"
        for line in profile.write(self._folder / "profile", title=title, slowdown=slowdown):
            parts.monitor.say(line)

    def _evaluate_if_due(self) -> None:
        state = self.state
        if state.evaluation_pending:
            state.save_pending |= self._evaluate()
            state.save_pending |= state.control.should_save

    def _evaluate(self, *, first: bool = False) -> bool:
        """Evaluate. Returns True if a checkpoint must be saved now."""
        state, config = self.state, self.config
        name = "start" if first else "end" if state.is_over else "during"
        if name == "end":
            self._save_model()  # before an evaluation that may fail
        if not self.sets:
            raise ValueError(
                "a callback asked for an evaluation, and there is nothing to evaluate on "
                "(eval_dataset)"
            )

        def count(results: Results) -> None:
            self.owner.on_measured = None
            self.parts.stop.hold()  # from here on the evaluation counts as done
            state.evaluation_pending, state.evaluated_at = False, state.step
            self._write_down(name, state.step, results)
            figures = next(iter(results.values()), {})
            if first:
                self._start = figures
            else:
                self._last = state.step, figures

        with self.parts.stop.released():
            self.owner.on_measured = count
            try:
                flat = self.owner.evaluate() or {}
                if self.owner.on_measured is not None:  # a subclass has measured in another way
                    count({})
            finally:
                self.owner.on_measured = None
            if first:
                return False
            return is_better(state.trainer, flat, config) and config.compares_evaluations

    def _write_down(self, name: str, step: int, results: Results) -> None:
        for dataset, metrics in results.items():
            self.parts.monitor.evaluation(step, name, metrics, dataset=dataset)

    def _finish(self) -> dict[str, float]:
        state, config, step = self.state, self.config, self.state.step
        evaluates = config.eval_on_start or config.eval_strategy != "no"
        if evaluates and state.evaluated_at != step and self._evaluate():
            self._save_checkpoint()
        if config.load_best_model_at_end:
            self._load_best()
        if self._saved_at != step:
            self._save_model()
        else:
            renew_card(self.parts, self.owner)
        seconds, steps = self.parts.clock.session_seconds, step - self._first_step
        pace, size = steps / seconds, self.parts.batches.completions_per_step
        speeds = {"train_steps_per_second": pace, "train_samples_per_second": size * pace}
        totals = {"train_runtime": seconds, **speeds, "train_loss": self.parts.monitor.mean_loss}
        return self.parts.monitor.log_totals(self.parts.world.broadcast_object(totals))

    def _load_best(self) -> None:
        """Load the weights of the best evaluation, and evaluate them again."""
        state, step = self.state.trainer, self.state.trainer.best_global_step
        self.parts.world.all_gather_object(None)  # wait until main has written the checkpoint
        if state.best_model_checkpoint is None or step is None or step == state.global_step:
            return
        best = Path(state.best_model_checkpoint)
        verify_checkpoint(best)
        self._saved_step = state.global_step  # these weights are not this step's: no checkpoint
        self.parts.policy.files.load_pretrained(best)
        self._saved_at = None
        self.parts.monitor.note(
            f"the model is that of {best.name}, which had the best evaluation: "
            f"{self.config.metric_for_best_model} {state.best_metric:g} (load_best_model_at_end)"
        )
        results = self.evaluator.measure(self.sets)
        self._write_down("best", step, results)
        self._last = state.global_step, next(iter(results.values()))

    def _save_model(self) -> None:
        """Write the trained model. Raises NotFiniteError if a weight is not finite."""
        self.parts.policy.stepper.require_finite()
        self._saved_at = self.state.step
        write_result(self.parts, self.owner)

    def _save_checkpoint(self, *, push: bool = True, last: bool = False) -> None:
        whole = last or not self.config.save_only_model
        with self.parts.policy.in_step(forward=False), self.parts.stop.deferred():
            self._commit(whole=whole)
            self._saved_step = self.state.step if whole else self._saved_step
            self.parts.events.send("on_save")
            config, step = self.config, self.state.step
            if push and config.push_to_hub and config.hub_strategy != "end":
                self._save_model()
                if self.parts.world.is_main:
                    checkpoint = self._folder / f"checkpoint-{step}"
                    self.hub.push_checkpoint(self._folder, checkpoint, step)

    def _commit(self, *, whole: bool) -> None:
        """Write a checkpoint. From a `whole` checkpoint a run resumes bit for bit. If weights or
        moments are not finite, raises FloatingPointError and writes nothing."""
        state = self.state.trainer
        self.parts.policy.stepper.require_finite(moments=True)
        # Pending uploads read checkpoints that may be removed now.
        self.hub.finish(self.parts.monitor.note)
        path = self._folder / f"checkpoint-{state.global_step}"
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(path)
        logs = self.parts.monitor.state_dict()
        seconds = self.parts.clock.run_seconds
        told = {"start": self._start, "last": self._last, "seconds": seconds, "logs": logs}
        told |= {"config": self._resolved().to_dict(), "named": sorted(self._named)}
        write_checkpoint(self.parts, self.state, self.owner, told if whole else None)

    def _save_what_is_done(self, error: BaseException) -> None:
        """Save a checkpoint of the last finished step if there is none. Nothing is saved after a
        second Ctrl-C, or if the weights are invalid or belong to a step without a record."""
        state = self.state
        stopped = isinstance(error, (KeyboardInterrupt, Stopped)) or self.parts.stop.received
        self.status = "interrupted" if stopped else "failed"
        self.parts.monitor.failed(error)
        if state.step == self._saved_step or isinstance(
            error, (ForcedInterrupt, NotFiniteError, WeightsDiverged)
        ):
            return
        if state.weights_ahead_of_record:
            self.parts.monitor.note(
                f"the weights are those of step {state.step + 1}, which was not recorded: nothing "
                "of it is saved; go on from the last checkpoint"
            )
            return
        restore_rng(state.generators)  # discards the unfinished step
        if self.parts.policy.divides:
            self.parts.world.fail(error)  # so that the other processes join the save
            if len(set(self.parts.world.regroup(state.step) or [])) != 1:
                self.parts.monitor.note(
                    "weights are divided, and not all processes came to save them: the run goes on "
                    "from its last checkpoint (parallel, save_steps)"
                )
                return
        with self.parts.stop.deferred():
            self._save_checkpoint(push=False, last=True)

    def _resolved(self) -> RLOOConfig:
        """The options, including all values that were chosen automatically."""
        return self.config.with_values(
            **arithmetic(),
            max_tokens_per_micro_batch=self.parts.policy.max_tokens,
            packing=self.parts.policy.packed,
            rollout_engine=self.parts.engine.capabilities.name,
        )

    def _describe(self) -> dict[str, Any]:
        parts = self.parts
        return {
            "model": self.config.model or type(parts.policy.model).__name__,
            "parameters": describe_parameters(parts.policy),
            **parts.rollouts.describe(),
            "engine": parts.engine.capabilities.name,
            "packing": parts.policy.packed,
            "threads": f"{torch.get_num_threads()} ({parts.policy.why_threads})",
            **({"processes": parts.world.size} if parts.world.size > 1 else {}),
            **({"parallel": division_named(self.config)} if parts.policy.divides else {}),
            "device": str(parts.world.device),
        }

    def _summary(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "steps": self.state.step,
            "start": self._start,
            "end": self._last[1] if self._last[0] == self.state.step else {},
            "wall_seconds": self.parts.clock.run_seconds,
            "longest_completion": longest_completion(self.parts),
            "num_tokens": self.state.num_tokens,
            **process_peaks(self.parts.world.device),
            "seed": self.config.seed,
            "config": self._resolved().to_dict(),
            "named": sorted(self._named),
            "totals": self._totals,
            **({"pushed": False} if self.config.push_to_hub else {}),
            **run_facts(),
        }
