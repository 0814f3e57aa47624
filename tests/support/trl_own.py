"""A pytest plugin that runs a test file of TRL's with our config and trainer in the place of
TRL's: in a process of its own, with the names of models and data as folders (`trl_names`).

    cd FOLDER_OF_NAMES && python -m pytest -p support.trl_own FILE
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

# Where the outcome of every test is written, and whose trainer is tested ("trl": TRL's own, by
# which one sees what the stand-ins are worth).
OUTCOMES, TRAINER = "RLOO_TRL_OUTCOMES", "RLOO_TRL_TRAINER"
_MOCKED = "the test replaces transformers' generate, which does not sample here"
_LOOP = (
    "the test counts calls of Trainer's training_step, which rloo does not call. In this "
    "test, an optimizer step begins in one pass over a rollout and ends in the next pass"
)
_SERVER = "the test needs a vLLM server, and TRL skips the test"
_VIDEO = "the processor of Gemma 4 needs torchvision; no substitute model can be made without it"
# Tests, as regular expressions -> why they say nothing about the trainer.
NOT_JUDGED = {
    r".*::test_train_vllm_.*|.*::test_train_vlm_and_vllm.*": _SERVER,
    r".*::test_train_with_mask_truncated_completions": _MOCKED,
    r".*::test_prepare_input_called_with_correct_data": _LOOP,
    r".*::test_train_vlm\[tiny-Gemma4ForConditionalGeneration\]": _VIDEO,
}
# A test -> why it fails: at most four.
FAILS = {
    "TestRLOOTrainer::test_train_with_generation_kwargs": (
        "num_beams 2 is refused: beam search does not sample from the policy"
    ),
}
_outcomes: dict[str, str] = {}


def pytest_configure(config):
    import trl
    from trl import import_utils

    from support.trl_names import register

    register()
    import_utils.__getattr__ = _is_available  # the file may be of another version than TRL
    if os.environ.get(TRAINER) != "trl":
        import rloo

        trl.RLOOConfig, trl.RLOOTrainer = rloo.RLOOConfig, rloo.RLOOTrainer


def _is_available(name):
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(name)
    return lambda: find_spec(name[3:-10]) is not None


def pytest_runtest_logreport(report):
    """The worst of a test's three phases, with the last line of what went wrong."""
    name = report.nodeid.split("::", 1)[1].replace("trl-internal-testing/", "")
    if report.failed:
        _outcomes[name] = f"failed: {str(report.longrepr).strip().splitlines()[-1]}"
    elif report.skipped:
        _outcomes[name] = "skipped"
    else:
        _outcomes.setdefault(name, "passed")


def pytest_sessionfinish():
    if OUTCOMES in os.environ:
        Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes, indent=1), encoding="utf-8")
