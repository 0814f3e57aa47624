"""A run that commit 2abd62f made and stopped in the middle of a rollout, after 3 of 6 steps: what
is written then is read now.

In the archive: `stopped/`, the folder of that run; `tiny/`, its model; `rows.jsonl`, its dataset;
`whole_metrics.jsonl` and `whole_completions.jsonl`, the rows of the same run without the stop, by
the same commit.
"""

import json
import tarfile
from pathlib import Path

import pytest

from rloo import cli
from support.addons import needs_addons

# Its configuration has options that have another form now, and it is trained with a grader.
pytestmark = [pytest.mark.filterwarnings("ignore:.* is retired:FutureWarning"), needs_addons]

ARCHIVE = Path(__file__).parent / "data" / "run_of_2abd62f.tar.gz"
MEASURED = ("time/", "tokens_per_second/", "memory/", "step_time", "wall_time")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in 3.11.2
        archive.extractall(tmp_path, **safely)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "stopped"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(row: dict) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, (int, float)) and not name.startswith(MEASURED)
    }


def test_it_resumes_as_if_it_had_not_been_stopped(folder):
    given = ["stopped/config.yaml", "--output_dir", "stopped", "--resume_from_checkpoint", "true"]
    assert cli.main(["train", *given]) == 0
    found, expected = rows(folder / "metrics.jsonl"), rows(folder.parent / "whole_metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(map(numbers, found), map(numbers, expected), strict=True):
        assert {name: one.get(name) for name in other} == pytest.approx(other, rel=1e-3, abs=1e-5)
    texts = [
        [(row["step"], row["completion"]) for row in rows(path)]
        for path in (folder / "completions.jsonl", folder.parent / "whole_completions.jsonl")
    ]
    assert texts[0] == texts[1]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


def test_it_is_evaluated_examined_reported_and_planned(folder, capsys):
    assert cli.main(["eval", "stopped/config.yaml", "--model", "stopped/checkpoint-3"]) == 0
    assert "reward 0.667" in capsys.readouterr().out
    assert cli.main(["doctor", "stopped"]) == 0
    assert "3 of 6 steps" in capsys.readouterr().out
    assert cli.main(["report", "stopped"]) == 0
    assert (folder / "report.html").stat().st_size > 10_000
    assert cli.main(["plan", "stopped/config.yaml"]) == 0
    assert "peak" in capsys.readouterr().out
