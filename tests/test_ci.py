"""CI runs what a change concerns: the table is whole, watch lists hold what is imported, nothing is
left out without a reason."""

import json
import re
import subprocess
import sys
from pathlib import Path

import ci
import pytest
from ci import Row, Runner
from ci_table import PASSED, TABLE, Equipment, Part, Tree, choose, last_passed, read_table
from imports import ImportGraph

ROOT = Path(__file__).parents[1]
FILES = {
    "README.md": "<!-- ci:test -->\n```bash\ntest -f page.md\n```\n",
    "src/pack/__init__.py": '_HOMES = {"Trainer": "pack.trainer"}\n',
    "src/pack/trainer.py": "def train():\n    import pack.loss\n",
    "src/pack/loss.py": "",
    "src/pack/page/page.js": "",
    "src/pack/page/document.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from pack import loss\n",
    "src/pack/worker.py": "from pack import Trainer\n",
    "src/pack/user.py": "import pack\nprint(pack.Trainer)\n",
    "src/pack/starter.py": 'PROGRAM = ["python", "-m", "pack.worker"]\n',
    "tests/conftest.py": "",
    "tests/support/__init__.py": "",
    "tests/support/helper.py": "import pack.loss\n",
    "tests/test_page.py": "from support.helper import x\n",
    "tests/test_start.py": "",
    "docs/page.md": "",
}


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


ROWS = """
equipment = []
[[part]]
name = "slow"
command = "pytest {files}"
watch = ["README.md"]
[part.files]
"tests/test_page.py" = ["src/pack/page/*"]
"tests/test_start.py" = ["src/pack/starter.py"]
"""


@pytest.fixture
def repository(tmp_path):
    write(tmp_path, FILES | {TABLE: ROWS})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def passed_at_head(folder: Path) -> dict:
    return {"commit": git(folder, "rev-parse", "HEAD"), "parts": {"slow": ["", 0]}}


def chosen(folder: Path, passed: dict | None) -> list[str]:
    """The files of the one part of the repository's table that are to run, if `passed` is the only
    line of a full run."""
    (part,) = read_table(folder)[0]
    (folder / PASSED).write_text("" if passed is None else json.dumps(passed) + "\n")
    return list(choose(part, Tree(folder)))


def test_imports_are_followed_where_they_are_lazy_and_strings_where_they_name_modules(repository):
    graph = ImportGraph(repository)
    init, start = "src/pack/__init__.py", "src/pack/starter.py"
    assert graph.direct("src/pack/trainer.py") == {"src/pack/loss.py", init}
    assert graph.direct("src/pack/worker.py") == {"src/pack/trainer.py", init}
    assert graph.direct("src/pack/page/document.py") == set()  # for type checkers alone
    assert graph.direct(init) == set()  # only who asks for Trainer needs it
    assert graph.away([start]) == {
        start: 0, init: 1, "src/pack/worker.py": 1, "src/pack/trainer.py": 2, "src/pack/loss.py": 3
    }  # fmt: skip
    assert graph.away([start], within="tests/") == {start: 0}
    assert graph.direct("src/pack/user.py") == {"src/pack/trainer.py", init}


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("docs/page.md", []),
        ("src/pack/loss.py", ["tests/test_start.py"]),  # by way of the worker and the trainer
        ("src/pack/page/page.js", ["tests/test_page.py"]),
        ("src/pack/page/new.css", ["tests/test_page.py"]),  # that git does not know yet
        ("tests/support/helper.py", ["tests/test_page.py"]),
        ("tests/conftest.py", ["tests/test_page.py", "tests/test_start.py"]),
        ("tests/test_start.py", ["tests/test_start.py"]),
        ("README.md", ["tests/test_page.py", "tests/test_start.py"]),
    ],
)
def test_a_file_runs_where_something_on_its_watch_list_has_changed(repository, changed, runs):
    passed = passed_at_head(repository)
    write(repository, {changed: "# something else\n"})
    assert chosen(repository, passed) == runs
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "changed")
    assert chosen(repository, passed) == runs


