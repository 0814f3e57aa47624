"""Servers on the GPUs of the ranks that train: their GPUs, shares and order of calls, and what
happens if a server of one rank fails."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import pytest
import torch

from rloo.algorithm.rank_rollout import generate_on_ranks
from rloo.distributed import World
from rloo.engines.vllm.colocation import RankPlace, place_of, site_of
from rloo.engines.vllm.from_options import settings_of
from rloo.engines.vllm.router import NoServers
from rloo.engines.vllm.server_process import ServerConfig
from rloo.engines.vllm.settings import VLLMSettings
from rloo.engines.vllm.vllm_engine import VLLMEngine
from rloo.engines.weight_store import WeightStore
from rloo.model.export import PolicyExport
from support.adapters import make_adapted
from support.engines import make_prompts
from support.fake_vllm import Status
from support.linked_vllm import LinkedServers
from support.models import CPU, make_model
from support.process_groups import gloo_worlds, of_each
from support.vllm_engines import COMPLETIONS, SAMPLING, change, make_policy

TWO_NODES = [RankPlace(host, gpu) for host in ("a", "b") for gpu in "4567"]


@pytest.mark.parametrize(
    ("size", "devices"),
    [(1, ["4", "5", "6", "7"] * 2), (2, ["4,5"] * 2 + ["6,7"] * 2 + ["4,5"] * 2 + ["6,7"] * 2)],
)
def test_a_server_has_the_gpus_of_its_ranks(size, devices):
    sites = [site_of(TWO_NODES, rank, size) for rank in range(8)]
    assert [site.devices for site in sites] == devices
    assert [site.number for site in sites] == [rank // size for rank in range(8)]
    assert {(site.servers_here, site.one_machine) for site in sites} == {(4 // size, False)}


def test_ranks_without_gpus_have_servers_without_devices():
    places = [RankPlace("a")] * 4
    assert [site_of(places, rank, 2).devices for rank in range(4)] == [None] * 4
    assert site_of(places, 3, 2).one_machine


@pytest.mark.parametrize(
    ("places", "size", "reason"),
    [
        (TWO_NODES[:6], 4, "vllm_tensor_parallel_size is 4 and 6 processes train"),
        (TWO_NODES[1:7], 2, "ranks 2 and 3 share a server and are on the machines a and b"),
        ([RankPlace("a", "0")] * 2, 2, "ranks 0 to 1 would have the GPUs 0, 0"),
    ],
)
def test_ranks_that_cannot_share_servers_are_refused(places, size, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*\(vllm_tensor_parallel_size, num_processes"):
        site_of(places, 0, size)


@pytest.mark.parametrize(
    ("seen", "gpu"), [(None, "1"), ("4, 6", "6"), ("GPU-a,GPU-b", "GPU-b"), ("7", "1")]
)
def test_the_name_of_a_ranks_gpu_is_that_of_the_outer_variable(monkeypatch, seen, gpu):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert place_of(torch.device("cuda", 1)).gpu == gpu
    assert place_of(torch.device("cpu")).gpu is None


# -- engines of several ranks, which are threads here -------------------------------------------


class LoggedExport(PolicyExport):
    """Adds to `events` when its rank returns cached GPU memory."""

    events: list

    def free_cache(self):
        self.events.append((None, f"emptied {self.world.rank}"))


class TwoMachines(World):
    """Ranks of two machines."""

    def all_gather_object(self, value):
        return [
            (host, gpu)
            for host, (_, gpu) in zip("ab", super().all_gather_object(value), strict=True)
        ]


class Ranks:
    """`size` ranks with GPUs, of which each `shared` have a server; the policies are equal."""

    def __init__(self, folder, closing, size, shared=1, *, lora=False, deltas=False, **settings):
        self.folder, self.size = folder, size
        self.linked = LinkedServers(lora=lora)
        closing.callback(self.linked.close)
        _, worlds = closing.enter_context(gloo_worlds(size))
        places = [RankPlace("here", str(4 + rank)) for rank in range(size)]
        self.worlds = [replace(w, device=torch.device("cuda", w.rank)) for w in worlds]
        made = make_model("qwen3"), make_adapted(base=make_model("qwen3", seed=9))
        state = made[lora].state_dict()
        self.engines, self.policies, self.notes = [], [], []
        for world in self.worlds:
            model = make_adapted(base=make_model("qwen3", seed=9)) if lora else make_model("qwen3")
            model.load_state_dict(state)
            policy = make_policy(model)
            policy.world = world
            dtype = torch.bfloat16 if deltas else torch.float32
            source, site = LoggedExport(policy, dtype), site_of(places, world.rank, shared)
            source.events = self.linked.events
            level = settings.get("sleep_level", 2)
            server = ServerConfig(
                "m",
                tensor_parallel_size=shared,
                lora_rank=source.adapter_rank,
                sleeps=level is not None,
                executable=tuple(self.linked.executable),
            )
            how = {"sleep_level": 1 if lora else 2, "deadline": 60.0, "restarts": 0} | settings
            made_of = VLLMSettings(
                server,
                devices=(site.devices,),
                log_folder=folder / "logs",
                ranks_per_engine=shared,
                first_number=site.number,
                **how,
            )
            engine = VLLMEngine("vllm", made_of, source, self.notes.append)
            closing.callback(engine.close)
            self.engines.append(engine)
            self.policies.append(policy)

    def each(self, work):
        """The results of `work(rank)` in all ranks; an error of a rank ends the others' waits."""

        def one(rank):
            with self.worlds[rank].reporting_failure():
                return work(rank)

        return of_each(self.size, one)

    def load(self):
        self.each(lambda rank: self.policies[rank].load_into(self.engines[rank]))

    def change(self, seed=1):
        for policy in self.policies:
            change(policy, seed)

    def sample(self, prompts=None, noise=1):
        prompts = make_prompts() if prompts is None else prompts

        def one(rank):
            engine, world = self.engines[rank], self.worlds[rank]
            drawn = generate_on_ranks(engine, prompts, 4, SAMPLING, noise, world)
            self.linked.events.append((None, f"trains {rank}"))
            return drawn

        return self.each(one)

    def errors(self, work):
        """The errors that `work(rank)` raises in each rank."""

        def one(rank):
            with pytest.raises(OSError) as error:
                work(rank)
            return error.value

        return self.each(one)


