"""The engine that tests of calls use where they need no other."""

import pytest
from transformers import PreTrainedModel

from helpers.models import tiny_drafter, with_tree
from redrafter import Engine


@pytest.fixture(scope="module")
def engine(llama: PreTrainedModel) -> Engine:
    return with_tree(llama, tiny_drafter(), 3, 3)
