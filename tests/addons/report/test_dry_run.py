"""`rloo doctor`: a configuration before it is run, and a folder after it, by the command."""

import json

import pytest
from datasets import Dataset

from rloo.addons.report.doctor.dataset_stats import answered_prompts, facts_of
from rloo.addons.report.doctor.dry_run import dry_run, examine
from rloo.addons.report.doctor.rules import diagnose
from rloo.addons.report.doctor.run_record import RecordedRun
from rloo.cli import main
from rloo.rewards import RewardSet
from rloo.trainer.trainer import RLOOTrainer
from rloo.types import Prompt
from support.sandboxes import require_a_wall
from support.text import make_tokenizer
from support.training import ROWS, make_config, make_trainer

SMALL = {
    "model": "countdown", "dataset": "countdown", "reward": ["countdown"], "bf16": False,
    "num_prompts": 3, "num_generations": 4, "max_completion_length": 30, "use_cpu": True,
    "gradient_checkpointing": False, "num_threads": 1,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    from rloo import RLOOConfig

    rows = []
    for a in range(2, 12):
        rows.append({"prompt": f"{a} + 1 = {a + 1}", "numbers": [a, 1], "target": a + 1})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RLOOConfig(**SMALL | {"dataset": str(path), "eval_dataset": str(path)})


def test_a_configuration_is_examined_without_training(config, tmp_path):
    run = dry_run(config, tmp_path / "dry")
    named = {finding.name: finding for finding in diagnose(run)}
    assert "earn the full reward" in named["prompt_answers"].evidence
    assert named["held_out_trained"].evidence == (
        "the training set has 10 of 10 prompts of the evaluation set, too"
    )
    assert "nothing_trained" not in named, "the learning rate is 0 on purpose"
    assert all(row["update/changed_share"] == 0 for row in run.rows) and len(run.rows) == 2
    assert max(row["mismatch/mean"] for row in run.rows) < 1e-4


@pytest.mark.slow
def test_the_command_examines_files_and_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [f"--{name}={json.dumps(v) if isinstance(v, list) else v}" for name, v in SMALL.items()]
    assert main(["doctor", *small, "--eval_dataset", "countdown", "--eval_split", "train"]) == 0
    said = capsys.readouterr().out
    assert "2 rollouts were sampled, scored and trained on with learning rate 0." in said
    assert "(held_out_trained)" in said
    assert not list(tmp_path.iterdir()), "no file is left"
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no run has made a step there" in capsys.readouterr().err
    assert main(["doctor", "not/there"]) == 2
    assert "not/there has no metrics.jsonl" in capsys.readouterr().err


def test_it_tells_what_rows_are_taken_for(config, tmp_path, capsys):
    require_a_wall()
    path = tmp_path / "mbpp.jsonl"
    row = {"prompt": "Add.", "task_id": 1, "test_list": ["assert add(1, 2) == 3"], "code": ""}
    path.write_text(json.dumps(row) + "\n")
    said = list(examine(config.with_values(dataset=str(path), eval_dataset=None, reward=["code"])))
    assert said[1] == "The reward code takes rows for MBPP (test_list)."


def facts(trainer):
    parts, _ = trainer.make_parts()
    return facts_of(parts, trainer._eval_prompts)


def test_templates_are_examined(tmp_path):
    plain = facts(make_trainer(make_config(tmp_path)))
    assert plain["chat_template"] == "unused" and plain["prompt"] == ROWS[0]["prompt"]
    chat = ROWS.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make_trainer(make_config(tmp_path), rows=chat)
    expected = {"shared_prompts", "longest_completion", "unknown_tokens"}  # no word for a role
    assert facts(trainer).keys() == expected
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <unk> {% endfor %}"
    )
    trainer.policy.tokenizer.chat_template = tokenizer.chat_template
    found = facts(trainer)
    assert found["chat_template"] == "turn not opened"
    assert found["end_of_turn"] == "<unk>" and found["end_of_turn_id"] == 3
    del found["unknown_tokens"]
    named = [finding.name for finding in diagnose(RecordedRun([], facts=found))]
    assert named == ["chat_template"]  # what follows from it is not told beside it


def test_unknown_words_of_prompts_are_counted(tmp_path):
    prompts = ["w1 w2 w3", "w1 plus w2", "some words here w5"]
    rows = Dataset.from_dict({"prompt": prompts, "answer": [""] * 3})
    trainer = make_trainer(make_config(tmp_path), rows=rows)
    found = facts(trainer)["unknown_tokens"]
    assert found == (4, 10, "<unk>", "<unk> <unk> <unk> w5")
    tokenizer = trainer.policy.tokenizer
    tokenizer.eos_token = tokenizer.unk_token  # as GPT-2's tokenizer names it
    assert "unknown_tokens" not in facts(trainer)


def test_an_alarm_names_unknown_words_before_the_first_step(config, tmp_path, capsys):
    rows = [{"prompt": f"How much is {a} plus 2?", "numbers": [a, 2], "target": a} for a in (3, 4)]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = {"dataset": str(path), "eval_dataset": None, "output_dir": str(tmp_path / "run")}
    RLOOTrainer(args=config.with_values(**changed, max_steps=1)).train()
    alarm, after = capsys.readouterr().out.split("alarm: ")[1].split("\nstep 1/1")
    assert alarm.startswith("The tokenizer does not know the words of the prompts: 83.3 % of 12 ")
    assert "Completions are empty" not in alarm + after and alarm.count("\n") == 0


def test_only_rewards_of_0_and_1_are_tried_on_prompts(tmp_path):
    trainer = make_trainer(make_config(tmp_path))
    prompts = trainer._source.all_prompts(4)
    assert answered_prompts(trainer.rewards, prompts, trainer.state, 1.0) is None


def test_the_last_1_to_12_words_of_16_prompts_are_tried():
    tried = []

    def last_letter(prompts, completions):
        tried.extend(zip(prompts, completions, strict=True))
        return [float(completion == "n") for completion in completions]

    words = {"a b n": ["n", "b n", "a b n"]}
    long = "x y a b c d e f g h i j k l m"
    words[long] = [long[-length:] for length in range(1, 24, 2)]  # a letter and a blank a word
    contents = [*words, *(f"{number} z" for number in range(15))]
    prompts = [Prompt(number, [1], content) for number, content in enumerate(contents)]
    found = answered_prompts(RewardSet([last_letter]), prompts, None, 1.0)
    assert found == (1, 16, "a b n")
    for prompt, expected in words.items():
        assert [completion for given, completion in tried if given == prompt] == expected
    assert dict(tried).keys() == set(contents[:16])
