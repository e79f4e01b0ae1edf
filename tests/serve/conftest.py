"""What tests of the server share."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from helpers.models import tiny_drafter, tiny_model, with_tree
from redrafter import Engine, ReDrafter, boxed_pair
from redrafter.serve.extension import extensions


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def search_again() -> Iterator[None]:
    """Let extensions be searched where a test has changed the path, and again after it."""
    extensions.cache_clear()
    yield
    extensions.cache_clear()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, search_again: None) -> Path:
    """Put an extension of another package on the path, whose routes are `/v1/notes` and `/v1/notes/forget`."""
    place = Path(__file__).parents[1] / "third_party" / "notes"
    monkeypatch.syspath_prepend(place)
    return place


@pytest.fixture(scope="session")
def pair() -> tuple:
    return ReDrafter.from_pretrained(boxed_pair()), AutoTokenizer.from_pretrained(boxed_pair())


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A tiny engine whose texts do not end by themselves."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    return with_tree(model, tiny_drafter(), 4, 4)


@pytest.fixture(scope="session")
def client(program: Any) -> Any:
    """The OpenAI client of `program`."""
    import openai

    return openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def loaded() -> Any:
    """The pair that `server` serves."""
    from redrafter.app.loading import Pair
    from redrafter.app.options import LoadOptions

    return Pair.load(LoadOptions(device="cpu"))


@pytest.fixture(scope="session")
def server(loaded: Any) -> Iterator[Any]:
    """A server in this process, whose engine runs, for tests that change a part of it and put it back."""
    from helpers.engine_in_thread import server_of

    made = server_of(loaded)
    made.engine.start()
    yield made
    made.engine.stop()


@pytest.fixture(scope="session")
def url(server: Any) -> Iterator[str]:
    """The address of `server`."""
    from helpers.serving import listening
    from redrafter.serve.routes.app import server_app

    with listening(server_app(server)) as address:
        yield address
