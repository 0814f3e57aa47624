"""Processes that have shards of a layer's matrices (tensor parallelism) end as one process does."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.launched import HARDEST, launch, require_equal
from support.processes import DIVERGES, RESUMED, run

pytestmark = pytest.mark.slow

SOME = (*HARDEST, "KL in the reward", "small micro-batches")
SAVED = [name for name in RESUMED if name != "adapter"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`; `wide` with four heads of keys; `single` in float32), and
    of several: PROCESSES-SIZE; and those that one process made half of (`half`), and that two made
    half of (`saved`), ended elsewhere."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "alone", [*SOME])
    run(folder / "alone", SAVED, max_steps=4)
    run(folder / "wide", [*SOME], kind="qwen3_8")
    run(folder / "single", SOME[-2:], single=True)
    run(folder / "half", SAVED, max_steps=2)
    two, packed = {"tp_size": 2}, {"packing": True}
    run(folder / "packed", ["small micro-batches"], exact=True, **packed)
    launch(
        2,
        [
            (folder / "2-2", SOME, two),
            (folder / "half", SAVED, two | {"max_steps": 4}),
            (folder / "saved", SAVED, two | {"max_steps": 2}),
            (folder / "packed-2", ["small micro-batches"], two | packed | {"exact": True}),
            (folder / "single-2", SOME[-2:], two | {"single": True}),
        ],
    )
    shutil.copytree(folder / "saved", folder / "saved-1")
    run(folder / "saved-1", SAVED, max_steps=4)
    launch(
        4,
        [
            (folder / "4-2", SOME, two),
            (folder / "4-4", SOME, {"tp_size": 4, "kind": "qwen3_8"}),
            (folder / "saved", SAVED, two | {"max_steps": 4}),
            (folder / "diverged", [DIVERGES], two),
        ],
    )
    return folder


@pytest.mark.parametrize(
    ("alone", "where"),
    (("alone", "2-2"), ("alone", "4-2"), ("wide", "4-4"), ("packed", "packed-2")),
)
def test_shards_of_matrices_end_as_one_process(made, alone, where):
    require_equal(made / alone, made / where)


@pytest.mark.parametrize("where", ("half", "saved", "saved-1"))
def test_they_go_on_from_and_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)


def test_in_float32_they_end_as_one_but_for_rounding(made):
    require_equal(made / "single", made / "single-2", most=1e-5)


def test_weights_that_all_processes_have_must_stay_equal(made):
    for rank in range(4):
        said = (made / "diverged" / DIVERGES / f"ended-{rank}").read_text()
        assert "the weights of rank 3 are not those of rank 0" in said


def test_what_is_exported_to_engines_is_whole(made):
    for where in ("2-2", "4-4"):
        folder = made / where / SOME[-1]
        files = (load_file(path) for path in (folder / "sent").glob("*.safetensors"))
        sent = {name: tensor for file in files for name, tensor in file.items()}
        trained = load_file(folder / "weights.safetensors")
        assert all(sent[name].equal(p.to(sent[name].dtype)) for name, p in trained.items())
