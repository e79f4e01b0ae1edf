"""A process for each architecture, so that none can hang or end the run."""

import multiprocessing
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import torch
import transformers

from .check import CRASHED, UNMADE, Outcome, check
from .variants import variants

__all__ = ["check_all"]

Outcomes = dict[str, Outcome]  # by the variant's name


def check_all(model_types: list[str], jobs: int, seconds: float) -> Iterator[tuple[str, Outcomes]]:
    """Yield the outcomes of each architecture, in order; each may take so many seconds."""
    context = multiprocessing.get_context("forkserver")  # what is imported is imported once
    context.set_forkserver_preload([__name__])
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(
            model_types,
            pool.map(lambda model_type: _in_process(context, model_type, seconds), model_types),
            strict=True,
        )


def _in_process(context: multiprocessing.context.BaseContext, model_type: str, seconds: float) -> Outcomes:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(model_type, sender))
    process.start()
    sender.close()
    outcomes, end = {}, time.monotonic() + seconds
    try:
        while receiver.poll(max(end - time.monotonic(), 0)):
            name, outcome = receiver.recv()
            outcomes[name] = outcome
        outcomes["the rest"] = Outcome(CRASHED, f"not done after {seconds:g} s")
    except EOFError:
        process.join()
        if process.exitcode:
            outcomes["the rest"] = Outcome(CRASHED, f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return outcomes


def _work(model_type: str, sender: Connection) -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = variants(model_type)
    except Exception as error:
        sender.send(("plain", Outcome(UNMADE, f"{type(error).__name__}: {error}")))
        return
    for variant in found:
        sender.send((variant.name, check(model_type, variant)))
