"""verl, OpenRLHF and NeMo-RL: what their runs compute is what the imported options compute."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from rloo.addons.importers import import_config, render_imported
from rloo.addons.importers.openrlhf_names import FORMERLY
from rloo.addons.importers.settings_reader import follow_references
from rloo.cli import main
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.config.presets import BASE, preset_options
from support.settings import flatten
from support.terms import advantages, two_groups

VERL_RLOO = """
algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl
algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.rollout.n=4 data.train_batch_size=64
actor_rollout_ref.actor.ppo_mini_batch_size=16 data.max_response_length=256
actor_rollout_ref.model.path=org/model actor_rollout_ref.actor.optim.lr=2e-6
data.train_files=train.parquet data.val_files=test.parquet data.truncation='left'
trainer.logger=["console","wandb"] trainer.test_freq=5 trainer.save_freq=10
trainer.total_training_steps=30 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.actor.optim.lr_warmup_steps=3
"""
OPENRLHF_RLOO = """
--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --rollout.batch_size 64
--train.batch_size 64 --actor.model_name_or_path org/model --actor.adam.lr 5e-7
--algo.kl.init_coef 0.01 --data.prompt_dataset org/data --data.input_key question
--data.apply_chat_template --rollout.max_new_tokens 256 --data.max_len 1024 --eval.dataset org/eval
--eval.steps 5 --ckpt.save_steps 10 --logger.wandb.key s3cret --ds.zero_stage 3
--reward.remote_url my/reward.py
"""
NEMO = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 20, val_period: 5}
loss_fn: {reference_policy_kl_penalty: 0.01}
policy:
  model_name: org/model
  train_global_batch_size: 16
  max_total_sequence_length: 512
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true}
  megatron_cfg: {enabled: false, optimizer: {lr: 1.0}}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.99]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}
    - {milestones: [50]}
  generation: {max_new_tokens: "${policy.max_total_sequence_length}"}
data:
  max_input_seq_length: "${div:${policy.max_total_sequence_length},2}"
  train: {data_path: train.jsonl, input_key: question}
  validation: {data_path: eval.jsonl}
  default: {env_name: math}
checkpointing: {save_period: 10}
cluster: {gpus_per_node: 8}
"""


def verl(overrides: str = ""):
    return import_config("verl", f"python3 -m verl.trainer.main_ppo {overrides}".replace("\n", " "))


def openrlhf(flags: str = ""):
    line = f"ray job submit -- python3 -m openrlhf.cli.train_ppo_ray {flags}"
    return import_config("openrlhf", line.replace("\n", " "))


def nemo(folder: Path, *overrides: str, text: str = NEMO):
    path = folder / "nemo.yaml"
    path.write_text(text)
    return import_config("nemo_rl", str(path), overrides)


def objective_of(found) -> dict:
    config = RLOOConfig(**found.options)
    return {name: getattr(config, name) for name in preset_options("paper")}


def left(found) -> dict:
    return {item.key: item.reason for item in found.left}


def check_all_keys(system: str, found, keys: set[str]) -> None:
    without = {item.key for item in found.left}
    assert set(found.taken) | without == keys
    assert not set(found.taken) & without
    shown = render_imported(system, found)
    assert all(item.reason and f"\n#     {item.key}: " in shown for item in found.left)
    assert isinstance(yaml.safe_load(shown), dict)


def numbers(found) -> tuple[int, int, int]:
    """Prompts of a rollout, completions of a step, steps of a rollout."""
    batches = batches_of(RLOOConfig(**found.options), 1)
    return batches.prompts_per_rollout, batches.completions_per_step, batches.steps_per_rollout


# -- advantages, by each system's formula ----------------------------------------------------------

REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0, 2.0, -1.0, 0.0]
LENGTHS = [1, 2, 3, 4, 2, 2, 1, 3]


def ours(found) -> list[float]:
    """Advantages of two groups of four completions, one for each token."""
    returns = two_groups(REWARDS, LENGTHS)
    values, sequence_T = advantages(returns, RLOOConfig(**found.options)), returns.sequence_T
    return (values if len(values) == len(sequence_T) else values[sequence_T]).tolist()


