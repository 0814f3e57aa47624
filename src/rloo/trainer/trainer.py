"""RLOOTrainer: the components of a run behind the interface of TRL's trainer."""

# Over 400 lines: TRL's constructor and methods are in one class.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import TrainOutput

from rloo.algorithm.async_rollout import make_rollouts
from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.oom_retry import recompute_advantages, with_oom_retry
from rloo.algorithm.stages import advantages_stage, after_backward, update_stage
from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.config.launcher_env import check_launch
from rloo.config.presets import remarks
from rloo.data.iterable_dataset import IterablePromptDataset, Prompts
from rloo.distributed import World
from rloo.model.model_loading import obtain_config, obtain_model
from rloo.model.optimizers import Given, Scheduler, build_optimizer, build_scheduler, decayed_names
from rloo.model.policy import Policy
from rloo.model.token_budget import workload_of
from rloo.rewards import RewardSet
from rloo.tracking.after_run import after_lines
from rloo.tracking.callbacks import Events, make_loggers
from rloo.tracking.hub_upload import HubUploader
from rloo.tracking.model_card import write_card
from rloo.tracking.monitor import Monitor
from rloo.tracking.profiler import PhaseTimer
from rloo.trainer import build, prompt_loading, restart, trl_attributes, trl_overrides
from rloo.trainer.build import RewardFunction, Tokenizers
from rloo.trainer.checkpoint import find_checkpoint
from rloo.trainer.cpu_settings import keep_freed_memory
from rloo.trainer.eval_rewards import EvalRewards
from rloo.trainer.evaluate import Evaluator, Results, check_evaluation, flatten
from rloo.trainer.heartbeat import heartbeat
from rloo.trainer.multi_turn import Factories, MultiTurnSetup, RolloutFunc, multi_turn_setup
from rloo.trainer.prompt_loading import PublishedRows, Rows, RowSets
from rloo.trainer.prompt_sampling import (
    check_pilot,
    check_terms,
    connect_probe,
    with_prompt_sampling,
)
from rloo.trainer.rank_checks import check_ranks_agree, ranks_in_sync
from rloo.trainer.run_dir import AUTO, acquire_run_dir_on_main
from rloo.trainer.schedule import unused_intervals
from rloo.trainer.training_loop import TrainingLoop
from rloo.types import Engine, Prompt

Rewards = RewardFunction | Sequence[RewardFunction]


