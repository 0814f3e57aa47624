"""Other systems' scripts: no word of a command is dropped, wherever it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from rloo import cli
from rloo.addons.importers import import_config, render_imported
from rloo.config.config import RLOOConfig

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4"
SWIFT = "swift rlhf --rlhf_type grpo --advantage_estimator rloo"


def left(found) -> dict:
    return {item.key: item.reason for item in found.left}


@pytest.mark.parametrize(
    ("system", "script"),
    [
        (
            "verl",
            "train() {{ python3 -m verl.trainer.main_ppo {}; }}\ntrain algorithm.adv_estimator=rloo"
            " actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.optim.lr=3e-6",
        ),
        (
            "openrlhf",
            "function go {{\n  local name=$1\n  shift\n  python3 -m openrlhf.cli.train_ppo_ray {}"
            " \\\n    --ckpt.output_dir out/$name\n}}\ngo first --algo.advantage.estimator rloo"
            " --rollout.n_samples_per_prompt 4 --actor.adam.lr 3e-6",
        ),
        (
            "ms-swift",
            "go() {{ swift rlhf --rlhf_type grpo {}; }}\ngo --advantage_estimator rloo"
            " --num_generations 4 --learning_rate 3e-6",
        ),
    ],
)
@pytest.mark.parametrize("given", ['"$@"', "$@", "$*", '"${@}"', "${@:1}", "${*}"])
def test_what_a_function_of_the_script_is_given_is_read(system, script, given, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(script.format(given))
    options = import_config(system, str(path)).options
    assert (options["num_generations"], options["learning_rate"]) == (4, 3e-6)
    assert options["mean_leave1out"] is True


def test_a_function_that_nothing_calls_and_a_text_for_another_shell_are_read_and_said(tmp_path):
    for text in (f"go() {{ {VERL} trainer.x=1; }}", f"sbatch <<END\n{VERL} trainer.x=1\nEND\n"):
        path = tmp_path / "run.sh"
        path.write_text(text)
        found = import_config("verl", str(path))
        assert found.options["num_generations"] == 4 and "trainer.x" in left(found)
        assert any("nothing in the script runs it" in note for note in found.notes)


@pytest.mark.parametrize("name", ["run.slurm", "run.sbatch", "my run.sh", "launch"])
def test_scripts_are_known_by_ending_or_first_line(name, tmp_path):
    path = tmp_path / name
    path.write_text(f"#!/bin/bash\n#SBATCH --nodes=2\nsrun {VERL}\n")
    found = import_config("verl", str(path))
    assert found.options["num_generations"] == 4
    assert any("rloo launch run.yaml --backend slurm" in note for note in found.notes)


@pytest.mark.parametrize(
    ("system", "line", "backend"),
    [
        ("areal", "python3 -m areal.launcher.{} gsm8k_ppo.py --config {}", "slurm"),
        ("areal", "python3 -m areal.launcher.{} gsm8k_ppo.py --config {}", "ray"),
        ("areal", "python3 gsm8k_rl.py scheduler.type={} --config {}", "slurm"),
        ("verl", f"ray job submit -- {VERL}", "ray"),
        ("verl", f"srun --nodes 2 {VERL}", "slurm"),
        ("openrlhf", "bin/ray job submit -- python -m openrlhf.cli.train_ppo_ray", "ray"),
    ],
)
def test_a_cluster_s_line_names_the_launcher_here(system, line, backend):
    areal = Path(__file__).parents[3] / "examples" / "gsm8k_areal.yaml"
    notes = import_config(system, line.format(backend, areal)).notes
    assert any(f"rloo launch run.yaml --backend {backend}" in note for note in notes)
    local = import_config("areal", f"python3 -m areal.launcher.local x.py --config {areal}").notes
    assert not any("rloo launch" in note for note in local)


def test_the_script_s_folder_is_resolved_and_a_command_in_a_list_is_listed(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    path = folder / "run.sh"
    path.write_text(
        'ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\n'
        f'{VERL} data.train_files="$ROOT/train.parquet" `# no word` "$@" \\\n'
        """  data.val_files="['$ROOT/a.parquet','$(hostname)/b.parquet']"\n"""
    )
    found = import_config("verl", str(path))
    assert found.options["dataset"] == f"{tmp_path}/train.parquet"
    assert "eval_dataset" not in found.options
    assert left(found)["data.val_files"] == "what it refers to is not in the file"
    assert any("give it after SOURCE" in note for note in found.notes)


def test_words_that_are_no_settings_are_listed(monkeypatch):
    monkeypatch.delenv("EXTRA", raising=False)
    found = import_config(
        "verl", f"{VERL} data.train_batch_size 64 $EXTRA --multirun trainer.nnodes=2"
    )
    assert found.options["num_prompts"] == 256  # verl's own: the 64 is no value
    assert left(found)["data.train_batch_size"] == left(found)["64"] == "it is no key=value"
    assert left(found)["${EXTRA}"] == "what it refers to is not in the file"
    assert {"multirun", "trainer.nnodes"} <= left(found).keys()
    found = import_config("ms-swift", f"{SWIFT} --beta 0.1 $EXTRA --top_p 0.9")
    assert (found.options["beta"], found.options["top_p"]) == (0.1, 0.9)
    assert left(found)["${EXTRA}"] == "what it refers to is not in the file"
    found = import_config("areal", "python x.py --seed 5 gconfig.n_samples=3")
    assert (found.options["seed"], found.options["num_generations"]) == (5, 3)


@pytest.mark.parametrize(
    ("system", "command", "keys"),
    [
        ("verl", f"{VERL} \\\n  a.b=1 # why\n  data.seed=2 \\\n  c.d=3\n", {"data.seed", "c.d"}),
        ("ms-swift", f"{SWIFT} \\\n --beta 0.1\n --top_p 0.5 --seed 3\n", {"top_p", "seed"}),
        ("trl", "trl rloo --beta 0.1\n --top_p 0.5 --seed 3\n", {"top_p", "seed"}),
    ],
)
def test_what_a_missing_backslash_cuts_off_is_listed_by_name(system, command, keys, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(command)
    found = import_config(system, str(path))
    assert keys <= left(found).keys()
    assert all("missing backslash" in left(found)[key] for key in keys)
    assert any("ends the command before" in note for note in found.notes)
    assert all(f"#     {key}: " in render_imported(system, found) for key in keys)


def test_ms_swift_s_file_is_read_under_its_flags(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "rlhf_type: grpo\nadvantage_estimator: rloo\nnum_generations: 4\nbeta: 0.2\n"
        "target_modules: [q_proj, v_proj]\nENV: {NPROC_PER_NODE: 2}\nnew_trick: 1\n"
    )
    sources = (
        (str(path), ["--beta", "0.3"]),
        (f"swift rlhf {path} --beta 0.3", []),
        (f"swift rlhf --rlhf_type grpo --beta 0.3 --config {path}", []),
    )
    for source, overrides in sources:
        found = import_config("ms-swift", source, overrides)
        assert (found.options["num_generations"], found.options["beta"]) == (4, 0.3)
        assert found.options["lora_target_modules"] == ["q_proj", "v_proj"]
        assert any("2 processes" in note for note in found.notes)
        assert left(found)["new_trick"] == "no counterpart is known"
    with pytest.raises(ValueError, match=r"gone\.yaml: no such file here"):
        import_config("ms-swift", "swift rlhf --config gone.yaml")


def test_verl_s_named_file_is_looked_for_where_verl_has_it(tmp_path, monkeypatch):
    home = tmp_path / "verl" / "trainer" / "config"
    (home / "actor").mkdir(parents=True)
    (home / "actor" / "mine.yaml").write_text("optim: {lr: 4.0e-6}\nppo_epochs: 2\n")
    (home / "mine.yaml").write_text(
        "defaults:\n  - actor@actor_rollout_ref.actor: mine\n  - _self_\n"
        "algorithm: {adv_estimator: rloo}\nactor_rollout_ref: {rollout: {n: 6}}\n"
    )
    recipe = tmp_path / "recipe" / "own" / "config"
    recipe.mkdir(parents=True)
    (recipe / "own.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [mine, _self_]\n"
        "data: {train_batch_size: 8}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 8}}\n"
    )
    monkeypatch.chdir(tmp_path)
    found = import_config("verl", "python -m verl.trainer.main_ppo --config-name=mine")
    assert (found.options["num_generations"], found.options["learning_rate"]) == (6, 4e-6)
    assert found.options["num_iterations"] == 2
    script = tmp_path / "recipe" / "own" / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo --config-path=config --config-name=own\n")
    monkeypatch.chdir(Path(__file__).parent)
    config = RLOOConfig(**import_config("verl", str(script)).options)
    assert (config.num_generations, config.num_prompts, config.learning_rate) == (6, 8, 4e-6)


def test_no_secret_of_the_environment_is_written(monkeypatch, tmp_path, capsys):
    secret = "hf_" + "aB3" * 11 + "x"  # of the alphabet of keys; nobody's
    monkeypatch.setenv("HF_TOKEN", secret)
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo "
        "trainer.experiment_name=$HF_TOKEN data.train_files=a.parquet some.unknown=x-$HF_TOKEN\n"
    )
    assert cli.main(["config", "--from", "verl", str(script)]) == 0
    said = capsys.readouterr().out
    assert secret not in said and "$HF_TOKEN" in said and "x-$HF_TOKEN" in said
