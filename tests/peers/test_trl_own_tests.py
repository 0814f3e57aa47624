"""TRL's own tests of its RLOOTrainer, unmodified, with our config and trainer in place of TRL's.

`RLOO_TRL_TESTS` is the path of TRL's `tests/test_rloo_trainer.py`, in a clone of its repository.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.trl_names import write
from support.trl_own import FAILS, NOT_JUDGED, OUTCOMES

FILE = os.environ.get("RLOO_TRL_TESTS")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(FILE is None, reason="RLOO_TRL_TESTS names no file of TRL's tests"),
]


def outcomes(folder: Path) -> dict[str, str]:
    """What became of each test, run in a process of its own, where names of models are folders."""
    write(folder)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    file = Path(str(FILE)).absolute()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests"))),
        "HF_HUB_OFFLINE": "1",
        OUTCOMES: str(folder / "outcomes.json"),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.trl_own",
        "-c", "pytest.ini", f"--rootdir={file.parents[1]}", str(file),
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, env=environment, check=False)
    return json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))


def test_all_of_trls_tests_pass_but_those_that_say_nothing_and_at_most_four(tmp_path):
    found = outcomes(tmp_path)
    judged = {
        name: how
        for name, how in found.items()
        if not any(re.fullmatch(pattern, name) for pattern in NOT_JUDGED)
    }
    failed = {name: how for name, how in judged.items() if how != "passed"}
    print(
        f"{len(judged) - len(failed)} of {len(found)} pass, {len(found) - len(judged)} not judged"
    )
    assert failed.keys() <= FAILS.keys(), json.dumps(failed, indent=1)
    assert len(judged) >= 70 and len(FAILS) <= 4
