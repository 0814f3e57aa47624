"""`rloo report FOLDER [FOLDER ...] [--output FILE] [--follow [--port N]]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo.addons.report.html.document import data_of, write_page
from rloo.addons.report.html.server import HOST, server_of
from rloo.algorithm.stop_signals import StopSignals
from rloo.distributed.standard_streams import say
from rloo.tracking.jsonl import PAGE

USAGE = "rloo report FOLDER [FOLDER ...] [--output FILE] [--follow [--port N]]"


def report(arguments: Sequence[str], signals: StopSignals) -> int:
    """Write the report of one run into its folder, of several runs into the working directory, or
    to `--output`. With `--follow`, serve the report until Ctrl-C instead. Raises ValueError for
    unknown arguments."""
    folders, options = _parse(arguments)
    if "follow" in options:
        data_of(folders)  # raises now for a folder without a run
        _serve(folders, int(options.get("port", "0")))
        return 0
    of_one = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    say(str(write_page(folders, Path(options.get("output", of_one)))))
    return 0


def _serve(folders: Sequence[Path], port: int) -> None:
    with server_of(folders, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _parse(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    folders: list[Path] = []
    options: dict[str, str] = {}
    left = list(arguments)
    while left:
        name, is_given, value = left.pop(0).partition("=")
        if not name.startswith("-"):
            folders.append(Path(name + is_given + value))
        elif name == "--follow" and not is_given:
            options["follow"] = ""
        elif name in ("--output", "--port") and (is_given or left):
            options[name[2:]] = value if is_given else left.pop(0)
        else:
            raise ValueError(f"report does not know {name}, or it lacks a value; {USAGE}")
    if not folders:
        raise ValueError(f"report needs the folder of a run; {USAGE}")
    if not options.get("port", "0").isdecimal() or int(options.get("port", "0")) > 65535:
        raise ValueError(f"--port {options['port']} is no port (0 to 65535)")
    if "port" in options and "follow" not in options:
        raise ValueError("--port is for --follow, which serves the report")
    if "output" in options and "follow" in options:
        raise ValueError("--follow writes no file (--output)")
    return folders, options
