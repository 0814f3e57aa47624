"""Whether kernels in C compute is recorded, stays when a run is resumed, and is told."""

from pathlib import Path

import pytest
import yaml

from rloo import kernels
from rloo.kernels import c_build
from support.training import make_config, make_trainer, metrics_of, weights

REASON = "there is no C compiler (cc, gcc, clang, or the one that CC names)"


def make(folder, **options):
    return make_trainer(make_config(folder, save_steps=1, logging_steps=1, **options))


def recorded(trainer) -> bool:
    return yaml.safe_load(Path(trainer.args.output_dir, "config.yaml").read_text())["cpu_kwargs"][
        "kernels"
    ]


def told(trainer) -> list[str]:
    return [note for note in trainer.policy.notes if "cpu_kwargs.kernels" in note]


@pytest.mark.slow
@pytest.mark.skipif(
    c_build.unavailable_reason() is not None, reason=str(c_build.unavailable_reason())
)
def test_a_run_with_kernels_is_the_run_without_to_rounding(tmp_path):
    runs = {}
    for name, asked in (("torch", False), ("kernels", None)):
        trainer = make(tmp_path / name, cpu_kwargs={"kernels": asked}, max_steps=3)
        trainer.train()
        assert recorded(trainer) == kernels.in_use() == (asked is None)
        assert told(trainer) == []
        runs[name] = weights(trainer), metrics_of(trainer.args)
    (one, rows), (other, others) = runs.values()
    assert [r["reward"] for r in rows] == [r["reward"] for r in others]
    assert max(r["mismatch/max"] for r in others) < 1e-4
    assert max(float((one[n] - other[n]).abs().max()) for n in one) < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(
    c_build.unavailable_reason() is not None, reason=str(c_build.unavailable_reason())
)
def test_a_run_without_stays_one_and_another_choice_is_told(tmp_path):
    make(tmp_path, cpu_kwargs={"kernels": False}, max_steps=1).train()
    resumed = make(
        tmp_path, cpu_kwargs={"kernels": None}, max_steps=2, resume_from_checkpoint="auto"
    )
    resumed.train()
    assert not recorded(resumed) and told(resumed) == []
    again = make(tmp_path, cpu_kwargs={"kernels": True}, max_steps=3, resume_from_checkpoint="auto")
    again.train()
    assert recorded(again)
    assert any("cpu_kwargs.kernels False -> True" in note for note in told(again))


def test_without_a_compiler_torch_computes_and_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "unavailable_reason", lambda: REASON)
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    assert not recorded(trainer) and not kernels.in_use()
    assert told(trainer) == [f"torch computes without kernels in C: {REASON} (cpu_kwargs.kernels)"]
    with pytest.raises(ValueError, match="kernels is true, but there is no C compiler"):
        make(tmp_path, cpu_kwargs={"kernels": True}, max_steps=1, overwrite_output_dir=True).train()
