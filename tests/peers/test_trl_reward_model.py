"""TRL's RLOOTrainer and ours score the same texts with the same reward models."""

import pytest
import transformers
from datasets import Dataset

from rloo.config.config import RLOOConfig
from rloo.trainer.build import make_rewards
from support.models import CPU, make_model
from support.reward_models import (
    COMPLETIONS,
    PROMPTS,
    joined,
    make_reward_model,
    make_reward_tokenizer,
)
from support.text import make_tokenizer

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]


def theirs(tmp_path, rewards, tokenizers, prompts, completions):
    from trl import RLOOConfig as TRLConfig
    from trl import RLOOTrainer as TRLTrainer

    arguments = TRLConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=2,
        num_generations=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        beta=0.0,
        reward_weights=[2.0, 0.5],
        chat_template_kwargs={"mood": "w40"},
    )
    trainer = TRLTrainer(
        model=make_model("qwen3"),
        reward_funcs=rewards,
        reward_processing_classes=tokenizers,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w1", "w2"]}),
        processing_class=make_tokenizer(),
    )
    rows = [{"prompt": prompt} for prompt in prompts]
    scores = trainer._calculate_rewards(rows, prompts, completions, [[1]] * len(prompts))
    return trainer.reward_func_names, scores.T.tolist()


@pytest.mark.parametrize("pad", ["[PAD]", None])
@pytest.mark.parametrize("conversational", [False, True])
def test_scores_and_names_are_trls(tmp_path, conversational, pad):
    prompts, completions = PROMPTS, COMPLETIONS
    if conversational:
        prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
        completions = [[{"role": "assistant", "content": c.strip()}] for c in COMPLETIONS]
    folder = tmp_path / "tiny-rm"
    make_reward_model().save_pretrained(folder)
    make_reward_tokenizer(pad_token=pad).save_pretrained(folder)
    make_reward_model(seed=6).save_pretrained(tmp_path / "other")

    def load_other():
        kind = transformers.AutoModelForSequenceClassification
        return kind.from_pretrained(tmp_path / "other")

    def tokenizers():
        return [None, make_reward_tokenizer(pad_token=pad)]

    names, expected = theirs(
        tmp_path, [str(folder), load_other()], tokenizers(), prompts, completions
    )
    config = RLOOConfig(chat_template_kwargs={"mood": "w40"}, reward_weights=[2.0, 0.5])
    ours = make_rewards([str(folder), load_other()], config, tokenizers(), device=CPU)
    scores = ours.score(prompts, completions, [[1]] * len(joined()), {}, None)
    assert ours.names == names == ["tiny-rm", "other"]
    for name, values in zip(names, expected, strict=True):
        assert scores.by_function[name] == pytest.approx(values, abs=1e-5)
