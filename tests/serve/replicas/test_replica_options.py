"""Options of replicas."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from redrafter.cli import main
from redrafter.errors import ArgumentError, MissingDependencyError
from redrafter.serve.config import ReplicaOptions, ServeOptions, check_replicated
from redrafter.serve.replicas.application import app

EXAMPLES = Path(__file__).parents[3] / "examples" / "ray"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray": False, "num_replicas": 2}, "--num-replicas is for replicas: add --ray"),
        ({"num_replicas": 0}, "--num-replicas must be from 1"),
        ({"num_gpus": -1.0}, "--num-gpus must be from 0"),
        ({"min_replicas": 1}, "--min-replicas needs --max-replicas"),
        ({"num_replicas": 2, "max_replicas": 4}, "not both"),
        ({"min_replicas": 5, "max_replicas": 4}, "--max-replicas 4 is below --min-replicas 5"),
        ({"target_ongoing_requests": 0.0}, "--target-ongoing-requests must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ArgumentError, match=message):
        ReplicaOptions(**{"ray": True} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"allow_runtime_lora_updating": True}, "--lora-modules"), ({"max_connections": 9}, "--max-connections")],
)
def test_what_replicas_cannot_keep_to_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        check_replicated(ServeOptions(**options))


def test_replicas_do_not_get_the_keys_themselves():
    assert check_replicated(ServeOptions(api_key=("secret",), api_key_file="keys")) == ServeOptions()


def test_the_options_are_flags_of_serve(capsys):
    assert main(["serve", "--ray", "--min-replicas", "1", "--max-replicas", "8", "--print-config"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["ray"], printed["min_replicas"], printed["max_replicas"]) == (True, 1, 8)


def test_without_ray_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--ray", "--port", "0"]) == 2
    assert "pip install '.[serve,ray]' in a checkout" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"num_replica": 2}, ArgumentError, "num_replicas"),
        ({"port": 8000}, ArgumentError, "http_options"),
        ({"num_replicas": "two"}, ArgumentError, "num_replicas must be a whole number"),
        ({"num_replicas": "2", "kv_cache_reuse": "False", "model": "m"}, MissingDependencyError, "pip install"),
    ],
    ids=["unknown", "of the proxy", "no number", "words"],
)
def test_the_application_reads_the_options_of_serve(args, error, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(error, match=message):
        app(args)


@pytest.mark.parametrize("file", ["serve.yaml", "rayservice.yaml"])
def test_the_examples_give_options_that_there_are(file, monkeypatch):
    document = yaml.safe_load((EXAMPLES / file).read_text())
    config = document if "applications" in document else yaml.safe_load(document["spec"]["serveConfigV2"])
    [application] = config["applications"]
    monkeypatch.setitem(sys.modules, "ray", None)
    assert application["import_path"] == f"{app.__module__}:{app.__name__}"
    with pytest.raises(MissingDependencyError):  # which is asked for once all options are read
        app({name: value for name, value in application["args"].items() if name != "api_key_file"})
