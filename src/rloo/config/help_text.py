"""The texts of `rloo --help` and `rloo COMMAND --help`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rloo import plugins
from rloo.config.show import column, render_all, render_basic

_OPTIONS = "[config.yaml] [--option value ...]"


@dataclass(frozen=True)
class CommandHelp:
    """The help of a command: arguments, purpose, examples, and whether it accepts options."""

    arguments: str
    does: str
    examples: tuple[str, ...]
    takes_options: bool = True


COMMANDS = {
    "train": CommandHelp(
        _OPTIONS,
        "train a model; without a config, model or dataset, run the embedded task (two minutes)",
        (
            "rloo train",
            "rloo train examples/gsm8k.yaml --model Qwen/Qwen3-0.6B --lr 1e-6 -k 8 -o runs/mine",
            "rloo train -m FOLDER -d problems.jsonl -r my_reward.py:score format",
            "rloo train examples/gsm8k.yaml --num_processes 8   # or torchrun, accelerate: -m rloo",
            "rloo train examples/gsm8k.yaml --profile   # where time and memory went",
        ),
    ),
    "launch": CommandHelp(
        "[config.yaml] [--backend local | slurm] [--cluster cluster.yaml] [--option value ...]",
        "start the processes that train, sample, serve and score, on this machine or with Slurm, "
        "and restart processes that die; with --dry_run only show commands, environments and files",
        (
            "rloo launch examples/gsm8k.yaml --trainer_gpus 2 --engine_gpus 2",
            "rloo launch examples/gsm8k.yaml --backend slurm --cluster cluster.yaml --dry_run",
        ),
    ),
    "status": CommandHelp(
        "FOLDER",
        "show the state of the run with this output_dir: step, reward, speed, remaining time, "
        "processes and failures; works on any machine with access to the folder",
        ("rloo status runs/gsm8k",),
        takes_options=False,
    ),
    "stop": CommandHelp(
        "FOLDER",
        "make the run with this output_dir save and stop, on all machines, and wait for its end",
        ("rloo stop runs/gsm8k",),
        takes_options=False,
    ),
    "plan": CommandHelp(
        f"{_OPTIONS} [--num_gpus N --gpu NAME ...]",
        "predict micro-batches, peak memory, and the expected and the longest time, from "
        "measurements of less than a minute; calls no reward and leaves no file. With --num_gpus N "
        "(1 to 1,024), or with --cluster and a file of rloo launch, and --gpu h100, rtx4090 or "
        "another of the table in docs/scaling.md: predict a configuration, tokens/s, "
        "memory and cost (--gpu_price) on GPUs that this machine does not have, from counted "
        "operations and published figures; --parameters 7B replaces --model; --prompt_tokens, "
        "--completion_tokens, --training_share and the other printed rates can be set "
        "(docs/scaling.md)",
        (
            "rloo plan examples/gsm8k.yaml --max_completion_length 1024",
            "rloo plan --num_gpus 64 --gpu h100 --gpu_price 2.5 --parameters 7B --num_prompts 512 "
            "--num_generations 8 --max_completion_length 4096",
        ),
    ),
    "eval": CommandHelp(
        _OPTIONS,
        "measure greedy and sampled pass@1, pass@k and mean reward of a model on a dataset",
        (
            "rloo eval runs/gsm8k/config.yaml --model runs/gsm8k --eval_size null",
            "rloo eval -m FOLDER --eval_dataset test.jsonl -r exact_match",
        ),
    ),
    "chat": CommandHelp(
        "FOLDER [--system TEXT] [--greedy] [--option value ...]",
        "talk to the model, checkpoint or LoRA adapter in FOLDER, with the run's chat template and "
        "sampling options, which the command line overrides (--temperature, --top_p, "
        "--max_completion_length, --stop_strings, ...); reads a turn from each line of stdin, "
        "/reset and /exit, and a line that ends with a backslash goes on in the next",
        (
            "rloo chat runs/gsm8k --system 'Be brief.'",
            "echo 'What is 7 x 8?' | rloo chat runs/gsm8k/checkpoint-100 --greedy",
        ),
        takes_options=False,
    ),
    "merge": CommandHelp(
        "FOLDER OUT [--save_dtype float32 | bfloat16 | float16]",
        "merge the LoRA adapter in FOLDER into its base model and write the result to the folder "
        "OUT, which from_pretrained and servers can load",
        ("rloo merge runs/lora merged", "rloo merge runs/lora merged --save_dtype bfloat16"),
        takes_options=False,
    ),
    "doctor": CommandHelp(
        "FOLDER | [config.yaml] [--option value ...]",
        "find problems of a run (by its folder) or of a configuration (before a run), and show "
        "what to change",
        ("rloo doctor runs/gsm8k", "rloo doctor examples/gsm8k.yaml"),
        takes_options=False,
    ),
    "report": CommandHelp(
        "FOLDER [FOLDER ...] [--follow]",
        "write report.html of a run's folder, or of several folders to compare the runs; with "
        "--follow serve the report on 127.0.0.1 during the run",
        ("rloo report runs/a runs/b   # curves overlaid, and the options that differ",),
        takes_options=False,
    ),
    "config": CommandHelp(
        "[NAME | --all | config.yaml --option value ... | --from SYSTEM FILE]",
        "list the options that most runs set, or with --all all options; with NAME: explain one "
        "option; with a config or options: print the resolved configuration and the meaning of its "
        "preset; with --from: convert a file, script or command line of areal, ms-swift, nemo_rl, "
        "openrlhf, trl or verl; overrides in the syntax of that system may follow",
        (
            "rloo config num_generations",
            "rloo config --preset verl",
            "rloo config --from areal gsm8k_rloo.yaml gconfig.n_samples=8 > gsm8k.yaml",
            "rloo config --from verl run_qwen2-7b.sh > run.yaml",
        ),
        takes_options=False,
    ),
    "vllm-serve": CommandHelp(
        _OPTIONS,
        "start a vLLM server for a run with these options, which need no rollout_engine; print the "
        "server's address, whether it requires a key (VLLM_API_KEY), and its command line",
        ("rloo vllm-serve examples/gsm8k.yaml --vllm_server_port 8000 --use_peft true",),
    ),
    "worker": CommandHelp(
        "sample | score FOLDER [--patience SECONDS]",
        "sample completions, or call reward functions, for the run with this output_dir, until the "
        "run ends (remote_workers); give up if no run answers for --patience seconds (default "
        "1800)",
        ("rloo worker sample runs/gsm8k",),
        takes_options=False,
    ),
    "check-estimator": CommandHelp(
        "NAME | FILE.py:FUNCTION [--estimator_kwargs.NAME VALUE ...]",
        "compute bias and variance of an estimator (rloo, my.py:function) on small policies, by "
        'enumeration, and print "exact" or the bias; the exit status is 0 in both cases, and 2 if '
        "the estimator fails",
        ("rloo check-estimator examples/estimator.py:length_weighted",),
        takes_options=False,
    ),
    "env": CommandHelp(
        "[FOLDER] [--json]",
        "print versions, processors, GPUs and the environment variables that matter for a bug "
        "report; with FOLDER also the options of the run with this output_dir; secrets are hidden",
        ("rloo env", "rloo env runs/gsm8k --json"),
        takes_options=False,
    ),
}


def overview() -> str:
    """The help of the program: purpose, commands, and an example of each command."""
    commands = "".join(column(f"  {name}", command.does, 19) for name, command in COMMANDS.items())
    examples = "".join(f"  {command.examples[0]}\n" for command in COMMANDS.values())
    others = "".join(
        column(f"  {name}", f"of the package {package}", 19)
        for name, package in plugins.of_others("commands").items()
        if name not in COMMANDS
    )
    return (
        "usage: rloo COMMAND [config.yaml] [--option value ...]\n\n"
        "Train language models with REINFORCE Leave-One-Out.\n\n"
        f"commands:\n{commands}{others}\nexamples:\n{examples}\n"
        "`rloo COMMAND --help` lists the options of a command.\n"
    )


def usage_of_plugin(name: str, command: Any) -> str:
    """The help of a command of another package: its docstring."""
    return f"usage: rloo {name} ...\n\n{inspect.getdoc(command) or ''}\n"


def usage_of(name: str, *, everything: bool = False) -> str:
    """The help of a command: usage, purpose, examples, and the basic options (with `everything`:
    all options)."""
    command = COMMANDS[name]
    text = column("", f"{command.does[0].upper()}{command.does[1:]}.", 0)
    text = f"usage: rloo {name} {command.arguments}\n\n{text}\nexamples:\n"
    text += "".join(f"  {example}\n" for example in command.examples)
    if not command.takes_options:
        return text
    if everything:
        return f"{text}\n{render_all()}"
    return (
        f"{text}\n{render_basic(elsewhere=False)}\nAll options: rloo {name} --help all. "
        "One option, with its names in other systems: rloo config NAME.\n"
    )
