"""Writes a model in the hub's format, with one layer in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rloo.distributed import World
from rloo.distributed.sharded_tensor import full_tensor, is_sharded, to_local
from rloo.model.lora import LoRAAdapter
from rloo.model.micro_batch import make_sample
from rloo.model.model_loading import num_embedded

if TYPE_CHECKING:
    from rloo.model.policy import Policy

# Matches the layer's name at the start of a parameter's name.
_LAYER = re.compile(r"(.*?\.\d+)\.")

Named = Iterable[tuple[str, Tensor]]


class LayerSink(Protocol):
    """Receives exported layers in the main process. `complete` is whether every tensor is written,
    so that the folder needs a model's configuration and tokenizer. A sink that `rounds` receives
    float32 tensors of the host as they are, and rounds them to bfloat16."""

    complete: bool
    rounds: bool

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Receive the tensors of a layer, under the hub's names."""

    def finish(self) -> None:
        """Called after the last layer."""


class CompleteFiles:
    """Writes every layer into `folder` as safetensors: one file per layer and an index."""

    complete: bool = True
    rounds: bool = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, str] = {}
        self._files = self._total = 0

    def save(self, tensors: dict[str, Tensor]) -> None:
        """See `LayerSink`."""
        file = f"model-{self._files:05d}.safetensors"
        save_file(tensors, self._folder / file, metadata={"format": "pt"})
        self._files += 1
        self._places |= dict.fromkeys(tensors, file)
        self._total += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> None:
        """See `LayerSink`."""
        index = {"metadata": {"total_size": self._total}, "weight_map": self._places}
        (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))


def export_weights(
    sink: LayerSink | None,
    model: PreTrainedModel,
    named: Named,
    dtype: torch.dtype,
    *,
    untie: bool = False,
) -> None:
    """Pass the weights `named` (names as in `model`) to `sink`, layer by layer. Names and shapes
    are those of the hub. Floating-point weights are cast to `dtype`. With sharded weights this is a
    collective. A rank that passes None as `sink` writes nothing. Each rank holds one full layer at
    a time. With `untie` a tied matrix is written twice."""
    twins = tied_outputs(model) if untie else {}
    unchanged = {dtype, torch.float32} if sink is not None and sink.rounds else {dtype}
    layers = _layers(named, dtype, unchanged, keep=sink is not None)
    # A for loop's variable would keep one layer in memory while the next is gathered.
    while (tensors := next(layers, None)) is not None:
        if sink is not None:
            tensors |= {twins[name]: t.clone() for name, t in tensors.items() if name in twins}
            sink.save(_as_on_hub(model, tensors))
        del tensors
    if sink is not None:
        sink.finish()


def tied_outputs(model: PreTrainedModel) -> dict[str, str]:
    """Map the name of the input embedding to the name of the output matrix if they are tied.
    Otherwise the map is empty."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
    output = model.get_output_embeddings()
    name = names.get(id(getattr(output, "weight", None)))
    owner = next((n for n, module in model.named_modules() if module is output), None)
    return {name: f"{owner}.weight"} if name and owner and name != f"{owner}.weight" else {}


def _layers(
    named: Named, dtype: torch.dtype, unchanged: Collection[torch.dtype], *, keep: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's full tensors on the host, or empty dicts if `keep` is false. Tensors of
    the host that have a dtype in `unchanged` are not converted. The memory of converted tensors is
    used again for the next layer, since to allocate it takes longer than to convert."""
    current, tensors = None, dict[str, Tensor]()
    memory: dict[str, Tensor] = {}
    for name, tensor in named:
        found = _LAYER.match(name)
        layer = found[1] if found else name
        if layer != current and current is not None:
            yield tensors
            tensors = {}
        current = layer
        whole = full_tensor(tensor)
        if keep:
            wanted = dtype if whole.is_floating_point() else whole.dtype
            if whole.device.type == "cpu" and whole.dtype in (wanted, *unchanged):
                tensors[name] = whole
            else:
                key = name.removeprefix(layer)
                if key not in memory or memory[key].shape != whole.shape:
                    memory[key] = torch.empty(whole.shape, dtype=wanted)
                tensors[name] = memory[key].copy_(whole)
        del whole
    if current is not None:
        yield tensors


