"""The command `rloo`. Its help texts are in `rloo.config.help_text`."""

# Only the commands that need torch import it, so that help is fast.
from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo import __version__, plugins
from rloo.algorithm.stop_signals import Stopped, StopSignals
from rloo.config.config import in_one_process, without_adapter
from rloo.config.fields import config_errors, suggest
from rloo.config.help_text import overview, usage_of, usage_of_plugin
from rloo.config.launcher_env import check_alone, check_launch, is_launched, restart_count
from rloo.config.parsing import given_names, parse_command_line
from rloo.config.presets import describe_preset, remarks
from rloo.config.show import render_all, render_basic, render_option, render_resolved
from rloo.config.user_functions import NotAllowed
from rloo.data.tasks import EMBEDDED_FILE
from rloo.distributed import process_rank
from rloo.distributed.process_exit import no_silent_end
from rloo.distributed.standard_streams import complete, lead_nowhere, say, show
from rloo.distributed.user_traceback import is_users, of_the_user
from rloo.trainer.preflight import check_inputs, check_merge, read_options

EMBEDDED = EMBEDDED_FILE
INTERRUPTED = 130
NAMES = (
    "train", "plan", "eval", "config", "chat", "merge", "check-estimator", "vllm-serve", "report",
    "doctor", "worker", "launch", "status", "stop", "env",
)  # fmt: skip
Command = Callable[[list[str], StopSignals], int | None]
# Commands whose output is their only result.
SHOWING = ("plan", "eval", "config", "chat", "check-estimator", "doctor", "status", "env")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 1 for a run that failed, 2 for bad input, and
    128 plus the signal's number if a signal stopped the command (130: Ctrl-C)."""
    complete()
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = [*NAMES, *plugins.of_others("commands")]
    if not given or given[0] in ("-h", "--help", "help"):
        if not set(given[1:2]) & set(commands):
            print(overview(), end="")
            return 0
        given = [given[1], "--help", *given[2:]]
    if given[0] == "--version":
        print(f"rloo {__version__}")
        return 0
    if given[0] not in commands:
        known = ", ".join(commands)
        near = suggest(given[0], commands)
        say(f"rloo: {given[0]} is not a command; there are {known}{near}", sys.stderr)
        return 2
    run = _help if "--help" in given or "-h" in given else _run
    status, said, signals = 0, "", StopSignals()
    try:
        with signals.handling(), _brief_warnings():
            try:
                status = run(given, signals) or 0
            except Exception:
                signals.check()  # a signal may have caused the error
                raise
            except SystemExit as error:
                if isinstance(error.__context__, BrokenPipeError):
                    raise error.__context__ from None  # rich exits if a reader closed the pipe
                raise
    except Exception as error:
        status, told = _told(error, given[0])
        if told is None:
            raise
        said = told
    except (KeyboardInterrupt, Stopped) as stop:
        status, said = getattr(stop, "status", INTERRUPTED), _line(str(stop) or "interrupted")
    except SystemExit as error:  # raised by user code: an estimator, a callback
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{place.filename}:{place.lineno}: {place.name} called sys.exit({error.code!r})"
        status, said = 1, _line(f"{said}; what a run calls returns, or raises an Exception")
    _say(said)
    return status


def _run(given: list[str], signals: StopSignals) -> int | None:
    own: dict[str, Command] = {
        "train": _train, "eval": _evaluate, "config": _config, "merge": _merge,
        "check-estimator": _check_estimator, "worker": _worker,
    }  # fmt: skip
    command: Command = own.get(given[0]) or plugins.load("commands", given[0])
    try:
        return command(given[1:], signals)
    except ValueError as error:
        if given[0] in NAMES:
            raise
        raise ValueError(str(error)) from None  # no traceback, as for built-in commands


def _help(given: list[str], signals: StopSignals) -> int:
    if given[0] in NAMES:
        print(usage_of(given[0], everything="all" in given), end="")
    else:
        print(usage_of_plugin(given[0], plugins.load("commands", given[0])), end="")
    return 0


def _told(error: Exception, command: str) -> tuple[int, str | None]:
    """The exit status for an error and the text to print: a traceback if user code raised the
    error, else one line. The text is None if the error is a bug in this package.
    """
    in_run = getattr(error, "in_run", False)
    if shown := of_the_user(error):
        return 1, shown
    if not isinstance(error, (ValueError, OSError, FloatingPointError, NotAllowed)):
        return 1, None
    if isinstance(error, BrokenPipeError) and not in_run and command in SHOWING:
        return 0, ""  # the reader of the output, such as `head`, closed the pipe
    said = "\n".join(map(_line, config_errors(error)))
    return 2 if isinstance(error, ValueError) and not in_run else 1, said


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """In this context, a warning is one line without file and line number, unless user code issued
    the warning."""
    usual = warnings.formatwarning

    def told(message: Any, category: Any, filename: str, *place: Any) -> str:
        if is_users(filename):
            return usual(message, category, filename, *place)
        return f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = told  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _line(text: str) -> str:
    return f"rloo: {' '.join(text.split())}"


