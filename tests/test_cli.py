"""The command `rloo` as a user meets it: exit statuses, output, files and messages."""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
import yaml
from datasets import Dataset

from rloo import cli
from rloo.config.compat.parser_fields import option_types
from rloo.config.parsing import parse_command_line
from support.addons import HAS_ADDONS, needs_addons
from support.models import make_model
from support.text import WORDS, make_tokenizer

REWARDS = """
import os, signal

def count_small(completions, **columns):
    return [float(sum(int(word[1:]) < 20 for word in c.split())) for c in completions]

def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]

def weight_of_row(completions, weight):
    return [float(value) for value in weight]

def count_in_message(completions):
    return count_small([c[0]["content"] for c in completions])

def wrong_length(completions):
    return [1.0] * (len(completions) - 1)

def string(completions):
    return [1.0, 1.0, "high"] + [1.0] * (len(completions) - 3)

def infinite(completions):
    return [1.0, float("inf")] + [1.0] * (len(completions) - 2)

def ends(completions):
    raise SystemExit(0)

def pipe(completions):
    raise BrokenPipeError("the judge is away")

def silence(completion_ids):
    import sys
    if STREAMS == "closed":
        sys.stdout.close()
        sys.stderr.close()
    else:
        sys.stdout = sys.stderr = None
    return length(completion_ids)

def crash(completions):
    raise RuntimeError("the judge is away")

CALLS = []

def stop_at_third_call(completion_ids):
    CALLS.append(1)
    if len(CALLS) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return length(completion_ids)
"""

ROWS = [
    {"prompt": " ".join(WORDS[i : i + 3 + i % 4]), "answer": WORDS[i], "weight": i}
    for i in range(12)
]
SMALL = {
    "num_generations": 4,
    "num_prompts": 3,
    "max_steps": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "bf16": "false",
    "gradient_checkpointing": "false",
    "num_threads": 1,
    "use_cpu": "true",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, model, monkeypatch) -> Path:
    """The current folder: rows.jsonl, rewards.py and a YAML file that ties them together."""
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    write_rows("rows.jsonl", ROWS)
    options = {"model": str(model), "dataset": "rows.jsonl", "output_dir": "run", "seed": 3}
    options |= {"reward": "rewards.py:count_small", **SMALL}
    Path("run.yaml").write_text(yaml.safe_dump(options))
    return tmp_path


def write_rows(path: str, rows: list[dict]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "rloo.cli", *arguments], capture_output=True, text=True
    )


def refusal(capsys, *arguments: str, status: int = 2) -> str:
    """The one line on stderr with which the command refuses, or with status 1 fails."""
    capsys.readouterr()
    assert cli.main(list(arguments)) == status
    error = capsys.readouterr().err.splitlines()[-1]  # after transformers' bars
    assert error.startswith("rloo: ")
    return error


def train(*arguments: str) -> None:
    assert cli.main(["train", "run.yaml", *arguments]) == 0


