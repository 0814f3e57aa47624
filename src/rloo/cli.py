"""usage: rloo COMMAND [config.yaml] [--option value ...]

Train language models with REINFORCE Leave-One-Out.

commands:
  train    train a model; without a config, model or dataset, run the embedded task (two minutes)
  plan     predict micro-batches, peak memory and time from one measured worst-case step; writes
           no file
  eval     measure greedy and sampled pass@1, pass@k and mean reward of a model on a dataset
  doctor   say what is wrong with a run, from its folder, or with a configuration before it is run,
           and what to change
  config   list the options that most runs set, with --all every one, or explain the one named;
           with a config or options: print the resolved configuration and what its preset means;
           with --from: convert a configuration of areal, ms-swift or trl
  vllm-serve
           start a server of vLLM as a run with these options needs it, and print its line
  check-estimator
           enumerate bias and variance of an estimator (rloo, my.py:function) on small policies and
           print "exact" or the bias as figures; the status is 0 for both, 2 for one that fails

examples:
  rloo train
  rloo train examples/gsm8k.yaml --model Qwen/Qwen3-0.6B --beta 0.02 --num_generations 8
  rloo plan examples/gsm8k.yaml --max_completion_length 1024
  rloo train examples/gsm8k.yaml --num_processes 8   # or torchrun, accelerate: -m rloo train ...
  rloo doctor runs/gsm8k   # or, before it starts: rloo doctor examples/gsm8k.yaml
  rloo train examples/gsm8k.yaml --profile   # where time and memory went: OUTPUT_DIR/profile
  rloo config num_generations
  rloo config --preset verl
  rloo config --from areal gsm8k_rloo.yaml > gsm8k.yaml
  rloo check-estimator examples/estimator.py:length_weighted
  rloo eval runs/gsm8k/config.yaml --model runs/gsm8k --eval_size null
  rloo vllm-serve examples/gsm8k.yaml --vllm_server_port 8000   # --use_peft true: with adapters
"""

# Torch is imported by the commands that need it, not here: help must not wait for it.
from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rloo import __version__
from rloo.algorithm.interrupts import Stop, Stopped
from rloo.config.aliases import our_name
from rloo.config.config import in_one_process, without_adapter
from rloo.config.functions import NotAllowed
from rloo.config.imports import IMPORTERS, import_config, render_imported
from rloo.config.launchers import check_alone, check_launch, is_launched, restart_count
from rloo.config.parsing import parse_command_line
from rloo.config.presets import describe_preset, remarks
from rloo.config.rendering import render_all, render_basic, render_option, render_resolved

EMBEDDED = Path(__file__).parent / "data" / "tasks" / "countdown.yaml"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for a run that failed, 2 for bad input, and 128
    and its number for a signal that stopped it (130: Ctrl-C)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "train": _train, "plan": _plan, "eval": _evaluate, "config": _config,
        "doctor": _doctor, "check-estimator": _check_estimator, "vllm-serve": _serve,
    }  # fmt: skip
    if not given or given[0] in ("-h", "--help", "help") or "--help" in given:
        print(__doc__, end="")
        return 0
    if given[0] == "--version":
        print(f"rloo {__version__}")
        return 0
    if given[0] not in commands:
        known = ", ".join(commands)
        print(f"rloo: {given[0]} is not a command; there are {known}", file=sys.stderr)
        return 2
    status, said, signals = 0, "", Stop()
    try:
        with signals.listening():
            try:
                status = commands[given[0]](given[1:], signals)
            except Exception:
                signals.check()  # what a signal has broken, such as an import, is no error
                raise
    except (ValueError, OSError, FloatingPointError, NotAllowed) as error:
        if getattr(error, "__notes__", None):  # raised in a user's reward: show where
            raise
        in_run = getattr(error, "in_run", False)
        # Else the reader of the output, such as `head`, has seen enough.
        if in_run or not isinstance(error, BrokenPipeError):
            refused = isinstance(error, ValueError) and not in_run
            status, said = 2 if refused else 1, str(error)
    except (KeyboardInterrupt, Stopped) as stop:
        status, said = getattr(stop, "status", INTERRUPTED), str(stop) or "interrupted"
    except SystemExit as error:  # of user code: an estimator, a callback
        place = traceback.extract_tb(error.__traceback__)[-1]
        status = 1
        said = f"{place.filename}:{place.lineno}: {place.name} called sys.exit({error.code!r})"
        said += "; what a run calls returns, or raises an Exception"
    _say(said)
    return status


