"""Several processes end as one: the same completions, metrics and weights.

Copies or shards of the weights (FSDP2) on all processes, groups of processes that each have all
shards (HSDP), shards of a layer's matrices (tensor parallelism), slices of the same rows (sequence
parallelism).
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support import environments
from support.launched import HARDEST, launch, require_equal, require_loaded_in_turn
from support.processes import BETWEEN, CASES, DIVERGES, DIVIDED, ENDS, EXACT_KL, RESUMED, run

pytestmark = pytest.mark.slow

Job = tuple[Path, Any, dict[str, Any]]

# Another rank needs the tokens: to score a group, to train it, in later steps and files.
FAR = (*HARDEST, "ranked in its group", "two passes", BETWEEN, *environments.FAR)
IN_FLOAT32 = (*HARDEST, "LoRA", "over the batch")
SHARDS = {"parallel": "fsdp2"}
# The checkpoints of shards: one file of whole weights, or a file of each process.
KINDS = {kind: {"state_dict_type": kind} for kind in ("full", "sharded")}

# Shards of a group, sums over groups: of adapters, with micro-batches that are recomputed.
IN_GROUPS = (*HARDEST, EXACT_KL, "LoRA", "small micro-batches")
GROUPS = SHARDS | {"dp_shard_size": 2}

OF_MATRICES = (
    *HARDEST,
    "optimal token, by parts",
    EXACT_KL,
    "KL in the reward",
    "small micro-batches",
)
WITHOUT_ADAPTER = [name for name in RESUMED if name != "adapter"]
TENSOR = {"tp_size": 2}

# One micro-batch and several, log-probs of a pass of their own, groups that are left out.
OF_SLICES = ("KL in the reward", "missing", "small micro-batches")
MORE_OF_SLICES = (
    *OF_SLICES,
    "KL in the loss",
    EXACT_KL,
    "several updates",
    "LoRA",
    "optimal token, by parts",
)
SEQUENCE = {"sp_size": 2}
# In float64 from end to end.
EXACT = {"packing": True, "exact": True}

SAVED_HALF, TO_THE_END = {"max_steps": 2}, {"max_steps": 4}


def in_one(folder: Path) -> None:
    """The runs of one process: `alone`; `exact` with norms in float64; `single` in float32; `wide`
    with four heads of keys; and the first half of those that others end, in `half-*`."""
    run(folder / "alone", [*CASES])
    run(folder / "alone", [*RESUMED], **TO_THE_END)
    run(folder / "exact", [*MORE_OF_SLICES], **EXACT)
    run(folder / "single", [*dict.fromkeys((*IN_FLOAT32, *OF_MATRICES[-2:]))], single=True)
    run(folder / "wide", [*OF_MATRICES], kind="qwen3_8")
    run(folder / "half", [*RESUMED], **SAVED_HALF)
    copy(folder, "half", "half-2", "half-groups-4")
    copy(folder, "half", "half-tensor-2", names=WITHOUT_ADAPTER)


def in_two(folder: Path) -> list[Job]:
    """The runs of two processes; `full`, `sharded` and `tensor` are the first halves of runs."""
    return [
        (folder / "replicate-2", CASES, {}),
        (folder / "ends-2", ENDS, {}),
        (folder / "fsdp2-2", DIVIDED, SHARDS),
        *[(folder / kind, RESUMED, SAVED_HALF | SHARDS | KINDS[kind]) for kind in KINDS],
        (folder / "half-2", RESUMED, TO_THE_END | SHARDS),
        (folder / "far-2", FAR, {}),
        (folder / "far-fsdp2-2", HARDEST, SHARDS),
        (folder / "host-2", IN_FLOAT32, {"offload": ["params"]} | SHARDS),
        (folder / "single-replicate-2", IN_FLOAT32, {"single": True}),
        (folder / "single-fsdp2-2", IN_FLOAT32, {"single": True} | SHARDS),
        (folder / "tensor-2", OF_MATRICES, TENSOR),
        (folder / "exact-tensor-2", ["small micro-batches"], TENSOR | EXACT),
        (folder / "single-tensor-2", OF_MATRICES[-2:], TENSOR | {"single": True}),
        (folder / "half-tensor-2", WITHOUT_ADAPTER, TENSOR | TO_THE_END),
        (folder / "tensor", WITHOUT_ADAPTER, TENSOR | SAVED_HALF),
        (folder / "sequence-2", OF_SLICES, EXACT | SEQUENCE),
    ]


def in_more(folder: Path, processes: int) -> list[Job]:
    """The runs of three or four processes that have no groups."""
    kind = {3: "full", 4: "sharded"}[processes]
    return [
        (folder / f"replicate-{processes}", HARDEST, {}),
        (folder / f"fsdp2-{processes}", HARDEST, SHARDS),
        (folder / f"{kind}-{processes}", RESUMED, TO_THE_END | SHARDS | KINDS[kind]),
    ]


def in_groups_of_four(folder: Path) -> list[Job]:
    """The runs of groups of four processes; `groups-full` and `groups-sharded` are first halves."""
    return [
        (folder / "groups-4", IN_GROUPS, GROUPS),
        (folder / "groups-host-4", IN_GROUPS[-2:], GROUPS | {"offload": ["params"]}),
        (folder / "groups-sliced-4", OF_SLICES[::2], GROUPS | EXACT | SEQUENCE),
        (folder / "half-groups-4", RESUMED, GROUPS | TO_THE_END),
        *[(folder / f"groups-{k}", RESUMED, SAVED_HALF | GROUPS | KINDS[k]) for k in KINDS],
        (folder / "groups-ends-4", [DIVERGES], GROUPS),
        (folder / "tensor-4-2", OF_MATRICES, TENSOR),
        (folder / "tensor-4-4", OF_MATRICES, {"tp_size": 4, "kind": "qwen3_8"}),
        (folder / "saved-tensor-4-2", WITHOUT_ADAPTER, TENSOR | TO_THE_END),
        (folder / "tensor-ends-4", [DIVERGES], TENSOR),
        (folder / "sequence-4-2", MORE_OF_SLICES, EXACT | SEQUENCE),
        (folder / "sequence-4-4", OF_SLICES[::2], EXACT | {"sp_size": 4}),
        (folder / "sequence-fsdp2-4", (*OF_SLICES[1:], "LoRA"), EXACT | SHARDS | SEQUENCE),
    ]


def copy(folder: Path, what: str, *places: str, names: Any = RESUMED) -> None:
    for place in places:
        for name in names:
            shutil.copytree(folder / what / name, folder / place / name)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """All runs: what ends in -NUMBER was ended by so many processes, of which a second number were
    a group. One start for each number of processes; a second one of two ends what four have
    saved."""
    folder = tmp_path_factory.mktemp("made")
    in_one(folder)
    launch(2, in_two(folder))
    copy(folder, "full", "full-1", "full-3")
    copy(folder, "sharded", "sharded-1", "sharded-4")
    copy(folder, "tensor", "saved-tensor-1", "saved-tensor-4-2", names=WITHOUT_ADAPTER)
    launch(3, in_more(folder, 3))
    launch(4, [*in_more(folder, 4), *in_groups_of_four(folder)])
    for kind in KINDS:
        copy(folder, f"groups-{kind}", f"groups-{kind}-1", f"groups-{kind}-2")
        run(folder / f"{kind}-1", [*RESUMED], **TO_THE_END)
        run(folder / f"groups-{kind}-1", [*RESUMED], **TO_THE_END)
    run(folder / "saved-tensor-1", WITHOUT_ADAPTER, **TO_THE_END)
    launch(2, [(folder / f"groups-{kind}-2", RESUMED, SHARDS | TO_THE_END) for kind in KINDS])
    return folder


@pytest.mark.parametrize("processes", (2, 3, 4))
@pytest.mark.parametrize("parallel", ("replicate", "fsdp2"))
def test_several_processes_end_as_one(made, parallel, processes):
    require_equal(made / "alone", made / f"{parallel}-{processes}")


@pytest.mark.parametrize("where", ("far-2", "far-fsdp2-2"))
def test_a_retired_limit_of_what_all_processes_have_changes_nothing(made, where):
    require_equal(made / "alone", made / where)


def test_what_goes_wrong_in_an_episode_ends_all_processes_with_the_reason(made):
    def ended(name: str, rank: int) -> str:
        return (made / "ends-2" / name / f"ended-{rank}").read_text()

    for rank in (0, 1):
        said = ended("two states", rank)
        assert "board is 'board 0' on rank 0 and 'board 1' on rank 1" in said
    assert ended("a function that fails", 1) == "ConnectionError: no rollout today"
    said = ended("a function that fails", 0)
    assert "rank 1 has failed in sample of step 1: ConnectionError: no rollout today" in said


@pytest.mark.parametrize("where", ("host-2", "groups-host-4"))
def test_weights_may_wait_in_host_memory(made, where):
    require_equal(made / "alone", made / where)


@pytest.mark.parametrize("parallel", ("replicate", "fsdp2", "tensor"))
def test_in_float32_they_end_as_one_but_for_rounding(made, parallel):
    require_equal(made / "single", made / f"single-{parallel}-2", most=1e-5)


def test_an_engine_takes_divided_weights_one_after_the_other(made):
    require_loaded_in_turn(made / "fsdp2-2")


@pytest.mark.parametrize("where", ("full-1", "full-3", "sharded-1", "sharded-4", "half-2"))
def test_divided_weights_go_on_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)


def test_groups_of_processes_end_as_one(made):
    require_equal(made / "alone", made / "groups-4")


def test_a_row_may_be_sliced_in_a_group(made):
    require_equal(made / "exact", made / "groups-sliced-4")


@pytest.mark.parametrize(
    "where",
    ("half-groups-4", "groups-full-1", "groups-full-2", "groups-sharded-1", "groups-sharded-2"),
)
def test_groups_go_on_from_and_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)


@pytest.mark.parametrize(("where", "other"), (("groups-ends-4", 1), ("tensor-ends-4", 0)))
def test_weights_that_processes_share_must_stay_equal(made, where, other):
    for rank in range(4):
        said = (made / where / DIVERGES / f"ended-{rank}").read_text()
        assert f"the weights of rank 3 are not those of rank {other}" in said


@pytest.mark.parametrize(
    ("alone", "where"),
    (
        ("alone", "tensor-2"),
        ("alone", "tensor-4-2"),
        ("wide", "tensor-4-4"),
        ("exact", "exact-tensor-2"),
    ),
)
def test_shards_of_matrices_end_as_one_process(made, alone, where):
    require_equal(made / alone, made / where)


@pytest.mark.parametrize("where", ("half-tensor-2", "saved-tensor-1", "saved-tensor-4-2"))
def test_shards_of_matrices_go_on_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)


def test_what_is_exported_to_engines_from_shards_of_matrices_is_whole(made):
    for where in ("tensor-2", "tensor-4-4"):
        folder = made / where / OF_MATRICES[-1]
        files = (load_file(path) for path in (folder / "sent").glob("*.safetensors"))
        sent = {name: tensor for file in files for name, tensor in file.items()}
        trained = load_file(folder / "weights.safetensors")
        assert all(sent[name].equal(p.to(sent[name].dtype)) for name, p in trained.items())


@pytest.mark.parametrize(
    "where", ("sequence-2", "sequence-4-4", "sequence-4-2", "sequence-fsdp2-4")
)
def test_slices_of_rows_end_as_one_process(made, where):
    require_equal(made / "exact", made / where)
