"""vLLM's weight transfer over NCCL, whose sender is played: what it is given, in what order servers
are asked, and that files take over wherever it fails. Not measured without a GPU."""

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from rloo.engines.vllm import from_options, nccl
from rloo.engines.vllm.client import VLLMClient
from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION
from rloo.engines.vllm.server_process import ServerConfig
from rloo.engines.vllm.server_state import ServerState, ServerWeights
from rloo.model.export import PolicyExport
from support.engines import make_prompts
from support.fake_vllm import FakeVLLM, Status
from support.models import make_model
from support.text import make_tokenizer
from support.vllm_engines import (
    SAMPLING,
    Slow,
    change,
    has,
    made_on_fakes,
    make_policy,
    nudge,
    sample_of,
    wait_until,
)

made = pytest.fixture(made_on_fakes)
RPC = "/collective_rpc"
TRANSFERS = ServerConfig("m", transfers=True)
ROUTES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights")


class Sender:
    """vLLM's, as far as it can be seen from outside. `link` is the wire: the servers, and what was
    made and sent."""

    link: ClassVar[dict] = {}

    def __init__(self, how, client, source) -> None:
        self.how, self.client, self.source = how, client, source

    @classmethod
    def trainer_init(cls, how, *, client, source):
        client.init_weight_transfer_engine(
            {"master_port": how.master_port, "rank_offset": 1, "world_size": how.world_size}
        )
        sender = cls(how, client, source)
        first = [(server.known["rank_offset"], server.world_size) for server in sender.servers]
        ranks = [rank for offset, size in first for rank in range(offset, offset + size)]
        assert ranks == list(range(1, how.world_size)), "NCCL would wait for a rank"
        cls.link["made"].append(how)
        cls.link["offsets"].append([offset for offset, _ in first])
        return sender

    @property
    def servers(self):
        """The servers of this group."""
        for server in self.link["to"]:
            infos = [body["init_info"] for route, body in server.bodies if route == ROUTES[0]]
            server.known = infos[-1] if infos else {"master_port": None}
        return [s for s in self.link["to"] if s.known["master_port"] == self.how.master_port]

    def send_weights(self) -> None:
        known = self.source.metadata()
        self.client.start_weight_update()
        threads = ThreadPoolExecutor(1)
        asked = threads.submit(self.client.update_weights, {"names": [m.name for m in known]})
        pairs = list(self.source)
        assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == [
            (each.name, each.dtype, each.shape) for each in known
        ]
        if asked.exception(60) is not None:
            time.sleep(60)  # NCCL waits for the server
            asked.result(0)
        self.link["fault"]()
        self.link["sent"].append(len(self.servers))
        for server in self.servers:
            server.received = dict(pairs)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.link["ended"].append(self.how)


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple


@dataclass
class InitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int


