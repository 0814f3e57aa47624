"""Groups that servers sample while weights change: each by the weights that it says, and none by
weights that were not verified."""

import asyncio
import json
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloo.engines.vllm.client import ServerError, VLLMClient
from support.engines import make_prompts
from support.fake_vllm import FakeVLLM
from support.models import make_model
from support.text import make_tokenizer
from support.training import make_config, make_trainer, metrics_of
from support.vllm_engines import (
    COMPLETIONS,
    SAMPLING,
    TOKENS,
    change,
    made_on_fakes,
    make_policy,
    sample_of,
    wait_until,
)

made = pytest.fixture(made_on_fakes)


def slow(seconds: float):
    def fault(body, answer):
        time.sleep(seconds)
        return answer

    return fault


def await_call(servers, route):
    """Until one of the servers was asked."""
    while not any(route in server.calls for server in servers):
        time.sleep(0.01)


def distance(policy, prompts, groups, indices) -> float:
    """The largest difference between the log-probs of some groups and the trainer's of now."""
    pairs = [(prompts[index], c) for index in indices for c in groups[index][:5]]
    return max(
        (policy.score(policy.batch([sample_of(prompt, c)])) - torch.tensor(c.policy_logprobs))
        .abs()
        .max()
        .item()
        for prompt, c in pairs
    )


@pytest.mark.slow
def test_each_group_is_of_the_weights_that_it_says_also_where_they_change_in_its_midst(made):
    policy, prompts = make_policy(), make_prompts() * 4
    engine, servers, said = made(policy, servers=2)
    for server in servers:
        server.faults[COMPLETIONS] = slow(0.15)
    policy.load_into(engine)
    first, state = engine.version, [p.detach().clone() for p in policy.parameters]
    # So many at once that some wait for room while the next weights are loaded.
    for server in servers:
        server.calls.clear()
    begun = engine.submit(prompts, 60, SAMPLING, 1)
    await_call(servers, COMPLETIONS)
    early = {index for index, future in enumerate(begun) if future.done()}
    change(policy)
    policy.load_into(engine)
    second, found = engine.version, {}
    groups = [future.result(60) for future in begun]
    for index, completions in enumerate(groups):
        (version,) = {span for c in completions for span, _ in c.weight_versions}
        found.setdefault(version, []).append(index)
        assert all(c.weight_versions == ((version, len(c.token_ids)),) for c in completions)
    assert set(found) == {first, second} and early <= set(found[first])
    assert distance(policy, prompts, groups, found[second]) < 1e-5
    assert distance(policy, prompts, groups, found[first]) > 1e-3
    with torch.no_grad():
        for parameter, old in zip(policy.parameters, state, strict=True):
            parameter.copy_(old)
    assert distance(policy, prompts, groups, found[first]) < 1e-5
    assert said == [] and engine.busy_seconds() > 0.1


@pytest.mark.slow
def test_nothing_is_asked_of_a_server_that_is_not_verified_yet(made):
    policy, prompts = make_policy(), make_prompts()
    engine, (server,), _ = made(policy)
    policy.load_into(engine)
    change(policy)
    verify, seen = engine._verify, []

    def slowly(wanted, probes):
        began = len(server.calls)
        seen.append(engine.submit(prompts, 2, SAMPLING, 1))
        time.sleep(0.5)
        assert not [call for call in server.calls[began:] if call == COMPLETIONS]
        return verify(wanted, probes)

    engine._verify = slowly
    policy.load_into(engine)
    (begun,) = seen
    assert {c.weight_versions[0][0] for f in begun for c in f.result(60)} == {engine.version}