def mean(values) -> float:
    return sum(values) / len(values)


def deviation(values) -> float:
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def by_group(advantage) -> list[float]:
    """`advantage(reward, the others, all)` of every completion."""
    groups = [REWARDS[:4], REWARDS[4:]]
    return [advantage(r, g[:i] + g[i + 1 :], g) for g in groups for i, r in enumerate(g)]


def by_token(values: list[float]) -> list[float]:
    return [v for v, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


def whitened(values: list[float]) -> list[float]:
    return [(v - mean(values)) / math.sqrt(deviation(values) ** 2 + 1e-8) for v in values]


LOO = by_token(by_group(lambda r, others, group: r - mean(others)))
CENTRED = by_token(by_group(lambda r, others, group: r - mean(group)))
SCALED = by_token(by_group(lambda r, others, group: (r - mean(group)) / (deviation(group) + 1e-6)))
BY_LENGTH = by_token(
    [
        r - sum(a * b for a, b in zip(REWARDS[s], LENGTHS[s], strict=True)) / sum(LENGTHS[s])
        for s in (slice(0, 4), slice(4, 8))
        for r in REWARDS[s]
    ]
)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", LOO),
        ("rloo_vectorized", LOO),
        ("grpo", SCALED),
        ("grpo algorithm.norm_adv_by_std_in_grpo=False", CENTRED),
        ("reinforce_plus_plus_baseline", whitened(CENTRED)),
        ("reinforce_plus_plus", whitened(by_token(REWARDS))),
        ("opo", BY_LENGTH),
    ],
)
def test_verl_s_estimators_give_the_same_advantages(estimator, expected):
    found = verl(f"actor_rollout_ref.rollout.n=4 algorithm.adv_estimator={estimator}")
    assert ours(found) == pytest.approx(expected, abs=1e-12)
    assert not any("changes the objective" in note for note in found.notes)


def test_verl_s_optimal_token_baseline_is_ours_with_the_completion_itself():
    start = "actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=optimal_token_baseline"
    found = verl(f"{start} actor_rollout_ref.actor.calculate_sum_pi_squared=True")
    config = RLOOConfig(**found.options)
    assert (config.estimator, config.estimator_kwargs) == ("optimal_token", {"leave1out": False})
    assert config.importance_sampling_level == "token"
    assert not any("changes the objective" in note for note in found.notes)
    gspo = verl(f"{start} actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    config = RLOOConfig(**gspo.options)
    assert (config.estimator, config.estimator_kwargs) == ("composed", None)
    assert any("leave-one-out is in its place" in note for note in gspo.notes)
    single = verl(f"{start} actor_rollout_ref.rollout.n=1")
    assert RLOOConfig(**single.options).mean_level == "none"


CLIPPED = [max(-1.2, min(1.2, a)) for a in LOO]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("rloo", LOO),
        ("rloo --reward.clip_range -1.2 1.2", CLIPPED),
        ("dr_grpo", CENTRED),
        ("reinforce_baseline", whitened(CENTRED)),
        ("reinforce", whitened(by_token(REWARDS))),
        (
            "group_norm",
            by_token(by_group(lambda r, others, group: (r - mean(group)) / deviation(group))),
        ),
    ],
)
def test_openrlhf_s_estimators_give_the_same_advantages(flags, expected):
    found = openrlhf(
        f"--rollout.n_samples_per_prompt 4 --algo.kl.init_coef 0 --algo.advantage.estimator {flags}"
    )
    assert ours(found) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [],
            by_token(by_group(lambda r, o, group: (r - mean(o)) / (deviation(o) + 1e-6))),
        ),
        (["grpo.normalize_rewards=false"], LOO),
        (["grpo.use_leave_one_out_baseline=false"], SCALED),
        (["grpo.adv_estimator.use_leave_one_out_baseline=false"], SCALED),
        (["grpo.adv_estimator.name=reinforce_plus_plus"], whitened(CENTRED)),
        (
            ["grpo.normalize_rewards=false", "grpo.advantage_clip_low=-1.2",
             "grpo.advantage_clip_high=1.2"],
            CLIPPED,
        ),
    ],
)  # fmt: skip
def test_nemo_rl_s_estimators_give_the_same_advantages(overrides, expected, tmp_path):
    found = nemo(tmp_path, "loss_fn.reference_policy_kl_penalty=0", *overrides)
    assert ours(found) == pytest.approx(expected, abs=1e-12)


