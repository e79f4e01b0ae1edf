"""Split a model's output into content, thoughts and tool calls while it is generated.

A call is a JSON object with `name`, the name of a known tool, and `arguments` (or `parameters`): at the beginning of
the text, alone or in a list, or anywhere between `<tool_call>` and `</tool_call>`. Llama 3.1, Qwen2.5, Qwen3 and Hermes
2 and 3 are trained to write this format; `redrafter.serve.answers.call_forms` reads other formats. Each format also has
the grammar of a call, for requests that force one. Thoughts come first, between the marks of
`redrafter.chat.thoughts`.

The result does not depend on how the text is split into pieces.
"""

import json
import re
import sys
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.serve.answers.lark import CalledTool, LarkWriter

Steps = Generator[None, None, bool]  # yields when it needs more text
_STRING = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[\s,}\]]")
_NAME_END = re.compile(r"[^\w.-]")
SPACE = " \t\r\n"

Deltas = list[tuple[dict[str, Any], list[tuple[int, int]]]]


class ChatReader:
    """Incremental parser of a chat message: `push` takes text and returns the deltas that have become certain.

    The class attributes describe the tool-call format; a subclass overrides them, or methods, for another format.

    Args:
        tools: Schemas of the parameters of the tools that may be called, by the tools' names.
        parallel_calls: Whether to report more than one call; if False, everything after the first call is dropped.
        thoughts: Marks of thoughts, which are reported separately; None leaves thoughts in the content.
        thinking: Whether the text begins within a thought, may begin with one, or follows one.

    Attributes:
        text: The text so far.
        calls: Number of calls that have begun.
        cut: Whether the text ends within a call.
        thought_spans: Start and end of each thought with its marks in the text; an unfinished thought has no end yet.
    """

    parsers: ClassVar[tuple[str, ...]] = ("llama3_json", "llama4_json")  # names of the form in vLLM
    template_mark: ClassVar[str | None] = None  # text in a chat template that identifies the format
    has_channels: ClassVar[bool] = False  # whether marks separate thoughts and answer, even without tools
    own_thoughts: ClassVar[ThoughtMarks | None] = None  # marks of thoughts that belong to the format
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)  # prefixes of calls, anywhere in the text
    wrapper: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")  # optional marks around calls
    bare: ClassVar[str] = "{["  # first characters of calls at the start of the text
    before: ClassVar[str] = SPACE + "["  # characters allowed before and between calls
    between: ClassVar[str] = SPACE + ",;]["
    # Text before calls, between them (a Lark expression) and after them. In formats without a separator, each call has
    # its own opening.
    opening: ClassVar[str] = ""
    joint: ClassVar[str] = '"; "'
    closing: ClassVar[str] = ""
    arguments_key: ClassVar[str] = "(arguments|parameters)"  # regular expression of the key of a call's arguments
    marks: ClassVar[tuple[str, ...]] = wrapper  # marks that detokenization must keep, even if they are special tokens

    def __init__(
        self,
        tools: Mapping[str, Any],
        parallel_calls: bool = True,
        thoughts: ThoughtMarks | None = None,
        thinking: Thinking = "possible",
    ):
        self.text = ""
        self._at = 0  # index of the next character to read
        self._last = False  # whether the text is complete
        self._tools, self._parallel_calls = tools, parallel_calls
        self._marks, self._thinking = thoughts, thinking
        self.calls = 0
        self.cut = False
        self.thought_spans: list[tuple[int, int]] = []
        self._from = 0  # start of the text that is not reported yet
        self._seen = 0  # end of the text that was searched for spaces
        self._sent: int | None = None  # within arguments: start of the part that is not reported yet
        self._quotes = False  # whether the arguments are plain text to encode as a JSON string
        self._thoughts = ""  # this and the fields below are not returned yet
        self._content: list[tuple[int, int]] = []
        self._calls: list[dict[str, Any]] = []
        self._steps = self._read()

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return an expression of Lark for a call of a tool, in the format that the models are trained on.

        The expression excludes `opening` and `closing`.
        """
        head = rf'/\{{"name": ?"{tool.name}", ?"{cls.arguments_key}": ?/'
        return f"{head} {lark.json(tool.parameters)} {json.dumps('}')}"

    @classmethod
    def write_forced(cls, lark: LarkWriter, tools: Sequence[CalledTool]) -> str:
        """Return an expression for a call of one of some tools."""
        return f"{lark.mark(cls.opening)} {cls._write_calls(lark, tools, False)}"

    @classmethod
    def write_text(cls, lark: LarkWriter, tools: Sequence[CalledTool], several: bool) -> str:
        """Return an expression for free text in which the model may call tools, several of them if `several`."""
        calls, begins = cls._write_calls(lark, tools, several), cls.begins
        text = lark.free(*begins, bare=cls.bare)
        if cls.opening not in begins:  # calls begin at the beginning of the text alone
            return f"({lark.mark(cls.opening)} {calls} | {text})"
        marks = (cls.opening, *(mark for mark in begins if mark != cls.opening))
        called = f"{lark.up_to(*marks, bare=cls.bare)} {calls}"
        # `bare` beginnings are only possible at the start of an answer, so later calls need a mark.
        if several:
            called += f" ({lark.up_to(*marks)} {calls})* {lark.free(*begins)}"
        return f"({called} | {text})"

    @classmethod
    def _write_calls(cls, lark: LarkWriter, tools: Sequence[CalledTool], several: bool) -> str:
        """Return an expression for the calls that follow `opening`."""
        calls = f"({' | '.join(lark.rule(cls.write_call(lark, tool)) for tool in tools)})"
        more = f" ({cls.joint} {calls})*" if several and cls.joint else ""
        return f"{calls}{more} {lark.mark(cls.closing)}"

    @classmethod
    def write_answer(cls, lark: LarkWriter, content: str) -> str:
        """Return an expression for an answer without calls, with `content` as the expression of its content."""
        return content

    @classmethod
    def after_thought(cls, lark: LarkWriter, marks: ThoughtMarks | None, thinking: Thinking, rest: str) -> str:
        """Return an expression for a thought and then `rest`. `marks` and `thinking` are as in the constructor."""
        return lark.after_thought(marks, thinking, rest)

    def push(self, text: str, last: bool = False) -> Deltas:
        """Append text and return the new deltas; `last` marks the end of the text.

        Returns:
            Deltas of OpenAI's message that the text makes certain, each with the spans of the text that form its
            content. A call begins with a separate delta; the deltas of its arguments follow as the model wrote them.
        """
        so_far, self.text = self.text, ""
        so_far += text  # CPython extends a local variable in place, where `self.text += text` would copy all of it
        self.text, self._last = so_far, last
        next(self._steps, None)
        thoughts, spans, calls = self._thoughts, self._content, self._calls
        self._thoughts, self._content, self._calls = "", [], []
        delta = {"reasoning_content": thoughts} if thoughts else {}
        if spans:
            delta["content"] = "".join(self.text[begin:end] for begin, end in spans)
        return ([(delta, spans)] if delta else []) + [({"tool_calls": [call]}, []) for call in calls]

    def _read(self) -> Steps:
        if self._marks is not None and self._thinking != "over":
            yield from self._read_thoughts(self._marks)
        # Without tools nothing can begin a call: all text is content, at once.
        while not self._tools:
            self._report(len(self.text), False)
            if self._last:
                return True
            yield
        yield from self._skip(SPACE)
        if (yield from self._has_more()) and self.text[self._at] in self.bare:
            yield from self._read_calls()
        begin, end = self.wrapper
        while (yield from self._read_until(self.begins, False)):
            yield from self._skip_literal(begin)
            # The wrapper's end mark belongs to the calls that were read; elsewhere it is text.
            if (yield from self._read_calls()) and end:
                yield from self._skip(SPACE)
                if (yield from self._skip_literal(end)):
                    self._from = self._at
        return True

    def _read_thoughts(self, marks: ThoughtMarks) -> Steps:
        if self._thinking == "possible":
            yield from self._skip(SPACE)
            if not (yield from self._skip_literal(marks.begin)):
                # The answer begins without a thought: spaces before it are content.
                self._at = self._from
                return False
        self._begin_thought(0)
        yield from self._skip(SPACE)
        self._from = self._at
        if (yield from self._read_until((marks.end,), True)):
            self._at += len(marks.end)
            self._end_thought()
        yield from self._skip(SPACE)
        self._from = self._at
        return True

    def _begin_thought(self, at: int) -> None:
        self.thought_spans.append((at, sys.maxsize))

    def _end_thought(self) -> None:
        self.thought_spans[-1] = self.thought_spans[-1][0], self._at

    def _read_until(self, marks: tuple[str, ...], thought: bool) -> Steps:
        """Report the text before the first mark, without trailing spaces, and move to the mark.

        Return False if the text ends without a mark; all of it is reported then.
        """
        if (yield from self._find_mark(marks, lambda: self._report(self._stripped_end(self._at), thought))):
            self._report(self._stripped_end(self._at), thought)
            return True
        end = len(self.text)
        self._report(self._stripped_end(end) if thought or self.calls else end, thought)
        self._from = self._at = end
        return False

    def _read_calls(self) -> Steps:
        """Read consecutive calls. Return False if the first is not a call; it then counts as content."""
        called = False
        while True:
            yield from self._skip(self.between if called else self.before)
            # Separators between calls are not content.
            if called:
                self._from = self._at
            if not (yield from self._has_more()) or not (yield from self._read_call()):
                return called
            called = True
            yield from self._end_call()

    def _end_call(self) -> Steps:
        """Drop a call's text from the content, and everything after it if no second call is allowed."""
        self._from = self._at
        while not self._parallel_calls:
            self._at = self._from = len(self.text)
            if self._last:
                break
            yield
        return True

    def _read_call(self) -> Steps:
        """Read an object, and report a call as soon as its name is known and its arguments begin."""
        name, reported, arguments = None, False, "{}"
        if self.text[self._at] != "{":
            return False
        self._at += 1
        while True:
            yield from self._skip(SPACE + ",")
            if not (yield from self._has_more()) or self.text[self._at] not in '"}':
                self.cut = reported and self._at == len(self.text)
                return reported
            if self.text[self._at] == "}":
                break
            begin, complete = self._at, (yield from self._skip_value())
            key = self.text[begin : self._at]
            yield from self._skip(SPACE + ":")
            if not complete or not (yield from self._has_more()):
                self.cut = reported
                return reported
            begin, holds_arguments = self._at, key in ('"arguments"', '"parameters"')
            if holds_arguments and name is not None and not reported:
                reported = True
                self._begin(name)
                self._sent = begin
            if not (yield from self._send_value()):
                self.cut = reported
                return reported
            value = self.text[begin : self._at]
            if key == '"name"' and not reported and (name := _parse_name(value)) not in self._tools:
                return False
            arguments = value if holds_arguments else arguments
        self._at += 1
        # The arguments came before the name, or there are none.
        if not reported and name is not None:
            self._begin(name)
            self._add(arguments)
        return name is not None

    def _send_value(self) -> Steps:
        """Skip a JSON value, and report its part from `_sent` on, if that is set. Returns whether it is complete."""
        complete = yield from self._skip_value()
        self._flush()
        self._sent = None
        return complete

    def _read_arguments(self, name: str) -> Steps:
        """Read a JSON object, the arguments of a call. If there is none, report no call and return False."""
        yield from self._skip(SPACE)
        if name not in self._tools or not (yield from self._has_more()) or self.text[self._at] != "{":
            return False
        self._begin(name)
        self._sent = self._at
        self.cut = not (yield from self._send_value())
        return True

    def _begin(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call = {"index": self.calls, "id": self._new_id(), "type": "function", "function": function}
        self._calls.append(call)
        self.calls += 1

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def _add(self, arguments: str) -> None:
        """Report a piece of the arguments of the last call."""
        self._calls.append({"index": self.calls - 1, "function": {"arguments": arguments}})

    def _flush(self) -> None:
        if self._sent is not None and self._sent < self._at:
            written = self.text[self._sent : self._at]
            self._add(json.dumps(written, ensure_ascii=False)[1:-1] if self._quotes else written)
            self._sent = self._at

    def _report(self, end: int, thought: bool) -> None:
        if end > self._from:
            if thought:
                self._thoughts += self.text[self._from : end]
            else:
                self._content.append((self._from, end))
            self._from = end

    def _stripped_end(self, end: int) -> int:
        """Return where the unreported text before `end` ends without its trailing spaces. `end` never shrinks."""
        begin = max(self._from, self._seen)  # before that, only spaces are not reported
        self._seen = end
        part = self.text[begin:end].rstrip()
        return begin + len(part) if part else self._from

    # The methods below move through text that is still being generated: they yield when they need more of it.

    def _skip_value(self) -> Steps:
        """Move past a JSON value. Return False if the text ends before its end."""
        first, depth = self.text[self._at], 0
        if first not in '"{[':
            # A number or name may also end with the text.
            return (yield from self._find(_SCALAR_END)) or True
        while True:
            if not (yield from self._find(_NESTED)):
                return False
            mark = self.text[self._at]
            self._at += 1
            if mark == '"':
                if not (yield from self._skip_string()):
                    return False
            else:
                depth += 1 if mark in "{[" else -1
            if depth <= 0:
                return True

    def _skip_string(self, pattern: re.Pattern[str] = _STRING) -> Steps:
        """Move past a JSON string whose opening quote was read. Return False if the text ends within it.

        The pattern matches backslashes and the closing quote, which may differ from JSON's.
        """
        while (yield from self._find(pattern)):
            self._at += 1
            # The character after a backslash is skipped, even a quote.
            if self.text[self._at - 1] != "\\":
                return True
            if not (yield from self._has_more()):
                return False
            self._at += 1
        return False

    def _find_mark(self, marks: tuple[str, ...], progress: Callable[[], None]) -> Steps:
        """Move to the first mark. `progress` is called whenever the text before `_at` is known to contain none.

        Return False if the text ends without one; `_at` is then before a possible partial mark.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while (match := pattern.search(self.text, self._at)) is None:
            # The end of the text may be the beginning of a mark, so it is not reported yet.
            partial = 0
            for mark in marks:
                sizes = range(len(mark) - 1, partial, -1)
                partial = next((size for size in sizes if self.text.endswith(mark[:size])), partial)
            self._at = max(self._at, len(self.text) - partial)
            if self._last:
                return False
            progress()
            yield
        self._at = match.start()
        return True

    def _find(self, pattern: re.Pattern[str]) -> Steps:
        while (match := pattern.search(self.text, self._at)) is None:
            self._at = len(self.text)
            if not (yield from self._has_more()):
                return False
        self._at = match.start()
        return True

    def _read_name(self) -> Generator[None, None, str]:
        """Move to the first character that no tool's name has, and return the text before it."""
        begin = self._at
        yield from self._find(_NAME_END)
        return self.text[begin : self._at]

    def _skip(self, characters: str) -> Steps:
        while (yield from self._has_more()) and self.text[self._at] in characters:
            self._at += 1
        return True

    def _skip_literal(self, literal: str) -> Steps:
        """Move past a literal if it comes next; else return False and stay."""
        begin = self._at
        for character in literal:
            if not (yield from self._has_more()) or self.text[self._at] != character:
                self._at = begin
                return False
            self._at += 1
        return True

    def _has_more(self) -> Steps:
        """Wait until there is a character to read. Return False at the end of the text."""
        while self._at == len(self.text):
            self._flush()
            if self._last:
                return False
            yield
        return True


def _parse_name(text: str) -> str | None:
    try:
        name = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) else None
