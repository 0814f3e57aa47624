"""Features of prompts by their tokens."""

import numpy as np
import pytest

from rloo.data.token_features import NUM_FEATURES, token_features


def test_features_are_counts_of_tokens_with_signs():
    """The sum over the tokens of a prompt, each of them in one feature."""
    one = token_features([[token] for token in range(200)], seed=3)
    assert one.shape == (200, NUM_FEATURES) and one.dtype == np.float32
    assert {*np.abs(one).sum(1)} == {*np.abs(one).max(1)} == {1.0}
    assert 60 < (one.sum(1) == 1.0).sum() < 140
    assert len({*np.abs(one).argmax(1)}) > 80
    found = token_features([[7, 9, 7, 199], [], [9]], seed=3)
    assert (found == np.stack([2 * one[7] + one[9] + one[199], 0 * one[0], one[9]])).all()


def test_features_depend_on_the_seed():
    prompts = [[1, 2, 3], [4, 5]]
    found = [token_features(prompts, seed) for seed in (1, 1, 2)]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()


def test_distances_are_those_of_counts_on_average():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, 6).tolist() for _ in range(40)]
    counts = np.stack([np.bincount(ids, minlength=50) for ids in prompts])
    features = np.mean(
        [((f := token_features(prompts, seed))[:, None] - f) ** 2 for seed in range(60)], 0
    ).sum(-1)
    expected = ((counts[:, None] - counts) ** 2).sum(-1)
    assert features == pytest.approx(expected, rel=0.2)
