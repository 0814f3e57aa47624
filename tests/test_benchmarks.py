"""The benchmark measures what it says: counts, medians, sides that work, a peer that is a peer."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from benchmarks import (
    distributed,
    jobs,
    model,
    peers,
    processor,
    prompt_probes,
    prompt_sampling_cost,
    report,
    results,
    turns,
)
from benchmarks import machine as machine_module
from benchmarks.floors import Shape, count_decode_bytes, count_floor
from benchmarks.long_answers import LargestTensors
from benchmarks.measure import parse_options
from benchmarks.plan import __main__ as plans
from benchmarks.plan import cases, side
from benchmarks.prompt_sampling_cost import TimedSampler
from benchmarks.shapes import SHAPES
from benchmarks.summary import Spread, summarise
from benchmarks.trl_side import TorchWithProducts, add_product
from benchmarks.workloads import DEFAULT, FAMILIES, WORKLOADS
from rloo.config.batch_sizes import batches_of
from rloo.config.parsing import parse_command_line
from rloo.data.probe_sampler import ProbeSampler
from rloo.data.reward_estimate import RewardEstimate
from rloo.data.variance_sampler import VarianceSampler

# N = 2 x (10 x (2 x 8 + 2 x 4) + 3 x 10 x 20) + 10 x 100 = 2 x 840 + 1000 = 2680
SHAPE = Shape(num_layers=2, hidden=10, queries=8, keys=4, intermediate=20, vocabulary=100)


def test_floor_is_what_one_counts_by_hand():
    # One prompt of 3 tokens with completions of 2 and 1. Pairs of a token and one that it sees:
    # prompt 1 + 2 + 3 = 6; completions (4 + 5) + 4 = 13. A pair costs 4 x 8 x 2 = 64.
    floor = count_floor(SHAPE, [3], [[2, 1]])
    assert SHAPE.num_parameters == 2680
    assert floor.sample == 2 * 2680 * (3 + 3) + 64 * (6 + 13)
    assert floor.update == (6 + 2) * 2680 * 3 + (3 + 1) * 64 * 13
    assert floor.prompt_passes == (6 + 2) * 2680 * 3 + (3 + 1) * 64 * 6
    # Two decoding steps read the prompt's 3 keys once each for the group, the rows 1 + 2 and 1 of
    # their own; a token holds 2 x 4 x 2 numbers of 4 bytes.
    assert floor.cache_bytes == 4 * 16 * (2 * 3 + 3 + 1)
    assert count_decode_bytes(SHAPE, floor, 2, 2) == 2 * 2680 * 2 + floor.cache_bytes


def test_floor_of_more_passes_no_reference_and_frozen_matrices():
    plain = count_floor(SHAPE, [3], [[2, 1]], reference=False)
    assert plain.update == 6 * 2680 * 3 + 3 * 64 * 13
    twice = count_floor(SHAPE, [3], [[2, 1]], iterations=2)
    assert twice.update == (2 * 6 + 2) * 2680 * 3 + (2 * 3 + 1) * 64 * 13
    adapter = count_floor(SHAPE, [3], [[2, 1]], frozen=True)
    assert adapter.update == (4 + 2) * 2680 * 3 + (3 + 1) * 64 * 13


def make_result(side, seconds, *, update=True):
    phases = {"sample": 1.0, "score": 0.25, "update": 0.75} if update else {"sample": 1.0}
    steps = [
        {
            "seconds": s,
            "cpu_seconds": 2 * s,
            "idle_seconds": 10.0,
            "idle_cpu_seconds": 0.0,
            "lengths": [2, 1],
            "truncated": 1,
            "phases": phases,
            "peak_mib": 300.0 + s,
            "loaded_mib": 200.0,
            "prompt_tokens": [3],
            "seed": 42,
            "round": number,
            "run": "1",
        }
        for number, s in enumerate(seconds, 1)
    ]
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 10,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 20,
        "vocab_size": 100,
    }
    job = {
        "title": "a title",
        "name": "W",
        "kind": "step",
        "num_prompts": 1,
        "num_generations": 2,
        "config": config,
        "options": {"beta": 0.05},
        "lora": False,
        "cuda": False,
    }
    warm_up = {"seconds": 9.0, "facts": {"torch": "2"}}
    return {"side": side, "workload": "W", "job": job, "steps": steps, "warm_up": warm_up}


MACHINE = {
    "matrix_rate": 1e6,
    "bandwidth": 1e6,
    "library": "MKL",
    "library_rates": {"MKL": 1e6, "oneDNN": 5e5},
}


def test_summary_has_medians_per_token_and_shares_of_the_floor():
    summary = summarise(make_result("rloo", [3.0, 6.0, 30.0]), MACHINE)
    assert summary.seconds == Spread(6.0, 3.0, 30.0)
    assert summary.whole == Spread(2e6, 1e6, 1e7)
    assert summary.cpu.median == 4e6
    assert summary.phases["update"].median == pytest.approx(1e6 / 3)
    assert summary.above_weights_mib == 130.0
    assert (summary.tokens, summary.truncated) == (1.5, 0.5)
    floor = count_floor(SHAPE, [3], [[2, 1]])
    assert summary.shares["sample"] == pytest.approx(floor.sample / 1e6)
    assert summary.shares["update"] == pytest.approx(floor.update / 1e6)
    assert summary.shares["whole"] == pytest.approx(floor.operations / 1e6 / 6.0)


def test_ratios_are_of_medians_and_show_each_pair():
    results = [make_result("rloo", [1.0, 2.0, 3.0]), make_result("trl", [5.0, 8.0, 24.0])]
    results.append(make_result("generate", [4.0, 4.0, 4.0], update=False))
    text = report.render("W", results, MACHINE)
    assert "| trl / rloo | **4.00x** (4.00..8.00) | **4.00x** (4.00..8.00) | **1.00x**" in text
    generate = next(line for line in text.splitlines() if line.startswith("| generate / rloo"))
    assert generate.count("| -") == 4  # it samples and does nothing else
    results[1]["error"] = "it stopped"
    assert "trl, W: not measured to the end: it stopped" in report.render("W", results, MACHINE)


def test_growth_is_shown_beside_that_of_the_floor():
    # Time grows twice as fast as the arithmetic, which is the same here.
    first, second = make_result("rloo", [1.0]), make_result("rloo", [2.0])
    text = report.render("LEN", [first, second], MACHINE)
    assert text.splitlines()[-1].endswith("| 2.00x | 1.00x | **2.00x** |")
    # On a busy machine growth is that of the time on the CPU.
    first["steps"][0]["cpu_seconds"], second["steps"][0]["cpu_seconds"] = 0.8, 2.4
    text = report.render("LEN", [first, second], MACHINE)
    assert "BUSY" in text and "| 3.00x | 1.00x | **3.00x** |" in text


def test_a_side_that_computes_out_of_turn_is_shown():
    result = make_result("rloo", [1.0])
    assert "WHILE OTHERS" not in report.render("W", [result], MACHINE)
    result["steps"][0]["idle_cpu_seconds"] = 3.0
    assert "COMPUTED 3.0 s WHILE OTHERS WERE MEASURED" in report.render("W", [result], MACHINE)


@pytest.mark.parametrize(
    "fault", [{"cpu_seconds": 0.5}, {"others_seconds": 0.11, "cores": 2}], ids=["waited", "shared"]
)
def test_on_a_busy_machine_cpu_time_is_read(fault):
    rloo, trl = make_result("rloo", [1.0, 1.0]), make_result("trl", [3.0, 3.0])
    for result in (rloo, trl):
        for step in result["steps"]:
            step |= {"others_seconds": 0.09, "cores": 2}
    text = report.render("W", [rloo, trl], MACHINE)
    assert "HAD TO" not in text and "BUSY" not in text
    assert "| **3.00x** (3.00..3.00) | **3.00x** (3.00..3.00) |" in text
    rloo["steps"][0] |= fault
    text = report.render("W", [rloo, trl], MACHINE)
    assert "wait for each other" not in text
    assert "wait for each other" in report.render("W", [rloo, trl], MACHINE | {"threads": 2})
    assert "1 STEPS IN WHICH IT HAD TO WAIT" in text and "BUSY MACHINE in 1 of 4 steps" in text
    assert "| trl / rloo | 3.00x (3.00..3.00) | **" in text
    rloo["steps"][0]["device"] = "cuda"
    assert "BUSY" not in report.render("W", [rloo, trl], MACHINE)


def test_steps_that_were_not_made_in_turn_are_no_pairs():
    rloo, trl = make_result("rloo", [1.0, 1.0]), make_result("trl", [2.0, 4.0])
    trl["steps"][1]["run"] = "2"
    assert "| trl / rloo | **3.00x** (2.00..2.00)" in report.render("W", [rloo, trl], MACHINE)
    trl["steps"][0]["run"] = "2"
    text = report.render("W", [rloo, trl], MACHINE)
    assert "| trl / rloo | **3.00x** (never side by side)" in text


def test_seeds_have_medians_of_their_own_and_like_is_compared_with_like():
    sides = ("rloo", "rloo:bf16=true", "trl:bf16=true")
    made = [make_result(side, [s, s, s]) for side, s in zip(sides, (1.0, 2.0, 6.0), strict=True)]
    for result in made:
        result["steps"][2]["seed"] = 43
    made[2]["steps"][2]["seconds"] = 9.0
    text = report.render("W", made, MACHINE)
    assert "| trl:bf16=true / rloo | **6.00x** (6.00..9.00) |" in text
    assert "| trl:bf16=true / rloo:bf16=true | **3.00x** (3.00..4.50) |" in text
    assert "- trl:bf16=true / rloo: 6.00x (42, 2 rounds), 9.00x (43, 1 rounds)" in text


def test_sides_and_workloads_are_read_from_the_command_line():
    spec = peers.Spec.parse("rloo:rollout_engine=hf,num_threads=1")
    assert (spec.name, spec.options) == ("rloo", ("rollout_engine=hf", "num_threads=1"))
    assert parse_options(list(spec.options)) == {"rollout_engine": "hf", "num_threads": 1}
    listed = peers.Spec.parse('trl:onednn=["packed","forward"],bf16=false').options
    assert parse_options(list(listed)) == {"onednn": ["packed", "forward"], "bf16": False}
    assert [w.name for _, w in peers.choose("K", None)] == list(FAMILIES["K"])
    with pytest.raises(ValueError, match="there is no workload W9"):
        peers.choose("W9", None)
    assert all(name in WORKLOADS for members in FAMILIES.values() for name in members)
    everything = {w.name for name in DEFAULT for _, w in peers.choose(name, None)}
    models = {*SHAPES, *model.RECIPES, model.PRETRAINED}
    assert {workload.model for workload in WORKLOADS.values()} <= models
    assert set(WORKLOADS) - everything == {"G1", "G2", "G3", "SG", "D1", "D2", "TINY"}


def test_several_processes_are_compared_with_one_step_by_step():
    sides = zip(("rloo", "ranks:processes=1", "ranks:processes=2"), (2.0, 3.0, 1.0), strict=True)
    results = [make_result(side, [s, 2 * s, 4 * s]) for side, s in sides]
    for step, count in zip(results[2]["steps"], (1, 3, 2), strict=True):
        step["exchanged"] = {"sum_gradients": [4000 * count, count], "new": [1, 1]}
    text = distributed.render("W1: a title", results)
    whole = next(line for line in text.splitlines() if line.startswith("| whole step"))
    assert whole.endswith("| **1.500x** (1.500..1.500) | **2.000x** (2.000..2.000) |")
    assert text.endswith("| gradients | 8,000 | 2 |\n| new | 1 | 1 |")


@pytest.mark.slow  # four processes that import everything
def test_what_several_processes_cost_is_measured(tmp_path, capsys):
    file = tmp_path / "result.json"
    words = ["--workload", "TINY", "--steps", "2", "--json", str(file)]
    assert distributed.main(words) == 0, capsys.readouterr().out
    alone, itself, two = json.loads(file.read_text(encoding="utf-8"))["TINY"]
    assert not any(step["exchanged"] for step in alone["steps"])
    for result in (itself, two):
        for step in result["steps"]:
            assert set(step["exchanged"]) <= set(distributed.KINDS)
            assert (step["exchanged"]["all_gather_completions"][0] > 0) == (result is two)
            assert len(step["lengths"]) == 8


FACTS = {"cpu": "a CPU", "cores": 2, "threads": 1, "python": "3", "torch": "2", **MACHINE}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Rates that take no time to measure."""
    monkeypatch.setattr("benchmarks.machine.measure_machine", lambda *_, **__: FACTS)


