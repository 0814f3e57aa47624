"""Rules on facts that are not in a run's rows: data, chat template, end tokens, memory. The module
`rloo.addons.report.doctor.dataset_stats` collects these facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rloo.addons.report.doctor.run_record import (
    RecordedRun,
    Row,
    Rule,
    RuleResult,
    band,
    excerpts,
    longer_by,
    mean,
    says_nothing,
)
from rloo.data.tasks import EMBEDDED
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import percent
from rloo.tracking.metrics import Z

# Share of the tried prompts whose last words get the full reward.
ANSWERED = 0.1
# Share of clipped completions from which on the end token seems to be missing.
NEARLY_ALL_CUT = 0.95
# Share of unknown tokens from which on prompts are unreadable: one token in 20, about one word of a
# sentence. A tokenizer of bytes makes none. A rare character does not reach this share.
UNKNOWN = 0.05


def many_cut(run: RecordedRun) -> bool:
    """Whether the share of truncated completions in the last rollouts is above the healthy limit by
    more than chance explains."""
    return cut_beyond_chance(run, run.end)


def cut_beyond_chance(run: RecordedRun, rows: Sequence[Row]) -> bool:
    """Whether the share of truncated completions in the rollouts `rows` is above the healthy limit
    by more than chance explains."""
    high, size = band("completions/clipped_ratio").bounds()[1], run.completions_of(rows)
    chance = Z * math.sqrt(high * (1 - high) / max(1, size))
    return mean(rows, "completions/clipped_ratio") > high + chance


def _held_out_trained(run: RecordedRun) -> RuleResult | None:
    for name, (shared, total, example) in run.facts.get("shared_prompts", {}).items():
        if shared > 0:
            of = f"the evaluation set {name}" if name else "the evaluation set"
            return RuleResult(
                f"the training set has {shared:,} of {counted(total, 'prompt')} of {of}, too",
                "evaluate on a split that is not trained on (eval_split, eval_dataset)",
                examples=excerpts([example]),
            )
    return None


def _answered(run: RecordedRun) -> RuleResult | None:
    tried = run.facts.get("answered_prompts")
    if tried is None or tried[0] < ANSWERED * tried[1]:
        return None
    count, total, example = tried
    return RuleResult(
        f"for {count} of {total} prompts their own last words, given as a completion, earn the "
        "full reward",
        "take the answer out of the prompt (prompt_template names the columns that stay)",
        examples=excerpts([example], length=200),
    )


def _unknown_tokens(run: RecordedRun) -> RuleResult | None:
    count, total, mark, example = run.facts.get("unknown_tokens", (0, 1, "", ""))
    if count < UNKNOWN * total:
        return None
    change = "take a model whose tokenizer has these words (model), or write prompts without them"
    if run.option("model") == EMBEDDED:
        change = "take another model (model): countdown reads only its own problems (dataset)"
    return RuleResult(
        f"{percent(count / total)} of {counted(total, 'token')} of the prompts are {mark}, the "
        "token for words that the tokenizer does not have; one prompt is read as "
        f"{excerpts([example])[0]}",
        change,
    )


def _missing_eos(run: RecordedRun) -> RuleResult | None:
    if turn := run.facts.get("end_of_turn"):
        return RuleResult(
            f"the chat template ends a turn with {turn!r}, which does not end a completion",
            "let that token end one",
            {"generation_kwargs": {"eos_token_id": run.facts["end_of_turn_id"]}},
        )
    start = mean(run.start, "completions/clipped_ratio")
    if not start >= NEARLY_ALL_CUT or not many_cut(run):
        return None
    given = dict(run.option("generation_kwargs", {}))
    if "eos_token_id" in given:
        return RuleResult(
            f"{percent(start)} of completions never end; what ends them was set to token "
            f"{given.pop('eos_token_id')} (generation_kwargs)",
            "leave the end token to the model",
            {"generation_kwargs": given},
        )
    limit = int(run.option("max_completion_length", 512))
    change, options = longer_by(run, limit)
    never = all(row.get("completions/clipped_ratio") == 1.0 for row in run.rollouts)
    return RuleResult(
        f"{percent(start)} of completions reached {limit} tokens from the first rollout on"
        + (", and none ever ended by itself" if never else ""),
        "look at the end of one: if it goes on after the answer, its end token is not among those "
        "that stop sampling (tokenizer.eos_token, generation_config.eos_token_id); if it is cut in "
        f"the midst of it, {change}",
        options,
        [repr(text[-80:]) for text in run.texts(last=True)[:2]],
    )


def _chat_template(run: RecordedRun) -> RuleResult | None:
    how = run.facts.get("chat_template")
    if how == "turn not opened":
        return RuleResult(
            "prompts end without opening the assistant's turn (add_generation_prompt)",
            "open it when they are rendered, or give the tokenizer a template that does",
            examples=excerpts([run.facts["prompt"]], length=200),
        )
    cut = mean(run.start, "completions/clipped_ratio")
    silent, given = says_nothing(run), run.option("prompt_template", "{prompt}")
    if how != "unused" or not (silent or cut > band("completions/clipped_ratio").bounds()[1]):
        return None
    return RuleResult(
        "the tokenizer has a chat template and the prompts are plain text, which it is not applied "
        f"to; {silent or f'{percent(cut)} of completions never end'}",
        "make messages of the prompts",
        {"prompt_template": [{"role": "user", "content": given}]},
        excerpts([run.facts["prompt"]], length=200),
    )


def _memory(run: RecordedRun) -> RuleResult | None:
    if (said := run.facts.get("out_of_memory")) is None:
        return None
    limit = int(run.option("max_completion_length", 512))
    if not run.option("gradient_checkpointing"):
        how: dict[str, Any] = {"gradient_checkpointing": True}
        change = "compute activations again in the backward pass"
    else:
        how = {"max_completion_length": max(1, limit // 2)}
        change = "halve the length of completions, or sample fewer of a prompt (num_generations)"
    return RuleResult(f"the run ended with {said}", change, how)


RULES = (
    Rule(
        "memory",
        "Memory does not suffice",
        "the out-of-memory error that ended the run",
        "A rollout and the activations of an update must fit beside the weights.",
        "`gradient_checkpointing`, then a shorter `max_completion_length` or fewer "
        "`num_generations`",
        _memory,
    ),
    Rule(
        "held_out_trained",
        "Held-out prompts are in the training set",
        "before the start, prompts of `eval_dataset` with the same tokens as a training prompt",
        "A figure on trained rows measures memory, not skill.",
        "an evaluation split without training prompts (`eval_split`, `eval_dataset`)",
        _held_out_trained,
    ),
    Rule(
        "prompt_answers",
        "The prompt already answers",
        "before the start (`rloo doctor CONFIG`), the last words of some prompts get the full "
        "reward if they are scored as a completion. The reward must have only the values 0 and 1",
        "Copying is learned in place of answering.",
        "`prompt_template` without the answer",
        _answered,
    ),
    Rule(
        "unknown_tokens",
        "The tokenizer does not know the words of the prompts",
        "before the start, at least 5 % of the tokens of the prompts are the tokenizer's token for "
        "unknown words",
        "A model does not see a word that its tokenizer replaces.",
        "another `model`, or prompts of words that its tokenizer has (`prompt_template`)",
        _unknown_tokens,
    ),
    Rule(
        "chat_template",
        "The chat template is not used as it should be",
        "the tokenizer has a chat template, prompts are plain text, and completions do not end or "
        "are empty. Or the prompts do not open the assistant's turn",
        "A chat model that is not addressed as one does not answer, or does not stop.",
        "messages as prompts (`prompt_template`)",
        _chat_template,
    ),
    Rule(
        "missing_eos",
        "Completions do not end",
        "the token that ends a turn in the chat template does not end a completion. Or "
        "`completions/clipped_ratio` is at least 95 % from the first rollout on",
        "A cut completion has no end to judge, and sampling always takes the longest time.",
        "the end token, or a longer `max_completion_length`",
        _missing_eos,
    ),
)
