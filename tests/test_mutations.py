"""The mutation check finds its places where they are, breaks one at a time, and believes a failing
test only if it passes without the change."""

import argparse
import importlib
import json
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from imports import ImportGraph

ROOT = Path(__file__).resolve().parent.parent
PATH = "src/rloo/core/sums.py"


@pytest.fixture
def places(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("mutation_places")


@pytest.fixture
def copies(places):
    return importlib.import_module("mutation_copies")


@pytest.fixture
def mutations(places):
    return importlib.import_module("mutations")


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "changed"),
    [
        ("operator", "x = a + b", ["x = a - b"]),
        ("operator", "x = a - b * c", ["x = a + b * c", "x = a - b / c"]),
        ("operator", "x = a / b // c", ["x = a * b // c", "x = a / b * c"]),
        ("operator", "x += a", ["x -= a"]),
        ("operator", "x -= a", ["x += a"]),
        ("operator", "x = a < b <= c", ["x = a <= b <= c", "x = a < b < c"]),
        ("operator", "x = a > b >= c", ["x = a >= b >= c", "x = a > b > c"]),
        ("operator", "x = a == b != c", ["x = a != b != c", "x = a == b == c"]),
        ("operator", "x = a in b", ["x = a not in b"]),
        ("operator", "x = a not  in b", ["x = a in b"]),
        ("operator", "x = a is None", ["x = a is not None"]),
        ("operator", "x = a is not None", ["x = a is None"]),
        ("operator", "x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        # The operator, not what looks like it in a comment, a string or another operand.
        ("operator", "x = (f('+')) + (-g)", ["x = (f('+')) - (-g)"]),
        ("operator", "x = (a  # a + b\n  + b)", ["x = (a  # a + b\n  - b)"]),
        ("operator", "x = f('é…', a + b)", ["x = f('é…', a - b)"]),
        ("constant", "x = 1_000", ["x = 1001"]),
        ("constant", "x = f(-1, y=0.25)", ["x = f(-2, y=0.25)", "x = f(-1, y=0.5)"]),
        ("constant", "x = 0.0", ["x = 1.0"]),
        ("constant", "x = f(True, b=False)", ["x = f(False, b=False)", "x = f(True, b=True)"]),
        ("constant", "def f(a=3): pass", ["def f(a=4): pass"]),
        ("constant", "class A:\n  a: int = 3", ["class A:\n  a: int = 4"]),
        ("condition", "if a: pass", ["if not (a): pass"]),
        (
            "condition",
            "if a: pass\nelif b: pass",
            ["if not (a): pass\nelif b: pass", "if a: pass\nelif not (b): pass"],
        ),
        ("condition", "if (\n  a\n  and b\n): pass", ["if (\n  not (a\n  and b)\n): pass"]),
        ("condition", "while f(): pass", ["while not (f()): pass"]),
        ("condition", "x = a if b else c", ["x = a if not (b) else c"]),
        ("condition", "x = [a for a in b if a]", ["x = [a for a in b if not (a)]"]),
        ("return", "def f():\n  'A.'\n  a()\n  b()", ["def f():\n  'A.'\n  return; a()\n  b()"]),
        ("return", "def f():\n  a()\n  b()", ["def f():\n  return; a()\n  b()"]),
        (
            "return",
            "def f():\n  a()  # A.\n  for b in c: d()\n  e()",
            [
                "def f():\n  return; a()  # A.\n  for b in c: d()\n  e()",
                "def f():\n  a(); return  # A.\n  for b in c: d()\n  e()",
            ],
        ),
        (
            "return",
            "def f():\n  a = lambda: (yield)\n  b()",
            ["def f():\n  return; a = lambda: (yield)\n  b()"],
        ),
    ],
)  # fmt: skip
def test_a_place_is_found_where_it_is(kind, text, changed, places):
    found = [place for place in places.places_of(text, PATH) if place.kind == kind]
    assert [place.apply(text) for place in found] == changed
    for place in found:
        compile(place.apply(text), PATH, "exec")
        assert text.split("\n")[place.line - 1][place.column :].startswith(place.old.split("\n")[0])


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring with 1 + 1."""',
        "x = 'a'",
        "x = a % b | c @ d",
        "x = a is b",
        "x = 'a' + b",  # the other operator fails wherever it runs
        "x = [a] + b",
        "x = folder / f'{a}.txt'",
        "x: Literal[1, True] = a",
        "def f(a: Literal[1]) -> Literal[2]: pass",
        "@dataclass(frozen=True, slots=True)\nclass A: pass",
        "@cache(1)\ndef f(): pass",
        "__all__ = ['a', *b[1:]]",
        "if TYPE_CHECKING:\n  x = 1",
        "if typing.TYPE_CHECKING:\n  x = 1",
        "assert a, b + 1",
        "raise ValueError(f'{a + 1} of {b or 2}')",
        "warnings.warn(f(1), stacklevel=2)",
        "class A:\n  def __repr__(self):\n    a = 1\n    return a",
        "class A:\n  def __str__(self):\n    a = 1\n    return a",
        "def f():\n  '''A.'''\n  a()",
        "def f():\n  a()\n  yield b",
        "def f():\n  a = yield\n  b()",
        # A line more would be caught by tests that count lines.
        "def f():\n  with a: b()\n  c()",
    ],
)
def test_what_no_test_is_to_watch_is_no_place(text, places):
    assert places.places_of(text, PATH) == []


def test_what_stands_beside_types_is_a_place(places):
    text = "if TYPE_CHECKING:\n  x = 1\nelse:\n  x = 2"
    assert [place.line for place in places.places_of(text, PATH)] == [4]


def test_a_change_of_another_text_is_refused(places):
    (place,) = places.places_of("x = a + b", PATH)
    with pytest.raises(ValueError, match=r"sums.py:1 does not hold '\+'"):
        place.apply("y = a - b")


def test_a_line_is_shown_before_and_after(places):
    (place,) = places.places_of(f"x = {'a' * 30} + {'b' * 30}", PATH)
    assert place.before == f"…{'a' * 23} + {'b' * 23}…"
    assert place.after == f"…{'a' * 23} - {'b' * 23}…"


def test_a_draw_depends_on_the_seed_alone_and_takes_all_kinds_alike(places):
    lines = ["x = a + b"] * 900 + ["x = 1"] * 60 + ["if a: pass"] * 60
    text = "\n".join([*lines, "def f():", *["  a()"] * 60])
    found = places.places_of(text, PATH)
    drawn = places.draw(found, 40, 0)
    assert drawn == places.draw(found, 40, 0)
    assert drawn[:10] == places.draw(found, 10, 0)
    assert drawn != places.draw(found, 40, 1)
    assert len(set(drawn)) == 40
    # 10 of each are expected, with a standard deviation of 2.7.
    assert all(2 <= count <= 18 for count in Counter(p.kind for p in drawn).values())
    assert {place.kind for place in drawn} == set(places.KINDS)
    assert set(places.draw(found, 5000, 0)) == set(found)


def test_the_core_is_there_and_leaves_parts_out(places, monkeypatch):
    files = {path.relative_to(ROOT / "src/rloo").as_posix() for path in places.core_files(ROOT)}
    assert {name.partition("/")[0] for name in files} == set(places.CORE)
    assert not any(name.startswith("addons/") for name in files)
    monkeypatch.setattr(places, "CORE", {"algorithm": ("no_such",)})
    with pytest.raises(ValueError, match="no_such; CORE"):
        places.core_files(ROOT)


# -- which tests lie near --------------------------------------------------------------------------


def test_the_mirror_of_a_module_comes_first_and_no_test_is_left_out(places):
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    nothing_known = {test: {} for test in tests}
    parts = places.order_tests("src/rloo/algorithm/advantages.py", tests, nothing_known)
    assert parts[0][0] == "tests/algorithm/test_advantages.py"
    assert len(parts[0]) > 1  # others name the module
    assert sorted(test for part in parts for test in part) == sorted(tests)


def test_tests_are_in_the_order_of_their_way_to_the_module(places, tmp_path):
    texts = {
        "src/rloo/__init__.py": "_HOMES = {'Engine': 'rloo.run.engine'}",
        "src/rloo/core/__init__.py": "",
        PATH: "",
        "src/rloo/core/sums_of_sums.py": "",
        "src/rloo/run/engine.py": "def f():\n  from rloo.core import sums",
        "src/rloo/run/typed.py": "if TYPE_CHECKING:\n  import rloo.core.sums",
        "tests/core/test_sums.py": "",
        "tests/core/test_sums_again.py": "",
        "tests/core/test_other.py": "",
        "tests/core/test_far.py": "from support import played",
        "tests/support/played.py": "import rloo\nrloo.Engine()",
        "tests/test_beside.py": "from rloo.core import sums",
        "tests/test_named.py": "# rloo.core.sums",
        "tests/test_engine.py": "import rloo.run.engine",
        "tests/test_lazy.py": "from rloo import Engine",
        "tests/test_played.py": "from support import played",
        "tests/test_typed.py": "import rloo.run.typed",
        "tests/test_longer.py": "import rloo.core.sums_of_sums  # rloo.core.sums.x",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tests = {name: text for name, text in texts.items() if "/test_" in name}
    graph = ImportGraph(tmp_path)
    away = {test: graph.away([test]) for test in tests}
    assert away["tests/test_played.py"][PATH] == 3
    assert "src/rloo/run/typed.py" not in away["tests/test_played.py"]
    names = [[Path(t).stem for t in part] for part in places.order_tests(PATH, tests, away)]
    assert names == [
        ["test_sums", "test_sums_again", "test_beside", "test_named"],
        ["test_far", "test_engine", "test_lazy", "test_played"],
        ["test_other", "test_longer", "test_typed"],
    ]


# -- runs ------------------------------------------------------------------------------------------

SUMS = "def add(a, b):\n    return a + b\n\n\ndef above(a, b):\n    return a > b\n"
TEST_SUMS = """
import pytest
from rloo.core.sums import above, add

