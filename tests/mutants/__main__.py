"""Run the tests that guard a file on each of its sampled mutants; end with 1 when one survives without a reason.

Each mutant runs in a fork of a process that has imported torch and transformers but nothing of the package, and
reads its source from memory: no file changes, and a mutant costs little more than its tests.
"""

import argparse
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import pytest
import torch
from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.config import load_config
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

from .operators import OPERATORS
from .sample import Mutant, sample

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py sets it, before transformers imports Triton

CONFIG = Path(__file__).with_name("cosmic-ray.toml")
SESSION, OUTPUT, IMPORTED = (Path("build") / name for name in ("mutants.sqlite", "mutants.txt", "mutants.modules"))
LIBRARIES = ("accelerate", "peft", "tokenizers", "torch", "transformers")  # imported once, before the forks
UNUSED = ("cacheprovider", "cov", "hypothesispytest")
TIMES, MORE = 4, 30.0  # a mutant's tests may take so many times as long as without a fault, and so many seconds more
# As `make test` chooses tests, until one fails; without what takes longer than they do.
PYTEST = ("-x", "-n0", "-mnot slow and not variant", "--assert=plain", *(f"-pno:{name}" for name in UNUSED))
MEMORY = 16 << 30  # bytes of addresses; a mutant may ask for a tensor of any size


class MutantFinder(MetaPathFinder):
    """Finds one module of the package with the source of a mutant."""

    def __init__(self, path: str, source: str):
        self.path, self.source = path, source
        self.name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        source = self.source

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return compile(source, self.path, "exec")

        return spec_from_file_location(fullname, self.path, loader=Loader(fullname, str(Path(self.path).absolute())))


def run_tests(tests: list[str], mutant: Mutant | None, timeout: float) -> int | None:
    """Run tests in a fork, until the first that fails; return pytest's exit code, or None after `timeout` seconds."""
    if not (process := os.fork()):
        code = 1
        try:
            os.setsid()
            with OUTPUT.open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            if not torch.cuda.is_available():  # CUDA reserves more addresses than there is memory
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            if mutant is not None:
                sys.meta_path.insert(0, MutantFinder(mutant.path, mutant.source))
            code = int(pytest.main([*tests, *PYTEST]))
            IMPORTED.write_text("\n".join(name for name in sys.modules if name.split(".")[0] in LIBRARIES))
        finally:
            os._exit(code)  # whatever was raised: only the parent continues with other mutants
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (ended := os.waitpid(process, os.WNOHANG)) != (0, 0):
            return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def time_without_fault(path: str, tests: list[str]) -> float:
    """Return how long the tests of a file take without a fault, and import the libraries that they use."""
    started = time.monotonic()
    if code := run_tests(tests, None, timeout=3600):
        raise SystemExit(f"the tests of {path} fail without a fault (exit code {code}):\n{OUTPUT.read_text()}")
    for name in IMPORTED.read_text().split():
        try:
            import_module(name)
        except Exception:  # a module that only another one can import
            continue
    return time.monotonic() - started


def run_mutant(mutant: Mutant, tests: list[str], timeout: float, session: WorkDB) -> TestOutcome:
    """Return what became of a mutant, and write it into the session, which Cosmic Ray's reports read."""
    code = run_tests(tests, mutant, timeout)
    outcome = TestOutcome.KILLED if code else TestOutcome.SURVIVED if code == 0 else TestOutcome.INCOMPETENT
    result = WorkResult(WorkerOutcome.NORMAL, OUTPUT.read_text(), outcome, mutant.name)
    session.set_result(mutant.item.job_id, result)
    return outcome


def main() -> int:
    config = load_config(CONFIG)
    guards = config["guards"]
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=guards, metavar="FILE", default=list(guards), help="these files")
    parser.add_argument("--count", type=int, default=config["count"], help="mutants of a file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another sample (default: %(default)s)")
    args = parser.parse_args()
    SESSION.parent.mkdir(exist_ok=True)
    plugins.OPERATOR_PROVIDERS["tensors"] = OPERATORS
    excluded = re.compile("|".join(config["filters"]["operators-filter"]["exclude-operators"]))
    counts = Counter[str]()
    with use_db(SESSION, WorkDB.Mode.create) as session:
        init(map(Path, args.only), session, {})
        items = [item for item in session.work_items if not excluded.match(item.mutations[0].operator_name)]
        for path in args.only:
            seconds = time_without_fault(path, guards[path])
            of_file = [item for item in items if str(item.mutations[0].module_path) == path]
            print(f"{path}: {len(of_file)} mutants, {args.count} run, {seconds:.1f} s without a fault", flush=True)
            for mutant in sample(path, of_file, args.count, args.seed):
                started = time.monotonic()
                outcome = run_mutant(mutant, guards[path], TIMES * seconds + MORE, session)
                reason = config["accepted"].get(path, {}).get(mutant.name, "")
                if outcome is TestOutcome.SURVIVED and not reason:
                    counts["without a reason"] += 1
                counts["timed out" if outcome is TestOutcome.INCOMPETENT else outcome.value] += 1
                took = f"{time.monotonic() - started:.1f} s"
                print(f"  {outcome.value}, {took}, {path}:{mutant.line}: {mutant.name}  {reason}".rstrip(), flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int("without a reason" in counts)


if __name__ == "__main__":
    sys.exit(main())
