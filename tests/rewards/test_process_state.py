"""What a reward leaves behind in the process: each is named, and as it was before."""

import os
import resource
import signal

import pytest
import torch

from rloo.config.user_functions import NotAllowed
from rloo.rewards.process_state import list_states
from rloo.rewards.state_guard import keep_state

KEPT = []  # what was entered must not end with the function, by being forgotten
# The suite's own deadline is a timer, beside which one of a reward cannot be told.
pytestmark = pytest.mark.timeout(0)


def enter(context):
    KEPT.append(context)
    context.__enter__()


def lower(kind):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, ((hard if soft == resource.RLIM_INFINITY else soft) // 2, hard))


CHANGES = {
    "torch's autocast": [
        lambda: enter(torch.autocast("cpu", torch.bfloat16)),
        lambda: [enter(torch.autocast("cpu", torch.float16)) for _ in range(2)],
        lambda: torch.set_autocast_enabled("cuda", True),
        lambda: torch.set_autocast_cache_enabled(False),
    ],
    "torch's default device": [
        lambda: torch.set_default_device("meta"),
        lambda: enter(torch.device("meta")),
        lambda: [enter(torch.device("meta")) for _ in range(3)],
    ],
    "torch's inference mode": [lambda: enter(torch.inference_mode())],
    "torch's gradient mode": [lambda: enter(torch.no_grad())],
    "torch's deterministic algorithms": [lambda: torch.use_deterministic_algorithms(True)],
    "torch's detection of anomalies": [lambda: enter(torch.autograd.detect_anomaly(False))],
    "torch's precision of matrix products": [lambda: torch.set_float32_matmul_precision("medium")],
    "torch's kernels of attention": [lambda: torch.backends.cuda.enable_math_sdp(False)],
    "torch.backends.cudnn.benchmark": [
        lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    ],
    "the mask of new files' modes": [lambda: os.umask(0o777)],
    "the timer ITIMER_REAL": [lambda: signal.alarm(1)],
    "the timer ITIMER_PROF": [lambda: signal.setitimer(signal.ITIMER_PROF, 0.01)],
    "the limit RLIMIT_NOFILE": [lambda: lower(resource.RLIMIT_NOFILE)],
    "the limit RLIMIT_FSIZE": [lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (99, -1))],
}


def seen():
    """Every state, and what torch does by it."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    made = torch.tensor([1.0])
    does = product.dtype, product.requires_grad, made.device, made.is_inference()
    return {name: read() for name, read, _ in list_states()} | {"does": does}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, changes in CHANGES.items() for change in changes],
)
def test_what_a_call_leaves_is_named_and_undone(name, change):
    before = seen()
    with (
        pytest.raises(NotAllowed, match=f"'f' changed .*{name} from "),
        keep_state("'f'"),
    ):
        change()
    assert seen() == before
    with keep_state("'f'"):
        pass


def test_what_a_call_undoes_itself_is_its_own_affair():
    with keep_state("'f'"), torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        signal.alarm(5)
        torch.zeros(1)
        signal.alarm(0)


def test_the_mode_of_gradients_is_the_callers():
    with torch.no_grad(), keep_state("'f'"):
        assert not torch.is_grad_enabled()
    with torch.inference_mode(), keep_state("'f'"):
        assert torch.is_inference_mode_enabled()
    with keep_state("'f'"):
        assert torch.is_grad_enabled()


def test_a_timer_of_the_run_itself_goes_on():
    signal.setitimer(signal.ITIMER_VIRTUAL, 60.0)
    try:
        with keep_state("'f'"):
            pass
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
