"""Writes the table of docs/gym-tasks.md from reasoning-gym: `python tools/gym_page.py`.

The text after the line `<!-- tasks -->` is replaced. Some tasks take seconds per problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rloo.addons.integrations.reasoning_gym import gym_tasks
from rloo.data.tasks import EMBEDDED, resolve_model

PAGE = Path(__file__).resolve().parent.parent / "docs/gym-tasks.md"
MARK = "<!-- tasks -->\n"
HEAD = (
    "\n| task | levels | prompt, characters | prompt's words known | prompt | answer | such as |\n"
    "|---|---|---|---|---|---|---|\n"
)
NUM_PROBLEMS = 10
_SHOWN = 30


def filled(page: str) -> str:
    """The page with all tasks rewritten."""
    head, mark, _ = page.partition(MARK)
    tokenizer = embedded_tokenizer()
    return head + mark + HEAD + "".join(line(task, tokenizer) for task in gym_tasks.task_names())


def embedded_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the embedded model."""
    return AutoTokenizer.from_pretrained(resolve_model(EMBEDDED), model_max_length=10**6)


def line(task: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The row of a task: which parts of its first problems, with default options, have no unknown
    token."""
    made = list(gym_tasks.problems(task, None, {}, seed=0, size=NUM_PROBLEMS))
    questions = [problem.question for problem in made]
    answers = [problem.answer for problem in made if problem.answer is not None]
    known = [_known(word, tokenizer) for text in questions for word in text.split()]
    example = f"`{_cell(min(answers, key=len))}`" if answers else ""
    cells = (
        f"`{task}`",
        str(gym_tasks.num_levels(task) or "none"),
        f"{median(map(len, questions)):.0f}",
        f"{100 * sum(known) / len(known):.0f} %",
        _verdict(questions, tokenizer),
        _verdict(answers, tokenizer) if answers else "scored without one",
        example,
    )
    return f"| {' | '.join(cells)} |\n"


def _verdict(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    count = sum(_known(text, tokenizer) for text in texts)
    return {0: "no", len(texts): "yes"}.get(count, f"{count} of {len(texts)}")


def _known(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text has only known tokens and can be decoded from them. Line breaks and repeated
    spaces cannot be decoded."""
    ids = tokenizer(text)["input_ids"]
    return tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