def test_a_load_that_fails_leaves_nobody_waiting(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    policy.load_into(engine)
    server.faults[COMPLETIONS] = slow(0.3)
    begun = engine.submit(make_prompts(), 60, SAMPLING, 1)
    server.faults["/weight_info"] = lambda body, answer: {"weight_version": "yesterday"}
    change(policy)
    with pytest.raises(OSError, match="no vLLM server is left"):
        policy.load_into(engine)
    for future in begun:
        assert future.exception(60) is None or "no vLLM server" in str(future.exception())


def test_what_is_forgotten_is_cancelled_and_room_is_left(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    policy.load_into(engine)
    server.faults[COMPLETIONS] = slow(0.5)
    begun = engine.submit(make_prompts(), 60, SAMPLING, 1)
    engine.cancel_pending()
    for future in begun:
        with pytest.raises(CancelledError):
            future.result(10)
    del server.faults[COMPLETIONS]
    assert engine.sample(make_prompts(), 2, SAMPLING, 2)


def test_no_request_starts_on_an_engine_that_closes(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    policy.load_into(engine)
    server.faults[COMPLETIONS] = slow(0.2)
    before = len(server.calls)
    begun = engine.submit(make_prompts() * 2, 60, SAMPLING, 1)
    wait_until(lambda: len(server.calls) > before)
    engine._run(engine._open.fleet.close())
    assert all(future.cancelled() for future in begun)  # those that wait for room, too
    asked = len(server.calls)
    time.sleep(0.5)
    assert len(server.calls) == asked < before + len(begun)


@pytest.mark.parametrize("partial", [True, False])
def test_completions_that_go_on_tell_both_versions_and_elsewhere_a_load_waits(made, partial):
    policy = make_policy()
    engine, (server,), said = made(policy, scale_out=True, partial=partial)
    policy.load_into(engine)
    older, name, loaded = engine.version, server.version, threading.Event()

    def going_on(body, answer):
        if body["sampling_params"]["temperature"] == 0:  # the probe
            return answer
        if partial:
            assert loaded.wait(60)
        else:  # nobody tells when a load begins to wait
            time.sleep(0.5)
        for choice in answer["choices"] if partial else ():
            size = len(choice["token_ids"])
            spans = [(name, 0, 1), (server.version, 1, size)][: min(size, 2)]
            parts = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
            choice["weight_versions"] = parts
        return answer

    server.faults[TOKENS] = going_on
    server.calls.clear()
    (begun,) = engine.submit(make_prompts()[:1], 4, SAMPLING, 1)
    await_call([server], TOKENS)
    change(policy)
    policy.load_into(engine)
    assert begun.done() != partial
    loaded.set()
    assert server.calls.count(f"/pause mode={'keep' if partial else 'wait'}") >= 1
    for c in begun.result(60):
        size = len(c.token_ids)
        both = ((older, 1), (engine.version, size - 1))[: min(size, 2)]
        assert c.weight_versions == (both if partial else ((older, size),))
    assert said == [] and {c.weight_versions[-1][0] for c in begun.result()} >= {
        engine.version if partial else older
    }


@pytest.mark.parametrize(
    ("spans", "fact"),
    [
        ([("NAME", 1, 6)], "do not follow each other"),
        ([("NAME", 0, 2)], "of an unknown version"),
        ([("NAME", 0, 2), ("NAME", 2, 6)], "do not follow each other"),
        ([], "of an unknown version"),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(made, spans, fact):
    policy = make_policy()
    engine, (server,), said = made(policy, scale_out=True, partial=True)
    policy.load_into(engine)

    def told(body, answer):
        for choice in answer["choices"]:
            names = [(server.version, start, end) for _, start, end in spans]
            parts = [dict(zip(("version", "start", "end"), span, strict=True)) for span in names]
            choice["weight_versions"] = parts
        return answer

    server.faults[TOKENS] = told
    how = replace(SAMPLING, stop_token_ids=())  # 6 tokens each
    with pytest.raises(OSError, match=fact):
        engine.sample(make_prompts()[:1], 2, how, 1)
    assert fact in said[0]


@pytest.mark.slow
def test_runs_on_a_server_train_the_groups_of_the_native_engine(tmp_path):
    """At staleness 0 and 1: the same prompts in the same steps."""
    server = FakeVLLM(make_model("qwen3", seed=9), make_tokenizer())
    served = {"rollout_engine": "vllm_server", "vllm_server_base_url": [server.url]}
    runs = {"native": {}, "served": served, "ahead": {**served, "max_staleness": 1}}
    prompts, lines = {}, {}
    try:
        for name, options in runs.items():
            steps = {"max_steps": 6, "logging_steps": 1, "log_completions": True}
            config = make_config(tmp_path / name, **steps, **options)
            make_trainer(config, reward="length(target_min=3, target_max=5)").train()
            rows = Path(config.output_dir, "completions.jsonl").read_text().splitlines()
            prompts[name] = [(row["step"], row["prompt"]) for row in map(json.loads, rows)]
            lines[name] = metrics_of(config)
    finally:
        server.close()
    assert prompts["native"] == prompts["served"] == prompts["ahead"]
    assert len(prompts["native"]) == 6 * 3 * 4
    ahead = lines["ahead"]
    assert [line["groups/first"] for line in ahead] == [0, 3, 6, 9, 12, 15]
    stale = [line["staleness/max"] for line in ahead]
    assert stale[0] == 0 and set(stale) == {0, 1}  # a late request finds the new weights
    assert {line["engine/lost"] for line in ahead} == {0}
    # What was sampled by the weights that are trained has their log-probs.
    assert max(line["mismatch/max"] for line in lines["served"]) < 1e-5
    assert [line["mismatch/max"] > 1e-5 for line in ahead] == [steps > 0 for steps in stale]


def test_a_call_on_a_client_that_was_closed_meanwhile_is_an_error_of_the_server():
    """As where a server is given up while something still speaks to it."""

    async def speak():
        client = VLLMClient("http://127.0.0.1:9")
        await client.close()
        await client.weight_version(seconds=5.0)

    with pytest.raises(ServerError, match="cannot be reached at /weight_info: Cannot send a req"):
        asyncio.run(speak())
