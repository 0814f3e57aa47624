"""Reads the settings of another system. Each setting is converted ("taken"), or listed as one
without a counterpart, with the reason ("left")."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rloo.addons.importers.known_keys import Known, is_known, may_be_group_size, unknown
from rloo.addons.importers.shell_expansion import is_resolved
from rloo.config.compat.aliases import our_name
from rloo.config.compat.parser_fields import option_types
from rloo.config.fields import coerce, not_null
from rloo.config.kwargs_options import KWARGS, key_types
from rloo.config.yaml_io import read_value

# Reasons shared by several systems.
ENGINES = "completions are sampled by our own engines (rollout_engine)"
IN_MEMORY = "micro-batches follow from memory (max_tokens_per_micro_batch)"
PROCESSES = "num_processes or a launcher says how many, and parallel whether they divide weights"
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_UNKNOWN = object()
CUT = "the shell leaves it out: a comment or a missing backslash ends the command before it"
NOT_IN_FILE = "what it refers to is not in the file"
_LOGGERS = ("wandb", "tensorboard", "swanlab", "trackio", "mlflow")
_RESOLVERS: dict[str, Callable[..., float]] = {
    "mul": operator.mul, "add": operator.add, "div": operator.truediv, "max": max,
}  # fmt: skip


class Unmapped(NamedTuple):
    """A setting without a counterpart in rloo."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class ImportResult:
    """The result of an import: `options` by our names, `taken` (the converted keys of the source),
    `left` (settings without a counterpart), and `notes` for the user."""

    options: dict[str, Any]
    taken: list[str]
    left: list[Unmapped]
    notes: list[str] = field(default_factory=list)


