"""DeepSpeed's ZeRO by its own engine: runs of several processes are those of one, in float32."""

import json
import shutil
from pathlib import Path

import pytest

from support.launched import HARDEST, launch, require_equal, require_loaded_in_turn
from support.processes import DIVIDED, EXACT_KL, RESUMED, run

STAGES = ("zero1", "zero2", "zero3")
IN_FLOAT32 = {"single": True}
# Of the file that a user has: what is "auto", and what DeepSpeed does early or in other portions.
FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "steps_per_print": 2000,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 5000,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 3000,
        "stage3_param_persistence_threshold": 200,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
# Of stage 2: all that DeepSpeed does in another order or in other portions.
FILE_2 = {
    "zero_optimization": {
        "stage": 2,
        "round_robin_gradients": True,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "allgather_partitions": False,
        "reduce_bucket_size": 3000,
        "allgather_bucket_size": 3000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
}
# As TRL publishes it, but for the number of processes and the precision.
ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

pytestmark = pytest.mark.peers


def known(stage: str) -> list[str]:
    """The cases that a stage does not refuse."""
    return [name for name in DIVIDED if (stage, name) != ("zero3", EXACT_KL)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """As in tests/distributed/test_processes.py: PARALLEL-PROCESSES; runs of which two made half
    under zero3, and one half that two ended; and those by a file, and by transformers' generate."""
    folder = tmp_path_factory.mktemp("made")
    file, second, yaml = (folder / name for name in ("zero.json", "second.json", "accelerate.yaml"))
    file.write_text(json.dumps(FILE), encoding="utf-8")
    second.write_text(json.dumps(FILE_2), encoding="utf-8")
    yaml.write_text(ACCELERATE, encoding="utf-8")
    run(folder / "alone", [*DIVIDED], **IN_FLOAT32)
    run(folder / "alone", [*RESUMED], max_steps=4, **IN_FLOAT32)
    run(folder / "half-2", [*RESUMED], max_steps=2, **IN_FLOAT32)
    stages = [(stage, {"parallel": stage} | IN_FLOAT32) for stage in STAGES]
    three = dict(stages)["zero3"]
    hf = three | {"rollout_engine": "hf"}
    alone = [
        (folder / f"{stage}-1", RESUMED, {"max_steps": 4, "parallel": stage} | IN_FLOAT32)
        for stage in STAGES[1:]
    ]
    launch(1, alone)
    launch(
        2,
        [
            *[(folder / f"{stage}-2", known(stage), options) for stage, options in stages],
            (folder / "file-2", HARDEST, {"deepspeed": str(file)} | IN_FLOAT32),
            (folder / "second-2", HARDEST, {"deepspeed": str(second)} | IN_FLOAT32),
            (folder / "hf-2", ["paper", "LoRA"], hf),
            (folder / "three", RESUMED, {"max_steps": 2} | three),
            (folder / "half-2", RESUMED, {"max_steps": 4, "parallel": "zero2"} | IN_FLOAT32),
        ],
    )
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", str(yaml)]
    launch(2, [(folder / "accelerate-2", RESUMED, {"max_steps": 4} | IN_FLOAT32)], accelerate)
    for name in ("three-1", "three-3", "one-3"):
        shutil.copytree(folder / "three", folder / name)
    run(folder / "three-1", [*RESUMED], max_steps=4, **IN_FLOAT32)
    launch(
        3,
        [
            *[(folder / f"{stage}-3", HARDEST, options) for stage, options in stages],
            (folder / "three-3", RESUMED, {"max_steps": 4} | three),
            (folder / "one-3", RESUMED, {"max_steps": 4, "parallel": "zero1"} | IN_FLOAT32),
        ],
    )
    launch(4, [(folder / f"{stage}-4", HARDEST, options) for stage, options in stages])
    return folder


@pytest.mark.parametrize("processes", (2, 3, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_several_processes_end_as_one(made, stage, processes):
    require_equal(made / "alone", made / f"{stage}-{processes}", most=1e-5)


@pytest.mark.parametrize("where", ("file-2", "second-2"))
def test_a_file_of_settings_changes_no_number(made, where):
    require_equal(made / "alone", made / where, most=1e-5)


def test_what_accelerate_was_told_is_done(made):
    require_equal(made / "alone", made / "accelerate-2", most=1e-5)
    assert "parallel: zero3" in (made / "accelerate-2/full/config.yaml").read_text()


def test_an_engine_that_runs_the_module_has_all_weights_while_it_samples(made):
    require_equal(made / "alone", made / "hf-2", most=1e-5)


def test_an_engine_takes_divided_weights_one_after_the_other(made):
    require_loaded_in_turn(made / "zero3-2")


def test_one_process_needs_no_launcher(made):
    require_equal(made / "alone", made / "zero2-1", most=1e-5)
    require_equal(made / "alone", made / "zero3-1", most=1e-5)


@pytest.mark.parametrize("where", ("three-1", "three-3", "one-3", "half-2"))
def test_runs_go_on_with_other_stages_and_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where, most=1e-5)
