"""Deltas of the weights on servers that speak vLLM's protocol."""

import pytest
import torch

from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION
from rloo.engines.weight_store import WeightStore
from support.engines import make_prompts
from support.models import make_model
from support.vllm_engines import (
    COMPLETIONS,
    SAMPLING,
    damage,
    fail_once,
    has,
    made_on_fakes,
    make_policy,
    nudge,
    wait_until,
)

made = pytest.fixture(made_on_fakes)


def methods(server) -> list[str]:
    return [body["method"] for route, body in server.bodies if route == "/collective_rpc"]


@pytest.fixture
def start(made, tmp_path):
    def start(policy, *extensions, **settings):
        return made(
            policy,
            servers=len(extensions),
            extensions=extensions,
            dtype=torch.bfloat16,
            tolerance=0.2,
            weights_folder=tmp_path,
            **settings,
        )

    return start


def store_of(folder) -> WeightStore:
    """The only store in a folder."""
    (found,) = folder.iterdir()
    return WeightStore(found)


def test_servers_with_the_extension_are_sent_what_has_changed(start, tmp_path):
    policy = make_policy()
    engine, servers, said = start(policy, EXTENSION, EXTENSION)
    for seed in range(4):
        policy.load_into(engine)
        store = store_of(tmp_path)
        wait_until(lambda: all(has(server, policy) for server in servers))
        assert store.base(engine.version) == (engine.version - 1 if seed else None)
        nudge(policy, seed)
    stats = engine.stats()
    assert 0.005 < stats["engine/changed_share"] < 0.02
    complete = sum(p.numel() for p in policy.model.parameters()) * 2
    assert 0 < stats["engine/sent_bytes"] < 0.1 * complete
    assert store.all() == [engine.version - age for age in (3, 2, 1, 0)]
    assert methods(servers[0]) == ["load_version"] * 4 and said == []


@pytest.mark.parametrize("extensions", [("",), (EXTENSION, "")])
def test_complete_versions_are_written_if_a_server_cannot_load_deltas(start, extensions, tmp_path):
    policy = make_policy()
    engine, servers, _ = start(policy, *extensions)
    for seed in range(2):
        policy.load_into(engine)
        wait_until(lambda: all(has(server, policy) for server in servers))
        nudge(policy, seed)
    (*older, newest) = store_of(tmp_path).all()
    # A server that loads later than the first one may still read the version before.
    assert newest == engine.version and older in ([], [newest - 1])
    assert "engine/changed_share" not in engine.stats()
    assert methods(servers[-1]) == ["reload_weights"] * 2


@pytest.mark.parametrize("counts", [False, True])
def test_a_damaged_delta_is_replaced_by_complete_weights(start, tmp_path, counts):
    policy = make_policy()
    engine, (server, other), said = start(policy, EXTENSION, EXTENSION)
    policy.load_into(engine)
    store = store_of(tmp_path)
    nudge(policy, 0)
    policy.load_into(engine)
    wait_until(lambda: has(server, policy) and has(other, policy))
    nudge(policy, 1)
    damage(store.path(engine.version), counts=counts)  # the base of the next version
    policy.load_into(engine)
    wait_until(lambda: has(server, policy) and has(other, policy) and len(said) == 2)
    assert engine.stats()["engine/lost"] == 0
    assert methods(server) == ["load_version"] * 3 + ["reload_weights"]
    assert all("it loads the complete weights" in line for line in said)
    assert store.copy_path(engine.version).exists()
    for seed, base in ((2, None), (3, engine.version + 1)):
        nudge(policy, seed)
        policy.load_into(engine)
        wait_until(lambda: has(server, policy) and has(other, policy))
        assert store.base(engine.version) == base
    names = {path.name for path in store.folder.iterdir()} - {"in-use"}
    assert names == {f"v{engine.version - 1:08d}", f"v{engine.version:08d}"}


@pytest.mark.parametrize("extension", [EXTENSION, ""])
def test_a_server_without_the_base_is_given_all_weights(start, extension):
    """A server of the user is started again, with or without the extension."""
    policy = make_policy()
    engine, (server,), said = start(policy, EXTENSION, restarts=2)
    for seed in range(3):
        policy.load_into(engine)
        nudge(policy, seed)
    policy.load_into(engine)
    expected = engine.sample(make_prompts(), 2, SAMPLING, 1)
    server.version, server.extension = "default", extension
    server.model.load_state_dict(make_model("qwen3", seed=5).state_dict())
    fail_once(server, COMPLETIONS)
    assert engine.sample(make_prompts(), 2, SAMPLING, 1) == expected
    assert has(server, policy) and "is back, with" in said[-1]
    assert methods(server)[-1] == ("load_version" if extension else "reload_weights")
