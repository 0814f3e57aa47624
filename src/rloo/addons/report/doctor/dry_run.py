"""`rloo doctor CONFIG`: diagnoses a configuration from its data and two rollouts trained with
learning rate 0, so that sampler and trainer have the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rloo.addons.report.doctor.dataset_stats import answered_prompts, facts_of
from rloo.addons.report.doctor.doctor_command import describe, read_run
from rloo.addons.report.doctor.rules import diagnose
from rloo.addons.report.doctor.run_record import RecordedRun
from rloo.algorithm.oom_retry import fit_token_budget
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.algorithm.step_record import begin_step
from rloo.algorithm.train import train_on_rollout
from rloo.config.config import RLOOConfig, in_one_process
from rloo.tracking.finding import Finding
from rloo.tracking.guarded import attempt
from rloo.trainer.preflight import without_dataset
from rloo.trainer.trainer import RLOOTrainer

ROLLOUTS = 2


def examine(config: RLOOConfig, source: tuple[str, ...] = ()) -> Iterator[str]:
    """The lines of the report on a configuration; `source` are its command-line arguments."""
    with tempfile.TemporaryDirectory(prefix="rloo-doctor-") as folder:
        run = dry_run(config, Path(folder))
    yield f"{ROLLOUTS} rollouts were sampled, scored and trained on with learning rate 0."
    yield from (f"{line[:1].upper()}{line[1:]}." for line in run.facts["rows"])
    yield from describe(diagnose(replace(run, source=source)))


def findings_before(config: RLOOConfig, folder: Path) -> list[Finding]:
    """The findings on a configuration. The two rollouts write their files into `folder`."""
    return diagnose(dry_run(config, folder))


def dry_run(config: RLOOConfig, folder: Path) -> RecordedRun:
    """The record of two rollouts with learning rate 0, with the facts of `facts_of`. Raises
    ValueError without a dataset."""
    if config.dataset is None:
        raise ValueError(without_dataset(config))
    changed = in_one_process(config).with_values(
        output_dir=str(folder),
        learning_rate=0.0,
        report_to="none",
        push_to_hub=False,
        disable_tqdm=True,
        logging_strategy="no",
        logging_first_step=False,
        log_completions=False,
        profile=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    trainer = RLOOTrainer(args=changed)
    parts, state = trainer.make_parts()
    rollouts = parts.rollouts
    assert isinstance(rollouts, SyncRolloutGenerator)
    fit_token_budget(parts, state)
    prompts = rollouts.prompts.next(parts.batches.prompts_per_rollout)
    facts = facts_of(parts, trainer._eval_prompts)
    tried = partial(
        answered_prompts,
        trainer.rewards,
        prompts,
        trainer.state,
        config.eval_options.pass_threshold,
    )
    answered = attempt("whether prompts hold their answers", tried, None, parts.monitor.note)
    for _ in range(ROLLOUTS):
        begin_step(parts)
        train_on_rollout(parts, state)
    trainer.end()
    facts["answered_prompts"] = answered
    columns = [name for name, value in prompts[0].columns.items() if value is not None]
    readers = [f for f in trainer.rewards.functions if hasattr(f, "taken_for")]
    facts["rows"] = [reader.taken_for(columns) for reader in readers]
    return replace(read_run(folder), config=config.to_dict(), facts=facts, dry=True)