@pytest.mark.parametrize("case", ["a - b[c] d"])
def test_add(case):
    assert add(2, 1) == 3

def test_above():
    assert above(2, 1)
"""


@pytest.fixture
def project(tmp_path, monkeypatch, places):
    """A repository of a package and its tests, of which git ignores one file."""
    # Without the plugins of this environment pytest starts in half the time.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")  # no part of the suite
    monkeypatch.setattr(places, "CORE", {"core": ()})
    texts = {
        ".gitignore": "test_ignored.py",
        "src/rloo/__init__.py": "",
        PATH: SUMS,
        "tests/core/test_sums.py": TEST_SUMS,
        "tests/core/test_ignored.py": "assert False",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = \"-m 'not slow'\"\n"
        'filterwarnings = ["ignore"]\n',
        "tests/test_other.py": "import pytest\n\n@pytest.mark.slow\ndef test_not_run(): assert 0\n",
    }
    root = tmp_path / "project"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


@pytest.mark.slow
def test_what_a_test_watches_is_caught_the_rest_survives_and_is_not_run_again(
    project, mutations, tmp_path, capsys, monkeypatch
):
    results = tmp_path / "results.jsonl"
    options = {"seed": 0, "number": 2, "jobs": 2, "timeout": 60, "only": None, "results": results}
    assert not mutations.check(project, argparse.Namespace(**options))
    said = capsys.readouterr().out.splitlines()
    rows = sorted(line.split(" | ", 1)[1].rpartition(" | ")[0] for line in said[2:4])
    assert rows == [
        f"{PATH}:2 | `return a + b` -> `return a - b` | "
        "tests/core/test_sums.py::test_add[a - b[c] d]",
        f"{PATH}:6 | `return a > b` -> `return a >= b` | SURVIVED",
    ]
    assert said[-1] == "1 of 2 places are caught."
    assert len(results.read_text().splitlines()) == 2
    assert (project / PATH).read_text() == SUMS

    monkeypatch.setattr(mutations.Check, "run", None)
    assert not mutations.check(project, argparse.Namespace(**options))
    assert sorted(capsys.readouterr().out.splitlines()[2:4]) == sorted(said[2:4])
    assert len(results.read_text().splitlines()) == 2


@pytest.fixture
def copy(project, copies, tmp_path):
    copy = copies.Copy(tmp_path / "job", copies.Processes(), 60)
    copies.copy_repository(project, copy.repository)
    return copy


def judged(copy, places, text, test):
    """What comes of the first place of another package with another test."""
    (copy.repository / PATH).write_text(text)
    (copy.repository / "tests/core/test_sums.py").write_text(test)
    result = copy.judge(places.places_of(text, PATH)[0], [[], ["tests/core/test_sums.py"], []])
    assert (copy.repository / PATH).read_text() == text
    return result


def test_a_failure_that_remains_is_not_the_mutation(copy, places, copies):
    verdict, by = judged(copy, places, SUMS, "def test_broken():\n  assert False")
    assert verdict == copies.NOT_THE_MUTATION
    assert by == "tests/core/test_sums.py::test_broken: fails without it"


def test_a_module_that_cannot_be_imported_is_caught(copy, places, copies):
    text = "if a := 0:\n  raise ValueError"
    found = judged(copy, places, text, "from rloo.core import sums\ndef test_sums(): pass")
    assert found == (copies.CAUGHT, "import of tests/core/test_sums.py")


def test_an_unknown_exit_status_is_no_verdict(copy, places, copies):
    test = "import os\nfrom rloo.core import sums\ndef test_sums(): os._exit(sums.a)"
    with pytest.raises(copies.NoVerdict, match=r"exit status 7: (.*\.log)$") as raised:
        judged(copy, places, "a = 6", test)
    log = Path(str(raised.value).rpartition(": ")[2])
    assert log.exists()
    log.unlink()


def test_a_time_limit_that_the_suite_needs_is_not_the_mutation(copy, places, copies):
    statuses = iter([None, None, None, copies.PASSED])
    object.__setattr__(copy, "run_tests", lambda _: next(statuses))
    copy.log.touch()
    assert judged(copy, places, SUMS, "") == (
        copies.NOT_THE_MUTATION,
        "time limit: fails without it",
    )
    assert judged(copy, places, SUMS, "") == (copies.CAUGHT, "time limit")


def test_an_interrupt_ends_what_was_started_and_starts_nothing_more(copies, tmp_path):
    processes, log = copies.Processes(), tmp_path / "log"

    def interrupt():
        while "done" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.02)
        processes.stop()

    thread = threading.Thread(target=interrupt)
    thread.start()
    script = "sleep 60 & echo $!; setsid sleep 60 & echo $!; echo done; wait"
    with pytest.raises(copies.Stopped):
        processes.run(["sh", "-c", script], 60, log)
    thread.join()
    with pytest.raises(copies.Stopped):
        processes.run(["true"], 60, tmp_path / "other")
    for number in map(int, log.read_text().split()[:2]):
        if psutil.pid_exists(number):  # a zombie that nobody waits for, or on its way
            process = psutil.Process(number)
            assert process.status() == psutil.STATUS_ZOMBIE or not process.wait(5)


def test_a_time_limit_is_no_exit_status(copies, tmp_path):
    start = time.monotonic()
    assert copies.Processes().run(["sleep", "60"], 0.1, tmp_path / "log") is None
    assert time.monotonic() - start < 30


def test_the_copy_has_its_own_of_what_the_package_keeps_in_a_cache(copy, tmp_path, monkeypatch):
    usual = tmp_path / "usual"
    for name in ("rloo", "huggingface"):
        (usual / name).mkdir(parents=True)
    (usual / "huggingface/model").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(usual))
    with copy.environment() as environment:
        cache = Path(environment["XDG_CACHE_HOME"])
        assert [path.name for path in cache.iterdir()] == ["huggingface"]
        assert (cache / "huggingface/model").exists()
    assert not cache.exists() and (usual / "huggingface/model").exists()


def test_an_exit_status_is_handed_on(copies, tmp_path):
    assert copies.Processes().run(["sh", "-c", "exit 3"], 30, tmp_path / "log") == 3


@pytest.mark.parametrize(("verdict", "status"), [("SURVIVED", 1), ("caught", 0)])
def test_the_exit_status_says_whether_enough_is_caught(
    verdict, status, project, mutations, tmp_path, monkeypatch
):
    row = mutations.Row(verdict, "", 1.0)
    monkeypatch.setattr(mutations, "ROOT", project)
    monkeypatch.setattr(mutations.Check, "run", lambda _, new, report: report(1, new[1], row))
    assert mutations.main(["--only", "1", "--jobs", "1"]) == status
    with pytest.raises(ValueError, match=r"no place 3; there are 2 \(--only\)"):
        mutations.main(["--only", "3", "1"])


def test_results_are_known_by_their_place(mutations, places, tmp_path):
    file = tmp_path / "results.jsonl"
    (place,) = places.places_of("x = a + b", PATH)
    line = {"path": PATH, "line": 1, "column": 6, "old": "+", "new": "-"}
    file.write_text(json.dumps(line | {"verdict": "SURVIVED", "by": "", "seconds": 2.0}) + "\n")
    assert mutations.read_results(file) == {place.key: mutations.Row("SURVIVED", "", 2.0)}
    assert mutations.read_results(None) == {}