def test_no_preset_is_named_but_for_a_kl_that_only_areal_s_allows(tmp_path):
    wrong = "algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3"
    named = {
        "verl": verl(VERL_RLOO),
        "verl's k3 in the reward": verl(f"{VERL_RLOO} {wrong}"),
        "OpenRLHF": openrlhf(OPENRLHF_RLOO),
        "OpenRLHF's k1 in the loss": openrlhf(f"{OPENRLHF_RLOO} --algo.kl.use_loss"),
        "NeMo-RL": nemo(tmp_path),
        "NeMo-RL's k3 in the reward": nemo(tmp_path, "++loss_fn.use_kl_in_reward=true"),
    }
    found = {name: imported.options.get("preset") for name, imported in named.items()}
    assert found == {name: "areal" if "'s k" in name else None for name in named}
    # A preset given to the result takes the place of its parts.
    path = tmp_path / "run.yaml"
    path.write_text(render_imported("nemo_rl", named["NeMo-RL"]))
    given = parse_command_line([str(path), "--preset", "nemo_rl"])
    assert {name: getattr(given, name) for name in BASE} == preset_options("nemo_rl")


# -- verl ------------------------------------------------------------------------------------------


def test_verl_s_rloo_is_the_preset_verl_with_its_batches_and_intervals():
    found = verl(VERL_RLOO)
    assert objective_of(found) == preset_options("verl")
    # 64 prompts in parts of 16: four steps of 64 completions.
    assert numbers(found) == (64, 64, 4)
    config = RLOOConfig(**found.options)
    assert (config.model, config.dataset) == ("org/model", "train.parquet")
    assert (config.max_steps, config.save_steps, config.eval_steps) == (120, 40, 20)
    assert (config.warmup_steps, config.lr_scheduler_type) == (12, "constant_with_warmup")
    assert (config.learning_rate, config.weight_decay) == (2e-6, 0.01)
    assert (config.overlong_prompts, config.max_prompt_length) == ("left", 512)
    assert (config.report_to, config.eval_on_start) == (["wandb"], True)
    keys = {word.partition("=")[0] for word in VERL_RLOO.split()}
    check_all_keys("verl", found, keys)


def test_verl_s_passes_count_as_steps():
    found = verl(f"{VERL_RLOO} actor_rollout_ref.actor.ppo_epochs=2")
    assert numbers(found) == (64, 64, 8)
    assert RLOOConfig(**found.options).save_steps == 80


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", (0.0, "reward", "k1", None)),
        ("actor_rollout_ref.actor.use_kl_loss=True", (0.001, "loss", "k3", 10.0)),
        (
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
            "actor_rollout_ref.actor.kl_loss_type=mse",
            (0.01, "loss", "k2", None),
        ),
        (
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3+",
            (0.001, "loss", "k2", None),
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.adv_estimator=reinforce_plus_plus",
            (0.001, "reward_to_go", "k1", None),
        ),
    ],
)
def test_verl_s_kl_is_where_it_is_there(overrides, expected):
    found = verl(f"actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=rloo {overrides}")
    config = RLOOConfig(**found.options)
    assert (
        config.beta,
        config.kl_placement,
        config.kl_estimator,
        config.kl_options.clip,
    ) == expected


def test_verl_reads_the_two_clip_ratios_and_not_the_one():
    start = "actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=rloo actor_rollout_ref.actor."
    config = RLOOConfig(**verl(f"{start}clip_ratio=0.3").options)
    assert (config.epsilon, config.epsilon_high) == (0.2, None)
    assert "clip_ratio" in " ".join(left(verl(f"{start}clip_ratio=0.3")))
    config = RLOOConfig(**verl(f"{start}clip_ratio_low=0.1").options)
    assert (config.epsilon, config.epsilon_high) == (0.1, 0.2)
    both = f"{start}clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.28"
    config = RLOOConfig(**verl(both).options)
    assert (config.epsilon, config.epsilon_high) == (0.1, 0.28)


