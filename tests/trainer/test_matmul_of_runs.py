"""Which library computes a run's products is recorded, and stays when it is resumed."""

from pathlib import Path

import pytest
import torch
import yaml

from rloo.config.config import RLOOConfig
from rloo.kernels import cpu_matmul
from rloo.trainer import cpu_settings
from support.training import make_config, make_trainer, metrics_of, weights


def make(folder, **options):
    return make_trainer(make_config(folder, save_steps=1, logging_steps=1, **options))


@pytest.mark.slow
def test_what_was_chosen_is_recorded_and_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_settings, "_WORTH_MEASURING", 0)
    chosen = ["packed", "forward:many:wide", "backward"]
    monkeypatch.setattr(cpu_matmul, "choose", lambda **_: chosen)
    first = make(tmp_path, cpu_kwargs={"onednn": None}, max_steps=1)
    first.train()
    recorded = yaml.safe_load(Path(first.args.output_dir, "config.yaml").read_text())
    assert recorded["cpu_kwargs"]["onednn"] == chosen
    monkeypatch.setattr(cpu_matmul, "choose", lambda **_: ["forward"])
    resumed = make(
        tmp_path, cpu_kwargs={"onednn": None}, max_steps=2, resume_from_checkpoint="auto"
    )
    resumed.train()
    assert cpu_matmul.in_use() == chosen
    assert not any("onednn" in note for note in resumed.policy.notes)


def test_another_choice_is_told(tmp_path):
    make(tmp_path, cpu_kwargs={"onednn": ["packed"]}, max_steps=1).train()
    resumed = make(tmp_path, cpu_kwargs={"onednn": []}, max_steps=2, resume_from_checkpoint="auto")
    resumed.train()
    assert any("onednn ['packed'] -> []" in note for note in resumed.policy.notes)


@pytest.mark.slow
def test_a_run_with_onednn_is_the_run_with_mkl_to_rounding(tmp_path):
    runs = {}
    for name, kinds in (("mkl", []), ("onednn", list(cpu_matmul.KINDS))):
        trainer = make(tmp_path / name, cpu_kwargs={"onednn": kinds}, max_steps=3)
        trainer.train()
        runs[name] = weights(trainer), metrics_of(trainer.args)
    (one, rows), (other, others) = runs.values()
    assert [r["reward"] for r in rows] == [r["reward"] for r in others]
    assert max(r["mismatch/max"] for r in others) < 1e-4
    assert max(float((one[n] - other[n]).abs().max()) for n in one) < 1e-3


def test_an_unknown_kind_is_refused():
    for name in ("sampling", "packed:some:wide", "forward:few:wide"):
        known = "packed, forward, backward, weight, bf16"
        expected = f"{name} is none of {known}, nor a class of them as forward:some"
        with pytest.raises(ValueError, match=expected):
            RLOOConfig(cpu_kwargs={"onednn": ["packed:wide", name]})


def test_a_small_model_is_not_measured_for(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "choose", None)
    cpu_matmul.use(["packed"])  # by another run of this process
    trainer = make(tmp_path)
    assert trainer.args.cpu_options.onednn is None and cpu_matmul.in_use() == []
    monkeypatch.setattr(cpu_settings, "_WORTH_MEASURING", trainer.model.num_parameters())
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        make(tmp_path / "measured")


@pytest.mark.slow
def test_where_16_bits_cannot_be_packed_a_note_says_so_and_they_are_not(tmp_path, monkeypatch):
    def pack(matrix):
        if matrix.dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw")
        return whole(matrix)

    whole = cpu_matmul.pack
    monkeypatch.setattr(cpu_matmul, "pack", pack)
    monkeypatch.setattr(cpu_matmul, "can_pack", cpu_matmul.can_pack.__wrapped__)
    in_torch, in_c = ({"onednn": ["packed"], "kernels": kernels} for kernels in (False, True))
    options = {"rollout_dtype": "bfloat16", "max_steps": 1}
    trainer = make(tmp_path / "torch", cpu_kwargs=in_torch, **options)
    trainer.train()
    assert any("packs no matrices in bfloat16" in note for note in trainer.policy.notes)
    in_float32 = make(
        tmp_path / "32", cpu_kwargs=in_torch, **options | {"rollout_dtype": "float32"}
    )
    kernels = make(tmp_path / "kernels", cpu_kwargs=in_c, **options)
    for other in (in_float32, kernels):
        assert not any("packs no" in note for note in other.policy.notes)


def test_without_onednn_a_note_says_that_mkl_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "unavailable_reason", lambda: "this torch has no such products")
    notes = make(tmp_path / "asked", cpu_kwargs={"onednn": ["packed"]}).policy.notes
    assert (
        "MKL computes all products, not oneDNN: this torch has no such products (cpu_kwargs.onednn)"
        in notes
    )
    assert cpu_matmul.in_use() == []
    monkeypatch.setattr(cpu_settings, "_WORTH_MEASURING", 0)
    assert any("not oneDNN" in note for note in make(tmp_path / "measured").policy.notes)
    assert not any(
        "not oneDNN" in n for n in make(tmp_path / "mkl", cpu_kwargs={"onednn": []}).policy.notes
    )
