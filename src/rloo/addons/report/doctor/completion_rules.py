"""Rules on the completions: their length, their ending, their text."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from statistics import fmean

from rloo.addons.report.doctor.data_rules import cut_beyond_chance, many_cut
from rloo.addons.report.doctor.run_record import (
    RecordedRun,
    Rule,
    RuleResult,
    excerpts,
    longer_by,
    says_nothing,
)
from rloo.tracking.before_after import FEWEST, BeforeAfter
from rloo.tracking.console import percent
from rloo.tracking.finding import text_of_content
from rloo.tracking.metrics import deviation

# The largest mean number of tokens (with the end token) of empty completions; the largest share of
# the length in the first rollouts that is left.
EMPTY, SHRUNK = 2.5, 0.34
# Share of clipped completions above which the run is voided.
MOSTLY_CUT = 0.8
# Share of clipped completions above which twice the limit is not enough.
OFTEN_CUT = 1 / 3
# A text that deflate compresses below this share of its size repeats itself.
REPEATS = 0.35
# With fewer prompts per rollout, rollouts differ because their prompts differ.
FEW_PROMPTS = 4
# Shorter texts (in characters) are too short to measure repetition.
FEWEST_CHARACTERS = 60


def repetition(text: str) -> float:
    """The compression ratio of a text: its deflate size minus the deflate size of an empty text,
    divided by its size in bytes."""
    content = text.encode()
    overhead = len(zlib.compress(b"", 9))
    return (len(zlib.compress(content, 9)) - overhead) / max(1, len(content))


def strangeness(text: str) -> float:
    """The share of characters that real texts do not contain: replaced, unprintable, unassigned."""
    return sum(not (c.isprintable() or c in "\n\t\r") or c == "�" for c in text) / max(1, len(text))


def _degenerate(texts: Sequence[str]) -> tuple[list[str], str]:
    """The gibberish among `texts`, and the reason."""
    repeating = [t for t in texts if len(t) >= FEWEST_CHARACTERS and repetition(t) < REPEATS]
    strange = [t for t in texts if strangeness(t) > 0.1]
    if len(strange) > len(repeating):
        return strange, "have characters that no text has"
    return repeating, "repeat themselves"


def _gibberish(run: RecordedRun) -> RuleResult | None:
    before, after = run.texts(last=False), run.texts(last=True)
    if len(after) < 4:
        return None
    (was, _), (bad, why) = _degenerate(before), _degenerate(after)
    share, earlier = len(bad) / len(after), len(was) / max(1, len(before))
    if share < 0.5 or share < earlier + 0.4:
        return None
    return RuleResult(
        f"{percent(share)} of {len(after)} recorded completions at the end {why} "
        f"({percent(earlier)} of {len(before)} at the start), while the reward went from "
        f"{run.change('reward').words}",
        "add a reward that text like this does not get (repetition, or a reward model)",
        examples=excerpts(bad),
    )


def grown(run: RecordedRun) -> RuleResult | None:
    """A result if completions grew to the length limit although nothing penalises length; else
    None."""
    length, cut = run.change("completions/mean_length"), run.change("completions/clipped_ratio")
    if not length.after > 1.5 * length.before or not many_cut(run) or not cut.before < 0.5:
        return None
    # With few prompts per rollout, completions may grow because the prompts need longer answers.
    if 0 in (length.moved, cut.moved) or (run.prompts < FEW_PROMPTS and length.moved is None):
        return None
    if cut.after <= MOSTLY_CUT and _to_be_cut_costs(run):
        return None
    return RuleResult(
        f"completions grew from {length.words} tokens, and {percent(cut.after)} of them reach the "
        f"limit ({percent(cut.before)} at the start); the reward went from "
        f"{run.change('reward').words}",
        "let completions that are cut pay for it",
        {"missing_eos_penalty": 1.0},
        excerpts(run.texts(last=True)),
        voids=cut.after > MOSTLY_CUT,
    )


def _to_be_cut_costs(run: RecordedRun) -> bool:
    """Whether recorded completions that were truncated have lower rewards than others, beyond
    chance. If so, the reward does not favour length: completions grow because they need more tokens
    than the limit."""
    of: dict[bool, list[float]] = {True: [], False: []}
    for row in run.recorded(last=True):
        if row.get("reward") is not None:
            of[row.get("finish") == "length"].append(row["reward"])
    size = min(len(of[True]), len(of[False]))
    if size < FEWEST:
        return False
    cut, whole = ((fmean(r), deviation(r) / math.sqrt(len(r))) for r in (of[True], of[False]))
    return BeforeAfter.of_errors(cut, whole, size).moved == 1


def _cut(run: RecordedRun) -> RuleResult | None:
    cut, length = (run.change(f"completions/{n}") for n in ("clipped_ratio", "mean_length"))
    limit = int(run.option("max_completion_length", 512))
    if many_cut(run):
        seen = f"{percent(cut.after)} of completions reach max_completion_length {limit}"
    elif cut_beyond_chance(run, run.start) and not run.gained:
        seen = (
            f"{percent(cut.before)} of completions reached max_completion_length {limit} at the "
            f"start; they went from {length.words} tokens, and the reward from "
            f"{run.change('reward').words}"
        )
    else:
        return None
    times = 4 if max(cut.before, cut.after) > OFTEN_CUT else 2
    return RuleResult(
        seen,
        *longer_by(run, limit, times),
        [repr(t[-80:]) for t in run.texts(last=True)[:2]],
    )


def _silent(run: RecordedRun) -> RuleResult | None:
    if not (seen := says_nothing(run)):
        return None
    return RuleResult(
        seen,
        "look at the end of a recorded prompt: it may close the turn that the model is to speak "
        "in, or hold its end token; with a chat model make messages of the prompts",
        examples=excerpts([text_of_content(row.get("prompt")) for row in run.recorded(last=False)]),
    )


def _empty(run: RecordedRun) -> RuleResult | None:
    length = run.change("completions/mean_length")
    if not length.after < EMPTY or not length.after < SHRUNK * length.before:
        return None
    return RuleResult(
        f"completions shrank from {length.words} tokens, the end included; the reward went from "
        f"{run.change('reward').words}",
        "give an empty completion the lowest reward",
        examples=excerpts(run.texts(last=True)),
    )


def one_and_the_same(texts: Sequence[str]) -> float:
    """The share of the most frequent text among `texts`."""
    return fmean(text == max(set(texts), key=list(texts).count) for text in texts) if texts else 0.0


def _sameness(run: RecordedRun) -> RuleResult | None:
    before, after = run.texts(last=False), run.texts(last=True)
    if len(after) < 8:
        return None
    share, earlier = one_and_the_same(after), one_and_the_same(before)
    if share < 0.5 or share < earlier + 0.3:
        return None
    return RuleResult(
        f"{percent(share)} of {len(after)} recorded completions at the end are one and the same, "
        f"whatever the prompt ({percent(earlier)} at the start); the reward went from "
        f"{run.change('reward').words}",
        "find out why the reward pays for this text, and let it not",
        examples=excerpts([max(set(after), key=after.count)]),
    )


RULES = (
    Rule(
        "silent",
        "Completions are empty from the start",
        "half of the recorded completions of the first rollouts have no text, and the reward does "
        "not rise",
        "A model that writes nothing finds no answer, under any reward.",
        "prompts that end where the assistant's turn begins",
        _silent,
    ),
    Rule(
        "gibberish",
        "Completions have become gibberish",
        "at least half of the recorded completions at the end repeat themselves (deflate "
        "compresses them to less than 35 %) or contain characters that no text has. At the start, "
        "few completions did so",
        "The reward is paid for texts that nobody wants to read.",
        "a reward that is low for gibberish",
        _gibberish,
        voids=True,
    ),
    Rule(
        "empty",
        "Completions have become empty",
        "`completions/mean_length` at the end is at most 2 tokens, and at most a third of its "
        "value at the start",
        "The reward is paid for saying nothing.",
        "the lowest reward for an empty completion",
        _empty,
        voids=True,
    ),
    Rule(
        "same_text",
        "Every prompt gets the same completion",
        "at least half of the recorded completions at the end have the same text. At the start "
        "they did not",
        "A completion that does not depend on the prompt answers no prompt.",
        "a reward that is low for this text",
        _sameness,
        voids=True,
    ),
    Rule(
        "length_explosion",
        "Completions grow into the length limit",
        "`completions/mean_length` grows to 1.5 times its value at the start, and "
        "`completions/clipped_ratio` rises from less than one half to above its healthy range. "
        "Truncated completions do not have lower rewards than others. If more than 80 % are "
        "truncated, the finding voids the run",
        "Length is rewarded, or costs nothing. A cut completion is judged without its end.",
        "`missing_eos_penalty`",
        grown,
    ),
    Rule(
        "truncation",
        "Many completions are cut",
        "`completions/clipped_ratio` above its healthy range at the end of the run, or at the "
        "start if the reward did not rise",
        "A completion that is cut is judged without its end, mostly as wrong.",
        "twice `max_completion_length`, or four times if more than a third of the completions are "
        "truncated, as far as the model's context allows",
        _cut,
    ),
)