def run_benchmark(file: Path, *arguments: str) -> tuple[int, list]:
    """The status, and the results in a file."""
    words = ["--threads", "1", "--results", str(file), "--workload", "TINY"]
    status = peers.main([*words, *arguments])
    return status, results.collect(results.Results(file).records)


@pytest.mark.slow  # three processes that import everything
def test_sides_take_turns_and_one_that_fails_is_named(tmp_path, capsys):
    sides = ["rloo", "padded", "rloo:no_such_option=1"]
    words = ["--rounds", "2", "--sides", *sides]
    status, (*good, bad) = run_benchmark(tmp_path / "results", *words)
    assert status == 1
    for result in good:
        assert len(result["steps"]) == 2
        for step in result["steps"]:
            assert len(step["lengths"]) == 8
            assert all(1 <= length <= 12 for length in step["lengths"])
            assert step["phases"]["sample"] > 0 < step["phases"]["update"]
            assert sum(step["phases"].values()) <= step["seconds"]
            assert step["others_seconds"] < step["cores"] * step["seconds"] + 0.1
    assert bad["steps"] == [] and "no_such_option" in bad["error"]
    out = capsys.readouterr().out
    assert "| padded / rloo | " in out and "no_such_option" in out


@pytest.mark.slow  # two processes that import everything
def test_without_an_end_all_completions_are_as_long_as_they_may(tmp_path, monkeypatch):
    endless = replace(WORKLOADS["TINY"], endless=True, mean_tokens=None)
    monkeypatch.setitem(WORKLOADS, "TINY", endless)
    status, found = run_benchmark(tmp_path / "results", "--rounds=1", "--sides", "rloo", "padded")
    assert status == 0 and len(found) == 2
    for result in found:
        assert result["steps"][0]["lengths"] == [12] * 8
        assert result["steps"][0]["truncated"] == 8


