"""Extensions are found by registration: those of this package, and those that entry points of other packages name."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from fastapi import APIRouter
from fastapi.routing import APIRoute

import redrafter
from redrafter.errors import ArgumentError
from redrafter.extensions.responses import EXTENSION
from redrafter.serve.extension import extensions, protocol_at
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.network.guards import AccessPolicy, JsonRoute
from redrafter.serve.routes.app import create_app

POLICY = AccessPolicy(ApiKeys(["client"]), operators=ApiKeys(["sesame"], "operator"))


async def post(app: Any, path: str, key: str | None, body: Any = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, headers=headers, json={} if body is None else body)


async def test_the_routes_of_another_package_check_who_calls_and_refuse_unknown_fields(notes):
    app = create_app(SimpleNamespace(images=""), POLICY)
    assert (await post(app, "/v1/notes", "client", {"text": "sea"})).json() == ["sea"]
    assert (await post(app, "/v1/notes", None)).status_code == 401
    assert (await post(app, "/v1/notes", "sesame")).status_code == 401
    assert (await post(app, "/v1/notes/forget", "client")).status_code == 403
    refused = (await post(app, "/v1/notes", "client", {"colour": "red"})).json()["error"]
    assert (refused["param"], refused["code"]) == ("colour", "unsupported_parameter")
    assert (await post(app, "/v1/notes/forget", "sesame")).status_code == 200
    assert (await post(app, "/v1/notes", "client")).json() == [""]


async def test_the_headers_of_a_protocol_come_from_its_extension(notes):
    origin, headers = "https://chat.example", ("X-Notes-Key", "X-Notes-Version", "X-Api-Key", "Anthropic-Beta")
    app = create_app(SimpleNamespace(images=""), AccessPolicy(ApiKeys(["client"]), origins=(origin,)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for header in (*headers, "X-Unknown"):
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": header}
            answer = await client.options("/v1/notes", headers={"Origin": origin} | asked)
            assert (answer.status_code == 200) is (header in headers), header
        for key, status in (("client", 200), ("wrong", 401)):
            answer = await client.post("/v1/notes", headers={"X-Notes-Key": key}, json={})
            assert answer.status_code == status


def test_the_server_names_no_protocol_of_an_extension():
    for file in sorted((Path(redrafter.__file__).parent / "serve").rglob("*.py")):
        found = re.findall(r"anthropic|x-api-key|/v1/messages|/v1/responses", file.read_text(), re.IGNORECASE)
        assert not found, (file, found)


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("/v1/open", APIRoute, "that does not check who calls"),
        ("/v1/models", JsonRoute, "which the server has already"),
    ],
)
def test_a_route_is_refused_that_checks_no_caller_or_that_nobody_could_reach(path, kind, reason, monkeypatch):
    routes = APIRouter(route_class=kind)
    routes.add_api_route(path, lambda: None)
    monkeypatch.setattr(type(EXTENSION), "routes", lambda *_: routes.routes)
    with pytest.raises(ArgumentError, match=f"ResponsesExtension has the route '{path}',? {reason}"):
        create_app(SimpleNamespace())


def test_an_entry_point_without_an_extension_is_refused_by_its_name(tmp_path, monkeypatch, search_again):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[redrafter.extensions]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=r"entry point broken = no_such_module .* correct or uninstall its package"):
        extensions()


def test_the_protocol_of_a_path_is_that_of_its_extension():
    spoken = {path: protocol_at(path) for path in ("/v1/messages", "/v1/messages/batches/x", "/v1/messagesx", "/", "")}
    assert [type(each).__name__ for each in spoken.values()] == ["MessagesExtension"] * 2 + ["NoneType"] * 3


def test_the_help_of_the_server_imports_neither_torch_nor_fastapi(notes):
    program = "import sys; from redrafter.serve.command import main; main(['--help'])"
    program = (
        f"import atexit, sys; atexit.register(lambda: print({{'torch', 'fastapi'}} & {{*sys.modules}})); {program}"
    )
    path = os.pathsep.join((str(notes), str(Path(redrafter.__file__).parents[1])))
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
