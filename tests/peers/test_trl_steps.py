"""TRL's own RLOOTrainer and ours through whole runs on the same completions, step by step."""

import pytest
from datasets import Dataset

from support.async_trl import PROMPTS, K, make_rollout
from support.models import make_model
from support.text import make_tokenizer
from support.training import make_trainer

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

ROWS = Dataset.from_dict({"prompt": [f"w{n}" for n in range(PROMPTS)]})
OPTIONS = {
    "num_generations": K,
    "max_completion_length": 16,
    "max_steps": 5,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "logging_steps": 1,
    "shuffle_dataset": False,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
}
N = PROMPTS * K
GRADED = make_rollout()[2]
FLAT, MISSING = [1.0] * N, [None] * N
ONE_GROUP = [*GRADED[:K], *FLAT[K:]]
# What the steps' completions are worth; the second and the third step have no signal.
STEPS = [ONE_GROUP, FLAT, MISSING, [None, *ONE_GROUP[1:]], [*GRADED[:-1], None]]


def theirs(tmp_path, completions, options):
    from trl import RLOOConfig, RLOOTrainer

    folder, rewards = str(tmp_path / "model"), iter(STEPS)
    make_model("qwen3").save_pretrained(folder)  # the reference is loaded from there
    trainer = RLOOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: next(rewards),
        args=RLOOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=N,
            model_init_kwargs={"dtype": "float32"},
            **options,
        ),
        train_dataset=ROWS,
        processing_class=make_tokenizer(),
    )
    tokens = [[4 + n] for n in range(PROMPTS) for _ in range(K)]
    trainer._generate = lambda _: (tokens, completions, ["text"] * N)
    trainer.train()
    return trainer


def ours(tmp_path, completions, options):
    from rloo import RLOOConfig
    from rloo.types import Completion

    rewards = iter(STEPS)
    trainer = make_trainer(
        RLOOConfig(str(tmp_path / "ours"), preset="trl", num_prompts=PROMPTS, **options),
        lambda completions, **_: next(rewards),
        rows=ROWS,
    )

    def completion(ids):
        finish = "stop" if ids[-1] == 2 else "length"
        return Completion(ids, finish, [-1.0] * len(ids), [-1.0] * len(ids))

    groups = [[completion(ids) for ids in completions[n : n + K]] for n in range(0, N, K)]
    trainer.engine.sample = lambda *_: groups
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"beta": 0.0, "optim": "sgd"},
        {"beta": 0.3},
        {"beta": 0.3, "mask_truncated_completions": True},
        {"beta": 0.0, "mask_truncated_completions": True},
    ],
    ids=str,
)
def test_weights_and_metrics_equal_trl_s_in_every_step_also_without_signal_or_score(
    tmp_path, options
):
    _, completions, _ = make_rollout(cut=True)
    both = [side(tmp_path, completions, {**OPTIONS, **options}) for side in (theirs, ours)]
    first, second = ([row for row in t.state.log_history if "loss" in row] for t in both)
    names = ["grad_norm", "learning_rate", "entropy", "clip_ratio/region_mean"]
    names += ["kl"] if options["beta"] else []
    if "mask_truncated_completions" not in options:  # there TRL's loss has a constant for them
        names.append("loss")
    assert len(first) == len(second) == len(STEPS)
    for number, (expected, found) in enumerate(zip(first, second, strict=True), start=1):
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=2e-5), (number, name)
    weights = dict(both[1].model.named_parameters())
    start = dict(make_model("qwen3").named_parameters())
    # Adam moves a weight whose gradient is rounding alone as far as any other one.
    within = 1e-3 if "optim" in options else 1e-2
    for name, expected in both[0].model.named_parameters():
        moved = (expected - start[name]).norm()
        assert moved > 0, name
        assert (weights[name] - expected).norm() <= within * moved, name