@pytest.fixture
def played(request, monkeypatch):
    """vLLM's modules with `Sender`. Its parameter: seconds that a server waits for the others."""
    names = ("", ".base", ".factory", ".nccl_engine")
    for name in (
        "vllm",
        "vllm.distributed",
        *(f"vllm.distributed.weight_transfer{n}" for n in names),
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    package = "vllm.distributed.weight_transfer"
    sys.modules[f"{package}.base"].ParamMeta = ParamMeta
    sys.modules[f"{package}.base"].WeightSource = object
    sys.modules[f"{package}.factory"].WeightTransferTrainerFactory = Sender
    sys.modules[f"{package}.nccl_engine"].NCCLTrainerInitInfo = InitInfo
    link = {name: [] for name in ("to", "made", "offsets", "sent", "ended")}
    monkeypatch.setattr(Sender, "link", {**link, "fault": lambda: None})
    # On a busy machine, a server is not ready within 1 s.
    monkeypatch.setattr(nccl, "READY_SECONDS", getattr(request, "param", 50.0))
    return Sender


def apart(policy, engine) -> float:
    prompts, found = make_prompts(), []
    for prompt, group in zip(prompts, engine.sample(prompts, 2, SAMPLING, 1), strict=True):
        for c in group:
            ours = policy.score(policy.batch([sample_of(prompt, c)]))
            found.append((ours - torch.tensor(c.policy_logprobs)).abs().max().item())
    return max(found)


def make(made, policy, played, *, sizes=(2,), **settings):
    engine, servers, said = made(
        policy, serving=TRANSFERS, routes=ROUTES, servers=len(sizes), **settings
    )
    for server, size in zip(servers, sizes, strict=True):
        server.world_size = size
    played.link["to"] = servers
    return engine, servers, said


def load(policy, engine, servers, seed=None):
    """Load a version, changed with `seed`, into all of `servers`."""
    if seed is not None:
        change(policy, seed)
    policy.load_into(engine)
    label = next(s.version for s in servers if s.version.endswith(f"-{engine.version}"))
    wait_until(lambda: {server.version for server in servers} == {label})


def count(servers, route):
    return [server.calls.count(route) for server in servers]


def test_every_version_is_sent_and_verified(made, played):
    policy = make_policy()
    engine, (server,), said = make(made, policy, played)
    for seed in range(3):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5
        change(policy, seed)
    (how,) = played.link["made"]
    assert (how.world_size, how.rank, how.master_address) == (3, 0, "127.0.0.1")
    order = [call for call in server.calls if "weight" in call or "pause" in call]
    once = ["/pause mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [call for call in order if call in once] == once * 3
    assert order.count("/init_weight_transfer_engine") == 1
    assert "/collective_rpc" not in server.calls and said == []


def test_one_broadcast_serves_all_servers(made, played):
    """Servers of 1, 2 and 4 workers. Each call returns once it has reached all servers."""
    policy = make_policy()
    engine, servers, said = make(made, policy, played, sizes=(1, 2, 4))
    for route in (*ROUTES, "/finish_weight_update", "/get_world_size"):
        together = threading.Barrier(3)
        for server in servers:
            server.faults[route] = lambda _, answer, met=together: met.wait(50) * 0 or answer
    for seed in range(3):
        load(policy, engine, servers, seed)
        assert apart(policy, engine) < 1e-5
    assert played.link["sent"] == [3, 3, 3]
    assert [how.world_size for how in played.link["made"]] == [8]
    assert played.link["offsets"] == [[1, 2, 4]]
    assert count(servers, RPC) == [0, 0, 0] and said == []


def test_only_a_delta_is_written_where_the_tensors_are_sent(made, played, tmp_path):
    """A server that is lost meanwhile reads the chain of deltas."""
    policy = make_policy()
    engine, servers, said = make(
        made, policy, played, sizes=(1, 1), dtype=torch.bfloat16, tolerance=0.2,
        extensions=(EXTENSION, EXTENSION), weights_folder=tmp_path,
    )  # fmt: skip
    sizes = []
    for seed in (None, 1, 2):
        if seed is not None:
            nudge(policy, seed)
        load(policy, engine, servers)
        assert all(has(server, policy) for server in servers)
        newest = max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime).parent
        sizes.append(sum(path.stat().st_size for path in newest.glob("*.safetensors")))
    assert played.link["sent"] == [2, 2, 2] and said == []
    assert count(servers, RPC) == [0, 0] and max(sizes[1:]) < sizes[0] / 4

    def fail() -> None:
        raise RuntimeError("the network is down")

    played.link["fault"] = fail
    nudge(policy, 3)
    load(policy, engine, servers)
    assert all(has(server, policy) for server in servers) and count(servers, RPC) == [1, 1]
    assert len(said) == 1 and "by files from now on, not over NCCL" in said[0]


@pytest.mark.parametrize("played", [4.0], indirect=True)
def test_a_slow_server_does_not_delay_the_others(made, played):
    policy = make_policy()
    engine, servers, said = make(made, policy, played, sizes=(1, 1, 1))
    load(policy, engine, servers)
    slow = Slow(servers[2], "/pause")
    start = time.monotonic()
    load(policy, engine, servers[:2], 1)
    assert time.monotonic() - start < 25
    assert apart(policy, engine) < 1e-5 and count(servers, RPC) == [1, 1, 0]
    slow.go()
    wait_until(lambda: servers[2].version == servers[0].version)
    assert count(servers, RPC) == [1, 1, 1]
    load(policy, engine, servers, 2)
    assert apart(policy, engine) < 1e-5 and count(servers, RPC) == [1, 1, 1]
    assert played.link["sent"] == [3, 3] and len(played.link["made"]) == 1
    assert said == [] and engine.stats()["engine/lost"] == 0


@pytest.mark.parametrize("returns", [False, True])
def test_a_lost_server_leaves_the_group_until_it_is_back(made, played, returns):
    policy = make_policy()
    engine, servers, said = make(made, policy, played, sizes=(2, 1, 1), restarts=int(returns))
    load(policy, engine, servers)

    def fail_once(body, answer):
        del servers[1].faults["/update_weight_version"]
        raise Status(500, "no")

    servers[1].faults["/update_weight_version"] = fail_once
    load(policy, engine, [servers[0], servers[2]], 1)
    wait_until(lambda: len(said) == 1 + returns)
    live = servers if returns else [servers[0], servers[2]]
    for seed in (2, 3):
        load(policy, engine, live, seed)
        assert apart(policy, engine) < 1e-5
    assert played.link["sent"] == [3, 3, len(live), len(live)]
    assert played.link["offsets"] == [[1, 3, 4], [1, 3, 4] if returns else [1, 3]]
    assert played.link["ended"] == played.link["made"][:1]
    assert count(servers, "/shutdown_weight_transfer_engine") == [1, 0, 1]
    assert count(servers, RPC) == [0, int(returns), 0]  # a returning server reads the folder
    assert len(said) == 1 + returns and not any("NCCL" in text for text in said)


@pytest.fixture
def group(tmp_path, played):
    """Three servers, and what sends versions to them in given orders."""
    PolicyExport(make_policy(), torch.float32).write(tmp_path)
    servers = [FakeVLLM(make_model("qwen3"), make_tokenizer()) for _ in range(3)]
    played.link["to"], said = servers, []

    async def send(orders, meanwhile):
        members = [ServerState(VLLMClient(s.url), receives=True) for s in servers]
        group = nccl.NCCLGroup(members, torch.device("cpu"), 60.0, said.append)
        found = []
        for version, order in enumerate(orders):
            weights = ServerWeights(version, tmp_path, f"v{version}")
            sent = [asyncio.create_task(group.sent(members[n], weights)) for n in order]
            if version == 0:
                await asyncio.to_thread(meanwhile, members)
            async with asyncio.timeout(50):
                found += await asyncio.gather(*sent)
        for member in members:
            await member.client.close()
        return found

    yield servers, said, lambda *given: asyncio.run(send(*given))
    for server in servers:
        server.close()


def test_a_server_lost_during_a_transfer_ends_it(played, group):
    """The transfer ends before its deadline, and all servers read the folder."""
    servers, said, send = group
    slow = Slow(servers[1], "/update_weights")

    def lose(members):
        assert slow.seen.wait(50)
        members[1].fault = "it is gone"

    assert send([range(3)] * 2, lose) == [False] * 6
    slow.go()
    urls, fact = ", ".join(server.url for server in servers), "not over NCCL: it is gone"
    assert said == [f"weights go to {urls} by files from now on, {fact}"]
    assert count(servers, "/start_weight_update") == [1, 1, 1]


def test_the_group_does_not_depend_on_the_order_in_which_servers_are_ready(played, group):
    _, said, send = group
    assert send([(0, 1, 2), (2, 0, 1)], lambda _: None) == [True] * 6
    assert played.link["sent"] == [3, 3] and played.link["offsets"] == [[1, 3, 5]] and said == []


def test_a_server_that_has_the_version_already_is_not_awaited(played, group):
    """A server that is back has loaded the newest version from the folder."""
    _, said, send = group

    def load_before(members):
        members[2].label = "v1"

    assert send([(0, 1, 2), (0, 1), (0, 1, 2)], load_before) == [True] * 8
    assert played.link["offsets"] == [[1, 3, 5], [1, 3], [1, 3, 5]] and said == []


def test_all_servers_of_a_failed_transfer_read_the_folder(made, played):
    policy = make_policy()
    engine, servers, said = make(made, policy, played, sizes=(1, 1, 1))

    def refuse(body, answer):
        raise Status(500, "no")

    servers[1].faults["/update_weights"] = refuse
    for seed in range(2):
        load(policy, engine, servers, seed)
        assert apart(policy, engine) < 1e-5
    assert len(said) == 1 and "answered /update_weights with status 500" in said[0]
    assert all(server.url in said[0] for server in servers)
    assert count(servers, RPC) == [2, 2, 2] and played.link["sent"] == []
    assert count(servers, "/start_weight_update") == [1, 1, 1]


def test_servers_of_several_machines_get_an_address_that_all_can_reach():
    assert nccl.shared_address(["127.0.0.1", "10.0.0.3"]) == "10.0.0.3"
    assert nccl.shared_address(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"


def hanging():
    time.sleep(60)


def failing():
    raise RuntimeError("unhandled cuda error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "said_there"),
    [
        ("/init_weight_transfer_engine", "answered /init_weight_transfer_engine with status 500"),
        ("/start_weight_update", "answered /start_weight_update with status 500"),
        ("/update_weights", "answered /update_weights with status 500"),
        ("/finish_weight_update", "answered /finish_weight_update with status 500"),
        (failing, "unhandled cuda error"),
        (hanging, "TimeoutError"),
    ],
)
def test_files_take_over_where_it_fails(made, played, place, said_there, monkeypatch):
    policy = make_policy()
    if place is hanging:  # what is sent has 2 s, and what is asked for beside it all of the 60
        start = nccl.NCCLGroup.__init__
        monkeypatch.setattr(
            nccl.NCCLGroup,
            "__init__",
            lambda self, members, device, seconds, say: start(
                self, members, device, seconds / 30, say
            ),
        )
    engine, (server,), said = make(made, policy, played, deadline=60.0)

    def refuse(body, answer):
        raise Status(500, "no")

    if callable(place):
        played.link["fault"] = place
    else:
        server.faults[place] = refuse
    for seed in range(2):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5
        change(policy, seed)
    assert len(said) == 1 and said_there in said[0]
    assert f"weights go to {server.url} by files from now on, not over NCCL" in said[0]
    assert server.calls.count("/collective_rpc") == 2


def test_weights_that_were_sent_wrongly_are_caught(made, played):
    policy = make_policy()
    engine, (server,), _ = make(made, policy, played)

    def wrong(body, answer):
        with torch.no_grad():
            for parameter in server.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    server.faults["/finish_weight_update"] = wrong
    with pytest.raises(OSError, match="away from the trainer's after loading"):
        policy.load_into(engine)


def test_a_server_that_takes_none_is_given_files(made):
    policy = make_policy()
    engine, (server,), said = made(policy, serving=TRANSFERS)
    policy.load_into(engine)
    assert apart(policy, engine) < 1e-5 and server.calls.count("/collective_rpc") == 1
    fact = "it has no route /init_weight_transfer_engine (--weight-transfer-config)"
    assert said == [f"weights go to {server.url} by files, not over NCCL: {fact}"]


@pytest.mark.parametrize(
    ("options", "gpu", "transfers", "noted"),
    [
        ({}, True, True, None),
        ({}, False, False, None),
        ({"engine_kwargs": {"weight_transfer": "nccl"}}, True, True, None),
        ({"engine_kwargs": {"weight_transfer": "nccl"}}, False, False, "the trainer has no GPU"),
        ({"engine_kwargs": {"weight_transfer": "files"}}, True, False, None),
        ({"rollout_engine": "vllm", "vllm_server_base_url": None}, True, False, None),
        (
            {
                "rollout_engine": "vllm",
                "vllm_server_base_url": None,
                "engine_kwargs": {"weight_transfer": "nccl"},
            },
            True,
            False,
            "the servers have the trainer's own GPU",
        ),
    ],
)
def test_where_weights_may_go_over_nccl(monkeypatch, options, gpu, transfers, noted):
    given = {"rollout_engine": "vllm_server", "vllm_server_base_url": ["http://h:1"], **options}
    policy = make_policy(**given)
    monkeypatch.setattr(
        from_options, "unavailable_reason", (lambda _: None) if gpu else nccl.unavailable_reason
    )
    settings, _ = from_options.settings_of(policy, Path("logs"))
    assert settings.server.transfers == transfers
    line = ["--weight-transfer-config", '{"backend": "nccl"}']
    assert (line[0] in settings.server.command()) == transfers
    notes = [note for note in policy.notes if "NCCL" in note]
    assert len(notes) == (noted is not None) and all(noted in note for note in notes)
    assert "not installed" in (nccl.unavailable_reason(torch.device("cuda")) or "")
