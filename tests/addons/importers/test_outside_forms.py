"""Forms of scripts and lines that people publish: forks' programs, launchers, other versions, and
values that are none here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from rloo.addons.importers import import_config, render_imported
from rloo.addons.importers.shell import find_command, read_script
from rloo.config.compat.detect_system import system_of

ACTOR = "actor_rollout_ref"
VERL = f"algorithm.adv_estimator=rloo {ACTOR}.rollout.n=4"
# Each is read by itself, and by bash.
FORMS = (
    ': "${N:=4}" "${K:=5}"; program n=$N k=${K}',
    'a=(a=1 b=2 c=3); program "${a[@]:1}" "${a[@]:0:2}" n=${#a[@]} last=${a[-1]} ${#a}',
    "X=0; X=1 program a=$X; X=5; X=1 program a=$X; A=1 B=$A; program $B",
    "X=5; (X=7; true); program a=$X; (cd /; program d=$PWD); program e=$X",
    "X=5; f() { local X=6; local -i Y=1; program $X; }; f; program a=$X b=${Y:-}",
    "X=5; f() { X=6; }; f; program a=$X",
    'f() { program v=$V "$@"; }; V=2 f a=1; program v=${V:-}',
    "cat > /dev/null <<'EOF' ; program yes=2\njunk \"unclosed\nEOF\nprogram after=1",
    "N=08; program n=$N h=$((0x10)); let N=3+4; ((N+=2)); ((N++)); program $N",
    "N=1; ((M = (N + 4) * 2)); program $M; ((N -= 1)); ((N--)); program $N",
    "e=; program a=${e-x} b=${e:-y} c=${e:+z} d=${e+w} ${Q-x} ${Q:=w} $Q",
    "declare -i D=4; typeset E=5; export -n F=6; readonly -a L=(1 2); program $D $E $F ${L[@]}",
    'A=(x=1 y=2); for v in "${A[@]}"; do B+=" $v"; done; program $B',
    "x=abcDEF; program ${#x} ${x^^} ${x,,} ${x^} ${x,} ${x:1} ${x:1:2} ${x:0:99}",
    "N=1; N=2 true; program $N; unset N; program n=${N:-none}",
)


@pytest.mark.parametrize("text", FORMS)
def test_what_changes_a_variable_is_what_bash_says(text, tmp_path, monkeypatch):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here to compare with")
    monkeypatch.chdir(tmp_path)
    told = "program() { printf '%s\\0' \"$@\"; printf 'END\\0'; }\n"
    run = subprocess.run([bash, "-c", told + text], capture_output=True, text=True, check=True)
    printed = [words.split("\0")[:-1] for words in run.stdout.split("END\0")][:-1]
    commands = find_command(read_script(text), re.compile("program"))
    assert [words for _, words in commands] == printed
    assert printed


def test_what_is_read_from_elsewhere_is_no_longer_known():
    text = "N=4 M=1\nread -r N M <<< '8 9'\nmapfile -t L < f\nprintf -v P %d 3\n"
    assert read_script(text + "p $N $M $L $P $((10#08))").commands[-1] == [
        "p",
        "${N}",
        "${M}",
        "${L}",
        "${P}",
        "$((10#08))",
    ]


def test_a_fork_s_program_is_known_by_the_settings_it_gets():
    line = f"ray job submit --address=http://h:1 -- python3 -m fork.trainer.main_x {VERL} new.key=3"
    found = import_config("verl", line)
    assert found.options["num_generations"] == 4
    assert any("started by fork.trainer.main_x, not by verl" in note for note in found.notes)
    left = {item.key: item for item in found.left}
    assert (left["new.key"].value, left["ray --address"].value) == ("3", "http://h:1")
    assert "no counterpart is known" in left["new.key"].reason
    flags = "--pretrain m --advantage_estimator rloo --init_kl_coef 0.1 --n_samples_per_prompt 2"
    assert import_config("openrlhf", f"python -m lab.train {flags}").options["beta"] == 0.1
    flags = "--model_name_or_path m --dataset_name d --num_generations 4"
    line = f"python -m torch.distributed.run --nproc_per_node 2 train.py {flags}"
    found = import_config("trl", line)
    assert found.options["per_device_train_batch_size"] == 16  # TRL's 8, of two
    with pytest.raises(ValueError, match="there are 0 commands"):
        import_config("verl", "python3 -m other.main a=1")


def test_a_launcher_s_flags_are_listed_and_no_secret_of_theirs_shown():
    held = json.dumps({"env_vars": {"WANDB_API_KEY": "abc123"}})
    line = (
        f"ray job submit --runtime-env-json='{held}' --no-wait -- python3 -m verl.trainer.main_ppo"
    )
    shown = render_imported("verl", import_config("verl", f"{line} {VERL}"))
    assert 'ray --runtime-env-json: "(not shown)"' in shown and "abc123" not in shown
    assert 'ray --no-wait: "true"' in shown


@pytest.mark.parametrize(
    ("start", "processes"),
    [
        ("torchrun --nproc_per_node=8", 8), ("torchrun --nproc-per-node 2 --nnodes=3", 6),
        ("accelerate launch --num_processes 7", 7), ("accelerate launch --config_file a.yaml", 4),
        ("deepspeed --num_gpus=2", 2), ("python3", 1), ("torchrun --nproc_per_node=$GPUS", 1),
    ],
)  # fmt: skip
def test_a_device_s_batch_is_that_of_all_processes_of_the_line(
    start, processes, tmp_path, monkeypatch
):
    monkeypatch.delenv("GPUS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("num_processes: 4\nnum_machines: 1\n")
    line = f"{start} src/grpo.py --model_name_or_path m --dataset_name d --num_generations 2 "
    found = import_config("trl", line + "--per_device_train_batch_size 2 --deepspeed gone.json")
    assert found.options["per_device_train_batch_size"] == 2 * processes
    assert [i.value for i in found.left if i.key == "deepspeed"] == ["gone.json"]


def test_a_file_of_deepspeed_s_is_found_beside_the_script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    script = folder / "run.sh"
    flags = "--model_name_or_path m --dataset_name d --num_generations 4 --deepspeed zero.json"
    script.write_text(f"trl grpo {flags}\n")
    assert import_config("trl", str(script)).options["deepspeed"] == str(tmp_path / "zero.json")


@pytest.mark.parametrize(
    ("system", "line", "name"),
    [
        ("verl", f"python3 -m verl.trainer.main_ppo {VERL} trainer.max_actor_ckpt_to_keep=0",
         "save_total_limit"),
        ("verl", f"python3 -m verl.trainer.main_ppo {VERL} {ACTOR}.actor.clip_ratio_high=-1",
         "epsilon_high"),
        ("openrlhf", "python -m openrlhf.cli.train_ppo_ray --pretrain m --temperature 0 "
         "--advantage_estimator rloo --n_samples_per_prompt 2", "temperature"),
        ("trl", "trl grpo --model m --dataset d --top_p 0 --num_generations 4", "top_p"),
        ("ms-swift", "swift rlhf --rlhf_type grpo --model m --dataset d --top_p 7", "top_p"),
    ],
)  # fmt: skip
def test_a_value_that_is_none_here_ends_no_conversion(system, line, name):
    found = import_config(system, line)
    assert name not in found.options
    assert [item.reason.startswith("it must be") for item in found.left if item.key == name] == [
        True
    ]
    assert any(note.startswith(f"{name} ") and "is left out" in note for note in found.notes)


@pytest.mark.parametrize(
    ("system", "line", "message"),
    [
        ("verl", f"{VERL} {ACTOR}.rollout.n=0", "completions are 0"),
        ("verl", f"{VERL} {ACTOR}.actor.optim.betas=0.9", "must be two numbers"),
        (
            "openrlhf",
            "python -m openrlhf.cli.train_ppo_ray --adam_betas 0.9",
            "must be two numbers",
        ),
        ("ms-swift", "swift rlhf --rlhf_type grpo --per_device_train_batch_size 0", "at least 1"),
        ("ms-swift", "NNODES=0 swift rlhf --rlhf_type grpo", "NNODES is 0"),
    ],
)
def test_sizes_of_nothing_are_refused_by_name(system, line, message):
    with pytest.raises(ValueError, match=message):
        import_config(system, line)


def test_weights_against_the_sampler_of_each_version_of_verl():
    def of(words):
        found = import_config("verl", f"python3 -m verl.trainer.main_ppo {VERL} {words}")
        start = "rollout_importance_sampling_"
        parts = [found.options.get(f"{start}{n}") for n in ("mode", "threshold", "min")]
        return parts, {item.key.rpartition(".")[2] for item in found.left}

    assert of(f"{ACTOR}.actor.tis_imp_ratio_cap=2.5")[0] == ["token_truncate", 2.5, None]
    flat = "algorithm.rollout_is=True algorithm.rollout_is_threshold=4 algorithm.rollout_is_level="
    parts, left = of(f"{flat}sequence algorithm.rollout_is_mode=mask")
    assert parts == ["sequence_mask", 4.0, 0.25] and "rollout_is_veto_threshold" in left
    veto = "algorithm.rollout_is_veto_threshold=null"
    parts, left = of(f"{flat}token {veto} algorithm.rollout_is_threshold_lower=0.5")
    assert parts == ["token_truncate", 4.0, None] and "rollout_is_veto_threshold" not in left
    parts, left = of(f"{flat}geometric")
    assert parts == [None] * 3 and "rollout_is_level" in left
    parts, left = of("algorithm.rollout_is=False algorithm.rollout_is_threshold=4")
    assert parts == [None] * 3 and "rollout_is_threshold" in left


@pytest.mark.parametrize("key", ["agent_grpo.n", "data.n_samples", f"{ACTOR}.rollout.inner.n"])
def test_whatever_may_be_a_group_size_is_asked_about(key):
    found = import_config("verl", f"python3 -m verl.trainer.main_ppo {VERL} {key}=16")
    assert any(note.startswith(f"{key} 16 is no key that is known") for note in found.notes)


def test_what_only_a_run_would_tell_is_said_in_one_note(monkeypatch):
    monkeypatch.delenv("SIZE", raising=False)
    line = f"python3 -m verl.trainer.main_ppo {VERL} {ACTOR}.rollout.n=$SIZE trainer.nnodes=$(x)"
    notes = [n for n in import_config("verl", line).notes if n.startswith("only a run would tell")]
    assert len(notes) == 1 and f"{ACTOR}.rollout.n" in notes[0]


def test_files_for_something_else_are_named(tmp_path):
    file = tmp_path / "filter.yaml"
    file.write_text("model_name_or_path: m\npass_rate_min: 0.1\npass_rate_max: 0.6\n")
    with pytest.raises(ValueError, match="is for filtering a dataset"):
        import_config("trl", str(file))
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch src/my_grpo.py --config a.yaml\n")
    assert system_of(str(script)) == "trl"


def test_a_folder_is_named_as_such_and_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("model: m\ndataset: d\nnum_generations: 4\nbeta: 0.1\n")
    assert import_config("trl", "~/a.yaml").options["beta"] == 0.1
    with pytest.raises(ValueError, match="is a folder; give a file"):
        import_config("verl", str(tmp_path))


def test_what_a_script_prints_or_compares_is_no_command():
    text = """TASK=grpo
