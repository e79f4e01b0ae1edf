"""Tool-call formats of current models: a reader for each format, and the grammar of one call.

`call_form` chooses the reader by the chat template, or by the name of vLLM's parser for the format. A reader reports an
argument or a call as soon as it is certain, and its result does not depend on how the text is split into pieces.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from redrafter.chat.thoughts import PARSERS as THOUGHTS
from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.serve.answers.arguments import as_json, parameter_types, python_as_json
from redrafter.serve.answers.lark import Argument, CalledTool, LarkWriter
from redrafter.serve.answers.reader import SPACE, ChatReader, Steps

_UNQUOTED_NAME = re.compile(r"[\w.-]+")
_XML_NAME = re.compile(r"[^\s<>]([^\n<>]*[^\s<>])?")
_PYTHON = re.compile(r"""["'(){}\[\],]""")
_PYTHON_STRINGS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def _nothing() -> None:
    pass


class HermesCalls(ChatReader):
    """JSON objects that models write between `<tool_call>` and `</tool_call>` alone."""

    parsers = ("hermes",)
    template_mark = "<tool_call>"
    opening, joint, closing = "<tool_call>", "", "\n</tool_call>"
    arguments_key = "arguments"

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of an object on a separate line."""
        return f'"\\n" {super().write_call(lark, tool)}'


class _NamedArguments(ChatReader, ABC):
    """Reads calls that list arguments one by one, and reports each call with its first argument or at its end."""

    name_marks: ClassVar[tuple[str, str]]  # around the name
    end: ClassVar[str]  # after the last argument
    _key = ""  # of the argument that is being read

    def _read_call(self) -> Steps:
        head, tail = self.name_marks
        if not (yield from self._skip_literal(head)):
            return False
        name = yield from self._read_name()
        if name not in self._tools or not (yield from self._skip_literal(tail)):
            return False
        opening = "{"
        while True:
            # Arguments are reported as soon as each is complete, so that clients can stream them.
            yield from self._skip(SPACE)
            ended = yield from self._skip_literal(self.end)
            if not ended and not (yield from self._read_key()):
                if opening == "{":
                    return False
                # A call that has begun was already sent and cannot become text again: close it, or mark it as cut.
                self.cut = self._ends_here()
                if self.cut:
                    self._at = len(self.text)
                else:
                    self._add("}")
                return True
            if opening == "{":
                self._begin(name)
            if ended:
                self._add("{}" if opening == "{" else "}")
                return True
            if not (yield from self._read_value(name, f"{opening}{json.dumps(self._key)}: ")):
                self.cut, self._at = True, len(self.text)
                return True
            opening = ", "

    @abstractmethod
    def _read_key(self) -> Steps:
        """Read an argument up to its value, and set `_key`. Return False if there is no further argument."""

    @abstractmethod
    def _read_value(self, name: str, before: str) -> Steps:
        """Read a value and report it, preceded by the JSON `before`. Return False if the text ends within the value."""

    def _ends_here(self) -> bool:
        """Return whether the text ends where no argument was found, perhaps within the beginning of one."""
        return self._at == len(self.text)


class MistralCalls(ChatReader):
    """Mistral's calls: `[TOOL_CALLS]` before a list of JSON objects, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    parsers = ("mistral",)
    template_mark = "[TOOL_CALLS]"
    begins = ("[TOOL_CALLS]",)
    wrapper = ("[TOOL_CALLS]", "")
    bare = ""
    between = SPACE + ",;]"
    opening, joint = "[TOOL_CALLS]", ""
    arguments_key = "arguments"
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _read_call(self) -> Steps:
        if self.text[self._at] == "{":
            return (yield from super()._read_call())
        name = yield from self._read_name()
        # The model's own identifier is dropped: answers give each call a new one.
        if name in self._tools and (yield from self._skip_literal("[CALL_ID]")):
            yield from self._read_name()
        yield from self._skip_literal("[ARGS]")
        return (yield from self._read_arguments(name))

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a call in a list, or also of one after `[ARGS]` where the tokenizer has that token."""
        call = super().write_call(lark, tool)
        if lark.has("[ARGS]"):
            named = f"{json.dumps(tool.name)} {lark.mark('[ARGS]')} {lark.json(tool.parameters)}"
            return f'("[" {call} "]" | {named})'
        return f'"[" {call} "]"'

    def _new_id(self) -> str:
        return uuid.uuid4().hex[:9]  # Mistral's templates reject ids of any other length


class DeepSeekCalls(ChatReader):
    """DeepSeek's calls: the arguments follow the name, in a Markdown block for V3 and R1, as bare JSON since V3.1."""

    parsers = ("deepseek_v3", "deepseek_v31")
    template_mark = "<｜tool▁call▁begin｜>"
    begins = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    wrapper = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    bare = ""
    before = between = SPACE
    opening, joint, closing = "<｜tool▁calls▁begin｜>", '"\\n"?', "<｜tool▁calls▁end｜>"
    marks = (*begins, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _read_call(self) -> Steps:
        _, call = self.begins
        if not (yield from self._skip_literal(call)):
            return False
        begin = self._at
        if not (yield from self._find_mark(("<｜tool▁sep｜>",), _nothing)):
            return False
        name = self.text[begin : self._at].strip()
        yield from self._skip_literal("<｜tool▁sep｜>")
        yield from self._skip(SPACE)
        if (yield from self._has_more()) and self.text[self._at] != "{":  # V3 writes the call's type before its name
            name = yield from self._read_name()
            yield from self._skip(SPACE)
            yield from self._skip_literal("```json")
        if not (yield from self._read_arguments(name)):
            return False
        for end in ("```", "<｜tool▁call▁end｜>"):
            yield from self._skip(SPACE)
            yield from self._skip_literal(end)
        return True

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a call in the format of V3.1 or of V3."""
        begin, end = lark.mark("<｜tool▁call▁begin｜>"), lark.mark("<｜tool▁call▁end｜>")
        mark, arguments, name = lark.mark("<｜tool▁sep｜>"), lark.json(tool.parameters), json.dumps(tool.name)
        older = f'"function" {mark} {json.dumps(tool.name + chr(10) + "```json" + chr(10))} {arguments} "\\n```"'
        return f"{begin} ({name} {mark} {arguments} | {older}) {end}"


class PythonicCalls(_NamedArguments):
    """Calls as a list in Python: `[f(a=1, b="x"), g()]`, at the beginning of the text or after `<|python_tag|>`.

    A value is a literal. Any other expression, such as a variable or an f-string, becomes a string, as does a literal
    of more than `arguments.MAX_LITERAL_TOKENS` tokens that is not JSON.
    """

    parsers = ("pythonic", "llama4_pythonic")
    template_mark = "[func_name"
    begins = ("<|python_tag|>",)
    wrapper = ("<|python_tag|>", "")
    bare = "["
    between = SPACE + ",]"
    opening, joint, closing = "[", '", "', "]"
    marks = begins
    name_marks = ("", "(")
    end = ")"

    def _read_key(self) -> Steps:
        self._key = yield from self._read_name()
        yield from self._skip(SPACE)
        return bool(self._key) and (yield from self._skip_literal("="))

    def _read_value(self, name: str, before: str) -> Steps:
        begin = self._at
        if not (yield from self._skip_python()):
            return False
        self._add(before + python_as_json(self.text[begin : self._at].strip()))
        yield from self._skip_literal(",")
        return True

    def _skip_python(self) -> Steps:
        """Move to the comma or the bracket that ends a value. Return False if the text ends first."""
        depth = 0
        while (yield from self._find(_PYTHON)):
            # A bracket or comma ends the argument only outside nested values.
            mark = self.text[self._at]
            if depth == 0 and mark in ",)]}":
                return True
            self._at += 1
            if mark in _PYTHON_STRINGS:
                if not (yield from self._skip_string(_PYTHON_STRINGS[mark])):
                    return False
            elif mark != ",":
                depth += 1 if mark in "([{" else -1
        return False

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a call whose arguments are in the order of the schema."""
        # Rules for the remaining arguments, with and without one before them, from the last argument to the first.
        first = later = '")"'
        # Built from the last argument to the first, since each rule refers to the rest; `first` has no comma before it.
        for argument in reversed([*lark.arguments(tool, _UNQUOTED_NAME)]):
            value = lark.argument(tool, argument.schema)
            name = json.dumps(f"{argument.name}=") if argument.name is not None else f'{lark.free_name(tool)} "="'
            if argument.name is None:
                later = lark.rule(f'(", " {name} {value})* {later}')
                first = lark.rule(f"{name} {value} {later} | {first}")
                continue
            or_later, or_first = ("", "") if argument.required else (f" | {later}", f" | {first}")
            first = lark.rule(f"{name} {value} {later}{or_first}")
            later = lark.rule(f'", " {name} {value} {later}{or_later}')
        return f"{json.dumps(f'{tool.name}(')} {first}"


class XmlCalls(_NamedArguments):
    """Calls of Qwen3-Coder and Qwen3.5: `<tool_call><function=f><parameter=a>...</parameter></function></tool_call>`.

    Values are written without quotes; the tool's schema determines their types. A string is streamed while it is
    written, a value of any other type is reported when it is complete.
    """

    parsers = ("qwen3_coder", "qwen3_xml")
    template_mark = "<parameter="
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    bare = ""
    before = between = SPACE

    opening, joint = "<tool_call>", ""

    name_marks = ("<function=", ">")
    # Around a key and its value.
    key_marks: ClassVar[tuple[str, str]] = ("<parameter=", ">")
    value_marks: ClassVar[tuple[str, str]] = ("", "</parameter>")
    end = "</function>"
    _tried = 0  # end of the text that was already found not to be JSON

    def _ends_here(self) -> bool:
        # Text that is not an argument ends the call. A partial argument at the end of the text is dropped.
        marks = (self.key_marks[0], self.value_marks[0], self.end)
        written = self.text[self._at : self._at + len(max(marks, key=len))]
        return any(mark.startswith(written) for mark in marks)

    def _read_key(self) -> Steps:
        head, tail = self.key_marks
        if not (yield from self._skip_literal(head)):
            return False
        begin = self._at
        if not (yield from self._find_mark((tail,), _nothing)):
            self._at = len(self.text)
            return False
        self._key = self.text[begin : self._at].strip()
        self._at += len(tail)
        if head := self.value_marks[0]:
            yield from self._skip(SPACE)
            if not (yield from self._skip_literal(head)):
                return False
        yield from self._skip_literal("\n")
        return True

    def _read_value(self, name: str, before: str) -> Steps:
        """Read a value up to its end mark, which a line break may precede. Return False if the text ends first."""
        end = self.value_marks[1]
        ends = (f"\n{end}", end)
        types = parameter_types(self._tools[name], self._key)
        begin = self._at
        if types <= {"string"}:
            self._add(f'{before}"')
            self._sent, self._quotes = begin, True
            complete = yield from self._find_mark(ends, self._flush)
            self._flush()
            self._sent, self._quotes = None, False
            if complete:
                self._add('"')
        elif complete := (yield from self._skip_json(end)) or (yield from self._find_mark(ends, _nothing)):
            written = self.text[begin : self._at]
            self._add(before + (as_json(written.strip(), types) or json.dumps(written, ensure_ascii=False)))
        # A template writes a line break before its end mark, which is not part of the value.
        if complete:
            yield from self._skip_literal("\n")
            yield from self._skip_literal(end)
        return complete

    def _skip_json(self, end: str) -> Steps:
        """Move past an object or list that `end` follows; its strings may contain `end` too. Stay if there is none."""
        begin = self._at
        yield from self._skip(SPACE)
        # Only objects and arrays may contain the end mark inside their strings, so only these are parsed.
        if begin < self._tried or not (yield from self._has_more()) or self.text[self._at] not in "{[":
            self._at = begin
            return False
        if (yield from self._skip_value()):
            value_end = self._at
            yield from self._skip(SPACE)
            if (yield from self._skip_literal(end)):
                self._at = value_end
                yield from self._skip(SPACE)
                return True
        self._tried = max(self._tried, self._at)  # parsing the same text again would take quadratic time
        self._at = begin
        return False

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a call with a line break after each part."""
        arguments = [cls._write_argument(lark, tool, argument) for argument in lark.arguments(tool, _XML_NAME)]
        head = lark.mark(f"\n<function={tool.name}>\n")
        return " ".join([head, *arguments, lark.mark("</function>\n</tool_call>")])

    @classmethod
    def _write_argument(cls, lark: LarkWriter, tool: CalledTool, argument: Argument) -> str:
        value = lark.unquoted(tool, argument, "\n</parameter>\n", "</parameter>")
        if argument.name is None:
            return f"({lark.mark('<parameter=')} {lark.free_name(tool)} {lark.mark('>' + chr(10))} {value})*"
        written = f"{lark.mark('<parameter=')} {json.dumps(argument.name + '>' + chr(10))} {value}"
        return written if argument.required else f"({written})?"


class GlmCalls(XmlCalls):
    """GLM's calls: `<tool_call>f <arg_key>a</arg_key><arg_value>...</arg_value></tool_call>`."""

    parsers = ("glm45", "glm47")
    template_mark = "<arg_key>"
    begins = ("<tool_call>",)
    wrapper = ("", "")
    before = between = ""
    name_marks = ("<tool_call>", "")
    key_marks = ("<arg_key>", "</arg_key>")
    value_marks = ("<arg_value>", "</arg_value>")
    end = "</tool_call>"
    marks = (*name_marks, *key_marks, *value_marks, end)

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a call with a line break after each part, as GLM-4.5 writes it, or without any."""
        arguments = [cls._write_argument(lark, tool, argument) for argument in lark.arguments(tool, _XML_NAME)]
        return " ".join([json.dumps(tool.name), '"\\n"?', *arguments, lark.mark("</tool_call>")])

    @classmethod
    def _write_argument(cls, lark: LarkWriter, tool: CalledTool, argument: Argument) -> str:
        name = lark.free_name(tool) if argument.name is None else json.dumps(argument.name)
        value = lark.unquoted(tool, argument, "</arg_value>", "</arg_value>")
        head = f'{lark.mark("<arg_key>")} {name} {lark.mark("</arg_key>")} "\\n"? {lark.mark("<arg_value>")}'
        # GLM-4.5 writes a line break after each part; later versions write none.
        return f'({head} {value} "\\n"?){"*" if argument.name is None else "" if argument.required else "?"}'


class HarmonyMessages(ChatReader):
    """Messages of gpt-oss: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

    Messages to `functions.f` are calls, messages of the channel `analysis` are thoughts, all others are the answer.
    """

    parsers = ("openai",)
    template_mark = "<|channel|>"
    has_channels = True
    own_thoughts = THOUGHTS["openai_gptoss"]
    begins = ("<|start|>", "<|channel|>")
    joint = ""
    ends: ClassVar[tuple[str, ...]] = ("<|end|>", "<|call|>", "<|return|>")
    marks = (*begins, *ends, "<|message|>", "<|constrain|>")

    def _read(self) -> Steps:
        yield from self._skip(SPACE)
        addressed = yield from self._skip_literal("to=")  # the prompt ends with `<|start|>assistant`
        self._at = 0
        while addressed or (yield from self._read_until(self.begins, False)):
            addressed, begin = False, self._at
            if not (yield from self._find_mark(("<|message|>",), _nothing)):
                self._from = self._at = len(self.text)  # a message's header is not part of the answer
                return True
            head = self.text[begin : self._at]
            self._at += len("<|message|>")
            recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", head)
            if recipient is not None and (yield from self._read_arguments(recipient[1])):
                yield from self._end_call()
                yield from self._skip(SPACE)
            else:
                thought = recipient is None and re.search(r"<\|channel\|>\s*analysis\b", head) is not None
                told_apart = thought and self._marks is not None
                if told_apart:
                    self._begin_thought(begin)
                if recipient is None:
                    # Only thoughts are stripped at the start: an answer may begin with spaces on purpose.
                    if thought:
                        yield from self._skip(SPACE)
                    self._from = self._at
                if not (yield from self._read_until(self.ends + self.begins, told_apart)):
                    return True
            for end in self.ends:
                yield from self._skip_literal(end)
            # A thought without an end mark ends with its message.
            if self.thought_spans and self.thought_spans[-1][1] > self._at:
                self._end_thought()
            if recipient is None or recipient[1] in self._tools:
                self._from = self._at
        return True

    @classmethod
    def write_call(cls, lark: LarkWriter, tool: CalledTool) -> str:
        """Return the grammar of a message to a tool, whose name comes before the channel or within it."""
        arguments, message = lark.json(tool.parameters), lark.mark("<|message|>")
        commentary = lark.mark("<|channel|>commentary")
        kind = cls._write_kind(lark)
        after_start = f"{json.dumps(f' to=functions.{tool.name}')} {commentary} {kind}"
        in_channel = f"{commentary} {json.dumps(f' to=functions.{tool.name}')} {kind}"
        return f"({after_start} | {in_channel}) {message} {arguments}"

    @classmethod
    def write_text(cls, lark: LarkWriter, tools: Sequence[CalledTool], several: bool) -> str:
        """Return the grammar of a final message, or of a call with an optional message of the channel `commentary`."""
        ends = (*cls.ends, *cls.begins)
        message = f"{lark.mark('<|channel|>commentary<|message|>')} {lark.up_to('<|end|>', *ends)}"
        before = f"({message} {lark.mark('<|start|>assistant')})?"
        return f"({cls.write_answer(lark, lark.free(*ends))} | {before} {cls._write_calls(lark, tools, several)})"

    @staticmethod
    def _write_kind(lark: LarkWriter) -> str:
        return f'(" "? {lark.mark("<|constrain|>json")} | " json")?'

    @classmethod
    def write_answer(cls, lark: LarkWriter, content: str) -> str:
        """Return the grammar of a message of the channel `final`."""
        return f"{lark.mark('<|channel|>final')} {cls._write_kind(lark)} {lark.mark('<|message|>')} {content}"

    @classmethod
    def after_thought(cls, lark: LarkWriter, marks: ThoughtMarks | None, thinking: Thinking, rest: str) -> str:
        """Return the grammar of what follows a message of the channel `analysis`, which the prompt never opens."""
        if marks is None:
            return rest
        thought = f"{lark.mark(marks.begin)} {lark.up_to(marks.end)} {lark.mark('<|start|>assistant')}"
        return f"({thought})? {rest}"


_OF_MODELS = (HarmonyMessages, DeepSeekCalls, MistralCalls, GlmCalls, XmlCalls, PythonicCalls, HermesCalls)
FORMS: tuple[type[ChatReader], ...] = (*_OF_MODELS, ChatReader)
PARSERS = {name: form for form in FORMS for name in form.parsers}


def call_form(parser: str, template: str) -> type[ChatReader]:
    """Return the reader for a vLLM parser name; `auto` detects it in the chat template and defaults to JSON objects."""
    found = (form for form in FORMS if form.template_mark is not None and form.template_mark in template)
    return next(found, ChatReader) if parser == "auto" else PARSERS[parser]
