import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from support.addons import HAS_ADDONS

HERE = Path(__file__).parent
collect_ignore = [] if HAS_ADDONS else ["addons"]
# Tiny models: a second OpenMP thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A background job starts with Ctrl-C ignored, one under nohup with SIGHUP, and so would everything
# that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# No power is cut here, and waiting for the disk is a tenth of what a run of a few steps takes.
os.fsync = os.fstat


def pytest_configure(config):
    """The tests are for a CPU, also where there is a GPU, but for those that are for one."""
    asked = config.option.markexpr
    if Path("/dev/nvidia0").exists() and "gpu" not in asked.replace("not gpu", ""):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    """What starts processes takes as long as the machine takes to start them. What stands in no
    folder comes first: its modules share whole runs and wait for others, and the last tests are
    dealt to all workers one by one."""
    items.sort(key=lambda item: item.path.parent != HERE)
    kinds = ("slow", "peers", "docs", "gpu", "slurm", "ray")
    for item in items:
        if any(map(item.get_closest_marker, kinds)) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays to the end: to search it for garbage is a third of the
    time that collecting takes, and a part of that of every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _no_group_remains():
    """What divides weights sets torch.distributed up, which the next test would meet."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _torch_computes_again():
    """A run has kernels or oneDNN compute in its process; the next test may compare bits with
    torch's."""
    yield
    kernels, products = map(sys.modules.get, ("rloo.kernels", "rloo.kernels.cpu_matmul"))
    if kernels is not None:
        kernels.use(False)
    if products is not None:
        products.use([])
