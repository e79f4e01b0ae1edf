"""Marks that models write around their thoughts, and how they are found for a model."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Thinking = Literal["open", "possible", "over"]  # whether a prompt ends within a thought, before one, or after one


@dataclass(frozen=True)
class ThoughtMarks:
    """What is written before and after a thought.

    Attributes:
        begin: Text before a thought, of which the prompt may have all.
        end: Text after it.
        parsers: Names of vLLM's parsers of such thoughts.
        shown: Text by which a chat template shows that its model writes them; by default their end, for a template need
            not write a thought itself to leave out those of earlier turns.
    """

    begin: str
    end: str
    parsers: tuple[str, ...] = ()
    shown: str = ""

    def after(self, text: str) -> Thinking:
        """Return whether a text, which an answer continues, ends within a thought, or right after one."""
        begin, end = text.rfind(self.begin.rstrip()), text.rfind(self.end)
        if begin > end:
            return "open"
        return "over" if end >= 0 and not text[end + len(self.end) :].strip() else "possible"


_THINK_PARSERS = (
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "glm47",
    "holo2",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "qwen3",
    "step3",
    "step3p5",
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
    """Return the marks of a parser of vLLM; for `auto` those that a chat template shows, or that are added tokens."""
    if parser != "auto":
        return PARSERS[parser]
    shown = (marks for marks in MARKS if (marks.shown or marks.end) in template)
    known = (marks for marks in MARKS if {marks.begin.rstrip(), marks.end} <= {*tokens})
    return next(shown, None) or next(known, None)
