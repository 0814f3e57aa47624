"""Several processes that compute slices of the same rows end as one process does."""

from pathlib import Path

import pytest

from support.launched import launch, require_equal
from support.processes import run

pytestmark = pytest.mark.slow

# Several micro-batches and one, the log-probs of a pass of their own, and groups that are left out.
SOME = ("KL in the reward", "KL in the loss", "missing", "several updates", "LoRA")
AGAIN = "small micro-batches"
# Attention in windows is exact in float64. torch's flash attention is not, where groups of
# processes have other micro-batches than one process.
WINDOW = {"packing": True, "window": 12}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`), and of several: PROCESSES-SIZE."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "alone", [*SOME, AGAIN], **WINDOW)
    run(folder / "alone-flash", ["two passes", AGAIN], packing=True)
    launch(
        2,
        [
            (folder / "2-2", [*SOME, AGAIN], WINDOW | {"sp_size": 2}),
            (folder / "flash-2-2", ["two passes", AGAIN], {"packing": True, "sp_size": 2}),
        ],
    )
    divided = {"parallel": "fsdp2", "sp_size": 2}
    launch(
        4,
        [
            (folder / "4-2", [*SOME, AGAIN], WINDOW | {"sp_size": 2}),
            (folder / "4-4", [SOME[0], AGAIN], WINDOW | {"sp_size": 4}),
            (folder / "divided-4-2", ["LoRA", SOME[2], AGAIN], WINDOW | divided),
        ],
    )
    return folder


@pytest.mark.parametrize("where", ("2-2", "4-2", "4-4", "divided-4-2"))
def test_slices_of_rows_end_as_one_process(made, where):
    require_equal(made / "alone", made / where)


def test_flash_attention_of_the_same_rows_is_the_same(made):
    require_equal(made / "alone-flash", made / "flash-2-2")
