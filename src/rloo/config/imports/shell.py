"""Shell scripts and command lines as what they would run: variables and commands, never run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rloo.config.imports.sums import compute

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\}|([0-9@*#?$!-]))")
_DEFAULT = re.compile(r"(\w+):?([-=+])(.*)", re.DOTALL)
_ALL_OF = re.compile(r"(\w+)\[[@*]\]")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>&|<&|>|<)\s*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_WORDS = (
    "if", "then", "else", "elif", "fi", "do", "done", "while", "until", "time", "exec", "export",
    "local", "declare", "readonly", "{", "}", "!",
)  # fmt: skip
_CHOICES = ("if", "elif", "else", "case")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


@dataclass
class Script:
    """`variables` as they are at the end, arrays as lists; `commands`, each its words; whether
    there are conditions, whose branches were all read, one after the other."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    conditional: bool = False


def read_script(text: str) -> Script:
    """What a script says: variables are filled in, those that it does not set from the environment,
    as the shell does; whole-number sums are done. What only a run would tell stays as it is
    written. Raises ValueError for quotation marks that are never closed."""
    return _Reader(text.replace("\r\n", "\n")).read()


def find_command(script: Script, mark: re.Pattern[str]) -> list[tuple[list[str], list[str]]]:
    """The words before and after `mark` (a program or module) of every command that has it, also of
    those that are one word of another, such as bash -c's."""
    found = []
    for words in script.commands:
        place = next((i for i, word in enumerate(words) if mark.fullmatch(word)), None)
        if place is not None:
            found.append((words[:place], words[place + 1 :]))
            continue
        for word in words:
            if " " in word and mark.search(word):
                found += find_command(read_script(word), mark)
    return found


class _Reader:
    """A place in a text, and what was read before it."""

    def __init__(self, text: str, variables: Mapping[str, str | list[str]] | None = None) -> None:
        self._text = text
        self._at = 0
        self._script = Script(dict(variables or {}))
        self._heredocs: list[str] = []

    def read(self) -> Script:
        words: list[str] = []
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if self._peek() in "\n;|&()":
                self._end(words)
                words = []
                if self._peek() == "\n":
                    self._skip_heredocs()
                self._at += 1
            elif not words and (name := _ASSIGNMENT.match(self._text, self._at)):
                self._assign(name)
            else:
                fields = self._word()
                if not words and fields and fields[0] in _WORDS:
                    self._script.conditional |= fields[0] in _CHOICES
                    continue
                self._script.conditional |= not words and fields[:1] == ["case"]
                words += fields
        self._end(words)
        return self._script

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _end(self, words: list[str]) -> None:
        if words:
            self._script.commands.append(list(words))

    def _skip_blank(self) -> bool:
        """Skip what separates words: blanks, joined lines, comments, redirections."""
        start = self._at
        if self._peek(2) == "\\\n":
            self._at += 2
        elif self._peek() in " \t":
            self._at += 1
        elif self._peek() == "#":
            self._at = self._find("\n", len(self._text))
        elif heredoc := _HEREDOC.match(self._text, self._at):
            self._heredocs.append(heredoc[2])
            self._at = heredoc.end()
        elif redirection := _REDIRECTION.match(self._text, self._at):
            self._at = redirection.end()
            self._word()
        return self._at > start

    def _find(self, what: str, missing: int | None = None) -> int:
        place = self._text.find(what, self._at)
        if place < 0 and missing is None:
            line = self._text.count("\n", 0, self._at) + 1
            raise ValueError(f"line {line}: no closing {what}")
        return len(self._text) if place < 0 else place

    def _skip_heredocs(self) -> None:
        for name in self._heredocs:
            end = re.compile(rf"\n\s*{name}[ \t]*(?=\n|$)").search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._heredocs = []

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
        self._script.variables[name[1]] = value

    def _array(self) -> Iterator[str]:
        while self._at < len(self._text) and self._peek() != ")":
            if self._peek() == "\n":
                self._at += 1
            elif not self._skip_blank():
                yield from self._word()
        self._at += 1

    def _ends_word(self) -> bool:
        return self._at >= len(self._text) or self._peek() in " \t\n;|&()"

    def _word(self, whole: bool = False) -> list[str]:
        """The fields that the word here becomes, one of them where it is `whole`."""
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
                elif isinstance(value, str) and "$(" in value:
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

    def _all(self, quoted: bool) -> str | list[str]:
        """The text here as one where it is `quoted`, else the fields that it becomes."""
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
        """Read up to the closing mark; whether that made a word, as all but an empty list does."""
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

    def _expansion(self, quoted: bool) -> str | list[str]:
        """What stands here for something else; as it is written where only a run would tell."""
        if self._peek() == "`":
            self._at += 1
            end = self._find("`")
            text, self._at = self._text[self._at - 1 : end + 1], end + 1
            return text
        if self._peek(2) == "$(":
            return self._command_or_sum(self._enclosed("(", ")"))
        if plain := _PLAIN.match(self._text, self._at):
            self._at = plain.end()
            if plain[3]:
                return [] if plain[3] in "@*" else f"${{{plain[3]}}}"
            return self._value(plain[1] or plain[2])
        if self._peek(2) != "${":
            self._at += 1
            return "$"
        return self._braced(self._enclosed("{", "}"), quoted)

    def _enclosed(self, opening: str, closing: str) -> str:
        start, depth = self._at + 1, 0
        for place in range(start, len(self._text)):
            depth += (self._text[place] == opening) - (self._text[place] == closing)
            if depth == 0:
                self._at = place + 1
                return self._text[start + 1 : place]
        raise ValueError(f"line {self._text.count(chr(10), 0, start) + 1}: no closing {closing}")

    def _value(self, name: str) -> str | list[str]:
        if name in self._script.variables:
            return self._script.variables[name]
        return os.environ.get(name, f"${{{name}}}")

    def _braced(self, inside: str, quoted: bool) -> str | list[str]:
        if of_all := _ALL_OF.fullmatch(inside):
            value = self._value(of_all[1])
            return value if isinstance(value, list) else [value]
        if default := _DEFAULT.fullmatch(inside):
            value = self._value(default[1])
            is_set = value not in ("", f"${{{default[1]}}}")
            if default[2] == "+" and not is_set:
                return []
            if is_set and default[2] != "+":
                return value
            return _Reader(default[3], self._script.variables)._all(quoted)
        return f"${{{inside}}}"

    def _command_or_sum(self, inside: str) -> str:
        if inside.strip() == "pwd":
            return os.getcwd()
        if not inside.startswith("("):
            return f"$({inside})"
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda n: f"({self._value(n[1])})", inside)
        result = compute(names[1:-1])
        return f"$({inside})" if result is None else str(result)


def read_flags(words: list[str]) -> dict[str, str | list[str]]:
    """`--name value ...` as text, a list of texts where there are several, "true" where there is
    none; dashes are underscores, and the last of a repeated flag wins. Raises ValueError for a
    word before any flag."""
    flags: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--") and word[2:3].isalpha():
            key, equals, value = word[2:].partition("=")
            name = key.replace("-", "_")
            flags[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{word} stands before any option")
        else:
            flags[name].append(word)
    return {key: value[0] if len(value) == 1 else value or "true" for key, value in flags.items()}