# -- help and configuration -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        [],
        ["train", "--help"],
        ["eval", "-h"],
        ["train", "--help", "all"],
        ["merge", "--help"],
        ["config"],
        ["config", "--all"],
    ],
)
def test_help_needs_neither_torch_nor_a_second(arguments):
    code = (
        "import sys, rloo.cli\n"
        f"status = rloo.cli.main({arguments})\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    if arguments[:1] in ([], ["--help"]):
        assert shown.stdout.startswith("usage: rloo COMMAND")
        assert all(f"\n  {command} " in shown.stdout for command in ("train", "eval", "config"))
    elif arguments[0] != "config":
        assert shown.stdout.startswith(f"usage: rloo {arguments[0]} ")


def test_help_of_a_command_has_the_basic_options_by_subject_or_all(capsys):
    def options_of(*arguments: str) -> dict[str, str]:
        assert cli.main(list(arguments)) == 0
        found, subject = {}, ""
        for line in capsys.readouterr().out.splitlines():
            subject = line if line.isupper() and line[0] != " " else subject
            found |= {line.split()[0]: subject} if re.match(r"[a-z]\w* = ", line) else {}
        return found

    basic, every = options_of("train", "--help"), options_of("train", "--help", "all")
    assert basic == options_of("eval", "--help") and basic.items() <= every.items()
    assert basic["model"] == "MODEL AND DATA" and basic["lora_r"] == "LORA"
    assert (len(basic), len(every)) == (25, len(option_types()))


def test_version_is_that_of_the_package(capsys):
    import rloo

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rloo {rloo.__version__}\n"


def test_config_prints_what_reads_back_equal(folder, capsys):
    arguments = ["run.yaml", "--beta", "0.02", "--reward_clip_range", "-1", "1"]
    assert cli.main(["config", *arguments]) == 0
    printed = capsys.readouterr().out
    Path("resolved.yaml").write_text(printed)
    resolved = parse_command_line(["resolved.yaml"])
    assert resolved == parse_command_line(arguments)
    assert (resolved.beta, resolved.num_prompts, resolved.seed) == (0.02, 3, 3)
    assert cli.main(["config", "resolved.yaml"]) == 0
    assert capsys.readouterr().out == printed


def test_a_warning_is_one_line_unless_the_users_code_warns(monkeypatch, capsys):
    result = run("config", "--log_level", "info")
    said = "log_level is 'info', which has no effect: console output has one level"
    assert (result.returncode, result.stderr) == (0, f"warning: {said}\n")

    def warn(arguments, signals) -> int:
        for file in (cli.__file__, transformers.__file__, __file__):
            print(warnings.formatwarning("two\n lines", UserWarning, file, 1, ""), end="")
        return 0

    usual = warnings.formatwarning
    monkeypatch.setattr(cli, "_config", warn)
    assert cli.main(["config"]) == 0
    brief, users = "warning: two lines\n", f"{__file__}:1: UserWarning: two\n lines\n"
    assert capsys.readouterr().out == 2 * brief + users
    assert warnings.formatwarning is usual


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(folder):
    train("--num_generations", "2", "--kl_coef=0.3", "temperature=0.9", "--max-steps", "1")
    config = json.loads(Path("run/summary.json").read_text())["config"]
    assert (config["num_generations"], config["beta"], config["temperature"]) == (2, 0.3, 0.9)
    assert (config["num_prompts"], config["epsilon"], config["max_steps"]) == (3, 0.2, 1)
    assert len(read_lines("run/completions.jsonl")) == 4


def test_areal_s_dotted_names_work_on_the_command_line_and_in_a_file(folder, model):
    Path("areal.yaml").write_text(
        f"actor:\n  path: {model}\n  kl_ctl: 0.0\n  gradient_checkpointing: false\n"
        "  adv_norm: {mean_level: group, mean_leave1out: true, std_level: none}\n"
        "  optimizer: {lr: 0.01}\n"
        "gconfig: {n_samples: 4, max_new_tokens: 6}\n"
        "train_dataset: {path: rows.jsonl, batch_size: 3}\n"
        "total_train_steps: 1\nbf16: false\nreward: rewards.py:length\noutput_dir: run\n"
    )
    dotted = ["actor.adv_norm.std_level=batch", "--gconfig.temperature", "0.8"]
    assert cli.main(["train", "areal.yaml", *dotted]) == 0
    config = json.loads(Path("run/summary.json").read_text())["config"]
    assert (config["mean_level"], config["mean_leave1out"]) == ("group", True)
    assert (config["std_level"], config["temperature"], config["beta"]) == ("batch", 0.8, 0.0)
    assert (config["num_generations"], config["num_prompts"], config["max_steps"]) == (4, 3, 1)


NAMES_A_TASK = (
    ["run.yaml"],
    ["--beta", "0.02", "run.yaml"],
    ["--config", "run.yaml"],
    ["--config=run.yaml"],
    ["--dataset", "d"],
    ["--dataset_name", "d"],
    ["dataset=d"],
    ["--train_dataset.path=d"],
    ["--model-name-or-path=m"],
    ["actor.path=m"],
    ["--eval-dataset", "e"],
)


@pytest.mark.parametrize("arguments", NAMES_A_TASK)
def test_a_model_or_a_dataset_keeps_the_embedded_task_out(folder, arguments):
    alone = parse_command_line(arguments)
    assert parse_command_line(arguments, str(cli.EMBEDDED)) == alone and alone.max_steps != 50


@pytest.mark.parametrize("arguments", [[], ["--beta", "0.02"], ["seed=1", "--max_steps=5"]])
def test_without_any_of_them_it_is_the_embedded_task(arguments):
    both = parse_command_line([str(cli.EMBEDDED), *arguments])
    assert parse_command_line(arguments, str(cli.EMBEDDED)) == both


@pytest.mark.parametrize(
    "written", ["max_steps: 2\n", "train_batch_size: 64\n", "preset: grpo\n", "beta: 0.3\n"]
)
def test_a_file_that_names_none_is_over_the_embedded_task_as_a_line_is(folder, written):
    Path("few.yaml").write_text(written)
    line = [f"--{part.strip()}" for part in written.replace(": ", "=").splitlines()]
    over = parse_command_line(["few.yaml", "--seed", "3"], str(cli.EMBEDDED))
    assert over == parse_command_line([str(cli.EMBEDDED), *line, "--seed", "3"])
    assert over.model == over.dataset == "countdown"


def test_a_server_of_a_file_that_names_no_model_has_the_embedded_one(folder, monkeypatch):
    served = []
    monkeypatch.setattr(
        "rloo.engines.vllm.from_options.serve", lambda config, model, named: served.append(model)
    )
    Path("few.yaml").write_text("max_steps: 2\n")
    assert cli.main(["vllm-serve", "few.yaml"]) == 0 and served == ["countdown"]
    assert cli.main(["vllm-serve"]) == 2


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", pytest.param("plan", marks=needs_addons)])
def test_faults_of_the_command_line_are_refused_before_torch_is_imported(folder, command):
    code = (
        "import json, sys, rloo.cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        f"    assert rloo.cli.main(['{command}', 'run.yaml', *arguments]) == 2\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    Path("empty").mkdir()
    Path("broken.py").write_text("def f(:\n")
    cases = [
        (["--num_generatoins", "4"], "unknown option --num_generatoins; did you mean"),
        (["--num_generations", "1"], "num_generations is 1 and mean_level is group"),
        (["--reward", "other.py:f"], "there is no file"),
        (["--reward", "rewards.py:lenth"], "rewards.py has no function 'lenth'; did you"),
        (["--reward", "broken.py:f"], "broken.py, line 1: invalid syntax"),
        (["--reward", "accuracy"], "unknown reward 'accuracy'; did you mean 'math'?"),
        (["--reward", "countdown(a=1)"], "the reward 'countdown' takes no options, but got a"),
        (["--estimator", "other.py:f"], "there is no file"),
        (["--estimator", "rlo"], "unknown estimator 'rlo'; did you mean rloo? (there are"),
        (["--estimator", "other.py"], "the estimator 'other.py' names no function; write"),
        (["--dataset", "none.jsonl"], "dataset none.jsonl does not exist on this disk"),
        (["--model", "./none"], "model ./none does not exist on this disk (model)"),
        (["--model", "a/b/c"], "model a/b/c does not exist on this disk (model)"),
        (["--model", "empty"], "model empty is a folder without config.json or adapter_"),
        (["--model", "rows.jsonl"], "model rows.jsonl is a file; it must be a folder"),
        (["--model", "no/where"], "model no/where is no file or folder here, and cannot be"),
        (["--output_dir", "rows.jsonl"], f"output_dir {folder}/rows.jsonl is a file; it must be"),
        (["--num_threads", "100000"], "num_threads is 100000; it may be at most "),
        (["--resume_from_checkpoint", "gone"], "checkpoint gone does not exist"),
    ]
    command = [sys.executable, "-c", code, json.dumps([arguments for arguments, _ in cases])]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (0, "")
    for line, (_, expected) in zip(refused.stderr.splitlines(), cases, strict=True):
        assert line.startswith(f"rloo: {expected}")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "trian is not a command; there are train, plan, eval, config"),
        (["train", "run.yaml", "--leraning_rate", "1"], "did you mean learning_rate?"),
        (["train", "run.yaml", "--use_vllm", "true", "--top_k", "5"], "rollout_engine native"),
        (["train", "missing.yaml"], "missing.yaml: No such file"),
        (["train", "run.yaml", "--num_prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["train", "run.yaml", "--reward", "matth"], "did you mean 'math'?"),
        (["train", "run.yaml", "--reward", "rewards.py:lenth"], "did you mean 'length'?"),
        (["train", "run.yaml", "--reward", "other.py:f"], "there is no file"),
        (["train", "run.yaml", "--reward", "no_such_module:f"], "there is no module"),
        (["train", "run.yaml", "--estimator", "rlo"], "did you mean rloo?"),
        (["train", "run.yaml", "--estimator_kwargs.eps", "1", "--estimator", "grpo"], "epsilon"),
        (
            ["train", "run.yaml", "--reward", "gsm8k", "--reward_weights", "1", "2"],
            "one weight per",
        ),
        (["train", "run.yaml", "--dataset", "none.jsonl"], "none.jsonl does not exist"),
        (["train", "run.yaml", "--prompt_template", "{promt}"], "did you mean {prompt}?"),
        (["train", "run.yaml", "--max_completion_length", "40000"], "max_completion_length"),
        (["train", "run.yaml", "--resume_from_checkpoint"], "no checkpoint to resume from"),
        (["train", "run.yaml", "--resume_from_checkpoint", "x"], "checkpoint x does not exist"),
        (["train", "--dataset", "rows.jsonl", "--reward", "rewards.py:length"], "no model"),
        (["train", "--model", "{model}", "--reward", "rewards.py:length"], "no dataset"),
        (["train", "--model", "{model}", "--dataset", "rows.jsonl"], "no reward function"),
        (["eval", "run.yaml", "--eval_kwargs.pass_k", "9"], "eval_kwargs.pass_k contains 9"),
        (["eval", "run.yaml", "--eval_split", "test"], "has no split 'test'"),
        (["config", "run.yaml", "--beta", "much"], "beta is 'much'; it must be a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_fault_is_one_line_and_status_2(folder, model, capsys, arguments, expected):
    error = refusal(capsys, *(str(model) if a == "{model}" else a for a in arguments))
    assert expected in error
    assert not Path("run").exists()


def test_a_command_without_a_dataset_names_those_without_a_file(folder, model, capsys):
    own = "name dataset countdown and reward countdown (dataset, reward)"
    known = (
        "there is no dataset; name a file, a folder, a hub id, countdown (the embedded problems) "
        "or gym:NAME (generated) (dataset)"
    )
    for command in ("train", *(("plan", "doctor") if HAS_ADDONS else ())):
        error = refusal(capsys, command, "--model", str(model), "--reward", "rewards.py:length")
        assert known in error
        assert own in refusal(capsys, command, "--model", "countdown", "--reward", "countdown")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv", "empty.parquet"])
def test_an_empty_dataset_is_refused(folder, capsys, name):
    if name.endswith("parquet"):
        Dataset.from_dict({"prompt": []}).to_parquet(name)
    else:
        Path(name).write_text("prompt\n" if name.endswith("csv") else "")
    error = refusal(capsys, "train", "run.yaml", "--dataset", name)
    assert f"{name} has 0 rows; training needs at least 1" in error


def test_a_dataset_without_a_prompt_names_its_columns(folder, capsys):
    write_rows("questions.jsonl", [{"question": "w1", "answer": "w2"}])
    error = refusal(capsys, "train", "run.yaml", "--dataset", "questions.jsonl")
    assert "no column 'prompt'; its columns are question, answer" in error
    assert "prompt_template" in error


def test_a_reward_that_needs_a_column_which_is_not_there_names_it(folder, capsys):
    write_rows("bare.jsonl", [{"prompt": "w1"}])
    options = ["--dataset", "bare.jsonl", "--reward", "rewards.py:weight_of_row"]
    error = refusal(capsys, "train", "run.yaml", *options)
    assert "'weight_of_row' requires the parameter 'weight', which is neither" in error


def test_a_model_folder_without_a_tokenizer_is_refused(folder, capsys):
    make_model("qwen3").save_pretrained("bare")
    error = refusal(capsys, "train", "run.yaml", "--model", "bare")
    assert "bare has no tokenizer that can be loaded" in error


def test_overlong_prompts_are_refused_with_rows_and_lengths_or_dropped_or_cut(folder, capsys):
    lengths = [len(row["prompt"].split()) for row in ROWS]
    assert lengths == [3, 4, 5, 6] * 3
    error = refusal(capsys, "train", "run.yaml", "--max_prompt_length", "4")
    assert "6 prompts have more than 4 tokens (row 2: 5, row 3: 6, row 6: 5," in error
    assert "overlong_prompts" in error
    for choice, rows in (("drop", 6), ("left", 12)):
        options = ["--max_prompt_length", "4", "--overlong_prompts", choice, "--max_steps", "1"]
        train(*options, "--output_dir", choice, "--num_prompts", "12", "--log_completions")
        assert f"\nrows        {rows}\n" in capsys.readouterr().out
        drawn = {row["prompt_id"] for row in read_lines(f"{choice}/completions.jsonl")}
        short = {number for number, length in enumerate(lengths) if length <= 4}
        assert drawn <= short if choice == "drop" else not drawn <= short


def test_another_run_in_the_folder_is_moved_or_overwritten(folder, capsys):
    train("--max_steps", "1")
    capsys.readouterr()
    train()
    moved = Path("run").absolute()
    assert f"the run that was in {moved} is now in {moved}/earlier/1\n" in capsys.readouterr().out
    assert [row["step"] for row in read_lines("run/earlier/1/metrics.jsonl")] == [1]
    train("--overwrite_output_dir")
    assert [row["step"] for row in read_lines("run/metrics.jsonl")] == [1, 2]
    assert [path.name for path in Path("run/earlier").iterdir()] == ["1"]


# -- rewards --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("wrong_length", "'wrong_length' returned 11 rewards for 12 completions"),
        ("string", "'string' returned str: 'high' for completion 2"),
        ("infinite", "'infinite' returned inf for completion 1"),
        ("ends", "'ends' raised exit(0), which would end the run"),
    ],
)
def test_a_faulty_reward_is_named_in_one_line_and_status_1(folder, capsys, function, expected):
    options = ["run.yaml", "--reward", f"rewards.py:{function}"]
    assert expected in refusal(capsys, "train", *options, status=1)
    assert f"'{function}' r" in refusal(capsys, "eval", *options, status=1)


def test_a_reward_whose_pipe_breaks_is_not_a_reader_that_has_seen_enough(folder, capsys):
    assert cli.main(["train", "run.yaml", "--reward", "rewards.py:pipe"]) == 1
    assert "BrokenPipeError: the judge is away" in capsys.readouterr().err


@pytest.mark.parametrize("streams", ["closed", "none"])
def test_a_reward_that_takes_the_output_away_changes_neither_status_nor_result(
    folder, monkeypatch, streams
):
    Path("rewards.py").write_text(f"STREAMS = {streams!r}\n{REWARDS}")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    train("--reward", "rewards.py:silence")
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"


def test_a_failure_in_training_is_no_refusal_and_an_exit_no_success(monkeypatch, capsys):
    def fail(error, in_run):
        error.in_run = in_run
        monkeypatch.setattr(cli, "_train", Mock(side_effect=error))
        return cli.main(["train"]), capsys.readouterr().err

    assert fail(ValueError("no"), True) == (1, "rloo: no\n")
    assert fail(ValueError("no"), False) == (2, "rloo: no\n")
    assert fail(BrokenPipeError("no"), True) == (1, "rloo: no\n")
    assert fail(BrokenPipeError("no"), False) == (1, "rloo: no\n")
    for code in (0, 7, "done"):
        status, said = fail(SystemExit(code), True)
        assert status == 1 and "mock.py:" in said
        assert f" called sys.exit({code!r}); what a run calls" in said
    with pytest.raises(RuntimeError, match="a fault of ours"):
        fail(RuntimeError("a fault of ours"), True)


def frames(text: str) -> list[tuple[str, str]]:
    """File and function of every frame of a traceback."""
    found = re.findall(r'^  File "(.+)", line \d+, in (.+)$', text, re.MULTILINE)
    return [(Path(file).name, name) for file, name in found]


def test_of_what_a_reward_raises_only_the_user_s_frames_are_shown(folder, capsys):
    assert cli.main(["train", "run.yaml", "--reward", "rewards.py:crash"]) == 1
    error = capsys.readouterr().err
    assert frames(error) == [("rewards.py", "crash")]
    assert error.endswith(
        "RuntimeError: the judge is away\nraised by the reward function 'crash'\n"
    )


def test_what_the_user_s_code_calls_and_what_caused_an_error_are_shown_too(folder, capsys):
    Path("bad.py").write_text(
        "import json\n\ndef score(completions):\n    try:\n        json.loads('x')\n"
        "    except ValueError as error:\n        raise LookupError('no such key') from error\n"
    )
    assert cli.main(["train", "run.yaml", "--reward", "bad.py:score"]) == 1
    shown = frames(capsys.readouterr().err)
    assert shown[0] == shown[-1] == ("bad.py", "score")
    assert {name for name, _ in shown} == {"bad.py", "__init__.py", "decoder.py"}


def test_a_file_that_fails_when_it_is_loaded_is_shown_from_there(folder, capsys):
    Path("bad.py").write_text("def score(completions):\n    pass\n\n1 / 0\n")
    assert cli.main(["train", "run.yaml", "--reward", "bad.py:score"]) == 1
    error = capsys.readouterr().err
    assert frames(error) == [("bad.py", "<module>")] and "ZeroDivisionError" in error


@pytest.mark.slow
def test_a_reward_in_another_process_shows_the_user_s_frames(folder, capsys):
    options = ["--reward", "rewards.py:crash", "--sampler_processes", "1"]
    assert cli.main(["train", "run.yaml", *options, "--async_kwargs.reward_workers", "1"]) == 1
    error = capsys.readouterr().err
    assert frames(error) == [("rewards.py", "crash")]
    assert "in another process:" in error


@needs_addons
def test_rewards_from_files_modules_and_built_in_are_weighed(folder, monkeypatch):
    Path("judges").mkdir()
    Path("judges/__init__.py").write_text("")
    Path("judges/words.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(folder)
    rewards = ["rewards.py:count_small", "judges.words:weight_of_row", "exact_match"]
    rewards.append("length(target_min=2, target_max=4)")
    train("--reward", *rewards, "--reward_weights", "1", "0.5", "2", "-1", "--log_completions")
    weights = {"count_small": 1, "weight_of_row": 0.5, "exact_match_reward": 2, "length_reward": -1}
    (first, *_) = read_lines("run/metrics.jsonl")
    assert {n for n in first if n.startswith("rewards/") and n.endswith("/mean")} == {
        f"rewards/{name}/mean" for name in weights
    }
    for row in read_lines("run/completions.jsonl"):
        scores = row["scores"]
        assert scores["weight_of_row"] == ROWS[row["prompt_id"]]["weight"]
        assert row["reward"] == pytest.approx(sum(weights[n] * scores[n] for n in weights))


# -- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet", "data.csv"])
def test_every_kind_of_file_gives_the_same_run(folder, name):
    rows = Dataset.from_list(ROWS)
    save = {".jsonl": rows.to_json, ".parquet": rows.to_parquet, ".csv": rows.to_csv}
    save[Path(name).suffix](name)
    options = ["--max_steps", "1", "--log_completions", "--reward", "rewards.py:weight_of_row"]
    train(*options)
    train(*options, "--dataset", name, "--output_dir", "other")
    assert read_lines("run/completions.jsonl") == read_lines("other/completions.jsonl")


def test_messages_go_through_the_chat_template_with_its_options(folder):
    """Two template options that write different words make different token ids of the prompt."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ 'w7' if thinking else 'w8 w9' }}"
    )
    make_model("qwen3").save_pretrained("chat")
    tokenizer.save_pretrained("chat")
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    write_rows("messages.jsonl", rows)
    options = ["--model", "chat", "--dataset", "messages.jsonl", "--max_steps", "1"]
    options += ["--reward", "rewards.py:count_in_message", "--num_prompts", "12"]
    num_tokens = {}
    for thinking in ("true", "false"):
        kwargs = f'{{"thinking": {thinking}}}'
        train(*options, "--chat_template_kwargs", kwargs, "--output_dir", thinking)
        (metrics,) = read_lines(f"{thinking}/metrics.jsonl")
        answers = 48 * metrics["completions/mean_length"]
        num_tokens[thinking] = metrics["num_tokens"] - answers
        sampled = read_lines(f"{thinking}/completions.jsonl")[0]["completion"]
        assert [message["role"] for message in sampled] == ["assistant"]
    words = sum(len(row["prompt"].split()) for row in ROWS)
    assert num_tokens == {"true": 4 * (words + 12), "false": 4 * (words + 24)}


# -- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_from_the_shell_ends_with_a_folder_that_transformers_loads(folder, model):
    done = run(
        "train", "run.yaml", "--beta", "0.02", "--eval_on_start", "--eval_dataset=rows.jsonl"
    )
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert "rewards     count_small" in done.stdout
    assert "Results in run: summary.json" in done.stdout
    files = (
        "metrics.jsonl",
        "completions.jsonl",
        "evaluations.jsonl",
        "checkpoint-2/manifest.json",
    )
    assert all((Path("run") / file).exists() for file in files)
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["seed"]) == ("finished", 2, 3)
    assert set(summary["versions"]) == {"python", "torch", "transformers", "rloo"}
    for moment in ("start", "end"):
        assert 0 <= summary[moment]["pass@1_greedy"] <= 1
    trained = transformers.AutoModelForCausalLM.from_pretrained("run", dtype=torch.float32)
    first = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    pairs = zip(trained.parameters(), first.parameters(), strict=True)
    assert all(not torch.equal(a, b) for a, b in pairs)
    tokenizer = transformers.AutoTokenizer.from_pretrained("run")
    assert tokenizer("w1 w2")["input_ids"] == make_tokenizer()("w1 w2")["input_ids"]
    assert cli.main(["eval", "run.yaml", "--model", "run"]) == 0


def test_a_run_reads_and_checks_its_options_once(folder, monkeypatch):
    checked = []
    monkeypatch.setattr("rloo.config.config.check", checked.append)
    train("--save_steps", "1", "--eval_on_start", "--eval_split", "train", "--beta", "0.1")
    assert len(checked) == 1


def test_eval_takes_the_configuration_of_a_run_whose_reference_moves(folder, capsys):
    options = ["--kl_kwargs.target", "0.1", "--sync_ref_model", "--use_peft", "false"]
    assert cli.main(["eval", "run.yaml", *options]) == 0
    assert "\nreward " in capsys.readouterr().out


def test_eval_prints_what_it_measured_and_writes_nothing(folder, capsys):
    options = [
        "--eval_kwargs.pass_k",
        "1",
        "2",
        "--num_generations_eval",
        "4",
        "--eval_kwargs.pass_threshold",
        "2",
    ]
    options += ["--estimator", "not/there.py:any"]  # of training alone
    assert cli.main(["eval", "run.yaml", *options]) == 0
    what, *lines = capsys.readouterr().out.splitlines()
    assert what.endswith("rows.jsonl, temperature 1") and max(map(len, lines)) < 120
    headline = "".join(lines[:2])
    assert headline.startswith("pass@1 ")
    assert "pass@2 " in headline and "pass@1 greedy " in headline and "reward " in headline
    assert "(12 problems x 4 samples)" in headline
    named = {line.split()[0] for line in lines[2:]}
    assert {"reward", "num_prompts", "rewards/count_small/mean"} <= named
    assert not Path("run").exists()


def test_eval_takes_a_dataset_of_its_own_and_repeats_itself(folder, model, capsys):
    write_rows("test.jsonl", ROWS[:5])
    shown = []
    options = ["--model", str(model), "--eval_dataset", "test.jsonl"]
    options += ["--reward", "rewards.py:count_small"]
    small = [f"--{name}={value}" for name, value in SMALL.items()]
    for _ in range(2):
        assert cli.main(["eval", *options, *small]) == 0
        shown.append(capsys.readouterr().out)
    assert "(5 problems x 4 samples)" in shown[0]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", ["dataset", "eval_dataset"])
def test_eval_passes_the_configuration_of_a_hub_dataset_on(folder, model, capsys, name):
    """Offline, the hub refuses; but the options themselves must be in order."""
    options = ["--model", str(model), f"--{name}", "owner/data", "--dataset_config", "main"]
    error = refusal(capsys, "eval", *options, "--eval_split=test", "--reward=rewards.py:length")
    assert "cannot be loaded from the hub" in error


@pytest.mark.slow
def test_sigterm_ends_with_143_and_a_checkpoint_from_which_the_run_goes_on(folder, capsys):
    """From outside: a process that is asked to end after it has printed its second step."""
    options = ["--max_steps", "2000", "--logging_steps", "1", "--save_strategy", "no"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rloo.cli", "train", "run.yaml", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                process.send_signal(signal.SIGTERM)
                break
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.rstrip().endswith("rloo: stopped by SIGTERM")
    assert "Traceback" not in errors
    (checkpoint,) = Path("run").glob("checkpoint-*")
    step = int(checkpoint.name.partition("-")[2])
    assert json.loads(Path("run/summary.json").read_text())["status"] == "interrupted"
    for _ in range(2):  # as a scheduler starts it again, until it has finished
        train("--max_steps", str(step + 2), "--resume_from_checkpoint", "auto")
    assert f"has finished: {step + 2} steps" in capsys.readouterr().out
    assert [row["step"] for row in read_lines("run/metrics.jsonl")] == list(range(1, step + 3))
    assert json.loads(Path("run/summary.json").read_text())["status"] == "finished"


def test_what_a_signal_breaks_among_imports_is_the_signal(monkeypatch, capsys):
    def imports(arguments, signals):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise RecursionError("half a module") from None

    monkeypatch.setattr(cli, "_train", imports)
    assert cli.main(["train"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "rloo: stopped by SIGTERM\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_process_where_c_calls_python(name):
    """sorted() is C that passes an exception on; what cannot, as in torch's import, aborts."""
    number = getattr(signal, name)
    code = (
        "import os\nfrom rloo.algorithm.stop_signals import StopSignals\nstop = StopSignals()\n"
        "with stop.handling(), stop.ending():\n    try:\n"
        f"        sorted([2, 1], key=lambda n: os.kill(os.getpid(), {int(number)}))\n"
        "    except BaseException:\n        os.abort()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "interrupted" if name == "SIGINT" else "stopped by SIGTERM"
    assert (ended.returncode, ended.stderr) == (128 + number, f"rloo: {said}\n")


def test_an_interrupted_and_resumed_run_ends_as_the_whole_one(folder, capsys):
    options = ["--max_steps", "4", "--log_completions", "--logging_steps", "1"]
    train(*options, "--reward", "rewards.py:length", "--output_dir", "whole")
    options += ["--reward", "rewards.py:stop_at_third_call", "--output_dir", "parts"]
    assert cli.main(["train", "run.yaml", *options]) == 130
    assert capsys.readouterr().err.endswith("rloo: interrupted\n")
    assert [path.name for path in Path("parts").glob("checkpoint-*")] == ["checkpoint-2"]
    train(*options, "--resume_from_checkpoint")
    for name in ("completion", "reward", "prompt_id", "step"):
        whole, parts = (
            [row[name] for row in read_lines(f"{run}/completions.jsonl")]
            for run in ("whole", "parts")
        )
        assert whole == parts
    first, second = (Path(run, "model.safetensors").read_bytes() for run in ("whole", "parts"))
    assert first == second


def test_what_a_reward_raises_keeps_its_place_and_the_functions_name(folder, capsys):
    Path("bad.py").write_text(
        "def score(completions):\n    return [float(c) for c in completions]\n"
    )
    assert cli.main(["train", "run.yaml", "--reward", "bad.py:score"]) == 1
    error = capsys.readouterr().err
    assert 'bad.py", line 2, in score' in error and "could not convert string to float" in error
    assert "raised by the reward function 'score'" in error


def test_a_reward_that_needs_the_single_prompt_is_refused_before_sampling(folder, capsys):
    Path("bad.py").write_text("def score(completions, prompt):\n    raise AssertionError\n")
    assert cli.main(["train", "run.yaml", "--reward", "bad.py:score"]) == 2
    assert "'prompt'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_run_replaces_no_other_and_can_be_resumed(folder):
    options = ["--eval_size", "8", "--num_prompts", "2", "--save_strategy", "steps"]
    small = ["train", *options, "--save_steps", "1"]
    assert cli.main([*small, "--max_steps", "1"]) == 0
    assert cli.main([*small, "--max_steps", "1"]) == 0
    assert Path("runs/countdown/earlier/1/checkpoint-1").exists()
    assert cli.main([*small, "--max_steps", "2", "--resume_from_checkpoint"]) == 0
    lines = Path("runs/countdown/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1, 2]
    assert cli.main(["eval", "runs/countdown/config.yaml", "--model", "runs/countdown"]) == 0


def test_a_reader_that_stops_early_is_no_error():
    command = (
        f"{sys.executable} -m rloo.cli config --preset verl | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.stdout.startswith("# preset verl") and result.stderr == ""
    assert result.returncode == 0


@pytest.mark.parametrize("words", [["help", "train"], ["--help", "train"], ["-h", "train"]])
def test_help_of_a_command_is_that_command_s(words, capsys):
    assert cli.main(["train", "--help"]) == 0
    usage = capsys.readouterr().out
    assert cli.main(words) == 0 and capsys.readouterr().out == usage