@pytest.fixture
def make_ranks(tmp_path):
    numbers = count()
    with ExitStack() as closing:

        def make(*sizes, **how):
            folder = tmp_path / f"run-{next(numbers)}"
            (folder / "logs").mkdir(parents=True)
            return Ranks(folder, closing, *sizes, **how)

        yield make


@pytest.mark.parametrize(("size", "shared"), [(2, 1), (4, 1), (4, 2), (2, 2)])
def test_each_server_samples_the_share_of_its_ranks_and_all_get_all(make_ranks, size, shared):
    alone, ranks = make_ranks(1), make_ranks(size, shared)
    for some in (alone, ranks):
        some.load()
    expected, found = alone.sample()[0], ranks.sample()
    tokens = [[c.token_ids for c in group] for group in expected]
    assert all([[c.token_ids for c in g] for g in drawn] == tokens for drawn in found)
    assert sorted(s["devices"] for s in ranks.linked.started) == [
        ",".join(str(4 + rank + n) for n in range(shared)) for rank in range(0, size, shared)
    ]
    assert all(f"--tensor-parallel-size {shared}" in " ".join(s["arguments"]) for s in
               ranks.linked.started)  # fmt: skip
    for server in ranks.linked.servers:
        asked = [body for route, body in server.bodies if route == COMPLETIONS]
        assert sum(body["n"] for body in asked if body["temperature"]) == 16 * shared / size
    assert len(list((ranks.folder / "logs").glob("vllm-*.log"))) == size // shared


def test_there_may_be_more_servers_than_prompts(make_ranks):
    alone, ranks = make_ranks(1), make_ranks(4)
    prompts = make_prompts()[2:3]
    for some in (alone, ranks):
        some.load()
    expected = [[c.token_ids for c in group] for group in alone.sample(prompts)[0]]
    for drawn in ranks.sample(prompts):
        assert [[c.token_ids for c in group] for group in drawn] == expected


