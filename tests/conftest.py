"""The environment of all tests, and the fixtures that many of them use."""

import atexit
import logging
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

if torch.cuda.is_available():
    os.environ["REDRAFTER_HOME"] = os.devnull  # kernels stay in Triton's own cache from run to run
elif "PYTEST_XDIST_WORKER" not in os.environ:  # one folder for a run, so that a model of files is self-tested once
    os.environ["REDRAFTER_HOME"] = tempfile.mkdtemp(prefix="redrafter-tests-")
    atexit.register(shutil.rmtree, os.environ["REDRAFTER_HOME"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"  # what is not on this machine is missed at once
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch puts off

import transformers
from transformers import PreTrainedModel

from helpers.models import tiny_model
from helpers.progress import FolderProgress
from redrafter.app.program import freeze_objects
from redrafter.engine.engine import Engine

# Folders whose parametrised tests are seldom fast; tests/matrix chooses by itself.
COSTLY = {
    "attention",
    "benchmarks",
    "cache",
    "checkpoints",
    "cli",
    "convert",
    "drafting",
    "engine",
    "extensions",
    "grammar",
    "kernels",
    "measure",
    "scheduler",
    "model",
    "serve",
    "tests",
    "train",
}

torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.hookimpl(trylast=True)  # when the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Show progress by folder, in the process that reports."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):

        def write_line(line: str) -> None:
            reporter.write_line(line)
            reporter.flush()  # into a file or a pipe too, as the run goes on

        config.pluginmanager.register(FolderProgress(write_line))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one case of each costly test on each cache among the fast ones: the one whose name has the least checksum.

    A checksum spreads what is left over the values of all parameters. Of the other cases, those without which any two
    values of parameters still meet are slow, and those without which each value is still tested are marked `pair`. So
    are costly variants: those that are marked in their file, but for tests/matrix, and those of tests marked `costly`.
    """
    for item in items:
        variant = item.get_closest_marker("variant")
        if variant is not None and "own_way" not in variant.kwargs:
            item.add_marker(pytest.mark.pair)
    cases: dict[tuple, list[Any]] = defaultdict(list)
    for item in items:
        marked = "slow" in item.keywords or "variant" in item.keywords
        if hasattr(item, "callspec") and item.path.parent.name in COSTLY and not marked:
            cases[item.path, item.originalname, "paged" in item.callspec.id].append(item)
    for alike in cases.values():
        for item in sorted(alike, key=checksum)[1:]:
            item.add_marker(pytest.mark.variant)
            if "costly" in item.keywords:
                item.add_marker(pytest.mark.pair)
    tests: dict[tuple, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and "slow" not in item.keywords:
            tests[item.path, item.originalname].append(item)
    for crossing in tests.values():
        count = len(crossing[0].callspec.params)
        slow = redundant(crossing, 2) if count > 2 else []  # of two, each case is a pair of its own
        for item in slow:
            item.add_marker(pytest.mark.slow)
        for item in redundant([item for item in crossing if item not in slow], 1) if count > 1 else ():
            if not item.get_closest_marker("variant").kwargs.get("own_way"):
                item.add_marker(pytest.mark.pair)


def pytest_collection_finish() -> None:
    """Keep what tests share out of garbage collections, one of which each paged cache begins with."""
    freeze_objects()


def checksum(item: Any) -> int:
    return crc32(item.callspec.id.encode())


def redundant(cases: list[Any], count: int) -> list[Any]:
    """Return the variants of a test without which any `count` values of its parameters that meet in a case still do.

    Nearly all faults need one value or two that meet; what takes three is left to the slow tests. The variant with the
    most of them that are still missing stays first, which leaves about as few as there can be.
    """

    def values(item: Any) -> set[tuple]:
        params = item.callspec.params.items()  # of which some have no hash, and some no end when they are written
        return set(
            combinations([(key, repr(of) if isinstance(of, str | int) else id(of)) for key, of in params], count)
        )

    met = {item: values(item) for item in cases}
    variants = sorted((item for item in cases if "variant" in item.keywords), key=checksum)
    missing = set().union(*met.values()).difference(*(met[item] for item in cases if item not in variants))
    while missing:
        best = max(variants, key=lambda item: len(met[item] & missing))
        variants.remove(best)
        missing -= met[best]
    return variants


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return tiny_model


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Keep transformers silent, and forget the log handlers of commands, whose streams end with their test."""
    transformers.logging.set_verbosity_error()
    yield
    logging.getLogger("redrafter").handlers.clear()


@pytest.fixture(scope="session", autouse=True)
def _drafting() -> Iterator[None]:
    """Let engines draft in every step, though the random drafters of tests gain little, and no clock decide.

    Engines of fixtures of any scope are among them; those of other processes are not.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "pauses", False)
        patch.setattr(Engine, "clock", None)
        yield


@pytest.fixture(scope="session")
def program() -> Iterator[Any]:
    """`redrafter serve` of the boxed pair in a process of its own, for all tests that need no options of theirs.

    Tests share its caches and counters, and take differences of these. It must end with code 0 and leave no process.
    """
    from helpers.processes import children, soon
    from helpers.serving import Program

    program = Program("--max-batch-size", "64")
    program.first_metrics = program.metrics()  # before any request
    yield program
    started = children(program.process.pid)
    assert program.end() == 0
    assert soon(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with the checkpoints that `make_pair` writes."""
    from helpers.command_line import make_pair  # only tests of commands pay for it

    return make_pair(tmp_path_factory.mktemp("cli"))
