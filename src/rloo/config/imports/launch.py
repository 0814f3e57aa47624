"""What is given to `rloo config --from`: a script, a command line or a file, with overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.config.foreign import is_script
from rloo.config.imports.overrides import is_yaml, over, read_composed, read_overrides
from rloo.config.imports.shell import Script, find_command, read_script

_ABOVE = 8
_SETTING = re.compile(r"--|[+~]*[A-Za-z_]\w*(\.\w+)+=")


@dataclass(frozen=True)
class Launch:
    """The `words` after the program's name and those `before` it, in a `script`."""

    words: list[str]
    before: list[str] = field(default_factory=list)
    script: Script = field(default_factory=Script)
    text: str = ""
    folder: Path = Path()

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the script."""
        found = []
        if self.script.conditional:
            found.append("the script has conditions: all branches were read, the last one wins")
        cut = [words for words in self.script.commands if _SETTING.match(words[0])]
        if cut:
            number = sum(len(words) for words in cut)
            found.append(
                f"a comment or a missing backslash ends the command before {cut[0][0]}: the shell "
                f"leaves out what follows, {number} words"
            )
        return found


def read_launch(source: str, mark: re.Pattern[str], program: str) -> Launch:
    """The one command of `program`, which `mark` knows, in the script at the path `source`, or in a
    command line. Raises ValueError where there is none, or several that differ."""
    text, folder = _text_of(source)
    script = read_script(text)
    if text.lstrip().startswith("--"):  # its flags alone, each on a line of its own perhaps
        return Launch([word for words in script.commands for word in words], text=text)
    commands = find_command(script, mark)
    if commands and all(words == commands[0][1] for _, words in commands):
        before, words = commands[0]
        return Launch(words, before, script, text, folder)
    number = len(commands)
    raise ValueError(
        f"{source if is_script(source) else 'the command line'}: there are {number} commands "
        f"{program}; there must be 1" + ("; give the one in quotes" if number else "")
    )


def _text_of(source: str) -> tuple[str, Path]:
    if not is_script(source):
        return source, Path()
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).parent
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{source}: {reason}") from None


@dataclass(frozen=True)
class Composed:
    """Settings by dotted names, of a file and the overrides over it; `flags` of the program."""

    values: dict[str, Any]
    flags: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_settings(
    source: str, overrides: Sequence[str], mark: re.Pattern[str], program: str
) -> Composed:
    """The settings of a YAML file, script or command line, with `key=value` overrides after it.
    Raises ValueError for what cannot be read."""
    if is_yaml(source) and " " not in source:
        values, missing = read_composed(source)
        given, _, others = read_overrides(overrides)
        _refuse(others)
        return Composed(over(values, given), {}, _gone(missing))
    words = _overrides_alone(source)
    launch = Launch(words) if words else read_launch(source, mark, program)
    given, flags, _ = read_overrides(launch.words)
    added, _, others = read_overrides(overrides)
    _refuse(others)
    values, notes = {}, list(launch.notes)
    if name := _config_name(flags):
        file = _find(name, launch.folder)
        if file is None and flags.get("config"):
            raise ValueError(
                f"{name}: no such file here; give it and what the command sets: rloo config "
                "--from SYSTEM FILE key=value ..."
            )
        if file is None:
            notes.append(f"{name} is not here: what it sets has the system's default")
        else:
            values, missing = read_composed(str(file))
            notes += _gone(missing)
    return Composed(over(over(values, given), added), flags, notes)


def _overrides_alone(source: str) -> list[str]:
    """The words of a line that is nothing but `key=value ...`; no others."""
    if is_script(source) or "=" not in source:
        return []
    try:
        script = read_script(f"overrides {source}")
    except ValueError:
        return []
    words = script.commands[0][1:] if len(script.commands) == 1 else []
    return words if all(re.match(r"[+~]*[A-Za-z_][\w.@/]*=", word) for word in words) else []


def _refuse(others: list[str]) -> None:
    if others:
        raise ValueError(f"{others[0]} is no key=value; overrides come after the file")


def _gone(missing: list[str]) -> list[str]:
    return [f"{name} (defaults) is not here: its values are the system's" for name in missing]


def _config_name(flags: Mapping[str, str]) -> str | None:
    if file := flags.get("config"):
        return file
    name = flags.get("config_name", "").removesuffix(".yaml")
    return f"{flags.get('config_path', '.')}/{name}.yaml" if name else None


def _find(name: str, folder: Path) -> Path | None:
    """`name` in the current folder, or in the script's or one above it; what only a run would tell
    (`$(realpath ..)/examples/x.yaml`) is taken for one of these."""
    path = Path(re.sub(r"^\$[({].*[)}]/", "", name)).expanduser()
    folders = [Path(), *[folder.resolve(), *folder.resolve().parents][:_ABOVE]]
    return next((found for f in folders if (found := f / path).is_file()), None)
