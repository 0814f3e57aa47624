"""The rules over literal records: each named where it holds, and not beside it."""

import json
import math
import random
import shlex
import subprocess
import sys
from dataclasses import asdict

import pytest

from rloo.addons.report.doctor import (
    completion_rules,
    data_rules,
    learning_signal,
    reward_rules,
    training_rules,
)
from rloo.addons.report.doctor.doctor_command import describe, findings_of, read_run, report
from rloo.addons.report.doctor.live_rules import LiveDoctor
from rloo.addons.report.doctor.rules import RULES, diagnose
from rloo.addons.report.doctor.run_record import RecordedRun
from rloo.tracking.before_after import change_of, windows
from rloo.tracking.progress_line import progress_line
from rloo.tracking.summary_text import headline, summary_text, training_of
from tools.doctor_page import PAGE, filled

NORMAL = {
    "reward": 0.4,
    "reward_std": 0.48,
    "reward/standard_error": 0.02,
    "reward/unscored": 0.0,
    "groups/signal": 0.8,
    "baseline/variance": 0.1,
    "completions/mean_length": 20.0,
    "completions/clipped_ratio": 0.02,
    "rewards/right/mean": 0.4,
    "entropy": 0.6,
    "kl": 0.02,
    "mismatch/mean": 1e-6,
    "update/no_signal": 0.0,
    "update/nonfinite": 0.0,
    "update/changed_share": 1.0,
    "learning_rate": 1e-5,
    "step_time": 1.0,
}
OPTIONS = ("num_generations", "beta", "max_completion_length", "temperature")
TEXTS = [f"The sum of {n} and {n + 1} is {2 * n + 1}." for n in range(4)]


def rows(number=12, **changes):
    """Rollouts of a run that is well, with other values: one, from one to another, or a list."""
    made = []
    for index in range(number):
        share = index / max(1, number - 1)
        row = {"step": index + 1, **NORMAL}
        for name, value in changes.items():
            if isinstance(value, list):
                row[name] = value[index]
                continue
            before, after = value if isinstance(value, tuple) else (value, value)
            row[name] = before + share * (after - before) if before != after else before
        made.append({name: value for name, value in row.items() if value is not None})
    return made


