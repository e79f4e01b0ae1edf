"""Devices that torch cannot use: what the error says to do."""

import pytest
import torch

from helpers.command_line import fails
from redrafter import ArgumentError, PromptLookup
from redrafter.checkpoints.models import device_error

NO_CUDA = AssertionError("Torch not compiled with CUDA enabled")


@pytest.mark.parametrize(
    ("built", "count", "device", "says"),
    [
        (False, 0, "cuda", "is built without CUDA: install a build with it"),
        (True, 0, "cuda", "torch finds no NVIDIA GPU: see whether nvidia-smi"),
        (True, 2, "cuda:2", "the GPUs here are cuda:0, cuda:1"),
        (True, 2, "mps", "take cpu, or cuda"),
        (False, 0, "cpu", "CUDA enabled$"),
    ],
)
def test_a_device_that_cannot_be_used_says_what_to_do(monkeypatch, built, count, device, says):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ArgumentError, match=says):
        raise device_error(f"--device {device}", device, NO_CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_alike_by_commands_and_from_pretrained(llama, capsys):
    advice = "or take cpu"
    assert advice in fails(capsys, "generate", "--device", "cuda", "ja")
    with pytest.raises(ArgumentError, match=advice):
        PromptLookup.from_pretrained(llama, device="cuda")
    assert "torch knows no such device; take cpu" in fails(capsys, "generate", "--device", "gpu", "ja")
