"""No diagnosis ends a run: what it cannot find out is a note, whoever's fault that is."""

import json
import math

import pytest
import torch

from rloo.addons.report.doctor.dataset_stats import facts_of_error, of_template
from rloo.addons.report.doctor.doctor_command import report
from rloo.addons.report.doctor.live_rules import LiveDoctor
from rloo.addons.report.doctor.rules import diagnose
from rloo.addons.report.doctor.run_record import RecordedRun
from rloo.tracking.guarded import attempt
from rloo.types import Prompt
from support.text import make_tokenizer
from support.training import make_config, make_trainer
from support.vision_models import make_processor

ONE = {"step": 1, "reward": 0.5}


class Broken(dict):
    """A record of which nothing can be read."""

    def __getitem__(self, name):
        raise ZeroDivisionError(name)

    def get(self, name, default=None):
        raise ZeroDivisionError(name)


class Unclear(dict):
    """Facts of which it cannot be told whether there are any."""

    def keys(self):
        raise ZeroDivisionError


def test_what_a_diagnosis_raises_is_a_note_in_one_line():
    told = []
    found = attempt("how it is", lambda: 1 / 0, "unknown", told.append)
    assert found == "unknown"
    assert told == ["the doctor cannot find out how it is: ZeroDivisionError: division by zero"]
    assert attempt("how it is", lambda: 3, 0, told.append) == 3 and len(told) == 1
    with pytest.raises(KeyboardInterrupt):  # it is the user's

        def stop():
            raise KeyboardInterrupt

        attempt("how it is", stop, 0, told.append)


def test_a_rule_that_cannot_be_judged_leaves_the_others():
    told = []
    run = RecordedRun([{**ONE, "reward": math.nan}] * 4, facts=Broken())
    assert [finding.name for finding in diagnose(run, told.append)] == ["rewards_missing"]
    assert all("ZeroDivisionError" in note for note in told) and len(told) == 6
    with pytest.warns(UserWarning, match="whether [a-z_]+ holds: ZeroDivisionError"):
        diagnose(run)  # outside a run


def test_no_record_at_all_ends_the_watch():
    told = []
    watch = LiveDoctor({}, told.append)
    watch.add({**ONE, "step": None})
    watch.add_completions([{"no": "step"}, {"step": 1, "completion": None}])
    watch.facts = Unclear()
    assert watch.news() == [] and "what is wrong with the run" in told[-1]


TEMPLATES = {
    # As LlavaNext's: the assistant's content is read as parts only.
    "parts": "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'][0]['text'] }}"
    "</s>{% else %}{{ m['content'] }} {% endif %}{% endfor %}",
    "refuses": "{{ raise_exception('one user only') }}",
    "undefined": "{{ nobody.knows['this'] }}",
    "types": "{{ messages[0]['content'] + 3 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_refuses_made_up_conversations_does_not_end_training(name, tmp_path):
    """The prompts are texts, so that no template is needed."""
    trainer = make_trainer(make_config(tmp_path, max_steps=1))
    trainer.processing_class.chat_template = TEMPLATES[name]
    trainer.train()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    told = [note for note in summary["notes"] if "how the chat template is used" in note]
    assert summary["status"] == "finished" and len(told) == (name != "parts")


def test_nothing_that_is_told_at_the_end_ends_a_run(tmp_path, monkeypatch):
    """A run whose every diagnosis raises: it is finished, and says so."""
    from rloo.addons.report.doctor import doctor_observer
    from rloo.tracking import monitor

    def broken(*_, **__):
        raise ZeroDivisionError("broken")

    for module, name in (
        (doctor_observer, "findings_of"),
        (monitor, "training_of"),
        (monitor, "summary_text"),
    ):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr("rloo.algorithm.step_record.detailed", broken)
    monkeypatch.setattr("rloo.addons.report.doctor.live_rules.diagnose", broken)
    monkeypatch.setattr("rloo.addons.report.doctor.dataset_stats.of_template", broken)
    trainer = make_trainer(make_config(tmp_path, max_steps=2))
    trainer.train()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished" and summary["verdict"] == ""
    said = [note.partition(": Zero")[0].removeprefix("the doctor cannot find out ")
            for note in summary["notes"] if "ZeroDivisionError" in note]  # fmt: skip
    assert sorted(said) == [
        "how the chat template is used", "how training went", "what is wrong with the run",
        "what its groups were in detail", "what the run achieved", "what was wrong with the run",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "named", "steps"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, 0),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True, 0),
        (RuntimeError("shapes do not fit"), False, 2),
        (RuntimeError("shapes do not fit"), False, 0),
    ],
)
def test_a_run_that_ends_for_want_of_memory_says_so_and_what_to_change(
    error, named, steps, tmp_path
):
    trainer = make_trainer(make_config(tmp_path, max_steps=3))
    sample, calls = trainer.engine.sample, []

    def fails(*given):
        calls.append(given)
        if len(calls) > steps:
            raise error
        return sample(*given)

    trainer.engine.sample = fails
    with pytest.raises(type(error)):
        trainer.train()
    findings = json.loads((tmp_path / "run/summary.json").read_text())["findings"]
    told = [finding["options"] for finding in findings if finding["name"] == "memory"]
    assert told == ([{"gradient_checkpointing": True}] if named else [])
    if named or steps:
        assert any("Memory does not suffice" in line for line in report(tmp_path / "run")) == named