def texts(before=TEXTS, after=TEXTS, number=12, reward=0.4):
    return [
        {"step": step, "completion": text, "reward": reward, "scores": {"right": reward}}
        for step in range(1, number + 1)
        for text in (before if step <= number // 2 else after)
    ]


def names(found_rows=None, written=(), **others):
    run = RecordedRun(
        rows() if found_rows is None else found_rows, list(written) or texts(), **others
    )
    return [finding.name for finding in diagnose(run)]


FALLING = {"rewards/right/mean": (0.4, 0.1), "rewards/format/mean": (0.2, 0.9)}
SICK = {
    "missing": ("rewards_missing", rows(reward=math.nan), {}),
    "zero": ("rewards_zero", rows(reward=0.0, reward_std=0.0, **{"groups/signal": 0.0}), {}),
    "equal": ("rewards_equal", rows(reward=1.0, reward_std=0.0, **{"groups/signal": 0.0}), {}),
    "flat": ("groups_flat", rows(**{"groups/signal": 0.0}), {}),
    "still": ("nothing_trained", rows(**{"update/changed_share": 0.0}), {}),
    "solved": ("already_solved", rows(reward=0.98, reward_std=0.1), {}),
    "failing": ("partly_missing", rows(**{"rewards/right/failed": 0.5}), {}),
    "few": ("little_signal", rows(**{"groups/signal": 0.05}), {"config": {"num_generations": 16}}),
    "cold": ("greedy_sampling", rows(entropy=0.001), {"config": {"temperature": 0.1}}),
    "fast": ("learning_rate_high", rows(reward=(0.4, 0.1), kl=(0.0, 9.0)), {}),
    "far": ("kl_explosion", rows(kl=(0.5, 2.5)), {}),
    "narrow": ("collapse", rows(entropy=[0.3 * 0.55**n for n in range(12)]), {}),
    "apart": ("mismatch", rows(**{"mismatch/mean": 0.2}), {}),
    "refused": ("steps_refused", rows(**{"update/nonfinite": 1.0}), {}),
    "slow": ("learning_rate_low", rows(kl=1e-6, learning_rate=1e-7), {}),
    "alike": ("rewards_alike", rows(reward=1.0001, reward_std=6e-5), {}),
    "held": ("beta_high", rows(), {"config": {"beta": 9.0}}),
    "two": ("few_generations", rows(), {"config": {"num_generations": 2}}),
    "cut": ("truncation", rows(**{"completions/clipped_ratio": 0.5}), {}),
    "endless": ("missing_eos", rows(**{"completions/clipped_ratio": 1.0}), {}),
    "growing": (
        "length_explosion",
        rows(**{"completions/clipped_ratio": (0.0, 0.9), "completions/mean_length": (20.0, 60.0)}),
        {},
    ),
    "empty": (
        "empty",
        rows(**{"completions/mean_length": [1 + 20 * 0.6**n for n in range(12)]}),
        {},
    ),
    "form": (
        "only_form",
        rows(reward=(0.5, 1.4), **{"rewards/format/mean": (0.1, 1.0)}),
        {},
    ),
    "cost": ("reward_at_cost", rows(reward=(0.6, 1.0), **FALLING), {}),
    "in training": ("held_out_trained", rows(), {"facts": {"shared_prompts": {"": (3, 9, "a")}}}),
    "answered": ("prompt_answers", rows(), {"facts": {"answered_prompts": (5, 16, "a")}}),
    "unknown": ("unknown_tokens", rows(), {"facts": {"unknown_tokens": (5, 100, "<unk>", "a")}}),
    "unopened": (
        "chat_template",
        rows(),
        {"facts": {"chat_template": "turn not opened", "prompt": "a"}},
    ),
    "solved at times": (
        "already_solved",
        rows(reward=[1.0, 1.0, 1.0, 1.0, 0.98, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], reward_std=0.01),
        {},
    ),
    "cut until short": (
        "truncation",
        rows(**{"completions/clipped_ratio": [0.6 * 0.7**n for n in range(12)]}),
        {},
    ),
    "nearly still": (
        "learning_rate_low",
        rows(kl=None, learning_rate=1e-7),
        {"evaluations": [{"completions/mean_length": n, "reward": 0.4} for n in (20.0, 20.4)]},
    ),
    "full": ("memory", rows(), {"facts": {"out_of_memory": "OutOfMemoryError: no"}}),
    "turn": ("missing_eos", rows(), {"facts": {"end_of_turn": "<e>", "end_of_turn_id": 7}}),
}


def test_a_run_that_is_well_has_no_finding():
    assert names() == []
    assert names(rows(reward=(0.2, 0.9), kl=(0.0, 0.6), entropy=(0.6, 0.1))) == []


@pytest.mark.parametrize("case", SICK)
def test_a_sick_run_is_named(case):
    name, of_run, others = SICK[case]
    assert names(of_run, **others)[:1] == [name]


def test_a_model_that_says_nothing_is_named_before_its_rewards():
    zero = rows(reward=0.0, reward_std=0.0, **{"groups/signal": 0.0})
    assert names(zero, texts(before=["", " ", "\n", "a"])) == ["silent"]
    assert names(zero, texts(before=["", "b", "c", "a"])) == ["rewards_zero"]
    assert names(rows(reward=(0.2, 0.9)), texts(before=["", ""])) == []  # it says something now
    plain = {"chat_template": "unused", "prompt": "2 + 2"}
    (finding,) = diagnose(RecordedRun(zero, texts(before=["", " "]), facts=plain))
    assert finding.name == "chat_template" and "100 % of 8 recorded" in finding.evidence


def test_unknown_words_are_named_before_the_silence_that_follows():
    zero = rows(reward=0.0, reward_std=0.0, **{"groups/signal": 0.0})
    silent, config = texts(before=["", " "]), {"model": "countdown"}
    facts = {"unknown_tokens": (50, 60, "<unk>", "<unk> 30 <unk>")}
    (finding,) = diagnose(RecordedRun(zero, silent, facts=facts, config=config))
    assert finding.name == "unknown_tokens"
    assert finding.evidence.startswith("83.3 % of 60 tokens of the prompts are <unk>, ")
    assert finding.evidence.endswith("one prompt is read as '<unk> 30 <unk>'")
    assert finding.change.endswith("countdown reads only its own problems (dataset)")
    (finding,) = diagnose(RecordedRun(zero, silent, facts=facts, config={"model": "a/b"}))
    assert "countdown" not in finding.change and "(model)" in finding.change
    few = {"unknown_tokens": (2, 60, "<unk>", "")}
    assert names(zero, silent, facts=few) == ["silent"]


def test_what_is_not_scored_is_told_though_it_was_given_up():
    written = [
        row | {"scores": {"right": None if index < 8 else 0.4}} for index, row in enumerate(texts())
    ]
    assert names(written=written) == ["partly_missing"]
    assert names(written=[*written[7:]]) == []


def test_what_only_seems_sick_is_not_named():
    cost = {"rewards/right/mean": (0.2, 0.8), "rewards/form/mean": (1.0, 0.85)}
    assert names(rows(reward=(0.4, 1.0), **cost)) == []
    lengths = [{"completions/mean_length": n, "reward": 0.4} for n in (20.0, 21.0)]
    assert names(rows(kl=None), evaluations=lengths) == []
    cut = {"completions/clipped_ratio": [0.6 * 0.7**n for n in range(12)]}
    assert names(rows(reward=(0.2, 0.9), **cut)) == []


@pytest.mark.parametrize(
    ("end", "reward_std", "expected"),
    [
        ({"completions/mean_length": 20.1}, 0.4, ["learning_rate_low"]),
        ({"completions/mean_length": 20.4}, 0.4, []),
        ({"completions/mean_length": 20.1, "pass@1": 0.5}, 0.4, []),
        ({"completions/mean_length": 20.1}, 0.0, []),
    ],
    ids=("the same", "other lengths", "another score", "nothing to tell them by"),
)
def test_held_out_completions_that_are_the_same_tell_more_than_the_entropy_of_other_prompts(
    end, reward_std, expected
):
    start = {"completions/mean_length": 20.0, "reward": 0.4, "reward_std": reward_std}
    start |= {"pass@1": 0.4}
    slow = rows(kl=None, entropy=(0.6, 0.5), reward=(0.2, 0.6), learning_rate=1e-7)
    assert names(slow, evaluations=[start, start | end]) == expected


@pytest.mark.parametrize(
    ("room", "options", "words"),
    [
        (None, {"max_completion_length": 128}, "allow four times the length"),
        (128, {"max_completion_length": 128}, "allow four times the length"),
        (100, {"max_completion_length": 100}, "allow 100 tokens, which is all that the model's"),
        (32, {}, "shorten the prompts or take a model of a longer context"),
    ],
)
def test_a_longer_limit_is_advised_as_far_as_the_context_allows(room, options, words):
    config = {"max_completion_length": 32}
    facts = {} if room is None else {"longest_completion": room}
    (finding,) = diagnose(RecordedRun(SICK["cut"][1], texts(), config=config, facts=facts))
    assert finding.name == "truncation" and dict(finding.options) == options
    assert finding.change.startswith(words)


def test_the_room_of_completions_makes_no_alarm_early():
    watch = LiveDoctor({})
    watch.facts = {"longest_completion": 100}
    for row in rows(1, **{"completions/clipped_ratio": 0.9}):
        watch.add(row)
    assert watch.news() == []


def test_every_rule_is_seen_to_hold():
    seen = {name for name, *_ in SICK.values()} | {"gibberish", "same_text", "hacking", "silent"}
    assert seen == {rule.name for rule in RULES}
    parts = (data_rules, learning_signal, training_rules, reward_rules, completion_rules)
    assert len(RULES) == sum(len(part.RULES) for part in parts), "each rule stands in the list once"


def test_what_is_missing_is_told_as_none_nan_or_failed():
    def said(**changes):
        run = RecordedRun(rows(reward=math.nan, **{"rewards/right/mean": math.nan, **changes}))
        return diagnose(run)[0].evidence

    assert "right returned None" in said()
    assert "right returned NaN for 100.0 %" in said(**{"rewards/right/nan": 1.0})
    assert "25.0 % of the calls of right failed" in said(**{"rewards/right/failed": 0.25})


def test_gibberish_is_what_repeats_itself_or_cannot_be_printed():
    run = rows(reward=(0.2, 0.9))
    assert names(run, texts(after=["7 + 7 ; " * 20] * 4))[0] == "gibberish"
    assert names(run, texts(after=["�\x00�\x07 ab" * 4] * 4))[0] == "gibberish"
    assert names(run, texts(before=["7 + 7 ; " * 20] * 4, after=["7 + 7 ; " * 20] * 4)) == []
    assert names(run, texts(after=["#### 3"] * 4))[0] == "same_text"


def evaluations(before, after, name="judge"):
    rate, bounds = f"rewards/{name}/mean", f"rewards/{name}/mean_interval"
    return [
        {
            "step": step,
            "name": "start",
            "reward": 0.4,
            rate: value,
            bounds: [value - 0.1, value + 0.1],
        }
        for step, value in ((0, before), (12, after))
    ]


def test_hacking_is_judged_by_what_is_not_trained():
    rising = rows(reward=(0.2, 0.9))
    assert names(rising, evaluations=evaluations(0.8, 0.2)) == ["hacking"]
    assert names(rising, evaluations=evaluations(0.8, 0.75)) == []
    assert names(rows(), evaluations=evaluations(0.8, 0.2)) == []  # nothing was gained either
    grown = {"completions/mean_length": (20.0, 60.0), "completions/clipped_ratio": (0.0, 0.9)}
    longer = rows(reward=(0.2, 0.9), **grown)
    (finding,) = diagnose(RecordedRun(longer, texts(), evaluations(0.8, 0.75)))
    assert finding.name == "hacking" and finding.options == {"missing_eos_penalty": 1.0}
    assert names(longer, evaluations=evaluations(0.5, 0.8)) == ["length_explosion"]
    lost = evaluations(0.5, 0.5)
    lost[1] |= {"rewards/judge/win_rate": 0.3, "rewards/judge/win_rate_interval": [0.2, 0.4]}
    (finding,) = diagnose(RecordedRun(rising, texts(), lost, {"beta": 0.01}))
    assert "win only 30.0 % [20.0, 40.0] of comparisons" in finding.evidence
    assert finding.command == "RLOOConfig(beta=0.1)"


def test_a_finding_has_the_command_that_changes_one_thing():
    run = RecordedRun(rows(reward=(0.4, 0.1), kl=(0.0, 9.0)), source=("runs/a/config.yaml",),
        config={"output_dir": "runs/a b"})  # fmt: skip
    assert diagnose(run)[0].command == (
        "rloo train runs/a/config.yaml --learning_rate 1e-06 --output_dir 'runs/a b-again'"
    )


def test_the_hacking_of_a_real_run_is_named():
    """examples/gsm8k.yaml on a weak model, 40 steps: completions became `#### 3`."""
    run = rows(
        40,
        reward=(0.76, 0.99),
        **{
            "rewards/gsm8k_reward/mean": [0.01 + 0.005 * (n % 2) for n in range(40)],
            "rewards/gsm8k_format_reward/mean": (0.75, 0.98),
            "rewards/right/mean": None,
            "completions/mean_length": (83.0, 13.0),
        },
    )
    finding = diagnose(
        RecordedRun(run, texts(number=40, after=["#### 3", "#### 4", "#### 12", "#### 30"]))
    )[0]
    assert finding.name == "only_form" and finding.voids
    assert "gsm8k_format_reward rose from 0.771 to 0.959" in finding.evidence
    assert "completions went from 76.7 to 19.3 tokens" in finding.evidence


@pytest.mark.parametrize("case", SICK)
def test_a_command_can_be_given_as_it_stands(case, tmp_path):
    from rloo.config.parsing import parse_command_line

    path = tmp_path / "config.yaml"
    path.write_text("model: countdown\ndataset: countdown\nreward: [a.py:f, b.py:g]\n")
    _, found_rows, others = SICK[case]
    for finding in diagnose(RecordedRun(found_rows, texts(), **others, source=(str(path),))):
        if finding.command:
            program, command, *arguments = shlex.split(finding.command)
            assert (program, command) == ("rloo", "train")
            parse_command_line(arguments)


def test_a_folder_is_examined_without_torch():
    code = (
        "import sys, rloo.addons.report.doctor.doctor_command\n"
        "print(*{'torch', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- while it runs ---------------------------------------------------------------------------------


def test_an_alarm_comes_once_and_after_four_rollouts():
    watch, told = LiveDoctor({}), {}
    for row in rows(9, reward=0.0, reward_std=0.0):
        watch.add(row)
        told[row["step"]] = [finding.name for finding in watch.news()]
    assert [step for step, found in told.items() if found] == [4]
    assert told[4] == ["rewards_zero"]


def test_a_long_run_is_watched_by_its_first_and_last_rollouts():
    watch = LiveDoctor({})
    for row in rows(400):
        watch.add(row)
        assert not watch.news()
    for row in rows(8, **{"completions/clipped_ratio": 0.9}):
        watch.add({**row, "step": 400 + row["step"]})
        watch.add_completions(
            [{"step": row["step"], "completion": "old", "scores": {"right": 0.0}}]
        )  # given up since
        written = {"step": 400 + row["step"], "completion": "new", "scores": {"right": 0.0}}
        watch.add_completions([written])
    (finding,) = watch.news()
    assert finding.name == "truncation" and list(finding.examples) == ["'new'", "'new'"]


# -- after it ran ----------------------------------------------------------------------------------


def write(folder, found_rows, written=(), measured=()):
    folder.mkdir(exist_ok=True)
    parts = {"metrics": found_rows, "completions": written, "evaluations": measured}
    for name, some in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def test_a_run_that_died_is_read_from_what_it_left(tmp_path):
    nulls = [{**row, "reward": None} for row in rows(6)]
    folder = write(tmp_path / "a", nulls, texts(number=6, reward=None))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    lines = list(report(folder))
    assert lines[0] == "Died after 6 of 0 steps."
    assert lines[1].startswith("No completion gets a reward: in 6 of 6 rollouts")
    assert lines[2] == "So this is no progress: 6 steps were made."
    assert any(line.startswith("   change:  call the reward function") for line in lines)
    assert not any("rose" in line for line in lines)


def test_what_was_found_before_the_first_step_stays_found(tmp_path):
    folder = write(tmp_path / "a", rows())
    (finding,) = diagnose(RecordedRun(rows(), facts={"shared_prompts": {"": (3, 9, "a")}}))
    row = {"step": 0, "finding": asdict(finding)}
    (folder / "alarms.jsonl").write_text(json.dumps(row) + "\n")
    assert [found.name for found in findings_of(folder)] == ["held_out_trained"]


def test_the_command_of_an_alarm_names_the_configuration_of_the_folder(tmp_path):
    folder = write(tmp_path / "a", rows(**{"completions/clipped_ratio": 0.4}))
    named = {"model": "m", "dataset": "d", "reward": ["r"], "prompt_template": "{question}"}
    (folder / "config.yaml").write_text(json.dumps(named))
    plain = {"chat_template": "unused", "prompt": "2 + 2"}
    cut = rows(**{"completions/clipped_ratio": 0.4})
    alarm = next(f for f in diagnose(RecordedRun(cut, facts=plain)) if f.name == "chat_template")
    assert alarm.command.startswith("RLOOConfig(")
    row = {"step": 0, "finding": asdict(alarm)}
    (folder / "alarms.jsonl").write_text(json.dumps(row) + "\n")
    (command,) = [found.command for found in findings_of(folder) if found.name == alarm.name]
    assert command.startswith(f"rloo train {folder / 'config.yaml'} --prompt_template ")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no metrics.jsonl: no run has made a step there"):
        read_run(tmp_path)


# -- the verdict -----------------------------------------------------------------------------------


def judged(found_rows, start=None, end=None):
    findings = [asdict(finding) for finding in diagnose(RecordedRun(found_rows, texts()))]
    return summary_text({
        "status": "finished", "steps": len(found_rows), "max_steps": len(found_rows),
        "start": start or {}, "end": end or {}, "wall_seconds": 5.0,
        "training": training_of(found_rows), "findings": findings,
    })  # fmt: skip


@pytest.mark.parametrize("case", [name for name, (_, _, others) in SICK.items() if not others])
def test_what_voids_a_run_is_never_praised(case):
    found_rows = SICK[case][1]
    better = {"pass@1": 0.9, "pass@1_interval": [0.8, 0.95], "num_prompts": 64}
    worse = {"pass@1": 0.2, "pass@1_interval": [0.1, 0.3], "num_prompts": 64}
    text = judged(found_rows, worse, better)
    findings = diagnose(RecordedRun(found_rows, texts()))
    praised = "pass@1 rose" in text and "larger than chance" in text
    assert praised != any(finding.voids for finding in findings)
    if not praised:
        assert text.startswith(next(f.title for f in findings if f.voids))
        assert "So this is no progress: pass@1 was 20.0 % [10.0, 30.0] before and 90.0 %" in text


def test_what_voids_a_run_is_what_leaves_nothing_to_praise():
    assert {rule.name for rule in RULES if rule.voids} == {
        "rewards_missing", "rewards_zero", "rewards_equal", "groups_flat", "nothing_trained",
        "learning_rate_high", "kl_explosion", "collapse", "gibberish", "empty", "same_text",
        "hacking", "reward_at_cost", "only_form", "rewards_alike",
    }  # fmt: skip


def test_the_headline_fits_the_kind_of_reward():
    accuracy = {"pass@1": 0.1, "pass@1_interval": [0, 0.2], "reward": 0.1}
    assert headline(accuracy, accuracy) == "pass@1"
    soft = {"reward_kind": "graded", "pass@1": 0.0, "pass@1_interval": [0.0, 0.07]}
    before = {**soft, "reward": -1.2, "reward_interval": [-1.4, -1.0]}
    after = {**soft, "reward": 2.5, "reward_interval": [2.2, 2.8], "num_prompts": 64}
    text = judged(rows(), before, after)
    assert "pass@" not in text
    assert text.startswith(
        "The held-out reward rose from -1.200 [-1.400, -1.000] to 2.500 [2.200, 2.800] on 64 "
        "evaluation problems in 5 s. The difference is larger than chance explains."
    )


def test_rewards_are_told_one_by_one_where_there_are_several():
    text = judged(rows(**{"rewards/format/mean": (0.1, 0.12), "rewards/right/mean": (0.1, 0.9)}))
    # Four rollouts a side of 0.8 / 11 between neighbours: the means of the first and the last four.
    assert "By reward: right rose from 0.209 to 0.791, format rose from 0.103 to 0.117." in text


def test_start_and_end_never_overlap_and_what_lies_between_is_left_out():
    assert [tuple(map(list, windows(range(n)))) for n in (2, 3, 7)] == [
        ([0], [1]), ([0], [2]), ([0, 1], [5, 6])
    ]  # fmt: skip
    first, last = windows(range(100))
    assert (list(first), list(last)) == (list(range(8)), list(range(92, 100)))
    for number in range(2, 40):
        first, last = windows(range(number))
        assert len(first) == len(last) and max(first) < min(last)


def test_progress_and_verdict_have_one_comparison():
    """With 10 steps `before` was once the mean of the first half."""
    found_rows = rows(10, reward=(0.2, 0.4))
    change = change_of(found_rows, "reward")
    text = judged(found_rows)
    assert f"rose from {change.before:.3f} ± 0.012 to {change.after:.3f} ± 0.012" in text
    shown = progress_line(10, 10, scored=found_rows, recent=found_rows[-8:]).reward
    assert f"{change.after - change.before:+.3f} ± 0.016 since the start" in shown


def test_no_record_breaks_a_rule():
    """Whatever is missing, null or not finite."""
    draw = random.Random(1)
    values = (None, math.nan, math.inf, 0.0, 1.0, -3.0, 50.0)
    told = set()
    for number in range(300):
        made = [{name: draw.choice(values) for name in NORMAL} for _ in range(number % 14)]
        made = [{n: v for n, v in row.items() if v is not None} for row in made]
        written = [{**row, "completion": None, "reward": None} for row in texts(number=2)]
        config = {name: draw.choice((None, 0, 2, 16)) for name in OPTIONS}
        run = RecordedRun([{"step": 1, **row} for row in made], written, config=config)
        told |= {finding.name for finding in diagnose(run)}
        assert list(describe(diagnose(run)))
    assert len(told) > 10


def test_the_page_tells_of_every_rule():
    """`python tools/doctor_page.py` changes nothing."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
