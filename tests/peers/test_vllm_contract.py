"""What engines send to servers and to vLLM's sender for NCCL, compared with an installed vLLM: its
routes, the fields of its requests and its classes. No server and no GPU is needed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import rloo
from rloo.engines.vllm.server_plugin.rloo_guard import WEIGHTS
from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION
from rloo.engines.vllm.server_process import ServerConfig
from rloo.model.export import PolicyExport
from support.adapters import make_adapted
from support.engines import make_prompts
from support.fake_vllm import LORA_ROUTES
from support.models import make_model
from support.vllm_engines import COMPLETIONS, SAMPLING, TOKENS, change, made_on_fakes, make_policy

PROGRAM = Path(__file__).parents[1] / "support" / "vllm_contract.py"
made = pytest.fixture(made_on_fakes)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif("RLOO_VLLM_PYTHON" not in os.environ, reason="there is no vLLM"),
]


def requests_of(made, policy, **how) -> list:
    """The requests of an engine that loads two versions and samples with each."""
    engine, servers, _ = made(policy, **how)
    for seed in range(2):
        policy.load_into(engine)
        engine.sample(make_prompts(), 2, SAMPLING, 1)
        change(policy, seed)
    return servers[0].requests


def test_vllm_knows_all_that_it_is_sent(made, tmp_path):
    """The sender itself runs, with its process group and its broadcast played."""
    adapted, base = make_policy(make_adapted(base=make_model("qwen3", seed=9))), make_policy()
    sleeping = ServerConfig("m", lora_rank=4, sleeps=True)
    deltas = {"dtype": torch.bfloat16, "extensions": [EXTENSION], "tolerance": 0.2}
    requests = [
        *requests_of(made, base),
        *requests_of(made, base, scale_out=True, partial=True),
        *requests_of(made, base, **deltas),
        *requests_of(made, adapted, lora=True, serving=sleeping, sleep_level=1),
    ]
    PolicyExport(base, torch.float32).write(tmp_path)
    package = Path(rloo.__file__).parent
    plugin = package / "engines" / "vllm" / "server_plugin"  # which the app loads
    paths = map(str, (plugin, package.parent, PROGRAM.parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        [os.environ["RLOO_VLLM_PYTHON"], str(PROGRAM), str(tmp_path)],
        input=json.dumps(requests), env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["differences"] == []
    assert {*WEIGHTS, *LORA_ROUTES, COMPLETIONS, TOKENS, "/tokenize"} <= {*found["routes"]}
