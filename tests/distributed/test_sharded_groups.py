"""Groups of processes that each have all shards of the weights (HSDP) end as one process does."""

import shutil
from pathlib import Path

import pytest

from support.launched import HARDEST, launch, require_equal
from support.processes import DIVERGES, RESUMED, run

pytestmark = pytest.mark.slow

# Shards of a group, sums over groups: of adapters, with micro-batches that are recomputed.
SOME = (*HARDEST, "LoRA", "small micro-batches")
SLICED = ("KL in the reward", "small micro-batches")
GROUPS = {"parallel": "fsdp2", "dp_shard_size": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`, and `exact` with norms in float64), and of two groups of
    two processes: `groups`, `host`, `sliced`; and those that one process made half of (`half`), and
    that the groups made half of, ended elsewhere: KIND-PROCESSES."""
    folder = tmp_path_factory.mktemp("made")
    exact = {"packing": True, "exact": True}
    run(folder / "alone", [*SOME])
    run(folder / "alone", [*RESUMED], max_steps=4)
    run(folder / "exact", [*SLICED], **exact)
    run(folder / "half", [*RESUMED], max_steps=2)
    kinds = [(kind, GROUPS | {"state_dict_type": kind}) for kind in ("full", "sharded")]
    launch(
        4,
        [
            (folder / "groups", SOME, GROUPS),
            (folder / "host", SOME[-2:], GROUPS | {"offload": ["params"]}),
            (folder / "sliced", SLICED, GROUPS | exact | {"sp_size": 2}),
            (folder / "half", RESUMED, GROUPS | {"max_steps": 4}),
            *[(folder / kind, RESUMED, {"max_steps": 2} | options) for kind, options in kinds],
            (folder / "diverged", [DIVERGES], GROUPS),
        ],
    )
    for kind, _ in kinds:
        shutil.copytree(folder / kind, folder / f"{kind}-1")
        run(folder / f"{kind}-1", [*RESUMED], max_steps=4)
    divided = {"parallel": "fsdp2", "max_steps": 4}
    launch(2, [(folder / kind, RESUMED, divided) for kind, _ in kinds])
    return folder


@pytest.mark.parametrize("where", ("groups", "host"))
def test_groups_of_processes_end_as_one(made, where):
    require_equal(made / "alone", made / where)


def test_a_row_may_be_sliced_in_a_group(made):
    require_equal(made / "exact", made / "sliced")


@pytest.mark.parametrize("where", ("half", "full", "sharded", "full-1", "sharded-1"))
def test_they_go_on_from_and_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)


def test_replicas_that_differ_end_the_run(made):
    for rank in range(4):
        said = (made / "diverged" / DIVERGES / f"ended-{rank}").read_text()
        assert "the weights of rank 3 are not those of rank 1" in said
