"""Read chat templates (Jinja) from a file that the user names, or from the model's directory."""

import json
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from redrafter.errors import ArgumentError
from redrafter.files.hub import find_model_file

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Template files in a model's directory that transformers does not load; it loads chat_template.jinja itself.
_EXTRA_TEMPLATE_FILES = ("chat_template.j2", "chat_template.json")


def read_template(file: str | Path) -> str:
    """Read a chat template from a file and check its syntax; raise `ArgumentError` for an invalid file.

    The file is a Jinja template in UTF-8, or a `.json` file with the template under `chat_template`.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
        if str(file).endswith(".json"):
            text = json.loads(text)["chat_template"]
        render_jinja_template([], chat_template=text)  # compiles the template; there is no conversation to render
    except TemplateSyntaxError as error:
        raise ArgumentError(f"chat template {file}, line {error.lineno}: {error.message}") from error
    except OSError as error:
        raise ArgumentError(f"chat template {file} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        message = f"chat template {file} cannot be read: it is not text in UTF-8, or not JSON with a chat_template"
        raise ArgumentError(message) from error
    return text


def find_template(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """Set the tokenizer's chat template from a file in the model's directory, if it has none and a file exists."""
    for name in _EXTRA_TEMPLATE_FILES if not tokenizer.chat_template else ():
        file = find_model_file(model, name)
        if file is not None:
            tokenizer.chat_template = read_template(file)
            return
