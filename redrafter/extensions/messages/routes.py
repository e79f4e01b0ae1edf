"""Serve `/v1/messages`: translate Anthropic's requests to chat requests, and the answers back."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import BaseRoute

from redrafter.chat.template import ChatTemplate
from redrafter.extensions.messages import MESSAGES_PATH, protocol
from redrafter.serve.extension import Respond
from redrafter.serve.network.guards import JsonRoute
from redrafter.serve.protocol.requests import ApiError, ChatRequest
from redrafter.serve.routes.translated import Event, Kind, PartWriter, chat_request, format_events

if TYPE_CHECKING:
    from redrafter.serve.server import Server

# Claude Code's system prompt begins with a block of this kind: a hash for Anthropic's billing, which differs in every
# request. Kept in the prompt, it would prevent the cache from matching anything after it.
BILLING_MARK = "x-anthropic-billing-header"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "cancelled": "end_turn"}


def messages_routes(server: "Server", respond: Respond) -> list[BaseRoute]:
    """Return the routes. `respond` is the argument of `Extension.routes`."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post(MESSAGES_PATH)
    async def messages(body: protocol.MessagesRequest, request: Request) -> Response:
        async def work() -> dict[str, Any] | AsyncIterator[dict[str, Any]]:
            server.check_model(body.model)
            head = _head(body, body.model or server.model)
            bounded = server.thinking_budget(0) is not None
            chat = as_chat(body, server.prompts.template, server.thinks, bounded=bounded)
            answer = await server.chat(chat, request.scope["facts"])
            return _whole(head, answer, body) if isinstance(answer, dict) else message_events(head, answer, body)

        return await respond(work(), request, format_events)

    @routes.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(body: protocol.CountTokensRequest, request: Request) -> dict[str, int]:
        server.check_model(body.model)
        chat = as_chat(body, server.prompts.template, server.thinks)
        encoded = await server.encode(
            lambda decoder: server.counting_prompts.encode_chat(chat, decoder), chat.messages, request.scope["facts"]
        )
        return {"input_tokens": len(encoded.ids)}

    return routes.routes


def as_chat(
    request: protocol.CountTokensRequest, template: ChatTemplate, thinks: bool = False, *, bounded: bool = False
) -> ChatRequest:
    """Translate a request to a chat request, or raise `ApiError` or `RequestValidationError`.

    `thinks` is True for a model that writes thoughts, `bounded` if the server can hold it to a budget of them.
    """
    messages = _messages(request, template)
    variables = _thinking_variables(request, template, thinks) | (request.chat_template_kwargs or {})
    chat: dict[str, Any] = {"model": request.model, "messages": messages, "chat_template_kwargs": variables}
    if messages and messages[-1]["role"] == "assistant":  # the answer continues this message
        if "tool_calls" in messages[-1] or not any(part["text"] for part in messages[-1]["content"] or ()):
            raise ApiError(400, "the last message is the assistant's, and has no text alone to continue", "messages")
        chat["continue_final_message"] = True
    if request.tools:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            for tool in request.tools
        ]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": None, "any": "required", "none": "none", "tool": named}[choice.type]
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    output = request.output_config or protocol.OutputConfig()
    if output.effort is not None and "reasoning_effort" in template.variables:
        chat["reasoning_effort"] = output.effort
    if (form := output.format or request.output_format) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if bounded and request.thinking is not None and request.thinking.type != "disabled":
        chat["thinking_token_budget"] = request.thinking.budget_tokens
    if isinstance(request, protocol.MessagesRequest):
        chat |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
        if request.stream:  # the first event reports the number of prompt tokens
            chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return chat_request(chat, request)


def _thinking_variables(request: protocol.CountTokensRequest, template: ChatTemplate, thinks: bool) -> dict[str, Any]:
    """Return the template's variables for `thinking`; a model without thoughts needs none."""
    asked = request.thinking
    # The template's default applies.
    if asked is None:
        return {}
    # The variable's name differs between model families.
    switch = template.thought_switch
    variables: dict[str, Any] = {} if switch is None else {switch: asked.type != "disabled"}
    if asked.type == "disabled":
        if switch is None and thinks:
            what = "this model's chat template cannot turn thoughts off: leave thinking out"
            raise ApiError(400, what, "thinking", "unsupported_parameter")
    elif asked.budget_tokens is not None and "thinking_budget" in template.variables:
        variables["thinking_budget"] = asked.budget_tokens
    return variables


