"""Checks before the first step that a server can serve the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from rloo.engines.vllm.client import ROUTE, TOKENS_ROUTE, ServerError, VLLMClient
from rloo.engines.vllm.nccl import TRANSFER_ROUTE
from rloo.engines.vllm.server_plugin.rloo_weights import EXTENSION
from rloo.engines.vllm.server_process import HERE, KEY, MAKE_KEY, ServerConfig

_SECONDS = 30.0
_PHASE = "examining"
_TEXT = 'Ein Zebra zählt: 1, 22, 333 - 4,444 = ?\n\n\tif x: "réponse" 東京 🙂'


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties that a server reports: the maximum tokens of prompt plus completion, the dtype,
    the number of completions that are computed at once, the sampling route, and whether the server
    `receives` weights over NCCL and is `extended` to load deltas."""

    max_model_length: int
    dtype: str
    sequences: int
    route: str
    receives: bool = False
    extended: bool = False


async def examine(
    client: VLLMClient, wanted: ServerConfig, tokenizer: PreTrainedTokenizerBase, *, needed: int
) -> ServerInfo:
    """Check a server and return its `ServerInfo`. Raises ValueError for another program, missing
    routes for weights, a wrong kind of log-probs, a wrong dtype or tokenizer, a context too short
    for `needed` tokens, or missing support of adapters. The error shows the command line of a
    correct server, with its variables. Raises ServerError if the server does not answer."""

    def refuse(fact: str) -> ValueError:
        place = urlsplit(client.url)
        line = wanted.line(place.hostname or HERE, place.port or 8000)
        return ValueError(
            f"{client.url} {fact}; start it with: {line} ({_key_note()}; rloo vllm-serve prints "
            "and runs this line with the PYTHONPATH of its machine; vllm_server_base_url)"
        )

    paths = await _require_routes(client, wanted, refuse)
    route = TOKENS_ROUTE if TOKENS_ROUTE in paths else ROUTE
    described = await client.get("/server_info?config_format=json", phase=_PHASE, seconds=_SECONDS)
    try:
        config = described["vllm_config"]
        model, lora = config["model_config"], config.get("lora_config")
        dtype = str(model["dtype"]).removeprefix("torch.")
        sequences = int(config["scheduler_config"]["max_num_seqs"])
        limit = int(model["max_model_len"])
        extension = (config.get("parallel_config") or {}).get("worker_extension_cls")
        extended = extension == EXTENSION and not lora
        facts = ServerInfo(limit, dtype, sequences, route, TRANSFER_ROUTE in paths, extended)
        on_cpu = config["device_config"]["device"] == "cpu"
        untied = (model.get("hf_overrides") or {}).get("tie_word_embeddings") is False
        mode = str(model["logprobs_mode"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refuse(f"does not describe itself as vLLM does ({error!r})") from error
    if mode != "processed_logprobs":
        raise refuse(f"returns {mode}, and what is trained needs those of the sampled distribution")
    if facts.dtype != wanted.dtype:
        raise refuse(
            f"computes in {facts.dtype}, and the trainer in {wanted.dtype} (rollout_dtype)"
        )
    if wanted.sleeps and not model.get("enable_sleep_mode"):
        raise refuse("cannot sleep, and is to do so while nothing is sampled")
    if facts.max_model_length < needed:
        raise refuse(
            f"has a context of {facts.max_model_length} tokens, and prompt and completion need "
            f"{needed} (vllm_max_model_length, max_prompt_length, max_completion_length)"
        )
    if on_cpu and wanted.tied and not untied:
        raise refuse(
            "computes on a CPU, where vLLM packs a tied output matrix once, and keeps it when "
            "others are loaded"
        )
    if wanted.lora_rank is not None:
        rank = lora.get("max_lora_rank") if isinstance(lora, Mapping) else None
        if rank is None:
            raise refuse("serves no adapters, and one is trained")
        if int(rank) < wanted.lora_rank:
            raise refuse(f"serves adapters up to rank {rank}, and lora_r is {wanted.lora_rank}")
    await _require_tokenizer(client, tokenizer, refuse)
    return facts


def _key_note() -> str:
    """A clause that says how the user's server gets the key of the run. The key is not shown."""
    if os.environ.get(KEY):
        return f"the server needs the run's key in {KEY}"
    return f"first {MAKE_KEY}, the same key for the server and for the run"


async def _require_routes(client: VLLMClient, wanted: ServerConfig, refuse: Any) -> set[str]:
    try:
        found = await client.get("/openapi.json", phase=_PHASE, seconds=_SECONDS)
    except ServerError as error:
        if error.status is None:
            raise
        found = None
    paths: Any = found.get("paths") if isinstance(found, Mapping) else None
    if not isinstance(paths, Mapping):
        raise refuse("is no server of vLLM: it has no /openapi.json")
    if "/init_communicator/" in paths:
        raise refuse(
            "is TRL's server (trl vllm-serve) of an earlier version, which speaks another protocol "
            "than vLLM's"
        )
    if ROUTE not in paths:
        raise refuse(f"has no route {ROUTE}: it is no server of vLLM")
    needs = ("/collective_rpc", "/pause", "/resume", "/weight_info", "/server_info")
    if missing := [path for path in needs if path not in paths]:
        raise refuse(f"has no route {missing[0]}, without which no weights can be loaded")
    if wanted.lora_rank is not None and "/v1/load_lora_adapter" not in paths:
        raise refuse("has no route /v1/load_lora_adapter, and an adapter is trained")
    if wanted.sleeps and "/sleep" not in paths:
        raise refuse("has no route /sleep")
    if wanted.tells and TOKENS_ROUTE not in paths:
        raise refuse(
            f"has no route {TOKENS_ROUTE}, which alone tells whose weights sampled each token, and "
            "async_kwargs.partial_rollouts is true"
        )
    return set(paths)


async def _require_tokenizer(
    client: VLLMClient, tokenizer: PreTrainedTokenizerBase, refuse: Any
) -> None:
    """Compare tokenizers: only token ids are sent, so nothing else would detect a difference."""
    body = {"prompt": _TEXT, "add_special_tokens": False}
    try:
        found = await client.post("/tokenize", body, phase=_PHASE, seconds=_SECONDS)
    except ServerError as error:
        if error.is_refusal:  # a server only for token ids has no tokenizer
            return
        raise
    theirs = found.get("tokens") if isinstance(found, Mapping) else None
    ours: Sequence[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if theirs != list(ours):
        raise refuse(
            f"has another tokenizer: it reads {str(theirs)[:80]} where the model's has "
            f"{str(list(ours))[:80]} (model)"
        )
