"""Runs of a float64 policy that one process and several must end alike. As a program of each rank
it makes those of a list in JSON: [[folder, [case, ...], {option: value, ...}], ...]."""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback

from rloo import RLOOConfig, RLOOTrainer
from rloo.distributed.sharded_tensor import full_tensor, shape_of, to_local
from rloo.engines.vllm.from_options import exported
from rloo.model.memory_estimate import phase_peaks
from rloo.trainer.build import make_engine
from support import environments
from support.models import make_model
from support.text import WORDS, make_tokenizer

ROWS = Dataset.from_dict(
    {"prompt": [" ".join(WORDS[i : i + 3 + i % 4]) for i in range(12)], "number": [*range(12)]}
)


def mixed(completion_ids, number, log_metric, **_):
    """Rewards that differ in length and word."""
    log_metric("mean over a call", sum(map(sum, completion_ids)) / len(completion_ids))
    for ids in completion_ids:
        if ids[0] % 4:
            log_metric("mean over some", ids[0])
    pairs = zip(completion_ids, number, strict=True)
    return [len(ids) + 0.25 * (ids[0] % 5) - 0.1 * row for ids, row in pairs]


def ranked(prompts, completion_ids, **_):
    """The rank of each completion in its group, which must be whole."""
    found = []
    for _, rows in groupby(zip(prompts, completion_ids, strict=True), key=lambda row: row[0]):
        group = [tuple(ids) for _, ids in rows]
        assert len(group) in (1, 2, 4)  # greedy, in an evaluation, in training
        found += [float(sorted(group).index(ids)) for ids in group]
    return found


def flat_for_some(completion_ids, number, **_):
    """No signal in the groups of even rows."""
    return [
        0.0 if row % 2 == 0 else float(len(ids))
        for ids, row in zip(completion_ids, number, strict=True)
    ]


def missing(completion_ids, number, **_):
    """No reward for some completions, and for all of some groups."""
    pairs = zip(completion_ids, number, strict=True)
    return [None if row % 3 == 0 or ids[0] % 4 == 0 else float(len(ids)) for ids, row in pairs]


def odd_rows_pay(completion_ids, number, log_metric, **_):
    """By the first word; no reward for one word. The other rows have equal rewards."""
    log_metric("length of a call", sum(map(len, completion_ids)) / len(completion_ids))
    pairs = zip(completion_ids, number, strict=True)
    return [None if ids[0] % 9 == 0 else float(row % 2 * (ids[0] % 5)) for ids, row in pairs]


def failing(completion_ids, number, log_metric, **_):
    """As `mixed`, but for a call of the second process."""
    _calls.append(1)
    if os.environ.get("RANK") == "1" and len(_calls) == 3:
        raise ValueError("no reward today")
    return mixed(completion_ids, number, log_metric)


_calls: list[int] = []


class StopsTheMainOne(TrainerCallback):
    """Asks to stop after the first evaluation, in the main process alone."""

    def on_evaluate(self, args, state, control, **_):
        control.should_training_stop = state.is_world_process_zero


class FailsBetween(TrainerCallback):
    """An error of the second process between two steps of a rollout, once."""

    def on_step_begin(self, args, state, control, **_):
        if os.environ.get("RANK") == "1" and state.global_step == 1 and not _failed:
            _failed.append(1)
            raise ValueError("no step today")


_failed: list[int] = []


class RunsOutOfMemory(TrainerCallback):
    """The second process runs out of memory in the backward of its second step, once."""

    def on_step_begin(self, args, state, control, model, **_):
        if os.environ.get("RANK") == "1" and state.global_step == 1:

            def fail(_):
                hook.remove()
                raise torch.OutOfMemoryError("CUDA out of memory")

            hook = model.model.layers[0].mlp.down_proj.weight.register_hook(fail)