class Clock:
    """A side that takes a second more for every step and is killed where it is told to."""

    started: ClassVar[list] = []
    until = 99

    def __init__(self, spec, job, folder, threads):
        job = json.loads(job.read_text(encoding="utf-8"))
        self.label, self.job, self.count = spec.label, job, 0
        self.started.append((spec.label, job["seed"], job["prompts"]))

    def read(self):
        self.count += 1
        (step,) = make_result(self.label, [float(self.count)])["steps"]
        for name in ("seed", "round", "run", "prompt_tokens"):
            del step[name]
        lengths = [2] * self.job["num_prompts"] * self.job["num_generations"]
        return step | {"facts": {}, "lengths": lengths}

    def step(self):
        if len(self.started) > self.until:
            raise KeyboardInterrupt
        return self.read()

    def close(self):
        pass


@pytest.fixture
def clocks(monkeypatch):
    monkeypatch.setattr(turns, "Side", Clock)
    monkeypatch.setattr(Clock, "started", [])
    return Clock


def test_a_command_that_is_stopped_goes_on_where_it_was(tmp_path, clocks, monkeypatch, capsys):
    file = tmp_path / "results"
    words = ["--rounds", "2", "--seeds", "2", "--sides", "rloo", "padded"]
    monkeypatch.setattr(clocks, "until", 3)  # when all of seed 42 is there
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(file, *words)
    with file.open("a", encoding="utf-8") as lines:
        lines.write('{"kind": "step", "wor')  # as it was killed while it wrote
    monkeypatch.setattr(clocks, "until", 99)
    _, found = run_benchmark(file, *words)
    places = [(step["seed"], step["round"]) for step in found[0]["steps"]]
    assert places == [(42, 1), (42, 2), (43, 1), (43, 2)]
    assert [seed for _, seed, _ in clocks.started] == [42, 42, 43, 43, 43, 43]
    # More rounds are added to those that are there, with the prompts that they would have had.
    run_benchmark(file, *words[:1], "3", *words[2:])
    assert [(label, seed) for label, seed, _ in clocks.started[6:]] == [
        ("rloo", 42), ("padded", 42), ("rloo", 43), ("padded", 43)
    ]  # fmt: skip
    whole = jobs.make_job(WORKLOADS["TINY"], (1, 2, 3), 42, turns.Setting(1))["prompts"]
    assert clocks.started[6][2] == whole[:2] + whole[6:]
    # Nothing is measured again to be shown, nor by the same command.
    before, said = file.read_text(encoding="utf-8"), capsys.readouterr().out
    assert peers.main(["--report", str(file)]) == 0
    shown = capsys.readouterr().out
    assert file.read_text(encoding="utf-8") == before
    assert "6 steps of 2 seeds" in shown and said.count("6 steps of 2 seeds") == 2
    run_benchmark(file, *words)
    assert len(clocks.started) == 10


