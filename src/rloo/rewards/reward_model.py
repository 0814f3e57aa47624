"""Reward models: sequence classifiers, and objects with `get_rewards`, as reward functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rloo.config.file_checks import check_sizes, context_of, load_pretrained, reading
from rloo.rewards.registry import check_folder, is_reward_model, load_reward
from rloo.rewards.running_norm import RunningNormReward
from rloo.types import Text, text_of

# Tokens of one forward pass, padding included.
BATCH_TOKENS = 8192
DTYPES = ("auto", "float32", "bfloat16", "float16")
OPTIONS = (
    "allow_missing_weights", "batch_tokens", "device", "dtype", "normalize", "revision",
)  # fmt: skip


class RewardModel:
    """A sequence classifier with one label. The reward is its score of prompt and completion.
    Messages are rendered by the chat template of the reward model's tokenizer; strings are
    concatenated. No further special tokens are added. `model` is changed: it is set to evaluation
    mode, and its configuration gets the tokenizer's padding token, or the end-of-sequence token if
    there is no padding token. transformers uses this token to find the last token of a text.
    `batch_tokens` limits the number of rows times the length of the longest row in one forward
    pass.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = BATCH_TOKENS,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError for several labels, no padding token, or a `batch_tokens` below 1."""
        path = getattr(model.config, "_name_or_path", "")
        self.__name__: str = path.rstrip("/").split("/")[-1] or type(model).__name__
        if model.config.num_labels != 1:
            raise ValueError(_describe_labels(self.__name__, model.config.num_labels))
        if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise ValueError(
                f"batch_tokens of the reward model {self.__name__!r} is {batch_tokens!r}; it must "
                "be a whole number of at least 1"
            )
        pad = tokenizer.pad_token_id
        self._pad = tokenizer.eos_token_id if pad is None else pad
        if self._pad is None:
            raise ValueError(
                f"the tokenizer of the reward model {self.__name__!r} has neither a padding nor an "
                "end-of-sequence token; texts of different length need one "
                "(reward_processing_classes)"
            )
        text_config = model.config.get_text_config()
        text_config.pad_token_id = self._pad
        text_config.use_cache = False
        self._limit = context_of(text_config)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self._template_options = dict(chat_template_kwargs or {})

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text]) -> list[float]:
        """Return the model's score of each completion. Raises ValueError for a text without tokens
        or longer than the model's context, and for a score that is not finite."""
        texts = [self._write(p, c) for p, c in zip(prompts, completions, strict=True)]
        encoded: Any = self.tokenizer(texts, add_special_tokens=False)
        rows = encoded["input_ids"]
        for row in rows:
            self._check_length(len(row))
        scores = torch.empty(len(rows))
        for numbers in _batches([len(row) for row in rows], self._batch_tokens):
            scores[numbers] = self._score([rows[number] for number in numbers])
        if not scores.isfinite().all():
            raise ValueError(
                f"the reward model {self.__name__!r} gave {scores[~scores.isfinite()][0].item()}; "
                "a score must be finite (dtype)"
            )
        return scores.tolist()

    def _write(self, prompt: Text, completion: Text) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        messages: list[Any] = list(prompt)
        # This is a text model: images in the prompt are left out.
        messages = [
            {**m, "content": text_of(m["content"])} if isinstance(m.get("content"), list) else m
            for m in messages
        ]
        if messages[-1]["role"] == "assistant":  # the completion contains the complete message
            messages.pop()
        rendered = self.tokenizer.apply_chat_template(
            [*messages, *completion], tokenize=False, **self._template_options
        )
        return str(rendered)

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise ValueError(
                f"a prompt and its completion have 0 tokens for the reward model {self.__name__!r};"
                " a score needs at least 1 (reward_processing_classes)"
            )
        if self._limit is not None and length > self._limit:
            raise ValueError(
                f"a prompt and its completion have {length} tokens and the reward model "
                f"{self.__name__!r} sees {self._limit} (max_completion_length, max_prompt_length)"
            )

    @torch.inference_mode()
    def _score(self, rows: Sequence[list[int]]) -> Tensor:
        """Scores (B,) of B rows of token ids, padded on the right to the longest row."""
        ids = [torch.tensor(row) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=self._pad)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        device = self.model.device
        # The reward model computes in its dtype, also if the policy uses autocast.
        with torch.autocast(device.type, enabled=False):
            output = self.model(input_ids=input_ids.to(device), attention_mask=mask.to(device))
        if output.logits.shape != (len(rows), 1):
            raise ValueError(
                f"the reward model {self.__name__!r} gave an array of shape "
                f"{tuple(output.logits.shape)} for {len(rows)} texts; it must be a sequence "
                "classifier, which gives one number for each"
            )
        return output.logits[:, 0].float().cpu()