class ChangesAShard(TrainerCallback):
    """The last process changes its shard of a weight after a step."""

    def on_step_end(self, args, state, control, model, **_):
        if os.environ.get("RANK") == "3":
            to_local(model.model.norm.weight).add_(1e-3)


TIED = "tied embeddings"
EXACT_KL = "exact KL"
RUNS_OUT = "one process runs out of memory, and the step is repeated"
STOPPED = "stopped by a callback of the main process"
FAILS = "fails in one process, and is trained again"
BETWEEN = "fails in one process between the steps of a rollout, and is trained again"
DIVERGES = "one process has other weights"
# After its first step, in the middle of what is logged as one.
GOES_ON = "goes on"
# By the memory that its engine takes to load what is divided.
MEASURED = "paper"
# Of tasks and levels that reasoning-gym does not have: the rows are given.
DRAWN = "drawn by a curriculum"
WEIGHTED, PROBED = "drawn by variance", "drawn by a probe"
SIZED = "numbers of completions by variance"
PILOT = "numbers of completions by a pilot"
# Packed attention is torch's flash attention, whose backward has float32's precision.
PACKED = "packed"
OPTIMAL_TOKEN = {"estimator": "optimal_token", "importance_sampling_level": "token"}
CASES = {
    "paper": (mixed, {}),
    "ranked in its group": (ranked, {}),
    "KL in the reward": (mixed, {"beta": 0.05}),
    "KL in the loss": (mixed, {"beta": 0.05, "kl_placement": "loss", "kl_estimator": "k3"}),
    EXACT_KL: (mixed, {"beta": 0.05, "kl_estimator": "exact", "num_iterations": 2}),
    "one group over all": (mixed, {"num_prompts": 1, "num_generations": 3}),
    "no signal on one": (flat_for_some, {"num_prompts": 2, "num_generations": 2}),
    "missing": (missing, {"beta": 0.05}),
    "two passes": (mixed, {"beta": 0.05, "num_iterations": 2}),
    "shrinkage": (mixed, {"estimator": "shrinkage"}),
    "length-weighted": (mixed, {"estimator": "length_weighted", "beta": 0.05}),
    "optimal token": (mixed, OPTIMAL_TOKEN | {"use_peft": True}),
    "optimal token, two passes": (missing, OPTIMAL_TOKEN | {"beta": 0.05, "num_iterations": 2}),
    "optimal token, by parts": (mixed, OPTIMAL_TOKEN | {"max_tokens_per_micro_batch": 40}),
    "regression": (missing, {"estimator": "regression", "beta": 0.05, "num_iterations": 2}),
    "regression, by parts": (mixed, {"estimator": "regression", "max_tokens_per_micro_batch": 40}),
    "several updates": (mixed, {"beta": 0.05, "steps_per_generation": 3, "num_prompts": 1}),
    "dynamic sampling": (flat_for_some, {"dynamic_sample": True, "num_generations": 2}),
    "over the batch": (mixed, {"normalize_rewards": "batch"}),
    "by token": (mixed, {"importance_sampling_level": "token", "num_iterations": 2}),
    "mean over tokens": (mixed, {"loss_aggregation": "token_mean"}),
    "LoRA": (mixed, {"use_peft": True, "beta": 0.05}),
    "adaptive KL": (mixed, {"beta": 0.05, "kl_kwargs": {"target": 0.1, "horizon": 20}}),
    "small micro-batches": (
        mixed,
        {"max_tokens_per_micro_batch": 40, "gradient_checkpointing": True},
    ),
    STOPPED: (mixed, {"eval_steps": 1, "num_iterations": 2}),
    DRAWN: (
        mixed,
        {
            "dataset": "gym:a,b:2",
            "dataset_kwargs": {"curriculum": True},
            "eval_kwargs": {"pass_threshold": 5.0},
        },
    ),
    WEIGHTED: (
        flat_for_some,
        {
            "beta": 0.05,
            "kl_placement": "loss",
            "kl_estimator": "k3",
            "prompt_sampling": "variance",
            "prompt_sampling_kwargs": {"column": "number"},
        },
    ),
    SIZED: (
        flat_for_some,
        {
            "beta": 0.05,
            "prompt_sampling": "variance",
            "prompt_sampling_kwargs": {"column": "number", "max_generations": 7, "floor": 1.0},
            "steps_per_generation": 2,
            "max_steps": 6,
        },
    ),
    PILOT: (
        odd_rows_pay,
        {
            "beta": 0.05,
            "prompt_sampling": "variance",
            "prompt_sampling_kwargs": {"max_generations": 7, "floor": 1.0, "pilot": 2},
            "num_generations": 5,
            "num_prompts": 4,
            "max_steps": 5,
        },
    ),
    PROBED: (
        mixed,
        {
            "prompt_sampling": "variance",
            "prompt_sampling_kwargs": {"probe": "policy"},
            "num_prompts": 2,
            "max_steps": 5,
        },
    ),
    PACKED: (mixed, {"packing": True}),
    "TRL": (missing, {"preset": "trl"}),
    TIED: (mixed, {"beta": 0.05}),
    RUNS_OUT: (mixed, {"beta": 0.05}),
    FAILS: (failing, {"save_strategy": "steps", "save_steps": 1}),
    BETWEEN: (mixed, {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}),
    GOES_ON: (mixed, {"logging_steps": 3, "save_strategy": "steps", "save_steps": 1}),
    **{name: (reward, options) for name, (reward, options, _) in environments.CASES.items()},
}
# Which rows are drawn, what they are worth and how a loss adds them up: weights have no part in it.
OF_ROWS = (
    "ranked in its group", "shrinkage", "length-weighted", "KL in the loss",
    "no signal on one", "dynamic sampling",
    "over the batch", "by token", "mean over tokens", "adaptive KL", DRAWN, WEIGHTED, PROBED,
    SIZED, PILOT,
    *environments.CASES,
    RUNS_OUT,  # where weights are divided, the others wait in the backward
)  # fmt: skip
# Whose weights may be divided.
DIVIDED = {name: case for name, case in CASES.items() if name not in OF_ROWS}
ENDS = {name: (reward, options) for name, (reward, options, _) in environments.ENDS.items()}
# In two groups of two processes.
ENDS_IN_GROUPS = {DIVERGES: (mixed, {})}


