"""What tests of the server share."""

import os

import pytest
from transformers import AutoTokenizer

from redrafter import ReDrafter, boxed_pair


@pytest.fixture(scope="session")
def pair() -> tuple:
    os.environ.pop("REDRAFTER_HOME", None)
    return ReDrafter.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())
