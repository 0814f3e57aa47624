"""Predicts the rewards of a prompt from numbers that the policy computes from the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum
from typing import Any

import numpy as np

from rloo.data.numpy_text import array_of, text_of_array

# Ridge penalties, in units of the variance of the prompts' means: the lowest and the highest ratio.
NOISE_RATIO = (0.1, 10.0)
# Predictions are used once so many prompts have confirmed them.
LEAST_CONFIRMED = 16.0


class RewardProbe:
    """A ridge regression from `size` features of a prompt to the mean of its rewards and to the
    mean of their squares. Every rollout multiplies the weight of earlier ones by
    `0.5 ** (1 / half_life)`.

    The probe also compares its predictions with the rewards that are observed afterwards, and with
    the predictions of the prior without a probe. It is used only while it predicts better.
    """

    def __init__(self, size: int, *, half_life: float) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._size = size
        # Sums of (1, features, targets) and of their products. The first sum is the number of
        # prompts.
        self._products = np.zeros((size + 3, size + 3))
        # Number of prompts; squared errors of the probe and of the prior; sums of products of the
        # difference of both predictions: with the prior's error, and with itself.
        self._errors = np.zeros(5)

    def copy(self) -> RewardProbe:
        """Return a probe that can change independently."""
        other = RewardProbe(self._size, half_life=1.0)
        other._decay = self._decay
        other._products, other._errors = self._products.copy(), self._errors.copy()
        return other

    def add(self, rollout: Iterable[tuple[Any, list[float], float | None, float | None]]) -> None:
        """Add the prompts of a rollout: the features, the rewards, and the mean rewards that the
        probe and the prior predicted before the rewards were known (None: no prediction)."""
        self._products *= self._decay
        self._errors *= self._decay
        rows = []
        for features, rewards, probe, prior in rollout:
            if not rewards:
                continue
            mean = fsum(rewards) / len(rewards)
            square = fsum(reward * reward for reward in rewards) / len(rewards)
            rows.append([1.0, *features, mean, square])
            if probe is not None and prior is not None:
                error, step = mean - prior, probe - prior
                self._errors += [1.0, (mean - probe) ** 2, error**2, error * step, step**2]
        if rows:
            values = np.array(rows)
            self._products += np.einsum("pi,pj->ij", values, values)

    def predict(self, features_MD: np.ndarray, noise_ratio: float) -> np.ndarray | None:
        """Return the predicted means of the rewards and of their squares, (2, M). None before the
        first rewards. `noise_ratio`: variance of a group's mean about the prompt's mean, divided by
        the variance of the prompts' means.

        Sums are in a fixed order, so that the bits of the result do not depend on the processor or
        the number of threads, as those of LAPACK do: all processes draw the same prompts.
        """
        count = self._products[0, 0]
        if count == 0:
            return None
        num, size = len(features_MD), self._size + 1
        # Row by row: (1, features) times themselves, targets times them, and the new prompts.
        new_MD = np.hstack([np.ones((num, 1)), features_MD])
        rows = np.vstack([self._products[:, :size] / count, new_MD])
        square_D, lowest, highest = rows.diagonal()[1:], *NOISE_RATIO
        variance_D = square_D - rows[0, 1:] ** 2
        penalty = self._size * min(max(noise_ratio, lowest), highest) / count
        varies_D = variance_D > 1e-12 * square_D  # a constant feature predicts nothing
        diagonal = np.arange(1, size)
        rows[diagonal, diagonal] += np.where(varies_D, penalty * variance_D, 1.0)
        # Cholesky's elimination, of the other rows, too. The first column subtracts the means.
        for column in range(size):
            left = rows[column:, column]
            left -= np.einsum("ij,j->i", rows[column:, :column], rows[column, :column])
            left /= np.sqrt(left[0])
        return np.einsum("ij,kj->ik", rows[size : size + 2], rows[size + 2 :])

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
            "products": text_of_array(self._products),
            "errors": text_of_array(self._errors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for another number of features."""
        products = array_of(state["products"])
        if products.size != self._products.size:
            raise ValueError(
                "the saved position has a probe of another model; resume with the model of the run "
                "(prompt_sampling_kwargs.probe, resume_from_checkpoint)"
            )
        self._products = products.reshape(self._products.shape)
        self._errors = array_of(state["errors"])
