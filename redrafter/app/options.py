"""Options that several commands share: loading, drafting, generating and prompts.

A default is written once, here; `redrafter.app.flags` makes the flags and their help from the fields.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from redrafter.app.flags import biases, flag, format_value, integers
from redrafter.app.program import SHARED_COMMANDS
from redrafter.engine.options import EngineOptions
from redrafter.errors import ArgumentError
from redrafter.model.options import SCHEMES, STORED_SCHEMES
from redrafter.options import between, check_values, dtype_word, option, share, whole

COUNT = between(1, 1_000_000)  # the check of an option that counts something
MAX_SEED = (1 << 62) - 1


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, such as {"enable_thinking": false}."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"write a JSON object, such as '{{\"enable_thinking\": false}}', not {text!r}")
    return value


@dataclass(frozen=True)
class TemplateOptions:
    """Options of the chat template, for every command that renders chats.

    Attributes:
        chat_template: chat template in Jinja (default: the model's own)
        plain_chat_template: render chats of a model without a chat template as plain text: each turn after its role
        chat_template_kwargs: variables of the chat template, such as '{"enable_thinking": false}'; a row of data or a
            request may set them otherwise
    """

    chat_template: str | None = option(None, names="template")
    plain_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = option(None, type=json_object, metavar="JSON")


@dataclass(frozen=True)
class LoadOptions(EngineOptions, TemplateOptions):
    """Options that select the model and the drafter, and configure how they are loaded.

    Attributes:
        model: hub id, directory or GGUF file of the target, a merged checkpoint, or a drafter that names its base
            (default: the boxed pair)
        drafter: hub id or directory of the drafter (default: the one in the checkpoint of the target, else recycled
            tokens)
        num_beams: beams of the drafter's search; the text does not depend on it (default: the checkpoint's)
        draft_len_per_beam: tokens drafted per beam (default: the checkpoint's)
        node_budget: nodes of the tree that is verified per step, its root included (default: the checkpoint's, or what
            suits the device and the batch size)
        dtype: number format
        device: cpu, cuda, cuda:1, ... (default: cuda if there is a GPU, else cpu)
        tensor_parallel_size: processes that share the model, each with a GPU of its own (default: those that torchrun
            has started, or one)
        trust_remote_code: run the modelling code that comes with the model
        quantization: quantise the weights of the model's linear layers when it is loaded. fp8: to 8 bits, its head
            apart, and round the inputs of these layers too, each token by itself. int4, int8: to 4 or 8 bits in groups,
            its head to 8. Another word says how the checkpoint is quantised already, which is recognised without it
        draft_quantization: quantization of the drafter or the draft model, as --quantization for the model
        base_embedding: draft with the model's embedding table instead of the drafter's own, which may be untrained
    """

    model: str | None = option(None, names="model")
    drafter: str | None = option(None, names="drafter")
    num_beams: int | None = None
    draft_len_per_beam: int | None = None
    node_budget: int | None = None
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16", "float16"), type=dtype_word)
    device: str | None = None
    tensor_parallel_size: int | None = option(None, check=whole(1, optional=True), commands=SHARED_COMMANDS)
    trust_remote_code: bool = False
    quantization: str | None = option(None, choices=(*SCHEMES, *STORED_SCHEMES))
    draft_quantization: str | None = option(None, choices=SCHEMES)
    base_embedding: bool = False


@dataclass(frozen=True)
class DraftOptions:
    """Options of drafting without a recurrent drafter: with a smaller LM, or by prompt lookup.

    Attributes:
        draft_model: hub id, directory or GGUF file of a smaller LM to draft with; one with another tokenizer drafts the
            tokens of both
        prompt_lookup: draft the tokens that followed the same tokens earlier in the text
        draft_len: tokens drafted per step by --draft-model or --prompt-lookup (default: 4)
        ngram: maximum n-gram length to look up (default: 2)
        acceptance: match: accept a draft that equals the token that the model draws itself. rejection: accept it by
            rejection sampling, which gives the same distribution but not the same tokens (default: match)
        adaptive: draft fewer tokens when few were accepted lately
    """

    draft_model: str | None = option(None, metavar="D", names="model")
    prompt_lookup: bool = False
    draft_len: int | None = None
    ngram: int | None = None
    acceptance: str | None = option(None, choices=("match", "rejection"))
    adaptive: bool = False


class PromptCut(TypedDict):
    """Arguments that select the part of a row's text to use as prompt."""

    share: float
    most: int | None


@dataclass(frozen=True)
class PromptOptions:
    """Options that select the part of a data set's row to use as prompt, for every command with `--prompts`.

    Attributes:
        prompt_share: fraction of the tokens of a row's text to use as prompt
        prompt_tokens: maximum number of tokens of a row's text to use as prompt (default: all)
    """

    prompt_share: float = option(1.0, check=share)
    prompt_tokens: int | None = option(None, check=COUNT)

    def __post_init__(self) -> None:
        check_values(self, flag)

    @property
    def cut(self) -> PromptCut:
        """Arguments of `redrafter.measure.prompts.encode`."""
        return {"share": self.prompt_share, "most": self.prompt_tokens}


@dataclass(frozen=True)
class GenerationOptions:
    """Options of generation, under Hugging Face's names; None takes the value of the model's generation config.

    Attributes:
        max_new_tokens: maximum number of new tokens
        temperature: 0 is greedy, a higher value samples (default: as the checkpoint's generation config or
            redrafter.json, else greedy); `generate` also takes one for each prompt: 0.7,0.2
        top_k: sample from the N likeliest tokens only
        top_p: sample only from the likeliest tokens that together have this probability
        min_p: sample only from tokens that are at least this likely, relative to the likeliest
        repetition_penalty: a value above 1 makes tokens of the text so far less likely
        frequency_penalty: subtracted from a token's logit for each time that it was generated
        presence_penalty: subtracted from a token's logit once it was generated
        logit_bias: added to the logits of these token ids, such as 11=-100,42=2.5
        bad_words: never generate this text, with or without a space before it (may be repeated); its sequence of tokens
            is forbidden, but other tokens may still spell it
        seed: seed of the sampling; the same seed gives the same text (default: random)
        stop: end the answer after this text (may be repeated)
        stop_token_ids: end the answer after these tokens, in addition to the model's own end tokens
        adapter: LoRA adapter to generate with: a directory that PEFT wrote, or name=directory
        speculate: draft tokens for the model to verify
    """

    max_new_tokens: int = 128
    temperature: float | tuple[float, ...] | None = None
    top_k: int | None = None
    top_p: float | None = option(None, check=between(0, 1))
    min_p: float | None = option(None, check=between(0, 1))
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = option(None, type=biases, metavar="ID=X,...")
    bad_words: Sequence[str] = option((), action="append", metavar="TEXT")
    seed: int | None = None
    stop: Sequence[str] = option((), action="append", metavar="TEXT")
    stop_token_ids: Sequence[int] = option((), type=integers)
    adapter: str | None = option(None, names="adapter")
    speculate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.temperature, tuple):
            if not all(0 < temperature < math.inf for temperature in self.temperature):
                typed = format_value(self.temperature)
                raise ArgumentError(f"each --temperature must be above 0, got {typed}; write greedily in another run")
        elif self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"--temperature must be 0 (greedy) or more, got {self.temperature}")
        values = vars(self)
        for name in ("top_k", "top_p", "min_p"):
            if values[name] is not None and not self.sampling:
                raise ArgumentError(f"{flag(name)} is for sampling: give --temperature above 0 too")
        check_values(self, flag)
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(values[name] or 0.0):
                raise ArgumentError(f"{flag(name)} must be a finite number, got {values[name]}")
        if not all(map(math.isfinite, (self.logit_bias or {}).values())):
            raise ArgumentError(f"--logit-bias must be of finite numbers, such as 11=-100, got {self.logit_bias}")

    @property
    def sampling(self) -> bool:
        """Whether the temperature enables sampling: it is above 0, or set for each prompt."""
        return bool(self.temperature)
