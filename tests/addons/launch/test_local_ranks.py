"""The launcher: ranks as small scripts, whatever happens to them or to the launcher."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo import cli
from rloo.addons.launch.local_ranks import launch
from rloo.config.config import RLOOConfig
from rloo.config.launcher_env import check_launch
from rloo.trainer.rank_output import restarted

# Started by `python -c`, without torch. PLAN: rank -> what it does, by attempt.
RANK = """
import json, os, signal, subprocess, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
plans = json.loads(sys.argv[1])
plan = plans.get(rank) or plans.get("*", {})
plan = plan[min(attempt, len(plan) - 1)] if isinstance(plan, list) else plan

def note(**what):
    with open(f"rank-{rank}.notes", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "attempt": attempt, **what}) + "\\n")

def received(number, frame):
    note(got=number)
    if "ignore" not in plan and number != signal.SIGUSR1:
        time.sleep(0.2)
        sys.exit(128 + number)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, received)
child = subprocess.Popen(["sleep", "60"]) if "child" in plan else None
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
note(started={name: os.environ[name] for name in names}, child=child and child.pid)
print(f"rank {rank} is here", flush=True)

def starts(rank):  # closed here: what a signal raises while an object ends is lost
    if not os.path.exists(f"rank-{rank}.notes"):
        return 0
    with open(f"rank-{rank}.notes") as file:
        return file.read().count("started")

size = int(os.environ["WORLD_SIZE"])
while sum(map(starts, range(size))) < (attempt + 1) * size:
    time.sleep(0.01)
if "exit" in plan:
    print("\\n".join(f"line {i}" for i in range(30)))
    sys.exit(plan["exit"])
if "kill" in plan:
    os.kill(os.getpid(), plan["kill"])
deadline = time.time() + plan.get("wait", 60)
while time.time() < deadline and not os.path.exists("end"):
    time.sleep(0.02)
"""
LAUNCHER = """
import json, os, sys
from rloo.config.config import RLOOConfig
from rloo.addons.launch import local_ranks as launcher
options, plan, patience, rank = map(json.loads, sys.argv[1:])
vars(launcher).update(patience)
config = RLOOConfig(**options)
def refusal():
    expected = ("refused", "rank-0.notes", "rank-1.notes")
    return "small" if all(map(os.path.exists, expected)) else None