def as_reward(
    spec: Any,
    processing_class: PreTrainedTokenizerBase | None = None,
    *,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The reward function that `spec` names.

    - An existing folder, `owner/name` on the hub, or the mapping `{name: ..., normalize: true,
      dtype: bfloat16, batch_tokens: 8192, device: cpu, revision: main}` gives a `RewardModel`.
      The model is loaded to `device`, by default in the dtype of its files. With `normalize`, the
      result is a `RunningNormReward`. Built-in names take precedence over folders.
    - A sequence classification module gives a `RewardModel` in the module's dtype. The module is
      moved only if its type of device is not that of `device`.
    - An object with `get_rewards(prompts, completions)` gives a function that calls this method.
    - Any other `spec` is passed to `load_reward`.

    `processing_class` is the reward model's tokenizer; None loads the tokenizer that was saved
    with the model. Raises ValueError if `spec` names no reward, or if the reward cannot be
    loaded.
    """
    options = _read_options(spec)
    is_module = isinstance(spec, nn.Module) and not hasattr(spec, "get_rewards")
    if options is None and not is_module:
        if processing_class is not None:
            warnings.warn(
                f"the tokenizer in reward_processing_classes for {spec!r:.60} has no effect: that "
                "is no reward model",
                stacklevel=2,
            )
        return _from_object(spec) if hasattr(spec, "get_rewards") else load_reward(spec)
    revision = (options or {}).get("revision", "main")
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    if options is not None:
        model = _load_model(options, source)
        device = options.get("device", device)
    elif hasattr(spec, "config"):
        model, options = spec, {}
    else:
        raise ValueError(
            f"the reward {type(spec).__name__} is a module without a configuration; it must be a "
            "sequence classification model of transformers, or a function that calls it"
        )
    tokenizer = processing_class or _load_tokenizer(model, options.get("name"), source)
    reward = RewardModel(
        model,
        tokenizer,
        batch_tokens=options.get("batch_tokens", BATCH_TOKENS),
        chat_template_kwargs=chat_template_kwargs,
    )
    if model.device.type != torch.device(device).type:
        nn.Module.to(model, device)
    return RunningNormReward(reward) if options.get("normalize") else reward


def _from_object(judge: Any) -> Callable[..., Any]:
    def reward(prompts: list[Text], completions: list[Text]) -> Any:
        return judge.get_rewards(prompts, completions)

    reward.__name__ = getattr(judge, "__name__", type(judge).__name__)
    return reward


def _read_options(spec: Any) -> dict[str, Any] | None:
    """The options of the model that `spec` names, with `name`; None if it names no reward model."""
    if isinstance(spec, str):
        return {"name": spec} if is_reward_model(spec) else None
    if not isinstance(spec, Mapping) or not is_reward_model(spec.get("name")):
        return None
    options = {str(key): value for key, value in spec.items()}
    name = options["name"]
    unknown = [key for key in options if key not in ("name", *OPTIONS)]
    if unknown:
        raise ValueError(
            f"the reward model {name} has no option {unknown[0]} (options: {', '.join(OPTIONS)})"
        )
    if options.get("dtype", "auto") not in DTYPES:
        raise ValueError(
            f"dtype of the reward model {name} is {options['dtype']!r}; it must be one of "
            f"{', '.join(DTYPES)}"
        )
    try:
        torch.device(options.get("device", "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device of the reward model {name}: {error}") from error
    for switch in ("allow_missing_weights", "normalize"):
        if not isinstance(options.get(switch, False), bool):
            raise ValueError(
                f"{switch} of the reward model {name} is {options[switch]!r}; it must be true or "
                "false"
            )
    return options


def _load_model(options: Mapping[str, Any], source: dict[str, Any]) -> Any:
    name = options["name"]
    check_folder(name)
    with reading(f"the reward model {name}", "reward"):
        config = transformers.AutoConfig.from_pretrained(name, **source)
    if config.num_labels != 1:
        raise ValueError(_describe_labels(name, config.num_labels))
    check_sizes(config, name, "reward model")
    auto_class = transformers.AutoModelForSequenceClassification
    dtype = options.get("dtype", "auto")
    return load_pretrained(
        auto_class,
        name,
        "reward model",
        knob=f"reward: {{name: {name}, allow_missing_weights: true}}",
        allow_missing=options.get("allow_missing_weights", False),
        dtype=dtype,
        **source,
    )


def _load_tokenizer(model: Any, name: Any, source: dict[str, Any]) -> PreTrainedTokenizerBase:
    name = name or getattr(model.config, "_name_or_path", "")
    try:
        if not name:
            raise OSError("it has no name to look for one under")
        return transformers.AutoTokenizer.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the reward model {name or type(model).__name__} has no tokenizer that can be loaded; "
            f"give one (reward_processing_classes): {error}"
        ) from error


def _describe_labels(name: str, count: int) -> str:
    return (
        f"the reward model {name} has {count} labels; a reward is one number, so it needs exactly "
        "1 (num_labels of its configuration)"
    )


def _batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Row indices, longest first, in batches of at most `budget` padded tokens, or of one row."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
