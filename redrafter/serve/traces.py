"""Export traces of requests to OpenTelemetry, with names of vLLM and the semantic conventions for generative AI.

Each request that reaches the engine is one span, which contains no text. The SDK sends spans from a separate thread,
and drops them if the collector does not accept them, so that no request waits. This module is imported only with
`--otlp-traces-endpoint`.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from redrafter.errors import ArgumentError, MissingDependencyError, first_line, how_to_install
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import usage_and_metrics
from redrafter.serve.answers.formats import AnyChoice
from redrafter.serve.engine_process.messages import Submit
from redrafter.serve.metrics import REASONS
from redrafter.serve.protocol.requests import ChatRequest, CompletionRequest
from redrafter.version import __version__

try:
    from opentelemetry import context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    what = f"--otlp-traces-endpoint needs OpenTelemetry's SDK and its exporter: {how_to_install('serve,otel')}"
    raise MissingDependencyError(what) from error

SPAN_NAME = "llm_request"  # vLLM's name
TRACES_PATH = "/v1/traces"  # default path of a collector
CLOSE_SECONDS = 2.0  # time limit for sending the last spans
PARENT_HEADERS = (b"traceparent", b"tracestate")

Deltas = AsyncGenerator[tuple[AnyChoice, list[SequenceDelta]], None]  # each choice with its new deltas


class Traces:
    """Creates a span for each request, as a child of the client's span, and sends it to a collector.

    The SDK's environment variables apply: service name, sampling, headers, certificates, batches.
    """

    def __init__(self, endpoint: str):
        """Start sending to `endpoint`, the URL of an OTLP/HTTP collector; its path defaults to /v1/traces.

        Raises `ArgumentError` for environment settings that the SDK rejects.
        """
        # OpenTelemetry appends the path only to endpoints from its environment variable.
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + TRACES_PATH
        try:
            resource = Resource.create()
            if str(resource.attributes["service.name"]).startswith("unknown_service"):
                resource = resource.merge(Resource({"service.name": "redrafter"}))
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        except ValueError as error:
            settings = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_"))) or "no OTEL_ variable"
            raise ArgumentError(
                f"OpenTelemetry refuses its settings in the environment ({settings}): {first_line(error)}; "
                "change them, or leave out --otlp-traces-endpoint"
            ) from error
        self._tracer = self._provider.get_tracer("redrafter", __version__)
        self._parents = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send the remaining spans and stop. They are dropped if the collector takes too long."""
        # The SDK's own limit is at least 30 s.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def continue_traces(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application so that its spans are children of the span in the `traceparent` header, if any."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            sent = {
                name.decode(): value.decode("latin-1")
                for name, value in scope.get("headers", ())
                if name in PARENT_HEADERS
            }
            if not sent:
                return await app(scope, receive, send)
            token = context.attach(self._parents.extract(sent))
            try:
                await app(scope, receive, send)
            finally:
                context.detach(token)

        return answer

    async def follow(
        self,
        deltas: Deltas[AnyChoice],
        request: CompletionRequest | ChatRequest,
        asked: Submit,
        choices: Sequence[AnyChoice],
        model: str,
        request_id: str,
    ) -> Deltas[AnyChoice]:
        """Pass a request's deltas through, and end its span when the request ends, fails or is abandoned."""
        params = asked.params
        about: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if isinstance(request, ChatRequest) else "text_completion",
            "gen_ai.provider.name": "redrafter",
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": asked.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.n": len(choices),
            "gen_ai.request.choice.count": len(choices),
        }
        # Spans need wall-clock times, but the request's arrival was taken from the monotonic clock.
        before = time.perf_counter() - choices[0].arrived_at  # seconds since its arrival
        began = time.time_ns() - round(1e9 * before)
        span = self._tracer.start_span(SPAN_NAME, kind=SpanKind.SERVER, start_time=began, attributes=about)
        finishes = dict.fromkeys(choices, REASONS["cancelled"])
        failed: BaseException | None = None
        try:
            async with aclosing(deltas):
                async for choice, gained in deltas:
                    if (finish := gained[-1].finish) is not None:
                        finishes[choice], failed = REASONS[finish], failed or gained[-1].error
                    yield choice, gained
        except Exception as error:
            failed = error
            raise
        finally:
            if span.is_recording():
                span.set_attribute("gen_ai.response.finish_reasons", list(finishes.values()))
                span.set_attributes(_measured(choices))
                if failed is not None:
                    span.set_attribute("error.type", type(failed).__name__)
                    span.set_status(StatusCode.ERROR, str(failed))
            span.end()


def _measured(choices: Sequence[AnyChoice]) -> dict[str, Any]:
    """Return span attributes of a request: tokens, drafts, and the first choice's durations."""
    told, now = usage_and_metrics(choices), time.perf_counter()
    usage, drafts = told["usage"], told["metrics"]["speculative_decoding"]
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],  # this and the next name are vLLM's
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "redrafter.spec_decode.num_drafts": drafts["num_spec_steps"],
        "redrafter.spec_decode.num_draft_tokens": drafts["num_draft_tokens"],
        "redrafter.spec_decode.num_accepted_tokens": drafts["num_accepted_draft_tokens"],
        "gen_ai.latency.e2e": now - choices[0].arrived_at,
    }
    queued = min((choice.queued for choice in choices if choice.queued is not None), default=None)
    first = min((choice.first_token_at for choice in choices if choice.first_token_at is not None), default=None)
    if queued is not None:
        found["gen_ai.latency.time_in_queue"] = queued
        found["gen_ai.latency.time_in_model_inference"] = now - choices[0].arrived_at - queued
    if first is not None:
        found["gen_ai.latency.time_to_first_token"] = first - choices[0].arrived_at
        found["gen_ai.latency.time_in_model_decode"] = now - first
        if queued is not None:
            found["gen_ai.latency.time_in_model_prefill"] = first - choices[0].arrived_at - queued
    return found
