"""The standard streams of a process: that they are there, and what hostile text becomes on them."""

from __future__ import annotations

import os
import sys
import unicodedata
from contextlib import suppress
from typing import IO


def inert(text: str, encoding: str = "utf-8") -> str:
    """Escape every character of `text`, except newlines, that is not printable (control, direction
    override, surrogate, unassigned) or not in `encoding`. The result cannot move the cursor or set
    colours or titles, and any stream can print it."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    shown = (
        character
        if character == "\n" or unicodedata.category(character)[0] not in "CZ" or character == " "
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


IS, HAS = ("is", "are"), ("has", "have")


def counted(number: int, noun: str, verbs: tuple[str, str] = ("", "")) -> str:
    """`1 note`, `2 notes`; with verbs, of one and of several, `1 note is`, `2 notes are`."""
    verb = verbs[number != 1]
    return f"{number:,} {noun}" + ("" if number == 1 else "s") + (f" {verb}" if verb else "")


def show(text: str, stream: IO[str] | None = None) -> None:
    """Print hostile text as a line on stdout, or on `stream`, at once. Raises OSError where nobody
    reads it, such as after `| head`."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(inert(text, encoding), file=stream, flush=True)


def say(text: str, stream: IO[str] | None = None) -> None:
    """As `show`, of a command whose work is not its output: a stream that nobody reads leads
    nowhere from then on."""
    stream = stream or sys.stdout
    try:
        if stream is not None:
            show(text, stream)
    except (OSError, ValueError):  # ValueError: it is closed
        lead_nowhere(stream)


def lead_nowhere(stream: IO[str] | None) -> None:
    """Have what is still to come on a stream vanish, as that which it holds back."""
    if stream is None:
        return
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())  # ValueError: it is closed, or no file
        stream.flush()


def complete() -> None:
    """Put nothing where a standard stream of the process is closed: else the next file that it
    opens becomes its output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(number, "w" if number else "r"))