if [ "$TASK" = "grpo" ]; then X=1; fi
case $TASK in sft) Y=1;; grpo) Y=2;; esac
echo python3 -m verl.trainer.main_ppo a=1
"""
    for system in ("trl", "verl"):
        with pytest.raises(ValueError, match="there are 0 commands"):
            import_config(system, text)
    found = import_config("trl", f"{text}trl grpo --model m --dataset d --num_generations 4")
    assert found.options["num_generations"] == 4


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("data.max_obs_length", ""), ("reward_model.retrieval_score", ""),
        (f"{ACTOR}.actor.state_masking", ""), ("data.train_data_num", ""),
        ("data.train_batchsize", "data.train_batch_size"),
        (f"{ACTOR}.actor.optim.lrr", f"{ACTOR}.actor.optim.lr"),
        (f"{ACTOR}.rolout.temperature", f"{ACTOR}.rollout.temperature"),
    ],
)  # fmt: skip
def test_only_what_is_nearly_the_same_is_suggested(key, near):
    found = import_config("verl", f"python3 -m verl.trainer.main_ppo {VERL} {key}=1")
    reason = next(item.reason for item in found.left if item.key == key)
    assert reason == "no counterpart is known" + (f"; did you mean {near}?" if near else "")


def test_a_command_may_be_in_a_variable_that_another_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "grpo:\n  num_prompts_per_step: 4\n  num_generations_per_prompt: 4\n"
    (tmp_path / "c.yaml").write_text(text + "policy:\n  train_global_batch_size: 16\n")
    held = "uv run examples/run_grpo_math.py --config c.yaml grpo.max_num_steps=7"
    line = f'COMMAND="{held}" MOUNTS="a:b" sbatch --nodes=2 ray.sub'
    script = f'CMD="{held}"\nexport COMMAND="cd /x; $CMD" MOUNTS\nsbatch ray.sub\necho "$COMMAND"'
    later = f'export COMMAND\nCOMMAND="{held}"\nsbatch ray.sub'
    for text in (line, script, later):
        found = import_config("nemo_rl", text)
        assert (found.options["num_generations"], found.options["max_steps"]) == (4, 7)
        assert "the command is that of the variable COMMAND" in found.notes


def test_forms_of_values_that_systems_take():
    held = """'{"zero_optimization": {"stage": 2}}'"""
    flags = f"--num_generations 4 --dataset d --deepspeed {held} --model"
    for system, line in (("ms-swift", "swift rlhf --rlhf_type grpo"), ("trl", "trl grpo")):
        options = import_config(system, f"{line} {flags} m").options
        assert options["deepspeed"] == {"zero_optimization": {"stage": 2}}
    line = "python -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --prompt_data a/b,c/d "
    found = import_config("openrlhf", line + "--n_samples_per_prompt 2")
    assert found.options["dataset"] == "a/b" and "data.prompt_dataset" not in found.taken
    line = "torchrun --nproc_per_node=$NOWHERE grpo.py --model_name_or_path m --num_generations 2"
    notes = import_config("trl", line).notes
    assert any("how many processes there are only a run would tell" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "mode", "bound"),
    [
        ("behave_imp_weight_cap=3", "token_mask", 3.0),
        ("behav_imp_weight_cap=3", "token_mask", 3.0),
        ("behave_imp_weight_mode=token_truncate", "token_truncate", 5.0),
        ("behave_imp_weight_mode=disabled", None, 2.0),
        ("behave_imp_weight_mode=sequence_mask", None, 2.0),
    ],
)  # fmt: skip
def test_areal_s_former_names_of_weights(words, mode, bound, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "gconfig:\n  n_samples: 2\nactor:\n  use_decoupled_loss: true\n  recompute_logprob: true\n"
        "train_dataset:\n  batch_size: 4\n"
    )
    found = import_config("areal", str(file), [f"actor.{words}"])
    start = "rollout_importance_sampling_"
    assert found.options.get(f"{start}mode") == mode
    assert found.options.get(f"{start}threshold", 2.0) == bound
    assert not any("no counterpart is known" in item.reason for item in found.left)


def test_a_file_for_several_processes_is_read_once_it_is_said_for_how_many(tmp_path):
    file = tmp_path / "demo.yaml"
    file.write_text(
        "model_name_or_path: m\ndataset_name: d\nnum_generations: 14\nloss_type: dapo\n"
        "per_device_train_batch_size: 16\ngradient_accumulation_steps: 4\n"
    )
    # 16 * 4 = 64 = 4 * 14 + 8
    with pytest.raises(ValueError, match=r"64 completions, 8 more .* SOURCE: --num_processes N"):
        import_config("trl", str(file))
    assert import_config("trl", str(file), ["--num_processes", "7"]).options["num_processes"] == 7


@pytest.mark.parametrize("name", ["VERL", "verl@0.3", "OpenRLHF", "swift", "MS-Swift", "nemo-rl"])
def test_systems_are_known_by_any_spelling_of_their_names(name):
    with pytest.raises(ValueError, match=r"there are 0 commands|no such file"):
        import_config(name, "x --config y.yaml")
    found = import_config("NeMo-RL", "run_grpo.py grpo.num_generations_per_prompt=4")
    assert render_imported("NeMo-RL", found).startswith("# Imported from NeMo-RL.")
