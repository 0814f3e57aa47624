"""The number of tokens that the longest prompt of a run leaves for a completion."""

from __future__ import annotations

from rloo.algorithm.state import TrainerComponents
from rloo.config.file_checks import context_of
from rloo.data.prompt_dataset import PromptDataset


def longest_completion(parts: TrainerComponents) -> int | None:
    """The largest number of tokens that a completion can have after the longest prompt, in the
    model's context; None if the prompts or the context length are unknown."""
    source, context = prompts_of(parts), context_of(parts.policy.model.config.get_text_config())
    return None if source is None or context is None else context - max(source.lengths, default=0)


def prompts_of(parts: TrainerComponents) -> PromptDataset | None:
    """The training prompts of a run; None for a stream."""
    source = getattr(parts.rollouts, "prompts", None)
    return source if isinstance(source, PromptDataset) else None