class RLOOTrainer(trl_attributes.TRLTrainerAttributes):
    """Trains a causal language model with REINFORCE Leave-One-Out.

    The arguments are those of TRL's RLOOTrainer, in the same order. `model` is a hub id, a folder,
    a model with float32 weights or a PeftModel. `reward_funcs` (or `reward_model`) is one reward or
    a list: functions, reward models, built-in names, `module:function` or `file.py:function`.
    `eval_dataset` may be a dict of named sets. `eval_reward_funcs` are rewards or TRL's pairwise
    judges for evaluations only. With `peft_config` (a LoraConfig) a new adapter is trained. As in
    TRL's GRPOTrainer, the model may call `tools` (functions) and the methods of environments from
    `environment_factory`, or `rollout_func` generates the rollouts (docs/tools.md). Raises
    ValueError for every error that can be found before sampling.
    """

    args: RLOOConfig
    batches: BatchSizes
    callback_handler: CallbackHandler
    control: transformers.TrainerControl
    engine: Engine
    eval_dataset: Any
    evaluator: Evaluator
    events: Events
    hub: HubUploader
    judging: EvalRewards
    lr_scheduler: Any
    model: PreTrainedModel
    monitor: Monitor
    optimizer: Any
    policy: Policy
    processing_class: Any
    ref_model: PreTrainedModel | None
    reward_func_names: list[str]
    reward_funcs: list[Any]
    reward_processing_classes: list[PreTrainedTokenizerBase | None]
    rewards: RewardSet
    state: transformers.TrainerState
    tools: list[Callable[..., Any]]
    train_dataset: Any
    turns: MultiTurnSetup
    world: World
    on_measured: Callable[[Results], None] | None = None
    _session: TrainingLoop | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        trl_overrides.refuse_overrides(cls, _OWN, _SHOWN)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "evaluator") and value is not vars(self).get(name, self):
            trl_overrides.refuse_replacement(name)
        if callable(value):
            trl_overrides.refuse_assignment(name, _OWN)
        super().__setattr__(name, value)

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        reward_funcs: Rewards | None = None,
        args: RLOOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: RowSets | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: Tokenizers = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: Given = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        reward_model: Rewards | None = None,
        eval_reward_funcs: Rewards | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Factories = None,
    ) -> None:
        trl_overrides.refuse_overrides(type(self), _OWN, _SHOWN)  # the class may have changed
        if reward_funcs is not None and reward_model is not None:
            raise ValueError("reward_funcs and reward_model mean the same; give only one of them")
        self.args = obtain_config(args, model)
        check_launch(self.args)
        self.world = build.world_of(self.args)
        with self.world.reporting_failure():
            self.batches = build.make_batches(self.args, self.world)
            build.seed_all(self.args)
            loggers = make_loggers(self.args)
            self.turns = multi_turn_setup(tools, environment_factory, rollout_func, self.args)
            self.tools = self.turns.functions
            given = reward_model if reward_funcs is None else reward_funcs
            given, weighed = self.turns.with_rewards(given, self.args)
            self.rewards = self.turns.with_environment_rewards(
                build.make_rewards(
                    given, weighed, reward_processing_classes, device=self.world.device
                )
            )
            self.reward_func_names = self.rewards.names
            self.reward_funcs = trl_attributes.functions_of(self.rewards)
            self.reward_processing_classes = trl_attributes.processing_classes(
                self.rewards, reward_processing_classes
            )
            self.judging = EvalRewards.of(eval_reward_funcs, self.args, self.rewards, self.world)
            rows = self.args.dataset if train_dataset is None else train_dataset
            self.train_dataset = self.turns.dataset(rows, self.args, self.batches)
            self.eval_dataset = self.args.eval_dataset if eval_dataset is None else eval_dataset
            published = self._read_rows()  # before the model: wrong columns are found in seconds
            self.model, self.processing_class, self.args = obtain_model(
                model,
                processing_class,
                self.args,
                device=self.world.device,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
            self._load_prompts(*published)
            self._set_up(optimizers, [*loggers, *(callbacks or [])])
            self.events.send("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train and write everything to `args.output_dir`. Returns the number of steps, the mean
        loss and Trainer's metrics of the run; summary.json contains the evaluation results. After a
        stop signal or an error a checkpoint is saved. Then KeyboardInterrupt (Ctrl-C), `Stopped`
        (other signals, handled in the main thread only) or the error is raised. With
        `resume_from_checkpoint` "auto", an unfinished run with the same options resumes, the result
        of a finished run is loaded, and without an earlier run a new run starts."""
        trl_overrides.refuse_overrides(type(self), _OWN, _SHOWN)
        self.refuse_changed()
        resume = self._begin_again(resume_from_checkpoint)
        parts, state = self.make_parts()
        session = TrainingLoop(self, parts, state, self.evaluator, self._eval_prompts, self.hub)
        run_dir = acquire_run_dir_on_main(self.world, self.args, resume)
        with ranks_in_sync(parts, state), run_dir as start:
            if start.finished and session.has_finished(start):
                self.policy.files.load_pretrained(self.args.output_dir)
                totals = start.finished["totals"]
                if not start.finished.get("pushed", True):
                    session.push()
                return TrainOutput(start.finished["steps"], totals["train_loss"], totals)
            self._session = session
            with heartbeat(parts), self.args.in_training():
                totals = session.train(start)
        session.push()
        folder = self.args.output_dir
        for line in after_lines(self.policy, folder):
            self.monitor.say(line)
        if self.args.dataset is not None:
            self.monitor.say(f"Evaluate it: rloo eval {folder}/config.yaml --model {folder}")
        return TrainOutput(self.state.global_step, totals["train_loss"], totals)

    def evaluate(
        self,
        eval_dataset: RowSets | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Evaluate on `eval_dataset`: rows, or the name of one of the trainer's sets; default: all
        of the trainer's sets. Metrics have transformers' names (eval_reward, or eval_math_reward
        for a set `math`). The metrics are logged and sent to the callbacks. An evaluation does not
        change the result of training in any bit."""
        self.refuse_changed()
        if ignore_keys:
            raise ValueError("ignore_keys names outputs of a model; no metric is made of those")
        sets = self._eval_prompts
        if isinstance(eval_dataset, str) and eval_dataset in sets:
            sets = {eval_dataset: sets[eval_dataset]}
        elif eval_dataset is not None:
            rows = prompt_loading.read_eval_rows(eval_dataset, self.args, self._rows_of)
            sets = self._prompts_of_sets(rows)
        if not sets:
            raise ValueError("there is nothing to evaluate on (eval_dataset, eval_split)")
        with self.world.reporting_failure():
            results = self.evaluator.measure(sets)
        if eval_dataset is None and self.on_measured is not None:
            self.on_measured(results)
        metrics = flatten(results, metric_key_prefix)
        self.monitor.log_evaluation(metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hugging Face format, to `args.output_dir` by default."""
        with self.policy.files.collected():
            if self.world.is_main:
                self.policy.files.save_pretrained(output_dir or self.args.output_dir)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer of the options. An override in a subclass is called before the first step,
        unless the argument `optimizers` has an optimizer."""
        return build_optimizer(self.model, self.args, self.get_decay_parameter_names(self.model))

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The names of the parameters with weight decay. Called only if a subclass overrides this
        method."""
        return decayed_names(model)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set the attributes `optimizer` and `lr_scheduler`. Called only if a subclass overrides
        this method and the argument `optimizers` is not given."""
        self.optimizer = self.create_optimizer() or self.optimizer
        self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Scheduler:
        """The schedule of the options. Called if a subclass overrides this method, and if `train`
        is called again with another number of steps."""
        return build_scheduler(optimizer or self.optimizer, self.args, num_training_steps)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Write model and card to `args.output_dir` and upload the folder, without checkpoints, to
        `args.hub_model_id`. `card` is passed to `create_model_card`. Returns the commit, or a
        future of the commit if `blocking` is False."""
        with self.policy.files.collected():  # the main process gathers shards from all ranks
            if not self.world.is_main:
                return None
            self.events.send("on_push_begin")
            if self.hub.repo_id is None:
                self.hub.create(token=token, private=private)
            self.save_model()
            self.create_model_card(**card)
        self.hub.finish(self.monitor.note)
        how: Any = {"wait": blocking, "token": token, "revision": revision}
        return self.hub.upload(Path(self.args.output_dir), commit_message, **how)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write the model card, README.md in `args.output_dir`."""
        rewards = self.rewards.names
        if self.world.is_main:
            write_card(self.policy, rewards, name=model_name, datasets=dataset_name, tags=tags)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add numbers to `state.log_history` and send them to the loggers."""
        self.monitor.log_numbers(logs)

    def is_world_process_zero(self) -> bool:
        """Whether this process writes files and prints for the user."""
        return self.world.is_main

    is_local_process_zero = is_world_process_zero
    is_deepspeed_enabled = is_fsdp_enabled = False

    # -- setting up ------------------------------------------------------------------------------

    def _read_rows(self) -> tuple[PublishedRows | None, dict[str, PublishedRows]]:
        trains, given = self.train_dataset is not None, self.eval_dataset
        if given is None and self.args.eval_split is not None:
            given = self.train_dataset
        training = self._rows_of(self.train_dataset, self.args.dataset_split) if trains else None
        return training, prompt_loading.read_eval_rows(given, self.args, self._rows_of)

    def _rows_of(self, rows: Rows, split: str) -> PublishedRows:
        given = self.turns.rows(rows, self.args)
        return prompt_loading.read_rows(given, split, self.args, self.rewards)

    def _load_prompts(
        self, training: PublishedRows | None, evaluation: Mapping[str, PublishedRows]
    ) -> None:
        self._notes: list[str] = remarks(self.args)
        self._source: Prompts | None = None
        if trains := training is not None:
            source = self._prompts(training)
            arranged = prompt_loading.arrange(source, self.args)
            check_pilot(self.args, self.rewards, self.turns)
            self._source = with_prompt_sampling(arranged, self.args, self.batches)
            stream = isinstance(self._source, IterablePromptDataset)
            if stream:
                self.args = trl_attributes.with_stream(self.args)
            where = "the stream's first rows" if stream else "training"
            self._notes += prompt_loading.length_notes(self._source, where)
        self._eval_prompts = self._prompts_of_sets(evaluation)
        if not trains and not self._eval_prompts:
            raise ValueError(
                "there is no dataset: `train_dataset` is required, or an eval_dataset to evaluate "
                "on (train_dataset, dataset)"
            )
        self._notes += check_evaluation(self, self._eval_prompts, trains=trains)
        self._notes += unused_intervals(self.args) if trains else []

    def _set_up(self, given: Given, callbacks: Sequence[TrainerCallback]) -> None:
        self.state = build.make_state(self._source, self.args, self.batches)
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.control = transformers.TrainerControl()
        num_steps = max(self.state.max_steps, 1)
        optimizers = trl_overrides.own_optimizers(self, given, num_steps, _OWN)
        self.policy = Policy(
            self.model,
            self.processing_class,
            self.args,
            world=self.world,
            num_training_steps=num_steps,
            optimizers=optimizers,
        )
        check_terms(self.policy)
        stepper = self.policy.stepper
        self.optimizer, self.lr_scheduler = stepper.optimizer, stepper.scheduler
        # None without `beta`, and with an adapter: the adapter's base model is then the reference.
        self.ref_model = self.policy.reference.model
        if self.policy.device.type == "cpu":
            keep_freed_memory()
        engine = build.make_engine(self.policy, self.args, self)
        self.engine = self.turns.wrap_engine(engine, self.policy, self)
        self.policy.notes += self._notes
        self.events = Events(
            callbacks, self.args, policy=self.policy, state=self.state, control=self.control
        )
        lambdas = trl_overrides.schedule_of(self, given, _OWN)
        self._schedule = restart.InitialLearningRates(self.lr_scheduler, lambdas)
        self._folder = Path(self.args.output_dir).absolute()  # a reward may change the cwd
        self._make_monitor()
        self.callback_handler = self.events.handler
        self.evaluator = Evaluator(self.policy, self.engine, self.rewards, self.state, self.judging)
        self.hub = HubUploader(self.args)
        called, data = self.turns.user_functions(self.rewards), None
        if self._source:
            data = self._source.state_dict()
        check_ranks_agree(self.world, self.args, self.policy, called, data)

    def _make_monitor(self) -> None:
        silent = not self.world.is_main
        steps = self.state.max_steps
        self.monitor = Monitor(self.args, self._folder, max_steps=steps, silent=silent)
        self.monitor.attach(self.events, lambda logs: self.log(logs))

    def _begin_again(self, resume: str | bool | None) -> str | bool | None:
        """In a repeated `train`, count from step 0 again, in new files. As with Trainer, weights,
        optimizer moments and the position in the data are kept. An unfinished run resumes from its
        checkpoint. Returns the value for `resume_from_checkpoint`."""
        resume = resume or self.args.resume_from_checkpoint
        before, longer = self._session, self.args.with_asked()
        finished = before is not None and before.status == "finished"
        if longer is not None:
            restart.lengthen(self, longer, build.make_state(self._source, longer, self.batches))
        elif before is None or (resume == AUTO and finished):
            return resume
        if before is not None and not resume and not finished:
            newest = self.world.is_main and find_checkpoint(self._folder)[0] is not None
            resume = self.world.broadcast_object(bool(newest))
        restart.forget(
            self.state, self.control, build.make_state(self._source, self.args, self.batches)
        )
        self._schedule.restart()
        self._make_monitor()
        return resume

    def _prompts(self, rows: PublishedRows, *, evaluation: bool = False) -> Prompts:
        source = prompt_loading.make_source(
            rows,
            tokenizer=self.processing_class,
            rewards=self.rewards,
            args=self.turns.shown(self.args),
            limit=prompt_loading.prompt_limit(self.model, self.args, evaluation=evaluation),
        )
        return self.turns.checked(source)

    def _prompts_of_sets(self, rows: Mapping[str, PublishedRows]) -> dict[str, list[Prompt]]:
        make = partial(self._prompts, evaluation=True)
        sets, notes = prompt_loading.prompts_of_sets(rows, self.args, make)
        self._notes += notes
        for prompts in sets.values():
            self.judging.check(prompts)
        return sets

    def make_parts(self) -> tuple[TrainerComponents, TrainState]:
        """The components and the state for `rloo.algorithm.train.train_on_rollout`, at step 0."""
        source, args, batches, engine = self._source, self.args, self.batches, self.engine
        if source is None:
            raise ValueError("`train_dataset` is required to train (train_dataset, dataset)")
        world, policy, events, clock = self.world, self.policy, self.events, PhaseTimer()
        connect_probe(source, policy, clock)
        tokenizer, workload = policy.tokenizer, workload_of(source, args, batches)
        sampling = build.make_sampling(args, policy.stop_token_ids, tokenizer)
        policy.notes += build.bias_of(sampling)
        rollouts = make_rollouts(
            args, world, batches, engine, source, self.rewards, sampling, tokenizer, self.state,
            clock,
        )  # fmt: skip
        stop = StopSignals(usr1_saves=args.on_sigusr1 == "save")
        policy.stepper.after_backward = partial(after_backward, world, batches, stop)
        parts = TrainerComponents(
            args, world, batches, workload, policy, engine, rollouts, self.monitor, events, clock,
            stop, with_oom_retry(advantages_stage),
            with_oom_retry(update_stage, recompute_advantages),
        )  # fmt: skip
        state = TrainState(self.state, self.control, KLController(args.beta), rollouts.state_dict())
        return parts, state


# Copies: a later assignment to the class cannot change which methods count as overridden.
_SHOWN = dict(vars(trl_attributes.TRLTrainerAttributes))
_OWN = {n: v for n, v in _SHOWN.items() if n not in trl_attributes.LOADERS} | dict(
    vars(RLOOTrainer)
)
