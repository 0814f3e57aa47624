"""A worker that samples for a LoRA run loads deltas: only merged matrices have changed."""

import json

import pytest
import torch

from rloo.engines.engine_worker import engine_worker_config
from rloo.engines.remote_engine import RemoteEngine, RemoteEngineConfig
from rloo.model.export import PolicyExport
from rloo.types import Sampling
from support.adapters import make_adapted, perturb
from support.engines import make_prompts
from support.vllm_engines import make_policy

SAMPLING = Sampling(max_tokens=6, stop_token_ids=(2,), temperature=1.0)


def apart(engine, source) -> float:
    """The largest difference between a worker's log-probs and the trainer's."""
    prompts, found = make_prompts(), [0.0]
    for prompt, (c,) in zip(prompts, engine.sample(prompts, 1, SAMPLING, 1), strict=True):
        ours = source.logprobs(prompt.token_ids, c.token_ids)
        found += [abs(a - b) for a, b in zip(ours, c.policy_logprobs, strict=True)]
    return max(found)


def damage(folder) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x40
    file.write_bytes(data)


@pytest.mark.slow
def test_a_worker_is_given_all_weights_after_a_wrong_digest(tmp_path):
    policy = make_policy(make_adapted())
    source = PolicyExport(policy, torch.float32, merge=True)
    how = engine_worker_config(
        policy.model, engine="native", device="cpu", pad_token_id=0, precision=None, dtype=None,
        trust_remote_code=False,
    )  # fmt: skip
    engine = RemoteEngine(how, source, RemoteEngineConfig(1, None, 300.0, tmp_path, deltas=True))
    bases, names = [], []
    for seed in range(5):
        policy.load_into(engine)
        (store,) = tmp_path.glob("rloo-weights-*")
        newest = store / f"v{engine.version:08d}"
        bases.append(json.loads((newest / "manifest.json").read_text()).get("base"))
        if seed == 2:
            damage(newest)
        assert apart(engine, source) < 1e-5
        names.append({path.name for path in store.iterdir()} - {"in-use"})
        perturb(policy.model, seed)
    stats, first = engine.stats(), engine.version - 4
    engine.close()
    assert bases == [None, first, first + 1, None, first + 3]
    assert f"complete-{first + 2:08d}" in names[2] and not any("complete" in n for n in names[4])
    assert 0 < stats["engine/changed_share"] < 1 and stats["engine/lost"] == 0