def test_a_round_has_the_same_long_prompts_whichever_others_there_are():
    rows = [{"question": f"q{i}", "answer": "a b"} for i in range(40)]

    def split(text):
        return {"input_ids": text.split()}

    few, many = (model.make_long_prompts(rows, split, count, 9) for count in (2, 4))
    assert many[:2] == few and len(set(many)) == 4
    assert all(7 <= len(split(prompt)["input_ids"]) <= 9 for prompt in many)


def test_figures_of_other_sources_are_not_mixed(tmp_path, clocks, monkeypatch, capsys):
    file, words = tmp_path / "results", ["--rounds", "1", "--sides", "rloo"]
    run_benchmark(file, *words)
    monkeypatch.setattr(results, "digest_sources", lambda: "changed")
    run_benchmark(file, *words)
    assert len(clocks.started) == 2
    monkeypatch.setitem(FACTS, "torch", "3")
    run_benchmark(file, *words)
    assert len(clocks.started) == 3
    capsys.readouterr()
    peers.main(["--report", str(file)])
    shown = capsys.readouterr().out
    assert shown.count("### TINY") == shown.count("1 steps of 1 seed") == 3
    # Of a workload that was itself changed, the table has what it is now.
    monkeypatch.setitem(WORKLOADS, "TINY", replace(WORKLOADS["TINY"], max_tokens=11))
    run_benchmark(file, *words)
    assert len(clocks.started) == 4
    assert "1 steps left out, of what it was before a change" in capsys.readouterr().out