def test_a_file_that_is_gone_counts_as_changed(repository):
    passed = passed_at_head(repository)
    write(repository, {"src/pack/page/other.js": ""})
    (repository / "src/pack/page/page.js").unlink()
    assert chosen(repository, passed) == ["tests/test_page.py"]


BOTH = ["tests/test_page.py", "tests/test_start.py"]


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ({"commit": "1" * 40}, BOTH),
        ({"parts": {"another": ["", 0]}}, BOTH),
    ],
    ids=["of another clone", "without the part"],
)
def test_what_did_not_pass_here_runs(repository, changed, runs):
    assert chosen(repository, None) == runs
    assert chosen(repository, passed_at_head(repository)) == []
    assert chosen(repository, passed_at_head(repository) | changed) == runs


def test_a_file_that_passed_in_a_part_that_failed_runs_only_after_a_change(repository):
    passed = passed_at_head(repository) | {"parts": {}, "passed_files": {"slow": BOTH[1:]}}
    assert chosen(repository, passed) == BOTH[:1]
    write(repository, {"src/pack/worker.py": "# something else\n"})
    assert chosen(repository, passed) == BOTH


@pytest.mark.parametrize(
    ("old", "new", "runs"),
    [
        ("pytest {files}", "pytest -x {files}", BOTH),
        ("src/pack/page/*", "src/pack/trainer.py", BOTH[:1]),
        ("src/pack/page/*", "src/pack/moved/*", BOTH[:1]),  # which is no file
    ],
)
def test_a_part_runs_where_its_own_row_of_the_table_has_changed(repository, old, new, runs):
    passed = passed_at_head(repository)
    write(repository, {TABLE: ROWS.replace(old, new)})
    assert chosen(repository, passed) == runs


@pytest.mark.parametrize(
    "broken", [{"tests/support/helper.py": "def ("}, {TABLE: ROWS.replace("/page/*", "/no/*")}]
)
def test_a_file_whose_watch_list_cannot_be_computed_runs(repository, broken):
    write(repository, broken)
    git(repository, "commit", "-qam", "broken")
    assert chosen(repository, passed_at_head(repository)) == BOTH[:1]


EQUIPMENT = {
    "this": Equipment("this", "test -f there", "it is not", install="touch there"),
    "that": Equipment("that", "false", "there is none"),
}


def test_every_part_has_a_row_whatever_becomes_of_the_others(repository, tmp_path):
    runner = Runner(repository, tmp_path, EQUIPMENT)
    says = "echo '=== 3 passed, 1 skipped in 0.41s ==='"
    named = "echo 'FAILED a.py::b[c d] - oh: no'; echo '=== 1 failed in 0.41s ==='; exit 1"
    cut = named.replace("1 failed", "2 failed")
    runner.run_all(
        [
            (Part("fails", "echo oh; exit 3", alone=True), []),
            (Part("passes", says, needs=("this",)), []),
            (Part("some", says, files={"a": [], "b": []}, slots=2), ["a"]),
            (Part("no tests", "exit 5"), []),
            (Part("names", named), ["a.py", "ab.py"]),
            (Part("names some", cut), ["a.py", "ab.py"]),
            (Part("unequipped", "touch ran", needs=("that",)), []),
            (Part("no block", readme="absent"), []),
            (Part("of the README", prepare="cd docs", readme="test"), []),
        ]
    )
    rows = {row.name: (row.state, row.summary) for row in runner.rows}
    assert rows == {
        "fails": ("failed", "exit status 3"),
        "passes": ("ran", "3 passed, 1 skipped in 0.41s"),
        "some": ("ran", "1 of 2 files: 3 passed, 1 skipped in 0.41s"),
        "no tests": ("failed", "pytest found no test"),
        "names": ("failed", "1 failed in 0.41s: a.py::b[c d]"),
        "names some": ("failed", "2 failed in 0.41s: a.py::b[c d]"),
        "that": ("skipped", "there is none"),
        "unequipped": ("skipped", "needs that"),
        "of the README": ("ran", "passed"),
        "no block": ("failed", "ValueError: README.md has no block after <!-- ci:absent -->"),
    }
    assert {r.name: r.passed_files for r in runner.rows if r.passed_files} == {"names": ("ab.py",)}
    assert (repository / "there").is_file() and not (repository / "ran").exists()


