"""Servers load weights independently: a server that has loaded a version samples while another
still loads, with the same guarantees."""

import asyncio
import threading
import time

import pytest
import torch

from rloo.engines.vllm.client import VLLMClient
from rloo.engines.vllm.router import LoadBalancer, NoServers
from rloo.engines.vllm.server_state import ServerState, ServerWeights
from rloo.engines.vllm.weight_loading import WeightLoader
from rloo.model.export import PolicyExport
from support.engines import make_prompts
from support.fake_vllm import FakeVLLM, Status
from support.models import make_model
from support.text import make_tokenizer
from support.vllm_engines import (
    COMPLETIONS,
    SAMPLING,
    TOKENS,
    Slow,
    change,
    made_on_fakes,
    make_policy,
    wait_until,
    wait_until_all_sample,
)

made = pytest.fixture(made_on_fakes)
RPC = "/collective_rpc"


def salts(server):
    """The versions that sampled the run's requests, which have a temperature."""
    bodies = [b for route, b in server.bodies if route == COMPLETIONS and b["temperature"]]
    return [body["cache_salt"] for body in bodies]


def sample(engine, noise=1):
    return engine.sample(make_prompts(), 2, SAMPLING, noise)


def test_a_loaded_server_samples_while_another_still_loads(made):
    policy = make_policy()
    engine, (first, second), said = made(policy, servers=2)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    sample(engine)
    change(policy)
    slow = Slow(second)
    policy.load_into(engine)
    newest = first.version
    before = len(salts(second))
    for noise in range(3):
        for group in sample(engine, noise):
            assert {c.weight_versions[0][0] for c in group} == {engine.version}
    assert len(salts(second)) == before and second.version != newest
    assert set(salts(first)[-3:]) == {newest}
    slow.go()
    wait_until(lambda: second.version == newest)
    wait_until(lambda: sample(engine) and salts(second)[before:])
    assert set(salts(second)[before:]) == {newest}
    assert said == [] and engine.stats()["engine/lost"] == 0


def test_a_slow_server_proceeds_to_the_newest_version_and_its_folder_stays(made, tmp_path):
    policy = make_policy()
    engine, (first, second), said = made(policy, servers=2, weights_folder=tmp_path)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    slow, loaded = Slow(second), []
    for seed in range(3):
        change(policy, seed)
        policy.load_into(engine)
        loaded.append(first.version)
        sample(engine)
        assert slow.seen.wait(20)
    (store,) = tmp_path.iterdir()
    kept = sorted(path.name for path in store.glob("v*"))
    assert kept == [f"v{engine.version - age:08d}" for age in (2, 1, 0)]
    known = [body["kwargs"]["weights_path"] for route, body in second.bodies if route == RPC]
    assert known[-1].endswith(f"v{engine.version - 2:08d}")
    slow.go()
    wait_until(lambda: second.version == loaded[2])
    known = [body["kwargs"]["weights_path"] for route, body in second.bodies if route == RPC]
    assert [int(path[-8:]) for path in known[-2:]] == [engine.version - 2, engine.version]
    wait_until(lambda: sample(engine) and loaded[2] in salts(second))
    assert not {loaded[0], loaded[1]} & set(salts(second))
    change(policy)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    change(policy)
    policy.load_into(engine)
    assert f"v{engine.version - 2:08d}" not in {path.name for path in store.iterdir()}
    assert said == [] and engine.stats()["engine/lost"] == 0


def test_a_slow_server_with_wrong_weights_is_lost(made):
    policy = make_policy()
    engine, (first, second), said = made(policy, servers=2)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    before = salts(second)
    change(policy)
    slow = Slow(second)
    policy.load_into(engine)
    sample(engine)
    for parameter in second.model.parameters():
        parameter.data.add_(0.3)
    slow.go()
    wait_until(lambda: said)
    assert second.url in said[0] and "away from the trainer's" in said[0]
    sample(engine)
    assert salts(second) == before and engine.stats()["engine/lost"] == 1


