"""`rloo.testing`: engines on servers pass, and what breaks a property is told in a sentence."""

import os
import signal
from concurrent import futures
from dataclasses import replace

import psutil
import pytest
import torch

from rloo.config.engine_spec import EngineSpec
from rloo.engines.engine_registry import EngineInputs
from rloo.engines.engine_worker import engine_worker_config
from rloo.engines.remote_engine import RemoteEngine, RemoteEngineConfig
from rloo.engines.vllm.server_process import ServerConfig
from rloo.model.export import PolicyExport
from rloo.testing import (
    ServerEngineCase,
    check_async_engine,
    check_engine,
    check_sleeping_engine,
)
from support.vllm_engines import change, made_on_fakes, make_policy

made = pytest.fixture(made_on_fakes)


def case_of(policy, engine, **how) -> ServerEngineCase:
    """With the policy's weights and others."""
    states = []
    for _ in range(2):
        states.append([parameter.detach().clone() for parameter in policy.parameters])
        change(policy)

    def use(number):
        with torch.no_grad():
            for parameter, value in zip(policy.parameters, states[number], strict=True):
                parameter.copy_(value)

    logprobs = PolicyExport(policy, torch.float32).logprobs
    return ServerEngineCase(engine, policy.weights, use, logprobs, **how)


@pytest.mark.parametrize("scale_out", [False, True])
def test_an_engine_on_servers_passes(made, scale_out):
    policy = make_policy()
    engine, servers, _ = made(policy, servers=2, scale_out=scale_out)
    spec = EngineSpec(lambda inputs: (engine, None))
    assert check_engine(spec, EngineInputs(policy.model, 0), policy.weights) is engine
    check_async_engine(case_of(policy, engine, lose=servers[1].close))


@pytest.mark.slow
def test_an_engine_in_processes_passes(tmp_path):
    policy = make_policy()
    how = engine_worker_config(
        policy.model, engine="native", device="cpu", pad_token_id=0, precision=None, dtype=None,
        trust_remote_code=False,
    )  # fmt: skip
    source = PolicyExport(policy, torch.float32)
    engine = RemoteEngine(how, source, RemoteEngineConfig(2, None, 300.0, tmp_path))

    def lose():
        workers = [p for p in psutil.Process().children() if "rloo" in " ".join(p.cmdline())]
        os.kill(workers[0].pid, signal.SIGKILL)

    spec = EngineSpec(lambda inputs: (engine, None))
    check_engine(spec, EngineInputs(policy.model, 0), policy.weights)
    check_async_engine(case_of(policy, engine, lose=lose))
    engine.close()


class Sabotaged:
    """An engine with other methods or properties."""

    def __init__(self, engine, **replaced):
        self.engine = engine
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def altered(engine, alter, **replaced):
    """An engine whose submitted groups are those that `alter` returns."""

    def submit(*request):
        found = []
        for one in engine.submit(*request):
            later = futures.Future()
            one.add_done_callback(lambda done, later=later: later.set_result(alter(done.result())))
            found.append(later)
        return found

    return Sabotaged(engine, submit=submit, **replaced)


def labelled(engine, spans_of, **replaced):
    """An engine whose completions have the `weight_versions` of `spans_of(version, size)`."""

    def alter(group):
        spans = [spans_of(*c.weight_versions[0]) for c in group]
        return [replace(c, weight_versions=s) for c, s in zip(group, spans, strict=True)]

    return altered(engine, alter, **replaced)


def blocking(engine):
    def submit(*request):
        begun = engine.submit(*request)
        futures.wait(begun)
        return begun

    return Sabotaged(engine, submit=submit)


def stale(engine):
    """It loads one version, and says that it has the others."""

    def load(weights, version):
        if engine.version < 0:
            engine.load(weights, version)
        sabotaged.version = version

    sabotaged = labelled(engine, lambda _, size: ((sabotaged.version, size),), load=load)
    return sabotaged


