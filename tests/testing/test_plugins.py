"""Names of add-ons: the table of this package, entry points of others, and the example package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloo import plugins, testing
from rloo.config.config import RLOOConfig
from support.plugins import EXAMPLE, install, install_example, pip_install_example

SOURCE = Path(plugins.__file__).resolve().parent.parent


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes packages known to this process."""

    def make(name, groups):
        monkeypatch.syspath_prepend(str(install(tmp_path / name, name, groups)))
        plugins.forget()

    yield make
    monkeypatch.undo()
    plugins.forget()


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example package, installed."""
    monkeypatch.syspath_prepend(str(install_example(tmp_path / "site")))
    plugins.forget()
    yield tmp_path / "site"
    monkeypatch.undo()
    plugins.forget()


def test_names_of_this_package_come_first_and_win(installed):
    installed("other", {"rloo.rewards": {"math": "nowhere:at_all", "mine": "json:dumps"}})
    assert plugins.names("rewards") == [*plugins.BUILT_IN["rewards"], "mine"]
    assert plugins.of_others("rewards") == {"mine": "other"}
    assert plugins.load("rewards", "mine") is json.dumps
    assert plugins.BUILT_IN["rewards"]["math"] != "nowhere:at_all"


def test_a_name_that_two_packages_give_is_refused_once_it_is_asked_for(installed):
    for name in ("one", "two"):
        installed(name, {"rloo.rewards": {"mine": "json:dumps"}})
    assert "mine" in plugins.names("rewards")
    with pytest.raises(ValueError, match=r"mine is given by \w+ and by \w+; only one of them"):
        plugins.load("rewards", "mine")


def test_an_entry_point_that_cannot_be_loaded_is_named(installed):
    installed("other", {"rloo.commands": {"broken": "nowhere_at_all:command"}})
    with pytest.raises(ValueError, match=r"broken = nowhere_at_all:command of other cannot be lo"):
        plugins.load("commands", "broken")


def test_what_belongs_to_an_add_on_that_is_not_there_is_said_in_a_line(monkeypatch):
    monkeypatch.setitem(plugins.BUILT_IN["commands"], "gone", "rloo.addons.gone.module:command")
    with pytest.raises(plugins.MissingAddon, match=r"^gone needs rloo\.addons\.gone, which is not"):
        plugins.load("commands", "gone")
    assert plugins.find("commands", "gone") is None


def test_nothing_of_another_package_is_imported_before_it_is_asked_for(example):
    code = (
        "import sys; from rloo.cli import main; main(['--help']); "
        "print([m for m in sys.modules if m.startswith('rloo_example')])"
    )
    done = run([sys.executable, "-c", code], example)
    assert "of the package rloo-example" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_module_of_the_example_is_short():
    files = list((EXAMPLE / "src" / "rloo_example").glob("*.py"))
    assert len(files) == 7
    for file in files:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 26, file.name


def test_the_example_passes_the_contract_tests(example, tmp_path):
    testing.check_reward(plugins.load("rewards", "vowels"), ["a", "b"], ["aeb", ""])
    testing.check_dataset(plugins.load("datasets", "squares"), "squares:9")
    testing.check_estimator(plugins.load("estimators", "median"))
    testing.check_observer(plugins.load("observers", "best"), tmp_path)
    assert "best reward 0.500" in (tmp_path / "best.txt").read_text()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "reward": 0.25}\n')
    command = plugins.load("commands", "steps")
    assert testing.check_command(command, [str(tmp_path / "run")], []) == 0
    with pytest.raises(ValueError, match="takes no top_k"):
        RLOOConfig(rollout_engine="lightest", top_k=3)


@pytest.mark.slow
def test_every_part_of_the_example_is_used_by_commands(tmp_path):
    """As pip installs it."""
    example = pip_install_example(tmp_path / "installed")
    options = (
        "train --dataset squares:9 --model countdown --reward vowels --estimator median "
        "--rollout_engine lightest --max_steps 2 --num_prompts 2 --num_generations 2 "
        "--max_completion_length 8 --output_dir run"
    )
    done = run([sys.executable, "-m", "rloo", *options.split()], example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best reward" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    used = {name: summary["config"][name] for name in ("rollout_engine", "estimator", "dataset")}
    assert used == {"rollout_engine": "lightest", "estimator": "median", "dataset": "squares:9"}
    assert (tmp_path / "run" / "best.txt").exists()
    done = run([sys.executable, "-m", "rloo", "steps", "run"], example, tmp_path)
    assert done.stdout.startswith("2 steps, reward "), done.stderr
    done = run([sys.executable, "-m", "rloo", "steps", "--help"], example, tmp_path)
    assert "Print the number of steps" in done.stdout
    done = run([sys.executable, "-m", "rloo", "steps"], example, tmp_path)
    assert done.returncode == 2
    assert done.stderr == "rloo: steps takes the folder of a run (its output_dir)\n"


def run(command, site, folder=None):
    paths = os.pathsep.join((str(SOURCE), str(site)))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder or site, env=environment, capture_output=True, text=True
    )
