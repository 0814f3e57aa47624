"""The commands of docs/how-to/one-gpu.md and machines.md, with a small model and two processes of
this machine. A real Slurm and a real Ray run their files in `tests/addons/launch`."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rloo.cli import main
from rloo.engines.vllm.server_process import free_port
from support.addons import needs_addons
from support.gsm8k import make_tokenizer, read_lines, save_random_model, shaped_arguments
from support.launched_runs import FAKE_SERVERS, environment_here

ROOT = Path(__file__).parents[1]
# bitsandbytes on a CPU needs rows of a multiple of 64 numbers.
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


OTHERS = re.compile("pip |python examples/smollm2|rloo plan |rloo train examples/smollm2")


def commands() -> list[list[str]]:
    """The words of each command of the pages that runs a file of `examples/machines/`. The laptop's
    file is run by `tests/test_smollm2.py`; the plans are compared as a whole."""
    pages = ("one-gpu.md", "machines.md")
    text = "".join((ROOT / "docs/how-to" / page).read_text() for page in pages)
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines if not OTHERS.match(line)]
    return [
        [str(ROOT / word) if word.startswith("examples/") else word for word in words]
        for words in found
    ]


def command(*start: str) -> list[str]:
    """The only command of the page with these words at its start."""
    (words,) = (words for words in commands() if words[: len(start)] == [*start])
    return words


@pytest.fixture
def small(tmp_path) -> list[str]:
    """Options that make a recipe small."""
    model = save_random_model("qwen3", make_tokenizer(), tmp_path / "model", **WIDTHS)
    _, *options = shaped_arguments(tmp_path, model, output_dir=tmp_path / "run")
    return options


def check(run: Path) -> None:
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["grad_norm"]) for line in lines)


def test_the_page_uses_every_file():
    used = {Path(word).name for words in commands() for word in words if word.endswith(".yaml")}
    assert used == {path.name for path in (ROOT / "examples/machines").iterdir()}
    assert [words[:2] for words in commands()] == [
        *[["rloo", "train"]] * 3, ["torchrun", "--nnodes"],
        ["rloo", "launch"], ["rloo", "launch"],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # peft's and bitsandbytes', at import
def test_one_gpu(small, tmp_path):
    pytest.importorskip("bitsandbytes")
    _, *words = command("rloo", "train", str(ROOT / "examples/machines/one_gpu.yaml"))
    assert main([*words, *small, "--optim=adamw_8bit"]) == 0
    check(tmp_path / "run")
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["r"] == 16


@needs_addons
def test_the_plans_of_the_page_are_those_that_the_commands_print():
    from tools import machine_plans

    page = "".join(path.read_text(encoding="utf-8") for path in machine_plans.PAGES)
    assert page.count("<!-- output -->\n\n    model ") == page.count("<!-- output -->") == 6
    assert page.count("| `rtx4090` |") == 1
    assert machine_plans.filled(page) == page


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # bitsandbytes', at import
def test_one_gpu_of_80_gb(small, tmp_path):
    pytest.importorskip("bitsandbytes")
    _, *words = command("rloo", "train", str(ROOT / "examples/machines/gpu_80gb.yaml"))
    assert main([*words, *small, FAKE_SERVERS]) == 0
    check(tmp_path / "run")
    assert list((tmp_path / "run/logs").glob("vllm-*.log"))


@pytest.mark.slow
def test_eight_gpus_as_two_processes(small, tmp_path):
    words = command("rloo", "train", str(ROOT / "examples/machines/qwen3_8b.yaml"))
    words[words.index("8")] = "2"
    line = [sys.executable, "-m", *words, *small, FAKE_SERVERS]
    subprocess.run(line, env=environment_here(), check=True, timeout=600)
    check(tmp_path / "run")
    assert len(list((tmp_path / "run/logs").glob("vllm-*.log"))) == 2


@pytest.mark.slow
def test_two_nodes_as_two_launchers(small, tmp_path):
    words = command("torchrun")
    words[words.index("8")] = "1"
    place = next(n for n, word in enumerate(words) if word.startswith("HOST:"))
    words[place] = f"127.0.0.1:{free_port('127.0.0.1')}"
    line = [sys.executable, "-m", "torch.distributed.run", *words[1:], *small, FAKE_SERVERS]
    nodes = [subprocess.Popen(line, env=environment_here()) for _ in range(2)]
    assert [node.wait(600) for node in nodes] == [0, 0]
    check(tmp_path / "run")


@needs_addons
@pytest.mark.parametrize("scheduler", ["slurm", "ray"])
def test_a_scheduler_s_script_has_eight_ranks_and_eight_servers(small, tmp_path, capsys, scheduler):
    cluster = str(ROOT / f"examples/machines/{scheduler}.yaml")
    (words,) = (words for words in commands() if cluster in words)
    assert main([*words[1:], *small, "--dry_run"]) == 0
    script = capsys.readouterr().out
    assert "# 8 to train, 8 servers\n" in script and "--max_staleness 1" in script
    assert "WORLD_SIZE=8" in script and "rloo vllm-serve" in script