@pytest.mark.parametrize(
    ("overrides", "expected", "key"),
    [
        ("loss_agg_mode=seq-mean-token-sum", ("token", "sequence", 3.0), None),
        ("loss_agg_mode=seq-mean-token-mean", ("token", "sequence_token_mean", 3.0), None),
        ("policy_loss.loss_mode=gspo", ("sequence_mean", "sequence_token_mean", None), None),
        ("policy_loss.loss_mode=cispo", ("token", "token_mean", 3.0), "policy_loss.loss_mode"),
    ],
)
def test_verl_s_losses(overrides, expected, key):
    start = "actor_rollout_ref.actor."
    found = verl(f"actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=rloo {start}{overrides}")
    config = RLOOConfig(**found.options)
    form = (config.importance_sampling_level, config.loss_aggregation, config.delta)
    assert form == expected
    assert ([f"{start}{key}"] if key else []) == [k for k in left(found) if "loss_mode" in k]


def test_verl_s_correction_of_the_sampler_is_a_product_over_the_completion():
    start = "algorithm.rollout_correction."
    found = verl(
        f"actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=rloo {start}rollout_is=sequence "
        f"{start}rollout_is_threshold=3 {start}rollout_is_batch_normalize=true "
        f"{start}bypass_mode=true {start}rollout_rs=null"
    )
    config = RLOOConfig(**found.options)
    assert config.rollout_importance_sampling_mode == "sequence_truncate"
    assert config.rollout_importance_sampling_threshold == 3
    refused = {f"{start}rollout_is_batch_normalize", f"{start}bypass_mode"}
    assert refused <= set(left(found)) and f"{start}rollout_rs" not in left(found)


def test_what_verl_has_and_we_do_not_is_said_to_change_the_objective():
    found = verl("algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=4")
    assert "estimator" in left(found)["algorithm.adv_estimator"]
    assert any("changes the objective: leave-one-out" in note for note in found.notes)
    alone = RLOOConfig(**verl("algorithm.adv_estimator=rloo").options)
    assert (alone.num_generations, alone.mean_level) == (1, "none")


def test_verl_s_files_scripts_and_overrides_are_one(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "run.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {rollout: {n: 4, name: '???'}, hybrid_engine: true}\n"
        "algorithm: {adv_estimator: rloo}\n"
        "data: {train_batch_size: 32, val_files: a.parquet}\n"
    )
    (tmp_path / "run.sh").write_text(
        "BATCH=$((8 * 2))\npython3 -m verl.trainer.main_ppo --config-path=config \\\n"
        "  --config-name='run' data.train_batch_size=${BATCH} \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=8 data.truncation=$NOT_SET_ANYWHERE $@\n"
    )
    found = import_config("verl", str(tmp_path / "run.sh"), ["algorithm.adv_estimator=grpo"])
    assert numbers(found) == (16, 32, 2)
    assert RLOOConfig(**found.options).std_level == "group"
    assert left(found)["data.truncation"] == "what it refers to is not in the file"
    assert any("ppo_trainer" in note for note in found.notes)
    found = import_config("verl", str(folder / "run.yaml"), ["data.train_batch_size=256"])
    assert numbers(found) == (256, 1024, 1)
    monkeypatch.chdir(tmp_path)
    assert main(["config", "--from", "verl", "config/run.yaml", "data.train_batch_size=512"]) == 0
    assert "steps_per_generation: 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="stray is no key=value"):
        import_config("verl", str(folder / "run.yaml"), ["stray"])
    with pytest.raises(ValueError, match=r"there are 0 commands verl\.trainer\.main_ppo"):
        import_config("verl", "python3 train.py")


