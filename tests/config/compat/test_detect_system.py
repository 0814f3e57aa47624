"""A file of another system is called by its name, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rloo.cli import main
from support.addons import needs_addons

AREAL = Path(__file__).parents[3] / "examples" / "gsm8k_areal.yaml"
FILES = {
    "verl.yaml": (
        "verl",
        "actor_rollout_ref: {actor: {a: 1}, rollout: {n: 4}, model: {path: m}}\n",
    ),
    "nemo.yaml": ("nemo_rl", "grpo: {a: 1, b: 2}\nloss_fn: {c: 3}\npolicy: {model_name: m}\n"),
    "verl.sh": ("verl", "python3 -m verl.trainer.main_ppo data.train_batch_size=8\n"),
    "openrlhf.sh": ("openrlhf", "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --a 1\n"),
    "nemo.sh": ("nemo_rl", "uv run examples/run_grpo.py --config x.yaml\n"),
    "swift.sh": ("ms-swift", "# verl.trainer.main_ppo is another one\nswift rlhf --a 1\n"),
    "trl.sh": ("trl", "accelerate launch examples/scripts/rloo/rloo.py --beta 0.1\n"),
    "areal.sh": ("areal", "python3 -m areal.launcher.local train.py --config x.yaml\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_train_names_the_system_and_the_command_in_one_line(name, tmp_path, capsys):
    system, text = FILES[name]
    path = tmp_path / name
    path.write_text(text)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "unknown option" not in said
    assert f"rloo config --from {system} {path} > run.yaml" in said


@needs_addons
def test_a_conversion_from_another_system_is_refused_with_the_right_one(tmp_path, capsys):
    for name, (system, text) in FILES.items():
        path = tmp_path / name
        path.write_text(text)
        other = "trl" if system != "trl" else "verl"
        assert main(["config", "--from", other, str(path)]) == 2
        assert f"rloo config --from {system} {path}" in capsys.readouterr().err


def test_train_names_areal_for_its_example(capsys):
    assert main(["train", str(AREAL)]) == 2
    said = capsys.readouterr().err
    assert (
        f"is a configuration of AReaL; convert it first: rloo config --from areal {AREAL}" in said
    )


def test_a_misspelt_option_of_ours_is_still_called_that(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("gconfig: {n_samples: 8}\nlearning_rat: 1.0e-6\n")
    assert main(["train", str(path)]) == 2
    assert "unknown option learning_rat; did you mean learning_rate?" in capsys.readouterr().err


def test_a_script_of_nobody_is_refused_as_a_script(tmp_path, capsys):
    path = tmp_path / "mine.sh"
    path.write_text("rloo train\n")
    assert main(["train", str(path)]) == 2
    assert "is a shell script of no system that is known" in capsys.readouterr().err


OTHERS = {
    "EasyR1.yaml": "data: {train_files: d}\nalgorithm: {a: b}\nworker: {actor: {a: 1}}\n",
    "EasyR1.sh": "python3 -m verl.trainer.main config=x.yaml worker.rollout.n=4\n",
    "LLaMA-Factory.yaml": "stage: ppo\nfinetuning_type: lora\ntemplate: qwen\ncutoff_len: 9\n",
    "LLaMA-Factory.sh": "llamafactory-cli train x.yaml\n",
    "axolotl.yml": "base_model: m\nrl: grpo\ntrl: {beta: 0.1}\n",
    "axolotl.sh": "axolotl train x.yaml\n",
}


def check_named(command, name, folder, capsys):
    path = folder / name
    path.write_text(OTHERS[name])
    assert main([*command, str(path)]) == 2
    said = capsys.readouterr().err
    system = name.partition(".")[0]
    assert said.count("\n") == 1 and f"of {system}, which is not converted" in said


@pytest.mark.parametrize("name", OTHERS)
def test_systems_whose_files_are_not_converted_are_named(name, tmp_path, capsys):
    check_named(["train"], name, tmp_path, capsys)


@needs_addons
def test_a_conversion_names_systems_whose_files_are_not_converted(tmp_path, capsys):
    for name in OTHERS:
        check_named(["config", "--from", "verl"], name, tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("grpo: {a: 1}\nloss_fn: {b: 1}\npolicy: {c: 1}\nenv: {math: {n: 1}}\n", "nemo_rl"),
        ("defaults: x.yaml\ngrpo: {a: 1}\npolicy: {c: 1}\n", "nemo_rl"),
        ("rlhf_type: grpo\nadvantage_estimator: rloo\nlora_rank: 8\nswift_thing: 1\n", "ms-swift"),
        ("grpo: {a: 1, b: 2, c: 3}\nbeta: 0.1\n", None),
        ("grpo: {a: 1}\nlogger: {b: 2}\ndata: {c: 3}\n", None),
        ("gconfig: {a: 1, b: 2, c: 3}\n", None),
        ("worker: {a: 1}\nother: {b: 1}\n", None),
    ],
)
def test_a_file_is_of_a_system_by_several_of_its_sections(text, system, tmp_path, capsys):
    path = tmp_path / "given.yaml"
    path.write_text(text)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    if system is None:
        assert "unknown option" in said and "rloo config --from" not in said
    else:
        assert f"rloo config --from {system} {path}" in said