program = [sys.executable, "-c", rank]
status = launcher.launch([json.dumps(plan)], config, program=program, refusal=refusal)
assert "torch" not in sys.modules
sys.exit(status)
"""
WAIT = {"*": {}}


class Launched:
    """A launcher in a process of its own, whose ranks write notes into the current folder."""

    def __init__(self, plan: dict, patience: dict | None = None, rank: str = RANK, **options):
        options = {"num_processes": 2, **options}
        given = map(json.dumps, (options, plan, patience or {}, rank))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group, to which a terminal would send Ctrl-C
        )

    def end(self) -> int:
        try:
            self.out, self.err = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode

    def started(self) -> None:
        wait_for(lambda: all(any("started" in note for note in notes(rank)) for rank in (0, 1)))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def notes(rank: int) -> list[dict]:
    path = Path(f"rank-{rank}.notes")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def signals(rank: int) -> list[int]:
    return [note["got"] for note in notes(rank) if "got" in note]


def wait_for(happens) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(plan: dict, patience: dict | None = None, **options) -> Launched:
    launched = Launched(plan, patience, **options)
    launched.status = launched.end()
    pids = [note["pid"] for rank in (0, 1) for note in notes(rank)]
    assert not any(map(is_alive, pids))
    return launched


def test_ranks_find_the_environment_of_torchrun_and_rank_0_has_the_launchers_streams():
    done = run({"*": {"wait": 0}}, num_processes=3)
    assert (done.status, done.out, done.err) == (0, "rank 0 is here\n", "")
    found = [notes(rank)[0]["started"] for rank in (0, 1, 2)]
    assert [(e["RANK"], e["LOCAL_RANK"]) for e in found] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in found} == {("3", "3")}
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in found}) == 1


def test_the_status_is_that_of_the_rank_that_failed_first_and_its_last_lines_are_shown():
    done = run({"0": {}, "1": {"exit": 3}})
    assert done.status == 3 and signals(0) == [signal.SIGTERM]
    shown = done.err.splitlines()
    assert shown[0] == "rloo: rank 1 ended with status 3; the end of what it printed:"
    assert shown[1:] == [f"  line {i}" for i in range(10, 30)]


def test_what_rank_0_says_itself_is_not_said_again():
    done = run({"0": {"exit": 1}, "1": {}}, max_restarts=0)
    assert (done.status, done.err, signals(1)) == (1, "", [signal.SIGTERM])


def test_bad_input_is_not_tried_again_and_told_once():
    done = run({"*": {"exit": 2}}, max_restarts=3)
    assert (done.status, done.err) == (2, "")
    assert [note["attempt"] for note in notes(0)] == [0]


def test_a_rank_that_finds_other_input_ends_the_others_too():
    done = run({"0": {}, "1": {"exit": 2}}, {"AT_ONCE": 0.1}, max_restarts=3)
    assert done.status == 2 and signals(0) == [signal.SIGTERM]
    assert done.err.startswith("rloo: rank 1 ended with status 2; the end of what it printed:")


def test_a_killed_rank_ends_the_others_and_all_start_again():
    kill = {"kill": signal.SIGKILL, "child": True}
    done = run({"0": [{}, {"wait": 0}], "1": [kill, {"wait": 0}]}, max_restarts=2)
    assert done.status == 0 and signals(0) == [signal.SIGTERM]
    assert [note["attempt"] for note in notes(1)] == [0, 1]
    assert done.err.splitlines() == [
        "rloo: rank 1 was ended by SIGKILL; the end of what it printed:",
        "  rank 1 is here",
        "rloo: the run starts again (1 of max_restarts 2)",
    ]
    assert not is_alive(notes(1)[0]["child"])


def test_restarts_are_counted():
    done = run({"0": {}, "1": {"kill": signal.SIGKILL}}, max_restarts=1)
    assert (done.status, [n["attempt"] for n in notes(1)]) == (128 + signal.SIGKILL, [0, 1])


def test_one_process_is_restarted_too():
    done = run({"0": [{"kill": signal.SIGKILL}, {"wait": 0}]}, max_restarts=1, num_processes=None)
    assert done.status == 0 and "rank 0 was ended by SIGKILL\n" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_rank_once_and_all_are_waited_for(number):
    launched = Launched(WAIT, max_restarts=2)
    launched.started()
    # As a terminal does, and then `timeout`: to the group, and once more to the process.
    os.killpg(launched.process.pid, number)
    wait_for(lambda: signals(0) and signals(1))
    launched.process.send_signal(number)
    assert launched.end() == 128 + number and launched.err == ""
    assert (signals(0), signals(1)) == ([number], [number])
    assert [n["attempt"] for n in notes(0) if "started" in n] == [0]  # a stop is no failure


def test_a_second_signal_of_the_same_kind_ends_all():
    launched = Launched({"*": {"ignore": True}}, {"FOLLOW_UP_SECONDS": -1.0, "AT_ONCE": 0.1})
    launched.started()
    for count in (1, 2):
        launched.process.send_signal(signal.SIGINT)
        wait_for(lambda: len(signals(0)) == len(signals(1)) == count)  # noqa: B023
    assert launched.end() == 130
    assert not is_alive(notes(0)[0]["pid"]) and not is_alive(notes(1)[0]["pid"])


def test_a_rank_that_does_not_end_is_killed_in_the_end():
    done = run({"0": {"ignore": True}, "1": {"exit": 3}}, {"LEFT": 0.1})
    assert done.status == 3 and signals(0) == [signal.SIGTERM]


def test_sigusr1_that_means_save_is_passed_on_each_time_and_ends_nothing():
    launched = Launched(WAIT, on_sigusr1="save")
    launched.started()
    for count in (1, 2):
        launched.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: len(signals(0)) == len(signals(1)) == count)  # noqa: B023
    Path("end").touch()
    assert launched.end() == 0


def test_ranks_that_somebody_else_has_stopped_end_in_order():
    launched = Launched(WAIT, max_restarts=1)
    launched.started()
    for rank in (1, 0):  # the first end of one is no reason to disturb the other
        os.kill(notes(rank)[0]["pid"], signal.SIGTERM)
        wait_for(lambda: not is_alive(notes(rank)[0]["pid"]))  # noqa: B023
    assert launched.end() == 143 and signals(0) == [signal.SIGTERM]


def test_no_rank_outlives_a_killed_launcher():
    launched = Launched({"*": {"ignore": True}})
    launched.started()
    launched.process.kill()
    launched.process.wait()
    wait_for(lambda: not any(is_alive(notes(rank)[0]["pid"]) for rank in (0, 1)))
    launched.end()


def test_a_ranks_output_moves_to_the_runs_folder_with_what_it_had_printed():
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from rloo.trainer.rank_output import redirect_output\n"
        "rank = os.environ['RANK']\nprint('early')\n"
        "redirect_output(Path(f'logs/rank-{rank}.log'))\n"
        "print('late', flush=True)\nos.write(2, b'error\\n')\n"
        "other = Path('logs/rank-0.log')\n"
        "while not (other.exists() and 'error' in other.read_text()): pass\n"
        "sys.exit(3 if rank == '1' else 0)"
    )
    Path("logs").mkdir()
    Path("logs/rank-1.log").write_text("an earlier run\n")
    done = Launched({}, {}, code)
    assert done.end() == 3 and done.out == "early\n"
    assert Path("logs/rank-1.log").read_text() == "an earlier run\nearly\nlate\nerror\n"
    assert "  early\n  late\n  error\n" in done.err


# -- what launchers say ---------------------------------------------------------------------------

RANK_1 = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
SIMPLE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, {}),
        ({}, {"num_processes": 1}),
        (RANK_1, {}),
        (RANK_1, {"num_processes": 2}),
        ({**RANK_1, "TORCHELASTIC_MAX_RESTARTS": "3"}, {"max_restarts": 3}),
        ({**RANK_1, **SIMPLE, "ACCELERATE_DYNAMO_BACKEND": "NO"}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "False"}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_FSDP": "false"}, {"fp16": True}),
    ],
)
def test_what_agrees_with_the_options_is_accepted(environment, options, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_launch(RLOOConfig(**options))


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({}, {"num_processes": 2}, "num_processes is 2 and this process was started alone"),
        ({}, {"max_restarts": 1}, "max_restarts is 1 and TORCHELASTIC_MAX_RESTARTS is not set"),
        (RANK_1, {"num_processes": 4}, "num_processes is 4 and WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE is 'two' in the environment; it must be a whole"),
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is 2 and RANK is not set; it must be from 0 to 1"),
        ({**RANK_1, "RANK": "2"}, {}, "WORLD_SIZE is 2 and RANK is 2; it must be from 0 to 1"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "accelerate was told to use Megatron-LM"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "was told to use torch.compile"),
        (SIMPLE, {}, "accelerate launch was told of several processes and has started one"),
        ({"ACCELERATE_USE_CPU": "True"}, {}, "told to use the CPU .* and use_cpu is False"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {},
         "mixed_precision is fp16 .* while bf16 is True and fp16 is False"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {"bf16": False}, "mixed_precision is fp8"),
    ],
)  # fmt: skip
def test_what_contradicts_the_options_is_refused(environment, options, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        check_launch(RLOOConfig(**options))


def test_a_restarted_rank_goes_on_at_a_checkpoint_of_its_own(folder, monkeypatch):
    path = Path("run/checkpoint-3")
    path.mkdir(parents=True)
    plain, over = RLOOConfig("run"), RLOOConfig("run", overwrite_output_dir=True)
    given = RLOOConfig("run", resume_from_checkpoint="elsewhere/checkpoint-7")

    def start(config: RLOOConfig) -> tuple:
        options = restarted(config)
        return options.resume_from_checkpoint, options.overwrite_output_dir

    assert restarted(plain) is plain
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [start(c) for c in (plain, over, given)] == [("auto", False)] * 3
    os.utime(path, (0, 0))  # of a run before
    assert start(plain) == (None, False) and start(over) == (None, True)  # refused, or replaced
    assert start(given) == ("elsewhere/checkpoint-7", False)
    path.rmdir()
    assert start(plain) == ("auto", False)


def test_more_processes_than_a_machine_can_bear_are_not_started(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ValueError, match=r"num_processes is 17, and this machine has 2 proc.* 8 "):
        launch(["run.yaml"], RLOOConfig(num_processes=17), program=["/nonexistent"])
    with pytest.raises(FileNotFoundError):
        launch(["run.yaml"], RLOOConfig(num_processes=16), program=["/nonexistent"])


# -- the command ----------------------------------------------------------------------------------


def refusal(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_the_command_starts_as_many_as_it_is_told(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "rloo.addons.launch.local_ranks.launch",
        lambda arguments, config: calls.append((arguments, config)) or 7,
    )
    given = ["--num_processes", "2", "--output_dir", "run"]
    assert cli.main(["train", *given]) == 7 and calls[0][0] == given
    Path("run.yaml").write_text(
        "model: countdown\ndataset: countdown\nreward: countdown\nnum_processes: 3\n"
    )
    assert cli.main(["train", "run.yaml"]) == 7 and calls[1][1].num_processes == 3
    assert cli.main(["train", "run.yaml", "--nproc_per_node", "1", "--max_restarts", "1"]) == 7
    assert len(calls) == 3


def test_commands_that_run_alone_say_so(capsys, monkeypatch):
    said = refusal(capsys, "eval", "--num_processes", "2")
    assert "num_processes is 2; an evaluation is not divided" in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, and rloo plan runs as one process" in refusal(capsys, "plan")
    assert "WORLD_SIZE is 2, and rloo eval runs as one process" in refusal(capsys, "eval")
    said = refusal(capsys, "train", "--num_processes", "4")
    assert "num_processes is 4 and WORLD_SIZE is 2" in said


def test_the_package_is_a_command():
    shown = subprocess.run([sys.executable, "-m", "rloo", "--version"], capture_output=True)
    assert shown.stdout.startswith(b"rloo ")


def test_a_process_that_refuses_its_options_ends_all_ranks():
    Path("refused").touch()
    run = Launched(WAIT, {"LOOK_SECONDS": 0.05}, max_restarts=3)
    assert run.end() == 2 and run.err == "rloo: small\n"
    assert [signals(rank) for rank in (0, 1)] == 2 * [[signal.SIGTERM]]
    assert [note["attempt"] for note in notes(1)] == [0, 0]
