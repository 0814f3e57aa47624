"""The standard streams of a process: functions that reopen closed streams and print untrusted text
escaped."""

from __future__ import annotations

import os
import sys
import unicodedata
from contextlib import suppress
from typing import IO


def inert(text: str, encoding: str = "utf-8") -> str:
    """Escape every character of `text`, except newlines, that is not printable (control, direction
    override, surrogate, unassigned) or not in `encoding`. The result cannot move a terminal's
    cursor or set colours or titles. Any stream can print the result."""
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
    """A number and its noun: `1 note`, `2 notes`; with verbs (singular, plural) `1 note is`,
    `2 notes are`."""
    verb = verbs[number != 1]
    return f"{number:,} {noun}" + ("" if number == 1 else "s") + (f" {verb}" if verb else "")


def show(text: str, stream: IO[str] | None = None) -> None:
    """Print untrusted text, escaped, as a line on stdout or `stream`, and flush. Raises OSError if
    the reader is gone, such as after `| head`."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(inert(text, encoding), file=stream, flush=True)


def say(text: str, stream: IO[str] | None = None) -> None:
    """Print as `show` does, but ignore errors. A stream whose reader is gone is redirected to
    /dev/null. This function is for commands whose purpose is not their output."""
    stream = stream or sys.stdout
    try:
        if stream is not None:
            show(text, stream)
    except (OSError, ValueError):  # ValueError: the stream is closed
        lead_nowhere(stream)


def lead_nowhere(stream: IO[str] | None) -> None:
    """Redirect a stream to /dev/null, including its buffered text."""
    if stream is None:
        return
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())  # ValueError: closed, or without a descriptor
        stream.flush()


def complete() -> None:
    """Open /dev/null for every closed standard stream. Otherwise the next file that the process
    opens would become its output."""
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
