"""Make the grammar of a request's output: of its content, and of the calls that it forces or that are strict."""

from collections.abc import Mapping
from typing import Any

from redrafter.chat.thoughts import Thinking, ThoughtMarks
from redrafter.grammar.source import GrammarSource
from redrafter.serve.answers.lark import CalledTool, LarkWriter
from redrafter.serve.answers.reader import ChatReader
from redrafter.serve.protocol.requests import ChatRequest, CompletionRequest, ToolChoice

_COMBINING_KEYWORDS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum"})
# Keywords by which a schema without properties describes the members of an object nevertheless.
_MEMBER_KEYWORDS = _COMBINING_KEYWORDS | {"additionalProperties", "patternProperties"}


def content_grammar(request: CompletionRequest | ChatRequest) -> GrammarSource | None:
    """Return the grammar of the content that a request asks for; None leaves it free."""
    spec: dict[str, Any] | None = None
    if request.structured_outputs is not None:
        [(kind, value)] = ((name, value) for name, value in request.structured_outputs if value is not None)
        spec = {"json_schema" if kind == "json_" else kind: value}
    elif isinstance(request, ChatRequest):
        form = request.response_format
        if form is not None and form.json_schema is not None:
            spec = {"json_schema": form.json_schema.schema_}
        elif form is not None and form.type != "text":
            spec = {"json_object": True} if form.lark_grammar is None else {"lark": form.lark_grammar}
    return None if spec is None else GrammarSource.from_spec(spec)


def chat_grammar(
    request: ChatRequest,
    grammar: GrammarSource | None,
    form: type[ChatReader],
    special: Mapping[str, int],
    marks: ThoughtMarks | None,
    thinking: Thinking,
) -> GrammarSource | None:
    """Return the grammar of a chat's whole output: a thought, then a call or the content.

    `grammar` constrains only the content; None leaves it free.
    """
    lark = LarkWriter(special, form.parsers[0])
    if forced := forced_tools(request):
        return lark.source(form.after_thought(lark, marks, thinking, form.write_forced(lark, forced)))
    # A requested format already constrains the text, so strict calls do not apply.
    if grammar is None and (strict := strict_tools(request)):
        text = form.write_text(lark, strict, several=request.parallel_tool_calls is not False)
        return lark.source(form.after_thought(lark, marks, thinking, text))
    if grammar is None:
        return None
    around = form.after_thought(lark, marks, thinking, form.write_answer(lark, "@answer"))
    return grammar if around == "@answer" else grammar._replace(around=lark.text(around))


def forced_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the tools that a forced call may use; empty if `tool_choice` forces no call."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return []
    named = choice.function.name if isinstance(choice, ToolChoice) else None
    functions = [tool.function for tool in request.tools or () if named in (None, tool.function.name)]
    return [CalledTool(each.name, _arguments_schema(each.parameters), bool(each.strict)) for each in functions]


def strict_tools(request: ChatRequest) -> list[CalledTool]:
    """Return the callable tools if any is strict, else none; tools that are not strict accept any arguments."""
    functions = [tool.function for tool in request.callable_tools]
    if request.tool_choice not in (None, "auto") or not any(function.strict for function in functions):
        return []
    anything = {"type": "object"}
    return [CalledTool(x.name, _arguments_schema(x.parameters) if x.strict else anything) for x in functions]


def _arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, an object. A function without properties takes none, as in OpenAI's API.

    Parameters of `{"type": "object"}` alone are any object.
    """
    schema = parameters or {"properties": {}}
    if _COMBINING_KEYWORDS.isdisjoint(schema):  # else other parts of the schema have the type
        schema = schema | {"type": "object"}
    if schema.get("properties") == {} and _MEMBER_KEYWORDS.isdisjoint(schema):
        schema = schema | {"additionalProperties": False}
    return schema
