"""Reads the datasets of a run: rows, their conversion from published formats, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeAlias

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo.config.compat.generation_kwargs import stop_tokens
from rloo.config.config import RLOOConfig
from rloo.config.file_checks import context_of
from rloo.data.dataset_formats import reference_hint, with_conversation, with_reference
from rloo.data.dataset_loading import Given, load_rows
from rloo.data.dataset_spec import dataset_spec
from rloo.data.iterable_dataset import IterablePromptDataset, Prompts, as_table
from rloo.data.prompt_dataset import PromptDataset, PromptLengthLimit, image_reader, with_prompts
from rloo.data.tasks import load_task_rows
from rloo.data.tokenization import encode_prompts, longest_token, note_of_special_tokens
from rloo.distributed.standard_streams import IS, counted
from rloo.model.model_loading import num_embedded
from rloo.rewards import RewardSet
from rloo.rewards.dataset_check import check_dataset
from rloo.types import Prompt

# A prompt of at most this many characters is always tokenised, which takes at most a second.
LONG_TEXT = 1_000_000
_UNNAMED_SET = "the evaluation set"
Rows: TypeAlias = Given | str
RowSets: TypeAlias = Rows | Mapping[str, Rows]


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """Rows with prompts and with the columns that rewards need, and notes about their conversion. A
    stream is not converted yet."""

    rows: Dataset | IterableDataset
    notes: list[str]


def read_rows(spec: Rows | None, split: str, args: RLOOConfig, rewards: RewardSet) -> PublishedRows:
    """Load the rows of a dataset, and convert them from a published format (`as_published`). A
    stream is converted when it is read. Raises ValueError if a column that a reward needs is
    missing."""
    rows = load_given(spec, split, args)
    if isinstance(rows, IterableDataset):
        return PublishedRows(rows, [])
    return PublishedRows(*as_published(rows, args, rewards))


def make_source(
    published: PublishedRows,
    *,
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardSet,
    args: RLOOConfig,
    limit: PromptLengthLimit,
) -> Prompts:
    """The tokenised prompts of the rows that `read_rows` returned. Raises ValueError for rows that
    cannot be prompts, for prompts beyond the `limit` (see `prompt_limit`), and if a column that a
    reward needs is missing in a stream."""
    rows, notes = published.rows, published.notes
    options = args.chat_template_kwargs or {}
    characters = max(LONG_TEXT, limit.max_tokens * longest_token(tokenizer))
    encode = partial(encode_prompts, processing_class=tokenizer, chat_template_kwargs=options)

    def source_of(rows: Dataset, seed: int, notes: Sequence[str] = ()) -> PromptDataset:
        check_dataset(rewards, rows, tokenizer)
        source = PromptDataset(
            rows,
            encode,
            seed=seed,
            shuffle=args.shuffle_dataset,
            limit=replace(limit, may_be_empty=streaming, max_characters=characters),
            images=image_reader(rows, tokenizer, chat_template_kwargs=options),
        )
        source.notes = [*notes, *note_of_special_tokens(rows[:1]["prompt"], tokenizer)]
        return source

    def source_of_block(rows: Dataset, seed: int) -> PromptDataset:
        rows, notes = as_published(rows, args, rewards)
        return source_of(rows, seed, notes)

    streaming = isinstance(rows, IterableDataset)
    seed = args.seed if args.data_seed is None else args.data_seed
    if streaming:
        return IterablePromptDataset(rows, source_of_block, seed=seed)
    return source_of(rows, seed, notes)


def as_published(rows: Dataset, args: RLOOConfig, rewards: RewardSet) -> tuple[Dataset, list[str]]:
    """Convert `rows` from a published format. Return the fields of `PublishedRows`."""
    found, of_prompts = with_conversation(rows, args.prompt_template)
    found = found if found is not rows else with_prompts(rows, args.prompt_template)
    found, of_references = with_reference(found, args.reference, rewards.reads)
    try:
        rewards.check([name for name in found.column_names if name != "prompt"])
    except ValueError as error:
        raise ValueError(f"{error}{reference_hint(found, rewards.reads)}") from error
    return found, [note for note in (of_prompts, of_references) if note is not None]


def load_given(spec: Rows | None, split: str, args: RLOOConfig) -> Dataset | IterableDataset:
    """The rows of a dataset that is given by a name, by a path or as rows."""
    rows = load_task_rows(spec, split, args) if isinstance(spec, str) else None
    if rows is not None:
        return rows
    # A configuration name applies only to the dataset for which it was given.
    own = isinstance(spec, str) and spec == (args.dataset or args.eval_dataset)
    return load_rows(spec, split=split, config_name=args.dataset_config if own else None)


def arrange(source: Prompts, args: RLOOConfig) -> Prompts:
    """Return the prompts `source` in the order of the dataset's spec (`DatasetSpec.arrange`). If
    the dataset has no spec, `source` is unchanged."""
    spec = dataset_spec(args.dataset)
    arranged: Prompts = source if spec is None else spec.arrange(source, args)
    return arranged


def eval_sets(given: RowSets | None, args: RLOOConfig) -> dict[str, Rows]:
    """The evaluation sets by name; a single set has the name "". Only the first `eval_size` rows of
    a stream are read. Each value of a mapping is a set, unless `eval_split` selects one value."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and args.eval_split is None:
        named = {str(name): rows for name, rows in given.items()}
    elif isinstance(given, str):
        named = {"": given}
    else:
        named = {"": load_rows(given, split=args.eval_split or "train")}
    for name, rows in named.items():
        if isinstance(rows, IterableDataset):
            named[name] = as_table(list(islice(rows, args.eval_size)), rows)
    return named


