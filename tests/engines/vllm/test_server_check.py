"""Servers that cannot be sampled from are refused, with the line that starts the right one."""

import asyncio
import os
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rloo.engines.vllm.client import ROUTE, TOKENS_ROUTE, ServerError, VLLMClient
from rloo.engines.vllm.server_check import examine
from rloo.engines.vllm.server_process import KEY, ServerConfig
from support.fake_vllm import FakeVLLM
from support.models import make_model
from support.text import make_tokenizer


@pytest.fixture
def server():
    server = FakeVLLM(make_model("llama"), make_tokenizer(), lora=True)
    yield server
    server.close()


def look(server, *, needed=100, tokenizer=None, **options):
    async def inside():
        client = VLLMClient(server.url)
        try:
            wanted = ServerConfig("the/model", **options)
            return await examine(client, wanted, tokenizer or make_tokenizer(), needed=needed)
        finally:
            await client.close()

    return asyncio.run(inside())


def without(server, *routes):
    server.routes = [route for route in server.routes if route not in routes]


def test_what_a_server_says_of_itself(server):
    facts = look(server)
    assert (facts.max_model_length, facts.dtype, facts.sequences) == (128, "float32", 64)
    assert facts.route == ROUTE
    server.routes.append(TOKENS_ROUTE)
    assert look(server).route == TOKENS_ROUTE


WRONG = {
    "trl vllm-serve": (lambda s: s.routes.append("/init_communicator/"), {}, "is TRL's server"),
    "another program": (lambda s: without(s, ROUTE), {}, "is no server of vLLM"),
    "no weights": (lambda s: without(s, "/collective_rpc"), {}, "no weights can be loaded"),
    "no adapters": (lambda s: without(s, "/v1/load_lora_adapter"), {"lora_rank": 4}, "adapter is"),
    "lora off": (lambda s: setattr(s, "lora", False), {"lora_rank": 4}, "serves no adapters"),
    "rank": (lambda s: None, {"lora_rank": 64}, "adapters up to rank 8, and lora_r is 64"),
    "raw": (lambda s: s.settings.update(logprobs_mode="raw_logprobs"), {}, "raw_logprobs"),
    "dtype": (lambda s: s.settings.update(dtype="torch.bfloat16"), {}, "computes in bfloat16"),
    "length": (lambda s: s.settings.update(max_model_len=99), {}, "a context of 99 .* need 100"),
    "no sleep": (lambda s: s.settings.update(enable_sleep_mode=False), {"sleeps": True}, "sleep"),
    "a packed matrix": (lambda s: None, {"tied": True}, "a tied output matrix once"),
    "no description": (lambda s: s.settings.update(dtype=None), {}, "computes in None"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_server_that_cannot_be_used_is_refused_with_the_right_line(server, fault):
    make, options, fact = WRONG[fault]
    make(server)
    with pytest.raises(ValueError, match=fact) as error:
        look(server, **options)
    place = urlsplit(server.url)
    line = ServerConfig("the/model", **options).line(place.hostname, place.port)
    assert line in str(error.value) and f"--host {place.hostname} --port {place.port}" in line
    assert server.url in str(error.value) and "rloo vllm-serve" in str(error.value)


@pytest.mark.parametrize(
    ("key", "note"),
    [
        ("top-secret", f"the server needs the run's key in {KEY}"),
        ("", rf"first export {KEY}=\$\(openssl rand -hex 16\), the same key for the server and "),
    ],
)
def test_the_line_of_a_refusal_starts_a_server_that_asks_for_the_key(
    server, key, note, monkeypatch
):
    monkeypatch.setenv(KEY, key)
    without(server, "/collective_rpc")
    with pytest.raises(ValueError, match=rf"vllm serve the/model .* \({note}") as error:
        look(server)
    line = str(error.value).partition("start it with: ")[2].partition(" (")[0]
    words = shlex.split(line)
    (folder,) = [w.removeprefix("PYTHONPATH=") for w in words if w.startswith("PYTHONPATH=")]
    module, _, name = words[words.index("--middleware") + 1].rpartition(".")
    guard = Path(folder.split(os.pathsep)[0], f"{module}.py")
    assert f"class {name}" in guard.read_text() and "VLLM_SERVER_DEV_MODE=1" in words
    assert "--worker-extension-cls" in words and "top-secret" not in str(error.value)


def test_another_tokenizer_is_refused(server):
    other = make_tokenizer()
    other.add_tokens(["Zebra"])
    with pytest.raises(ValueError, match="has another tokenizer"):
        look(server, tokenizer=other)


def test_an_untied_server_on_a_cpu_is_taken(server):
    server.settings["hf_overrides"] = {"tie_word_embeddings": False}
    assert look(server, tied=True)


def test_a_server_that_is_not_there_is_named():
    client = VLLMClient("http://127.0.0.1:9")

    async def inside():
        try:
            await examine(client, ServerConfig("m"), make_tokenizer(), needed=1)
        finally:
            await client.close()

    with pytest.raises(ServerError, match=r"examining: the vLLM server http://127.0.0.1:9 cannot"):
        asyncio.run(inside())
