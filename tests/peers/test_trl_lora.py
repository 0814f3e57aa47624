"""TRL's own RLOOTrainer and ours training the same adapter on the same completions."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from rloo.config.config import RLOOConfig
from rloo.model.lora import add_adapter
from support.async_trl import PROMPTS, K, judge, make_rollout
from support.models import make_model
from support.text import make_tokenizer

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def trained(model) -> dict[str, torch.nn.Parameter]:
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {name.removeprefix("base_model.model."): p for name, p in names.items()}


def push(model, seed: int, scale: float = 0.1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(trained(model).items()):
            parameter.copy_(torch.randn_like(parameter) * scale)


def theirs(tmp_path, rollout, config, started):
    from trl import RLOOConfig as TRLConfig
    from trl import RLOOTrainer as TRLTrainer

    prompts, completions, rewards = rollout
    folder = str(tmp_path / "model")
    make_model("qwen3").save_pretrained(folder)
    arguments = TRLConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=PROMPTS * K,
        num_generations=K,
        max_completion_length=16,
        bf16=False,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        disable_dropout=True,
        beta=0.05,
    )
    trainer = TRLTrainer(
        model=started if started is not None else make_model("qwen3"),
        peft_config=config,
        reward_funcs=lambda completions, **_: rewards,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * PROMPTS}),
        processing_class=make_tokenizer(),
    )
    assert trainer.ref_model is None
    push(trainer.model, seed=2)
    trainer._generate = lambda _: (prompts, completions, ["text"] * len(completions))
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * (PROMPTS * K))
    push(trainer.model, seed=3)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in trained(trainer.model).items()}
    return inputs["advantages"], loss.item(), gradients


def ours(rollout, model, packing):
    def change(policy, seed):
        push(policy.model, seed=seed)

    return judge(model, rollout, change, packing=packing, beta=0.05)


def started_adapter() -> PeftModel:
    """An adapter with an effect: the reference is a frozen copy of it."""
    model = get_peft_model(make_model("qwen3"), LoraConfig(**LORA))
    push(model, seed=1)
    return model


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("start", ["new", "dora", "going on"])
def test_advantages_loss_and_every_gradient_equal_trl(tmp_path, start, packing):
    rollout = make_rollout(missing=False)
    going_on = start == "going on"
    lora = None if going_on else LoraConfig(**LORA, use_dora=start == "dora")
    started = started_adapter() if going_on else None
    their_advantages, their_loss, their_gradients = theirs(tmp_path, rollout, lora, started)
    model = started_adapter() if going_on else add_adapter(make_model("qwen3"), lora)
    advantages, loss, gradients = ours(rollout, model, packing)
    assert advantages.abs().max() > 0.1
    assert (advantages - their_advantages).abs().max() < 1e-5 * max(1, advantages.abs().max())
    # The loss is a difference of much larger sums.
    assert math.isclose(loss, their_loss, rel_tol=1e-5, abs_tol=5e-6)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        expected = their_gradients[name]
        assert expected.norm() > 0, name
        assert (gradient - expected).norm() <= 2e-5 * expected.norm(), name


def test_the_options_make_the_adapter_that_trl_makes_of_its_own():
    from trl import ModelConfig, get_peft_config

    from rloo.model.lora import lora_config

    for options in (
        {},
        {"lora_r": 4, "lora_alpha": 2, "lora_dropout": 0.0, "use_rslora": True, "use_dora": True},
        {"lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["lm_head"]},
        {"lora_target_parameters": ["experts.down_proj"]},
    ):
        theirs = get_peft_config(ModelConfig(use_peft=True, **options))
        assert lora_config(RLOOConfig(use_peft=True, **options)) == theirs
