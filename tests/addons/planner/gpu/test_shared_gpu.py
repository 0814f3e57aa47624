"""Plans for one GPU: memory by hand, what fits, and the changes that make a run fit."""

import re
import shlex
from dataclasses import replace

import pytest

from rloo import RLOOConfig
from rloo.addons.planner.gpu import shared_gpu
from rloo.addons.planner.gpu.cost_model import COPY, MODULE, SERVER
from rloo.addons.planner.gpu.gpu_specs import GPUS
from rloo.addons.planner.gpu.memory_sizes import memory_sizes
from rloo.addons.planner.gpu.model_shapes import TYPICAL
from rloo.addons.planner.gpu.weight_cost import publishing
from rloo.cli import main
from support.gpu_plans import make_job
from tools import gpu_table

QLORA = ["--parameters", "4B", "--use_peft", "--load_in_4bit"]
ROLLOUT = ["--num_prompts", "8", "--num_generations", "8", "--max_completion_length", "512"]


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


def part(said: str, name: str) -> float:
    """The gigabytes of a part of memory."""
    return float(re.search(rf"^  {name} +([\d.]+) GB", said, re.MULTILINE)[1])


def test_a_4_bit_model_on_an_rtx4090_by_hand(capsys):
    """Qwen3-4B: 36 layers of width 2560, 32 and 8 heads of 128, feed-forward 9728."""
    said = plan(capsys, "--gpu", "rtx4090", *QLORA, *ROLLOUT, "--engine_kwargs.copy_weights=false")
    matrices = 36 * (2560 * 4096 * 2 + 2560 * 1024 * 2 + 3 * 2560 * 9728)
    embeddings = 151936 * 2560
    base = matrices * (0.5 + 4 / 64) + embeddings * 4
    sides = 36 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    adapter = 16 * sides
    assert part(said, "base model") == pytest.approx(base / 1e9, abs=0.006)
    assert part(said, "adapter") == pytest.approx(4 * adapter / 1e9, abs=0.006)
    assert part(said, "gradients") == part(said, "adapter")
    assert part(said, "optimizer") == pytest.approx(8 * adapter / 1e9, abs=0.006)
    # Each of the 8 prompts is cached once.
    caches = (64 * 512 + 8 * 256) * 2 * 2 * 36 * 8 * 128
    assert part(said, "caches") == pytest.approx(caches / 1e9, abs=0.006)
    token = 34 * 3 * 2560 + 4 * 36 * 2560
    # A run gives a quarter of the free memory to activations.
    budget = (23.64 * 2**30 - base - 4 * adapter) / 4 // token
    assert part(said, "micro-batch") == pytest.approx(budget * token / 1e9, abs=0.006)
    logits = 2**26 * 4 * 2 + 6 * matrices / 36 + 2 * adapter
    assert part(said, "logits, casts") == pytest.approx(logits / 1e9, abs=0.006)
    lasting = base + 16 * adapter
    peaks = (lasting + caches) / 1e9, (lasting + logits + budget * token) / 1e9
    assert (
        f"memory   {peaks[0]:.1f} GB while it samples, {peaks[1]:.1f} GB in the update, of "
        f"{0.9 * 23.64 * 2**30 / 1e9:.1f} usable" in said
    )
    free = 0.9 * 23.64 * 2**30 - lasting - logits
    assert f"and {free / token:,.0f} fit" in said