@pytest.mark.parametrize(("size", "shared"), [(2, 1), (4, 2)])
def test_the_caches_are_emptied_before_a_server_wakes_and_ranks_train_while_it_sleeps(
    make_ranks, size, shared
):
    ranks = make_ranks(size, shared)
    events = ranks.linked.events
    ranks.load()
    assert [call for _, call in events if "sleep" in call] == ["/sleep level=2"] * (size // shared)
    ranks.change()
    ranks.load()
    events.clear()
    ranks.sample()
    for first in range(0, size, shared):
        mine = [str(rank) for rank in range(first, first + shared)]
        devices = ",".join(str(4 + int(rank)) for rank in mine)
        calls = [c for d, c in events if d == devices or (d is None and c.split()[1] in mine)]
        order = [calls.index(c) for c in ("/wake_up tags=weights", "/collective_rpc")]
        order += [
            calls.index("/wake_up tags=kv_cache"),
            len(calls) - calls[::-1].index(COMPLETIONS),
        ]
        order += [calls.index("/sleep level=2")]
        assert order == sorted(order)
        assert all(calls.index(f"emptied {rank}") < order[0] for rank in mine)
        assert all(calls.index(f"trains {rank}") > order[-1] for rank in mine)


def test_adapters_are_loaded_by_every_server(make_ranks):
    ranks = make_ranks(2, lora=True)
    ranks.load()
    for _ in range(2):
        for group in ranks.sample()[0]:
            assert len(group) == 4
    assert {len(server.adapters) for server in ranks.linked.servers} == {1}
    loads = [call for _, call in ranks.linked.events if call == "/v1/load_lora_adapter"]
    assert len(loads) == 4  # the perturbed one, and the first version
    assert ranks.notes == []


def versions_in(folder):
    """The store of the run, and the newest version."""
    store = WeightStore(next(folder.glob("rloo-weights-*")))
    return store, store.all()[-1]


@pytest.mark.parametrize("refuses", [None, 0, 1])
def test_every_server_loads_deltas_and_the_main_process_repairs_them(make_ranks, tmp_path, refuses):
    """Only the main process has all weights in its memory."""
    ranks = make_ranks(2, deltas=True, tolerance=0.2, weights_folder=tmp_path, restarts=1)
    ranks.load()
    servers = dict(zip([s["devices"] for s in ranks.linked.started], ranks.linked.servers,
                       strict=True))  # fmt: skip

    def refuse_once(body, answer):
        if body["method"] == "load_version":
            del server.faults["/collective_rpc"]
            raise Status(500, "the weights have the digest 1, not 2")
        return answer

    if refuses is not None:
        server = servers[str(4 + refuses)]
        server.faults["/collective_rpc"] = refuse_once
    for seed in (2, 3):
        with torch.no_grad():
            for policy in ranks.policies:
                next(iter(policy.parameters))[0] += seed
        ranks.load()
        store, newest = versions_in(tmp_path)
        assert (store.base(newest) is None) == (seed == 3 and refuses is not None)
        ranks.sample()
        assert store.copy_path(newest).exists() == (seed == 2 and refuses is not None)
        ours = ranks.policies[0].model.state_dict()
        for one in servers.values():
            found = one.model.state_dict()
            assert all(torch.equal(found[n], ours[n].bfloat16().float()) for n in found)
    assert ["it loads the complete weights" in note for note in ranks.notes] == [True] * (
        refuses is not None
    )
    stats = ranks.engines[1].stats()
    assert stats["engine/lost"] == 0 and 0 < stats["engine/changed_share"] < 1


@pytest.mark.parametrize(("size", "shared"), [(2, 1), (4, 2)])
def test_the_ranks_may_have_turns_in_different_numbers(make_ranks, size, shared):
    ranks = make_ranks(size, shared)
    ranks.load()
    prompts = make_prompts()

    def play(rank):
        engine = ranks.engines[rank]
        with engine.prefix_caching():
            for turn in range(1 + rank if rank % shared == 0 else 0):
                engine.sample(prompts[:1], 1, SAMPLING, turn)

    ranks.each(play)
    calls = [call for _, call in ranks.linked.events if "sleep" in call or "kv_cache" in call]
    once = size // shared * ["/sleep level=2", "/wake_up tags=kv_cache", "/sleep level=2"]
    assert sorted(calls) == sorted(once)  # after the first load, and around all turns
    assert len(ranks.sample()) == size


# -- the options -------------------------------------------------------------------------------


def settings_on(size, folder, **options):
    """The settings of each rank on a CPU."""
    options = {"rollout_engine": "vllm", "output_dir": str(folder), **options}
    with gloo_worlds(size) as (_, worlds):

        def one(rank):
            policy = make_policy(**options)
            policy.world = worlds[rank]
            return settings_of(policy, folder)[0]

        return of_each(size, one)


def test_ranks_on_a_cpu_have_servers_that_divide_the_memory(tmp_path):
    found = settings_on(4, tmp_path, vllm_tensor_parallel_size=2)
    assert [s.first_number for s in found] == [0, 0, 1, 1]
    assert {(s.ranks_per_engine, s.devices, s.sleep_level) for s in found} == {(2, (None,), None)}
    assert {s.server.gpu_memory_utilization for s in found} == {0.3 / 2}
    assert {s.server.tensor_parallel_size for s in found} == {2}
    assert {s.weights_folder for s in found} == {None}
    (given, _) = settings_on(2, tmp_path, vllm_gpu_memory_utilization=0.1)
    assert given.server.gpu_memory_utilization == 0.1


def test_servers_beside_training_or_on_other_gpus_serve_all_ranks(tmp_path):
    for options in ({"max_staleness": 1}, {"engine_kwargs": {"devices": ["0"]}}):
        assert {s.ranks_per_engine for s in settings_on(2, tmp_path, **options)} == {None}
    assert settings_on(1, tmp_path, vllm_tensor_parallel_size=2)[0].ranks_per_engine is None


def test_a_number_of_ranks_that_servers_do_not_divide_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is 2 and 3 processes train"):
        settings_on(3, tmp_path, vllm_tensor_parallel_size=2)


def test_servers_of_several_machines_read_weights_from_a_shared_folder(tmp_path):
    with gloo_worlds(2) as (_, worlds):

        def one(rank):
            policy = make_policy(rollout_engine="vllm", output_dir=str(tmp_path))
            policy.world = TwoMachines(CPU, rank, 2, worlds[rank].collectives)
            return settings_of(policy, tmp_path)[0]

        assert [s.weights_folder for s in of_each(2, one)] == [tmp_path] * 2


# -- failures ----------------------------------------------------------------------------------


def broken(body, answer):
    raise Status(500, "EngineDeadError")


ADAPTER = "/v1/load_lora_adapter"
CALLS = ["/wake_up", "/wake_up tags=kv_cache", "/collective_rpc", ADAPTER, COMPLETIONS, "/sleep"]


@pytest.mark.parametrize("route", CALLS)
def test_if_a_call_of_one_server_fails_the_server_is_started_again(make_ranks, route):
    some = [make_ranks(2, restarts=1, lora=route == ADAPTER) for _ in range(1 + (route == ADAPTER))]
    for ranks in some:
        ranks.load()
    expected = ranks.sample()
    (server,) = [s for s, t in zip(ranks.linked.servers, ranks.linked.started, strict=True)
                 if t["devices"] == "5"]  # fmt: skip
    server.faults[route] = broken
    if route == ADAPTER:  # only a new version is loaded
        for each in some:
            each.change()
            each.load()
        assert expected != (expected := some[0].sample())
    for _ in range(2):
        assert ranks.sample() == expected
    assert [s["devices"] for s in ranks.linked.started[2:]] == ["5"]
    assert "status 500: EngineDeadError" in ranks.notes[0] and "is back" in ranks.notes[1]
    assert [engine.stats()["engine/lost"] for engine in ranks.engines] == [1, 1]


def test_a_server_that_does_not_sleep_is_stopped_until_the_ranks_sample_again(make_ranks):
    ranks = make_ranks(2, restarts=1)
    ranks.load()
    server = ranks.linked.servers[1]
    server.faults["/sleep"] = broken
    ranks.sample()
    trains = max(n for n, (_, call) in enumerate(ranks.linked.events) if "trains" in call)
    assert not [call for _, call in ranks.linked.events[trains + 1 :]]
    assert len(ranks.linked.started) == 2
    ranks.sample()
    assert len(ranks.linked.started) == 3


def test_a_server_that_is_killed_while_it_samples_is_started_again(make_ranks):
    ranks = make_ranks(2, restarts=1)
    ranks.load()
    expected = ranks.sample()
    ranks.linked.servers[1].faults[COMPLETIONS] = lambda body, answer: ranks.linked.kill(1)
    assert ranks.sample() == expected
    assert len(ranks.linked.started) == 3


@pytest.mark.parametrize("route", CALLS)
def test_without_a_restart_all_ranks_end_with_one_sentence(make_ranks, route):
    ranks = make_ranks(4, 2, lora=route == ADAPTER)
    ranks.load()
    (server,) = [s for s, t in zip(ranks.linked.servers, ranks.linked.started, strict=True)
                 if t["devices"] == "6,7"]  # fmt: skip
    server.faults[route] = broken
    if route == "/sleep":
        ranks.sample()  # of which nothing is lost
    if route == ADAPTER:
        ranks.change()
        ranks.load()
    prompts = make_prompts()
    errors = ranks.errors(
        lambda rank: generate_on_ranks(
            ranks.engines[rank], prompts, 4, SAMPLING, 1, ranks.worlds[rank]
        )
    )
    assert {type(error) for error in errors} == {NoServers}
    (said,) = {str(error) for error in errors}
    assert said.startswith("on rank 2: no vLLM server is left: ") and "EngineDeadError" in said


def test_a_server_that_does_not_start_ends_all_ranks_with_one_sentence(make_ranks):
    ranks = make_ranks(2)
    ranks.linked.refuse["5"] = "this GPU is lost"
    errors = ranks.errors(lambda rank: ranks.policies[rank].load_into(ranks.engines[rank]))
    (said,) = {str(error) for error in errors}
    assert said.startswith("on rank 1: starting: the vLLM server ") and "GPU is lost" in said
