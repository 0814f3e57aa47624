"""Several processes and one server, or a server each: they are one process and a server."""

import json
from contextlib import ExitStack

import pytest

from support.fake_vllm import FakeVLLM
from support.launched import launch, require_equal
from support.linked_vllm import LinkedServers
from support.models import make_model
from support.processes import run
from support.text import make_tokenizer

pytestmark = pytest.mark.slow
CASES = {"weights": ("one group over all", "several updates"), "adapter": ("LoRA",)}
PARALLEL = ("replicate", "fsdp2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs of one process (KIND/alone), and of two, which keep their weights whole or divide
    them (KIND/PARALLEL), with a server for each kind."""
    folder = tmp_path_factory.mktemp("made")
    with ExitStack() as stack:
        jobs = []
        for kind, cases in CASES.items():
            server = FakeVLLM(make_model("qwen3"), make_tokenizer(), lora=kind == "adapter")
            stack.callback(server.close)
            server.lora_rank = 16
            given = {"rollout_engine": "vllm_server", "vllm_server_base_url": [server.url]}
            given |= {"single": True}
            run(folder / kind / "alone", [*cases], **given)
            jobs += [(folder / kind / p, cases, {"parallel": p, **given}) for p in PARALLEL]
        launch(2, jobs)
    return folder


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("kind", CASES)
def test_two_processes_and_a_server_are_one_and_that_server(made, kind, parallel):
    require_equal(made / kind / "alone", made / kind / parallel, most=1e-5)


@pytest.mark.parametrize(("kind", "least"), [("weights", 4), ("adapter", 2)])
def test_writing_divided_weights_takes_no_more_than_the_largest_layer(made, kind, least):
    files = (made / kind / "fsdp2").glob("*/writing-*.json")
    found = [json.loads(path.read_text()) for path in files]
    assert len(found) >= least
    for peak, largest in found:
        assert peak <= largest + 1024  # what processes say to each other


COLOCATED = ("one group over all", "LoRA")


def test_two_processes_with_a_server_each_are_one_and_its_server(tmp_path):
    linked = LinkedServers(lora=True)
    given = {"use_vllm": True, "engine_kwargs": {"executable": linked.executable}, "single": True}
    try:
        run(tmp_path / "alone", [*COLOCATED], **given)
        launch(2, [(tmp_path / "two", COLOCATED, {"parallel": "fsdp2", **given})])
    finally:
        linked.close()
    assert len(linked.started) == 3 * len(COLOCATED)
    require_equal(tmp_path / "alone", tmp_path / "two", most=1e-5)
    for server in linked.servers[len(COLOCATED) :]:
        temperatures = [b["temperature"] for r, b in server.bodies if r == "/v1/completions"]
        assert len([t for t in temperatures if t]) >= 3  # one a step