def test_disturbed_steps_are_measured_again_where_asked(tmp_path, clocks):
    file, words = tmp_path / "results", ["--rounds", "2", "--sides", "rloo"]
    run_benchmark(file, *words)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    lines[-1]["step"]["cpu_seconds"] = 0.1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run_benchmark(file, *words)
    assert len(clocks.started) == 1
    _, (found,) = run_benchmark(file, *words, "--redo-disturbed")
    assert len(clocks.started) == 2 and len(found["steps"]) == 2
    assert not any(map(results.was_disturbed, found["steps"]))


def test_sources_are_told_apart_by_what_is_in_them(tmp_path, monkeypatch):
    (tmp_path / "src" / "rloo" / "__pycache__").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    for name in results._SIDES:
        (tmp_path / "benchmarks" / f"{name}.py").touch()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    digests = [results.digest_sources()]
    for name in ("src/rloo/a.py", "src/rloo/b.c", "benchmarks/systems.py", "benchmarks/report.py",
                 "src/rloo/__pycache__/a.pyc", "src/rloo/c.so"):  # fmt: skip
        (tmp_path / name).write_text("1", encoding="utf-8")
        digests.append(results.digest_sources())
    assert len(set(digests)) == 4 and len(set(digests[3:])) == 1


def test_the_floor_has_the_rate_of_the_faster_library(monkeypatch):
    a, b = torch.randn(24, 24), torch.randn(24, 24).t()
    products = machine_module._products(a, b)
    assert len(products) == 2, "torch has two on this machine"
    own, other = products
    torch.testing.assert_close(products[own](), a @ b)
    products[other]()  # a @ b.T: the same number of operations
    for seconds, faster in ((4.0, other), (1.0, own)):
        times = iter([seconds, 2.0, 1.0])
        monkeypatch.setattr(machine_module, "_best_seconds", lambda *_, _t=times: next(_t))
        rates = machine_module.measure_rates("cpu", torch.float32, 10)
        assert (rates["library"], rates["matrix_rate"]) == (faster, 2000 / min(seconds, 2.0))
        assert rates["library_rates"] == {own: 2000 / seconds, other: 1000}
    merged = machine_module.faster(
        {"matrix_rate": 1, "bandwidth": 2, "library_rates": {"a": 1}},
        {"matrix_rate": 3, "bandwidth": 1, "library_rates": {"a": 0, "b": 3}},
    )
    assert merged == {"matrix_rate": 3, "bandwidth": 2, "library_rates": {"a": 1, "b": 3}}


