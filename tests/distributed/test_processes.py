"""Several processes end as one: the same completions, metrics and weights."""

import shutil
from pathlib import Path

import pytest

from support import environments
from support.launched import HARDEST, launch, require_equal, require_loaded_in_turn
from support.processes import BETWEEN, CASES, DIVIDED, ENDS, RESUMED, run

pytestmark = pytest.mark.slow

# Another rank needs the tokens: to score a group, to train it, in later steps and files.
FAR = (*HARDEST, "ranked in its group", "two passes", BETWEEN, *environments.FAR)
SOME = (*HARDEST, "LoRA", "over the batch")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The runs of one process (`alone`), and of several: PARALLEL-PROCESSES; and those that two
    made half of (`full`, `sharded`: what their checkpoints hold; `half`: one alone), ended
    elsewhere: KIND-PROCESSES. One start for each number of processes."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "alone", [*CASES])
    run(folder / "alone", [*RESUMED], max_steps=4)
    run(folder / "single", SOME, single=True)
    run(folder / "half", [*RESUMED], max_steps=2)
    shutil.copytree(folder / "half", folder / "half-2")
    divided = {"parallel": "fsdp2"}
    kinds = [(kind, divided | {"state_dict_type": kind}) for kind in ("full", "sharded")]
    launch(
        2,
        [
            (folder / "replicate-2", CASES, {}),
            (folder / "ends-2", ENDS, {}),
            (folder / "fsdp2-2", DIVIDED, divided),
            *[(folder / kind, RESUMED, {"max_steps": 2} | options) for kind, options in kinds],
            (folder / "half-2", RESUMED, {"max_steps": 4} | divided),
            (folder / "far-2", FAR, {}),
            (folder / "far-fsdp2-2", HARDEST, divided),
            (folder / "host-2", SOME, {"offload": ["params"]} | divided),
            (folder / "single-replicate-2", SOME, {"single": True}),
            (folder / "single-fsdp2-2", SOME, {"single": True} | divided),
        ],
    )
    for processes, (kind, options) in zip((3, 4), kinds, strict=True):
        there = folder / f"{kind}-{processes}"
        shutil.copytree(folder / kind, there)
        hardest = [
            (folder / f"{parallel}-{processes}", HARDEST, {"parallel": parallel})
            for parallel in ("replicate", "fsdp2")
        ]
        launch(processes, [*hardest, (there, RESUMED, {"max_steps": 4} | options)])
        shutil.copytree(folder / kind, folder / f"{kind}-1")
        run(folder / f"{kind}-1", [*RESUMED], max_steps=4)
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


def test_weights_may_wait_in_host_memory(made):
    require_equal(made / "alone", made / "host-2")


@pytest.mark.parametrize("parallel", ("replicate", "fsdp2"))
def test_in_float32_they_end_as_one_but_for_rounding(made, parallel):
    require_equal(made / "single", made / f"single-{parallel}-2", most=1e-5)


def test_an_engine_takes_divided_weights_one_after_the_other(made):
    require_loaded_in_turn(made / "fsdp2-2")


@pytest.mark.parametrize("where", ("full-1", "full-3", "sharded-1", "sharded-4", "half-2"))
def test_divided_weights_go_on_with_other_numbers_of_processes(made, where):
    require_equal(made / "alone", made / where)
