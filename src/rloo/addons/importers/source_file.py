"""Reads the source of `rloo config --from`: a script, a command line or a file, with overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.addons.importers.hydra import is_yaml, over, read_composed, read_overrides
from rloo.addons.importers.launcher_commands import AROUND, program_of, started_with
from rloo.addons.importers.settings_reader import CUT
from rloo.addons.importers.shell import ShellScript, find_command, read_script
from rloo.config.compat.detect_system import is_script

_ABOVE = 8
_SETTING = re.compile(r"--|[+~]*[A-Za-z_]\w*(\.\w+)+=")
# Backend of `rloo launch` -> the programs that start a run on such a cluster.
_CLUSTERS = {
    "slurm": re.compile(
        r"(?:.*/)?(?:srun|sbatch|salloc)|areal\S*launcher\.slurm|scheduler\.type=slurm"
    ),
    "ray": re.compile(r"(?:.*/)?ray|areal\S*launcher\.ray|scheduler\.type=ray"),
}  # fmt: skip
_FILE_FLAGS = ("config", "config_path", "config_name", "config_dir")


@dataclass(frozen=True)
class LaunchCommand:
    """A command in a `script`. `before` are its words up to and including the program's name;
    `words` are the words after the name."""

    words: list[str]
    before: list[str] = field(default_factory=list)
    script: ShellScript = field(default_factory=ShellScript)
    text: str = ""
    folder: Path = Path()

    @property
    def notes(self) -> list[str]:
        """The notes on the script for the user."""
        found = list(self.script.notes)
        if self.script.conditional:
            found.append("the script has conditions: all branches were read, the last one wins")
        cut = self._cut()
        if cut:
            number = sum(len(words) for words in cut)
            found.append(
                f"a comment or a missing backslash ends the command before {cut[0][0]}: the shell "
                f"leaves out what follows, {number} words"
            )
        words = [*self.before, *self.words]
        started = [name for name, way in _CLUSTERS.items() if any(map(way.fullmatch, words))]
        if re.search(r"^#SBATCH", self.text, re.MULTILINE):
            started.insert(0, "slurm")
        if started:
            found.append(
                f"it is started by {'Slurm' if started[0] == 'slurm' else 'Ray'} there; here by: "
                f"rloo launch run.yaml --backend {started[0]} --nodes N --gpus_per_node M"
            )
        return found

    @property
    def unread(self) -> dict[str, dict[str, Any]]:
        """Words that are no settings, by reason: words that a comment or a missing backslash cuts
        off, and flags of the launchers."""
        given, flags, others = read_overrides([word for words in self._cut() for word in words])
        cut = {**given, **flags, **dict.fromkeys(others, "")}
        return {CUT: cut, AROUND: started_with(self.before)}

    def _cut(self) -> list[list[str]]:
        return [words for words in self.script.commands if _SETTING.match(words[0])]


def read_launch(
    source: str, mark: re.Pattern[str], program: str, settings: re.Pattern[str] | None = None
) -> LaunchCommand:
    """The single command of `program` (matched by `mark`) in a command line, or in the script at
    the path `source`. If there is none, the result is the command of another program (a fork) that
    uses the system's `settings`. Raises ValueError for no command, or for several different
    ones."""
    text, folder = _text_of(source)
    script = read_script(text, source if is_script(source) else "")
    if text.lstrip().startswith("--"):  # only flags, maybe one per line
        return LaunchCommand([word for words in script.commands for word in words], text=text)
    commands = _find(script, mark)
    if not commands and settings and (other := _programs(script, settings)):
        script.notes.append(
            f"it is started by {', '.join(other)}, not by {program}: what that does besides is not "
            "known here"
        )
        commands = _find(script, re.compile("|".join(map(re.escape, other))))
    if commands and all(words == commands[0][1] for _, words in commands):
        before, words = commands[0]
        return LaunchCommand(words, before, script, text, folder)
    number = len(commands)
    raise ValueError(
        f"{source if is_script(source) else 'the command line'}: there are {number} commands "
        f"{program}; there must be 1" + ("; give the one in quotes" if number else "")
    )


def _find(script: ShellScript, mark: re.Pattern[str]) -> list[tuple[list[str], list[str]]]:
    """The commands with `mark`. If there are none, commands in exported variables (as for
    `sbatch`), or else in functions without a call."""
    commands = find_command(script, mark)
    exported = {n: v for n, v in script.variables.items() if n in script.exported}
    for name, value in ({} if commands else exported | script.environment).items():
        if found := find_command(ShellScript(commands=[["sh", str(value)]]), mark):
            script.notes.append(f"the command is that of the variable {name}")
            commands += found
    if not commands:
        for name, uncalled in script.uncalled.items():
            if found := find_command(ShellScript(commands=uncalled), mark):
                script.notes.append(f"{name} has the command, and nothing in the script runs it")
                commands += found
    return commands


def _programs(script: ShellScript, settings: re.Pattern[str]) -> list[str]:
    """The programs of the commands that have at least two of the `settings`."""
    uncalled = [words for commands in script.uncalled.values() for words in commands]
    lines = [" ".join(words) for words in [*script.commands, *uncalled]]
    found = [program_of(line) for line in lines if len(settings.findall(line)) > 1]
    return list(dict.fromkeys(name for name in found if name))


def _text_of(source: str) -> tuple[str, Path]:
    if not is_script(source):
        return source, Path()
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).parent
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{source}: {reason}") from None


@dataclass(frozen=True)
class ComposedSettings:
    """Settings of a file and its overrides, by dotted names. `unread` are the words that are no
    settings, by reason."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    unread: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_settings(
    source: str,
    overrides: Sequence[str],
    mark: re.Pattern[str],
    program: str,
    home: str = "",
    own: re.Pattern[str] | None = None,
) -> ComposedSettings:
    """The settings of a YAML file, script or command line, with `key=value` overrides after it.
    `home` is the folder in which the program searches for a configuration file that is given by its
    name. `own` matches the system's settings. A command with such settings is accepted even if it
    runs another program (a fork). Raises ValueError for an unreadable source."""
    if is_yaml(source) and (" " not in source or Path(source).is_file()):
        values, missing = read_composed(source)
        given, flags, others = read_overrides(overrides)
        _refuse(others)
        return ComposedSettings(over(values, {**flags, **given}), _gone(missing))
    words = _overrides_alone(source)
    launch = LaunchCommand(words) if words else read_launch(source, mark, program, own)
    given, flags, words = read_overrides(launch.words)
    added, _, others = read_overrides(overrides)
    _refuse(others)
    values, notes = {}, list(launch.notes)
    if names := _config_names(flags, home):
        file = find_file(names, launch.folder)
        if file is None and flags.get("config"):
            raise ValueError(
                f"{names[0]}: no such file here; give it and what the command sets: rloo config "
                "--from SYSTEM FILE key=value ..."
            )
        if file is None:
            notes.append(f"{names[0]} is not here: what it sets has the system's default")
        else:
            values, missing = read_composed(str(file))
            notes += _gone(missing)
    settings = {name: text for name, text in flags.items() if name not in _FILE_FLAGS} | given
    chosen = {
        key: settings.pop(key)
        for key, value in list(settings.items())
        if isinstance(value, str) and any(other.startswith(f"{key}.") for other in settings)
    }
    unread = {**launch.unread, "it is no key=value": dict.fromkeys(words, "")}
    unread["it chooses one of the program's own files for a section"] = chosen
    return ComposedSettings(over(over(values, settings), added), notes, unread)


def _overrides_alone(source: str) -> list[str]:
    """The words of a command line that has only `key=value ...`; empty for any other line."""
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


def _config_names(flags: Mapping[str, str], home: str) -> list[str]:
    """The possible paths of the file that `flags` name."""
    if file := flags.get("config"):
        return [file]
    name = flags.get("config_name", "").removesuffix(".yaml")
    folder = flags.get("config_path") or flags.get("config_dir")
    near = [f"{folder or '.'}/{name}.yaml"]
    return [*near, f"{home}/{folder or 'config'}/{name}.yaml"] if name else []


def find_file(names: Sequence[str], folder: Path) -> Path | None:
    """The first existing file of `names` in the current folder, the script's folder or a folder
    above it. A leading part that is known only at run time (`$(realpath ..)/examples/x.yaml`) is
    removed."""
    folders = [Path(), *[folder.resolve(), *folder.resolve().parents][:_ABOVE]]
    paths = [Path(re.sub(r"^\$[({].*[)}]/", "", name)).expanduser() for name in names]
    return next((found for p in paths for f in folders if (found := f / p).is_file()), None)
