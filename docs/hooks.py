"""Pages of the site that are made from the code and from files outside `docs/`, so that they stay up to date."""

import io
import re
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import redrafter
from redrafter import EngineOptions
from redrafter.cli import main
from redrafter.options import help_texts

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "reference/python.md": python_reference(),
        "reference/commands.md": _command_reference(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; a link to a file of the repository becomes the file's name."""
    generated = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}

    def rewrite(match: re.Match[str]) -> str:
        text, target = match.group(1), match.group(2)
        path, anchor, fragment = target.partition("#")
        if "://" in path or not path:
            return match.group(0)
        name = re.sub(r"^(\.\./|docs/)+", "", path)
        name = generated.get(name, name)
        if files.get_file_from_path(name) is not None:
            up = "../" * page.file.src_uri.count("/")
            return f"[{text}]({up}{name}{anchor}{fragment})"
        return text if text.startswith("`") or "/" in text else f"{text} (`{name}`)"

    return re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", rewrite, markdown)


# Members that the reference shows, of classes that have others for the package's own use.
CHANGES = ("update_weights", "change_drafter", "sleep", "wake", "asleep")
ENGINE = ("generate", "custom_generate", "load_adapter", "unload_adapter", *CHANGES, "adapters", "model")
LOADED_ENGINE = ("from_pretrained", *ENGINE)
MEMBERS: dict[str, tuple[str, ...]] = {
    "DFlashConfig": (),
    "DFlashDrafter": ("from_pretrained",),
    "DraftTarget": LOADED_ENGINE,
    "DrafterConfig": (),
    "EagleConfig": (),
    "EagleDrafter": ("from_pretrained",),
    "Engine": ENGINE,
    "EngineOptions": (),
    "GenerateStats": ("draft_steps", "tokens_per_step"),
    "PromptLookup": LOADED_ENGINE,
    "ReDrafter": LOADED_ENGINE,
    "RecurrentDrafter": ("from_pretrained",),
    "Stats": ("draft_steps", "tokens_per_step"),
}
SHARING = (
    "`drafter.save_pretrained(folder)` writes a drafter, and `drafter.push_to_hub(repository)` uploads it to the "
    "Hugging Face hub; both are transformers'. `from_pretrained` then takes the name of the repository."
)


def python_reference() -> str:
    """Return the page of every public name, which mkdocstrings fills in."""
    parts = ["# Python reference", "Every public name: what `from redrafter import ...` gives."]
    errors = [name for name in redrafter.__all__ if name.endswith("Error")]
    others = [name for name in redrafter.__all__ if name not in errors and not name.startswith("__")]
    for name in (*others, *errors):
        part = f"::: redrafter.{name}"
        if name in MEMBERS:
            part += f"\n    options:\n      inherited_members: true\n      members: [{', '.join(MEMBERS[name])}]"
        parts.append(part)
        if name == "RecurrentDrafter":
            parts.append(SHARING)
        if name == "EngineOptions":
            texts = help_texts(EngineOptions)
            shown = (f"- `{item.name}={item.default!r}`: {texts[item.name]}." for item in fields(EngineOptions))
            parts.append("\n".join(shown))
    return "\n\n".join(parts) + "\n"


def _command_reference() -> str:
    overview = _help_of()
    parts = ["# Commands", "What each command prints with `--help`.", f"```text\n{overview}\n```"]
    for command in re.findall(r"^    ([a-z]+) ", overview, flags=re.M):
        parts.append(f"## redrafter {command}\n\n```text\n{_help_of(command)}\n```")
    return "\n\n".join(parts) + "\n"


def _help_of(*command: str) -> str:
    """Return what `redrafter COMMAND --help` prints, as on a wide terminal."""
    text = io.StringIO()
    with mock.patch.dict("os.environ", {"COLUMNS": "110"}), redirect_stdout(text), suppress(SystemExit):
        main([*command, "--help"])
    return text.getvalue().strip()
