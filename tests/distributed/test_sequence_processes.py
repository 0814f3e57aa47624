"""Several processes that compute slices of the same rows end as one process does."""

from pathlib import Path

import pytest

from support.launched import launch, require_equal
from support.processes import run

pytestmark = pytest.mark.slow

# One micro-batch and several, log-probs of a pass of their own, groups that are left out.
SOME = ("KL in the reward", "missing", "small micro-batches")
MORE = (*SOME, "KL in the loss", "several updates", "LoRA")
# In float64 from end to end.
EXACT = {"packing": True, "exact": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`), and of several: PROCESSES-SIZE."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "alone", [*MORE], **EXACT)
    launch(2, [(folder / "2-2", SOME, EXACT | {"sp_size": 2})])
    divided = {"parallel": "fsdp2", "sp_size": 2}
    launch(
        4,
        [
            (folder / "4-2", MORE, EXACT | {"sp_size": 2}),
            (folder / "4-4", SOME[::2], EXACT | {"sp_size": 4}),
            (folder / "divided-4-2", (*SOME[1:], "LoRA"), EXACT | divided),
        ],
    )
    return folder


@pytest.mark.parametrize("where", ("2-2", "4-4", "4-2", "divided-4-2"))
def test_slices_of_rows_end_as_one_process(made, where):
    require_equal(made / "alone", made / where)
