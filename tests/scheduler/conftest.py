"""Schedulers are tested as they run on a GPU, with steps launched ahead of the host; a server's tests are not."""

import pytest

from helpers.scheduling import launch_ahead


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_ahead(monkeypatch)