# Saved and taken up again, perhaps by another number of processes.
RESUMED = {
    "full": (mixed, {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "adapter": (mixed, {"beta": 0.05, "use_peft": True}),
    "among steps": (mixed, {"beta": 0.05, "num_iterations": 2, "num_prompts": 1}),
}
HALF = {
    "optim": "adamw_torch", "adam_epsilon": 0.1, "save_strategy": "steps", "save_steps": 2,
    "lr_scheduler_type": "constant", "eval_strategy": "no",
}  # fmt: skip


def make_exact(model: torch.nn.Module) -> None:
    """Let the norms compute in float64. transformers' norms round to float32, in the backward too:
    the gradient of a prompt then depends on which of its completions are in the same row."""
    for parent in [*model.modules()]:
        for name, norm in parent.named_children():
            if hasattr(norm, "variance_epsilon"):
                same = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon).double()
                same.load_state_dict(norm.state_dict())
                setattr(parent, name, same)


def make(
    folder: Path, name: str, *, kind: str = "qwen3", single: bool = False, exact: bool = False,
    **changed: Any,
) -> RLOOTrainer:  # fmt: skip
    cases = CASES | ENDS | ENDS_IN_GROUPS | {n: (r, HALF | o) for n, (r, o) in RESUMED.items()}
    reward, options = cases[name]
    args = RLOOConfig(
        str(folder / name),
        **{
            "num_prompts": 3, "num_generations": 4, "max_completion_length": 8, "max_steps": 3,
            "bf16": False, "gradient_checkpointing": False, "seed": 7,
            "num_threads": 1, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
            "eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2, "beta": 0.0,
            # Not divided by itself where it is 0 but for rounding, as with Adam.
            "optim": "sgd", "learning_rate": 0.1, "packing": False,
        } | options | changed,
    )  # fmt: skip
    rows, held_out = ROWS, ROWS.select(range(3))
    if name == DRAWN:
        rows = rows.add_column("task", ["a", "b"] * 6).add_column("level", [0, 0, 1, 1] * 3)
    model, tokenizer, given = make_model(kind), make_tokenizer(), {}
    if name in environments.CASES or name in environments.ENDS:
        given = {**environments.CASES, **environments.ENDS}[name][2]
        if (own := environments.parts(name)) is not None:
            model, tokenizer, rows = own
            held_out = rows.select(range(3))
    if name == TIED:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    if not single:
        model.double()
    if exact:
        make_exact(model)
    callbacks: list = {
        STOPPED: [StopsTheMainOne], BETWEEN: [FailsBetween], RUNS_OUT: [RunsOutOfMemory],
        DIVERGES: [ChangesAShard],
    }.get(name, [])  # fmt: skip
    return RLOOTrainer(
        model, reward, args, rows, held_out, processing_class=tokenizer, callbacks=callbacks,
        **given,
    )  # fmt: skip


def measure_writing(trainer: RLOOTrainer, folder: Path) -> None:
    """Note the memory that writing weights for a server takes, and that of the largest layer."""
    (folder / "written").mkdir(exist_ok=True)
    place = folder / "written" if trainer.world.is_main else None
    source = exported(trainer.policy)
    # The least of many: on a loaded machine gloo's thread often releases a layer late.
    peak = min(
        phase_peaks(trainer.world.device, lambda _: source.write(place))[0] for _ in range(24)
    )
    layers: dict[str, int] = {}
    for name, p in trainer.policy.model.named_parameters():
        layer = name.rpartition(".layers.")[2].split(".")[0] if ".layers." in name else name
        layers[layer] = layers.get(layer, 0) + shape_of(p).numel() * p.itemsize
    (folder / f"writing-{trainer.world.rank}.json").write_text(
        json.dumps([peak, max(layers.values())])
    )


def run(folder: Path, names: list[str], **options: Any) -> None:
    for name in names:
        if name == GOES_ON:
            make(folder, name, **options, max_steps=1).train()
        trainer = make(folder, name, **options)
        try:
            output = trainer.train("auto")
        except (ValueError, ConnectionError, FloatingPointError) as error:
            if name in ENDS | ENDS_IN_GROUPS:
                said = f"{type(error).__name__}: {error}"
                (folder / name / f"ended-{trainer.world.rank}").write_text(said)
                continue
            assert name in (FAILS, BETWEEN)
            output = trainer.train("auto")
        if "vllm_server_base_url" in options:
            measure_writing(trainer, folder / name)
        elif options.get("parallel") in ("fsdp2", "zero3") and name == MEASURED:
            engine = make_engine(trainer.policy, trainer.args)
            from rloo.addons.planner.plan import lasting_bytes

            peak = lasting_bytes(trainer.policy, engine)["loading"]
            sizes = [shape_of(p).numel() * p.itemsize for p in trainer.model.parameters()]
            (folder / name / "loading.json").write_text(json.dumps([peak, max(sizes)]))
        if "tp_size" in options:
            sent = folder / name / "sent"
            sent.mkdir(exist_ok=True)
            exported(trainer.policy).write(sent if trainer.world.is_main else None)
        known = trainer.state.log_history, output.training_loss, output.metrics
        (folder / name / f"rank-{trainer.world.rank}.json").write_text(json.dumps(known))
        weights = {n: full_tensor(p).clone() for n, p in trainer.model.named_parameters()}
        if trainer.world.is_main:
            save_file(weights, folder / name / "weights.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for to, names, options in json.loads(sys.argv[1]):
        run(Path(to), names, **options)
