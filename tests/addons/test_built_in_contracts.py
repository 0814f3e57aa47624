"""`rloo.testing`: what the add-ons give by name passes."""

import pytest

from rloo import plugins, testing
from rloo.rewards import load_reward

_ANSWERED = {
    "gsm8k": {"answer": ["#### 5", "#### 5"]},
    "exact_match": {"answer": ["5", "6"]},
    "math": {"answer": ["5", "6"]},
}


@pytest.mark.parametrize(
    "spec", ["gsm8k", "gsm8k_format", "tag_count", "exact_match", "format", "math"]
)
def test_built_in_rewards_pass(spec):
    columns = _ANSWERED.get(spec, {})
    testing.check_reward(load_reward(spec), ["a", "b"], ["so it is 5", "#### 6"], **columns)


def test_the_built_in_dataset_passes():
    pytest.importorskip("reasoning_gym")
    testing.check_dataset(plugins.load("datasets", "gym"), "gym:gcd")


@pytest.mark.parametrize("name", ["doctor", "page"])
def test_built_in_observers_pass(name, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    testing.check_observer(plugins.load("observers", name), tmp_path)


def test_built_in_commands_pass(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    for name in ("report", "doctor", "status"):
        command = plugins.load("commands", name)
        assert testing.check_command(command, [str(tmp_path)], ["--nothing_such"]) == 0
