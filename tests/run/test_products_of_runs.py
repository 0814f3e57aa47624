"""Which library computes a run's products is recorded, and stays when it is resumed."""

from pathlib import Path

import pytest
import yaml

from rloo.config.config import RLOOConfig
from rloo.model import products
from support.training import make_config, make_trainer, metrics_of, weights


@pytest.fixture(autouse=True)
def _as_before():
    before = products.in_use()
    yield
    products.use(before)


def make(folder, **options):
    return make_trainer(make_config(folder, save_steps=1, logging_steps=1, **options))


def test_what_was_chosen_is_recorded_and_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(products, "choose", lambda: ["packed", "backward"])
    first = make(tmp_path, onednn=None, max_steps=1)
    first.train()
    recorded = yaml.safe_load(Path(first.args.output_dir, "config.yaml").read_text())
    assert recorded["onednn"] == ["packed", "backward"]
    monkeypatch.setattr(products, "choose", lambda: ["forward"])
    resumed = make(tmp_path, onednn=None, max_steps=2, resume_from_checkpoint="auto")
    resumed.train()
    assert products.in_use() == ["packed", "backward"]
    assert not any("onednn" in note for note in resumed.policy.notes)


def test_another_choice_is_told(tmp_path):
    make(tmp_path, onednn=["packed"], max_steps=1).train()
    resumed = make(tmp_path, max_steps=2, resume_from_checkpoint="auto")
    resumed.train()
    assert any("onednn ['packed'] -> []" in note for note in resumed.policy.notes)


def test_a_run_with_onednn_is_the_run_with_mkl_to_rounding(tmp_path):
    runs = {}
    for name, kinds in (("mkl", []), ("onednn", list(products.KINDS))):
        trainer = make(tmp_path / name, onednn=kinds, max_steps=3)
        trainer.train()
        runs[name] = weights(trainer), metrics_of(trainer.args)
    (one, rows), (other, others) = runs.values()
    assert [r["reward"] for r in rows] == [r["reward"] for r in others]
    assert max(r["mismatch/max"] for r in others) < 1e-4
    assert max(float((one[n] - other[n]).abs().max()) for n in one) < 1e-3


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="sampling is none of packed, forward, backward"):
        RLOOConfig(onednn=["sampling"])
