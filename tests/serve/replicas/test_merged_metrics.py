"""The metrics of several replicas as one text."""

import pytest

prometheus = pytest.importorskip("prometheus_client")

from redrafter.serve.replicas.application import merge_metrics


def metrics(count: int) -> bytes:
    registry = prometheus.CollectorRegistry()
    prometheus.Counter("vllm:tokens", "Tokens", ["model_name"], registry=registry).labels("m").inc(count)
    prometheus.Histogram("seconds", "Seconds", registry=registry, buckets=(1, 2)).observe(1.5)
    return prometheus.generate_latest(registry)


def test_every_series_says_of_which_replica_it_is():
    lines = merge_metrics([("a", metrics(3)), ("b", metrics(4))]).decode().splitlines()
    assert 'vllm:tokens_total{model_name="m",replica="a"} 3.0' in lines
    assert 'vllm:tokens_total{model_name="m",replica="b"} 4.0' in lines
    assert 'seconds_bucket{le="2.0",replica="b"} 1.0' in lines
    assert lines.count("# TYPE vllm:tokens_total counter") == 1


def test_no_replicas_have_no_metrics():
    assert merge_metrics([]) == b""
