"""Memory of training for several choices of options: predicted by the code of `rloo plan`, and
measured.

`python -m benchmarks.memory` prints the table of docs/memory.md. With `--ppo` it prints the table
that compares RLOO with PPO, whose critic has the same size. Measured is the memory allocated
according to torch's profiler (on CUDA according to the allocator), in addition to the memory before
the model was built.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rloo import RLOOConfig
from rloo.distributed import make_world
from rloo.model.forward import completion_outputs
from rloo.model.lora import add_adapter, lora_config
from rloo.model.memory_estimate import (
    Mark,
    count_tokens,
    make_samples,
    phase_peaks,
    predicted_peak_bytes,
    step_bytes,
)
from rloo.model.model_loading import load_model
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.trainer.build import make_engine
from rloo.types import Sample

LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
FOUR_BITS = {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True}
COPY = {"engine_kwargs": {"copy_weights": True}, "rollout_dtype": "bfloat16"}
KEEP, RECOMPUTE = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}

# The choices. The base is float32 weights, float32 computation (bf16 false) and beta 0.
CHOICES: dict[str, dict[str, Any]] = {
    "full": KEEP,
    "full, reference": {**KEEP, "beta": 0.05},
    "full, checkpointing": RECOMPUTE,
    "full, checkpointing, reference": {**RECOMPUTE, "beta": 0.05},
    "full, 8-bit AdamW": {**RECOMPUTE, "optim": "adamw_8bit"},
    "full, Adafactor": {**RECOMPUTE, "optim": "adafactor"},
    "full, bfloat16 engine": {**RECOMPUTE, **COPY},
    "full, no engine copy": {**RECOMPUTE, "engine_kwargs": {"copy_weights": False}},
    "LoRA": {**LORA, **KEEP},
    "LoRA, reference": {**LORA, **KEEP, "beta": 0.05},
    "LoRA, checkpointing": {**LORA, **RECOMPUTE},
    "LoRA, checkpointing, reference": {**LORA, **RECOMPUTE, "beta": 0.05},
    "LoRA, no engine copy": {**LORA, **RECOMPUTE, "engine_kwargs": {"copy_weights": False}},
    "LoRA, bfloat16 engine": {**LORA, **RECOMPUTE, **COPY},
    "QLoRA, 4 bits": {**FOUR_BITS, **RECOMPUTE},
    "QLoRA, 4 bits, reference": {**FOUR_BITS, **RECOMPUTE, "beta": 0.05},
    "QLoRA, 4 bits, bfloat16 engine": {**FOUR_BITS, **RECOMPUTE, **COPY},
    "QLoRA, 8 bits": {**LORA, **RECOMPUTE, "load_in_8bit": True},
}

PPO_CHOICES = (
    "full, reference",
    "full, checkpointing, reference",
    "LoRA, reference",
    "LoRA, checkpointing, reference",
    "QLoRA, 4 bits, reference",
)


@dataclass(frozen=True)
class Shape:
    """A model of Qwen3's architecture, and micro-batches of groups of completions."""

    hidden: int = 512
    layers: int = 8
    vocabulary: int = 4096
    prompt: int = 64
    completion: int = 192
    group: int = 4

    def save(self, folder: Path) -> None:
        config = transformers.Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            head_dim=64,
            eos_token_id=2,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def samples(self) -> list[Sample]:
        return make_samples(self.prompt, self.completion, self.group)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.hidden}, {self.vocabulary:,} words; a "
            f"micro-batch of {self.group} completions of {self.completion} tokens after a prompt "
            f"of {self.prompt}"
        )


class _Tokenizer:
    """The attributes of a tokenizer that a Policy needs."""

    pad_token_id, eos_token_id = 0, 2


LASTING = ("weights", "gradients", "optimizer", "reference", "engine")


def make_policy(folder: Path, options: dict[str, Any], *, critic: bool = False) -> Policy:
    """The policy that a run with these options trains; or a critic of the same size, whose head has
    one output and whose parameters are all trained."""
    settings = {"bf16": False, "beta": 0.0, "learning_rate": 1e-5, **options}
    if critic:
        settings |= {"beta": 0.0}
    if critic and settings.get("use_peft"):
        settings |= {"lora_modules_to_save": ["lm_head"]}
    config = RLOOConfig(model=str(folder), **settings)
    world = make_world(use_cpu=config.use_cpu)
    tokenizer: Any = _Tokenizer()
    model: Any = load_model(config, tokenizer, device=world.device)[0]
    if critic:
        model.lm_head = nn.Linear(model.config.hidden_size, 1, bias=False)
    if config.use_peft:
        model = add_adapter(model, lora_config(config))
    return Policy(model, tokenizer, config, world=world, num_training_steps=10)


