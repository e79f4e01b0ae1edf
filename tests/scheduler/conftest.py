"""Schedulers are tested as they run on a GPU, with steps launched ahead of the host; a server's tests are not."""

import pytest

from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.scheduling import launch_ahead
from redrafter import Engine


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_ahead(monkeypatch)


@pytest.fixture(scope="module")
def engine() -> Engine:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return with_tree(model, tiny_drafter(), 4, 4)