def test_a_command_that_a_comment_cuts_short_is_said_to_be(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 \\\n  # why\n"
        "  algorithm.adv_estimator=rloo \\\n  trainer.nnodes=2\n"
    )
    found = import_config("verl", str(path))
    assert found.options["num_generations"] == 4
    cut = "ends the command before algorithm.adv_estimator=rloo: the shell leaves out what follows"
    assert any(cut in note for note in found.notes)


# -- OpenRLHF --------------------------------------------------------------------------------------


def test_openrlhf_s_rloo_is_the_preset_openrlhf_with_its_batches_and_intervals():
    found = openrlhf(OPENRLHF_RLOO)
    assert objective_of(found) == preset_options("openrlhf")
    # 64 prompts of 4 completions, 64 completions a step.
    assert numbers(found) == (64, 64, 4)
    config = RLOOConfig(**found.options)
    assert (config.num_prompts, config.learning_rate, config.adam_beta2) == (16, 5e-7, 0.95)
    assert (config.save_steps, config.eval_steps, config.logging_steps) == (40, 20, 4)
    assert (config.eval_options.temperature, config.num_generations_eval) == (0.6, 4)
    assert (config.max_completion_length, config.max_prompt_length) == (256, 768)
    assert config.prompt_template == [{"role": "user", "content": "{question}"}]
    assert (config.lr_scheduler_type, config.warmup_steps) == ("cosine_with_min_lr", 0.03)
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert config.reward == ["my/reward.py:reward_func"]
    assert config.report_to == ["wandb"] and "s3cret" not in render_imported("openrlhf", found)
    check_all_keys("openrlhf", found, set(re.findall(r"--([\w.]+)", OPENRLHF_RLOO)))


def test_openrlhf_s_former_flags_mean_the_same():
    formerly = {new: old for old, new in FORMERLY.items()}
    words = [
        f"--{formerly[word[2:]]}" if word.startswith("--") else word
        for word in OPENRLHF_RLOO.split()
    ]
    assert "--advantage_estimator" in words and "--pretrain" in words
    assert openrlhf(" ".join(words)).options == openrlhf(OPENRLHF_RLOO).options


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--algo.kl.use_loss --algo.kl.estimator k3", ("loss", "k3", None)),
        ("--algo.kl.use_loss", ("loss", "k1", "areal")),
        ("--algo.kl.estimator k2", ("reward_to_go", "k2", "areal")),
        ("", ("reward_to_go", "k1", None)),
    ],
)
def test_openrlhf_s_kl_is_taken_as_it_is_there(flags, expected):
    found = openrlhf(f"{OPENRLHF_RLOO} {flags}")
    config = RLOOConfig(**found.options)
    assert (config.kl_placement, config.kl_estimator, config.preset) == expected
    assert (config.beta, config.kl_options.clip) == (0.01, 10.0)
    # Nothing of the preset but that any KL is allowed.
    assert (config.reward_bias, config.reward_scaling, config.epsilon) == (0.0, 1.0, 0.2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (None, 2.0, None)),
        ("--algo.advantage.is_correction_enable", ("token_truncate", 5.0, None)),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop "
            "--algo.advantage.is_correction_threshold 0.25 4",
            ("token_mask", 4.0, 0.25),
        ),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type "
            "seq-mask-tis",
            (None, 2.0, None),
        ),
    ],
)
def test_openrlhf_s_corrections_of_the_sampler(flags, expected):
    found = openrlhf(f"{OPENRLHF_RLOO} {flags}")
    config = RLOOConfig(**found.options)
    assert (
        config.rollout_importance_sampling_mode,
        config.rollout_importance_sampling_threshold,
        config.rollout_importance_sampling_min,
    ) == expected
    refused = "algo.advantage.is_correction_enable" in left(found)
    assert refused == ("seq-mask-tis" in flags)


def test_openrlhf_s_steps_may_cut_groups():
    found = openrlhf("--rollout.n_samples_per_prompt 3 --rollout.batch_size 8 --train.batch_size 4 "
                     "--algo.advantage.estimator rloo")  # fmt: skip
    assert numbers(found) == (8, 4, 6)


# -- NeMo-RL ---------------------------------------------------------------------------------------


