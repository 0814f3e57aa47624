"""The settings of another system while they are read: each is taken, or left with a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rloo.config.aliases import our_name
from rloo.config.config import option_types
from rloo.config.reading import coerce, not_null

# Reasons that several systems share.
ENGINES = "completions are sampled by our own engines (rollout_engine)"
PROCESSES = "num_processes or a launcher says how many, and parallel whether they divide weights"
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class Left(NamedTuple):
    """A setting that has no counterpart here."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Imported:
    """`options` under our names, `taken` the keys of the source that they came from, `left` those
    that have no counterpart, `notes` what a reader must know besides."""

    options: dict[str, Any]
    taken: list[str]
    left: list[Left]
    notes: list[str] = field(default_factory=list)


class Source:
    """Another system's settings by their dotted names; what is read of them is remembered."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        """`names`: ours for keys that are no alias, for `take_same`."""
        self.values = dict(values)
        self._names = names or {}
        self.taken: list[str] = []
        self.left: list[Left] = []
        self.notes: list[str] = []

    def has(self, key: str) -> bool:
        """Whether `key` is given with a value."""
        return self.values.get(key) is not None

    def take(self, key: str, kind: Any = None, default: Any = None) -> Any:
        """The value of `key` as a `kind` (an annotation; None takes it as it is), or `default`.
        Raises ValueError where it is of another kind."""
        if key not in self.values:
            return default
        value = self.values.pop(key)
        if isinstance(value, str) and _REFERENCE.search(value):
            self.left.append(Left(key, value, "what it refers to is not in the file"))
            return default
        self.taken.append(key)
        if value is None or kind is None:
            return default if value is None else value
        return coerce(key, kind, value)

    def expect(self, key: str, same: Any, reason: str) -> None:
        """Take `key` if it is `same`, which changes nothing here; else leave it with `reason`."""
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
        """Our options for keys that mean the same, which are given with their defaults."""
        options: dict[str, Any] = {}
        for key, default in same.items():
            ours = self._names.get(key) or our_name(key)
            value = self.take(key, not_null(option_types()[ours]), default)
            if value is not None:  # another key may have set it
                options[ours] = value
        return options

    def expect_all(self, only: Mapping[str, tuple[Any, str]]) -> None:
        """`expect` for each key -> (the value at which it changes nothing, the reason)."""
        for key, (harmless, reason) in only.items():
            self.expect(key, harmless, reason)

    def leave(self, key: str, reason: str) -> None:
        """Put `key`, where it is given, among those without a counterpart."""
        if key in self.values:
            self.left.append(Left(key, self.values.pop(key), reason))

    def give_back(self, key: str, value: Any, reason: str) -> None:
        """Leave `key` after all, although it was taken."""
        if key in self.taken:
            self.taken.remove(key)
            self.left.append(Left(key, value, reason))

    def finish(self, options: dict[str, Any], reasons: Mapping[str, tuple[str, ...]]) -> Imported:
        """All that was read; what remains is left with the first of `reasons` -> the beginnings of
        keys that it is for."""
        for key in list(self.values):
            known = (why for why, starts in reasons.items() if f"{key}.".startswith(starts))
            self.leave(key, next(known, "no counterpart is known"))
        return Imported(options, self.taken, self.left, self.notes)


def follow_references(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with OmegaConf's `${other.key}` replaced by the value of that key, if there is one
    (it may be a resolver's). Raises ValueError for references that go in a circle."""

    def resolve(value: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return look_up(whole, path)
        return _REFERENCE.sub(lambda found: str(look_up(found, path)), value)

    def look_up(found: re.Match[str], path: tuple[str, ...]) -> Any:
        key = found[1].strip()
        if key in path:
            raise ValueError(f"{' -> '.join((*path, key))}: these references go in a circle")
        return resolve(values[key], (*path, key)) if key in values else found[0]

    return {key: resolve(value, (key,)) for key, value in values.items()}
