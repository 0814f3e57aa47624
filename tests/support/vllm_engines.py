"""An engine on servers that speak vLLM's protocol, and what its samples are compared with."""

import threading
import time
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from rloo.distributed import World
from rloo.engines.vllm.server_plugin.rloo_weights import COUNTS
from rloo.engines.vllm.server_process import ServerConfig
from rloo.engines.vllm.settings import VLLMSettings
from rloo.engines.vllm.vllm_engine import VLLMEngine
from rloo.model.export import PolicyExport
from rloo.model.micro_batch import make_sample
from rloo.model.policy import Policy
from rloo.types import Sampling
from support.engines import make_prompts
from support.fake_vllm import FakeVLLM, Status
from support.models import CPU, make_model
from support.policies import make_policy_config
from support.text import make_tokenizer

COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
SAMPLING = Sampling(max_tokens=6, stop_token_ids=(2,), temperature=0.8)


def make_policy(model=None, **options):
    config = make_policy_config(temperature=0.8, beta=0.0, **options)
    model = model or make_model("qwen3")
    return Policy(model, make_tokenizer(), config, world=World(CPU), num_training_steps=4)


def made_on_fakes():
    """Makes servers and an engine, and closes them: what a fixture yields."""
    closing = []

    def make(
        policy, *, servers=1, lora=False, scale_out=False, serving=None, routes=(), served=None,
        dtype=torch.float32, extensions=(), **settings,
    ):  # fmt: skip
        served = served or (lambda: (make_model("qwen3", seed=9), make_tokenizer()))
        found = [FakeVLLM(*served(), lora=lora, scale_out=scale_out) for _ in range(servers)]
        closing.extend(found)
        for server in found:
            server.routes += routes
        for server, extension in zip(found, extensions, strict=False):
            server.extension = extension
        said = []
        source = PolicyExport(policy, dtype)
        serving = serving or ServerConfig("m", lora_rank=source.adapter_rank)
        defaults = {"deadline": 60.0, "restarts": 0}
        urls = tuple(server.url for server in found)
        settings = VLLMSettings(serving, urls=urls, **{**defaults, **settings})
        engine = VLLMEngine("vllm_server", settings, source, said.append)
        closing.append(engine)
        return engine, found, said

    yield make
    for one in reversed(closing):
        one.close()


def damage(folder, *, counts=False, file=0) -> None:
    """Flip a bit of a value in a version's folder, or of a count of a delta."""
    path = sorted(folder.glob("*.safetensors"))[file]
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = next(n for n in tensors if n.startswith(COUNTS) == counts)
    tensors[name].view(torch.int16).view(-1)[-1] ^= 0x1000
    path.unlink()  # whoever reads the file keeps it
    save_file(tensors, path)


def fail_once(server, route) -> None:
    """Let the next request of a server for `route` fail."""

    def fail(body, answer):
        if server.faults.pop(route, None):
            raise Status(500, "it is starting")
        return answer

    server.faults[route] = fail


def nudge(policy, seed):
    """Change one value of a hundred, so much that log-probs move."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.1 * (torch.rand_like(parameter) < 0.01))


def has(server, policy) -> bool:
    """Whether a server has the policy's weights, rounded to bfloat16."""
    ours = dict(policy.model.named_parameters())
    return all(
        torch.equal(value, ours[name].bfloat16().float())
        for name, value in server.model.named_parameters()
    )


class Slow:
    """Holds the answers of a route of a server until `go`; `seen` is set when one is held."""

    def __init__(self, server, route="/collective_rpc"):
        self.seen, self._go = threading.Event(), threading.Event()
        self._faults, self._route = server.faults, route
        server.faults[route] = self._hold

    def _hold(self, body, answer):
        self.seen.set()
        assert self._go.wait(30)
        return answer

    def go(self):
        del self._faults[self._route]
        self._go.set()


def change(policy, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_until_all_sample(engine, servers, route=COMPLETIONS):
    """A server samples once it has loaded the weights and was verified, by the same route."""
    wait_until(
        lambda: (
            engine.sample(make_prompts(), 8, SAMPLING, 1)
            and min(server.calls.count(route) for server in servers) > 1
        )
    )


def sample_of(prompt, completion):
    blank = make_sample((0, 0), 1, len(completion.token_ids))
    return replace(blank, prompt_ids=prompt.token_ids, token_ids=completion.token_ids)