def test_nemo_rl_s_grpo_is_the_preset_nemo_rl_with_its_batches_and_intervals(tmp_path):
    found = nemo(tmp_path)
    expected = preset_options("nemo_rl") | {"use_bias_correction_kl": True}
    assert objective_of(found) == expected
    # 8 prompts of 4 completions, 16 completions a step.
    assert numbers(found) == (8, 16, 2)
    config = RLOOConfig(**found.options)
    assert (config.max_steps, config.save_steps, config.eval_steps) == (40, 20, 10)
    assert (config.learning_rate, config.adam_beta2) == (5e-6, 0.99)
    assert (config.warmup_steps, config.lr_scheduler_type) == (100, "constant_with_warmup")
    assert (config.max_completion_length, config.max_prompt_length) == (512, 256)
    assert (config.dataset, config.eval_dataset, config.reward) == (
        "train.jsonl",
        "eval.jsonl",
        ["math"],
    )
    check_all_keys("nemo_rl", found, set(flatten(yaml.safe_load(NEMO))))


def test_nemo_rl_s_files_are_read_over_their_defaults_and_under_overrides(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.yaml").write_text(NEMO)
    (tmp_path / "mid.yaml").write_text(
        "defaults: base/base.yaml\n"
        "grpo: {num_prompts_per_step: 16}\n"
        "data: {validation: null, train: {_override_: true, data_path: other.jsonl}}\n"
    )
    child = tmp_path / "child.yaml"
    (tmp_path / "first.yaml").write_text("grpo: {num_prompts_per_step: 4, seed: 7}\n")
    child.write_text(
        "defaults: [first.yaml, mid.yaml]\npolicy: {precision: float32}\nloss_fn:\n  a_key: ???\n"
    )
    found = import_config("nemo_rl", str(child), ["++grpo.num_generations_per_prompt=2"])
    assert numbers(found) == (16, 16, 2)
    config = RLOOConfig(**found.options)
    assert (config.dataset, config.eval_strategy, config.bf16) == ("other.jsonl", "no", False)
    assert config.seed == 7  # and the later of two wins: 16 prompts, not 4
    assert config.prompt_template is None and "loss_fn.a_key" not in left(found)
    line = f"uv run examples/run_grpo.py --config {child} ++grpo.num_generations_per_prompt=2"
    assert import_config("nemo_rl", line).options == found.options
    (tmp_path / "base" / "base.yaml").write_text("defaults: ../child.yaml\n")
    with pytest.raises(ValueError, match="is built on itself"):
        import_config("nemo_rl", str(child))
    with pytest.raises(ValueError, match="no such file here; give it and what the command sets"):
        import_config("nemo_rl", "python run_grpo.py --config gone.yaml")


def test_nemo_rl_s_scaling_of_rewards_is_the_same_line(tmp_path):
    scaling = ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=-1",
               "grpo.reward_scaling.source_max=3", "grpo.reward_scaling.target_min=-2",
               "grpo.reward_scaling.target_max=6")  # fmt: skip
    config = RLOOConfig(**nemo(tmp_path, *scaling).options)
    for reward, expected in ((-1, -2.0), (0.5, 1.0), (3, 6.0)):
        scaled = (reward + config.reward_bias) * config.reward_scaling
        assert scaled == pytest.approx(expected)
    assert config.reward_clip_range == (-2.0, 6.0)


@pytest.mark.parametrize("name", ["disable_ppo_ratio", "force_on_policy_ratio", "use_cispo"])
def test_nemo_rl_s_losses_without_ratio_are_the_same_in_a_single_step(name, tmp_path):
    several = nemo(tmp_path, f"loss_fn.{name}=true")
    assert f"loss_fn.{name}" in left(several)
    single = nemo(tmp_path, f"loss_fn.{name}=true", "policy.train_global_batch_size=32")
    assert f"loss_fn.{name}" in single.taken


