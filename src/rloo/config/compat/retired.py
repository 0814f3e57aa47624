"""Retired options. For one release, the old form is accepted with a warning that shows the new
form.

Most retired options are now an entry of a mapping (`engine_kwargs.restarts`) or a value in a list
(`offload: [params]`). Names of such entries in other systems are accepted without a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from rloo.config.estimator_config import EstimatorConfig
from rloo.config.fields import ConfigErrors, coerce, default_of
from rloo.config.kwargs_options import KWARGS, flattened, keys_of, without_defaults

# old name -> option.key
_KEYS = {
    "rollout_copy": "engine_kwargs.copy_weights",
    "vllm_devices": "engine_kwargs.devices",
    "vllm_executable": "engine_kwargs.executable",
    "vllm_merge_adapter": "engine_kwargs.merge_adapter",
    "vllm_request_timeout": "engine_kwargs.request_timeout",
    "vllm_restarts": "engine_kwargs.restarts",
    "vllm_serve_args": "engine_kwargs.serve_args",
    "vllm_tolerance": "engine_kwargs.tolerance",
    "vllm_weight_transfer": "engine_kwargs.weight_transfer",
    "vllm_weights_dir": "engine_kwargs.weights_dir",
    "gym_config": "dataset_kwargs.config",
    "gym_curriculum": "dataset_kwargs.curriculum",
    "gym_levels": "dataset_kwargs.levels",
    "gym_seed": "dataset_kwargs.seed",
    "gym_size": "dataset_kwargs.size",
    "kl_clip": "kl_kwargs.clip",
    "kl_horizon": "kl_kwargs.horizon",
    "kl_target": "kl_kwargs.target",
    "advantage_clip_range": "estimator_kwargs.advantage_clip_range",
    "running_decay": "estimator_kwargs.running_decay",
    "eval_max_completion_length": "eval_kwargs.max_completion_length",
    "eval_pass_k": "eval_kwargs.pass_k",
    "eval_temperature": "eval_kwargs.temperature",
    "eval_top_k": "eval_kwargs.top_k",
    "eval_top_p": "eval_kwargs.top_p",
    "pass_threshold": "eval_kwargs.pass_threshold",
    "ess_guard": "async_kwargs.ess_guard",
    "partial_rollouts": "async_kwargs.partial_rollouts",
    "remote_workers": "async_kwargs.remote_workers",
    "reward_workers": "async_kwargs.reward_workers",
    "cpu_kernels": "cpu_kwargs.kernels",
    "onednn": "cpu_kwargs.onednn",
    "episode_timeout": "tool_kwargs.timeout",
    "max_tool_response_length": "tool_kwargs.max_response_length",
}
# old bool -> the value in the list `offload`
_WORDS = {
    "offload_optimizer": "optimizer",
    "offload_params": "params",
    "offload_reference": "reference",
}
# old name -> (its type, its default, the reason why it has no replacement)
_GONE: dict[str, tuple[Any, Any, str]] = {
    "gather_limit": (int, 2**28, "every process has every completion"),
}
# other system -> {name in that system: option.key}
ELSEWHERE: dict[str, dict[str, str]] = {
    "accelerate": {
        "dp_shard_size": "parallel_kwargs.dp_shard_size",
        "sp_size": "parallel_kwargs.sp_size",
        "tp_size": "parallel_kwargs.tp_size",
        "state_dict_type": "parallel_kwargs.state_dict_type",
    },
    "verl": {
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "parallel_kwargs.sp_size",
        "algorithm.kl_ctrl.target_kl": "kl_kwargs.target",
        "algorithm.kl_ctrl.horizon": "kl_kwargs.horizon",
    },
    "OpenRLHF": {
        "algo.kl.target": "kl_kwargs.target", "algo.kl.horizon": "kl_kwargs.horizon",
    },
    "ms-swift": {
        "offload_optimizer": "offload", "sequence_parallel_size": "parallel_kwargs.sp_size",
        "max_resample_times": "prompt_sampling_kwargs.max_resample_times",
    },
}  # fmt: skip
_THEIRS = {name: place for names in ELSEWHERE.values() for name, place in names.items()}


@dataclass(frozen=True)
class RetiredOption:
    """A retired option. Its replacement is `key` of the mapping `option`, or the value `key` in the
    list `offload`. If `option` is empty, there is no replacement. `kind` and `default` are the type
    and the default of the old option."""

    option: str
    key: str
    kind: Any
    default: Any

    def written(self, value: Any) -> str:
        """The text that sets `value` in the new form."""
        if self.option == "offload":
            return f"offload: [{self.key}]" if value else "offload without it"
        return f"{self.option}: {{{self.key}: {json.dumps(value)}}}"


@cache
def _retired() -> dict[str, RetiredOption]:
    found = {name: RetiredOption("offload", word, bool, False) for name, word in _WORDS.items()} | {
        name: RetiredOption("", "", kind, default) for name, (kind, default, _) in _GONE.items()
    }
    for name, place in (_KEYS | _THEIRS).items():
        option, dot, key = place.partition(".")
        if dot:
            about = KWARGS.get(option, EstimatorConfig)
            default = next(default_of(part) for part in fields(about) if part.name == key)
            found[name] = RetiredOption(option, key, get_type_hints(about)[key], default)
    return found


# All names that are converted: old names, and names of entries in other systems.
NAMES: tuple[str, ...] = (*_KEYS, *_WORDS, *_GONE, *(set(_THEIRS) - set(_WORDS)))
# Names that are accepted for one release.
RETIRED: tuple[str, ...] = tuple(n for n in (*_KEYS, *_WORDS, *_GONE) if n not in _THEIRS)


def kind_of(name: str) -> Any:
    """The type of an old option."""
    return _retired()[name].kind


def place_of(name: str) -> str:
    """The replacement of an old name: `option.key`, `offload` or an empty string."""
    return (_KEYS | dict.fromkeys(_WORDS, "offload") | _THEIRS).get(name, "")


def place_of_entry(name: str) -> str:
    """The new name of an entry of an old mapping (`gym_config.gcd.max_value`). Other names are
    returned unchanged."""
    old, dot, entry = name.partition(".")
    return f"{_KEYS[old]}.{entry}" if dot and old in _KEYS else name


def explain(name: str) -> str:
    """A sentence with the new form of an old name."""
    if name in _GONE:
        return f"{name} is retired; leave it out: {_GONE[name][2]}."
    old = _retired()[name]
    if name in _THEIRS:
        return f"{name} is {old.option}.{old.key} here."
    form = f"offload: [{old.key}]" if name in _WORDS else f"{old.option}: {{{old.key}: VALUE}}"
    return f"{name} is retired; write {form}."


def current_form(
    options: Mapping[str, Any],
    where: Mapping[str, str] | None = None,
    *,
    warn: bool = True,
) -> tuple[dict[str, Any], list[str]]:
    """`options` with old names converted to their new form, and the faults: values of another type,
    and values that contradict the new form. A fault names both forms."""
    names = [name for name in options if name in _retired()]
    if not names:
        return dict(options), []
    now = {name: value for name, value in options.items() if name not in names}
    notes: list[str] = []
    faults: list[str] = []
    for name in names:
        old = _retired()[name]
        try:
            value = coerce(name, old.kind, options[name])
            if warn and value != old.default and name not in _THEIRS:
                notes.append(_note(name, value))
            _PLACERS.get(old.option, _as_key)(name, old, value, options, now)
        except ValueError as error:
            faults.append(f"{(where or {}).get(name, '')}{error}")
    if notes:
        warnings.warn("; ".join(notes), FutureWarning, stacklevel=4)
    return now, faults


def _note(name: str, value: Any) -> str:
    if name in _GONE:
        return f"{name} is retired; leave it out: {_GONE[name][2]}"
    return f"{name} is retired; write {_retired()[name].written(value)}"


def _nowhere(*_: Any) -> None:
    pass


def _as_word(
    name: str, old: RetiredOption, on: bool, given: Mapping[str, Any], now: dict[str, Any]
) -> None:
    if given.get("offload") is not None:
        if on != (old.key in given["offload"]):
            raise ValueError(
                f"{name} is {on} and offload is {given['offload']}; both say where "
                f"{old.key} lies, so give only offload"
            )
    elif on:
        now["offload"] = sorted({*(now.get("offload") or []), old.key})
    else:
        now.setdefault("offload", [])


def _as_key(
    name: str, old: RetiredOption, value: Any, given: Mapping[str, Any], now: dict[str, Any]
) -> None:
    entries = now.get(old.option)
    if entries is None or not isinstance(entries, Mapping):
        entries = {}
    if isinstance(value, tuple):
        value = list(value)
    if old.option == "estimator_kwargs" and value == old.default and not given.get("preset"):
        return
    if old.key in entries and coerce(name, old.kind, entries[old.key]) != coerce(
        name, old.kind, value
    ):
        raise ValueError(
            f"{name} is {value!r} and {old.option}.{old.key} is {entries[old.key]!r}; both set "
            f"{old.option}.{old.key}, so give only that"
        )
    now[old.option] = {**entries, old.key: value}


_PLACERS: dict[str, Callable[..., None]] = {"offload": _as_word, "": _nowhere}


def over_file(
    line: Mapping[str, Any], file: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options `line` of a command line, with entries added from the options of a `file`: an old
    name on the command line sets only one entry of a mapping or list, and the file's other entries
    are kept. `given` are the options of the command line under the names that the user wrote."""
    merged = dict(line)
    for name in given:
        old = _retired().get(name)
        if old is None or old.option in given or old.option not in line or old.option not in file:
            continue
        if old.option == "offload":
            others = {*file["offload"]} - {_WORDS[n] for n in given if n in _WORDS}
            merged["offload"] = sorted(others | {*line["offload"]})
        else:
            merged[old.option] = {**(file[old.option] or {}), **(line[old.option] or {})}
    return merged


