"""Load tokenizers with the chat template and its variables that the options of a command name."""

from transformers import PreTrainedTokenizerBase as Tokenizer

from redrafter.app.options import TemplateOptions
from redrafter.chat.template import set_variables
from redrafter.checkpoints.chat_templates import PLAIN_TEMPLATE, read_template
from redrafter.checkpoints.tokenizers import load_tokenizer
from redrafter.errors import ArgumentError


def load_chat_tokenizer(name: str, options: TemplateOptions, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model, and set the chat template and the defaults of its variables from `options`.

    Raises the errors of `load_tokenizer`, and `ArgumentError` for a template or a variable that cannot be used.
    """
    template = None if options.chat_template is None else read_template(options.chat_template)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    if template is not None:
        tokenizer.chat_template = template
    if options.plain_chat_template:
        if tokenizer.chat_template:
            raise ArgumentError(f"--plain-chat-template is for models without a chat template, and {name} has one")
        tokenizer.chat_template = PLAIN_TEMPLATE
    if options.chat_template_kwargs:
        set_variables(tokenizer, options.chat_template_kwargs, "--chat-template-kwargs")
    return tokenizer
