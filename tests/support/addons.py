"""Tests of the core that need an add-on, and are skipped where `rloo.addons` is not there."""

from importlib.util import find_spec

import pytest

HAS_ADDONS = find_spec("rloo.addons") is not None
needs_addons = pytest.mark.skipif(not HAS_ADDONS, reason="needs rloo.addons")