def test_nemo_rl_s_megatron_has_its_own_optimizer(tmp_path):
    found = nemo(
        tmp_path,
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.optimizer.lr=2e-6",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=13",
        "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
        "policy.megatron_cfg.optimizer.min_lr=2e-7",
    )
    config = RLOOConfig(**found.options)
    assert (config.learning_rate, config.warmup_steps) == (2e-6, 26)
    assert config.lr_scheduler_kwargs == {"min_lr_rate": pytest.approx(0.1)}
    assert "policy.optimizer.kwargs.lr" in left(found)


def test_resolvers_are_computed():
    values = {"a.b": 6, "a.c": "${mul:${a.b}, ${add:1,1}}", "d": "${oc.select:a.x,7}",
              "e": "${oc.select:a.b,7}", "a.f": "${.b}", "g": "${user:x}/${a.b}",
              "h": "${div:${a.b},4}", "i": "${max:${a.b},${a.c}}"}  # fmt: skip
    assert follow_references(values) == values | {
        "a.c": 12, "d": 7, "e": 6, "a.f": 6, "h": 1.5, "i": 12,
    }  # fmt: skip


@pytest.mark.parametrize("system", ["verl", "openrlhf", "nemo_rl"])
def test_what_is_printed_reads_back_equal(system, tmp_path):
    found = {"verl": lambda: verl(VERL_RLOO), "openrlhf": lambda: openrlhf(OPENRLHF_RLOO),
             "nemo_rl": lambda: nemo(tmp_path)}[system]()  # fmt: skip
    (tmp_path / "ours.yaml").write_text(render_imported(system, found))
    assert parse_command_line([str(tmp_path / "ours.yaml")]) == RLOOConfig(**found.options)


# -- verl's versions and forks ---------------------------------------------------------------------

FORMER = (
    "algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4 data.train_batch_size=16 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=16"
)


def objective_of_verl(found) -> tuple:
    config = RLOOConfig(**found.options)
    kl = (config.beta, config.kl_placement if config.beta else None, config.kl_estimator)
    return (*kl, config.entropy_coef, config.epsilon, config.delta)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # ray_trainer.py and ppo_trainer.yaml of 0.3: the KL is in the reward unless in the loss.
        ("algorithm.kl_ctrl.kl_coef=0.002", (0.002, "reward", "k1", 0.001, 0.2, None)),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=False "
         "actor_rollout_ref.actor.clip_ratio=0.1",
         (0.001, "reward", "k1", 0.001, 0.1, None)),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.003 "
         "actor_rollout_ref.actor.fsdp_config.grad_offload=False",
         (0.003, "loss", "k3", 0.001, 0.2, None)),
        # 0.4 and later: off unless asked for.
        ("algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.002",
         (0.0, None, "k1", 0.0, 0.2, 3.0)),
        ("actor_rollout_ref.actor.clip_ratio_high=0.2", (0.0, None, "k1", 0.0, 0.2, 3.0)),
        ("", (0.0, None, "k1", 0.0, 0.2, 3.0)),
    ],
)  # fmt: skip
def test_verl_before_0_4_is_told_by_its_keys(overrides, expected):
    found = verl(f"{FORMER} {overrides}")
    assert objective_of_verl(found) == expected
    said = [note for note in found.notes if "verl@" in note]
    assert len(said) == (not ("use_kl_in_reward" in overrides or "clip_ratio_high" in overrides))


def test_verl_s_version_can_be_given():
    line = f"python -m verl.trainer.main_ppo {FORMER}"
    former = import_config("verl@0.3", line)
    assert objective_of_verl(former) == (0.001, "reward", "k1", 0.001, 0.2, None)
    later = import_config("verl@0.8.0", f"{line} algorithm.kl_ctrl.kl_coef=0.002")
    assert objective_of_verl(later)[0] == 0.0
    assert not any("verl@" in note for note in (*former.notes, *later.notes))
    assert render_imported("verl@0.3", former).startswith("# Imported from verl")
    for system, fault in (("verl@new", "a version is a number"), ("trl@1", "for verl only")):
        with pytest.raises(ValueError, match=fault):
            import_config(system, line)


