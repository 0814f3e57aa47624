"""A conversation with a trained model, by transformers' generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from rloo.config.config import RLOOConfig
from rloo.config.file_checks import context_of
from rloo.data.images import tokenizer_of
from rloo.data.tokenization import encode_prompt
from rloo.distributed.world import device_here
from rloo.model.model_loading import load_model, stop_tokens_of
from rloo.model.quantization import quantization_of
from rloo.trainer.build import make_sampling
from rloo.types import Message, Sampling, Text


class Chat:
    """A conversation with the model `config.model`, sampled by the options of `config`. A model
    whose tokenizer has no chat template continues each text alone."""

    def __init__(
        self, config: RLOOConfig, *, system: str | None = None, greedy: bool = False
    ) -> None:
        """Load the model in the dtype of its files, or quantised if the options say so. Raises
        ValueError if it cannot be loaded, and for a `system` message without a chat template."""
        self._config = config
        device = device_here(use_cpu=config.use_cpu)
        how = {"dtype": "auto", **(config.model_init_kwargs or {})}
        loaded, self._processing_class = load_model(
            config.with_values(model_init_kwargs=how), device=device
        )
        # A quantised model is loaded onto its device, and cannot be moved.
        self._model: Any = loaded if quantization_of(config) else loaded.to(device)  # type: ignore[arg-type]
        self._model.eval()
        self._tokenizer = tokenizer_of(self._processing_class)
        if config.chat_template is not None:
            self._processing_class.chat_template = config.chat_template
        self.has_template: bool = self._processing_class.chat_template is not None
        if system is not None and not self.has_template:
            raise ValueError(
                f"the tokenizer of {config.model} has no chat template, and a system message needs "
                "one; leave out --system, or give a template (chat_template)"
            )
        self._system: list[Message] = [] if system is None else [_message("system", system)]
        self._sampling = replace(
            make_sampling(config, stop_tokens_of(self._model, self._tokenizer)), greedy=greedy
        )
        # `generate` would use the model's own settings for all unset options.
        self._model.generation_config = GenerationConfig()
        self.reset()
        torch.manual_seed(config.seed)

    def reset(self) -> None:
        """Forget the conversation, except the system message."""
        self._messages = list(self._system)

    def reply(self, text: str, write: Callable[[str], None]) -> str:
        """Return the model's reply to `text`, and add both to the conversation. Parts of the reply
        are passed to `write` as they are generated. Raises ValueError if the conversation does not
        fit into the context, or the chat template refuses it."""
        messages = [*self._messages, _message("user", text)]
        content: Text = messages if self.has_template else text
        template = self._config.chat_template_kwargs or {}
        ids = encode_prompt(content, self._processing_class, chat_template_kwargs=template)
        room = self._room(len(ids))
        prompt = torch.tensor([ids], device=self._model.device)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._generation_config(room),
                tokenizer=self._tokenizer,  # for stop strings
                streamer=_Streamer(self._tokenizer, write),
            )
        said: str = self._tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        self._messages = [*messages, _message("assistant", said)]
        return said

    def _room(self, used: int) -> int:
        """The number of tokens that a reply to `used` tokens may have."""
        context = context_of(self._model.config)
        if context is not None and used >= context:
            raise ValueError(
                f"the conversation has {used:,} tokens, and the model's context is {context:,}; "
                "start another one (/reset)"
            )
        longest = self._sampling.max_tokens
        return longest if context is None else min(longest, context - used)

    def _generation_config(self, room: int) -> GenerationConfig:
        sampling: Sampling = self._sampling
        drawn = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
            "repetition_penalty": sampling.repetition_penalty,
        }
        pad = self._tokenizer.pad_token_id
        return GenerationConfig(
            max_new_tokens=room,
            do_sample=not sampling.greedy,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=sampling.stop_token_ids[0] if pad is None else pad,
            stop_strings=list(sampling.stop_strings) or None,
            **({} if sampling.greedy else drawn),
        )


class _Streamer(TextStreamer):
    """Passes the text of a reply to a function. transformers' class prints it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on a part of the text."""
        self._write(text)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
