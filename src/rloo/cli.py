"""The command `rloo`: `rloo.config.help_text` says what it does."""

# Torch is imported by the commands that need it, not here: help must not wait for it.
from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo import __version__
from rloo.addons.importers import IMPORTERS, import_config, render_imported
from rloo.algorithm.stop_signals import Stopped, StopSignals
from rloo.config.config import RLOOConfig, in_one_process, without_adapter
from rloo.config.fields import config_errors, suggest
from rloo.config.help_text import overview, usage_of
from rloo.config.launcher_env import check_alone, check_launch, is_launched, restart_count
from rloo.config.parsing import given_names, parse_command_line
from rloo.config.presets import describe_preset, remarks
from rloo.config.show import render_all, render_basic, render_option, render_resolved
from rloo.config.user_functions import NotAllowed
from rloo.distributed import process_rank
from rloo.distributed.process_exit import no_silent_end
from rloo.distributed.standard_streams import complete, lead_nowhere, say, show
from rloo.distributed.user_traceback import is_users, of_the_user
from rloo.trainer.preflight import check_inputs, check_merge

EMBEDDED = Path(__file__).parent / "data" / "tasks" / "countdown.yaml"
INTERRUPTED = 130
# Whoever names one of these has a task of their own.
OWN = {"config", "model", "dataset", "eval_dataset"}
# The commands whose work is what they print.
SHOWING = ("plan", "eval", "config", "check-estimator", "doctor", "status")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a run that failed, 2 for bad input, and 128
    and its number for a signal that stopped it (130: Ctrl-C)."""
    complete()
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "train": _train, "plan": _plan, "eval": _evaluate, "config": _config, "merge": _merge,
        "check-estimator": _check_estimator, "vllm-serve": _serve, "report": _report,
        "doctor": _doctor, "worker": _worker, "launch": _launch, "status": _status,
        "stop": _stop,
    }  # fmt: skip
    if not given or given[0] in ("-h", "--help", "help"):
        if not set(given[1:2]) & commands.keys():
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
    if "--help" in given or "-h" in given:
        print(usage_of(given[0], everything="all" in given), end="")
        return 0
    status, said, signals = 0, "", StopSignals()
    try:
        with signals.handling(), _brief_warnings():
            try:
                status = commands[given[0]](given[1:], signals)
            except Exception:
                signals.check()  # what a signal has broken, such as an import, is no error
                raise
    except Exception as error:
        status, told = _told(error, given[0])
        if told is None:
            raise
        said = told
    except (KeyboardInterrupt, Stopped) as stop:
        status, said = getattr(stop, "status", INTERRUPTED), _line(str(stop) or "interrupted")
    except SystemExit as error:  # of user code: an estimator, a callback
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{place.filename}:{place.lineno}: {place.name} called sys.exit({error.code!r})"
        status, said = 1, _line(f"{said}; what a run calls returns, or raises an Exception")
    _say(said)
    return status


def _told(error: Exception, command: str) -> tuple[int, str | None]:
    """The status that an error ends a command with, and what to say of it: where it came from code
    of the user's the traceback of that, else one line. None: no input is at fault, but the program.
    """
    in_run = getattr(error, "in_run", False)
    if shown := of_the_user(error):
        return 1, shown
    if not isinstance(error, (ValueError, OSError, FloatingPointError, NotAllowed)):
        return 1, None
    if isinstance(error, BrokenPipeError) and not in_run and command in SHOWING:
        return 0, ""  # the reader of the output, such as `head`, has seen enough
    said = "\n".join(map(_line, config_errors(error)))
    return 2 if isinstance(error, ValueError) and not in_run else 1, said


@contextmanager
def _brief_warnings() -> Iterator[None]:
    """Inside, a warning is a line without the place in the program that it comes from, unless that
    is code of the user's."""
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
    """Print a last text on stderr. Streams that nobody reads must not change the status."""
    if text:
        say(text, sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None
            lead_nowhere(stream)


def _train(arguments: list[str], signals: StopSignals) -> int:
    config = _configured(arguments)
    check_inputs(config)
    if not is_launched() and ((config.num_processes or 1) > 1 or config.max_restarts > 0):
        from rloo.addons.launch.local_ranks import launch

        return launch(arguments, config)
    check_launch(config)
    if process_rank() == 0:
        say(f"rloo {__version__}: training {config.model} on {config.dataset}")
    signals.usr1_saves = config.on_sigusr1 == "save"
    with no_silent_end("the run"):
        with signals.ending():
            from rloo.trainer.trainer import RLOOTrainer

            if restart_count() > 0:
                from rloo.addons.launch.local_ranks import restarted

                config = restarted(config)
        RLOOTrainer(args=config).train()
    return 0


def _plan(arguments: list[str], signals: StopSignals) -> int:
    from rloo.addons.planner.gpu.gpu_plan_command import asks_for_gpus, plan_gpus

    if asks_for_gpus(arguments):
        with signals.ending():
            plan_gpus(arguments)
        return 0
    config = _configured(arguments)
    check_inputs(config)
    check_alone("plan")
    # Torch, which reads this when it is loaded, would tell of memory from before a measurement.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals.ending():
        from rloo.addons.planner.plan import make_plan, print_plan

    print_plan(make_plan(config))
    return 0


def _doctor(arguments: list[str], signals: StopSignals) -> int:
    words = [a for a in arguments if a[:1] != "-" and "=" not in a]
    if len(arguments) == len(words) == 1 and not words[0].endswith((".yaml", ".yml")):
        from rloo.addons.report.doctor.doctor_command import report

        for line in report(Path(words[0])):
            show(line)
        return 0
    config = _configured(arguments)
    check_alone("doctor")
    with signals.ending():
        from rloo.addons.report.doctor.dry_run import examine

    for line in examine(config, tuple(arguments)):
        show(line)
    return 0


def _evaluate(arguments: list[str], signals: StopSignals) -> int:
    config = _configured(arguments)
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
    # A file is one split, whatever it holds.
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
        return _import([value, *arguments[1:]] if value else arguments[1:])
    config = parse_command_line(arguments)
    # As comments, so that the output is a valid configuration file.
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


def _report(arguments: list[str], signals: StopSignals) -> int:
    from rloo.addons.report.html.report_command import report

    return report(arguments)


def _serve(arguments: list[str], signals: StopSignals) -> int:
    # A run of `rloo launch` has servers of what its file comes to.
    of_run = "config" in given_names(arguments)
    config = parse_command_line(arguments, str(EMBEDDED) if of_run else None)
    if config.model is None:
        raise ValueError("vllm-serve needs the model that is to be served (--model)")
    with signals.ending():
        from rloo.trainer.remote_engines import serve

    serve(config, config.model, named="vllm_server_host" in given_names(arguments))
    return 0  # it has become the server


def _launch(arguments: list[str], signals: StopSignals) -> int:
    from rloo.addons.launch import local_backend, ray_backend, slurm_backend
    from rloo.addons.launch.cluster import read_cluster
    from rloo.addons.launch.roles import check_again, make_job

    check_alone("launch")
    cluster, left, shown = read_cluster(arguments)
    by_slurm = cluster.backend == "slurm"
    job = make_job(
        cluster, _launched(left), slurm_backend.FOLDER if by_slurm else None, str(EMBEDDED)
    )
    check_inputs(job.config)
    if cluster.backend == "local":
        if not shown:
            return local_backend.run_here(job)
        print(local_backend.script(job), end="")
        return 0
    check_again(job)
    if shown:
        print(slurm_backend.shown(job) if by_slurm else ray_backend.script(job), end="")
        return 0
    return slurm_backend.submit(job) if by_slurm else ray_backend.run(job, signals)


def _status(arguments: list[str], signals: StopSignals) -> int:
    from rloo.addons.launch.run_status import status

    for line in status(_folder("status", arguments)):
        show(line)
    return 0


def _stop(arguments: list[str], signals: StopSignals) -> int:
    from rloo.addons.launch.run_status import stop

    for line in stop(_folder("stop", arguments)):
        say(line)
    return 0


def _folder(command: str, arguments: list[str]) -> Path:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise ValueError(f"{command} takes the folder of a run (its output_dir)")
    return Path(arguments[0])


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


def _import(arguments: list[str]) -> int:
    if len(arguments) < 2:
        raise ValueError(
            f"--from takes a system ({', '.join(IMPORTERS)}) and its file, script, or command line"
            " in quotes, and then overrides as that system takes them"
        )
    system, source, *overrides = arguments
    print(render_imported(system, import_config(system, source, overrides)), end="")
    return 0


def _launched(arguments: list[str]) -> list[str]:
    """`arguments` as processes elsewhere are started with, which need a file that they see."""
    return arguments if given_names(arguments) & OWN else [str(EMBEDDED), *arguments]


def _configured(arguments: list[str]) -> RLOOConfig:
    """The configuration that is asked for, over the embedded task's where no model and no data are
    named."""
    return parse_command_line(arguments, str(EMBEDDED))


if __name__ == "__main__":
    sys.exit(main())