def _say(text: str) -> None:
    """Print a last line on stderr. Streams that nobody reads must not change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if text and stream is sys.stderr:
                print("rloo:", " ".join(text.split()), file=stream)
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (ValueError, AttributeError):  # closed, or None
            continue


def _train(arguments: list[str], signals: Stop) -> int:
    config = parse_command_line(_with_embedded(arguments))
    if not is_launched() and ((config.num_processes or 1) > 1 or config.max_restarts > 0):
        from rloo.run.launch import launch

        return launch(arguments, config)
    check_launch(config)
    signals.usr1_saves = config.on_sigusr1 == "save"
    with signals.ending():
        from rloo.run.trainer import RLOOTrainer

        if restart_count() > 0:
            from rloo.run.launch import restarted

            config = restarted(config)
    RLOOTrainer(args=config).train()
    return 0


def _plan(arguments: list[str], signals: Stop) -> int:
    config = parse_command_line(_with_embedded(arguments))
    check_alone("plan")
    # Torch, which reads this when it is loaded, would tell of memory from before a measurement.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals.ending():
        from rloo.run.plan import make_plan, print_plan

    print_plan(make_plan(config))
    return 0


def _doctor(arguments: list[str], signals: Stop) -> int:
    words = [a for a in arguments if a[:1] != "-" and "=" not in a]
    if len(arguments) == len(words) == 1 and not words[0].endswith((".yaml", ".yml")):
        from rloo.report.doctor.folder import report

        for line in report(Path(words[0])):
            print(line)
        return 0
    config = parse_command_line(_with_embedded(arguments))
    check_alone("doctor")
    with signals.ending():
        from rloo.run.doctor import examine

    for line in examine(config, tuple(arguments)):
        print(line)
    return 0


def _evaluate(arguments: list[str], signals: Stop) -> int:
    config = parse_command_line(_with_embedded(arguments))
    check_alone("eval")
    if (config.num_processes or 1) > 1 and "num_processes" in _names(arguments):
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
    with signals.ending():
        from rloo.report.console import print_evaluation
        from rloo.run.trainer import RLOOTrainer

    trainer = RLOOTrainer(args=config)
    # A file is one split, whatever it holds.
    is_file = os.path.isfile(str(config.eval_dataset))
    split = "" if is_file else f" ({config.eval_split or 'train'})"
    temperature = config.eval_temperature or config.temperature
    print(f"{config.model} on {config.eval_dataset}{split}, temperature {temperature:g}")
    for note in trainer.policy.notes:
        print(f"note: {note}")
    print_evaluation(trainer.evaluate(metric_key_prefix=""))
    return 0


def _config(arguments: list[str], signals: Stop) -> int:
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


def _check_estimator(arguments: list[str], signals: Stop) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            "check-estimator takes a name (rloo) or a function (my.py:function), and then options "
            "of it (--estimator_kwargs.NAME VALUE)"
        )
    config = parse_command_line(["--estimator", *arguments])
    with signals.ending():
        from rloo.run.check_estimator import report

    for line in report(config):
        print(line)
    return 0


def _serve(arguments: list[str], signals: Stop) -> int:
    config = parse_command_line(arguments)
    if config.model is None:
        raise ValueError("vllm-serve needs the model that is to be served (--model)")
    with signals.ending():
        from rloo.engines.vllm.serving import SWITCHES
        from rloo.run.servers import serving_of

    rank, sleeps = config.lora_r if config.use_peft else None, bool(config.vllm_enable_sleep_mode)
    serving = serving_of(config, config.model, rank, sleeps=sleeps)
    print(serving.line(config.vllm_server_port), flush=True)
    serving.require_program()
    os.environ.update(SWITCHES)
    command = serving.command(port=config.vllm_server_port)
    os.execvp(command[0], command)


def _import(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise ValueError(
            f"--from takes a system ({', '.join(IMPORTERS)}) and its file, or for ms-swift its "
            "command line in quotes"
        )
    system, source = arguments
    print(render_imported(system, import_config(system, source)), end="")
    return 0


def _with_embedded(arguments: list[str]) -> list[str]:
    """Put the embedded task's configuration first unless the user names a config, model or data."""
    names = _names(arguments)
    own_file = "config" in names or any(a.endswith((".yaml", ".yml")) for a in arguments)
    if own_file or names & {"model", "dataset", "eval_dataset"}:
        return arguments
    return [str(EMBEDDED), *arguments]


def _names(arguments: list[str]) -> set[str]:
    """Our names of the options on a command line."""
    given = {a.lstrip("-").partition("=")[0].replace("-", "_") for a in arguments if a[:1] == "-"}
    given |= {a.partition("=")[0] for a in arguments if "=" in a}
    return {our_name(name) for name in given}


if __name__ == "__main__":
    sys.exit(main())
