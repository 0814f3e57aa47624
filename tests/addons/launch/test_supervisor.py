"""Processes that are restarted, and those that are not; small shells stand in for them."""

import json

import pytest

from rloo.addons.launch.supervisor import RESTARTS, Supervisor
from support.launched_runs import wait_until


@pytest.mark.parametrize(
    ("status", "starts", "refused"), [(0, 1, False), (2, 1, True), (7, 2, False)]
)
def test_a_process_that_refuses_its_options_is_not_restarted(tmp_path, status, starts, refused):
    command = ["sh", "-c", f"echo starting; echo 'rloo: too small (engine_gpus)'; exit {status}"]
    keeper = Supervisor("server", 0, command, {}, tmp_path, tries=RESTARTS - 1)
    thread = keeper.start()
    thread.join(60)
    assert not thread.is_alive()
    log = tmp_path / "server-0.log"
    assert log.read_text().count("starting") == starts
    said = (
        f"server 0 refuses its options (status 2): too small (engine_gpus) ({log}); all ranks "
        "save and end"
    )
    assert keeper.refusal == (said if refused else None)
    events = [json.loads(line) for line in (tmp_path / "launch.jsonl").read_text().splitlines()]
    assert [row["said"] for row in events if row["event"] == "refused"] == [said] * refused


def test_a_process_of_a_run_that_ends_refuses_nothing(tmp_path):
    command = ["sh", "-c", "trap 'exit 2' TERM; touch ready; while :; do sleep 0.05; done"]
    keeper = Supervisor("server", 0, command, {}, tmp_path, str(tmp_path))
    thread = keeper.start()
    wait_until((tmp_path / "ready").exists)
    keeper.end()
    thread.join(60)
    assert '"status": 2' in (tmp_path / "launch.jsonl").read_text()
    assert keeper.refusal is None
