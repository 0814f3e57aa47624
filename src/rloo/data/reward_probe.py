"""Predicts the rewards of a prompt from numbers that are known before they are sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import fsum
from typing import Any, NamedTuple

import numpy as np

from rloo.data.numpy_text import array_of, text_of_array

# The number of features of a prompt.
NUM_FEATURES = 128
# Ridge penalties, in units of the variance of the prompts' means: the lowest and the highest ratio.
NOISE_RATIO = (0.1, 10.0)
# Predictions are used once so many prompts have confirmed them.
LEAST_CONFIRMED = 16.0
# The variance within prompts is a parabola of the predicted mean. So many prompts pull it towards
# a constant, and it has at least this share of the usual variance.
CURVE_STRENGTH = 8.0
LEAST_WITHIN = 0.01
# Features whose variance is a smaller share of their mean square do not differ, but for rounding.
LEAST_VARIANCE = 1e-8


class RidgeRegression:
    """Ridge regression of one target on `size` features, from decayed sums."""

    def __init__(self, size: int) -> None:
        # Sums of the products of (1, features, target). The first is the number of rows.
        self.products: np.ndarray = np.zeros((size + 2, size + 2))

    def add(self, rows: Sequence[Sequence[float]], decay: float) -> None:
        """Decay the sums, then add rows of features and target."""
        self.products *= decay
        if rows:
            values = np.array([[1.0, *row] for row in rows])
            self.products += np.einsum("pi,pj->ij", values, values)

    def predict(self, new_MD: np.ndarray, strength: float) -> np.ndarray | None:
        """Return the predicted targets of M rows of features, (M,). None before the first row.
        `strength`: so many rows pull the prediction towards the mean, if features explain it.

        Sums are in a fixed order, so that the bits of the result do not depend on the processor or
        the number of threads, as those of LAPACK do: all processes draw the same prompts.
        """
        count, size = self.products[0, 0], len(self.products) - 1
        if count == 0:
            return None
        # Row by row: (1, features) times themselves, and the target times them.
        rows = self.products[:, :size] / count
        square_D = rows.diagonal()[1:]
        variance = (square_D - rows[0, 1:] ** 2).cumsum()[-1]
        if not variance > LEAST_VARIANCE * square_D.cumsum()[-1]:
            return np.full(len(new_MD), rows[size, 0])
        diagonal = np.arange(1, size)
        rows[diagonal, diagonal] += strength / count * variance
        # Cholesky's elimination, of the target, too. The first column subtracts the means.
        for column in range(size):
            left = rows[column:, column]
            left -= np.einsum("ij,j->i", rows[column:, :column], rows[column, :column])
            left /= np.sqrt(left[0])
        weight_D = rows[size]
        for column in reversed(range(size)):
            weight_D[column] /= rows[column, column]
            weight_D[:column] -= weight_D[column] * rows[column, :column]
        predicted_M: np.ndarray = weight_D[0] + np.einsum("ij,j->i", new_MD, weight_D[1:])
        return predicted_M


class Moments(NamedTuple):
    """The mean of all rewards, the variance within prompts, the variance of the prompts' means, and
    the number of scored completions of a group."""

    mean: float
    within: float
    between: float
    group_size: float

    @property
    def noise(self) -> float:
        """The variance of a group's mean about the mean of its prompt."""
        return self.within / self.group_size


