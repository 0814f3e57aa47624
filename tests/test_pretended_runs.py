"""Whole runs on a pretended GPU: they end, nothing is refused, and the host waits as rarely as is
promised."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rloo.engines.native.static_decoding import LEAST_ROWS
from support.gpu import pretended
from support.gpu.phases import counted
from support.linked_vllm import LinkedServers
from support.markers import slow_but
from support.models import make_model, make_wide
from support.training import ROWS, make_config, make_trainer, metrics_of, weights

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a real one")

ROOT = Path(__file__).parent.parent
# The most that a step of a policy may wait for its device, beside its rollout.
WAITS_A_STEP = 8
# transformers asks whether a mask hides anything, twice in the forward of a padded micro-batch.
ITS_MASKS = "model/forward.py"


# Bytes beside a sleeping server: for the optimizer's state and some completions, not for all.
LEFT = 900_000


class Refused(Exception):
    """What is asked for does not go together, and is refused before anything is sampled."""


def run(config, before=lambda trainer, device: None, version=None, **options):
    """The trainer of a whole run, and the device that it ran on."""
    with pretended(version=version) as device, counted(device):
        try:
            trainer = make_trainer(config, **options)
        except ValueError as error:
            raise Refused from error
        device.forget_counts()
        before(trainer, device)
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    return trainer, device


def check(config, device, steps=None):
    """Its metrics, if all is as promised."""
    rows = metrics_of(config)
    assert len(rows) == (steps or config.max_steps)
    assert device.refused == []
    assert device.mixed == 0
    waits = [place for phase, _, place in device.waits if phase in ("token", "micro_batch")]
    assert all(ITS_MASKS in place for place in waits) if config.packing is False else not waits
    assert max(device.steps) <= WAITS_A_STEP
    return rows


RUNS = {
    "whole": {"bf16": True},
    "checkpointed": {"bf16": True, "gradient_checkpointing": True},
    "padded": {"bf16": True, "packing": False, "beta": 0.0},
    "float32": {"gradient_checkpointing": True},
    "tf32": {"tf32": True},
    "fp16": {"fp16": True},
    "lora": {"bf16": True, "use_peft": True, "gradient_checkpointing": True},
    "qlora": {"bf16": True, "use_peft": True, "load_in_4bit": True},
    "offloaded": {
        "bf16": True, "gradient_checkpointing": True, "offload": ["optimizer", "reference"],
        "activation_offloading": True,
    },
    "filtered": {"bf16": True, "repetition_penalty": 1.2, "top_k": 20, "top_p": 0.9, "beta": 0.0},
    "hf": {"bf16": True, "rollout_engine": "hf"},
    "deterministic": {"bf16": True, "full_determinism": True},
    "regression": {"bf16": True, "estimator": "regression", "max_steps": 3},
    "fsdp2": {"bf16": True, "parallel": "fsdp2", "gradient_checkpointing": True},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["whole", "checkpointed", "fp16", "fsdp2"], RUNS))
def test_a_run_ends_and_no_token_or_micro_batch_waits(tmp_path, name):
    config = make_config(tmp_path, use_cpu=False, **{"max_steps": 2, **RUNS[name]})
    model = make_model("qwen3")
    if name == "qlora":  # what is quantised is loaded so
        make_wide().save_pretrained(tmp_path / "whole")
        model = str(tmp_path / "whole")
    try:
        trainer, device = run(config, model=model)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.fp32_precision = "none"
    rows = check(config, device)
    if name != "fp16":  # its scale is found in the first steps
        assert all(row["mismatch/max"] < 0.02 for row in rows)
    assert trainer.policy.packed == (name != "padded")
    assert not any("slower" in note for note in trainer.policy.notes if "tf32" in name)
    if name in ("whole", "checkpointed", "lora", "offloaded"):
        assert device.replays > 0, "nothing was repeated"


@pytest.mark.slow
def test_rows_that_end_leave_graphs_of_smaller_sizes(tmp_path):
    """A wave of 4 * LEAST_ROWS rows shrinks twice, and a prompt goes on that has one row left."""
    size = 4 * LEAST_ROWS // len(ROWS)
    config = make_config(
        tmp_path, use_cpu=False, bf16=True, max_steps=2, num_prompts=len(ROWS),
        num_generations=size + 1, max_completion_length=40,
    )  # fmt: skip
    model = make_model("qwen3")
    model.generation_config.eos_token_id = list(range(2, 12))
    _, device = run(config, version=(2, 11), model=model)
    check(config, device)
    assert {queries for _, queries, *_ in device.kernels.calls} >= {LEAST_ROWS, 2 * LEAST_ROWS}
    # Two graphs of each size.
    assert device.captures <= 2 * 4 * config.max_steps


@pytest.mark.slow
def test_a_run_that_is_saved_goes_on_as_if_it_had_not_stopped(tmp_path):
    options = {
        "use_cpu": False, "bf16": True, "gradient_checkpointing": True, "eval_strategy": "steps",
        "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    whole = make_config(tmp_path / "whole", **options)
    expected, device = run(whole, eval_dataset=ROWS)
    check(whole, device)
    parts = make_config(tmp_path / "parts", **options)
    run(replace(parts, max_steps=2), eval_dataset=ROWS)
    resumed = replace(parts, resume_from_checkpoint=True)
    found, device = run(resumed, eval_dataset=ROWS)
    check(parts, device)
    rows = [[row["reward"] for row in metrics_of(config)] for config in (whole, parts)]
    assert rows[0] == rows[1]
    after, before = weights(found), weights(expected)
    assert all((after[name] == before[name]).all() for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["update", "sample"])
def test_where_memory_does_not_suffice_once_the_run_goes_on_with_less(tmp_path, phase):
    config = make_config(tmp_path, use_cpu=False, bf16=True, max_steps=2, beta=0.0)

    def exhaust(trainer, device):
        counts = []

        def fails(size):
            if phase in device.phases:
                counts.append(size)
            return phase in device.phases and len(counts) == 40

        device.fails = fails

    _, device = run(config, exhaust)
    check(config, device)
    notes = json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert sum("memory did not suffice" in note for note in notes) == 1


@pytest.mark.parametrize("held", [False, True])
def test_a_server_on_this_gpu_sleeps_while_memory_is_tried_and_the_model_is_trained(tmp_path, held):
    """A sleeping server that holds almost all memory leaves less to a micro-batch. When it wakes,
    the cache of the trainer is empty."""
    linked, emptied = LinkedServers(), []
    config = make_config(
        tmp_path, use_cpu=False, use_vllm=True, max_steps=2, gradient_checkpointing=True,
        max_prompt_length=20, num_generations=8,
        engine_kwargs={"executable": linked.executable},
    )  # fmt: skip
    try:
        with pretended() as device, counted(device):
            total = device.total

            def seen(call):
                if call.startswith("/sleep") and held:
                    device.total = device.reserved + LEFT
                if call.startswith("/wake_up"):
                    emptied.append(device.reserved == device.allocated)
                    device.total = total

            linked.seen = seen
            trainer = make_trainer(config)
            trainer.train()
    finally:
        linked.close()
    check(config, device)
    assert len(emptied) == 2 * config.max_steps and all(emptied)
    notes = json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert any("from step 1 on a micro-batch has at most" in note for note in notes) == held


@pytest.mark.slow
def test_the_command_ends_with_what_was_counted(tmp_path):
    command = [sys.executable, "tools/pretend_gpu.py", "--torch", "2.11", "--", "train"]
    options = ["--max_steps", "1", "--num_prompts", "2", "--num_generations", "2", "--bf16", "true"]
    options += ["--max_completion_length", "12", "--eval_strategy", "no"]
    done = subprocess.run(
        [*command, *options, "--output_dir", str(tmp_path / "run")],
        capture_output=True, text=True, cwd=ROOT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["status"], found["steps"]) == (0, 1)
    assert found["refused"] == []
    assert found["mixed_device"] == found["host_waits"]["token"] == 0
    assert found["host_waits"]["micro_batch"] == 0
    assert found["host_waits"]["step"] <= WAITS_A_STEP
    assert found["launches"]["token"] > found["replays"] > 0


DRAWN = {
    "precision": st.sampled_from(["bf16", "fp16", "tf32", "float32"]),
    "gradient_checkpointing": st.booleans(),
    "packing": st.sampled_from([None, None, False]),
    "use_peft": st.booleans(),
    "beta": st.sampled_from([0.0, 0.05]),
    "kl_placement": st.sampled_from(["reward", "loss"]),
    "offload": st.lists(st.sampled_from(["optimizer", "reference"]), unique=True),
    "activation_offloading": st.booleans(),
    "rollout_engine": st.sampled_from(["auto", "auto", "hf"]),
    "parallel": st.sampled_from(["replicate", "replicate", "fsdp2"]),
    "num_iterations": st.sampled_from([1, 2]),
    "importance_sampling_level": st.sampled_from(["token", "sequence"]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "top_k": st.sampled_from([0, 20]),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "temperature": st.sampled_from([1.0, 0.7]),
    "mask_truncated_completions": st.booleans(),
    "max_tokens_per_micro_batch": st.sampled_from([None, 40]),
    "full_determinism": st.booleans(),
}


@pytest.mark.slow
@given(chosen=st.fixed_dictionaries(DRAWN))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_any_options_together_run(chosen, tmp_path_factory):
    precision = {chosen["precision"]: True} if chosen["precision"] != "float32" else {}
    others = {name: value for name, value in chosen.items() if name != "precision"}
    folder = tmp_path_factory.mktemp("drawn")
    try:
        config = make_config(folder, use_cpu=False, max_steps=1, **precision, **others)
    except ValueError:
        assume(False)
    try:
        _, device = run(config)
    except Refused:
        assume(False)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.fp32_precision = "none"
    check(config, device)
