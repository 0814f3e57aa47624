"""What a CUDA device must show: the same numbers as the plain computation there."""

from dataclasses import replace

import pytest
import torch

from rloo.engines import EngineInputs, build_engine
from rloo.types import Prompt, Sampling
from support.models import make_model, make_samples
from support.policies import gradients, make_policy, weights_of
from support.training import ROWS, make_config, make_trainer, metrics_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_packed_equals_padded(name):
    samples, results = make_samples(), []
    for packing in (True, False):
        model = make_model(name)
        policy = make_policy(model, use_cpu=False, packing=packing, gradient_checkpointing=True)
        logprobs = policy.logprobs(policy.batch(samples)).logprobs
        (logprobs * weights_of(len(logprobs)).cuda()).sum().backward()
        results.append((logprobs.detach(), gradients(model)))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-4
    for parameter, gradient in results[0][1].items():
        expected = results[1][1][parameter]
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), parameter


def test_engines_draw_the_same_tokens():
    model = make_model("qwen3").cuda()
    prompts = [Prompt(i, list(range(3, 8 + i)), "") for i in range(4)]
    drawn = []
    for name in ("native", "hf"):
        engine, note = build_engine(name, EngineInputs(model, 0))
        assert note is None
        groups = engine.sample(prompts, 4, Sampling(12, (2,)), 7)
        drawn.append([c.token_ids for group in groups for c in group])
    assert sum(a == b for a, b in zip(*drawn, strict=True)) >= 15


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_training_runs_and_the_engine_agrees_with_the_trainer(tmp_path, precision):
    config = make_config(
        tmp_path, use_cpu=False, bf16=precision == "bf16", fp16=precision == "fp16", max_steps=3
    )
    make_trainer(replace(config, gradient_checkpointing=True), rows=ROWS).train()
    limit = 1e-3 if precision == "float32" else 0.3
    assert all(row["mismatch/max"] < limit for row in metrics_of(config))


@pytest.mark.parametrize("bf16", (False, True))
def test_a_run_of_divided_weights_is_that_of_whole_ones(tmp_path, bf16):
    """World size 1: everything but the exchange with other processes, which is NCCL's."""
    runs = []
    for parallel in ("replicate", "fsdp2"):
        config = make_config(
            tmp_path / parallel, use_cpu=False, bf16=bf16, max_steps=3, parallel=parallel
        )
        make_trainer(replace(config, gradient_checkpointing=True), rows=ROWS).train()
        runs.append([row["reward"] for row in metrics_of(config)])
    assert runs[0] == pytest.approx(runs[1], rel=0.2 if bf16 else 1e-3)
