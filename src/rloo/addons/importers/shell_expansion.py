"""Expands `$(...)` and `${name%pattern}` in a shell script, if their values are known without a
run."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re

UNRESOLVED = re.compile(r"\$\{[^{}]*\}|\$\(|`")
_SILENT = (":", "true", "cd", "set", "export")
_LINKS = {"-f", "-e", "-m", "-s", "-P", "--"}
_TRIM = re.compile(r"(\w+)(##?|%%?|//?|\^\^?|,,?|:(?=\d))(.*)", re.DOTALL)


def is_resolved(text: str) -> bool:
    """Whether `text` has no part that is known only at run time."""
    return not UNRESOLVED.search(text)


def changed(folder: str | None, words: list[str]) -> str | None:
    """The folder after `cd` from `folder`; None if it is known only at run time."""
    where = [word for word in words if not re.fullmatch(r"-[LPe@]+|--", word)]
    if len(where) > 1 or where == ["-"] or not all(map(is_resolved, where)):
        return None
    target = os.path.expanduser(where[0] if where else "~")
    if folder is None and not os.path.isabs(target):
        return None
    return os.path.normpath(os.path.join(folder or "", target))


def printed(commands: list[list[str]], folder: str | None) -> str | None:
    """The output of `commands` in `folder`; None if it is known only at run time."""
    said = [words for words in commands if words[0] not in _SILENT]
    if not said:
        return ""
    if len(said) > 1 or not all(map(is_resolved, said[0])):
        return None
    match said[0]:
        case ["pwd", *options] if set(options) <= {"-P", "-L"}:
            return folder
        case ["echo", *words] if not "".join(words[:1]).startswith("-"):
            return " ".join(words)
        case ["dirname", *words] if len(rest := [w for w in words if w != "--"]) == 1:
            return posixpath.dirname(rest[0].rstrip("/") or "/") or "."
        case ["basename", path]:
            return posixpath.basename(path.rstrip("/")) or "/"
        case ["basename", path, suffix]:
            return posixpath.basename(path.rstrip("/")).removesuffix(suffix)
        case ["realpath" | "readlink", *options, path] if set(options) <= _LINKS:
            return None if folder is None else os.path.realpath(os.path.join(folder, path))
    return None


def trimmed(inside: str) -> tuple[str, str, str] | None:
    """(name, operator, pattern) of `${name#pattern}` and similar expansions; None for any other
    text."""
    found = _TRIM.fullmatch(inside)
    return (found[1], found[2], found[3]) if found else None


def trim(value: str, operator: str, pattern: str) -> str | None:
    """`value` after an expansion: # removes a matching beginning and % a matching end (the longest
    if the operator is doubled), / replaces text, ^ and , convert to upper and lower case, and :
    selects a part. None if the pattern is not plain text."""
    if operator == ":":
        start, _, length = pattern.partition(":")
        if not re.fullmatch(r"\d+(?::\d+)?", pattern):
            return None
        return value[int(start) :][: int(length) if length else None]
    if operator[0] in "^,":
        change = str.upper if operator[0] == "^" else str.lower
        whole = len(operator) == 2
        return None if pattern else change(value) if whole else change(value[:1]) + value[1:]
    if operator[0] == "/":
        old, _, new = pattern.partition("/")
        plain = old and not re.search(r"[*?\[\\#%]", old)
        return value.replace(old, new, -1 if len(operator) == 2 else 1) if plain else None
    places = range(len(value) + 1)
    if operator[0] == "#":
        ends = [n for n in places if fnmatch.fnmatchcase(value[:n], pattern)]
        return value[(max if len(operator) == 2 else min)(ends, default=0) :]
    starts = [n for n in places if fnmatch.fnmatchcase(value[n:], pattern)]
    return value[: (min if len(operator) == 2 else max)(starts, default=len(value))]
