"""Splits a shell script into words: quotation marks, variables and expansions."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from rloo.addons.importers.shell_arithmetic import compute
from rloo.addons.importers.shell_expansion import is_resolved, printed, trim, trimmed

_PLAIN = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|([0-9@*#?$!-]))")
_DEFAULT = re.compile(r"(\w+(?:\[0\])?)(:?)([-=+])(.*)", re.DOTALL)
_PART = re.compile(r"(\w+)\[[@*]\]:(\d+)(?::(\d+))?")
_ALL_OF = re.compile(r"(\w+)\[([@*])\]")
_COUNT = re.compile(r"#(\w+)(\[[@*]\])?")
_ELEMENT = re.compile(r"(\w+)\[(-?\d+)\]")
_ARGUMENTS = re.compile(r"([@*])(?::(\d+)(?::(\d+))?)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
# Limit on the characters of expanded variables and functions: a script may double its text.
MOST_LETTERS = 2_000_000
DEEPEST = 40


Value = str | list[str]


@dataclass
class ShellScript:
    """The result of reading a script. `variables` are the last values, with arrays as lists.
    `environment` has variables that are set for single commands. `exported` are the names that are
    exported to all commands. `uncalled` maps names of functions without a call, and of texts after
    `<<`, to their commands. If the script is `conditional`, all branches were read in sequence.
    `notes` are for the user. `folder` is the last current folder, None if unknown."""

    variables: dict[str, Value] = field(default_factory=dict)
    environment: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    commands: list[list[str]] = field(default_factory=list)
    uncalled: dict[str, list[list[str]]] = field(default_factory=dict)
    conditional: bool = False
    notes: list[str] = field(default_factory=list)
    path: str = ""
    folder: str | None = field(default_factory=os.getcwd)
    functions: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    documents: list[str] = field(default_factory=list)
    letters: int = MOST_LETTERS

    def apart(self) -> ShellScript:
        """A copy for reading text whose commands must not be added to the script."""
        return replace(
            self, variables=dict(self.variables), functions=dict(self.functions), commands=[],
            uncalled={}, notes=[], documents=[], called=set(self.called),
        )  # fmt: skip


class ShellReader(ABC):
    """A position in a text, and the script that was read before the position. `arguments` are the
    arguments of the current function; None in a script, whose arguments are unknown. `active` are
    the nested functions at this position, with "" for other nested text."""

    def __init__(
        self,
        text: str,
        script: ShellScript,
        arguments: list[str] | None = None,
        active: tuple[str, ...] = (),
    ) -> None:
        self._text = text
        self._at = 0
        self._script = script
        self._arguments = arguments
        self._active = active

    @abstractmethod
    def read(self) -> ShellScript:
        """Read the complete text as commands."""

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _note(self, text: str) -> None:
        if text not in self._script.notes:
            self._script.notes.append(text)

    def _spend(self, letters: int) -> None:
        self._script.letters -= letters
        if self._script.letters < 0:
            raise ValueError(
                f"{self._script.path or 'the command line'}: its variables and functions come to "
                f"more than {MOST_LETTERS} letters; give the command that it runs"
            )

    def _deeper(self, active: tuple[str, ...]) -> tuple[str, ...]:
        if len(active) > DEEPEST:
            raise ValueError(f"{self._script.path or 'the command line'} is nested too deeply")
        return active

    def _find(self, what: str, missing: int | None = None) -> int:
        place = self._text.find(what, self._at)
        if place < 0 and missing is None:
            line = self._text.count("\n", 0, self._at) + 1
            raise ValueError(f"line {line}: no closing {what}")
        return len(self._text) if place < 0 else place

    def _ends_word(self) -> bool:
        return self._at >= len(self._text) or self._peek() in " \t\n;|&()"

    def _word(self, whole: bool = False) -> list[str]:
        """The fields of the word at the current position. With `whole`, it is a single field."""
        fields = [""]
        exists = whole
        while not self._ends_word():
            char = self._peek()
            if char == "\\":
                fields[-1] += "" if self._peek(2) == "\\\n" else self._peek(2)[1:]
                self._at += 2
            elif char == "'" or self._peek(2) == "$'":
                fields[-1] += self._single(ansi=char == "$")
            elif char == '"':
                self._at += 1
                exists = self._double(fields) or exists
                continue
            elif char in "$`":
                value = self._expansion(quoted=whole)
                parts = value if isinstance(value, list) else value.split()
                if whole:
                    parts = [" ".join(parts) if isinstance(value, list) else value]
                elif isinstance(value, str) and not is_resolved(value.replace("${", "")):
                    parts = [value]
                if parts:
                    fields[-1] += parts[0]
                    fields += parts[1:]
                continue
            else:
                fields[-1] += char
                self._at += 1
                continue
            exists = True
        return fields if exists or len(fields) > 1 or fields[0] else []

    def _all(self, quoted: bool) -> Value:
        """The remaining text as one string if `quoted`, else as fields."""
        text, fields = "", []
        while self._at < len(self._text):
            if self._ends_word():
                text += self._peek()
                self._at += 1
            elif quoted:
                text += " ".join(self._word(whole=True))
            else:
                fields += self._word()
        return text if quoted else fields

    def _single(self, ansi: bool) -> str:
        self._at += 2 if ansi else 1
        if not ansi:
            end = self._find("'")
            text, self._at = self._text[self._at : end], end + 1
            return text
        text = ""
        while self._peek() != "'":
            if self._at >= len(self._text):
                self._find("'")
            escaped = self._peek() == "\\"
            text += _ESCAPES.get(self._peek(2)[1:], self._peek(2)) if escaped else self._peek()
            self._at += 2 if escaped else 1
        self._at += 1
        return text

    def _double(self, fields: list[str]) -> bool:
        """Read to the closing quotation mark. Returns whether the text is a word (an empty list is
        none)."""
        exists = True
        while self._peek() != '"':
            if self._at >= len(self._text):
                self._find('"')
            if self._peek() == "\\":
                pair = self._peek(2)
                fields[-1] += "" if pair == "\\\n" else pair[1:] if pair[1:] in '"\\$`' else pair
                self._at += 2
            elif self._peek() in "$`":
                value = self._expansion(quoted=True)
                if isinstance(value, list):
                    exists = bool(value)
                    fields[-1] += value[0] if value else ""
                    fields += value[1:]
                else:
                    fields[-1] += value
            else:
                fields[-1] += self._peek()
                self._at += 1
        self._at += 1
        return exists

    def _expansion(self, quoted: bool) -> Value:
        """The value of the expansion at the current position; as written if it is known only at run
        time."""
        if self._peek() == "`":
            self._at += 1
            end = self._find("`")
            text, self._at = self._text[self._at : end], end + 1
            return self._printed(text, f"`{text}`")
        if self._peek(2) == "$(":
            return self._command_or_sum(self._enclosed("(", ")"))
        if plain := _PLAIN.match(self._text, self._at):
            self._at = plain.end()
            if plain[3]:
                return self._braced(plain[3], quoted)
            return self._value(plain[1] or plain[2])
        if self._peek(2) != "${":
            self._at += 1
            return "$"
        return self._braced(self._enclosed("{", "}"), quoted)

    def _enclosed(self, opening: str, closing: str, at: int | None = None) -> str:
        """The text between two marks. The first mark is at the current position or after a `$`."""
        start, depth = self._at + 1 if at is None else at, 0
        for place in range(start, len(self._text)):
            depth += (self._text[place] == opening) - (self._text[place] == closing)
            if depth == 0:
                self._at = place + 1
                return self._text[start + 1 : place]
        raise ValueError(f"line {self._text.count(chr(10), 0, start) + 1}: no closing {closing}")

    def _value(self, name: str) -> Value:
        value = self._named(name)
        self._spend(len(value) if isinstance(value, str) else sum(map(len, value)))
        return value

    def _named(self, name: str) -> Value:
        own = name in ("0", "BASH_SOURCE", "BASH_SOURCE[0]")
        if own and self._script.path:
            return self._script.path
        if name.isdigit() and not own and self._arguments is not None:
            return "".join(self._arguments[int(name) - 1 : int(name)])
        if name in self._script.variables:
            return self._script.variables[name]
        if element := _ELEMENT.fullmatch(name):
            values = self._script.variables.get(element[1])
            place = int(element[2])
            if isinstance(values, list) and -len(values) <= place < len(values):
                return values[place]
        if name == "PWD":
            return self._script.folder or "${PWD}"
        return os.environ.get(name, f"${{{name}}}")

    def _braced(self, inside: str, quoted: bool) -> Value:
        if every := _ARGUMENTS.fullmatch(inside):
            given = self._arguments
            if given is None:
                self._note(
                    "what the script itself is given ($@) is not known: give it after SOURCE"
                )
            first = max(int(every[2] or 1), 1) - 1
            given = (given or [])[first:][: int(every[3]) if every[3] else None]
            self._spend(sum(map(len, given)))
            return " ".join(given) if quoted and every[1] == "*" else given
        if inside == "#" and self._arguments is not None:
            return str(len(self._arguments))
        if count := _COUNT.fullmatch(inside):
            value = self._value(count[1])
            if isinstance(value, list):
                return str(len(value if count[2] else "".join(value[:1])))
            return str(1 if count[2] else len(value)) if is_resolved(value) else f"${{{inside}}}"
        if of_all := _ALL_OF.fullmatch(inside):
            value = self._value(of_all[1])
            value = value if isinstance(value, list) else [value]
            return " ".join(value) if quoted and of_all[2] == "*" else value
        if default := _DEFAULT.fullmatch(inside):
            return self._or_default(default, quoted)
        if part := _PART.fullmatch(inside):
            values = self._script.variables.get(part[1])
            if isinstance(values, list):
                end = int(part[2]) + int(part[3]) if part[3] else None
                return values[int(part[2]) : end]
        if (cut := trimmed(inside)) and isinstance(value := self._value(cut[0]), str):
            text = trim(value, *cut[1:]) if is_resolved(value + cut[2]) else None
            return f"${{{inside}}}" if text is None else text
        known = re.fullmatch(r"\w+|\w+\[-?\d+\]", inside)
        return self._value(inside) if known else f"${{{inside}}}"

    def _or_default(self, default: re.Match[str], quoted: bool) -> Value:
        name, colon, operator, text = default.groups()
        value = self._value(name)
        is_set = value not in ("" if colon else None, f"${{{name}}}")
        if operator == "+" and not is_set:
            return []
        if is_set and operator != "+":
            return value
        active = self._deeper(("", *self._active))
        used = type(self)(text, self._script, self._arguments, active)._all(quoted)
        if operator == "=":
            self._script.variables[name] = " ".join(used) if isinstance(used, list) else used
        return used

    def _command_or_sum(self, inside: str) -> str:
        if not inside.startswith("("):
            return self._printed(inside, f"$({inside})")
        names = r"\$?\{?\b([A-Za-z_]\w*)\b\}?|\$\{?(\d)\}?"
        filled = re.sub(names, lambda n: f"({self._value(n[1] or n[2])})", inside)
        result = compute(filled[1:-1])
        return f"$({inside})" if result is None else str(result)

    def _printed(self, inside: str, written: str) -> str:
        """The output of the commands `inside`; `written` if it is known only at run time."""
        apart, active = self._script.apart(), self._deeper(("", *self._active))
        self._spend(len(inside))
        try:
            type(self)(inside, apart, self._arguments, active).read()
        except ValueError:
            return written
        text = None if "|" in inside else printed(apart.commands, apart.folder)
        return written if text is None else text