def test_what_has_passed_says_where_and_leaves_out_what_did_not_run(repository):
    failed = Row("c", "failed", "1 failed", 1.0, ("c.py",))
    rows = [Row("a", "ran", "3 passed", 2.0), Row("b", "skipped", "needs that"), failed]
    line = ci.record(Tree(repository), rows, 61.7)
    assert line["commit"] == git(repository, "rev-parse", "HEAD")
    assert line["parts"] == {"a": ["3 passed", 2]} and line["seconds"] == 62
    assert line["passed_files"] == {"c": ("c.py",)}
    assert "cores" in line["host"]
    (repository / PASSED).write_text("{}\n" + json.dumps(line) + "\n")
    line = json.loads(json.dumps(line))
    assert (
        last_passed(repository, "c", "c.py") == line and last_passed(repository, "c", "d") is None
    )
    assert last_passed(repository, "a") == line and last_passed(repository, "b") is None


PARTS = """
equipment = []
[[part]]
name = "good"
command = "true"
alone = true
[[part]]
name = "later"
command = "grep good .ci/passed.jsonl"
[[part]]
name = "bad"
command = "false"
"""


def test_a_full_run_records_the_parts_that_have_passed(repository):
    tools = ("tools/ci.py", "tools/ci_table.py", "tools/imports.py")
    write(repository, {name: (ROOT / name).read_text() for name in tools} | {TABLE: PARTS})
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "tools")
    command = [sys.executable, "-B", "tools/ci.py", "--full"]
    assert subprocess.run(command, cwd=repository, capture_output=True).returncode == 1
    found = last_passed(repository, "good")
    assert found["commit"] == git(repository, "rev-parse", "HEAD")
    assert sorted(found["parts"]) == ["good", "later"]
    write(repository, {PASSED: (repository / PASSED).read_text() + '{"parts": {"bad": []}}\n'})
    assert last_passed(repository, "good") == found  # a line without a part does not count for it
    some = [*command, "--only", "later"]
    assert subprocess.run(some, cwd=repository, capture_output=True).returncode == 0
    assert list(last_passed(repository, "later")["parts"]) == ["later"]
    assert last_passed(repository, "good") == found
    (repository / "README.md").write_text("")  # the tree of another run is not the commit
    subprocess.run(command, cwd=repository, capture_output=True)
    assert last_passed(repository, "good") == found


MARKED = re.compile(
    r"^[^'\"]*\bpytest\.mark\.(slow|peers|docs|slurm|ray)\b|^from support\.markers import ",
    re.M,
)


def test_every_file_of_slow_tests_is_in_one_part_of_the_table():
    parts, equipment = read_table(ROOT)
    listed = [file for part in parts for file in part.files]
    assert len(listed) == len(set(listed))
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("tests/**/test_*.py")
        if MARKED.search(path.read_text())
    }
    assert marked - set(listed) == set()
    assert {f for f in listed if f.startswith("tests/")} - marked == set()
    assert {name for part in parts for name in (*part.uses, *part.needs)} == set(equipment)


@pytest.mark.slow
def test_every_watch_list_of_the_table_can_be_computed():
    tree = Tree(ROOT)
    for part in read_table(ROOT)[0]:
        for file, globs in part.files.items():
            watched = tree.watched(file, (*globs, *part.watch))
            assert file in watched
            assert set(tree.matching(globs)) <= watched
