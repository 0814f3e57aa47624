"""What a CUDA device must show: the same numbers as the plain computation there."""

from dataclasses import replace

import pytest
import torch

from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.engines.native.native_engine import NativeEngine
from rloo.kernels import gpu_kernels
from rloo.model import flash_gpu, offload
from rloo.model.memory_estimate import weight_bytes
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


# -- what CPU tests show in structure alone --------------------------------------------------------

DEVICE = torch.device("cuda", 0)
HALF = torch.bfloat16


def on_device():
    return make_model("qwen3").eval().to(DEVICE)


class Eager:
    """Takes the place of `CapturedGraph`: every step is run."""

    def __init__(self, work, device, pool):
        self._work = work

    def __call__(self):
        self._work()


def bf16_engine(model):
    kinds = {"dtype": HALF, "precision": HALF}
    return NativeEngine(model, pad_token_id=0, **kinds)


def drawn(engine, max_tokens=70, num=16):
    prompts = [Prompt(i, list(range(3, 8 + 3 * i)), "") for i in range(4)]
    groups = engine.sample(prompts, num, Sampling(max_tokens, (2, 9)), 7)
    return [c for group in groups for c in group]


@pytest.mark.parametrize("dtype", flash_gpu.HALF)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_fused_attention_over_segments_is_there_and_right(dtype, size):
    assert flash_gpu.has_segments(DEVICE, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, *flash_gpu.HALF])
def test_the_fused_attention_of_dense_rows_is_there_and_right(dtype):
    assert flash_gpu.has_dense(DEVICE, dtype, 64)


def test_graphs_give_the_bits_of_the_same_steps_run_one_by_one():
    model = on_device()
    engine = bf16_engine(model)
    assert engine.cache_dtype == HALF
    found = drawn(engine)
    engine.repeated = Eager
    assert len({len(c.token_ids) for c in found}) > 3
    assert found == drawn(engine)


def test_steps_of_fixed_shapes_draw_what_other_steps_do(monkeypatch):
    model = on_device()
    found = drawn(bf16_engine(model))
    monkeypatch.setattr("rloo.engines.native.static_decoding.can_decode", lambda *_: False)
    other = drawn(bf16_engine(model))
    same = [a.token_ids == b.token_ids for a, b in zip(found, other, strict=True)]
    assert sum(same) >= 0.7 * len(same)  # 16 bits, rounded in another order
    for one, two in zip(found, other, strict=True):
        assert one.policy_logprobs[0] == pytest.approx(two.policy_logprobs[0], abs=0.1)


def test_a_step_takes_few_launches():
    """By the profiler, of a wave in which no row ends: launches by the host, not kernels."""
    from torch.profiler import ProfilerActivity, profile

    engine, prompts = bf16_engine(on_device()), [Prompt(0, list(range(3, 20)), "")]
    engine.sample(prompts, 16, Sampling(8, ()), 1)  # what is made once
    counts = []
    for tokens in (64, 192):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engine.sample(prompts, 16, Sampling(tokens, ()), 1)
        names = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync")
        counts.append(sum(e.count for e in profiler.key_averages() if e.key in names))
    assert (counts[1] - counts[0]) / 128 <= 10


def test_a_rollout_is_one_wave_where_memory_is_free(monkeypatch):
    waves, engine = [], bf16_engine(on_device())
    draw = NativeEngine._draw
    monkeypatch.setattr(
        NativeEngine, "_draw", lambda e, rows, *a: waves.append(len(rows)) or draw(e, rows, *a)
    )
    drawn(engine, num=64)
    assert waves == [256]
    assert engine.capabilities.cache_bytes > 0.5 * torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("bf16", [True, False])
