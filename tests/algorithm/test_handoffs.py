"""The hand-offs from a prompt to the optimizer step, as docs/architecture.md lists them."""

import sys

import pytest

from support.training import make_config, make_trainer

FIRST = (
    "SyncRolloutGenerator.next",
    "PromptDataset.next",
    "NativeEngine.sample",
    "score_completions",
    "make_training_samples",
    "compute_advantages",
)
ADVANTAGES = ("LossContext.advantages", "rloo", "leave_one_out")
HANDOFFS = {
    0.05: (*FIRST, "update", "Policy.logprobs", *ADVANTAGES),
    0.0: (*FIRST, *ADVANTAGES, "update", "Policy.logprobs"),
}
LAST = ("loss", "PolicyOptimizer.step")


@pytest.mark.parametrize("beta", HANDOFFS)
def test_a_step_of_one_process_takes_these_handoffs_in_this_order(tmp_path, beta):
    config = make_config(
        tmp_path, max_steps=1, beta=beta, eval_strategy="no", eval_on_start=False,
        save_strategy="no",
    )  # fmt: skip
    parts, state = make_trainer(config).make_parts()
    wanted = {*HANDOFFS[0.05], *LAST}
    found: list[str] = []

    def watch(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname
        if event == "call" and module.startswith("rloo.") and name in wanted and name not in found:
            found.append(name)

    samples = make_one_step(parts, state, watch)
    assert samples and tuple(found) == (*HANDOFFS[beta], *LAST)


def make_one_step(parts, state, watch):
    """`train_on_rollout` without the record of the step; returns the samples."""
    from rloo.algorithm.train import start_rollout

    parts.policy.checked = True  # a check of the first forward pass is no step of the method
    sys.setprofile(watch)
    try:
        active = start_rollout(parts, state)
        for minibatch in active.remaining_minibatches(parts.batches):
            parts.update(parts, state, active, minibatch)
    finally:
        sys.setprofile(None)
    return active.samples
