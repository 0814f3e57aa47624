"""Options of sbatch and srun: which texts are refused, and how the others are quoted."""

from __future__ import annotations

import re
import shlex

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
# sbatch takes a directive with one of these words for the border of a heterogeneous job.
_BORDER = re.compile("hetjob|packjob", re.IGNORECASE)


def unsafe(text: str) -> str | None:
    """The reason why a directive cannot contain `text`, or None."""
    if _CONTROL.search(text):
        return "a directive of sbatch is one line without control characters"
    if found := _BORDER.search(text):
        return f"sbatch reads {found[0]} in a directive as the border of a heterogeneous job"
    return None


def directive(name: str, value: object) -> str:
    """An option of sbatch in the form of a directive (the text after `#SBATCH`), quoted if
    necessary."""
    return f"--{name}={_quoted(str(value))}"


def directives(option: str) -> str:
    """One entry of `slurm.options` in the form of a directive, quoted if necessary."""
    return " ".join(map(_quoted, split_option(option)))


def split_option(text: str) -> list[str]:
    """The words of an option that is written as in a shell: `--exclusive`, `-p gpu`,
    `--comment='a b'`. Raises ValueError for other text."""
    if reason := unsafe(text):
        raise ValueError(reason)
    words = shlex.split(text)
    before = ""
    for word in words or [""]:
        # A word without a dash can only be the value of the option before it.
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            raise ValueError(f"{word!r} is no option; quote a value with spaces: --comment='a b'")
        before = word
    return words


def _quoted(text: str) -> str:
    """A word for sbatch. sbatch reads the quotes of a shell, but a backslash escapes the next
    character inside quotes too."""
    return shlex.quote(text).replace("\\", "\\\\")
