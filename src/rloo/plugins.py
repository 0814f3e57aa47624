"""Registry of add-ons by name. The table below has the add-ons of this package, and entry points
add those of other packages (docs/plugins.md). Modules are imported on first use."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

_TEXT_REWARDS = "rloo.addons.graders.text_rewards"
_REPORT = "rloo.addons.report"
# Group -> name -> module:attribute.
BUILT_IN: dict[str, dict[str, str]] = {
    "commands": {
        "plan": "rloo.addons.planner.plan_command:plan",
        "chat": "rloo.tools.chat_command:chat",
        "env": "rloo.tools.env_command:env",
        "report": f"{_REPORT}.html.report_command:report",
        "doctor": f"{_REPORT}.doctor.command_line:doctor",
        "launch": "rloo.addons.launch.launch_command:launch",
        "status": "rloo.addons.launch.launch_command:status",
        "vllm-serve": "rloo.engines.vllm.serve_command:serve",
        "stop": "rloo.addons.launch.launch_command:stop",
    },
    "rewards": {
        "gsm8k": "rloo.addons.graders.math.gsm8k:gsm8k_reward",
        "gsm8k_format": "rloo.addons.graders.math.gsm8k:gsm8k_format_reward",
        "tag_count": f"{_TEXT_REWARDS}:tag_count_reward",
        "countdown": "rloo.data.tasks.countdown:countdown_reward",
        "code": "rloo.addons.graders.code.code_reward:make_code",
        "exact_match": f"{_TEXT_REWARDS}:make_exact_match",
        "format": f"{_TEXT_REWARDS}:make_format",
        "gym": "rloo.addons.integrations.reasoning_gym.gym_reward:make_gym",
        "length": f"{_TEXT_REWARDS}:make_length",
        "math": "rloo.addons.graders.math.math_reward:make_math",
        "repetition": f"{_TEXT_REWARDS}:make_repetition",
        "soft_overlong": f"{_TEXT_REWARDS}:make_soft_overlong",
    },
    "engines": {
        "auto": "rloo.engines.specs:AUTO",
        "native": "rloo.engines.specs:NATIVE",
        "hf": "rloo.engines.specs:HF",
        "vllm": "rloo.engines.vllm.spec:VLLM",
        "vllm_server": "rloo.engines.vllm.spec:VLLM_SERVER",
    },
    "datasets": {"gym": "rloo.addons.integrations.reasoning_gym.gym_spec:GYM"},
    "observers": {
        "doctor": f"{_REPORT}.doctor.doctor_observer:DoctorObserver",
        "page": f"{_REPORT}.html.report_observer:PageObserver",
    },
    "estimators": {
        **{
            name: f"rloo.algorithm.estimators:{name}"
            for name in ("composed", "rloo", "grpo", "reinforce_pp")
        },
        "length_weighted": "rloo.algorithm.group_baselines:length_weighted",
        "shrinkage": "rloo.algorithm.group_baselines:shrinkage",
        "regression": "rloo.algorithm.regression:regression",
        "optimal_token": "rloo.algorithm.token_baselines:optimal_token",
    },
    # Parts of the core that an add-on implements; other packages cannot register these.
    "parts": {
        "live_display": f"{_REPORT}.live.screen:Screen",
        "openenv": "rloo.addons.integrations.openenv:kind_of",
        "openenv_environment": "rloo.addons.integrations.openenv:OpenEnvironment",
        "start_ranks": "rloo.addons.launch.local_ranks:launch",
        "config --from": "rloo.addons.importers.import_command:import_command",
        "from_verifiers": "rloo.addons.integrations.verifiers:from_verifiers",
    },
}
_ADDONS = "rloo.addons"
# Group -> name -> object, registered by a script at run time.
REGISTERED: dict[str, dict[str, Any]] = {group: {} for group in BUILT_IN}


class MissingAddon(ValueError):
    """Raised if a name belongs to an add-on that is not installed."""


def names(group: str) -> list[str]:
    """Return the names in a group: first those of this package, then those of other packages."""
    return list(dict.fromkeys([*BUILT_IN[group], *REGISTERED[group], *_given(group)]))


def load(group: str, name: str) -> Any:
    """Return the object that is registered under `name` in a group. Raises KeyError for an unknown
    name, and MissingAddon if the add-on is not installed. Raises ValueError if two other packages
    register the name, or if its entry point cannot be loaded."""
    if name in BUILT_IN[group]:
        module, _, attribute = BUILT_IN[group][name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if f"{error.name}.".startswith(f"{_ADDONS}."):
                addon = ".".join(module.split(".")[:3])
                raise MissingAddon(f"{name} needs {addon}, which is not installed") from error
            raise
    if name in REGISTERED[group]:
        return REGISTERED[group][name]
    entries = _given(group)[name]
    if len(entries) > 1:
        raise ValueError(
            f"{name} is given by {' and by '.join(map(origin, entries))}; only one of them can be "
            f"installed (entry points rloo.{group})"
        )
    try:
        return entries[0].load()
    except Exception as error:  # another package's module may raise anything
        raise ValueError(
            f"the entry point {name} = {entries[0].value} of {origin(entries[0])} cannot be "
            f"loaded: {type(error).__name__}: {error} (rloo.{group})"
        ) from error


def find(group: str, name: str) -> Any:
    """Return the object as `load` does, or None if the add-on is not installed."""
    try:
        return load(group, name)
    except MissingAddon:
        return None


def of_others(group: str) -> dict[str, str]:
    """Return the names that other packages register in a group, each with its package."""
    return dict.fromkeys(REGISTERED[group], "this program") | {
        name: " and ".join(map(origin, entries))
        for name, entries in _given(group).items()
        if name not in BUILT_IN[group]
    }


def origin(entry: EntryPoint) -> str:
    """Return the name of the package to which an entry point belongs."""
    return entry.dist.name if entry.dist is not None else entry.value


def forget() -> None:
    """Clear the cache of entry points. Call this after packages were installed."""
    _given.cache_clear()


@cache
def _given(group: str) -> MappingProxyType[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in () if group == "parts" else entry_points(group=f"rloo.{group}"):
        found.setdefault(entry.name, []).append(entry)
    return MappingProxyType(found)
