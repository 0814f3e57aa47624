"""The two sentences before a run by Ray, on stand-ins; `test_ray_backend` has Ray's."""

import socket
import sys
import time

import pytest

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.ray_checks import (
    check_address,
    check_cluster,
    check_resources,
    shortage,
    waiting,
)
from rloo.addons.launch.roles import make_job

RECIPE = ["--model", "m", "--dataset", "d.jsonl", "--reward", "exact_match"]
SERVERS = ("--rollout_engine", "vllm", "--vllm_tensor_parallel_size", "4")


def job_of(*arguments: str, **options):
    return make_job(Cluster(backend="ray", **options), [*RECIPE, *arguments])


def test_what_is_asked_and_what_the_cluster_has_are_in_one_sentence():
    """6 ranks of a GPU and 3 CPUs, 2 samplers of the same, a scorer of 3 CPUs: 27 CPUs, 8 GPUs."""
    job = job_of(gpus_per_node=8, engine_gpus=2, scorers=1, threads=3)
    said = shortage(job, [{"CPU": 16.0, "GPU": 4.0, "memory": 1e9}, {"CPU": 8.0}])
    assert said is not None and said.startswith(
        "the run asks Ray for 27 CPU and 8 GPU (6 trainers of 3 CPU and 1 GPU, 2 samplers of 3 CPU "
        "and 1 GPU, 1 scorers of 3 CPU), and the cluster has 24 CPU and 4 GPU on 2 nodes, with "
        "room for 4 of the 6 trainers ("
    )
    assert "\n" not in said
    assert shortage(job, [{"CPU": 27.0, "GPU": 8.0}]) is None
    assert "27 CPU" in str(shortage(job, [{"CPU": 26.0, "GPU": 8.0}]))


def test_a_run_whose_resources_are_in_use_says_that_it_waits():
    """2 ranks and a sampler of a GPU and 3 CPUs. Ray leaves out resources of which nothing is
    free."""
    job = job_of(gpus_per_node=3, engine_gpus=1, threads=3)
    assert waiting(job, {"CPU": 9.0, "GPU": 3.0, "memory": 1e9}) is None
    assert waiting(job, {"CPU": 8.5}) == (
        "the run asks Ray for 9 CPU and 3 GPU, and 8.5 CPU and 0 GPU of the cluster are free; it "
        "waits until other programs end"
    )
    assert waiting(job_of(trainer_gpus=2), {"CPU": 2.0}) is None


def test_a_process_needs_its_gpus_on_one_node():
    """2 servers of 4 GPUs on 6 nodes of 2 GPUs: 12 GPUs, and no node for a server."""
    job = job_of(*SERVERS, nodes=2, gpus_per_node=6, engine_gpus=8)
    said = shortage(job, [{"CPU": 9.0, "GPU": 2.0}] * 6)
    assert said is not None and "has 54 CPU and 12 GPU on 6 nodes, with room for 0 of the 2" in said
    assert shortage(job, [{"CPU": 9.0, "GPU": 4.0}] * 3) is None


def test_a_cluster_whose_nodes_are_about_to_join_is_waited_for():
    job, asked = job_of(trainer_gpus=2), []

    def nodes():
        asked.append(time.monotonic())
        return [{"CPU": 1.0}] * len(asked)

    check_resources(job, nodes, seconds=2.0)
    assert len(asked) == 2
    with pytest.raises(ValueError, match=r"asks Ray for 2 CPU .* has 1 CPU and 0 GPU on 1 node,"):
        check_resources(job, lambda: [{"CPU": 1.0}], seconds=0.1)


def test_an_address_that_nobody_answers_is_told_at_once():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        check_address(f"127.0.0.1:{port}")
        check_address(f"ray://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConnectionError) as caught:
            check_address(address)
        assert str(caught.value).startswith(
            f"no Ray cluster responds at {address}: connection refused; start one there with"
        )
    with pytest.raises(ConnectionError, match=r"no Ray cluster responds at 127\.0\.0\.1:99999: "):
        check_address("127.0.0.1:99999")


@pytest.mark.parametrize("address", [None, "", "auto", "local", "anyscale://x"])
def test_other_addresses_are_left_to_ray(address):
    check_address(address)
    check_cluster(address, health("1"))


def health(statement: str) -> list[str]:
    """A stand-in of `ray health-check`, which gets the address."""
    return [sys.executable, "-c", f"import sys, time; sys.exit({statement})"]


def test_a_process_that_is_no_cluster_is_told_within_the_given_time():
    begun = time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        check_cluster("a:1", health("time.sleep(60)"), seconds=0.5)
    assert str(caught.value) == (
        "the process at a:1 does not respond as a Ray cluster within 0.5 s; give the address that "
        "`ray start --head` has printed (ray_address, RAY_ADDRESS)"
    )
    assert time.monotonic() - begun < 30


def test_what_ray_says_about_the_cluster_is_in_the_sentence():
    check_cluster("a:1", health("sys.argv[1] != 'a:1'"))
    check_cluster("a:1", health("2"))  # a Ray without this command
    check_cluster("ray://a:1", health("1"))
    trace = "'Traceback\\nray.exceptions.AuthenticationError: no token.'"
    with pytest.raises(ConnectionError, match=r"at a:1 does not .* cluster: no token\.; give the"):
        check_cluster("a:1", health(trace))
    with pytest.raises(ConnectionError, match="has the status 7; give"):
        check_cluster("a:1", health("7"))