class SettingsReader:
    """Another system's settings by dotted names. Records which settings were read."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        """For `take_same`, `names` maps keys to our options if the keys are no aliases of our
        options."""
        self.values: dict[str, Any] = dict(values)
        self.original: dict[str, Any] = dict(values)
        self._names = names or {}
        self.taken: list[str] = []
        self.left: list[Unmapped] = []
        self.notes: list[str] = []
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether `key` is given and not null."""
        return self.values.get(key) is not None

    def take(self, key: str, kind: Any = None, default: Any = None) -> Any:
        """The value of `key`, or `default`, converted to the annotation `kind` (None: no
        conversion). Raises ValueError for a value that cannot be converted."""
        self._read.add(key)
        if key not in self.values:
            return default
        value = self.values.pop(key)
        if not _is_known(value):
            self.left.append(Unmapped(key, value, NOT_IN_FILE))
            return default
        self.taken.append(key)
        if value is None or kind is None:
            return default if value is None else value
        return coerce(key, kind, value)

    def take_count(self, key: str, default: int) -> int:
        """The value of `key` as an integer of at least 1. Raises ValueError for a smaller one."""
        count = int(self.take(key, int, default))
        if count < 1:
            raise ValueError(f"{key} is {count}; it must be at least 1")
        return count

    def expect(self, key: str, same: Any, reason: str) -> None:
        """Take `key` if its value is `same`, the value without effect. Otherwise leave `key` with
        `reason`."""
        self._read.add(key)
        if key not in self.values:
            return
        kind = None if same is None else type(same)
        try:
            equal = coerce(key, kind, self.values[key]) == same if kind else not self.has(key)
        except ValueError:
            equal = False
        if equal:
            self.take(key)
        else:
            self.leave(key, reason)

    def take_same(self, same: Mapping[str, Any]) -> dict[str, Any]:
        """Our options for keys of equal meaning. `same` maps these keys to the system's
        defaults."""
        options: dict[str, Any] = {}
        for key, default in same.items():
            ours = self._names.get(key) or our_name(key)
            value = self.take(key, not_null(_kind_of(ours)), default)
            if value is not None:  # if it is None, another key may set the option
                options[ours] = value
        return options

    def expect_all(self, only: Mapping[str, tuple[Any, str]]) -> None:
        """Call `expect` for each entry of `only`: key -> (the value without effect, the reason)."""
        for key, (harmless, reason) in only.items():
            self.expect(key, harmless, reason)

    def leave(self, key: str, reason: str) -> None:
        """List `key`, if it is set, as a setting without a counterpart."""
        if key in self.values:
            self.left.append(Unmapped(key, self.values.pop(key), reason))

    def give_back(self, key: str, value: Any, reason: str) -> None:
        """List the taken `key` as a setting without a counterpart."""
        if key in self.taken:
            self.taken.remove(key)
            self.left.append(Unmapped(key, value, reason))

    def leave_unread(self, unread: Mapping[str, Mapping[str, Any]]) -> None:
        """Add words of the source that are no settings to the settings without a counterpart.
        `unread` maps the reason to the words."""
        for reason, words in unread.items():
            for key, value in words.items():
                why = reason if _is_known(key) else NOT_IN_FILE
                self.left.append(Unmapped(key, value, why))

    def finish(
        self,
        options: dict[str, Any],
        reasons: Mapping[str, tuple[str, ...]],
        known: Known | None = None,
    ) -> ImportResult:
        """The result of the import. Each remaining key is left with the first of `reasons` (reason
        -> key prefixes) that has a matching prefix. A key that belongs to a section in `known`, but
        is not listed there, is left as unknown."""
        for key in list(self.values):
            if not is_resolved(key):
                self.leave(key, NOT_IN_FILE)
                continue
            why = next((w for w, starts in reasons.items() if f"{key}.".startswith(starts)), "")
            if not why or not is_known(key, known or {}):
                why = unknown(key, self._read)
                if may_be_group_size(key):
                    why += "; is it a fork's group size (num_generations)?"
                    self.notes.append(
                        f"{key} {self.values[key]} is no key that is known; if it is how many "
                        f"completions a prompt has, set num_generations, here "
                        f"{options.get('num_generations')}"
                    )
                elif "did you mean" in why:
                    self.notes.append(f"{key} is no key that is known{why.partition('known')[2]}")
            self.leave(key, why)
        if unsaid := [left.key for left in self.left if left.reason == NOT_IN_FILE]:
            told = ", ".join(unsaid[:6]) + (", ..." if len(unsaid) > 6 else "")
            self.notes.append(f"only a run would tell {told}: the value there is not taken over")
        return ImportResult(options, self.taken, self.left, self.notes)


def greedy(source: SettingsReader, key: str) -> None:
    """Add the note that every evaluation in rloo uses both sampling and greedy decoding."""
    source.notes.append(f"evaluation is sampled and greedy, both ({key} 0)")


def one_of(source: SettingsReader, key: str, ours: str, files: list[str]) -> str:
    """The only file of `files`. If there are several files, the result is their folder, provided
    that it has no other data files. Otherwise it is the first file, and a note is added."""
    folders = {os.path.dirname(file) for file in files}
    folder = folders.pop() if len(folders) == 1 else ""
    if len(files) == 1:
        return files[0]
    if folder and os.path.isdir(folder):
        there = {n for n in os.listdir(folder) if n.endswith((".parquet", ".jsonl", ".json"))}
        if there == {os.path.basename(file) for file in files}:
            return folder
    source.give_back(key, files, f"{ours} is one file or folder, here the first of them")
    source.notes.append(
        f"{key} names {len(files)} files, and {ours} is the first of them alone: put them into a "
        "folder of their own, and give that"
    )
    return files[0]


def _is_known(value: Any) -> bool:
    """Whether every part of a value is known without running the source."""
    if isinstance(value, list):
        return all(map(_is_known, value))
    if isinstance(value, dict):
        return all(map(_is_known, value.values()))
    return not isinstance(value, str) or is_resolved(value)