def test_processors_are_named_by_their_numbers():
    text = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: X\n"
    amd = processor.describe(text.format("AuthenticAMD", 26, 2) + "flags\t: fpu avx2\n\nmodel : 9")
    assert amd == "X, AMD family 26 model 2 (Zen 5), with AVX2"
    intel = processor.describe(text.format("GenuineIntel", 6, 207))
    assert "family 6 model 207 (Emerald Rapids" in intel
    assert "Sapphire Rapids" in processor.describe(text.format("GenuineIntel", 6, 143))
    assert processor.describe(text.format("GenuineIntel", 6, 1)) == "X, Intel family 6 model 1"
    assert processor.describe("processor : 0\nBogoMIPS : 50\n") == ""


@pytest.mark.parametrize("shape", [(7, 5, 3), (3, 5, 7)])
def test_products_of_a_peer_are_the_same_by_onednn(shape):
    height, width, columns = shape
    a, b = torch.randn(height, width), torch.randn(columns, width).t()
    total, out = torch.ones(height, columns), torch.empty(height, columns)
    expected = a @ b
    add_product(total, a, b)
    torch.testing.assert_close(total, expected + 1)
    torch_too = TorchWithProducts()
    assert torch_too.mm(a, b, out=out) is out and torch_too.float32 is torch.float32
    torch.testing.assert_close(out, expected)


