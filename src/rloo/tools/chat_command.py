"""`rloo chat FOLDER [--system TEXT] [--greedy] [--option value ...]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rloo.algorithm.stop_signals import StopSignals
from rloo.config.config import RLOOConfig, in_one_process, without_adapter
from rloo.config.parsing import given_names, parse_command_line
from rloo.distributed.standard_streams import inert, say
from rloo.trainer.preflight import check_model

USAGE = "rloo chat FOLDER [--system TEXT] [--greedy] [--option value ...]"
# The options of a run that a chat uses.
OPTIONS = (
    "max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "stop_strings", "generation_kwargs", "seed", "chat_template", "chat_template_kwargs",
    "load_in_4bit", "load_in_8bit", "model_init_kwargs", "trust_remote_code", "use_cpu",
)  # fmt: skip
# Options that have no effect on greedy replies.
DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
RUN_FILE = "config.yaml"


def chat(arguments: Sequence[str], signals: StopSignals) -> int:
    """Read turns from stdin, print the replies to stdout, and everything else to stderr. Returns 1
    if a turn in a pipe got no reply. Raises ValueError for unknown arguments, and for a folder
    without a model."""
    folder, options, system, greedy = _parse(arguments)
    config, file = config_of(folder, options)
    check_model(config.model, config.model_init_kwargs)
    with signals.ending():
        from rloo.tools.chat import Chat

        talk = Chat(config, system=system, greedy=greedy)
    for line in _header(config, file, greedy=greedy, has_template=talk.has_template):
        say(line, sys.stderr)
    failed = False
    for turn in _turns():
        if turn == "/reset":
            talk.reset()
            continue
        try:
            talk.reply(turn, _write)
            _write("\n")
        except ValueError as error:
            failed = True
            say(f"rloo: {error}", sys.stderr)
    return int(failed and not sys.stdin.isatty())


def config_of(folder: str, options: list[str]) -> tuple[RLOOConfig, Path | None]:
    """The configuration for a chat with the model in `folder`: the run's, from the config.yaml in
    the folder or, for a checkpoint, in the folder above, with the `options` of the command line.
    Without such a file, the defaults. Also returns the path of the file. Raises ValueError for
    options that a chat does not use."""
    unused = {name.split(".")[0] for name in given_names(options)} - {*OPTIONS}
    if unused:
        raise ValueError(
            f"chat does not use {sorted(unused)[0]}; its options: {', '.join(OPTIONS)}"
        )
    places = [Path(folder).expanduser() / RUN_FILE, Path(folder).expanduser().parent / RUN_FILE]
    if not places[0].parent.name.startswith("checkpoint-"):
        places.pop()
    file = next((place for place in places if place.is_file()), None)
    line = ["--model", folder]
    if file is not None:
        # The run's are written into its other options, which the command line may override.
        ended_by = (parse_command_line([str(file)]).generation_kwargs or {}).get("eos_token_id")
        kept = None if ended_by is None else {"eos_token_id": ended_by}
        line = [str(file), *line, "--generation_kwargs", json.dumps(kept)]
    config = parse_command_line([*line, *options])
    return in_one_process(without_adapter(config)), file


def _header(
    config: RLOOConfig, file: Path | None, *, greedy: bool, has_template: bool
) -> Iterator[str]:
    drawn = "greedy" if greedy else f"temperature {config.temperature:g}, top_p {config.top_p:g}"
    source = "the defaults" if file is None else str(file)
    yield (
        f"{config.model}: {drawn}, at most {config.max_completion_length:,} tokens, from {source}; "
        "/reset forgets the conversation, /exit ends it"
    )
    if not has_template:
        yield (
            "note: its tokenizer has no chat template: it continues each line, and knows no other "
            "line"
        )
    if config.tools or config.environment_factory:
        yield "note: the tools and environments of the run are not called here"


def _turns() -> Iterator[str]:
    """The turns on stdin: one per line, or per lines that end with a backslash."""
    with suppress(ImportError):
        import readline  # noqa: F401 # input() can then edit the line
    prompt, text = "> " if sys.stdin.isatty() else "", ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            line = "/exit" if not text else ""
        if line.endswith("\\"):
            text += f"{line[:-1]}\n"
            continue
        turn, text = text + line, ""
        if turn == "/exit":
            return
        if turn.strip():
            yield turn


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(inert(text, encoding))
    sys.stdout.flush()


def _parse(arguments: Sequence[str]) -> tuple[str, list[str], str | None, bool]:
    """The folder, the options of the configuration, the system message, and whether the replies are
    greedy."""
    folder, left, options = "", list(arguments), []
    system, greedy = None, False
    if left and not left[0].startswith("-"):
        folder = left.pop(0)
    while left:
        name, is_given, value = left.pop(0).partition("=")
        if name == "--greedy" and not is_given:
            greedy = True
        elif name == "--system" and (is_given or left):
            system = value if is_given else left.pop(0)
        else:
            options.append(name + is_given + value)
    if not folder:
        raise ValueError(f"chat needs the folder of a model, first; {USAGE}")
    if greedy and (idle := sorted(given_names(options) & {*DRAWN})):
        raise ValueError(f"--greedy chooses the most likely tokens; leave out it or {idle[0]}")
    return folder, options, system, greedy
