"""Detect the marks that a model writes around its thoughts."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

# Variables that turn thoughts on and off in the chat templates of Qwen3, GLM-4.5, DeepSeek-V3.1 and Granite.
SWITCHES = ("enable_thinking", "thinking")
Thinking = Literal["open", "possible", "over"]  # whether a prompt ends within a thought, before one, or after one


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks before and after a thought.

    Attributes:
        begin: Text before a thought; the prompt may already contain it.
        end: Text after it.
        parsers: Names of vLLM's parsers of such thoughts.
        shown: Text in a chat template that identifies these marks; by default `end`, since a template has to recognise
            the end of earlier thoughts to remove them, even if it never writes a thought itself.
    """

    begin: str
    end: str
    parsers: tuple[str, ...] = ()
    shown: str = ""

    def after(self, text: str) -> Thinking:
        """Return whether a prompt ends within a thought, right after one, or before a possible one."""
        begin, end = text.rfind(self.begin.rstrip()), text.rfind(self.end)
        if begin > end:
            return "open"
        return "over" if end >= 0 and not text[end + len(self.end) :].strip() else "possible"


_THINK_PARSERS = (
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2"),
    *("nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
)
MARKS: tuple[ThoughtMarks, ...] = (
    ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>", ("openai_gptoss",), "<|channel|>"),
    ThoughtMarks("[THINK]", "[/THINK]", ("mistral",)),
    ThoughtMarks("<seed:think>", "</seed:think>", ("seed_oss",)),
    ThoughtMarks("<|channel>thought\n", "<channel|>", ("gemma4",)),
    ThoughtMarks("◁think▷", "◁/think▷", ("kimi",)),
    ThoughtMarks("Here is my thought process:", "Here is my response:", ("granite",)),
    ThoughtMarks("<thought>", "</thought>"),
    ThoughtMarks("<think>", "</think>", _THINK_PARSERS),
)
PARSERS = {name: marks for marks in MARKS for name in marks.parsers}


def thought_marks(parser: str, template: str, tokens: Collection[str]) -> ThoughtMarks | None:
    """Return the marks for a vLLM parser name; `auto` detects them in the chat template or the added tokens."""
    if parser != "auto":
        return PARSERS[parser]
    shown = (marks for marks in MARKS if (marks.shown or marks.end) in template)
    known = (marks for marks in MARKS if {marks.begin.rstrip(), marks.end} <= {*tokens})
    return next(shown, None) or next(known, None)