class RewardProbe:
    """Predicts the mean and the variance of a prompt's rewards from `size` features: a ridge
    regression for the mean, and the variance within prompts as a parabola of the predicted mean.
    Every rollout multiplies the weight of earlier ones by `0.5 ** (1 / half_life)`.

    The parabola learns from predictions that were made before the rewards were known. The probe
    also compares these predictions with the rewards, and with the predictions of the prior without
    a probe. It is used only while it predicts better.
    """

    def __init__(self, size: int, *, half_life: float) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._means, self._curve = RidgeRegression(size), RidgeRegression(2)
        # Number of prompts; squared errors of the probe and of the prior; sums of products of the
        # difference of both predictions: with the prior's error, and with itself.
        self._errors = np.zeros(5)

    def copy(self) -> RewardProbe:
        """Return a probe that can change independently."""
        return deepcopy(self)

    def add(
        self,
        rollout: Iterable[tuple[Any, list[float], float | None, float | None]],
        moments: Moments | None,
    ) -> None:
        """Add the prompts of a rollout: the features, the rewards, and the mean rewards that the
        probe and the prior predicted before the rewards were known (None: no prediction).
        `moments` are those of earlier rollouts."""
        self._errors *= self._decay
        means, curve = [], []
        for features, rewards, probe, prior in rollout:
            if not rewards:
                continue
            mean = fsum(rewards) / len(rewards)
            means.append([*features, mean])
            if probe is None or prior is None or moments is None:
                continue
            error, step = mean - prior, probe - prior
            self._errors += [1.0, (mean - probe) ** 2, error**2, error * step, step**2]
            if len(rewards) > 1 and moments.within > 0:
                squares = fsum((reward - mean) * (reward - mean) for reward in rewards)
                within = squares / (len(rewards) - 1)
                place = _places(np.array([probe]), moments)[0].tolist()
                curve.append([*place, within / moments.within])
        self._means.add(means, self._decay)
        self._curve.add(curve, self._decay)

    def predict(
        self, features_MD: np.ndarray, moments: Moments
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the predicted means of the rewards and their variances within prompts, (M,) each.
        None before the first rewards."""
        lowest, highest = NOISE_RATIO
        ratio = moments.noise / moments.between if moments.between > 0 else highest
        mean_M = self._means.predict(features_MD, min(max(ratio, lowest), highest))
        if mean_M is None:
            return None
        curve_M = self._curve.predict(_places(mean_M, moments), CURVE_STRENGTH)
        if curve_M is None:
            return mean_M, np.full(len(mean_M), moments.within)
        return mean_M, moments.within * np.maximum(curve_M, LEAST_WITHIN)

    @property
    def explained(self) -> float:
        """The share of the prior's squared error that the probe removed, on prompts that it had not
        seen the rewards of. At most 1; 0 or less if it knows nothing; NaN before a comparison."""
        return 1.0 - self._errors[1] / self._errors[2] if self._errors[2] > 0 else np.nan

    @property
    def slope(self) -> float:
        """The slope of the rewards over the predictions, both relative to the prior. 1: calibrated;
        below 1: predictions are too extreme. NaN before a comparison."""
        return self._errors[3] / self._errors[4] if self._errors[4] > 0 else np.nan

    @property
    def error(self) -> float | None:
        """The mean squared error of predicted means; None if the probe does not predict better than
        the prior, or if too few prompts were compared."""
        count = self._errors[0]
        if count < LEAST_CONFIRMED or not self.explained > 0:
            return None
        return float(self._errors[1] / count)

    def state_dict(self) -> dict[str, Any]:
        """Return all sums as JSON values."""
        return {
            "means": text_of_array(self._means.products),
            "curve": text_of_array(self._curve.products),
            "errors": text_of_array(self._errors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for another number of features."""
        means, shape = array_of(state["means"]), self._means.products.shape
        if means.size != self._means.products.size:
            raise ValueError(
                "the saved position has a probe with other features; resume with the options and "
                "the model of the run (prompt_sampling_kwargs.probe, resume_from_checkpoint)"
            )
        self._means.products = means.reshape(shape)
        self._curve.products = array_of(state["curve"]).reshape(4, 4)
        self._errors = array_of(state["errors"])


def _places(mean_M: np.ndarray, moments: Moments) -> np.ndarray:
    """Return the features of the parabola, (M, 2): the distance of a predicted mean from the mean
    of all prompts, in standard deviations of the prompts' means, and its square."""
    scale = np.sqrt(moments.between) if moments.between > 0 else 1.0
    place_M = np.clip((mean_M - moments.mean) / scale, -3.0, 3.0)
    return np.stack([place_M, place_M**2], 1)