def policy_loss(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """The loss of a micro-batch. The reference's log-probs are freed again."""
    batch = policy.batch(samples)
    logprobs = policy.logprobs(batch).logprobs
    if policy.config.beta != 0:
        policy.reference_logprobs(batch)
    return -(logprobs - logprobs.detach()).exp().mean()


def value_loss(critic: Policy, samples: Sequence[Sample]) -> Tensor:
    """PPO's clipped squared error of the values of the same tokens (Schulman et al. 2017, as in
    TRL and verl)."""
    batch = critic.batch(samples)
    outputs = critic.model.base_model(**batch.inputs, use_cache=False)
    values = critic.scorer.head(completion_outputs(outputs.last_hidden_state, batch))[:, 0].float()
    before, returns = values.detach(), torch.ones_like(values)
    clipped = before + (values - before).clamp(-0.2, 0.2)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()


def predict(folder: Path, shape: Shape, options: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Parameters, tokens of the micro-batch, and the parts that `rloo plan` shows, in bytes."""
    from rloo.addons.planner.plan import lasting_bytes

    gc.collect()
    policy, samples = make_policy(folder, options), shape.samples()
    parts = lasting_bytes(policy, make_engine(policy, policy.config))
    parts["micro-batch"] = predicted_peak_bytes(policy, samples)
    parts["step"] = step_bytes(policy)
    base = sum(p.numel() for p in policy.parameters) if policy.adapter else 0
    return count_parameters(policy.model) - base, count_tokens(policy, samples), parts


def measure(
    folder: Path, shape: Shape, options: dict[str, Any], *, critic: str = "none"
) -> dict[str, int]:
    """Peaks by phase of a training step for which the optimizer's state exists. With critic
    `joint`, both losses have one backward. With `apart`, the critic is updated after the policy."""
    gc.collect()  # else a later collection would lower the measured peaks
    samples, names = shape.samples(), []

    def train(mark: Mark) -> None:
        def phase(name: str) -> None:
            names.append(name)
            mark()

        policy = make_policy(folder, options)
        other = None if critic == "none" else make_policy(folder, options, critic=True)
        engine = make_engine(policy, policy.config)
        gc.collect()
        phase("building")
        for _ in range(2):
            engine.load(policy.weights, policy.version)
            phase("loading")
            for name in _updates(policy, other, samples, joint=critic == "joint"):
                phase(name)

    peaks = phase_peaks(make_world(use_cpu=RLOOConfig(**options).use_cpu).device, train)
    second = len(names) - names[::-1].index("loading")
    found: dict[str, int] = {}
    for name, peak in zip(names[second:], peaks[second:], strict=False):
        found[name] = max(peak, found.get(name, 0))
    return found


def _updates(
    policy: Policy, critic: Policy | None, samples: Sequence[Sample], *, joint: bool
) -> Iterator[str]:
    """An optimizer step of two micro-batches (the second accumulates gradients), by phases."""
    for _ in range(2):
        loss = policy_loss(policy, samples)
        if critic is not None and joint:
            loss = loss + value_loss(critic, samples)
        policy.stepper.backward(loss)
        del loss
        yield "micro-batch"
    policy.stepper.step()
    if critic is not None:
        if not joint:
            for _ in range(2):
                critic.stepper.backward(value_loss(critic, samples))
                yield "micro-batch"
        critic.stepper.step()
    yield "step"


def table(folder: Path, shape: Shape, options: dict[str, Any]) -> list[str]:
    """The rows of docs/memory.md."""
    rows = [
        "| | weights | gradients | optimizer | reference | engine | sum | bytes per token "
        "| while stepping | predicted | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, choice in CHOICES.items():
        parameters, tokens, parts = predict(folder, shape, choice | options)
        measured = measure(folder, shape, choice | options)
        lasting = sum(parts[part] for part in LASTING)
        cells = [f"{parts[part] / parameters:.2f}" for part in LASTING]
        cells.append(f"{lasting / parameters:.2f}")
        cells.append(f"{parts['micro-batch'] / tokens:,.0f}")
        cells.append(f"{parts['step'] / parameters:.2f}")
        predicted = lasting + max(parts["micro-batch"], parts["step"])
        peak = max(measured.values())
        cells.append(f"{predicted / 1e6:,.0f}")
        cells.append(f"{peak / 1e6:,.0f} ({peak / predicted - 1:+.1%})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def ppo_table(folder: Path, shape: Shape, options: dict[str, Any]) -> list[str]:
    """A table of RLOO and PPO with a critic of the same size: the peaks, and the saving of RLOO."""
    rows = [
        "| | RLOO | PPO, joint backward | saved | PPO, separate backwards | saved |",
        "|---|---|---|---|---|---|",
    ]
    for name in PPO_CHOICES:
        choice = CHOICES[name] | options
        peaks = {
            kind: max(measure(folder, shape, choice, critic=kind).values())
            for kind in ("none", "joint", "apart")
        }
        cells = [f"{peaks['none'] / 1e6:,.0f}"]
        for kind in ("joint", "apart"):
            saved = 1 - peaks["none"] / peaks[kind]
            cells += [f"{peaks[kind] / 1e6:,.0f}", f"{saved:.0%}"]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Print one of the two tables, in markdown, the sizes in MB."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ppo", action="store_true", help="compare with a critic of the same size")
    parser.add_argument("--use_cpu", action="store_true", help="also where there is a GPU")
    arguments = parser.parse_args()
    shape, make = Shape(), ppo_table if arguments.ppo else table
    with tempfile.TemporaryDirectory() as folder:
        shape.save(Path(folder))
        rows = make(Path(folder), shape, {"use_cpu": arguments.use_cpu})
    print(f"\n{shape}\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
