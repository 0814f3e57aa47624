"""Nothing that speaks to servers, or to other processes that sample and score, waits without a
deadline."""

import ast
from pathlib import Path

import rloo

PACKAGE = Path(rloo.__file__).parent
FOLDER = PACKAGE / "engines" / "vllm"
BESIDE = (
    "distributed/worker_process.py", "distributed/worker_pool.py", "distributed/worker_registry.py",
    "distributed/remote_worker.py", "distributed/remote_pool.py", "distributed/worker_server.py",
    "distributed/worker_loop.py",
    "distributed/child_process.py", "engines/remote_engine.py", "rewards/reward_workers.py",
    "algorithm/async_rollout.py", "episodes/async_multi_turn.py",
)  # fmt: skip
WAITING = {
    "wait", "join", "communicate", "acquire", "result", "recv", "accept", "read", "select", "poll",
}  # fmt: skip
# What has none of its own, and why it needs none.
HAS_ENDED = {
    # Loads, restarts and requests of servers have deadlines, and each sets the event at its end.
    ("weight_loading.py", "self.changed.wait()"),
    # A recovery waits until servers may use memory; sampling sets it, and closing cancels the task.
    ("server_pool.py", "self.awake.wait()"),
    ("vllm_engine.py", "done['vllm'].result()"),  # it is done
    ("child_process.py", "self._process.wait()"),  # after SIGKILL, or when it has ended
    ("worker_pool.py", "future.result()"),
    ("worker_pool.py", "done.result()"),
    ("remote_engine.py", "done.result()"),  # it is done
    ("async_rollout.py", "sampled.result()"),
    ("async_rollout.py", "group.sampled.result()"),  # it is scored
    ("async_rollout.py", "group.scored.result()"),  # it is done
    ("async_multi_turn.py", "turn.result()"),  # a callback of the turn
    ("router.py", "place.result()"),
}


def test_every_wait_has_a_deadline():
    found = set()
    for path in [*FOLDER.glob("*.py"), *(PACKAGE / name for name in BESIDE)]:
        for node in ast.walk(ast.parse(path.read_text())):
            waits = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if waits and node.func.attr in WAITING and not node.args and not node.keywords:
                found.add((path.name, ast.unparse(node)))
    found = {(name, call) for name, call in found if not call.endswith("process.poll()")}  # at once
    assert sorted(found) == sorted(HAS_ENDED)


def test_every_request_is_made_within_a_timeout():
    client = ast.parse((FOLDER / "client.py").read_text())
    inside = [
        ast.unparse(call.func)
        for block in ast.walk(client)
        if isinstance(block, ast.AsyncWith) and "asyncio.timeout" in ast.unparse(block.items[0])
        for call in ast.walk(block)
        if isinstance(call, ast.Call)
    ]
    everywhere = [
        ast.unparse(call.func)
        for path in FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and "_http." in ast.unparse(call.func)
    ]
    assert "self._http.request" in inside
    assert sorted(everywhere) == ["self._http.aclose", "self._http.request"]


def test_all_calls_of_a_server_are_given_seconds():
    calls = [
        call
        for path in FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("get", "post")
        and ast.unparse(call.func.value).split(".")[-1] in ("client", "self")
    ]
    assert len(calls) >= 10
    assert all("seconds" in {keyword.arg for keyword in call.keywords} for call in calls)
