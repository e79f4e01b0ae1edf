"""Chat templates in files of their own."""

import json
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from redrafter.checkpoints.models import find_model_file
from redrafter.errors import ArgumentError

__all__ = ["find_template", "read_template"]

# What may stand beside a model. transformers reads chat_template.jinja into the tokenizer, and not the others.
_BESIDE = ("chat_template.j2", "chat_template.json")


def read_template(file: str | Path) -> str:
    """Read a chat template. Raises `ArgumentError` for a file that is missing or is no template."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        if str(file).endswith(".json"):
            text = json.loads(text)["chat_template"]
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ArgumentError(f"chat template {file}, line {error.lineno}: {error.message}") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8, or no JSON that has a chat_template"
        raise ArgumentError(f"chat template {file} cannot be read: {reason}") from error
    return text


def find_template(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Give a tokenizer without a chat template the one beside its model, where a file holds one."""
    for name in _BESIDE if not tokenizer.chat_template else ():
        file = find_model_file(model, name)
        if file is not None:
            tokenizer.chat_template = read_template(file)
            return
