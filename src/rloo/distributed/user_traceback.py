"""Tracebacks reduced to the user's code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_OURS = os.path.join(Path(__file__).resolve().parent.parent, "")
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    os.path.join(_PATHS[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def of_the_user(error: BaseException) -> str | None:
    """The traceback of `error` from the first frame of the user's code on, without this package's
    frames. The error and its notes follow. None if no frame is user code and the error has no
    notes."""
    whole = traceback.TracebackException.from_exception(error)
    if not getattr(error, "__notes__", None) and not any(is_users(f.filename) for f in whole.stack):
        return None
    part: traceback.TracebackException | None = whole
    seen = set()
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        frames = list(part.stack)
        first = next((n for n, frame in enumerate(frames) if is_users(frame.filename)), len(frames))
        kept = [frame for frame in frames[first:] if not frame.filename.startswith(_OURS)]
        part.stack = traceback.StackSummary.from_list(kept) if kept else None  # type: ignore[assignment]
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format()).rstrip()


def is_users(name: str) -> bool:
    """Whether a frame's file is user code, neither of this package nor of a library."""
    return not name.startswith((_OURS, *_LIBRARIES)) and not (name[:1] == "<" and name != "<stdin>")
