"""The whole corpora against each wall, as the user that the tests run as and as another one."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rloo.addons.graders.code.code_reward import make_code
from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS, find_python
from rloo.addons.graders.code.sandbox_pool import unavailable_reason
from support.cases.attacks import ATTACKS
from support.cases.hacks import HACKS
from support.cases.honest import HONEST
from support.code_rewards import escapes, score

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ISOLATION_BACKENDS)
def wall(request):
    if (reason := unavailable_reason(request.param)) is not None:
        pytest.skip(f"the wall {request.param} does not hold here: {reason}")
    return request.param


def test_the_corpora_are_as_large_as_they_are_meant_to_be():
    assert min(len(ATTACKS), len(HACKS), len(HONEST)) >= 40


@pytest.mark.parametrize(("cases", "wanted"), [(HONEST, 1.0), (HACKS, 0.0)], ids=["honest", "hack"])
def test_what_programs_are_worth(wall, cases, wanted):
    reward = make_code(wall=wall, seconds=2, total_seconds=10)
    try:
        found = {case.name: score(reward, case) for case in cases}
    finally:
        reward.close()
    assert {name: value for name, value in found.items() if value != wanted} == {}


def test_every_attack_is_contained(wall):
    found = escapes(wall, ATTACKS)
    assert len(found) == len(ATTACKS)
    assert {name: escaped for name, escaped in found.items() if escaped} == {}


@pytest.mark.skipif(os.getuid() != 0, reason="this is an ordinary user, as the tests above have it")
def test_every_attack_is_contained_as_an_ordinary_user(wall):
    python = find_python(65534).path
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    source = (
        "import json, sys; from support.cases.attacks import ATTACKS; "
        "from support.code_rewards import escapes; print(json.dumps(escapes(sys.argv[1], ATTACKS)))"
    )
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if subprocess.run([*user, "ls", str(ROOT / "src")], capture_output=True).returncode:
        pytest.skip("the sources are hidden from other users")
    done = subprocess.run(
        [*user, python, "-c", source, wall],
        env=environment, capture_output=True, text=True, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {name: escaped for name, escaped in json.loads(done.stdout).items() if escaped} == {}
