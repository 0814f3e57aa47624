"""What a run leaves for others to use: weights in the base's precision, a card with results, and
adapters that are merged into their base."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from rloo import cli
from rloo.config.parsing import parse_command_line
from support.adapters import logits_of, make_adapted
from support.models import COMMON
from support.text import make_tokenizer
from support.training import ROWS, make_config, make_trainer, train_until_power_cut, weights


def saved(folder: Path) -> Path:
    """The folder of a model in bfloat16, whose embeddings are tied."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**COMMON, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}


@pytest.mark.parametrize("option", [None, "float16", "float32"])
def test_a_result_has_the_base_s_precision_or_the_one_asked_for(tmp_path, option):
    base = saved(tmp_path / "base")
    config = make_config(tmp_path, max_steps=1, save_steps=1, save_dtype=option)
    trainer = make_trainer(config, model=str(base))
    trainer.train()
    run, wanted = Path(config.output_dir), getattr(torch, option or "bfloat16")
    assert dtypes(run) == {wanted} and dtypes(run / "checkpoint-1") == {torch.float32}
    assert set(load_file(run / "model.safetensors")) == set(load_file(base / "model.safetensors"))
    for name in ("float32", "bfloat16", "float16"):  # where the file says which it is
        assert (f'"{name}"' in (run / "config.json").read_text()) == (name == str(wanted)[6:])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run, dtype="auto")
    assert loaded.dtype == wanted
    expected = {name: weight.to(wanted) for name, weight in weights(trainer).items()}
    assert all(torch.equal(p, expected[n]) for n, p in loaded.named_parameters())
    resolved = transformers.AutoConfig.from_pretrained(run / "checkpoint-1").dtype
    assert resolved == torch.float32
    assert trainer.args.save_dtype == str(wanted)[6:]


def test_a_model_that_a_script_has_loaded_keeps_its_own_precision(tmp_path):
    base = transformers.AutoModelForCausalLM.from_pretrained(
        saved(tmp_path / "base"), dtype=torch.float32
    )
    config = make_config(tmp_path, max_steps=1)
    make_trainer(config, model=base).train()
    assert dtypes(Path(config.output_dir)) == {torch.float32}


def test_a_weight_that_float16_cannot_hold_is_refused_by_name(tmp_path):
    trainer = make_trainer(make_config(tmp_path, save_dtype="float16"))
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has values beyond"):
        trainer.save_model(str(tmp_path / "there"))


def evaluated(tmp_path: Path, prompts: int = 5, **options) -> Path:
    config = make_config(
        tmp_path, max_steps=2, eval_on_start=True, eval_strategy="steps", eval_steps=1, **options
    )
    make_trainer(config, eval_dataset=ROWS.select(range(prompts))).train()
    return Path(config.output_dir)


@pytest.mark.parametrize(
    ("use_peft", "prompts", "said"),
    [(False, 5, "5 held-out prompts"), (True, 1, "1 held-out prompt")],
)
def test_the_card_has_the_first_and_last_evaluation_and_metadata_that_the_hub_reads(
    tmp_path, use_peft, prompts, said
):
    run = evaluated(tmp_path, prompts, use_peft=use_peft)
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    card = ModelCard.load(run / "README.md", ignore_metadata_errors=False)
    shown = {
        cells[1].strip(): [cell.strip() for cell in cells[2:4]]
        for line in card.text.splitlines()
        if len(cells := line.split("|")) == 5
    }
    assert shown[""] == ["step 0", "step 2"] and f"On {said} of " in card.text
    for name, label in (("pass@1", "pass@1"), ("pass@1_greedy", "pass@1, greedy")):
        assert shown[label] == [
            "{:.1f} % [{:.1f}, {:.1f}]".format(
                *(100 * x for x in (row[name], *row[f"{name}_interval"]))
            )
            for row in (rows[0], rows[-1])
        ]
    assert shown["mean reward"] == [f"{row['reward']:.3f}" for row in (rows[0], rows[-1])]
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    names = ("pass@1", "pass@1_greedy", "reward")
    assert results == {name: pytest.approx(rows[-1][name], abs=5e-5) for name in names}
    assert card.data.library_name == ("peft" if use_peft else "transformers")
    assert "`rloo train config.yaml --output_dir again`" in card.text


