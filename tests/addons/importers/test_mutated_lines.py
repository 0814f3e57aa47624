"""Three hundred lines with mistakes: every key of each comes out converted or listed, or the line
is refused. The list of keys is the generator's own."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import pytest
import yaml

from rloo.addons.importers import import_config, render_imported
from rloo.addons.importers.openrlhf_names import FORMERLY

# system -> what starts the command, and its settings
LINES: dict[str, tuple[str, dict[str, str]]] = {
    "verl": ("python3 -m verl.trainer.main_ppo", {
        "algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": "4",
        "data.train_batch_size": "64", "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
        "actor_rollout_ref.actor.optim.lr": "1e-6", "data.train_files": "train.parquet",
        "algorithm.use_kl_in_reward": "True", "algorithm.kl_ctrl.kl_coef": "0.01",
        "actor_rollout_ref.actor.clip_ratio_high": "0.28", "data.max_response_length": "512",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6", "trainer.save_freq": "20",
        "trainer.nnodes": "2", "trainer.logger": "['console','wandb']", "data.truncation": "left",
        "reward_model.overlong_buffer.enable": "True", "reward_model.overlong_buffer.len": "64",
    }),
    "openrlhf": ("python3 -m openrlhf.cli.train_ppo_ray", {
        "algo.advantage.estimator": "rloo", "rollout.n_samples_per_prompt": "4",
        "rollout.batch_size": "64", "train.batch_size": "64", "actor.adam.lr": "5e-7",
        "init_kl_coef": "0.01", "prompt_data": "org/data", "input_key": "question",
        "apply_chat_template": "", "rollout.max_new_tokens": "256", "ds.zero_stage": "3",
        "eval.dataset": "org/eval", "eval_temperature": "0.6", "train.colocate_all": "",
    }),
    "ms-swift": ("swift rlhf", {
        "rlhf_type": "grpo", "advantage_estimator": "rloo", "num_generations": "8",
        "beta": "0.04", "model": "org/m", "dataset": "a/b", "learning_rate": "1e-6",
        "reward_funcs": "accuracy", "torch_dtype": "bfloat16", "vllm_mode": "colocate",
        "save_steps": "20", "tuner_type": "full", "dataloader_num_workers": "2",
    }),
    "areal": ("python3 -m areal.launcher.local train.py", {
        "gconfig.n_samples": "4", "actor.kl_ctl": "0.0", "actor.path": "org/m",
        "train_dataset.path": "d", "train_dataset.batch_size": "16", "actor.ppo_n_minibatches": "1",
        "actor.reward_norm.mean_level": "group", "actor.reward_norm.mean_leave1out": "true",
        "actor.reward_norm.std_level": "null", "actor.adv_norm.mean_level": "batch",
        "rollout.max_concurrent_rollouts": "64", "cluster.n_nodes": "1", "total_train_epochs": "2",
    }),
    "trl": ("trl rloo", {
        "model_name_or_path": "org/m", "dataset_name": "d", "num_generations": "4", "beta": "0.05",
        "learning_rate": "1e-6", "reward_funcs": "accuracy_reward", "use_peft": "",
        "log_level": "info", "temperature": "0.9", "per_device_train_batch_size": "4",
    }),
    "nemo_rl": ("uv run examples/run_grpo.py", {
        "grpo.num_prompts_per_step": "8", "grpo.num_generations_per_prompt": "4",
        "policy.train_global_batch_size": "32", "policy.model_name": "org/m",
        "loss_fn.reference_policy_kl_penalty": "0.01", "grpo.normalize_rewards": "false",
        "policy.optimizer.kwargs.lr": "5e-6", "cluster.gpus_per_node": "8",
        "policy.generation.vllm_cfg.gpu_memory_utilization": "0.6", "grpo.max_num_steps": "9",
        "data.train.data_path": "t.jsonl",
    }),
}  # fmt: skip
WITH_DASHES = ("openrlhf", "ms-swift", "trl")
ODD = (
    "null", "[]", "$NOWHERE", "$(date +%s)", "`id -u`", "'two words'", "x", "-1", "1e-6", "True",
    "\"a 'b' c\"", "ünïcode", "\"['$(hostname)/a']\"", "3", "''", "${NOWHERE:-5}", "a=b",
)  # fmt: skip
STRAY = ("fork_trick", "optim.new_thing", "n_rollouts_x", "very.deep.key.of.nobody")


def misspelt(key: str, chance: random.Random) -> str:
    place = chance.randrange(1, len(key))
    kind = chance.randrange(3)
    if kind == 0:
        return key[:place] + key[place + 1 :] + "x"
    return key[:place] + ("q" if kind == 1 else key[place]) + key[place:]


def mutated(system: str, chance: random.Random) -> tuple[str, set[str]]:
    """A script, and the keys in it."""
    start, settings = LINES[system]
    dashes = "--" if system in WITH_DASHES else ""
    pairs = list(settings.items())
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(pairs))
        key, value = pairs[place]
        match chance.randrange(4):
            case 0:
                pairs[place] = (misspelt(key, chance), value)
            case 1:
                pairs[place] = (key, chance.choice(ODD))
            case 2:
                pairs.append((chance.choice(STRAY), chance.choice(ODD)))
            case 3:
                pairs.append((key, value))
    join = " " if dashes else "="
    words = [f"{dashes}{key}{join if value else ''}{value}" for key, value in pairs]
    keys = {key for key, _ in pairs}
    if not dashes and chance.random() < 0.2:  # a plain word in the midst
        words.insert(chance.randrange(1, 4), "stray_word")
        keys.add("stray_word")
    value_last = not dashes or bool(pairs[-1][1])  # else it is the last flag's value
    lines = [" \\\n  ".join(words)]
    match chance.randrange(6):
        case 0:
            return f'run() {{ {start} "$@"; }}\nrun {lines[0]}\n', keys
        case 1:
            return f'ARGS=(\n{lines[0]}\n)\n{start} "${{ARGS[@]}}" # done\n', keys
        case 2:  # a comment that ends the command
            half = len(words) // 2
            return f"{start} {' '.join(words[:half])} \\\n # why\n {' '.join(words[half:])}\n", keys
        case 3:
            return f"{start} {' `# note` '.join(words)} $NOWHERE\n", keys | (
                {"${NOWHERE}"} if value_last else set()
            )
    return f"#!/bin/bash\nset -x\n{start} {lines[0]}\n", keys


@pytest.mark.parametrize("part", range(6))
def test_every_key_of_a_mutated_line_is_converted_or_listed(part, tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    counts: Counter[str] = Counter()
    for number in range(part * 50, part * 50 + 50):
        chance = random.Random(number)
        system = chance.choice(list(LINES))
        text, keys = mutated(system, chance)
        path = tmp_path / f"line{number}.sh"
        path.write_text(text, encoding="utf-8")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = import_config(system, str(path))
                shown = render_imported(system, found)
        except ValueError as error:
            counts["refused"] += 1
            assert len(str(error)) > 20, (text, error)
            continue
        counts["converted"] += 1
        if system == "openrlhf":
            keys = {FORMERLY.get(key, key) for key in keys}
        out = set(found.taken) | {item.key for item in found.left}
        assert keys <= out, (text, keys - out)
        assert all(item.reason for item in found.left)
        assert all(f"#     {item.key}: " in shown for item in found.left)
        assert yaml.safe_load(shown) is not None
    assert counts["converted"] >= 25, counts
