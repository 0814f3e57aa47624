"""The commands that use the result of a run: to talk to the model, to serve it, and to convert it
to GGUF."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from tokenizers.models import WordLevel

from rloo.config.vllm_options import served_rank
from rloo.data.tasks import resolve_model
from rloo.model.export import largest_rank, why_merged
from rloo.model.policy import Policy

# The script is in llama.cpp's repository.
GGUF = "python convert_hf_to_gguf.py {folder} --outfile model.gguf"


def commands(policy: Policy, folder: str, base: str, *, name: str) -> Mapping[str, str]:
    """The commands by purpose, for the result in `folder`: a model, or an adapter of the model
    `base`, which is served as `name`. An adapter that vLLM cannot load is merged first, and so is
    any adapter for `transformers serve`, which reads whole models (5.24.0). `transformers chat`
    needs a chat template. llama.cpp knows no tokenizer with one token for each word, so there is no
    GGUF with such a tokenizer."""
    quoted = shlex.quote(folder)
    whole, serving, merging = quoted, f"vllm serve {quoted}", ""
    if policy.adapter is not None:
        merging, whole = f"rloo merge {quoted} merged && ", "merged"
        serving = f"{merging}vllm serve merged"
        if why_merged(policy.adapter) is None:
            rank = served_rank(largest_rank(policy.adapter))
            serving = (
                f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {rank} "
                f"--lora-modules {shlex.quote(f'{name}={folder}')}"
            )
    found = {"Talk to it": f"rloo chat {quoted}", "Serve it": serving}
    if getattr(policy.tokenizer, "chat_template", None):
        found["Serve it with transformers"] = f"{merging}transformers serve {whole}"
        found["Talk to that server"] = f"transformers chat {whole}"
    backend = getattr(policy.tokenizer, "backend_tokenizer", None)
    if not isinstance(getattr(backend, "model", None), WordLevel):
        found["Make a GGUF of it"] = merging + GGUF.format(folder=whole)
    return found


def after_lines(policy: Policy, folder: str) -> list[str]:
    """The last lines of a run, about its result in `folder`."""
    base = policy.config.model or policy.model.name_or_path
    name = Path(folder).absolute().name
    uses = commands(policy, folder, resolve_model(str(base)), name=name)
    return [f"{purpose}: {command}" for purpose, command in uses.items()]
