"""The options as `rloo config` prints them: tiers, subjects, help that stands alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rloo.cli import main
from rloo.config.compat.aliases import ALIASES
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.fields import TIERS
from rloo.config.options import OPTIONS
from rloo.config.show import render_all, render_basic, render_option

ROOT = Path(__file__).parents[2]
# Another option is another thing to know: whoever changes these numbers says why.
NUM_OPTIONS = 180
NUM_BASIC = 25


def heads(text: str) -> list[str]:
    """The names at the beginning of a line, with their defaults."""
    return re.findall(r"^([a-z]\w*) = ", text, re.MULTILINE)


def section(text: str, subject: str) -> str:
    return text.split(f"{subject.upper()}\n\n")[1].split("\n\n")[0]


def test_the_number_of_options_and_of_basic_ones_is_known():
    basic = [field.name for field in OPTIONS if field.metadata["tier"] == "basic"]
    assert (len(OPTIONS), len(basic)) == (NUM_OPTIONS, NUM_BASIC)
    assert sorted(heads(render_basic())) == sorted(basic)


def test_every_option_has_one_tier_and_one_subject_and_stands_under_them():
    printed = render_all()
    starts = [printed.index(f"{tier.upper()} OPTIONS (") for tier in TIERS]
    assert starts == sorted(starts)
    ends = [*starts[1:], printed.index("REFUSED, EXCEPT")]
    for tier, start, end in zip(TIERS, starts, ends, strict=True):
        of_tier = [option for option in OPTIONS if option.metadata["tier"] == tier]
        part = printed[start:end]
        assert part.startswith(f"{tier.upper()} OPTIONS ({len(of_tier)}): {TIERS[tier]}.")
        assert sorted(heads(part)) == sorted(option.name for option in of_tier)
        for option in of_tier:
            assert option.name in heads(section(part, option.metadata["subject"]))


def test_expert_options_are_those_that_few_need():
    """None of the options of examples and of the README's commands is among them."""
    expert = {option.name for option in OPTIONS if option.metadata["tier"] == "expert"}
    assert 50 <= len(expert) <= 90
    written = set()
    for path in (ROOT / "examples").glob("*.yaml"):
        written |= set(yaml.safe_load(path.read_text(encoding="utf-8")))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    written |= set(re.findall(r"--(\w+)", text))
    assert len(written) > 20 and not written & expert


def test_the_help_of_an_option_is_one_sentence_that_stands_alone():
    for field in OPTIONS:
        help = field.metadata["help"]
        assert re.fullmatch(r"[A-Z4].{15,}\.", help) and ". " not in help, field.name
        assert not re.match(r"(Its?|Of|By|As|In|That|This|Null|Such)\b", help), field.name
        assert not re.search(r"\b(answers?|see next)\b", help), field.name
        assert "%" not in help  # argparse reads it as a format


def test_all_names_of_other_systems_are_listed():
    words = set(re.split(r"[\s,;:]+", render_all()))
    assert {*ALIASES, *REFUSED, *WITHOUT_EFFECT} <= words
    for alias, (ours, system) in ALIASES.items():
        explained = " ".join(str(render_option(alias)).split())
        assert explained.startswith(f"{ours} = ") and f"{alias}" in explained
        assert f"({system})" in explained


@pytest.mark.parametrize("columns", [80, 100])
def test_lines_are_no_wider_than_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = (render_basic() + render_all()).splitlines()
    # What no blank divides is not broken.
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("beta", ["beta = 0.05 ", "Weight of the KL penalty", "kl_coef (TRL before 0.22"]),
        ("kl_coef", ["beta = 0.05 "]),
        ("warmup-ratio", ["warmup_steps = 0 "]),
        ("output_dir", ["output_dir = rloo_output ", "TRL's default is null."]),
        ("use_vllm", ["use_vllm = false ", "Sample with vLLM"]),
        (
            "vllm_gpu_memory_utilization",
            ["vllm_gpu_memory_utilization = null\n", "0.9 on separate", "TRL's default is 0.3."],
        ),
        ("vllm_group_port", ["vllm_group_port = 51216", "servers read the weights from a folder"]),
        ("loss_type", ["loss_aggregation = sequence", "loss_type (TRL's GRPO)"]),
        ("prediction_loss_only", ["prediction_loss_only ", "scores them with the rewards"]),
        ("log_level", ["log_level = passive ", "Accepted without effect"]),
    ],
)
def test_one_option_is_explained_by_any_of_its_names(name, expected, capsys):
    assert main(["config", name]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(expected[0])
    assert all(part in " ".join(printed.split()) for part in expected[1:])


def test_an_unknown_name_is_refused_with_the_nearest(capsys):
    assert main(["config", "betaa"]) == 2
    assert "did you mean beta?" in capsys.readouterr().err
