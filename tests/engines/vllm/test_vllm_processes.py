"""Several processes and one server: they are one process and that server."""

import json

import pytest

from support.fake_vllm import FakeVLLM
from support.launched import launch, require_equal
from support.models import make_model
from support.processes import run
from support.text import make_tokenizer

pytestmark = pytest.mark.slow
CASES = ("one group over all", "several updates")


@pytest.fixture(scope="module", params=[CASES, ("LoRA",)], ids=["weights", "adapter"])
def made(request, tmp_path_factory):
    """The runs of one process, and those of two, which keep their weights whole or divide them."""
    folder, cases = tmp_path_factory.mktemp("made"), list(request.param)
    server = FakeVLLM(make_model("qwen3"), make_tokenizer(), lora="LoRA" in cases)
    server.lora_rank = 16
    given = {"rollout_engine": "vllm_server", "vllm_server_base_url": [server.url]}
    given |= {"single": True}
    try:
        run(folder / "alone", cases, **given)
        jobs = [
            (folder / parallel, cases, {"parallel": parallel, **given})
            for parallel in ("replicate", "fsdp2")
        ]
        launch(2, jobs)
    finally:
        server.close()
    return folder


@pytest.mark.parametrize("parallel", ["replicate", "fsdp2"])
def test_two_processes_and_a_server_are_one_and_that_server(made, parallel):
    require_equal(made / "alone", made / parallel, most=1e-5)


def test_writing_divided_weights_takes_no_more_than_the_largest_layer(made):
    found = [json.loads(p.read_text()) for p in (made / "fsdp2").glob("*/writing-*.json")]
    assert len(found) >= 2
    for peak, largest in found:
        assert peak <= largest + 1024  # what processes say to each other