def value_of(config: Any, name: str) -> Any:
    """The value of a retired option, for scripts that read it."""
    old = _retired()[name]
    if not old.option:
        return old.default
    if old.option == "offload":
        return old.key in config.offload
    return (getattr(config, old.option) or {}).get(old.key, old.default)


def assigned(config: Any, name: str, value: Any) -> tuple[str, Any]:
    """The current option and its complete new value, if a script assigns `value` to the old name
    `name`."""
    now, faults = current_form({name: value})
    if faults:
        raise ConfigErrors(faults)
    old = _retired()[name]
    if not old.option:
        return "", None
    if old.option == "offload":
        others = {*config.offload} - {old.key}
        return "offload", sorted(others | {*now["offload"]})
    return old.option, {**(getattr(config, old.option) or {}), **now.get(old.option, {})}


def resolved_form(options: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options of an earlier version (from a checkpoint) in the current form."""
    now = current_form(options, warn=False)[0]
    for option in KWARGS:
        if option in now:
            now[option] = without_defaults(option, now[option] or {}, {})
    return now


def options_of(names: Iterable[str]) -> frozenset[str]:
    """The current names of the options in `names`, which may include old names."""
    return frozenset(place_of(name).partition(".")[0] or name for name in names) - {*_GONE}


def by_entry(options: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options, with each entry of a mapping and each value in `offload` as a separate
    option."""
    flat = {name: value for name, value in options.items() if name not in (*KWARGS, "offload")}
    for name in (*_KEYS, *_WORDS, *_THEIRS):
        old = _retired()[name]
        if old.option in KWARGS:
            flat[f"{old.option}.{old.key}"] = old.default
        elif old.option == "offload":
            flat[f"offload.{old.key}"] = old.key in (options.get("offload") or [])
    for name, part in keys_of("prompt_sampling_kwargs").items():
        flat[f"prompt_sampling_kwargs.{name}"] = default_of(part)
    return flat | dict(flattened(options))
