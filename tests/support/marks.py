"""Marks of cases."""

from functools import partial

import pytest

# A case of a parametrized test that is left to .ci/run.
slow = partial(pytest.param, marks=pytest.mark.slow)
