"""Copies of numbers to a device."""

import torch

from redrafter.cache.to_device import to_device


def test_numbers_are_made_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):  # as `torch.set_default_device("cuda")`, whose tensors cannot be pinned
        copy = to_device([3, 1, 2], torch.device("cpu"), torch.long)
    assert copy.tolist() == [3, 1, 2]
