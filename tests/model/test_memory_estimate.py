"""Memory predicted, compared with what is free, and the token budget that follows from it."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml

from benchmarks.memory import CHOICES, LASTING, Shape, measure, predict
from rloo.algorithm import oom_retry
from rloo.config.config import RLOOConfig
from rloo.model import memory_estimate, prepare_model, token_budget
from rloo.model.memory_estimate import (
    count_tokens,
    make_samples,
    measured_peak_bytes,
    optimizer_bytes,
    phase_peaks,
    predicted_peak_bytes,
)
from rloo.model.token_budget import (
    Workload,
    fitting_budget,
    generous_peak_bytes,
    largest_micro_batch,
)
from rloo.model.token_memory import activation_bytes
from rloo.trainer.checkpoint import load_checkpoint
from support.addons import needs_addons
from support.gpu import pretended
from support.markers import slow
from support.models import CONFIGS, CPU, make_model
from support.policies import make_policy
from support.training import (
    equal,
    make_config,
    make_trainer,
    metrics_of,
    train_until_power_cut,
    weights,
    without_times,
)

WORKLOAD = Workload(
    longest_prompt=12, shortest_prompt=4, completion_tokens=40, num_generations=4, num_groups=8
)


def provide(monkeypatch, size: int) -> None:
    monkeypatch.setattr(token_budget, "available_bytes", lambda device: size)


def share_of_largest(policy, workload, share: float) -> int:
    """Free bytes of which a CPU's share lets `share` of the largest micro-batch's peak fit."""
    largest = largest_micro_batch(policy, workload, policy.max_tokens)
    room = share * predicted_peak_bytes(policy, largest) / token_budget.CPU_SHARE
    return int(room + token_budget.missing_bytes(policy))


# -- measuring and predicting -----------------------------------------------------------------


@pytest.fixture
def _collection_remains():
    collects = gc.isenabled()
    yield
    (gc.enable if collects else gc.disable)()


@pytest.mark.usefixtures("_collection_remains")
@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_a_measurement_as_before_it_and_never_within(collects):
    (gc.enable if collects else gc.disable)()
    within = []
    phase_peaks(CPU, lambda mark: within.append(gc.isenabled()))
    assert within and not any(within)
    assert gc.isenabled() is collects


def test_the_peak_of_a_phase_is_what_it_held_at_most():
    def work(mark):
        kept = torch.zeros(1_000_000)
        mark()
        torch.zeros(2_000_000).sum()
        mark()
        del kept
        mark()
        torch.zeros(500_000).sum()

    peaks = phase_peaks(CPU, work)
    expected = [4e6, 4e6 + 8e6, 4e6, 2e6]
    assert peaks == pytest.approx(expected, abs=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("qwen3", {"beta": 0.1}),
        ("qwen3", {"gradient_checkpointing": True}),
        ("qwen3", {"packing": False}),
        slow("gpt2", {}),
        slow("gemma2", {}),
        ("gpt_oss", {}),
    ],
    ids=str,
)
def test_the_peak_is_predicted_from_small_measurements(name, options, monkeypatch):
    policy = make_policy(make_model(name), **options)
    samples = make_samples(16, 100, 8, 4)
    sizes = []
    measure = memory_estimate._peaks
    monkeypatch.setattr(
        memory_estimate,
        "_peaks",
        lambda p, s, c: sizes.append(count_tokens(p, s)) or measure(p, s, c),
    )
    predicted = predicted_peak_bytes(policy, samples)
    share = max(
        memory_estimate.QUADRATIC
        if memory_estimate._makes_squares(policy)
        else memory_estimate.LINEAR
    )
    assert max(sizes) < (share + 0.1) * count_tokens(policy, samples)
    assert predicted == pytest.approx(measured_peak_bytes(policy, samples), rel=0.2)


@pytest.mark.slow
def test_the_chunks_of_the_head_are_foreseen(monkeypatch):
    # 3,200 tokens and 4,096 words make 52 MB of logits, of which 4 MB exist at a time.
    options = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=1, **options)
    policy = make_policy(transformers.AutoModelForCausalLM.from_config(config))
    samples = make_samples(16, 100, 8, 4)
    assert measured_peak_bytes(policy, samples) > 52e6
    monkeypatch.setattr(memory_estimate, "CHUNK_ELEMENTS", 2**20)
    chunked = measured_peak_bytes(policy, samples)
    assert chunked < 40e6
    assert predicted_peak_bytes(policy, samples) == pytest.approx(chunked, rel=0.3)


def test_measuring_leaves_neither_gradients_nor_hooks():
    policy = make_policy(make_model("qwen3"))
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    state = torch.get_rng_state()
    measured_peak_bytes(policy, make_samples(5, 9, 2))
    assert all(p.grad is None for p in policy.parameters)
    assert equal(before, dict(policy.model.named_parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks for m in policy.model.modules())


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd"])
def test_optimizer_state_is_known_before_it_exists(optim):
    policy = make_policy(make_model("qwen3"), optim=optim)
    foreseen = optimizer_bytes(policy)
    assert not policy.stepper.optimizer.state
    for parameter in policy.parameters:
        parameter.grad = torch.zeros_like(parameter)
    policy.stepper.step()
    tensors = [
        value
        for state in policy.stepper.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    assert foreseen == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"packing": False}], ids=str)
def test_the_generous_bound_is_above_what_is_measured(name, options):
    policy = make_policy(make_model(name), beta=0.1, **options)
    samples = make_samples(20, 50, 4, 2)
    assert generous_peak_bytes(policy, samples) > 2 * measured_peak_bytes(policy, samples)


# -- the largest micro-batch ------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [60, 130, 500])
def test_the_largest_micro_batch_fills_the_budget_and_keeps_to_it(packing, max_tokens):
    policy = make_policy(make_model("qwen3"), packing=packing)
    samples = largest_micro_batch(policy, WORKLOAD, max_tokens)
    assert max_tokens - len(samples) <= count_tokens(policy, samples) <= max_tokens
    assert max(len(s.token_ids) for s in samples) <= 40


def test_one_completion_may_exceed_the_budget_and_a_step_ends_it():
    policy = make_policy(make_model("qwen3"))
    (single,) = largest_micro_batch(policy, WORKLOAD, 10)
    assert (len(single.prompt_ids), len(single.token_ids)) == (12, 40)
    whole = largest_micro_batch(policy, WORKLOAD, 10**6)
    assert [len(s.prompt_ids) for s in whole] == [12] * 4 + [4] * 28
    assert all(len(s.token_ids) == 40 for s in whole)


# -- what is free -----------------------------------------------------------------------------


def write_group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_control_groups_of_both_versions_limit_memory_at_every_level(tmp_path):
    (tmp_path / "cgroup").write_text("0::/user/job\n")
    root = tmp_path / "two"
    write_group(root / "user", memory__max=1000, memory__current=400)
    job = {"memory__max": 900, "memory__current": 500, "memory__stat": "anon 1\ninactive_file 50"}
    write_group(root / "user" / "job", **job)
    assert sorted(token_budget._control_groups(tmp_path / "cgroup", root)) == [450, 600]
    write_group(root / "user" / "job", memory__max="max")
    assert token_budget._control_groups(tmp_path / "cgroup", root) == [600]

    (tmp_path / "cgroup").write_text("5:cpu:/job\n4:memory:/job\n")
    root = tmp_path / "one"
    write_group(root / "memory" / "job", memory__limit_in_bytes=800, memory__usage_in_bytes=300)
    write_group(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=1)
    assert token_budget._control_groups(tmp_path / "cgroup", root) == [500]
    assert token_budget._control_groups(tmp_path / "absent", root) == []


def test_a_group_named_by_the_host_is_looked_for_at_the_root(tmp_path):
    (tmp_path / "cgroup").write_text("0::/docker/unseen\n")
    write_group(tmp_path / "root", memory__max=700, memory__current=100)
    assert token_budget._control_groups(tmp_path / "cgroup", tmp_path / "root") == [600]


def test_an_address_space_that_ends_is_less_than_the_machine_has(monkeypatch):
    process = token_budget.psutil.Process()
    used = process.memory_info().vms
    monkeypatch.setattr(
        token_budget.psutil.Process, "rlimit", lambda self, kind: (used + 5_000_000, -1)
    )
    assert 0 < token_budget.available_bytes(CPU) <= 5_000_000 + 1_000_000


# -- the budget -------------------------------------------------------------------------------


def test_a_budget_that_fits_for_certain_is_not_measured(monkeypatch):
    policy = make_policy(make_model("qwen3"), max_tokens_per_micro_batch=400)
    provide(monkeypatch, 10**10)
    monkeypatch.setattr(token_budget, "predicted_peak_bytes", lambda *_: pytest.fail("measured"))
    assert fitting_budget(policy, WORKLOAD) == token_budget.FittedBudget(400)


@pytest.mark.slow
def test_a_budget_that_just_fits_stays(monkeypatch):
    policy = make_policy(make_model("qwen3"), max_tokens_per_micro_batch=400)
    provide(monkeypatch, share_of_largest(policy, WORKLOAD, 1.05))
    assert fitting_budget(policy, WORKLOAD) == token_budget.FittedBudget(400)


def test_the_first_step_makes_gradients_and_the_optimizers_state():
    policy = make_policy(make_model("qwen3"))
    numbers = sum(p.numel() for p in policy.parameters)
    # Two moments and a count of steps for each parameter.
    state = 8 * numbers + 4 * len(policy.parameters)
    assert token_budget.missing_bytes(policy) == 4 * numbers + state
    for parameter in policy.parameters:
        parameter.grad = torch.zeros_like(parameter)
    policy.stepper.step()
    assert token_budget.missing_bytes(policy) == 4 * numbers


def test_a_budget_is_verified_and_lowered_on_where_memory_is_not_linear(monkeypatch):
    def peak(policy, samples):  # above the straight line between any two sizes
        return int(1e6 * count_tokens(policy, samples) ** 0.5)

    policy = make_policy(make_model("qwen3"), max_tokens_per_micro_batch=800)
    monkeypatch.setattr(token_budget, "predicted_peak_bytes", peak)
    provide(monkeypatch, int(20e6 / token_budget.CPU_SHARE) + token_budget.missing_bytes(policy))
    found = fitting_budget(policy, WORKLOAD).max_tokens
    assert 300 < found <= 400


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_a_budget_that_does_not_fit_becomes_the_largest_that_does(monkeypatch, packing):
    policy = make_policy(
        make_model("qwen3"), max_tokens_per_micro_batch=800, packing=packing, beta=0.1
    )
    available = share_of_largest(policy, WORKLOAD, 0.5)
    provide(monkeypatch, available)
    fit = fitting_budget(policy, WORKLOAD)
    assert policy.max_tokens == 800
    assert 280 < fit.max_tokens < 480
    peak = measured_peak_bytes(policy, largest_micro_batch(policy, WORKLOAD, fit.max_tokens))
    assert peak < available
    assert "MB" in fit.reason


def test_where_not_even_one_completion_fits_the_knobs_are_named(monkeypatch):
    policy = make_policy(make_model("qwen3"), max_tokens_per_micro_batch=800)
    provide(monkeypatch, share_of_largest(policy, WORKLOAD, 0.03))
    with pytest.raises(ValueError) as error:
        fitting_budget(policy, WORKLOAD)
    assert "one completion of 40 tokens after a prompt of 12" in str(error.value)
    for knob in (
        "max_completion_length",
        "gradient_checkpointing",
        "num_generations",
        "max_tokens_per_micro_batch",
    ):
        assert knob in str(error.value)


# -- in a run ---------------------------------------------------------------------------------


def lower_to_half(monkeypatch, trainer) -> None:
    """Leave memory for about half of the largest micro-batch."""
    workload = token_budget.workload_of(trainer._source, trainer.args, trainer.batches)
    provide(monkeypatch, share_of_largest(trainer.policy, workload, 0.5))


@pytest.mark.slow
def test_a_rehearsal_changes_nothing(tmp_path, monkeypatch):
    plain_config, config = make_config(tmp_path / "plain"), make_config(tmp_path / "measured")
    plain = make_trainer(plain_config)
    plain.train()
    monkeypatch.setattr(token_budget, "_CERTAIN_SHARE", 0.0)
    measured = make_trainer(config)
    measured.train()
    assert equal(weights(plain), weights(measured))
    assert without_times(metrics_of(plain_config)) == without_times(metrics_of(config))


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 4000])
def test_a_lowered_budget_is_recorded_and_kept_by_a_resumed_run(tmp_path, monkeypatch, given):
    options = {"max_steps": 4, "save_steps": 2, "max_tokens_per_micro_batch": given}
    config = make_config(tmp_path / "lowered", **options)
    trainer = make_trainer(config)
    lower_to_half(monkeypatch, trainer)
    asked = trainer.policy.max_tokens
    train_until_power_cut(trainer)
    found = trainer.policy.max_tokens
    assert found < asked
    (note,) = [n for n in trainer.monitor.notes if "max_tokens_per_micro_batch" in n]
    assert f"at most {found:,} tokens, not {asked:,}" in note
    folder = Path(config.output_dir)
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_tokens_per_micro_batch"] == (
        found
    )
    saved = load_checkpoint(folder / "checkpoint-2").trainer_state
    change = {"step": 1, "from": asked, "to": found, "cause": "rehearsal"}
    assert saved["budget_changes"] == [change]

    monkeypatch.setattr(oom_retry, "fitting_budget", lambda *_: pytest.fail("adapted again"))
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.policy.max_tokens == found
    rows = metrics_of(config)
    assert [row.get("update/max_tokens") for row in rows] == [found, None, None, None]

    monkeypatch.setattr(oom_retry, "fitting_budget", lambda *_: token_budget.FittedBudget(found))
    whole = make_trainer(make_config(tmp_path / "w", max_steps=4, max_tokens_per_micro_batch=found))
    whole.train()
    assert equal(weights(whole), weights(resumed))


def fail_backward(policy, calls: set[int]) -> None:
    """Raise what CUDA raises in these calls, numbered from 1, after gradients were begun."""
    backward, seen = policy.stepper.backward, []

    def failing(loss, **turn):
        seen.append(1)
        backward(loss, **turn)
        if len(seen) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")

    policy.stepper.backward = failing


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.0}, {"num_iterations": 2}, {"normalize_advantages": True}], ids=str
)
def test_a_step_that_did_not_fit_is_made_again_as_if_the_budget_had_been_lower(tmp_path, options):
    config = make_config(tmp_path / "failing", save_steps=4, **options)
    trainer = make_trainer(config)
    fail_backward(trainer.policy, {1})
    trainer.train()
    found = trainer.policy.max_tokens
    assert found < 200
    summary = json.loads(Path(config.output_dir, "summary.json").read_text())
    assert any("did not suffice" in note for note in summary["notes"])
    assert metrics_of(config)[0]["update/max_tokens"] == found
    saved = load_checkpoint(Path(config.output_dir, "checkpoint-4")).trainer_state
    assert [c["cause"] for c in saved["budget_changes"]] == ["update"]
    lower = make_trainer(make_config(tmp_path / "l", max_tokens_per_micro_batch=found, **options))
    lower.train()
    assert equal(weights(trainer), weights(lower))


@pytest.mark.slow
def test_the_credit_may_be_what_did_not_fit(tmp_path):
    options = {"normalize_advantages": True}
    trainer = make_trainer(make_config(tmp_path / "failing", **options))
    score, calls = trainer.policy.score, []

    def failing(batch):
        calls.append(batch.size > 4)  # at the start, four are computed
        if sum(calls) == 1 and calls[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(batch)

    trainer.policy.score = failing
    trainer.train()
    lower = make_trainer(
        make_config(tmp_path / "l", max_tokens_per_micro_batch=trainer.policy.max_tokens, **options)
    )
    lower.train()
    assert equal(weights(trainer), weights(lower))


def test_a_second_time_the_error_is_raised_and_says_what_to_do(tmp_path):
    trainer = make_trainer(make_config(tmp_path))
    fail_backward(trainer.policy, {1, 9})
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    assert "gradient_checkpointing" in error.value.__notes__[0]


def test_a_step_in_which_weights_may_have_moved_is_not_made_again(tmp_path):
    trainer = make_trainer(make_config(tmp_path))
    step = trainer.policy.stepper.optimizer.step

    def failing(*arguments, **options):
        step(*arguments, **options)
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.policy.stepper.optimizer.step = failing
    asked = trainer.policy.max_tokens
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.policy.max_tokens == asked


# -- what the choices take, as docs/memory.md has them ----------------------------------------

SMALL = Shape(hidden=128, layers=3, vocabulary=512, prompt=32, completion=64)


@pytest.fixture(scope="module")
def shaped_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shaped")
    SMALL.save(folder)
    return folder


@needs_addons
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "full, reference",
        slow("full, checkpointing"),
        slow("full, 8-bit AdamW"),
        slow("LoRA, reference"),
        "LoRA, no engine copy",
        "QLoRA, 4 bits",
        slow("QLoRA, 8 bits"),
    ],
)
def test_what_is_planned_for_a_choice_is_what_it_takes(shaped_model, name):
    options = {**CHOICES[name], "use_cpu": True}
    parameters, _, parts = predict(shaped_model, SMALL, options)
    peaks = measure(shaped_model, SMALL, options)
    lasting = sum(parts[part] for part in LASTING)
    for part in ("micro-batch", "step"):
        assert lasting + parts[part] == pytest.approx(peaks[part], rel=0.1)
    # Reference and engine are the base itself under an adapter.
    assert (parts["reference"] == 0) == (name != "full, reference")
    assert (parts["engine"] < 0.01 * parameters) == (
        "no engine copy" in name or name.startswith("QLoRA")
    )


@pytest.mark.slow
def test_a_critic_takes_more_than_the_policy_alone(shaped_model):
    options = {**CHOICES["full, checkpointing, reference"], "use_cpu": True}
    none, apart, joint = (
        max(measure(shaped_model, SMALL, options, critic=kind).values())
        for kind in ("none", "apart", "joint")
    )
    assert 1.2 * none < apart < joint < 2 * none


@pytest.mark.parametrize(
    ("options", "measured"),
    # docs/memory.md, of 8 layers of width 512 in float32 (the head's part included).
    [({"checkpointing": False}, 430_901), ({"checkpointing": True}, 76_186)],
    ids=str,
)
def test_a_tokens_bytes_are_estimated_from_above(options, measured):
    estimate = activation_bytes(8, 512, half=False, **options)
    assert measured < estimate < 1.4 * measured


def test_a_budget_counts_with_checkpointing_and_16_bits():
    """Qwen3-0.6B's shape beside 70 GB: a group of G1, up to 512 + 8 * 1,024 tokens, fits."""
    text = SimpleNamespace(hidden_size=1024, num_hidden_layers=28)
    config = SimpleNamespace(get_text_config=lambda: text)
    model = SimpleNamespace(config=config, supports_gradient_checkpointing=True)

    def tokens(device, **options):
        config = RLOOConfig(use_cpu=True, **options)
        with pretended(total=80 * 10**9) as gpu:
            gpu.reserved = 10 * 10**9
            return prepare_model.token_budget(model, torch.device(device), config)

    plain = {"bf16": False, "gradient_checkpointing": False}
    group = 512 + 8 * 1024
    assert tokens("cuda", **plain) == 70 * 10**9 // 4 // (4 * 34 * 1024 * 28) < group
    assert tokens("cuda") > group
    saved = tokens("cuda", **plain | {"bf16": True})
    assert saved == pytest.approx(4 / 3 * tokens("cuda", **plain), rel=1e-3)
    assert tokens("cuda", **plain | {"gradient_checkpointing": True}) > 5 * saved
    assert tokens("cpu") == tokens("cpu", **plain) == 1101


def test_a_gpu_that_multiplies_slowly_is_told_of():
    def note(device, **options):
        config = RLOOConfig(use_cpu=True, **{"bf16": False, **options})
        return prepare_model.precision_note(config, torch.device(device))

    (said,) = note("cuda")
    assert "tf32" in said
    assert note("cpu") == note("cuda", bf16=True) == note("cuda", tf32=False) == []
    # By torch's older setting and by the one of 2.9, after which the older one is not told.
    for change in (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ):
        try:
            change()
            assert note("cuda") == []
        finally:
            torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