def test_without_a_gpu_its_workloads_are_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(peers, "has_cuda", lambda: False)
    assert peers.main(["--workload", "G1", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "not measured" in out and "--workload G1" in out


def test_the_largest_tensors_are_found_in_the_backward_too():
    x, y = torch.ones(40, requires_grad=True), torch.ones(40)
    with LargestTensors(30) as largest:
        torch.zeros(1).expand(100, 100)  # one number
        product = torch.dot(x, y)
        assert largest.elements == {"tile": 0, "other": 1}
        product.backward()
        assert largest.elements == {"tile": 0, "other": 40}
        torch.ones(5, 30)
    assert largest.elements == {"tile": 150, "other": 40}
    assert "[5, 30]" in largest.descriptions["tile"]


TINY = cases.Case(
    "tiny", "a tiny model", False, shape="tiny", mean_tokens=4, prompts=(8, 6),
    options={**cases.CASES[-1].options, "num_prompts": 2, "num_generations": 4,
             "max_completion_length": 12},
)  # fmt: skip


@pytest.mark.slow
def test_a_plan_is_compared_with_a_run_as_it_is_and_with_one_of_the_worst_case(
    tmp_path, monkeypatch
):
    arguments = TINY.arguments(tmp_path, 1)
    monkeypatch.setattr(side.Policy, "stop_token_ids", side.Policy.stop_token_ids)
    plan = side.plan(arguments)
    assert plan["expected"]["step"] <= plan["worst"]["step"]
    run = side.run(arguments, worst=False)
    assert run["steps"] == 12, "four rollouts of three steps"
    assert 1 < run["length"] < 12
    shutil.rmtree(tmp_path / "run")
    worst = side.run(arguments, worst=True)
    assert worst["length"] == 12
    rows = [plan | {"seconds": 30.0}, run, worst]
    named = zip(plans.KINDS, rows, strict=True)
    monkeypatch.setattr(plans, "CASES", [TINY])
    table = plans.table([{**row, "case": "tiny", "kind": kind} for kind, row in named])
    ratio = plan["worst"]["step"] / worst["step"]
    assert f"| a tiny model (not fitted) | 30 s | {plan['expected']['step']:.3g} s |" in table
    assert f"| **{ratio:.2f}** | none |" in table


def test_a_plan_is_compared_with_the_run_beside_it(monkeypatch):
    """Where the machine is slower in one of three repeats, both of that one are."""
    repeats = [(1.0, 1.0, 1.5), (1.0, 2.0, 3.0), (4.0, 2.0, 6.0)]
    rows = []
    for planned, as_is, worst in repeats:
        plan = {"step": planned, "evaluation": None}
        rows.append({"kind": "plan", "seconds": 30.0, "expected": plan, "worst": plan})
        rows += [{"kind": "expected", "step": as_is}, {"kind": "worst", "step": worst}]
    monkeypatch.setattr(plans, "CASES", [TINY])
    table = plans.table([{**row, "case": "tiny"} for row in rows[:-1]])
    assert "| 30 s | 1 s | 2 s | **1.00** | 1 s | 2.25 s | **0.50** | none |" in table


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_configurations_of_plans_are_ones_that_rloo_takes(case, tmp_path):
    config = parse_command_line(case.arguments(tmp_path, 1))
    assert (config.num_threads, config.learning_rate) == (1, 1e-12)
    assert batches_of(config, 1).completions_per_step > 8


def test_what_estimates_leave_of_the_second_moment_falls_from_1_to_the_bound(monkeypatch):
    """By a column that tells the levels, sooner than by the counts of prompts alone."""
    monkeypatch.setitem(prompt_probes.RATES, "mixture", ({"a": 0.5, "b": 0.0, "c": 1.0}, 16))
    assert prompt_probes.known("mixture") == pytest.approx(1 / (0.25 + 0.75 * 3))
    levels = ["a", "b", "c"] * 100
    rate_N = np.array([{"a": 0.5, "b": 0.0, "c": 1.0}[level] for level in levels])
    left = {}
    for kind, pools in (("column", levels), ("counts", [""] * 300)):
        estimate = RewardEstimate(pools, half_life=1e9)
        sampler = VarianceSampler(range(300), estimate, lambda g: [], seed=0, floor=0.25)
        left[kind] = prompt_probes.left_after(sampler, rate_N, 16, [0, 8, 400], seed=1)
    assert left["column"][0] == left["counts"][0] == pytest.approx(1.0)
    assert left["column"][1] < left["counts"][1] - 0.1
    assert left["column"][2] == pytest.approx(0.4, abs=0.02)


class BusySampler(ProbeSampler):
    """Spends CPU seconds in its probe and in each call, and has other groups each time."""

    def __init__(self):
        self.drawn, self.look = 3, lambda number_M: spend(0.04)

    def next(self, num):
        spend(0.01)
        self.look([0])
        return [num]

    def update(self, groups):
        spend(0.02)

    def stats(self):
        return {}

    def state_dict(self):
        return {"drawn": 3}


def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_probes_pass_is_no_part_of_the_seconds_of_draws():
    sampler = TimedSampler(BusySampler())
    assert sampler.next(7) == [7] and sampler.drawn == 3
    assert sampler.seconds["draws"] == pytest.approx(0.01, abs=0.02)
    sampler.update(["a group"])
    sampler.stats()
    assert sampler.state_dict() == {"drawn": 3} and sampler.groups == ["a group"]
    assert sampler.seconds["draws"] == pytest.approx(0.03, abs=0.02)
    assert sampler.seconds["forward"] == pytest.approx(0.04, abs=0.02)


def test_shares_of_a_step_are_medians_over_repeats_that_take_turns():
    seconds = iter([1.0, 2.0, 4.0, 8.0] * 3)
    asked = []

    def measure_arm(workload, arm):
        asked.append(arm)
        step = next(seconds) * len(asked)
        return {"step": step, "draws": 0.01, "forward": 0.03}

    found = prompt_sampling_cost.medians(None, 3, measure_arm)
    assert asked == ["variance", "variance_column", "text", "policy"] * 3
    # Steps of "policy": 8 x 4, 8 x 8 and 8 x 12 seconds.
    row = found["policy"]
    assert row["step"] == 64.0
    assert [row[n] for n in ("draws", "forward", "both")] == pytest.approx([1 / 64, 3 / 64, 4 / 64])


@pytest.mark.slow
def test_the_cost_of_a_probe_has_a_forward_pass_and_other_arms_have_none(tmp_path):
    task = prompt_sampling_cost.random_task("tiny", max_tokens=8, num_rows=16)
    workload = prompt_sampling_cost.Workload(task, 2, 2, steps=3)
    for arm in prompt_sampling_cost.ARMS:
        seconds = prompt_sampling_cost.measure(workload, arm, folder=tmp_path)
        assert ("forward" in seconds) == (arm in ("text", "policy"))
        assert 0 < seconds["draws"] + seconds.get("forward", 0.0) < seconds["step"]