def read_batches(
    source: SettingsReader, prompts: int, completions_per_step: int, options: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """(options of the batch sizes, optimizer steps per rollout over all passes) for rollouts of
    `prompts` prompts and optimizer steps of `completions_per_step` completions."""
    size = options["num_generations"]
    for name, number in (("a prompt's", size), ("an optimizer step's", completions_per_step)):
        if number < 1:
            raise ValueError(f"{name} completions are {number}; there must be at least 1")
    parts, rest = divmod(prompts * size, completions_per_step)
    if rest or parts < 1:
        source.notes.append(
            f"{prompts} prompts of {size} completions cannot be parted into steps of "
            f"{completions_per_step}: each pass over a rollout is one optimizer step"
        )
        parts, completions_per_step = 1, prompts * size
    read: dict[str, Any] = {"steps_per_generation": parts} if parts > 1 else {}
    if completions_per_step % size == 0:
        read["num_prompts"] = completions_per_step // size
    else:
        read["per_device_train_batch_size"] = completions_per_step
    return read, parts * options["num_iterations"]


def steps_between(what: str, rollouts: int | None, each: int) -> dict[str, Any]:
    """Our options `..._strategy` and `..._steps` for the action `what`, which occurs once in
    `rollouts` rollouts. A rollout has `each` optimizer steps."""
    if rollouts is None or rollouts <= 0:
        return {f"{what}_strategy": "no"}
    return {f"{what}_strategy": "steps", f"{what}_steps": rollouts * each}


def read_loggers(source: SettingsReader, key: str, names: list[str]) -> list[str] | str:
    """The `names` that `report_to` supports. A note lists the other names."""
    known = [name for name in names if name in _LOGGERS]
    others = [name for name in names if name not in (*known, "console")]
    if others:
        source.notes.append(f"{key} {', '.join(others)} is no logger here (report_to)")
    return known or "none"


def follow_references(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with OmegaConf's references `${other.key}` and `${oc.select:key,default}` replaced
    if the key exists, and `${mul:a,b}`, `${add:a,b}`, `${div:a,b}` and `${max:a,b}` computed.
    Raises ValueError for circular references."""

    def resolve(value: Any, path: tuple[str, ...]) -> Any:
        while isinstance(value, str) and (found := _REFERENCE.search(value)):
            meant = look_up(found[1].strip(), path)
            if meant is _UNKNOWN:
                break
            if found[0] == value.strip():
                return meant
            value = value[: found.start()] + str(meant) + value[found.end() :]
        return value

    def look_up(name: str, path: tuple[str, ...]) -> Any:
        resolver, colon, rest = name.partition(":")
        parts = [part.strip() for part in rest.split(",")]
        if resolver == "oc.select":
            default = read_value(parts[1]) if len(parts) == 2 else _UNKNOWN
            found = look_up(parts[0], path)
            return default if found is _UNKNOWN else found
        if resolver in _RESOLVERS and len(parts) == 2:
            return _computed(_RESOLVERS[resolver], parts)
        key = f"{path[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name
        if colon or key not in values:
            return _UNKNOWN
        if key in path:
            raise ValueError(f"{' -> '.join((*path, key))}: these references go in a circle")
        return resolve(values[key], (*path, key))

    return {key: resolve(value, (key,)) for key, value in values.items()}


def _computed(function: Callable[..., float], parts: list[str]) -> Any:
    try:
        result = function(*(float(part) for part in parts))
    except (ValueError, ZeroDivisionError):
        return _UNKNOWN
    return int(result) if result == int(result) else result


def _kind_of(name: str) -> Any:
    """The type of an option, of a mapping's key (`kl_kwargs.clip`), or of a list's word
    (`offload.optimizer`)."""
    option, dot, key = name.partition(".")
    if not dot:
        return option_types()[name]
    return key_types(option)[key] if option in KWARGS else bool


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options`, with each `option.key` moved into a mapping, and `offload.optimizer` into a
    list."""
    made = {name: value for name, value in options.items() if "." not in name}
    for name in options.keys() - made.keys():
        option, _, key = name.partition(".")
        if option in KWARGS:
            made[option] = {**(made.get(option) or {}), key: options[name]}
        elif options[name]:
            made[option] = [*made.get(option, ()), key]
    return made