def test_a_fork_s_group_size_is_one_or_asked_for():
    found = verl(
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1 data.train_batch_size=8 "
        "actor_rollout_ref.rollout.n_agent=16 actor_rollout_ref.actor.ppo_mini_batch_size=64"
    )
    config = RLOOConfig(**found.options)
    assert (config.num_generations, config.mean_level, config.std_level) == (16, "group", "group")
    # Search-R1: 8 prompts are 128 completions, and 64 of them make a step.
    assert numbers(found) == (8, 64, 2)
    assert not any("no baseline" in note for note in found.notes)
    for key in ("actor_rollout_ref.rollout.n_samples", "algorithm.group_size"):
        asked = verl(f"{FORMER} {key}=16")
        assert "fork's group size" in left(asked)[key]
        assert any(f"{key} 16 is no key that is known" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.clip_ratoi_high", "actor_rollout_ref.actor.clip_ratio_high"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("data.max_respnse_length", "data.max_response_length"),
    ],
)
def test_a_misspelt_key_of_verl_is_no_setting_of_an_engine(key, near):
    found = verl(f"{FORMER} {key}=1")
    assert f"did you mean {near}?" in left(found)[key] or key.startswith("data.")
    assert "engines" not in left(found)[key] and "num_processes" not in left(found)[key]


def test_verl_s_penalty_of_long_answers_is_a_reward_with_its_weight():
    for start in (
        "reward_model.overlong_buffer",
        "+reward_model.reward_kwargs.overlong_buffer_cfg",
    ):
        found = verl(
            f"{FORMER} data.max_response_length=512 custom_reward_function.path=r.py "
            f"{start}.len=64 {start}.enable=True {start}.penalty_factor=0.5"
        )
        assert found.options["reward"] == [
            "r.py:compute_score",
            {"name": "soft_overlong", "max_tokens": 512, "cache_tokens": 64},
        ]
        assert found.options["reward_weights"] == [1.0, 0.5]
    alone = verl(f"{FORMER} {start}.len=64 {start}.enable=True")
    assert alone.options["reward"][0] == "REWARD.py:compute_score"  # no run on the penalty alone
    assert "reward" not in verl(f"{FORMER} {start}.len=64 {start}.enable=False").options


def test_several_files_are_a_folder_of_their_own_or_said_to_be_one(tmp_path):
    names = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for name in names:
        name.write_text("")
    files = f"data.train_files=\"['{names[0]}','{names[1]}']\""
    assert verl(f"{FORMER} {files}").options["dataset"] == str(tmp_path)
    (tmp_path / "c.parquet").write_text("")
    found = verl(f"{FORMER} {files}")
    assert found.options["dataset"] == str(names[0])
    assert "data.train_files" in left(found)
    assert any("data.train_files names 2 files" in note for note in found.notes)


def test_evaluation_at_temperature_0_is_greedy_and_no_error(tmp_path):
    found = {
        "openrlhf": openrlhf("--eval.dataset d --eval_temperature 0.0"),
        "verl": verl(
            f"{FORMER} actor_rollout_ref.rollout.val_kwargs.do_sample=True "
            "actor_rollout_ref.rollout.val_kwargs.temperature=0"
        ),
        "nemo_rl": nemo(tmp_path, "policy.generation.val_temperature=0"),
        "areal": import_config("areal", "python x.py eval_gconfig.temperature=0"),
    }
    for name, imported in found.items():
        assert RLOOConfig(**imported.options).eval_options.temperature is None, name
        assert any("evaluation is sampled and greedy" in note for note in imported.notes), name


def test_verl_s_two_bounds_on_the_sampler_s_weights_mask_what_is_outside():
    start = "algorithm.rollout_correction.rollout_is"
    config = RLOOConfig(**verl(f"{FORMER} {start}=token {start}_threshold=0.5_4.0").options)
    assert config.rollout_importance_sampling_mode == "token_mask"
    assert config.rollout_importance_sampling_min == 0.5
    assert config.rollout_importance_sampling_threshold == 4.0


def test_a_file_that_is_chosen_for_a_section_is_listed():
    found = verl(f"{FORMER} actor_rollout_ref.actor=megatron_lite")
    assert "for a section" in left(found)["actor_rollout_ref.actor"]
    assert RLOOConfig(**found.options).num_prompts == 16