def dropping(engine):
    def load(weights, version):
        engine.cancel_pending()
        engine.load(weights, version)

    return Sabotaged(engine, load=load)


class Endless(Sabotaged):
    """An engine whose cancelled requests have no end."""

    def submit(self, *request):
        self.begun = [(one, futures.Future()) for one in self.engine.submit(*request)]
        for one, later in self.begun:
            one.add_done_callback(lambda _, one=one, later=later: self.deliver(one, later))
        return [later for _, later in self.begun]

    def deliver(self, one, later):
        if not one.cancelled():
            later.set_result(one.result())


def ranges_ignored(engine):
    return Sabotaged(engine, submit=lambda prompts, _, *how: engine.submit(prompts, 4, *how))


def noise_ignored(engine):
    return Sabotaged(engine, submit=lambda *request: engine.submit(*request[:3], 1))


SABOTAGE = {
    "futures": (
        lambda e: Sabotaged(e, submit=lambda *request: e.submit(*request)[1:]),
        "one future for each prompt",
    ),
    "at once": (blocking, "it must return at once"),
    "few": (lambda e: altered(e, lambda group: group[1:]), "4 completions were asked for"),
    "range": (ranges_ignored, "submit samples a range"),
    "noise": (noise_ignored, "noise changes no completion"),
    "busy": (lambda e: Sabotaged(e, busy_seconds=lambda: 1.0), "busy_seconds does not grow"),
    "no versions": (lambda e: labelled(e, lambda *_: ()), "do not have a version for each of"),
    "sizes": (lambda e: labelled(e, lambda v, n: ((v, n + 1),)), "do not have a version for each"),
    "order": (lambda e: labelled(e, lambda v, n: ((v, 1), (v - 1, n - 1))), "are not in order"),
    "older": (lambda e: labelled(e, lambda v, n: ((v - 1, n),)), "only .* can have sampled them"),
    "stale": (stale, "log-probs .* away from its weights' own"),
    "dropped": (dropping, "a submitted request has failed"),
    "stats": (lambda e: Sabotaged(e, stats=dict), "does not count it as engine/lost"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SABOTAGE)
def test_what_breaks_a_property_is_told(made, name):
    policy, (sabotage, said) = make_policy(), SABOTAGE[name]
    engine, servers, _ = made(policy, servers=2)
    with pytest.raises(AssertionError, match=said):
        check_async_engine(case_of(policy, sabotage(engine), lose=servers[1].close))


@pytest.mark.slow
def test_a_request_without_an_end_after_cancel_pending_is_told(made):
    policy = make_policy()
    engine, _, _ = made(policy)
    case = case_of(policy, Endless(engine), seconds=5.0)
    with pytest.raises(AssertionError, match="a request that has no end after 5 s"):
        check_async_engine(case)


@pytest.mark.slow
def test_completions_that_a_lost_server_takes_along_are_told(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    with pytest.raises(AssertionError, match="a submitted request has failed: NoServers"):
        check_async_engine(case_of(policy, engine, lose=server.close))


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (None, None),
        ({"asleep": lambda: False}, "do not sleep after a load"),
        ({"asleep": None}, "has no function asleep"),
        ({"engine": stale}, "can have sampled them"),
    ],
)
def test_an_engine_that_sleeps(made, sabotage, said):
    policy = make_policy()
    engine, (server,), _ = made(policy, serving=ServerConfig("m", sleeps=True), sleep_level=2)

    def asleep():
        calls = [call for call in server.calls if call.startswith(("/sleep", "/wake_up"))]
        return calls[-1].startswith("/sleep")

    case = case_of(policy, engine, asleep=asleep)
    if sabotage is None:
        check_sleeping_engine(case)
        return
    if "engine" in sabotage:
        sabotage = {"engine": stale(engine)}
    with pytest.raises(AssertionError, match=said):
        check_sleeping_engine(replace(case, **sabotage))
