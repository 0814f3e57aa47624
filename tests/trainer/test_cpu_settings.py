"""What a run sets of a GPU's memory, without a GPU."""

import pytest
import torch

from rloo.trainer.cpu_settings import let_segments_grow
from support.models import CPU

CUDA = torch.device("cuda", 0)
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def said(monkeypatch):
    said = []
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append, raising=False)
    return said


def test_memory_grows_in_place_on_a_gpu_alone(said):
    let_segments_grow(CPU)
    assert said == []
    let_segments_grow(CUDA)
    assert said == ["expandable_segments:True"]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_stays(name, said, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    let_segments_grow(CUDA)
    assert said == []


def test_a_torch_that_has_no_such_setting_goes_on_without_it(said, monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    let_segments_grow(CUDA)
    assert said == []
