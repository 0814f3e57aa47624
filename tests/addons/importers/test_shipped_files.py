"""Every script and file that the other systems ship for such runs is read, and no key is dropped.

    RLOO_SHIPPED_VERL=/path/of/verl pytest -m slow -s tests/addons/importers/test_shipped_files.py

The path is that of a checkout or of a bare repository; so for OPENRLHF, NEMO_RL, AREAL, MS_SWIFT.
"""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

from rloo.addons.importers import hydra, import_config, render_imported
from rloo.addons.importers.openrlhf_names import FORMERLY
from support.settings import flatten

pytestmark = pytest.mark.slow

# system -> {ending: what a file of such a run has in it}
LIKELY = {
    "verl": {".sh": r"main_ppo|main_dapo|fully_async_main", ".yaml": r"^actor_rollout_ref:"},
    "openrlhf": {".sh": r"openrlhf\.cli\.train_ppo_ray"},
    "nemo_rl": {".sh": r"run_grpo|run_vlm_grpo", ".yaml": r"^grpo:"},
    "areal": {".yaml": r"^gconfig:"},
    "ms-swift": {".sh": r"rlhf_type grpo"},
}
WHOLE = ("chat_template_kwargs", "apply_chat_template_kwargs")
# Why a whole file may be refused.
REASONS = (
    r"there are \d+ commands",
    r"only swift rlhf is read",
    r"no such file here",
    # What makes no sense here, or to nobody.
    r"num_generations is 1 and (mean|std)_level is group",
    r"max_staleness is \d+; it must be at most",
    r"not a multiple of",
    r"built on itself",
)
# The objective of these is REINFORCE Leave-One-Out, as it stands in the file.
RLOO = r"estimator[= ]\"?rloo|mean_leave1out: true"


def folder_of(system: str, tmp_path: Path) -> Path:
    name = f"RLOO_SHIPPED_{system.upper().replace('-', '_')}"
    given = os.environ.get(name)
    if not given:
        pytest.skip(f"{name} is not set: the path of the system's repository")
    if (Path(given) / "HEAD").is_file():  # bare
        command = ["git", "-C", given, "archive", "HEAD"]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            likely = [m for m in archive if m.name.endswith((".sh", ".yaml", ".txt"))]
            archive.extractall(tmp_path, members=likely, filter="data")
        return tmp_path
    return Path(given)


def files_of(system: str, folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix in LIKELY[system]
        and file.is_file()
        and re.search(LIKELY[system][file.suffix], file.read_text(), re.MULTILINE)
    ]


def keys_of(system: str, file: Path) -> set[str]:
    """The keys in a file, as another reader finds them."""
    text = file.read_text()
    whole = rf"\.({'|'.join(WHOLE)})\..*"
    if file.suffix == ".yaml":
        given = {k for k, v in flatten(yaml.safe_load(text)).items() if v != "???"}
        given = {key for key in given - {"defaults"} if not key.endswith("_override_")}
        return {re.sub(whole, r".\1", key) for key in given}
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    if system in ("verl", "nemo_rl"):
        tops = "actor_rollout_ref|algorithm|data|trainer|critic|reward_model|grpo|policy|loss_fn"
        found = set(re.findall(rf"(?<![\w.$#\"])\+*((?:{tops})\.[\w.]+)=", lines))
        return {re.sub(whole, r".\1", key) for key in found}
    if system == "openrlhf":
        return {FORMERLY.get(n, n) for n in re.findall(r"--(\w+\.[\w.]+)", lines)}
    return {name.replace("-", "_") for name in re.findall(r"^\s+--([\w-]+)", lines, re.MULTILINE)}


@pytest.mark.parametrize("system", LIKELY)
def test_every_shipped_file_is_read_or_refused_with_a_reason(system, tmp_path, monkeypatch):
    folder = folder_of(system, tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hydra, "read_yaml", functools.cache(hydra.read_yaml))
    counts: Counter[str] = Counter()
    dropped, surprising = {}, {}
    for file in files_of(system, folder):
        # What NeMo-RL's suite of recipes sets before it runs one.
        recipe = str(file).replace("tests/test_suites", "examples/configs/recipes")
        monkeypatch.setenv("CONFIG_PATH", str(Path(recipe).with_suffix(".yaml")))
        is_rloo = re.search(RLOO, file.read_text()) is not None
        counts["files"] += 1
        counts["RLOO"] += is_rloo
        try:
            found = import_config(system, str(file))
        except ValueError as error:
            counts["refused"] += 1
            if is_rloo or not any(re.search(reason, str(error)) for reason in REASONS):
                surprising[file.name] = str(error)
            continue
        shown = {item.key for item in found.left}
        assert all(item.reason for item in found.left)
        assert render_imported(system, found).startswith("# Imported from ")
        counts["keys converted"] += len(found.taken)
        counts["keys listed"] += len(shown)
        counts["keys unknown"] += sum("no counterpart is known" in i.reason for i in found.left)
        others = " ".join(str(i.value) for i in found.left if i.key.startswith("command "))
        keys = {key for key in keys_of(system, file) if f"--{key}" not in others}
        if missing := keys - shown - set(found.taken):
            # Outside of the command, by a comment in its midst or in a branch; which is said.
            said = any("the shell leaves out" in n or "has conditions" in n for n in found.notes)
            counts["cut"] += said
            if not said or counts["cut"] > 5:
                dropped[str(file.relative_to(folder))] = sorted(missing)
    print(system, dict(counts))
    assert counts["files"] > 0
    assert not surprising
    assert not dropped
