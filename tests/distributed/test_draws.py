"""`prompt_sampling variance` on 1, 2, 3 and 4 ranks, and resumed on as many or others: the same
prompts, numbers of completions and weights, to the last bit, in float32 with AdamW.

With a probe this needs equal hidden states. Where weights change, those of other numbers of ranks
differ by rounding, and the weights of draws do so, too.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.draws import KINDS, PROBED, PROBED_STILL, SAVED, launch

pytestmark = pytest.mark.slow

# The folder of a resumed run names the number of ranks that goes on, and that which saved.
OTHERS = {f"{now}-from-{before}": (now, before) for before, now in pairwise((4, 1, 2, 3))}
SAME = {f"{size}-from-{size}": (size, size) for size in (2, 3)}
EXACT = [name for name in KINDS if name != PROBED]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """All runs of all kinds: the number of ranks is the name of the folder."""
    folder = tmp_path_factory.mktemp("draws")
    resumed = {**OTHERS, **SAME}
    launch(
        [
            *[(size, folder / str(size), None) for size in (1, 2, 3, 4)],
            *[(now, folder / to, folder / str(before)) for to, (now, before) in resumed.items()],
        ]
    )
    return folder


def noted(folder: Path, name: str) -> list[dict[str, Any]]:
    """What all ranks have noted alike, by rollout."""
    first, *others = [json.loads(path.read_text()) for path in (folder / name).glob("rank-*.json")]
    assert all(other == first for other in others)
    return first


def of_all(rollouts: list[dict[str, Any]], what: str) -> list[Any]:
    return [rollout[what] for rollout in rollouts]


def same_but_for_rounding(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    for what in ("prompts", "sizes", "rewards"):
        assert of_all(ours, what) == of_all(theirs, what)
    pairs = zip(of_all(ours, "weights"), of_all(theirs, "weights"), strict=True)
    return all(one == pytest.approx(other, rel=1e-4) for one, other in pairs)


@pytest.mark.parametrize("name", KINDS)
def test_draws_follow_rewards(made, name):
    """And those with a probe use it, before the runs are resumed and after."""
    alone = noted(made / "1", name)
    weights, sizes = of_all(alone, "weights"), of_all(alone, "sizes")
    assert len({*weights[0]}) == 1 < len({*weights[-1]})
    if "max_generations" in KINDS[name][1]:
        assert any(len({size for size, _ in some}) > 2 for some in sizes[-2:])
    if "probe" in KINDS[name][1]:
        metrics = (made / "1" / name / "run" / "metrics.jsonl").read_text().splitlines()
        for line in metrics[SAVED - 1 :]:
            assert json.loads(line)["prompt_sampling/probe_explained"] > 0


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("name", EXACT)
def test_any_number_of_ranks_has_the_same_draws_and_estimates(made, name, size):
    assert noted(made / str(size), name) == noted(made / "1", name)


@pytest.mark.parametrize("where", OTHERS)
@pytest.mark.parametrize("name", EXACT)
def test_a_run_that_another_number_of_ranks_resumes_has_the_same_draws(made, name, where):
    alone, rest = noted(made / "1", name), noted(made / where, name)
    assert 0 < len(rest) < len(alone)
    assert rest == alone[-len(rest) :]


@pytest.mark.parametrize("where", ("2", "3", "4", *OTHERS))
def test_where_hidden_states_differ_by_rounding_a_probe_does_too(made, where):
    rest = noted(made / where, PROBED)
    assert same_but_for_rounding(rest, noted(made / "1", PROBED)[-len(rest) :])


@pytest.mark.parametrize("where", SAME)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_as_many_ranks_resume_ends_with_the_same_bits(made, name, where):
    whole, resumed = made / str(SAME[where][1]), made / where
    rest = noted(resumed, name)
    assert rest == noted(whole, name)[-len(rest) :]
    before, after = (load_file(path / name / "rank-0.safetensors") for path in (whole, resumed))
    assert all(tensor.equal(after[key]) for key, tensor in before.items())


def test_weights_change_unless_the_learning_rate_is_0(made):
    still, other, trained = (
        load_file(made / size / name / "rank-0.safetensors")
        for size, name in (("1", PROBED_STILL), ("4", PROBED_STILL), ("1", PROBED))
    )
    assert all(tensor.equal(other[key]) for key, tensor in still.items())
    assert not any(tensor.equal(trained[key]) for key, tensor in still.items())
