"""Reads the variables and commands of shell scripts and command lines without running them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from rloo.addons.importers.shell_expansion import changed, is_resolved
from rloo.addons.importers.shell_words import DEEPEST, MOST_LETTERS, ShellReader, ShellScript, Value

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?"
    r"|([A-Za-z_][\w:.-]*)[ \t]*\([ \t]*\))\s*(?=[{(])"
)
# A loop over the script's arguments, which are unknown.
_ARGUMENT_LOOP = re.compile(r"(?:while|until)\b[^\n;]*(?:\$\{?[#1@*]|getopts)")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>&|<&|>|<)\s*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_WORDS = (
    "if", "then", "else", "elif", "fi", "do", "done", "while", "until", "time", "exec", "{", "}",
    "!",
)  # fmt: skip
_DECLARING = ("export", "local", "declare", "readonly", "typeset")
_IN_PLACE = re.compile(r"\s*(\w+)\s*(?:([-+*/%]?)=(?!=)\s*(.+)|(\+\+|--))\s*", re.DOTALL)
# Commands in a loop's body that do not affect later commands.
_SAID = ("echo", "printf", "[", "[[", "test", ":", "true", "mkdir", "sleep")
_CHOICES = ("if", "elif", "else", "case")
# Files that configure a user's shell and have no settings of a run.
_OF_SHELLS = re.compile(r"(?:.*/)?(?:activate\S*|\.\w+|\w*\.env|set_env\.sh|setvars\.sh|conda\.sh)")


def read_script(text: str, path: str = "") -> ShellScript:
    """A script's variables and commands. As in a shell, variables are expanded (unset ones from the
    environment), functions are called, and integer arithmetic is computed. Parts that are known
    only at run time stay as written. Raises ValueError for an unclosed quotation mark, for
    expansions of more than `MOST_LETTERS` characters in total, and for text that is nested too
    deeply."""
    script = ShellScript(path=path)
    try:
        _Reader(text.replace("\r\n", "\n"), script).read()
        unread = {f"function {n}": b for n, b in script.functions.items() if n not in script.called}
        unread |= {f"the text after << ({n})": t for n, t in enumerate(script.documents, 1)}
        for name, body in unread.items():
            apart = script.apart()
            with contextlib.suppress(ValueError):  # a text after << need not be a script
                _Reader(body, apart, arguments=[]).read()
            script.uncalled[name] = apart.commands
    except RecursionError:
        raise ValueError(f"{path or 'the command line'} is nested too deeply") from None
    return script


def find_command(
    script: ShellScript, mark: re.Pattern[str], depth: int = 0
) -> list[tuple[list[str], list[str]]]:
    """(words up to `mark`, words after `mark`) of every command with `mark`, a program or module.
    Commands inside a word of another command (`bash -c "..."`) are included."""
    found = []
    for words in script.commands:
        # Words that are printed, compared, or patterns of `case` are not executed.
        if words[0] in (*_SAID, "case") or (len(words) == 1 and words[0].isalpha()):
            continue
        place = next((i for i, word in enumerate(words) if mark.fullmatch(word)), None)
        if place is not None:
            found.append((words[: place + 1], words[place + 1 :]))
            continue
        for word in words if depth < DEEPEST else ():
            if " " in word and mark.search(word):
                inner = read_script(word)
                if inner.commands != [[word]]:  # equal if the word is known only at run time
                    found += find_command(inner, mark, depth + 1)
    return found


class _Reader(ShellReader):
    """Parses commands and applies their effects on later text."""

    _heredocs: tuple[str, ...] = ()
    _skips_loop = False
    _declares = ""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # Previous values of variables assigned before a command or by `local`.
        self._replaced: dict[str, Value | None] = {}
        self._locals: dict[str, Value | None] = {}
        self._prefix: dict[str, Value] = {}
        self._outer: list[tuple[dict[str, Value], str | None]] = []
        self._values: tuple[str, list[str]] = ("", [])
        self._loops: list[str] = []

    def read(self, block: tuple[str, str] = ("", "")) -> ShellScript:
        """Read to the end of the text, or to the end of a `block`: `do` and `done`, or braces."""
        words: list[str] = []
        opened = 0
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if not words and self._peek(2) == "((":
                self._change(self._enclosed("(", ")", self._at)[1:-1])
            elif self._peek() in "\n;|&()":
                self._end(words)
                words = []
                if self._peek() == "\n":
                    self._skip_heredocs()
                self._subshell()
                self._at += 1
            elif not words and (name := _FUNCTION.match(self._text, self._at)):
                self._define(name)
            elif not words and (name := _ASSIGNMENT.match(self._text, self._at)):
                self._assign(name)
            elif not words and not block[0] and self._skip_loop():
                continue
            else:
                self._set_aside()
                fields = self._word()
                first = fields[0] if fields and not words else ""
                if first in _DECLARING or (self._declares and first.startswith("-")):
                    self._declares = self._declares or first
                    continue
                if self._declares:  # names of variables, not a command
                    self._script.exported |= {*fields} if self._declares == "export" else set()
                    continue
                self._script.conditional |= first in _CHOICES
                opened += (first == block[0] != "") - (first == block[1] != "")
                if first == block[1] != "" and opened <= 0:
                    return self._script
                words += [] if first in _WORDS else fields
        self._end(words)
        return self._script

    def _end(self, words: list[str]) -> None:
        """Finish a command and apply its effects on later text."""
        environment, self._prefix = self._prefix, {}
        self._replaced, self._declares = {}, ""
        self._script.environment |= environment
        match words:
            case []:
                return
            case [name, *given] if name in self._script.functions:
                return self._call(name, given, environment)
            case ["for", name, *rest] if rest[:1] in ([], ["in"]):
                return self._loop(name, rest[1:] if rest else self._arguments or [])
            case ["eval", *rest]:
                return self._inner(" ".join(rest))
            case ["shift", *rest] if self._arguments is not None:
                number = int(rest[0]) if rest and rest[0].isdigit() else 1
                self._arguments = self._arguments[number:]
                return None
            case ["set", *rest] if "--" in rest:
                self._arguments = rest[rest.index("--") + 1 :]
            case ["cd", *rest]:
                self._script.folder = changed(self._script.folder, rest)
                where = self._script.folder or " ".join(rest)
                self._note(f"the script goes to {where} (cd): its relative paths are from there")
            case ["source" | ".", path, *_]:
                return self._source(path)
            case ["let", *sums]:
                for text in sums:
                    self._change(text)
            case ["unset", *names]:
                for name in names:
                    self._script.variables.pop(name, None)
            case ["read" | "mapfile" | "readarray" | "getopts", *names]:
                self._forget(names)
            case ["printf", "-v", name, *_]:
                self._forget([name])
        self._script.commands.append(list(words))

    # -- environments and effects of commands ----------------------------------------------------

    def _set_aside(self) -> None:
        """Limit assignments before a command to the environment of the command."""
        if self._declares or not self._replaced:
            return
        for name, value in self._replaced.items():
            self._prefix[name] = self._script.variables[name]
            self._set(name, value)
        self._replaced = {}

    def _set(self, name: str, value: Value | None) -> None:
        if value is None:
            self._script.variables.pop(name, None)
        else:
            self._script.variables[name] = value

    def _forget(self, names: list[str]) -> None:
        """Mark variables as unknown: from here on their values are known only at run time."""
        for name in names:
            if re.fullmatch(r"[A-Za-z_]\w*", name):
                self._script.variables[name] = f"${{{name}}}"

    def _change(self, text: str) -> None:
        """Apply an arithmetic assignment: N+=2, N++."""
        found = _IN_PLACE.fullmatch(text)
        if found is None:
            self._forget(re.findall(r"\b([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|\+\+|--)", text))
            return
        name, operator, right, step = found.groups()
        whole = f"{name}{step[0]}1" if step else f"{name}{operator}({right})" if operator else right
        value = self._command_or_sum(f"({whole})")
        self._script.variables[name] = value if is_resolved(value) else f"${{{name}}}"

    def _subshell(self) -> None:
        """Restore variables and the current folder after a subshell."""
        script = self._script
        if self._peek() == "(":
            self._outer.append((dict(script.variables), script.folder))
        elif self._peek() == ")" and self._outer:
            script.variables, script.folder = self._outer.pop()

    # -- functions, loops, files -----------------------------------------------------------------

    def _skipped(self, *block: str) -> str:
        """The text of a block that begins at the current position. Moves the position after the
        block."""
        start = self._at
        probe = _Reader(self._text, self._script.apart(), self._arguments, ("", *self._active))
        self._deeper(probe._active)
        probe._at = start
        probe.read((block[0], block[1]))
        self._at = probe._at
        return self._text[start : self._at]

    def _define(self, name: re.Match[str]) -> None:
        self._at = name.end()
        if self._peek() == "(":
            body = self._enclosed("(", ")", self._at)
        else:
            body = self._skipped("{", "}").removeprefix("{").removesuffix("}")
        if body.strip():
            self._script.functions[name[1] or name[2]] = body

    def _call(self, name: str, given: list[str], environment: dict[str, Value]) -> None:
        self._script.called.add(name)
        if name in self._active:
            self._note(f"function {name} calls itself: it was read once")
            return
        body = self._script.functions[name]
        self._spend(len(body))
        inner = _Reader(body, self._script, given, self._deeper((*self._active, name)))
        replaced = {name: self._script.variables.get(name) for name in environment}
        self._script.variables |= environment
        inner.read()
        for name, value in (replaced | inner._locals).items():
            self._set(name, value)

    def _inner(self, text: str) -> None:
        """Read other text as if it were at the current position."""
        self._spend(len(text))
        _Reader(text, self._script, self._arguments, self._deeper(("", *self._active))).read()

    def _source(self, name: str) -> None:
        path = os.path.join(self._script.folder or "", os.path.expanduser(name))
        if _OF_SHELLS.fullmatch(name):
            return
        if is_resolved(name) and os.path.isfile(path) and os.path.getsize(path) < MOST_LETTERS:
            with open(path, encoding="utf-8", errors="replace") as file:
                self._inner(file.read().replace("\r\n", "\n"))
        else:
            self._note(f"what {name} sets is not known: it is read there (source), and not here")

    def _loop(self, name: str, values: list[str]) -> None:
        """Set the loop variable: to the value if there is only one, or else to unknown. `_repeat`
        handles bodies that only assign variables."""
        self._skips_loop = not values
        self._values = (name, values)
        if len(values) > 1:
            self._loops.append(
                f"the script has a loop over {', '.join(values[:8])}: it was read once, and what "
                f"{name} is there is not known"
            )
        self._script.variables[name] = values[0] if len(values) == 1 else f"${{{name}}}"

    def _repeat(self) -> bool:
        """If a loop's body only assigns variables, read the body for each value and return True.
        Otherwise add a note on the loop."""
        (name, values), self._values = self._values, ("", [])
        if len(values) < 2:
            return False
        start = self._at
        body = self._skipped("do", "done").removeprefix("do").removesuffix("done")
        apart = self._script.apart()
        _Reader(body, apart, self._arguments, self._deeper(("", *self._active))).read()
        if any(words[0] not in _SAID for words in apart.commands):
            self._at = start
            self._note(self._loops.pop())
            return False
        self._loops.pop()
        for value in values:
            self._script.variables[name] = value
            self._inner(body)
        return True

    def _skip_loop(self) -> bool:
        """Skip a loop over missing arguments, a loop over no values, and a loop that `_repeat` has
        read."""
        if re.match(r"do\b", self._text[self._at : self._at + 3]) and self._repeat():
            return True
        over = _ARGUMENT_LOOP.match(self._text, self._at) and not self._arguments
        if over or (self._skips_loop and re.match(r"do\b", self._text[self._at : self._at + 3])):
            self._skips_loop = False
            self._skipped("do", "done")
            return True
        return False

    # -- blanks and assignments ------------------------------------------------------------------

    def _skip_blank(self) -> bool:
        """Skip separators of words: blanks, joined lines, comments, redirections."""
        start = self._at
        if self._peek(2) == "\\\n":
            self._at += 2
        elif self._peek() in " \t":
            self._at += 1
        elif self._peek() == "#":
            self._at = self._find("\n", len(self._text))
        elif heredoc := _HEREDOC.match(self._text, self._at):
            self._heredocs += (heredoc[2],)
            self._at = heredoc.end()
        elif redirection := _REDIRECTION.match(self._text, self._at):
            self._at = redirection.end()
            if self._peek() == "(" or self._peek(2) in (">(", "<("):  # process substitution
                self._enclosed("(", ")", self._text.index("(", self._at))
            else:
                self._word()
        return self._at > start

    def _skip_heredocs(self) -> None:
        for name in self._heredocs:
            end = re.compile(rf"\n\s*{name}[ \t]*(?=\n|$)").search(self._text, self._at)
            stop = end.end() if end else len(self._text)
            self._script.documents.append(self._text[self._at : end.start() if end else stop])
            self._at = stop
        self._heredocs = ()

    def _assign(self, name: re.Match[str]) -> None:
        self._at = name.end()
        value: str | list[str]
        if self._peek() == "(":
            self._at += 1
            value = list(self._array())
        else:
            value = " ".join(self._word(whole=True)) if not self._ends_word() else ""
        before = self._script.variables.get(name[1]) if name[2] else None
        if before is not None:
            value = before + value if type(before) is type(value) else value  # type: ignore[operator]
        if not self._declares:
            self._replaced.setdefault(name[1], self._script.variables.get(name[1]))
        elif self._declares == "export":
            self._script.exported.add(name[1])
        elif self._arguments is not None:
            self._locals.setdefault(name[1], self._script.variables.get(name[1]))
        self._script.variables[name[1]] = value

    def _array(self) -> Iterator[str]:
        while self._at < len(self._text) and self._peek() != ")":
            if self._peek() == "\n":
                self._at += 1
            elif not self._skip_blank():
                yield from self._word()
        self._at += 1


def read_flags(words: list[str]) -> dict[str, str | list[str]]:
    """The values of `--name value ...`: a text, a list of texts if a flag has several values, or
    "true" if it has none. Dashes in names become underscores. The last occurrence of a repeated
    flag is used. A part that is known only at run time becomes a name without a value. Raises
    ValueError for a word before any flag."""
    flags: dict[str, list[str]] = {}
    unknown: list[str] = []
    name = None
    for word in words:
        if word.startswith("--") and word[2:3].isalpha():
            key, equals, value = word[2:].partition("=")
            name = key.replace("-", "_")
            flags[name] = [value] if equals else []
        elif re.fullmatch(r"\$\{\w+\}|\$\(.*\)", word) and (name is None or flags[name]):
            unknown.append(word)
        elif name is None:
            raise ValueError(f"{word} stands before any option")
        else:
            flags[name].append(word)
    found = {key: value[0] if len(value) == 1 else value or "true" for key, value in flags.items()}
    return found | dict.fromkeys(unknown, "")
