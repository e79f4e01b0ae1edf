"""Make the boxed pair: a small base model and its recurrent drafter, from a file of texts.

    python examples/tiny_pair/run.py --data corpus.jsonl.xz                         # all of it, on one GPU
    python examples/tiny_pair/run.py --data corpus.jsonl.xz --stages tokenizer,tokens,base --base-minutes 5
    python examples/tiny_pair/run.py --data corpus.jsonl.xz --out build/tiny --tiny  # under a minute on a CPU

A stage whose output exists is skipped, so the same command resumes after a stop; `--force STAGE` redoes that stage and
all after it. A stage writes to a temporary name that becomes its own only once it is complete. What each stage
measured, how long it took and on what is added to `report.json` in the output folder.
"""

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from recipe import TINY, Recipe, UserError
from transformers.utils import logging

from redrafter.app.flags import add_options, read_options
from redrafter.app.parser import Parser

# In order. A stage is a module with `make(recipe, into) -> facts`: it reads what the stages before it left in
# `recipe.out`, writes a file or a folder at the path `into`, and returns what it measured. Its name is the module's,
# the prefix of its settings in `Recipe`, and that of what it makes.
STAGES = ("tokenizer", "tokens", "base", "text", "drafter", "evaluation", "pair")


def load_report(out: Path) -> dict[str, Any]:
    """Read what the finished stages reported, by stage."""
    path = out / "report.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_report(out: Path, report: dict[str, Any]) -> None:
    """Replace `report.json` in one step, so that a stop leaves the old one or the new one."""
    partial = out / "report.json.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(out / "report.json")


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def provenance(recipe: Recipe) -> dict[str, Any]:
    """Describe the command, the hardware and the versions of a stage."""
    device = recipe.torch_device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "hardware": {"gpu": gpu, "cpu_cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"python": platform.python_version(), **packages},
    }


def check_same(stage: str, recipe: Recipe, report: dict[str, Any]) -> None:
    """Refuse to go on from a stage that other settings made."""
    now = json.loads(json.dumps(recipe.settings(stage)))
    then = report.get(stage, {}).get("settings", {})
    changed = [f"{key} was {then[key]}, is {now[key]}" for key in now if key in then and then[key] != now[key]]
    if changed:
        raise UserError(
            f"{recipe.out}/{stage} was made with other settings ({'; '.join(changed)}): "
            f"give another --out, or --force {stage} to redo it and what follows"
        )


def make(stage: str, recipe: Recipe) -> None:
    """Run one stage, add it to the report, and only then give its output its final name."""
    out = Path(recipe.out)
    partial = out / f"{stage}.partial"
    remove(partial)
    print(f"{stage} ...", flush=True)
    began = time.perf_counter()
    facts = importlib.import_module(stage).make(recipe, partial)
    seconds = round(time.perf_counter() - began, 1)
    entry = {"seconds": seconds, **facts, "settings": recipe.settings(stage), **provenance(recipe)}
    write_report(out, load_report(out) | {stage: entry})
    partial.replace(out / stage)
    print(f"{stage}: {seconds} s", flush=True)


def run(recipe: Recipe, stages: list[str], force: str | None) -> None:
    """Make `stages`, in their order, but for those already made; from `force` on, make them anew."""
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)
    if force:
        for stage in STAGES[STAGES.index(force) :]:
            remove(out / stage)
    for stage in (stage for stage in STAGES if stage in stages):
        for earlier in STAGES[: STAGES.index(stage)]:
            if not (out / earlier).exists():
                raise UserError(f"{out}/{earlier} is missing: stage {stage} starts from it; add {earlier} to --stages")
        if (out / stage).exists():
            check_same(stage, recipe, load_report(out))
            print(f"{stage}: already in {out / stage}")
        else:
            make(stage, recipe)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the stages it asks for."""
    preset = argparse.ArgumentParser(add_help=False)
    preset.add_argument("--tiny", action="store_true", help="sizes that a CPU makes in under a minute, to try it out")
    parser = Parser(description=__doc__, parents=[preset])
    parser.add_argument("--stages", default=",".join(STAGES), help="stages to run (default: %(default)s)")
    parser.add_argument("--force", choices=STAGES, help="redo this stage and all after it")
    add_options(parser, Recipe, "settings")
    if preset.parse_known_args(argv)[0].tiny:
        parser.set_defaults(**TINY)
    arguments = parser.parse_args(argv)
    stages = arguments.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages {','.join(sorted(unknown))}: not one of {', '.join(STAGES)}")
    try:
        run(read_options(Recipe, arguments), stages, arguments.force)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.disable_progress_bar()
    main()