def test_packed_gradients_in_16_bits_are_those_of_padded_rows(bf16, monkeypatch):
    samples, results, calls = make_samples(), [], []
    attend = flash_gpu.attend_packed
    monkeypatch.setattr(
        flash_gpu, "attend_packed", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    for packing in (True, False):
        model = make_model("qwen3")
        policy = make_policy(model, use_cpu=False, packing=packing, bf16=bf16)
        logprobs = policy.logprobs(policy.batch(samples)).logprobs
        (logprobs * weights_of(len(logprobs)).cuda()).sum().backward()
        results.append((logprobs.detach(), gradients(model)))
    assert bool(calls) == bf16
    assert (results[0][0] - results[1][0]).abs().max() < (0.1 if bf16 else 1e-4)
    for parameter, gradient in results[0][1].items():
        expected = results[1][1][parameter]
        limit = 0.05 if bf16 else 1e-4
        assert (gradient - expected).norm() <= limit * expected.norm() + 1e-6, parameter


def test_a_reference_on_the_host_gives_the_same_numbers_and_leaves_the_device():
    options = {"use_cpu": False, "beta": 0.1, "bf16": True}
    results = []
    for offloads in ([], ["reference"]):
        policy = make_policy(make_model("qwen3"), offload=offloads, **options)
        results.append(policy.reference_logprobs(policy.batch(make_samples())))
        model = policy.reference.model
        layers = sum(p.nbytes for p in model.base_model.layers.parameters())
        here = weight_bytes(model, policy.device)
        assert here == weight_bytes(model) - (layers if offloads else 0)
    assert torch.equal(*results)


def test_values_are_sent_as_they_are():
    values = torch.arange(1000)
    assert torch.equal(offload.send(values, DEVICE).cpu(), values)


def test_memory_grows_in_place(tmp_path):
    make_trainer(make_config(tmp_path, use_cpu=False, max_steps=1), rows=ROWS).train()
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


# -- what is compiled ------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """Turns it on and off; it is off in the end."""
    yield gpu_kernels.use
    gpu_kernels.use(False)


@pytest.mark.parametrize("dtype", [torch.float32, *flash_gpu.HALF])
def test_what_is_compiled_gives_the_numbers_of_its_definition(dtype):
    assert gpu_kernels.unavailable_reason(DEVICE, dtype, 1024, 128) is None


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"gradient_checkpointing": True}])
def test_a_compiled_update_is_that_of_torch(options, compiled):
    samples, results = make_samples(), []
    for wanted in (False, True):
        compiled(wanted)
        model = make_model("qwen3")
        policy = make_policy(model, use_cpu=False, bf16=True, **options)
        scores = policy.logprobs(policy.batch(samples))
        weights = weights_of(len(scores.logprobs)).cuda()
        ((scores.logprobs + 0.1 * scores.entropy) * weights).sum().backward()
        results.append((scores.logprobs.detach(), gradients(model)))
    assert (results[0][0] - results[1][0]).abs().max() < 0.05
    for parameter, gradient in results[0][1].items():
        expected = results[1][1][parameter]
        assert (gradient - expected).norm() <= 0.05 * expected.norm() + 1e-6, parameter


def test_compiled_decoding_draws_what_other_decoding_does_and_graphs_repeat_its_bits(compiled):
    found = drawn(bf16_engine(on_device()))
    compiled(True)
    engine = bf16_engine(on_device())
    other = drawn(engine)
    engine.repeated = Eager
    assert other == drawn(engine)
    same = [a.token_ids == b.token_ids for a, b in zip(found, other, strict=True)]
    assert sum(same) >= 0.7 * len(same)
    for one, two in zip(found, other, strict=True):
        assert one.policy_logprobs[0] == pytest.approx(two.policy_logprobs[0], abs=0.1)


def test_a_run_compiles_what_it_says(tmp_path, compiled):
    config = make_config(tmp_path, use_cpu=False, bf16=True, max_steps=3, torch_compile=True)
    trainer = make_trainer(replace(config, gradient_checkpointing=True), rows=ROWS)
    trainer.train()
    assert gpu_kernels.in_use() and trainer.args.torch_compile
    assert all(row["mismatch/max"] < 0.3 for row in metrics_of(config))
