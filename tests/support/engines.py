"""Engines by how they sample, and prompts of several lengths."""

import functools

from rloo.engines.hf import HFEngine
from rloo.engines.native.engine import NativeEngine
from rloo.types import Prompt
from support.models import VOCAB_SIZE

ENGINES = {
    "native": NativeEngine,
    "module": functools.partial(NativeEngine, fused=False),
    "hf": HFEngine,
}
LENGTHS = (1, 3, 12, 7)


def make_prompts(lengths=LENGTHS) -> list[Prompt]:
    return [
        Prompt(
            id=100 + index,
            token_ids=[3 + (11 * index + 5 * place) % (VOCAB_SIZE - 3) for place in range(length)],
            content="",
        )
        for index, length in enumerate(lengths)
    ]
