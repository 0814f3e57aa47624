"""Every how-to is done: its files are written, its commands and its Python run, in their order, in
one folder. Models and numbers of steps are small; everything else is as the page says."""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
import yaml

from rloo import RLOOConfig
from rloo.cli import main
from support.models import COMMON, WIDE
from support.sandboxes import require_a_wall
from support.text import make_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Given to every training that does not say otherwise itself.
SMALL = {
    "max_steps": 2,
    "num_prompts": 2,
    "num_generations": 4,
    "max_completion_length": 12,
    "eval_size": 4,
    "eval_on_start": "false",
    "bf16": "false",
    "disable_tqdm": "true",
    "num_threads": 1,
}
TRAINS = ("train", "plan")
OPTIONS = {option.name for option in fields(RLOOConfig)}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the pages take for granted: the chat model, its sums, a reward model, the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    chat = Path("runs/smollm2/model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**COMMON, **WIDE})).save_pretrained(
        chat
    )
    make_tokenizer().save_pretrained(chat)
    for name, count in (("train", 24), ("test", 8)):
        rows = (f'{{"question": "What is {n} + 3?", "answer": {n + 3}}}\n' for n in range(count))
        (chat.parent / f"{name}.jsonl").write_text("".join(rows))
    judge = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**COMMON, num_labels=1)
    )
    judge.save_pretrained("runs/reward_model")
    make_tokenizer().save_pretrained("runs/reward_model")
    shutil.copytree(ROOT / "examples", "examples")
    return tmp_path


def run_line(line: str) -> None:
    """One line of a shell block."""
    words = shlex.split(line, comments=True)
    match words:
        case ["echo", said, "|", "rloo", *arguments]:
            before, sys.stdin = sys.stdin, io.StringIO(f"{said}\n")
            assert main(arguments) == 0, line
            sys.stdin = before
        case ["rloo", *arguments]:
            if arguments[0] in TRAINS:
                given = {a.lstrip("-").partition("=")[0] for a in arguments if a[:2] == "--"}
                own = [a for a in arguments if a.endswith(".yaml")]
                said = "".join(Path(name).read_text() for name in own)
                named = given | set(re.findall(r"^(\w+):", said, re.MULTILINE)) - {"max_steps"}
                arguments += [f"--{k}={v}" for k, v in SMALL.items() if k not in named]
            assert main(arguments) == 0, line
        case ["python", script]:
            runpy.run_path(script, run_name="__main__")
        case ["pip", "install", what]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"\w+", what.partition("[")[2])
            assert set(extras) <= project["optional-dependencies"].keys(), line
        case _:
            raise AssertionError(f"a line that nothing here can run: {line}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # peft's and bitsandbytes', at import
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_can_be_done(page, folder, monkeypatch):
    if page.stem == "code":
        require_a_wall()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("my_reward", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    for language, title, text in blocks:
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, page.name, "exec"), names)
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                run_line(line)
        elif language == "sh":
            ours = ("machines", "one-gpu")  # tests/test_machine_examples.py runs these
            assert page.stem in ours, page.name
        elif language == "yaml":
            assert yaml.safe_load(text).keys() <= OPTIONS, page.name
        else:
            raise AssertionError(f"a block in {language} that is no file: {page.name}")
    assert Path.cwd() == Path(os.fspath(folder))


def test_there_are_twenty_and_the_site_lists_all():
    assert len(PAGES) >= 20
    listed = re.findall(r"how-to/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.stem for page in PAGES)