def _say(text: str) -> None:
    """Print a last text on stderr, and flush. Closed streams do not change the exit status."""
    if text:
        say(text, sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None
            lead_nowhere(stream)


def _train(arguments: list[str], signals: StopSignals) -> int:
    config = read_options(arguments)
    check_inputs(config)
    if not is_launched() and ((config.num_processes or 1) > 1 or config.max_restarts > 0):
        status: int = plugins.load("parts", "start_ranks")(arguments, config)
        return status
    check_launch(config)
    if process_rank() == 0:
        say(f"rloo {__version__}: training {config.model} on {config.dataset}")
    signals.usr1_saves = config.on_sigusr1 == "save"
    with no_silent_end("the run"):
        with signals.ending():
            from rloo.trainer.trainer import RLOOTrainer

            if restart_count() > 0:
                from rloo.trainer.rank_output import restarted

                config = restarted(config)
        RLOOTrainer(args=config).train()
    return 0


def _evaluate(arguments: list[str], signals: StopSignals) -> int:
    config = read_options(arguments)
    check_alone("eval")
    if (config.num_processes or 1) > 1 and "num_processes" in given_names(arguments):
        raise ValueError(
            f"num_processes is {config.num_processes}; an evaluation is not divided among "
            "processes in this version: leave it out (num_processes)"
        )
    own_set = config.eval_dataset is not None or config.eval_split is not None
    # Evaluation needs no estimator, reference, gradients, new adapter, training data or processes.
    config = in_one_process(without_adapter(config)).with_values(
        estimator="composed",
        estimator_kwargs=None,
        beta=0.0,
        gradient_checkpointing=False,
        report_to="none",
        eval_dataset=config.eval_dataset or config.dataset,
        eval_split=config.eval_split if own_set else config.dataset_split,
        dataset=None,
    )
    check_inputs(config, trains=False)
    # A file counts as one split.
    is_file = os.path.isfile(str(config.eval_dataset))
    split = "" if is_file else f" ({config.eval_split or 'train'})"
    temperature = config.eval_options.temperature or config.temperature
    what = f"{config.model} on {config.eval_dataset}{split}, temperature {temperature:g}"
    show(what)
    with signals.ending():
        from rloo.tracking.console import print_evaluation
        from rloo.trainer.trainer import RLOOTrainer

    trainer = RLOOTrainer(args=config)
    for note in trainer.policy.notes:
        show(f"note: {note}")
    print_evaluation(trainer.evaluate(metric_key_prefix=""))
    return 0


def _config(arguments: list[str], signals: StopSignals) -> int:
    if arguments in ([], ["--all"]):
        print(render_all() if arguments else render_basic(), end="")
        return 0
    explained = render_option(arguments[0].replace("-", "_")) if len(arguments) == 1 else None
    if explained:
        print(explained, end="")
        return 0
    first, _, value = arguments[0].partition("=")
    if first == "--from":
        convert = plugins.load("parts", "config --from")
        print(convert([value, *arguments[1:]] if value else arguments[1:]), end="")
        return 0
    config = parse_command_line(arguments)
    # Comments, so that the output is a valid configuration file.
    meaning = describe_preset(config.preset) if config.preset else []
    for line in dict.fromkeys([*meaning, *(f"warning: {remark}" for remark in remarks(config))]):
        print(f"# {line}")
    print(render_resolved(config), end="")
    return 0


def _check_estimator(arguments: list[str], signals: StopSignals) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            "check-estimator takes a name (rloo) or a function (my.py:function), and then options "
            "of it (--estimator_kwargs.NAME VALUE)"
        )
    config = parse_command_line(["--estimator", *arguments])
    with signals.ending():
        from rloo.tools.check_estimator import report

    for line in report(config):
        show(line)
    return 0


def _worker(arguments: list[str], signals: StopSignals) -> int:
    from rloo.distributed.remote_worker import KINDS, work

    match arguments:
        case [kind, folder] if kind in KINDS:
            patience = "1800"
        case [kind, folder, "--patience", patience] if kind in KINDS and patience.isdigit():
            pass
        case _:
            raise ValueError(
                "worker takes what it does, sample or score, and the run's output_dir: "
                "rloo worker sample FOLDER [--patience SECONDS]"
            )
    with signals.ending():
        work(kind, Path(folder), patience=float(patience))
    return 0


def _merge(arguments: list[str], signals: StopSignals) -> int:
    folder, out, *options = [*arguments, "", ""][: max(2, len(arguments))]
    if not folder or not out or folder.startswith("-") or out.startswith("-"):
        raise ValueError(
            "merge takes the folder of an adapter and the folder for the merged model: "
            "rloo merge FOLDER OUT"
        )
    unknown = given_names(options) - {"save_dtype", "trust_remote_code"}
    if unknown:
        raise ValueError(f"merge takes save_dtype and trust_remote_code, not {sorted(unknown)[0]}")
    config = parse_command_line(["--model", folder, "--output_dir", out, *options])
    check_merge(config)
    say(f"Merging {folder} into its base")
    with signals.ending():
        from rloo.tools.merge_lora import merge

    for line in merge(config):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