def _messages(request: protocol.CountTokensRequest, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the chat messages of a request, with contents as lists of parts.

    Results of calls become separate messages before the rest of their turn; consecutive turns of the user become one
    message.
    """
    turns, messages = list(request.messages), list[dict[str, Any]]()
    system = [*protocol.text_blocks(request.system)]
    while turns and turns[0].role == "system":
        system += turns.pop(0).blocks  # type: ignore[arg-type]
    if system := [block for block in system if not block.text.startswith(BILLING_MARK)]:
        messages.append({"role": "system", "content": _parts(system)})
    for number in range(1, len(turns) - 1):
        called = any(isinstance(block, protocol.ToolUseBlock) for block in turns[number - 1].blocks)
        if turns[number].role == "system" and called:  # nothing may separate calls from their results
            turns[number : number + 2] = reversed(turns[number : number + 2])
    for turn in turns:
        if turn.role == "assistant":
            messages.append(_assistant(turn))
            continue
        own = [block for block in turn.blocks if not isinstance(block, protocol.ToolResultBlock)]
        last = messages[-1] if messages else {"role": None}
        if turn.role == "system" and template.places_system_messages:
            messages.append({"role": "system", "content": _parts(own)})
        elif turn.role == "system" and last["role"] in ("user", "tool"):
            # Merge into the neighbour: with a further user turn after results, many templates drop the thoughts.
            _extend(last, _parts(own))
        else:
            seen = []
            for result in turn.blocks:
                if isinstance(result, protocol.ToolResultBlock):
                    blocks = protocol.text_blocks(result.content)  # type: ignore[arg-type]
                    text = "".join(block.text for block in blocks if isinstance(block, protocol.TextBlock))
                    if result.is_error and not text.startswith("Error"):
                        text = f"Error: {text}"  # chat messages have no error flag
                    messages.append({"role": "tool", "tool_call_id": result.tool_use_id, "content": _text_parts(text)})
                    seen += [x for x in blocks if isinstance(x, protocol.ImageBlock)]  # allowed only in user turns
            parts = _parts([*seen, *own])
            if parts or not messages or messages[-1]["role"] != "tool":
                # Many templates refuse two user turns in a row.
                if messages and messages[-1]["role"] == "user":
                    _extend(messages[-1], parts)
                else:
                    messages.append({"role": "user", "content": parts})
    return messages


def _assistant(turn: protocol.MessagesTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    thoughts = [block.thinking for block in turn.blocks if isinstance(block, protocol.ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if texts := [block for block in turn.blocks if isinstance(block, protocol.TextBlock)]:
        message["content"] = _parts(texts)
    if calls := [block for block in turn.blocks if isinstance(block, protocol.ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}}
            for call in calls
        ]
    return message


def _parts(blocks: Any) -> list[dict[str, Any]]:
    """Convert text and image blocks to parts of a chat message."""
    parts = []
    for block in blocks:
        if isinstance(block, protocol.ImageBlock):
            url = f"data:{block.source.media_type};base64,{block.source.data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts += _text_parts(block.text)
    return parts


def _text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _extend(message: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    between = _text_parts("\n\n") if message["content"] and parts else []
    message["content"] += [*between, *parts]


def _head(body: protocol.MessagesRequest, model: str) -> dict[str, Any]:
    """Return the initial fields of an answer, before any output."""
    head: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
    if body.diagnostics is not None and body.diagnostics.previous_message_id is not None:
        head["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
    return head | {"content": [], "stop_reason": None, "stop_sequence": None}


def _whole(head: dict[str, Any], answer: dict[str, Any], body: protocol.MessagesRequest) -> dict[str, Any]:
    blocks = BlockWriter(head["id"], body)
    blocks.translate_whole(answer)
    return head | {"content": blocks.done} | blocks.ending | {"usage": blocks.usage, "metrics": answer["metrics"]}


class BlockWriter(PartWriter):
    """Converts a chat's answer to the blocks of one message.

    Args:
        signature: Signature of its thoughts. It is never checked, but clients drop thoughts without one.
        body: The request that the message answers.
    """

    def __init__(self, signature: str, body: protocol.MessagesRequest):
        super().__init__()
        self._signature = signature
        self._omits_thoughts = body.thinking is not None and body.thinking.display == "omitted"
        self._block: dict[str, Any] = {}  # the open block

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far. `input_tokens` excludes tokens found in the cache."""
        usage = self.reported["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counted = {
            # Anthropic counts cached tokens apart from input tokens; OpenAI includes them.
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        return counted if thoughts is None else counted | {"output_tokens_details": {"thinking_tokens": thoughts}}

    @property
    def ending(self) -> dict[str, Any]:
        """Stop reason and stop sequence of the message."""
        reason = _STOP_REASONS[self.finish or "stop"]
        if reason == "end_turn" and self.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop}
        return {"stop_reason": reason, "stop_sequence": None}

    def _begin(self, kind: Kind, call: dict[str, Any]) -> Iterator[Event]:
        if kind == "thought":
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "text":
            self._block = {"type": "text", "text": ""}
        else:
            self._block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        yield self._event("content_block_start", content_block=self._block)

    def _tell(self, piece: str) -> Iterator[Event]:
        if self._kind == "call":
            yield self._delta("input_json_delta", partial_json=piece)
        elif self._kind == "text":
            yield self._delta("text_delta", text=piece)
        elif not self._omits_thoughts:
            yield self._delta("thinking_delta", thinking=piece)

    def _end(self, cut: bool) -> Iterator[Event]:
        block, written = dict(self._block), self._written
        if self._kind == "call":
            block["input"] = _parse_input(written)
        elif self._kind == "text":
            block["text"] = written
        else:
            block |= {"thinking": "" if self._omits_thoughts else written, "signature": self._signature}
            # Clients drop thoughts without a signature, though none is checked here.
            yield self._delta("signature_delta", signature=self._signature)
        yield self._event("content_block_stop")
        self.done.append(block)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.done)} | fields

    def _delta(self, kind: str, **fields: Any) -> Event:
        return self._event("content_block_delta", delta={"type": kind} | fields)


def _parse_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; invalid ones, as of a call cut off, become its field `unparsed`."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unparsed": arguments}


async def message_events(
    head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]], body: protocol.MessagesRequest
) -> AsyncIterator[Event]:
    """Convert the chunks of a chat's stream to the events of one message, and close the stream at the end.

    `head` has the initial fields of the message.
    """
    blocks, begun = BlockWriter(head["id"], body), False
    try:
        async for chunk in chunks:
            events = list(blocks.translate(chunk))
            if not begun:
                begun = True
                yield {"type": "message_start", "message": head | {"usage": blocks.usage}}
                yield {"type": "ping"}
            for event in events:
                yield event
        for event in blocks.close():
            yield event
        counts = {"usage": blocks.usage, "metrics": blocks.reported.get("metrics")}
        yield {"type": "message_delta", "delta": blocks.ending} | counts
        yield {"type": "message_stop"}
    except ApiError as error:
        yield protocol.messages_error(error)[1]
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