def _as_on_hub(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # transformers merges some weights (experts) when it loads them, always within one layer.
    theirs: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


class PolicyExport:
    """Exports a policy to an engine in other processes. The engine's weights have the type `dtype`.
    With `merge`, or if vLLM cannot load the adapter (`why_merged`), an adapter is merged into its
    base and the full model is sent. Otherwise only the adapter is sent, and `adapter_rank` is the
    largest rank of its layers. With `untie` a tied matrix is written twice. Every method but
    `free_cache` is a collective of all ranks."""

    def __init__(
        self, policy: Policy, dtype: torch.dtype, *, merge: bool = False, untie: bool = False
    ) -> None:
        self.world: World = policy.world
        self.tokenizer: PreTrainedTokenizerBase = policy.tokenizer
        self.vocabulary: int = num_embedded(policy.model)
        self._policy = policy
        self.dtype = dtype
        self.untie = untie
        adapter = policy.adapter
        alone = adapter is not None and not merge and why_merged(adapter) is None
        self.adapter_rank: int | None = (
            largest_rank(adapter) if alone and adapter is not None else None
        )

    def write(self, folder: Path | None, sink: LayerSink | None = None) -> None:
        """Write the trained weights into `folder`, in the main process: only the adapter, or a full
        model with its configuration and tokenizer. A full model's layers go to `sink` (None:
        `CompleteFiles`). Other ranks pass None and write nothing."""
        policy = self._policy
        if self.adapter_rank is None:
            self._write_model(folder, policy.weights(), sink)
            return
        with policy.files.collected():
            if folder is not None:
                policy.files.save_adapter(folder)

    def write_base(self, folder: Path | None) -> None:
        """Write the adapter's base model into `folder`, in the main process (see `write`)."""
        assert self._policy.adapter is not None
        self._write_model(folder, self._policy.adapter.base_weights())

    def _write_model(
        self, folder: Path | None, named: Named, sink: LayerSink | None = None
    ) -> None:
        if folder is not None and sink is None:
            sink = CompleteFiles(folder)
        with self._policy.in_step(forward=False):
            export_weights(sink, self._policy.model, named, self.dtype, untie=self.untie)
        if folder is not None and sink is not None and sink.complete:
            self._policy.files.save_description(folder)

    def free_cache(self) -> None:
        """Return the GPU memory that torch has cached to the GPU, in this process."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """The log-probs of a completion's tokens at temperature 1."""
        blank = make_sample((0, 0), len(prompt), len(completion))
        sample = replace(blank, prompt_ids=list(prompt), token_ids=list(completion))
        with self._policy.in_step():
            found: list[float] = self._policy.score(self._policy.batch([sample]), 1.0).tolist()
        return found

    @contextmanager
    def perturbed(self, scale: float) -> Iterator[None]:
        """Within this context, noise with the standard deviation `scale` is added to the adapter's
        weights. The log-probs then show whether an engine applies the adapter."""
        assert self._policy.adapter is not None
        # The raw data is changed: an in-place change of the parameters would count as a new
        # version.
        raw = [to_local(p) if is_sharded(p) else p.data for p in self._policy.parameters]
        before = [tensor.clone() for tensor in raw]
        generator = torch.Generator(raw[0].device).manual_seed(0)
        for tensor in raw:
            noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            tensor += scale * noise
        try:
            yield
        finally:
            for tensor, old in zip(raw, before, strict=True):
                tensor.copy_(old)


def largest_rank(adapter: LoRAAdapter) -> int:
    """The largest rank of an adapter's layers."""
    config = adapter.config
    return max([config.r, *(config.rank_pattern or {}).values()])


def why_merged(adapter: LoRAAdapter) -> str | None:
    """The adapter's setting that prevents vLLM from loading the adapter unmerged. None if vLLM can
    load it."""
    config = adapter.config
    reasons = {
        "use_dora": config.use_dora,
        "lora_modules_to_save": config.modules_to_save,
        "lora_target_parameters": getattr(config, "target_parameters", None),
        "alpha_pattern": config.alpha_pattern,
    }
    return next((name for name, given in reasons.items() if given), None)
