"""Multi-turn rollouts in a run: the tools and environments of the options, and their engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from datasets import Dataset, IterableDataset

from rloo.config.batch_sizes import BatchSizes
from rloo.config.compat.generation_kwargs import stop_tokens
from rloo.config.config import RLOOConfig
from rloo.config.file_checks import context_of
from rloo.config.tool_options import refuse_in_vain
from rloo.config.user_functions import load_function
from rloo.data.iterable_dataset import Prompts
from rloo.data.prompt_dataset import PromptDataset
from rloo.distributed.sharded_tensor import is_sharded
from rloo.model.model_loading import num_embedded
from rloo.model.policy import Policy
from rloo.rewards import RewardSet
from rloo.types import Engine

if TYPE_CHECKING:  # a run without tools does not load them
    from rloo.engines.async_engine import AsyncEngine
    from rloo.episodes.environments import EnvironmentPool
    from rloo.episodes.tools import ToolSet

# The prompt of a row without a prompt; the environment adds the text.
_NOTHING = [{"role": "user", "content": ""}]
Factory = Callable[[], Any]
RolloutFunc = Callable[[list[Any], Any], Mapping[str, Any]]
# A factory, its spec, or a mapping from names in the column `environment` to either.
Factories = Factory | str | Mapping[str, Factory | str] | None


@dataclass(frozen=True, slots=True)
class MultiTurnSetup:
    """The tools, environments or rollout function of a run. The keys of `tools` are names of
    environments. If one environment serves all rows, or if there is no environment, the only key is
    None. If the setup is empty, completions are single turns, and no method has an effect."""

    tools: Mapping[str | None, ToolSet] = field(default_factory=dict)
    environments: EnvironmentPool | None = None
    rollout_func: RolloutFunc | None = None
    factories: Sequence[Factory] = ()

    def user_functions(self, rewards: RewardSet) -> list[Any]:
        """All functions of the user that a rollout calls."""
        own = [] if self.rollout_func is None else [self.rollout_func]
        return [*rewards.functions, *self.functions, *self.factories, *own]

    def dataset(self, rows: Any, args: RLOOConfig, batches: BatchSizes) -> Any:
        """Return `rows`. If there are no rows and a single environment supplies the prompts, return
        empty prompts for one rollout; `max_steps` then sets the run's length, as in TRL."""
        if (
            rows is not None
            or self.environments is None
            or None not in self.tools
            or args.max_steps <= 0
        ):
            return rows
        return Dataset.from_dict({"prompt": [_NOTHING] * batches.prompts_per_rollout})

    def rows(self, given: Any, args: RLOOConfig) -> Any:
        """Return the `given` rows. If there are environments and the rows have no column `prompt`,
        add a column of empty prompts. Rows that are given by name are returned unchanged."""
        if self.environments is None or args.prompt_template is not None:
            return given
        if isinstance(given, Mapping):
            return {name: self.rows(rows, args) for name, rows in given.items()}
        if "prompt" in (getattr(given, "column_names", None) or ()):
            return given
        if isinstance(given, Dataset):
            return given.add_column("prompt", [_NOTHING] * len(given))
        if isinstance(given, IterableDataset):  # its columns may be unknown
            return given.map(lambda row: {"prompt": _NOTHING, **row})
        return given

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The tools that are functions."""
        return [*next(iter(self.tools.values())).functions.values()] if self.tools else []

    def shown(self, args: RLOOConfig, name: str | None = None) -> RLOOConfig:
        """`args` with the schemas of the tools of environment `name`. The chat template shows the
        schemas to the model."""
        if name not in self.tools:  # tools depend on the row: the episode renders the prompt again
            return args
        given = args.chat_template_kwargs or {}
        return args.with_values(chat_template_kwargs={**given, "tools": self.tools[name].schemas})

    def checked(self, source: Prompts) -> Prompts:
        """Check the prompts `source`, and return them. Raises ValueError for rows without an
        environment, and if an episode cannot begin with the first prompt."""
        if self.tools and isinstance(source, PromptDataset):
            from rloo.episodes.multi_turn_engine import check_prompts

            check_prompts(first := source.all_prompts(1))
            if self.environments is not None:
                self.environments.check(first)
                if "environment" in source.columns:
                    self.environments.check_names(source.values("environment"))
        return source

    def with_rewards(self, given: Any, args: RLOOConfig) -> tuple[Any, RLOOConfig]:
        """The `given` rewards, by default those of `args`, followed by the environments' rewards
        with weight 1; and `args` with all weights."""
        if self.environments is None or not (own := self.environments.rewards()):
            return given, args
        specs = args.reward if given is None else given
        specs = list(specs) if isinstance(specs, (list, tuple)) else [specs]
        if args.reward_weights is not None:
            args = args.with_values(reward_weights=[*args.reward_weights, *[1.0] * len(own)])
        return [*specs, *own], args

    def with_environment_rewards(self, rewards: RewardSet) -> RewardSet:
        """Set the parameters that reward functions may have in addition to the dataset's columns
        (`rewards.offered`). Return `rewards`."""
        if self.environments is not None:
            rewards.offered = ("environments",)
        if self.rollout_func is not None:  # a rollout_func may return any column
            rewards.offered = rewards.required
        return rewards

    def wrap_engine(self, engine: Engine, policy: Policy, trainer: Any) -> Engine:
        """Wrap `engine` in an engine whose completions are episodes. Without tools and without a
        rollout function, return `engine`. Raises ValueError for an unsuitable chat template, and
        for combinations that do not work with several processes."""
        if self.rollout_func is not None or self.tools:
            self._check_processes(engine, trainer)
        if self.rollout_func is not None:
            policy.notes.append(f"{_named(self.rollout_func)} makes the rollouts (rollout_func)")
            return _calling(self.rollout_func, engine, policy, trainer)
        if not self.tools:
            return engine
        from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
        from rloo.episodes.renderer_check import find_renderer

        if policy.processing_class is not policy.tokenizer:
            raise ValueError(
                "the model reads images by a processor, with which tools are not called in this "
                "version (processing_class, tools)"
            )
        args = policy.config
        ends = stop_tokens(args.generation_kwargs, policy.stop_token_ids)
        casts = {}
        for name, tools in self.tools.items():
            options = self.shown(args, name).chat_template_kwargs or {}
            casts[name] = EpisodeSetup(tools, find_renderer(policy.tokenizer, ends, options))
            where = "" if name is None else f" in {name}"
            policy.notes.append(f"the model may call {', '.join(tools.names)}{where} (tools)")
        limits = EpisodeLimits(
            args.max_tool_calling_iterations,
            args.tool_options.timeout,
            args.max_prompt_length,
            context_of(policy.model.config.get_text_config()),
        )
        if args.samples_beside:
            from rloo.episodes.async_multi_turn import AsyncMultiTurnEngine

            return AsyncMultiTurnEngine(
                cast("AsyncEngine", engine), casts, limits, self.environments
            )
        return MultiTurnEngine(engine, casts, limits, self.environments)

    def _check_processes(self, engine: Engine, trainer: Any) -> None:
        """Raise ValueError for combinations that do not work with several processes."""
        world, judging = trainer.world, trainer.judging.rewards
        divided = any(map(is_sharded, trainer.policy.parameters))
        if world.size > 1 and divided and not engine.capabilities.copies_weights:
            raise ValueError(
                f"the engine {engine.capabilities.name} gathers divided weights anew for each "
                "turn, for which all processes must come together, and their episodes do not have "
                "the same number of turns; the native engine of a model with a fused decoder has a "
                "copy (rollout_engine, engine_kwargs.copy_weights, parallel)"
            )
        there = (
            [trainer.rewards]
            if self.rollout_func is not None or self.environments is not None
            else []
        )
        if self.rollout_func is not None and judging is not None:
            there.append(judging)
        for rewards in there:
            if world.size > 1 and not rewards.shared:
                what = (
                    "rollout_func returns" if self.rollout_func is not None else "environments have"
                )
                raise ValueError(
                    f"one of the rewards {', '.join(rewards.names)} keeps a state (state_dict), so "
                    "that it is called for all completions in the main process, where what "
                    f"{what} in another process is not known (reward_funcs, num_processes)"
                )


def multi_turn_setup(
    given: Sequence[Callable[..., Any] | str] | None,
    factories: Factories,
    own: RolloutFunc | None,
    args: RLOOConfig,
) -> MultiTurnSetup:
    """The setup of the `given` tools (default: `args.tools`) and environment `factories` (default:
    `args.environment_factory`), or of the rollout function `own`. Raises ValueError for invalid
    tools, and for options that cannot be combined with tools."""
    specs = args.tools if given is None else given
    factories = args.environment_factory if factories is None else factories
    if own is not None and (specs or factories is not None):
        raise ValueError(
            "rollout_func makes the rollouts, so that nothing else would call tools; give either "
            "(rollout_func, tools, environment_factory)"
        )
    if not specs and factories is None:
        refuse_in_vain(args)
        if own is None:
            return MultiTurnSetup()
    if own is not None:
        return MultiTurnSetup(rollout_func=own)
    if "tools" in (args.chat_template_kwargs or {}):
        raise ValueError(
            "chat_template_kwargs has tools, which are told of by themselves; leave them out there "
            "(tools, chat_template_kwargs)"
        )
    from rloo.episodes.environments import EnvironmentPool, environment_tools
    from rloo.episodes.tools import ToolSet

    functions = [load_function(s, "tool") if isinstance(s, str) else s for s in specs]
    characters = args.tool_options.max_response_length
    if factories is None:
        return MultiTurnSetup({None: ToolSet(functions, characters=characters)})
    by_name = dict(factories) if isinstance(factories, Mapping) else {None: factories}
    made = {name: _factory(factory) for name, factory in by_name.items()}
    stage = EnvironmentPool(made)
    return MultiTurnSetup(
        {
            name: ToolSet(functions, characters=characters, example=e, methods=environment_tools(e))
            for name, e in stage.examples.items()
        },
        stage,
        factories=[*made.values()],
    )


def _calling(function: RolloutFunc, engine: Engine, policy: Policy, trainer: Any) -> Engine:
    """An engine that calls `function`, which samples with `engine`."""
    owner, vocabulary = weakref.ref(trainer), num_embedded(policy.model)
    if policy.config.samples_beside:
        from rloo.episodes.async_rollout_func import AsyncRolloutFuncEngine

        return AsyncRolloutFuncEngine(cast("AsyncEngine", engine), function, owner, vocabulary)
    from rloo.episodes.rollout_func import RolloutFuncEngine

    return RolloutFuncEngine(engine, function, owner, vocabulary)


def _named(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _factory(given: Factory | str) -> Factory:
    return load_function(given, "environment") if isinstance(given, str) else given
