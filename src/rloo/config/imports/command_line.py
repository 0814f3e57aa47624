"""Command lines of `swift rlhf`, alone or in a shell script, as options. Nothing is run.

Knows how words become options, not what any option means.
"""

from __future__ import annotations

import re
import shlex
from string import Template
from typing import Any

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def parse_script(text: str) -> dict[str, Any]:
    """The options of the one `swift rlhf` in a shell script, and the variables set before it.

    A value is text, a list of texts where there are several, "true" where there is none. Variables
    that the script sets are filled in. Nothing is run.
    """
    values: dict[str, Any] = {}
    commands = []
    others = 0
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        strings = {key: value for key, value in values.items() if isinstance(value, str)}
        try:
            words = _split(Template(line).safe_substitute(strings))
        except ValueError as error:
            raise ValueError(f"{error} in the command line {line.strip()[:60]!r}") from None
        while words and (words[0] == "export" or _ASSIGNMENT.match(words[0])):
            name, _, value = words.pop(0).partition("=")
            values |= {name: value} if name != "export" else {}
        if "rlhf" in words:
            commands.append(words)
        elif words:
            others += 1
            values[f"command {others}"] = shlex.join(words)
    if len(commands) != 1:
        raise ValueError(f"there are {len(commands)} commands `swift rlhf`; there must be 1")
    words = commands[0]
    start = words.index("rlhf")
    if words[:start] != ["swift"]:
        raise ValueError(
            f"the command is {shlex.join(words[: start + 1])}; only swift rlhf is read (Megatron's "
            "fixes scale_rewards and kl_in_reward, whatever the estimator)"
        )
    return values | _parse_options(words[start + 1 :])


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    # A shell's comment begins a word (data#500 is none), and may hold a lone quotation mark.
    lexer.commenters = ""
    words = []
    for word in lexer:
        if word.startswith("#"):
            break
        words.append(word)
    return words


def _parse_options(words: list[str]) -> dict[str, Any]:
    options: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            name = key.replace("-", "_")
            if name in options:
                raise ValueError(f"--{name} is given twice; give it once")
            options[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{word} stands before any option")
        else:
            options[name].append(word)
    return {key: value[0] if len(value) == 1 else value or "true" for key, value in options.items()}