def test_a_slow_server_that_fails_recovers_with_the_newest_version(made):
    policy = make_policy()
    engine, (first, second), said = made(policy, servers=2, restarts=2)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    change(policy)
    failed = threading.Event()

    def fail_later(body, answer):
        assert failed.wait(20)
        raise Status(500, "out of memory")

    second.faults[RPC] = fail_later
    policy.load_into(engine)
    sample(engine)
    before = len(salts(second))
    failed.set()
    wait_until(lambda: said)
    del second.faults[RPC]
    assert "out of memory" in said[0]
    wait_until(lambda: "is back, with" in said[-1])
    wait_until(lambda: sample(engine) and len(salts(second)) > before)
    assert set(salts(second)[before:]) == {first.version}


def test_an_error_of_the_run_itself_while_a_server_loads_is_told(tmp_path):
    PolicyExport(make_policy(), torch.float32).write(tmp_path)
    server = FakeVLLM(make_model("qwen3"), make_tokenizer())
    member = ServerState(VLLMClient(server.url))

    async def fail(*_):
        raise RuntimeError("a thread cannot be started")

    async def run():
        def lose(member, error):
            member.fault = str(error)
            loader.changed.set()

        loader = WeightLoader(
            [member], LoadBalancer([member]), 60.0, False, False, 1e-3, [3, 4], print, fail, lose
        )
        try:
            async with asyncio.timeout(60):
                await loader.bring(ServerWeights(0, tmp_path, "newest"), everyone=False)
        finally:
            await member.client.close()

    with pytest.raises(NoServers, match="has not loaded them: a thread cannot be started"):
        asyncio.run(run())
    server.close()


def test_loading_waits_for_the_slow_server_if_the_others_fail(made):
    policy = make_policy()
    engine, (first, second), said = made(policy, servers=2)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    change(policy)
    slow = Slow(second)

    def refuse(body, answer):
        raise Status(500, "out of memory")

    first.faults[RPC] = refuse
    threading.Timer(0.5, slow.go).start()
    policy.load_into(engine)
    assert len(said) == 1 and first.url in said[0]
    for group in sample(engine):
        assert {c.weight_versions[0][0] for c in group} == {engine.version}
    second.faults[RPC] = refuse
    change(policy)
    with pytest.raises(NoServers, match="no vLLM server is left"):
        policy.load_into(engine)


def test_a_server_loads_while_another_finishes_its_requests(made):
    """With asynchronous training, a long completion keeps one server from loading."""
    policy = make_policy()
    engine, servers, said = made(policy, servers=2, scale_out=True)
    policy.load_into(engine)
    wait_until_all_sample(engine, servers, TOKENS)
    old = engine.version
    slow = [Slow(server, TOKENS) for server in servers]
    (begun,) = engine.submit(make_prompts()[:1], 2, SAMPLING, 1)
    wait_until(lambda: any(one.seen.is_set() for one in slow))
    (busy,) = [n for n in range(2) if slow[n].seen.is_set()]
    slow[1 - busy].go()
    change(policy)
    policy.load_into(engine)
    assert servers[1 - busy].version != servers[busy].version and not begun.done()
    for group in sample(engine):
        assert {c.weight_versions for c in group} == {((engine.version, len(c.token_ids)),) for
                                                      c in group}  # fmt: skip
    slow[busy].go()
    assert {c.weight_versions[0][0] for c in begun.result(20)} == {old}
    wait_until(lambda: servers[0].version == servers[1].version)
    assert said == []


def test_an_engine_closes_while_a_server_loads(made):
    policy = make_policy()
    engine, (first, second), _ = made(policy, servers=2)
    policy.load_into(engine)
    wait_until(lambda: second.version == first.version)
    change(policy)
    slow = Slow(second)
    policy.load_into(engine)
    assert slow.seen.wait(20)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    slow.go()
