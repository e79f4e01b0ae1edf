"""Export metrics for Prometheus, under vLLM's names where the meaning is the same."""

import time
from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from redrafter.scheduler.sequence import Finish, SequenceDelta
from redrafter.serve.capture import Capture
from redrafter.serve.engine_process.client import EngineClient, ServedSequence

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TEXT_SECONDS = 0.2  # writing the text takes the event loop 2 ms, so at most a hundredth of its time
REASONS: dict[Finish, str] = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Metrics:
    """Counters and histograms of an engine's output, and gauges of its load."""

    def __init__(self, engine: EngineClient, model: str, capture: Capture | None = None):
        """Register the metrics of an engine. `model` is the value of the label `model_name`."""
        self._capture = capture
        self._text, self._text_at = b"", -TEXT_SECONDS
        self.registry, self._engine, self._model = CollectorRegistry(), engine, model
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens, including cached ones")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._reused = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._written = self._counter("vllm:generation_tokens", "Generated tokens")
        # Counters exist from the start. Prometheus computes rates from differences, and a counter that first appears
        # with the value 5 shows no increase.
        ended = self._counter("vllm:request_success", "Finished sequences, by finish reason", "finished_reason")
        self._ended = {finish: ended.labels(model, reason) for finish, reason in REASONS.items()}
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Decode steps of sequences with drafts")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Verified drafts")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts")
        self._copies = self._counter(
            "redrafter:spec_decode_num_copied_draft_tokens", "Verified drafts that were copied from the sequence"
        )
        self._copied = self._counter(
            "redrafter:spec_decode_num_accepted_copied_tokens", "Accepted drafts that only the copies contained"
        )
        accepted = self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by depth", "position")
        self._accepted_by_position = [accepted.labels(model, f"{d}") for d in range(engine.facts.bounds.draft_depth)]
        by_drafter = {
            "num_drafts": "Decode steps with a drafter's drafts, by the number of drafter changes before",
            "num_draft_tokens": "Verified drafts of the drafter, by the number of drafter changes before",
            "num_accepted_tokens": "Accepted drafts of the drafter, by the number of drafter changes before",
        }
        self._by_drafter = [self._counter(f"redrafter:drafter_{x}", help, "drafter") for x, help in by_drafter.items()]
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_BUCKETS)
        self._queued = self._histogram(
            "request_queue_time_seconds", "From arrival at the engine to admission", _LATENCY_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of each sequence, after its first token", _PER_TOKEN_BUCKETS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end", _LATENCY_BUCKETS)
        self._of_drafter = cache(lambda drafter: [counter.labels(model, str(drafter)) for counter in self._by_drafter])
        self.registry.register(self)

    def observe(self, sequence: ServedSequence, delta: SequenceDelta) -> None:
        """Count a delta of a sequence."""
        now = time.perf_counter()
        self._written.inc(len(delta.tokens))
        # With max_tokens=0 only the prompt is read, and no token follows.
        if sequence.first_token_at is None and (delta.tokens or delta.finish == "length"):
            sequence.first_token_at = now
            self._prompt.inc(len(sequence.prompt))
            self._queried.inc(len(sequence.prompt) * self._engine.facts.reuse)
            self._reused.inc(sequence.reused)
            self._first.observe(now - sequence.arrived_at)
            if sequence.queued is not None:
                self._queued.observe(sequence.queued)
        if delta.drafted is not None:
            self._drafts.inc()
            self._draft_tokens.inc(delta.drafted)
            self._accepted.inc(delta.accepted)
            self._copies.inc(delta.copies)
            self._copied.inc(delta.copied)
            # Drafts copied from the sequence do not count for the drafter.
            if (own := delta.drafted - delta.copies) > 0:
                counts = 1, own, max(delta.accepted - delta.copied, 0)
                for counter, count in zip(self._of_drafter(self._engine.load.drafter), counts, strict=True):
                    counter.inc(count)
            # Accepted drafts form a path, so all positions up to its length count.
            for position in range(delta.accepted):
                self._accepted_by_position[position].inc()
        if delta.finish is not None:
            self._ended[delta.finish].inc()
            self._latency.observe(now - sequence.arrived_at)
            if sequence.first_token_at is not None and sequence.written > 1:
                self._per_token.observe((now - sequence.first_token_at) / (sequence.written - 1))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, as they were at most `TEXT_SECONDS` ago."""
        if (now := time.monotonic()) - self._text_at > TEXT_SECONDS:
            self._text, self._text_at = generate_latest(self.registry), now
        return self._text

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the last reported load; the registry calls this."""
        load = self._engine.load
        gauge, counter, capture = GaugeMetricFamily, CounterMetricFamily, self._capture
        preempted = "Preempted sequences, for blocks, for fairness between clients, or for a higher priority"
        for kind, name, help, value in (
            (gauge, "redrafter:asleep", "1 while the engine is asleep", load.asleep),
            (counter, "redrafter:drafter_changes", "Changes of the drafter", load.drafter),
            (gauge, "vllm:num_requests_running", "Running sequences", load.running),
            (gauge, "vllm:num_requests_waiting", "Waiting sequences", load.waiting),
            (gauge, "vllm:kv_cache_usage_perc", "Share of the KV cache's blocks in use", load.cache_usage),
            (counter, "vllm:num_preemptions", preempted, load.preempted),
            (counter, "redrafter:captured_texts", "Sequences captured for training", capture.rows if capture else 0),
            (
                counter,
                "redrafter:lost_captures",
                "Sequences that could not be captured",
                capture.lost if capture else 0,
            ),
            (gauge, "redrafter:kv_host_blocks", "KV cache blocks in host memory", load.host_blocks),
            (counter, "redrafter:kv_host_hits", "Prompt tokens found only in host memory", load.host_hits),
        ):
            family = kind(name, help, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        """Return the counter of the model; one with further labels is the parent of those of their values."""
        counter = Counter(name, help, ["model_name", *labels], registry=self.registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]):  # type: ignore[no-untyped-def]
        return Histogram(f"vllm:{name}", help, ["model_name"], registry=self.registry, buckets=buckets).labels(
            self._model
        )