# -- how prompts stand to a template ---------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<unk>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Mistral's: the turn is opened by the end of the user's, whether that is asked for or not.
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<unk>{% endif %}{% endfor %}"
)
NEVER = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<unk>\n{% endfor %}"


def stands(template, content, stops=(3,)):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert tokenizer.convert_tokens_to_ids("<unk>") == 3
    found = of_template(tokenizer, Prompt(0, [1], content), stops, {})
    return found.get("chat_template"), found.get("end_of_turn")


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (CHATML, "w1 w2", "unused"),
        (CHATML, "<|start|>user\nw1 w2<unk>\n<|start|>assistant\n", None),
        (CHATML, "<|start|>user\nw1 w2<unk>\n", "turn not opened"),
        (CHATML, [{"role": "user", "content": "w1"}], None),
        (INST, "w1 w2", "unused"),
        (INST, "[INST] w1 w2 [/INST]", None),
        (INST, [{"role": "user", "content": "w1"}], None),
        (NEVER, [{"role": "user", "content": "w1"}], "turn not opened"),
        (NEVER, [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w"}], None),
    ],
)
def test_prompts_are_compared_with_what_the_template_makes(template, content, expected):
    assert stands(template, content) == (expected, None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}<unk>{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}<unk>{% endfor %}",
        # No token of this tokenizer stands for a full stop.
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} . {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}",
    ],
)
def test_an_answer_that_is_not_rendered_tells_of_no_end(template):
    for content in ([{"role": "user", "content": "w1 w2"}], "w1 w2 <unk>", "w1 w2 . assistant"):
        assert stands(template, content, stops=(2,))[1] is None


def test_a_template_that_adds_nothing_is_not_missing():
    assert stands("{% for m in messages %}{{ m['content'] }}{% endfor %}", "w1 w2") == (None, None)


def test_the_end_of_a_turn_must_end_completions_of_rendered_prompts_too():
    rendered = "<|start|>user\nw1 w2<unk>\n<|start|>assistant\n"
    assert stands(CHATML, rendered, stops=(2,)) == (None, "<unk>")
    assert stands(CHATML, "w1 w2", stops=(2,)) == ("unused", None)


@pytest.mark.parametrize("content", ["a b", [{"type": "image"}, {"type": "text", "text": "a"}]])
def test_a_processor_whose_template_reads_parts_is_examined(content):
    """As LlavaNext's: contents are parts, of whoever speaks, though a prompt may be a text."""
    processor = make_processor("llava")
    processor.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% for part in m['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% if m['role'] == 'assistant' %}{{ m['content'][0]['text'][:0] }}{% endif %} . "
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    prompt = Prompt(0, [1], [{"role": "user", "content": content}])
    assert of_template(processor, prompt, (3,), {}) == {}
    never = processor.chat_template.partition("{% if add")[0]
    processor.chat_template = never
    assert of_template(processor, prompt, (3,), {})["chat_template"] == "turn not opened"


class Mute(RuntimeError):
    """An error whose own text cannot be had."""

    def __str__(self):
        raise ZeroDivisionError


def test_an_error_without_a_text_does_not_keep_a_failed_run_from_being_saved():
    told = []
    assert facts_of_error(Mute(), told.append) == {}
    assert told == ["the doctor cannot find out why the run ended: ZeroDivisionError: "]

    def fail():
        raise Mute

    assert attempt("it", fail, 3, told.append) == 3
    assert told[-1].startswith("the doctor cannot find out it: Mute: Mute()")
