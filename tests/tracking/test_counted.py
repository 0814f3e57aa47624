"""Numbers in sentences: one is, two are."""

import pytest

from rloo.distributed.standard_streams import HAS, IS, counted


@pytest.mark.parametrize(
    ("number", "verbs", "said"),
    [
        (0, ("", ""), "0 prompts"),
        (1, ("", ""), "1 prompt"),
        (1, IS, "1 prompt is"),
        (2, IS, "2 prompts are"),
        (1, HAS, "1 prompt has"),
        (1234, HAS, "1,234 prompts have"),
    ],
)
def test_one_is_and_two_are(number, verbs, said):
    assert counted(number, "prompt", verbs) == said
