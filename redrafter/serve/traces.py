"""Export traces of requests to OpenTelemetry, with names of vLLM and the semantic conventions for generative AI.

OpenTelemetry's instrumentation of FastAPI begins a span for each request; those that reach the engine get attributes
here, and no text. The SDK sends spans from a separate thread, and drops them if the collector does not accept them, so
that no request waits. This module is imported only with `--otlp-traces-endpoint`.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import os
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI

from redrafter.errors import ArgumentError, MissingDependencyError, first_line, how_to_install
from redrafter.scheduler.sequence import SequenceDelta
from redrafter.serve.answers.choice import usage_and_metrics
from redrafter.serve.answers.formats import AnyChoice, ChatChoice
from redrafter.serve.engine_process.messages import Submit
from redrafter.serve.metrics import REASONS

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import StatusCode
except ImportError as error:
    what = f"--otlp-traces-endpoint needs OpenTelemetry's SDK and instrumentation: {how_to_install('serve,otel')}"
    raise MissingDependencyError(what) from error

TRACES_PATH = "/v1/traces"  # default path of a collector
CLOSE_SECONDS = 2.0  # time limit for sending the last spans
QUIET_URLS = "/health,/v1/health,/metrics"  # asked every few seconds

Deltas = AsyncGenerator[tuple[AnyChoice, list[SequenceDelta]], None]  # each choice with its new deltas


class Traces:
    """Sends a span of each request, a child of the client's span, to a collector.

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

    def close(self) -> None:
        """Send the remaining spans and stop. They are dropped if the collector takes too long."""
        # The SDK's own limit is at least 30 s.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def instrument(self, app: FastAPI) -> None:
        """Let an application begin a span for each request, but for those of health and metrics."""
        FastAPIInstrumentor.instrument_app(
            app, tracer_provider=self._provider, excluded_urls=QUIET_URLS, exclude_spans=["receive", "send"]
        )


async def follow(deltas: Deltas[AnyChoice], asked: Submit, choices: list[AnyChoice], model: str) -> Deltas[AnyChoice]:
    """Pass a request's deltas through, and describe them in its span when the request ends, fails or is abandoned."""
    span, params = trace.get_current_span(), asked.params
    about: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if isinstance(choices[0], ChatChoice) else "text_completion",
        "gen_ai.provider.name": "redrafter",
        "gen_ai.request.id": asked.request_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": asked.max_new_tokens,
        "gen_ai.request.choice.count": len(choices),
    }
    about |= {f"gen_ai.request.{name}": getattr(params, name) for name in ("temperature", "top_p", "top_k", "seed")}
    finishes: dict[AnyChoice, str] = dict.fromkeys(choices, REASONS["cancelled"])
    failed: BaseException | None = None
    try:
        async with aclosing(deltas):
            async for choice, gained in deltas:
                if (finish := gained[-1].finish) is not None:
                    finishes[choice] = REASONS[finish]
                    failed = failed or gained[-1].error
                yield choice, gained
    except Exception as error:
        failed = error
        raise
    finally:
        if span.is_recording():
            span.set_attributes(about | {"gen_ai.response.finish_reasons": [*finishes.values()]} | _measured(choices))
            if failed is not None:
                span.set_attribute("error.type", type(failed).__name__)
                span.set_status(StatusCode.ERROR, str(failed))


def _measured(choices: Sequence[AnyChoice]) -> dict[str, Any]:
    """Return span attributes of a request: tokens, drafts, and the first choice's durations."""
    told, now = usage_and_metrics(choices), time.perf_counter()
    usage, drafts = told["usage"], told["metrics"]["speculative_decoding"]
    queued = min((choice.queued for choice in choices if choice.queued is not None), default=None)
    first = min((choice.first_token_at for choice in choices if choice.first_token_at is not None), default=None)
    found = {
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "redrafter.spec_decode.num_drafts": drafts["num_spec_steps"],
        "redrafter.spec_decode.num_draft_tokens": drafts["num_draft_tokens"],
        "redrafter.spec_decode.num_accepted_tokens": drafts["num_accepted_draft_tokens"],
        "gen_ai.latency.e2e": now - choices[0].arrived_at,
        "gen_ai.latency.time_in_queue": queued,
        "gen_ai.latency.time_to_first_token": None if first is None else first - choices[0].arrived_at,
    }
    return {name: value for name, value in found.items() if value is not None}