def read_eval_rows(
    given: RowSets | None, args: RLOOConfig, read: Callable[[Rows, str], PublishedRows]
) -> dict[str, PublishedRows]:
    """The rows of all evaluation sets by name. `read(rows, split)` returns those of one set."""
    found = {}
    for name, rows in eval_sets(given, args).items():
        split = args.eval_split if isinstance(rows, str) else None
        with _naming(name):
            found[name] = read(rows, split or "train")
    return found


def prompts_of_sets(
    sets: Mapping[str, PublishedRows], args: RLOOConfig, make: Callable[[PublishedRows], Prompts]
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """The prompts of all evaluation sets by name, and notes about the prompts. `make(rows)` returns
    the prompts of one set."""
    prompts, notes = {}, []
    for name, rows in sets.items():
        with _naming(name):
            source = make(rows)
        notes += length_notes(source, name or _UNNAMED_SET)
        assert isinstance(source, PromptDataset)  # `eval_sets` has converted streams to tables
        prompts[name] = source.all_prompts(args.eval_size)
    return prompts, notes


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors name the evaluation set."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"in {name or _UNNAMED_SET}: {error}") from error


def prompt_limit(
    model: PreTrainedModel, args: RLOOConfig, *, evaluation: bool = False
) -> PromptLengthLimit:
    """The limits on a prompt: the longest completion must fit behind the prompt into the model's
    context, and the model must embed every token. Raises ValueError if the completion leaves no
    room for a prompt, and for a stop token that the model does not embed."""
    name, completion = "max_completion_length", args.max_completion_length
    if evaluation and (own := args.eval_options.max_completion_length) is not None:
        name, completion = "eval_kwargs.max_completion_length", own
    context = context_of(model.config.get_text_config())
    longest, embedded = args.max_prompt_length or 2**31, num_embedded(model)
    if beyond := [t for t in stop_tokens(args.generation_kwargs, ()) if t >= embedded]:
        raise ValueError(
            f"generation_kwargs.eos_token_id is {beyond[0]} but the model has {embedded} tokens; "
            "it would end no completion (generation_kwargs)"
        )
    limit = PromptLengthLimit(longest, args.overlong_prompts, vocabulary=embedded)
    if context is None:
        return limit
    room = context - completion
    if room < 1:
        raise ValueError(
            f"{name} is {completion} and the model's context has {context} tokens; at least 1 must "
            f"be left for the prompt ({name})"
        )
    return replace(limit, max_tokens=min(limit.max_tokens, room))


def length_notes(source: Prompts, where: str) -> list[str]:
    """Notes about dropped and truncated prompts; `where` names the dataset."""
    notes = [f"{note} (in {where})" for note in source.notes]
    if source.dropped:
        notes.append(f"{counted(source.dropped, 'prompt', IS)} too long and left out (in {where})")
    if source.truncated:
        notes.append(f"{counted(source.truncated, 'prompt', IS)} cut on the left (in {where})")
    return notes