def test_a_16_bit_model_with_a_copy_on_an_l40s_by_hand(capsys):
    """Qwen3-8B: 36 layers of width 4096, feed-forward 12288, two vocabulary matrices."""
    options = ["--use_peft", "--lora_r", "32", "--optim", "adamw_8bit", "--rollout_engine=native"]
    half = ["--model_init_kwargs", '{"dtype": "bfloat16"}']
    said = plan(capsys, "--gpu", "l40s", "--parameters", "8.19B", *options, *half, *ROLLOUT)
    matrices = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    everything = matrices + 2 * 151936 * 4096
    sides = 36 * (2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert part(said, "base model") == pytest.approx(2 * everything / 1e9, abs=0.006)
    assert part(said, "engine's copy") == part(said, "base model")
    assert part(said, "adapter") == pytest.approx(4 * 32 * sides / 1e9, abs=0.006)
    state = 2 * (1 + 4 / 256)
    assert part(said, "optimizer") == pytest.approx(state * 32 * sides / 1e9, abs=0.006)
    # The copy stays in the update; the server of a vLLM would leave 1.5 GB of its memory there.
    update = 4 * everything + (8 + state) * 32 * sides + 2**26 * 4 * 2 + 2 * 32 * sides
    token = 34 * 3 * 4096 + 4 * 36 * 4096
    free = 0.9 * 44.4 * 2**30 - update
    fits = float(re.search(r"tokens, and ([\d,]+) fit", said)[1].replace(",", ""))
    assert fits == pytest.approx(free / token, abs=1)
    peak = float(re.search(r"samples, ([\d.]+) GB in the update", said)[1])
    activations = part(said, "micro-batch")
    assert peak == pytest.approx(update / 1e9 + activations, abs=0.06)
    served = plan(
        capsys, "--gpu", "l40s", "--parameters", "8.19B", *options[:5], "--rollout_engine=vllm",
        *half, *ROLLOUT,
    )  # fmt: skip
    fits = float(re.search(r"tokens, and ([\d,]+) fit", served)[1].replace(",", ""))
    assert fits == pytest.approx((free + 2 * everything - 1.5e9) / token, abs=1)


def test_bits_and_checkpointing_are_counted(capsys):
    usual = plan(capsys, "--gpu", "l4", *QLORA, *ROLLOUT)
    full = plan(capsys, "--gpu", "l4", *QLORA[:3], *ROLLOUT)
    assert part(full, "base model") > 4 * part(usual, "base model")
    assert "--rollout_engine vllm --vllm_gpu_memory_utilization" in usual
    assert "merge_adapter true" in usual and "merge_adapter" not in full
    merges = ["--rollout_engine", "vllm", "--engine_kwargs.merge_adapter", "true"]
    merged = plan(capsys, "--gpu", "l4", *QLORA, *ROLLOUT, *merges)
    sync = float(re.search(r"and sync takes ([\d.]+) s", usual)[1])
    assert sync == pytest.approx(8.04 * (1 / 2.4 + 1 / 1.6), rel=0.01)
    row = next(line for line in merged.splitlines() if line[2:].startswith("vllm"))
    assert float(row.split()[-3]) == sync


@pytest.mark.parametrize("gpu", ["rtx3090", "rtx4090", "rtx5090", "l4", "l40s", "a10", "t4"])
def test_every_card_has_a_plan_for_4_billion_parameters(capsys, gpu):
    said = plan(capsys, "--gpu", gpu, *QLORA)
    assert f"GPUs     1 x {gpu} (NVIDIA" in said
    assert sum(line.startswith("* ") for line in said.splitlines()) == 1
    assert ("give the run --fp16 true\n" in said) is (gpu == "t4")


def test_a_card_without_bf16_is_planned_in_fp16(capsys, tmp_path):
    alone = plan(capsys, "--gpu", "t4", *QLORA)
    given = plan(capsys, "--gpu", "t4", *QLORA, "--fp16", "true")
    note = "note     t4 has no bf16 arithmetic: this plan is for fp16; give the run --fp16 true\n"
    assert alone.replace(note, "") == given != alone
    several = plan(capsys, "--gpu", "t4", "--num_gpus", "4", *QLORA, *ROLLOUT)
    assert note in several
    (tmp_path / "run.yaml").write_text("bf16: true\n")
    for own in ([str(tmp_path / "run.yaml")], ["--bf16", "true"]):
        fact = refused(capsys, *own, "--gpu", "t4", *QLORA)
        assert "which has no bf16 arithmetic; give --bf16 false --fp16 true (bf16, fp16)" in fact


def test_one_of_a_kind_is_no_plural(capsys):
    one = ["--num_prompts", "1", "--prompt_tokens", "1", "--completion_tokens", "1"]
    for gpus in ([], ["--num_gpus", "2"]):
        said = plan(capsys, "--gpu", "t4", *gpus, *QLORA, *ROLLOUT[2:], *one)
        assert "rollout  1 prompt of 1 token x 8 completions of 1 token in the mean, 512" in said
        assert not re.search(r"\b1 (prompt|completion|token)s", said)
    long = ["--num_generations", "2", "--max_completion_length"]
    said = plan(capsys, "--gpu", "t4", *QLORA, "--num_prompts", "1", *long, "9000")
    assert "K        up to 1 completion of maximum length in the engine" in said


def measured(name: str) -> float:
    """The first figure in a row of docs/benchmarks.md."""
    page = (gpu_table.PAGE.parent / "benchmarks.md").read_text(encoding="utf-8")
    cell = re.search(rf"^\| {re.escape(name)}[^|]* \| ([\d.,]+)", page, re.MULTILINE)[1]
    return float(cell.rstrip(",").replace(",", ""))


def test_the_step_that_was_measured_on_one_h100_is_predicted():
    """docs/benchmarks.md, G1: Qwen3-0.6B, 32 prompts of 512 tokens, K = 8. The share of the
    bandwidth is from the time of sampling alone; memory and the update are not."""
    job = make_job(
        TYPICAL[0],
        groups=32,
        prompt=512,
        completion=424.0,
        longest=1024,
        reference=True,
        checkpointing=True,
    )
    config = RLOOConfig()
    one = shared_gpu.ways(config, job)["native, copy"]
    own = shared_gpu.with_sampler(job, COPY, config)
    assert one.sampling == pytest.approx(measured("SG: a rollout"), rel=0.02)
    assert one.seconds == pytest.approx(measured("G1: a whole step"), rel=0.1)
    parts = shared_gpu.parts(own, one)
    alone = parts["caches"] + parts["engine's copy"]
    assert alone / 2**20 == pytest.approx(measured("SG: peak memory"), rel=0.1)
    peak = max(shared_gpu.peaks(own, one)) - parts["weights"]
    assert peak / 2**20 == pytest.approx(measured("G1: peak memory"), rel=0.1)


def test_the_module_reads_dequantised_weights_in_every_step():
    config = RLOOConfig(use_peft=True, load_in_4bit=True)
    shape = TYPICAL[2]
    job = make_job(shape, "rtx4090", sampler=MODULE, adapter=16, memory=memory_sizes(config))
    head = shape.hidden * shape.vocabulary
    moved = 12.5625 * shape.linear + 8 * head
    assert float(job.decoding(1, 0, 1)) == pytest.approx(moved / (1.008e12 * 0.6) + 36e-3)


def test_weights_are_dequantised_in_each_pass_of_each_micro_batch():
    shape = TYPICAL[2]
    config = RLOOConfig(use_peft=True, load_in_4bit=True)
    four, plain = (
        make_job(shape, adapter=16, checkpointing=True, memory=memory_sizes(one)).update(
            1, divided=False
        )
        for one in (config, RLOOConfig(use_peft=True, model_init_kwargs={"dtype": "bfloat16"}))
    )
    # Two forward passes and a backward pass; 16-bit weights are read by the product itself.
    passes = 3 * four.micro_batches
    assert four.dequantising == pytest.approx(passes * 10.5625 * shape.linear / 3.35e12)
    assert plain.dequantising == 0


def test_a_server_of_an_adapter_that_slept_reads_its_weights_from_host_memory():
    config = RLOOConfig(use_peft=True, rollout_engine="vllm")
    job = make_job(TYPICAL[2], "rtx4090", adapter=16)

    def difference(job, *parallel):
        asleep, awake = shared_gpu.with_sampler(job, SERVER, config), replace(job, sleeps=False)
        pair = (
            publishing(one, 1, *parallel, divided=False, apart=False) for one in (asleep, awake)
        )
        return next(pair) - next(pair)

    assert difference(job) == pytest.approx(2 * job.shape.parameters / (32e9 * 0.7))
    assert difference(job, 4) == pytest.approx(difference(job) / 4)
    # Without an adapter of its own, a server drops its weights, and reads them from files.
    assert difference(replace(job, adapter=0)) == difference(replace(job, merges=True)) == 0


def test_the_native_engine_samples_waves_of_completions_of_maximum_length():
    job = make_job(TYPICAL[2], "rtx4090", sampler=COPY, completion=2000.0, groups=64)
    room = job.room(1)
    row = 147456 * 4200 + 16 * 151936
    assert room == int((0.9 * 23.64 * 2**30 - 2 * job.shape.parameters) / row) < job.rows
    waves = -(-job.rows // room)
    one = make_job(TYPICAL[2], "rtx4090", sampler=COPY, completion=2000.0, groups=64 / waves)
    assert job.wave(1, 1) == pytest.approx(waves * one.wave(1, 1), rel=1e-6)


def test_a_plan_says_what_a_server_reserves(capsys):
    free = plan(capsys, "--gpu", "rtx4090", *QLORA)
    given = plan(capsys, "--gpu", "rtx4090", *QLORA, "--vllm_gpu_memory_utilization", "0.6")
    share = float(re.search(r"--vllm_gpu_memory_utilization ([\d.]+)", free)[1])
    for said, each in ((free, share), (given, 0.6)):
        gigabytes = each * 23.64 * 2**30 / 1e9
        assert f"the server reserves {gigabytes:.1f} of 25.4 GB" in said


def test_a_server_has_at_most_its_share():
    config = RLOOConfig(rollout_engine="vllm", vllm_gpu_memory_utilization=0.5)
    job = shared_gpu.with_sampler(make_job(TYPICAL[2]), SERVER, config)
    free = 0.5 * 85e9 - 2 * job.shape.parameters - 1.5e9
    assert job.sleeps and job.room(1, 0.0) == int(free / (1200 * 147456))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["native, copy", "native", "vllm"]),
        ({"use_peft": True, "load_in_4bit": True}, ["native", "native, copy", "vllm"]),
        ({"engine_kwargs": {"copy_weights": False}}, ["native"]),
        ({"rollout_engine": "vllm"}, ["vllm"]),
        ({"rollout_engine": "native"}, ["native, copy", "native"]),
    ],
)
def test_engines_that_the_options_exclude_are_not_offered(options, names):
    assert [one.name for one in shared_gpu.samplers(RLOOConfig(**options))] == names


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        ([*QLORA[:2], *ROLLOUT], "--use_peft true"),
        ([*QLORA[:3], "--gradient_checkpointing", "false", *ROLLOUT[:4],
          "--max_completion_length", "4096"], "--gradient_checkpointing true"),
        (["--parameters", "14B", "--use_peft", *ROLLOUT], "--load_in_4bit true"),
        ([*QLORA, *ROLLOUT[:4], "--max_completion_length", "200000"],
         "--max_completion_length 16384"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_is_told_the_cheapest_change(capsys, run, fix):
    said = refused(capsys, "--gpu", "rtx4090", *run)
    assert "does not fit 1 x rtx4090" in said and said.strip().endswith(f"it fits with {fix}")
    kept = run[: run.index("--max_completion_length")] if "length" in fix else run
    plan(capsys, "--gpu", "rtx4090", *kept, *shlex.split(fix))


def test_what_nothing_makes_fit_is_said(capsys):
    said = refused(capsys, "--gpu", "t4", "--fp16", "true", "--parameters", "70B", *ROLLOUT)
    assert "no change that was tried makes it fit" in said


def test_a_cell_of_the_table_is_the_plan_of_that_run(capsys):
    said = plan(capsys, "--gpu", "a10", *QLORA, *ROLLOUT)
    lines = said.splitlines()
    top = next(n for n, line in enumerate(lines) if re.match("K +256", line))
    column = re.split(r"  +", lines[top]).index("2,048")
    row = next(line for line in lines[top:] if line.startswith("16 "))
    rate = re.split(r"  +", row)[column].split()[0]
    other = ["--num_prompts", "8", "--num_generations", "16", "--max_completion_length", "2048"]
    again = plan(capsys, "--gpu", "a10", *QLORA, *other)
    table = [
        line
        for line in again.splitlines()
        if re.match(r"[* ] (native, copy|native|vllm) +\d", line)
    ]
    assert rate in [re.split(r"  +", line[2:])[2] for line in table]


def test_a_table_says_what_does_not_fit(capsys):
    said = plan(capsys, "--gpu", "t4", "--fp16", "true", *QLORA, *ROLLOUT)
    rows = [line for line in said.splitlines() if re.match(r"(4|8|16|32) +\d", line)]
    assert len(rows) == 4 and all(line.endswith("-") for line in rows)


def test_cards_on_pcie_have_the_rates_of_their_memory_and_of_pcie():
    assert GPUS["t4"].bandwidth == 256 / 8 * 10e9  # bits, and bits per second of each
    cards = [gpu for gpu in GPUS.values() if gpu.name not in ("a100", "h100", "h200", "b200")]
    assert len(cards) == 7 and all(gpu.nvlink == gpu.host for gpu in cards)


def test_the_page_has_the_figures_of_the_code():
    page = gpu_table.PAGE.read_text(encoding="utf-8")
    assert gpu_table.filled(page) == page and "| rtx4090 |" in page
