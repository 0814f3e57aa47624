"""Sampling on servers that speak vLLM's protocol, with transformers behind it."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.vllm.client import ServerError
from rloo.engines.vllm.router import NoServers
from rloo.engines.weight_store import locked
from rloo.model.export import PolicyExport
from support.adapters import make_adapted, perturb
from support.engines import make_prompts
from support.fake_vllm import Status
from support.markers import every_second, in_pairs
from support.models import make_model
from support.vllm_engines import (
    COMPLETIONS,
    SAMPLING,
    TOKENS,
    change,
    fail_once,
    made_on_fakes,
    make_policy,
    sample_of,
    wait_until,
)

made = pytest.fixture(made_on_fakes)


def apart(policy, engine, sampling=SAMPLING):
    """The largest difference between a server's log-probs and the trainer's."""
    prompts = make_prompts()
    found = [0.0]
    for prompt, group in zip(prompts, engine.sample(prompts, 3, sampling, 1), strict=True):
        for c in group:
            blank = policy.batch([sample_of(prompt, c)])
            ours = policy.score(blank, 1.0 if sampling.greedy else None)
            found.append((ours - torch.tensor(c.policy_logprobs)).abs().max().item())
    return max(found)


@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_an_engine_on_servers_is_refused_where_nothing_is_said_of_them(name):
    with pytest.raises(ValueError, match=f"engine is '{name}', and nothing is said of its servers"):
        build_engine(name, EngineInputs(make_model("qwen3"), 0))


@pytest.mark.parametrize("scale_out", [False, True])
def test_log_probs_are_the_trainers_after_every_load(made, scale_out):
    policy = make_policy()
    engine, (server,), said = made(policy, scale_out=scale_out)
    for seed in range(3):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5
        assert apart(policy, engine, replace(SAMPLING, greedy=True)) < 1e-5
        change(policy, seed)
    asked = TOKENS if scale_out else COMPLETIONS
    assert {route for route, _ in server.bodies} & {TOKENS, COMPLETIONS} == {asked}
    assert said == []


@pytest.mark.slow
def test_equal_calls_give_equal_samples_and_others_do_not(made):
    policy = make_policy()
    engine, _, _ = made(policy)
    policy.load_into(engine)
    prompts = make_prompts()
    first = engine.sample(prompts, 4, SAMPLING, 1)
    assert first == engine.sample(prompts, 4, SAMPLING, 1) != engine.sample(prompts, 4, SAMPLING, 2)
    assert len({tuple(c.token_ids) for c in first[0]}) > 1
    assert [[c.behavior_logprobs == c.policy_logprobs for c in g] for g in first]


def test_a_load_pauses_loads_stamps_and_resumes_and_then_reads_back(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    server.calls.clear()
    policy.load_into(engine)
    policy.load_into(engine)  # the same weights: nothing is sent
    control = [call for call in server.calls if call[1:2] != "v" or "weight" in call]
    assert control[-5:] == [
        "/pause mode=wait", "/collective_rpc", "/update_weight_version", "/resume", "/weight_info"
    ]  # fmt: skip
    assert control.count("/collective_rpc") == 1


def test_a_failed_load_resumes_and_says_where_it_failed(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)

    def refuse(body, answer):
        raise Status(500, "the disk is gone")

    server.faults["/collective_rpc"] = refuse
    with pytest.raises(
        NoServers, match=rf"loading weights: the vLLM server {server.url} answered "
    ):
        policy.load_into(engine)
    assert server.calls[-1] == "/resume"


def test_versions_are_whole_folders_of_which_the_newest_stays(made, tmp_path):
    policy = make_policy()
    engine, (server,), _ = made(policy, weights_folder=tmp_path)
    for seed in range(3):
        policy.load_into(engine)
        change(policy, seed)
    (folder,) = tmp_path.iterdir()
    (newest,) = folder.glob("v*")
    manifest = json.loads((newest / "manifest.json").read_text())
    assert newest.name == f"v{manifest['version']:08d}" == f"v{engine.version:08d}"
    assert set(manifest["files"]) == {p.name for p in newest.iterdir()} - {"manifest.json"}
    loads = [body for route, body in server.bodies if route == "/collective_rpc"]
    assert len({body["kwargs"]["weights_path"] for body in loads}) == 3
    assert set(engine._open.fleet.loader.labels.values()) == {engine.version - 1, engine.version}
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_has_left_is_removed_and_what_another_has_is_not(made, tmp_path):
    dead, alive, strange = "rloo-weights-1", "rloo-weights-2", "weights"
    for name in (dead, alive, strange):
        (tmp_path / name / "v00000001").mkdir(parents=True)
    held = locked(tmp_path / alive)
    policy = make_policy()
    engine, _, _ = made(policy, weights_folder=tmp_path)
    policy.load_into(engine)
    left = {path.name for path in tmp_path.iterdir()}
    assert dead not in left and {alive, strange} < left and len(left) == 3
    held.release()


def test_requests_carry_the_version_as_their_salt(made):
    policy = make_policy()
    engine, (server,), _ = made(policy)
    salts = []
    for _ in range(2):
        policy.load_into(engine)
        engine.sample(make_prompts(), 1, SAMPLING, 1)
        salts.append({b["cache_salt"] for route, b in server.bodies if route == COMPLETIONS})
        change(policy)
    assert len(salts[0]) == 1 and len(salts[1]) == 2


# -- adapters ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_travels_alone_under_a_new_name_each_version(made, tmp_path):
    policy = make_policy(make_adapted(base=make_model("qwen3", seed=9)))
    engine, (server,), _ = made(policy, lora=True, weights_folder=tmp_path)
    names = []
    for seed in range(3):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5
        names.append(list(server.adapters))
        perturb(policy.model, seed)
    assert [len(name) for name in names] == [1, 1, 1] and len({n for (n,) in names}) == 3
    assert "/collective_rpc" not in server.calls
    (newest,) = tmp_path.glob("*/v*")
    sent = sum(t.nbytes for t in load_file(newest / "adapter_model.safetensors").values())
    assert sent == sum(p.nbytes for p in policy.parameters)
    assert not (newest / "model.safetensors.index.json").exists()


def test_a_server_that_serves_the_base_in_silence_is_refused_before_the_first_step(made):
    policy = make_policy(make_adapted(base=make_model("qwen3", seed=9), effect=False))
    engine, (server,), _ = made(policy, lora=True)
    real = server._complete
    server._complete = lambda route, body: real(route, {**body, "model": None})
    with pytest.raises(
        ValueError, match=r"what it serves are those of the base, .* does not apply"
    ):
        policy.load_into(engine)


def test_the_perturbation_leaves_the_adapter_and_its_version_as_they_were():
    policy = make_policy(make_adapted())
    source, version = PolicyExport(policy, torch.float32), policy.version
    before = [p.clone() for p in policy.parameters]
    with source.perturbed(0.05):
        assert not any(map(torch.equal, before, policy.parameters))
    assert all(map(torch.equal, before, policy.parameters)) and policy.version == version


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_what_vllm_cannot_apply_is_merged(made, options):
    policy = make_policy(make_adapted(**options))
    engine, (server,), _ = made(policy)
    for seed in range(2):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5 and not server.adapters
        perturb(policy.model, seed)


# -- failures ----------------------------------------------------------------------------------


def other_tokens(body, answer):
    answer["choices"][0]["token_ids"] = [*answer["choices"][0]["token_ids"], 5]
    return answer


def fewer(body, answer):
    return {"choices": answer["choices"][1:]}


def endless(body, answer):
    choice = answer["choices"][0]
    choice["token_ids"] = [4] * 7
    choice["logprobs"] = {"tokens": ["token_id:4"] * 7, "token_logprobs": [-1.0] * 7}
    return answer


def short(body, answer):
    choice = answer["choices"][0]
    choice["token_ids"], choice["finish_reason"] = [4], "length"
    choice["logprobs"] = {"tokens": ["token_id:4"], "token_logprobs": [-1.0]}
    return answer


def infinite(body, answer):
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    logprobs[0] = float("nan")
    return answer


def broken(body, answer):
    raise Status(500, "EngineDeadError")


def hanging(body, answer):
    threading.Event().wait(60)
    return answer


def hurry(engine, server, route):
    """From now on this server has a 200th of the deadline for this route. All others have the whole
    of it, and may take their time where the machine is busy."""
    (client,) = [m.client for m in engine._open.fleet.members if m.url == server.url]
    post = client.post

    def hurried(path, body=None, *, seconds, **how):
        return post(path, body, seconds=seconds / 200 if path == route else seconds, **how)

    client.post = hurried


WRONG = {
    "garbage": (lambda body, answer: b"<html>", "answered with no completions: <html>"),
    "nothing": (lambda body, answer: {}, "answered with no completions"),
    "fewer": (fewer, "answered with 1 completions, of which 2 were asked for"),
    "other tokens": (other_tokens, "log-probs of other tokens"),
    "too many tokens": (endless, "7 tokens, of which at most 6"),
    "a short context": (short, "1 tokens as if that were its limit, of 6"),
    "log-probs that are none": (infinite, "not finite"),
    "an error": (broken, "answered /v1/completions with status 500: EngineDeadError"),
    "silence": (hanging, "did not answer /v1/completions within 0.3 s"),
}


@pytest.mark.parametrize("fault", every_second(WRONG))
def test_a_server_that_fails_is_named_and_the_others_do_its_work(made, fault):
    policy = make_policy()
    engine, servers, said = made(policy, servers=2, deadline=60.0)
    policy.load_into(engine)
    prompts = make_prompts()
    expected = engine.sample(prompts, 2, SAMPLING, 1)
    wrong, fact = WRONG[fault]

    def fail(server):
        server.faults[COMPLETIONS] = wrong
        if wrong is hanging:
            hurry(engine, server, COMPLETIONS)

    fail(servers[0])
    assert engine.sample(prompts, 2, SAMPLING, 1) == expected
    (line,) = said
    assert servers[0].url in line and fact in line
    assert engine.stats()["engine/lost"] == 1 and engine.stats()["engine/repeated"] >= 1
    fail(servers[1])
    with pytest.raises(NoServers) as error:
        engine.sample(prompts, 2, SAMPLING, 1)
    assert all(server.url in str(error.value) for server in servers)


@pytest.mark.slow
def test_a_server_that_has_other_weights_than_it_says_is_found_out(made):
    policy = make_policy()
    engine, servers, said = made(policy, servers=2)
    policy.load_into(engine)
    change(policy)
    servers[0]._load = lambda folder: None
    policy.load_into(engine)
    wait_until(lambda: said)  # the other server may have passed before
    assert len(said) == 1 and f"{servers[0].url} gives log-probs" in said[0]
    assert apart(policy, engine) < 1e-5


def test_a_server_that_says_another_version_is_found_out(made):
    policy = make_policy()
    engine, servers, said = made(policy, servers=2)
    servers[0].faults["/weight_info"] = lambda body, answer: {"weight_version": "yesterday"}
    policy.load_into(engine)
    wait_until(lambda: said)
    assert f"{servers[0].url} says that its weights are yesterday" in said[0]


def test_tokens_of_another_version_are_refused(made):
    policy = make_policy()
    engine, (server,), _ = made(policy, scale_out=True)
    policy.load_into(engine)

    def older(body, answer):
        answer["choices"][0]["weight_versions"][0]["version"] = "older"
        return answer

    server.faults[TOKENS] = older
    with pytest.raises(NoServers, match="tokens of version older"):
        engine.sample(make_prompts(), 2, SAMPLING, 1)


def test_a_given_server_that_was_started_again_loads_the_newest_version(made):
    policy = make_policy()
    engine, (server,), said = made(policy, restarts=2)
    policy.load_into(engine)
    expected = engine.sample(make_prompts(), 2, SAMPLING, 1)
    # As one that comes back under its address: the model of its files, and no version.
    server.version = "default"
    server.model.load_state_dict(make_model("qwen3", seed=5).state_dict())
    fail_once(server, COMPLETIONS)
    assert engine.sample(make_prompts(), 2, SAMPLING, 1) == expected
    assert said[0].partition(";")[0].endswith("starting")
    assert "is back, with" in said[1] and engine.stats()["engine/returned"] == 1


def test_a_server_that_was_started_again_and_said_nothing_is_found_out(made):
    policy = make_policy()
    engine, servers, said = made(policy, servers=2, restarts=1)
    policy.load_into(engine)
    expected = engine.sample(make_prompts(), 2, SAMPLING, 1)
    servers[0].version = "default"
    servers[0].model.load_state_dict(make_model("qwen3", seed=5).state_dict())
    assert engine.sample(make_prompts(), 2, SAMPLING, 1) == expected
    assert "while it sampled" in said[0] and engine.stats()["engine/repeated"] > 0


def test_what_a_server_refuses_ends_the_call_with_its_words(made):
    policy = make_policy()
    engine, (server,), _ = made(policy, restarts=3)
    policy.load_into(engine)

    def refuse(body, answer):
        raise Status(400, "the prompt is too long")

    server.faults[COMPLETIONS] = refuse
    with pytest.raises(ServerError, match="status 400: the prompt is too long"):
        engine.sample(make_prompts(), 2, SAMPLING, 1)


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 3}, {"repetition_penalty": 1.1}])
def test_filters_are_refused(made, filters):
    policy = make_policy()
    engine, _, _ = made(policy)
    policy.load_into(engine)
    with pytest.raises(ValueError, match="the policy's would be unknown"):
        engine.sample(make_prompts(), 2, replace(SAMPLING, **filters), 1)


# -- sleep -------------------------------------------------------------------------------------


def of_sleep(server):
    found = [call for call in server.calls if call[1:6] in ("sleep", "wake_", "colle")]
    return [c.replace("/collective_rpc", "load") for c in found]


@pytest.mark.slow
def test_servers_sleep_but_while_they_sample_and_then_have_the_newest_weights(made):
    policy = make_policy()
    engine, (server,), said = made(policy, sleep_level=2)
    policy.load_into(engine)
    # Before the first sample, so that what is free then is what training will find.
    assert of_sleep(server) == ["load", "/sleep level=2"]
    for seed in range(2):
        engine.sample(make_prompts(), 1, SAMPLING, 1)
        change(policy, seed)
        policy.load_into(engine)
    engine.sample(make_prompts(), 1, SAMPLING, 1)
    assert apart(policy, engine) < 1e-5  # the same version once more: what was dropped is loaded
    again = ["/wake_up tags=weights", "load", "/wake_up tags=kv_cache", "/sleep level=2"]
    assert of_sleep(server) == ["load", "/sleep level=2", *again * 4]
    assert said == []


def test_the_trainer_gives_its_free_memory_back_before_servers_wake(made, monkeypatch):
    policy = make_policy()
    policy.world = replace(policy.world, device=torch.device("cuda", 0))  # the servers', too
    engine, (server,), _ = made(policy, sleep_level=2)
    policy.load_into(engine)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: server.calls.append("emptied"))
    change(policy)
    policy.load_into(engine)
    server.calls.clear()
    engine.sample(make_prompts(), 1, SAMPLING, 1)
    assert server.calls[0] == "emptied"
    assert of_sleep(server)[0] == "/wake_up tags=weights"


def test_an_adapter_stays_where_servers_keep_the_weights(made):
    policy = make_policy(make_adapted(base=make_model("qwen3", seed=9)))
    engine, (server,), _ = made(policy, lora=True, sleep_level=1)
    policy.load_into(engine)
    for _ in range(2):
        assert apart(policy, engine) < 1e-5
    assert of_sleep(server)[-4:] == [
        "/sleep level=1", "/wake_up tags=weights", "/wake_up tags=kv_cache", "/sleep level=1"
    ]  # fmt: skip
    loads = [body["lora_name"] for route, body in server.bodies if route == "/v1/load_lora_adapter"]
    assert len(loads) == len(set(loads)) == 2  # the perturbed one before


def test_an_engine_that_closes_while_it_samples_puts_no_server_to_sleep(made):
    policy = make_policy()
    engine, (server,), _ = made(policy, sleep_level=2, deadline=60.0)
    policy.load_into(engine)
    server.faults[COMPLETIONS] = hanging
    server.calls.clear()
    (begun,) = engine.submit(make_prompts()[:1], 1, SAMPLING, 1)
    wait_until(lambda: COMPLETIONS in server.calls)
    start = time.monotonic()
    engine._run(engine._open.fleet.close())
    assert begun.cancelled() and time.monotonic() - start < 5
    assert of_sleep(server) == ["/wake_up tags=weights", "load", "/wake_up tags=kv_cache"]


@pytest.mark.parametrize(
    ("route", "fault"), in_pairs(["/sleep", "/wake_up", "/collective_rpc"], [broken, hanging])
)
def test_a_server_that_fails_at_any_call_of_sleep_is_out_within_the_deadline(made, route, fault):
    policy = make_policy()
    engine, servers, said = made(policy, servers=2, sleep_level=2, deadline=60.0)
    policy.load_into(engine)
    expected = engine.sample(make_prompts(), 1, SAMPLING, 1)
    servers[0].faults[route] = fault
    hurry(engine, servers[0], route)
    for _ in range(2):
        assert engine.sample(make_prompts(), 1, SAMPLING, 1) == expected
    fact = "did not answer {} within 0.3 s" if fault is hanging else "answered {} with status 500"
    assert len(said) == 1 and f"{servers[0].url} {fact.format(route)}" in said[0]