def test_a_card_of_another_is_left_alone_also_at_the_end(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    evaluated(tmp_path)
    assert (folder / "README.md").read_text() == "mine"


@pytest.fixture
def adapter(tmp_path, monkeypatch) -> Path:
    """The folder of an adapter with an effect, whose base is in bfloat16."""
    monkeypatch.chdir(tmp_path)
    base = saved(Path("base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    make_adapted(base=model, use_dora=True).save_pretrained("adapter")
    make_tokenizer().save_pretrained("adapter")
    return Path("adapter")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_a_merged_adapter_computes_what_base_and_adapter_do(adapter, capsys):
    from peft import AutoPeftModelForCausalLM

    assert cli.main(["merge", "adapter", "merged", "--save_dtype", "float32"]) == 0
    assert "base with adapter is in merged: float32" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
    assert merged.dtype == torch.float32 and not list(Path("merged").glob("adapter*"))
    apart = AutoPeftModelForCausalLM.from_pretrained("adapter", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged), logits_of(apart), atol=1e-5, rtol=0)
    assert (logits_of(merged) - logits_of(base)).abs().max() > 0.1
    tokenizer = transformers.AutoTokenizer.from_pretrained("merged")
    assert tokenizer("w1 w2")["input_ids"] == make_tokenizer()("w1 w2")["input_ids"]


def test_a_merged_model_has_the_base_s_precision_names_and_card(adapter):
    Path("merged").mkdir()  # empty
    assert cli.main(["merge", "adapter", "merged"]) == 0
    assert dtypes(Path("merged")) == {torch.bfloat16}
    names = [set(load_file(f"{folder}/model.safetensors")) for folder in ("merged", "base")]
    assert names[0] == names[1]
    card = ModelCard.load("merged/README.md")
    assert card.data.library_name == "transformers"
    assert "The adapter is merged into its base, base." in card.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "merge takes the folder of an adapter and the folder for the merged model"),
        (["adapter"], "merge takes the folder of an adapter and the folder for the merged model"),
        (["adapter", "out", "--beta", "1"], "merge takes save_dtype and trust_remote_code, not"),
        (["base", "out"], "base has no adapter_config.json: it is a whole model"),
        (["none/at/all", "out"], "model none/at/all does not exist on this disk"),
        (["adapter", "base"], "base is there and not empty; name another folder"),
        (["adapter", "out", "--save_dtype", "int8"], "save_dtype is 'int8'; it must be one of"),
    ],
)
def test_what_cannot_be_merged_is_refused(adapter, capsys, arguments, expected):
    assert cli.main(["merge", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("out").exists()


def test_weights_that_are_not_finite_are_not_merged(adapter, capsys):
    tensors = load_file("adapter/adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, "adapter/adapter_model.safetensors", {"format": "pt"})
    assert cli.main(["merge", "adapter", "out"]) == 2
    assert "not finite" in capsys.readouterr().err
    assert not Path("out").exists() and not list(Path().glob("tmp-*"))


@pytest.mark.parametrize("mask", [0o027, 0o077])
def test_what_a_run_writes_has_the_mode_that_the_process_gives(tmp_path, mask):
    before = os.umask(mask)
    try:
        trainer = make_trainer(make_config(tmp_path, max_steps=1, save_steps=1))
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    finally:
        os.umask(before)
    weights = [*tmp_path.rglob("*.safetensors")]
    assert {path.parent.name for path in weights} == {"run", "checkpoint-1", "saved"}
    assert {path.stat().st_mode & 0o777 for path in weights} == {0o666 & ~mask}


@pytest.mark.slow
def test_a_summary_has_the_room_of_completions_and_what_the_first_command_named(tmp_path):
    first = make_trainer(make_config(tmp_path, save_steps=1, max_steps=3))
    context, longest = first.model.config.max_position_embeddings, 6  # tokens of the longest row
    train_until_power_cut(first, after=2)
    folder = tmp_path / "run"
    again = ["resume_from_checkpoint=auto", "max_steps=4"]
    config = parse_command_line([str(folder / "config.yaml"), *[f"--{a}" for a in again]])
    assert len(config.named) > 100
    make_trainer(config).train()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["longest_completion"] == context - longest
    assert set(summary["named"]) == {*first.args.named, "max_steps", "resume_from_checkpoint"}
