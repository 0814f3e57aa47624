"""The host and the commit of a run."""

import socket
import subprocess

from rloo.tracking.run_environment import run_environment


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_of_the_working_directory_and_whether_files_differ(tmp_path, monkeypatch):
    host = {"host": socket.gethostname()}
    places = [tmp_path / name for name in ("clean", "changed", "empty", "none")]
    for place in places:
        (place / "inside").mkdir(parents=True)
    for place in places[:3]:
        git(place, "init", "-q")
    for place in places[:2]:
        (place / "file").write_text("1")
        git(place, "add", "file")
        git(place, "commit", "-qm", "one")
        (place / "untracked").write_text("2")
    (places[1] / "file").write_text("3")
    found = []
    for place in places:
        monkeypatch.chdir(place / "inside")
        found.append(run_environment())
    commits = [git(place, "rev-parse", "HEAD") for place in places[:2]]
    assert found == [
        {**host, "git": {"commit": commits[0], "changed": False}},
        {**host, "git": {"commit": commits[1], "changed": True}},
        host,
        host,
    ]
    # The commit at the start stays, even if the next one is made during the run.
    monkeypatch.chdir(places[1] / "inside")
    git(places[1], "commit", "-qam", "two")
    assert run_environment()["git"]["commit"] == commits[1]
