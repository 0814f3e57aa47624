"""vLLM's weight transfer over NCCL, whose sender is played: what it is given, in what order servers
are asked, and that files take over wherever it fails. Not measured without a GPU."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from rloo.engines.vllm import from_options, nccl
from rloo.engines.vllm.server_process import ServerConfig
from support.engines import make_prompts
from support.fake_vllm import Status
from support.vllm_engines import SAMPLING, change, made_on_fakes, make_policy, sample_of

made = pytest.fixture(made_on_fakes)
TRANSFERS = ServerConfig("m", transfers=True)
ROUTES = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights")


class Sender:
    """vLLM's, as far as it can be seen from outside; `link` is the wire."""

    link: ClassVar[dict] = {}
    faults: ClassVar[dict] = {}

    def __init__(self, how, client, source) -> None:
        self.how, self.client, self.source = how, client, source

    @classmethod
    def trainer_init(cls, how, *, client, source):
        cls.link.setdefault("how", []).append(how)
        client.init_weight_transfer_engine({"world_size": how.world_size})
        return cls(how, client, source)

    def send_weights(self) -> None:
        known = self.source.metadata()
        self.client.start_weight_update()
        self.client.update_weights({"names": [each.name for each in known]})
        pairs = list(self.source)
        assert [(n, t.dtype, tuple(t.shape)) for n, t in pairs] == [
            (each.name, each.dtype, each.shape) for each in known
        ]
        self.faults.get("sending", lambda: None)()
        self.link["to"].received = dict(pairs)
        self.client.finish_weight_update()


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
def played(monkeypatch):
    """vLLM's modules with `WeightSender`, and a trainer that could send."""
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
    monkeypatch.setattr(Sender, "link", {})
    monkeypatch.setattr(Sender, "faults", {})
    return Sender


def apart(policy, engine) -> float:
    prompts, found = make_prompts(), []
    for prompt, group in zip(prompts, engine.sample(prompts, 2, SAMPLING, 1), strict=True):
        for c in group:
            ours = policy.score(policy.batch([sample_of(prompt, c)]))
            found.append((ours - torch.tensor(c.policy_logprobs)).abs().max().item())
    return max(found)


def make(made, policy, played, **settings):
    engine, (server,), said = made(policy, serving=TRANSFERS, routes=ROUTES, **settings)
    played.link["to"] = server
    return engine, server, said


def test_every_version_is_sent_and_verified(made, played):
    policy = make_policy()
    engine, server, said = make(made, policy, played)
    for seed in range(3):
        policy.load_into(engine)
        assert apart(policy, engine) < 1e-5
        change(policy, seed)
    (how,) = played.link["how"]
    assert (how.world_size, how.rank, how.master_address) == (3, 0, "127.0.0.1")
    order = [call for call in server.calls if "weight" in call or "pause" in call]
    once = ["/pause mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [call for call in order if call in once] == once * 3
    assert order.count("/init_weight_transfer_engine") == 1
    assert "/collective_rpc" not in server.calls and said == []


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
        start = nccl.NCCLTransfer.__init__
        monkeypatch.setattr(
            nccl.NCCLTransfer,
            "__init__",
            lambda self, *given: start(self, *given[:-1], given[-1] / 30),
        )
    engine, server, said = make(made, policy, played, deadline=60.0)

    def refuse(body, answer):
        raise Status(500, "no")

    if callable(place):
        played.faults["sending"] = place
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
    engine, server, _ = make(made, policy, played)

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
