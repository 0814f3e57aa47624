"""The benchmark measures what it says: counts, medians, sides that work, a peer that is a peer."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import distributed, peers, report
from benchmarks.floors import Shape, count_decode_bytes, count_floor
from benchmarks.long_answers import LargestTensors
from benchmarks.plan import __main__ as plans
from benchmarks.plan import cases, side
from benchmarks.side import parse_options
from benchmarks.workloads import FAMILIES, WORKLOADS
from rloo.config.batches import batches_of
from rloo.config.parsing import parse_command_line

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
        }
        for s in seconds
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
    prompts = [7] + [3] * len(seconds)  # the first is the warm-up's
    return {
        "side": side,
        "job": job,
        "prompt_tokens": prompts,
        "steps": steps,
        "warm_up": warm_up,
    }


MACHINE = {"matrix_rate": 1e6, "bandwidth": 1e6}


def test_summary_has_medians_per_token_and_shares_of_the_floor():
    summary = report.summarise(make_result("rloo", [3.0, 6.0, 30.0]), MACHINE)
    assert summary.seconds == report.Spread(6.0, 3.0, 30.0)
    assert summary.whole == report.Spread(2e6, 1e6, 1e7)
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
    assert "| trl | **4.00x** (4.00..8.00) | **4.00x** (4.00..8.00) | **1.00x**" in text
    generate = next(line for line in text.splitlines() if line.startswith("| generate | -"))
    assert generate.count("| -") == 4  # it samples and does nothing else
    results[1]["error"] = "it stopped"
    assert "trl, W: not measured to the end: it stopped" in report.render("W", results, MACHINE)


def test_growth_is_shown_beside_that_of_the_floor():
    # Time grows twice as fast as the arithmetic, which is the same here.
    first, second = make_result("rloo", [1.0]), make_result("rloo", [2.0])
    text = report.render("LEN", [first, second], MACHINE)
    assert text.splitlines()[-1].endswith("| 2.00x | 1.00x | **2.00x** |")


def test_a_side_that_computes_out_of_turn_is_shown():
    result = make_result("rloo", [1.0])
    assert "WHILE OTHERS" not in report.render("W", [result], MACHINE)
    result["steps"][0]["idle_cpu_seconds"] = 3.0
    assert "COMPUTED 3.0 s WHILE OTHERS WERE MEASURED" in report.render("W", [result], MACHINE)


def test_steps_that_the_machine_held_up_are_shown():
    result = make_result("rloo", [1.0, 1.0])
    assert "HAD TO WAIT" not in report.render("W", [result], MACHINE)
    result["steps"][0]["cpu_seconds"] = 0.5
    assert "1 STEPS IN WHICH IT HAD TO WAIT" in report.render("W", [result], MACHINE)


def test_sides_and_workloads_are_read_from_the_command_line():
    spec = peers.Spec.parse("rloo:rollout_engine=hf,num_threads=1")
    assert (spec.name, spec.options) == ("rloo", ("rollout_engine=hf", "num_threads=1"))
    assert parse_options(list(spec.options)) == {"rollout_engine": "hf", "num_threads": 1}
    assert [w.name for _, w in peers.choose("K", None)] == list(FAMILIES["K"])
    with pytest.raises(ValueError, match="there is no workload W9"):
        peers.choose("W9", None)
    assert all(name in WORKLOADS for members in FAMILIES.values() for name in members)


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
            assert step["exchanged"]["completions_of_all"][0] > 0 and len(step["lengths"]) == 8


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Rates that take no time to measure."""
    facts = {"cpu": "a CPU", "cores": 2, "threads": 1, "python": "3", "torch": "2"}
    monkeypatch.setattr("benchmarks.machine.measure_machine", lambda *_, **__: facts | MACHINE)


def run_benchmark(tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    file = tmp_path / "result.json"
    words = ["--threads", "1", "--steps", "2", "--json", str(file)]
    status = peers.main([*arguments, *words])
    return status, json.loads(file.read_text(encoding="utf-8"))["workloads"]


@pytest.mark.slow  # three processes that import everything
def test_sides_take_turns_and_one_that_fails_is_named(tmp_path, capsys):
    sides = ["rloo", "padded", "rloo:no_such_option=1"]
    status, workloads = run_benchmark(tmp_path, "--workload", "TINY", "--sides", *sides)
    *good, bad = workloads["TINY"]["results"]
    assert status == 1
    for result in good:
        assert len(result["steps"]) == 2
        for step in result["steps"]:
            assert len(step["lengths"]) == 8
            assert all(1 <= length <= 12 for length in step["lengths"])
            assert step["phases"]["sample"] > 0 < step["phases"]["update"]
            assert sum(step["phases"].values()) <= step["seconds"]
    assert bad["steps"] == [] and "no_such_option" in bad["error"]
    out = capsys.readouterr().out
    assert "| padded | **" in out and "no_such_option" in out


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


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_configurations_of_plans_are_ones_that_rloo_takes(case, tmp_path):
    config = parse_command_line(case.arguments(tmp_path, 1))
    assert (config.num_threads, config.learning_rate) == (1, 1e-12)
    assert batches_of(config, 1).completions_per_step > 8
