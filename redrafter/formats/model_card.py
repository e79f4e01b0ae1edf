"""Model cards of drafters: the header in YAML that the Hub reads, and what a card says of use and acceptance."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from redrafter.drafting.drafter_config import AnyDrafterConfig
from redrafter.errors import CheckpointError
from redrafter.files.hub import read_card
from redrafter.files.regular_file import read_regular

LIBRARY = "redrafter"
_ACCEPTANCE = "## Acceptance"


def make_header(config: AnyDrafterConfig, base: str | None, source: str | None = None, tags: Sequence[str] = ()) -> str:
    """Return the YAML header of a drafter's card, between its two lines of dashes.

    The Hub's relations to a base (`adapter`, `merge`, `quantized`, `finetune`) include none of a drafter, so none is
    written.

    Args:
        config: Its config, which has its algorithm.
        base: Name of the base, on the Hub if it is there; None where it is not known.
        source: Directory or hub id with the base's own card, whose licence is the drafter's too; None for none.
        tags: Further tags.
    """
    card: dict[str, Any] = {} if source is None else read_card(source)
    named: dict[str, Any] = {
        key: value for key, value in card.items() if key in ("license", "license_name") and isinstance(value, str)
    }
    if str(card.get("license_link")).startswith("https://"):  # others are files of the base's repository
        named["license_link"] = card["license_link"]
    every = dict.fromkeys([LIBRARY, "speculative-decoding", config.algorithm, *tags])
    data = ModelCardData(library_name=LIBRARY, pipeline_tag="text-generation", base_model=base, tags=[*every], **named)
    return f"---\n{data.to_yaml()}\n---\n"


def make_introduction(config: AnyDrafterConfig, base: str | None) -> str:
    """Return a card's title, what a drafter is for, and how it is loaded."""
    return f"""# {config.kind[0].upper() + config.kind[1:]} for {base or "the base"}

It drafts for this base, which verifies every draft, so none of the base's tokens change. It fits no other base; loading
refuses one.

```python
from redrafter import ReDrafter

engine = ReDrafter.from_pretrained("{base or "BASE"}", "path/to/this/directory")
```
"""


def read_or_begin(file: Path, config: AnyDrafterConfig, base: str, base_source: str) -> str:
    """Return the card of a drafter in `file`, or a new one if there is none, for a base of this name and source.

    Raises `CheckpointError` if the file is not text.
    """
    if not file.exists():
        name = config.base_model or base
        return f"{make_header(config, name, base_source)}\n{make_introduction(config, name)}"
    try:
        return read_regular(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not text in UTF-8: replace it, or leave out --card") from error


def acceptance_section(tree: str, measured: Iterable[tuple[str, float, Sequence[float]]]) -> str:
    """Return the section of a card on acceptance: a table in Markdown with a row for each kind of texts.

    A row has the kind, the tokens per step, and the parts of the steps that accepted at least 1, 2, ... drafts.
    """
    rows = list(measured)
    depth = max((len(shares) for *_, shares in rows), default=0)
    lines = ["| texts | tokens per step |" + "".join(f" >= {count} |" for count in range(1, depth + 1))]
    lines.append("|---" * (depth + 2) + "|")
    for name, tokens, shares in rows:
        lines.append(f"| {name} | {tokens:.2f} |" + "".join(f" {share:.2f} |" for share in shares))
    table = "\n".join(lines)
    return f"""{_ACCEPTANCE}

Parts of the steps in which at least 1, 2, ... drafts were accepted, with a tree of {tree}:

{table}
"""


def replace_acceptance(card: str, section: str) -> str:
    """Return a card with another section on acceptance, at its end if it has none."""
    found = re.search(rf"^{_ACCEPTANCE}[ \t]*$.*?(?=^##? |\Z)", card, re.MULTILINE | re.DOTALL)
    before, kept = (card, "") if found is None else (card[: found.start()], card[found.end() :])
    return "\n\n".join(part for part in (before.rstrip(), section.rstrip(), kept) if part).rstrip() + "\n"


def upload_command(config: AnyDrafterConfig, directory: str) -> str:
    """Return the command that uploads a drafter's directory under its recommended name, such as `BASE-redrafter`."""
    base = (config.base_model or "base").rstrip("/").rpartition("/")[2]
    return shlex.join(["hf", "upload", f"{base}-{config.algorithm}", directory])
