"""Who may call each route of the application, however its path is spelled."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI

from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.network.guards import AccessPolicy
from redrafter.serve.routes.app import create_app

# Routes by who may call them. A route is added here when it is added to the application.
AUDIENCES = {
    "anybody": {"/", "/health", "/v1/health/live", "/v1/health/ready", "/version"},
    "clients": {
        "/docs",  # which answers 401 with a page that asks for the key
        "/openapi.json",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/v1/health/model",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{rest:path}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    },
    "operators": {"/v1/sleep", "/v1/wake", "/v1/update_weights", "/v1/drafter"},
}
BODIES = {"/v1/update_weights": b'{"path": "/"}', "/v1/drafter": b'{"path": "/"}'}
KEYS, OPERATORS = ApiKeys(["client"]), ApiKeys(["sesame"], "operator")
POLICIES = {
    "no keys": AccessPolicy(),
    "client keys": AccessPolicy(KEYS),
    "operator keys": AccessPolicy(operators=OPERATORS),
    "both": AccessPolicy(KEYS, operators=OPERATORS),
}
CALLERS = {"nobody": None, "stranger": "wrong", "client": "client", "operator": "sesame"}


class Service:
    """Records the changes of its engine that were asked for. Other requests fail once they were admitted."""

    model, created, context, model_entries = "stub", 0, 100, ()
    metrics = SimpleNamespace(text=lambda: "numbers 1\n")

    def __init__(self) -> None:
        self.changes: list[str] = []
        load = SimpleNamespace(running=0, asleep=False, drafter=0)
        self.engine = SimpleNamespace(alive=True, healthy=True, load=load, change_engine=self._change)

    async def _change(self, kind: str, path: str | None) -> tuple[str, ...]:
        self.changes.append(kind)
        return ()

    def check_model(self, name: str) -> None:
        pass

    def model_entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "x", "max_model_len": 1, "parent": None}


async def status_of(app: Any, method: str, target: str, key: str | None, body: bytes) -> int:
    """The status of an answer to a request with this target, which is handed on as uvicorn does, without a client."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    path = target.partition("?")[0]
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": unquote(path)}
    scope |= {"raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])

    await app(scope, receive, send)
    return statuses[0]


def application(service: Service, policy: AccessPolicy) -> FastAPI:
    app = create_app(service, policy)
    app.openapi_schema = {"paths": {}}  # which takes a second to make
    return app


def audiences(app: FastAPI) -> Iterator[tuple[str, str, str]]:
    """The method, path and audience of each route; "undeclared" for those that `AUDIENCES` does not name."""
    for route in app.routes:
        path: str = getattr(route, "path", repr(route))
        named = (name for name, paths in AUDIENCES.items() if path in paths)
        audience = next(named, "undeclared")
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            yield method, path, audience


def may_call(audience: str, policy: AccessPolicy, key: str | None) -> bool:
    if audience == "operators":
        return bool(policy.operators) and key == "sesame"
    return audience == "anybody" or not policy.keys or key == "client"


async def check_access_of_all(app: FastAPI, policy: AccessPolicy) -> None:
    refusals = (401, 403, 404) if not policy.operators else (401, 403)
    for method, path, audience in audiences(app):
        assert audience != "undeclared", f"say in AUDIENCES who may call {path}"
        target = path.partition("{")[0] + "x" * ("{" in path)
        for caller, key in CALLERS.items():
            status = await status_of(app, method, target, key, BODIES.get(path, b"{}"))
            if may_call(audience, policy, key):
                assert status not in (401, 403), (method, path, caller, status)
            else:
                assert status in (refusals if audience == "operators" else (401,)), (method, path, caller, status)


@pytest.mark.parametrize("policy", POLICIES)
async def test_each_route_answers_those_whom_it_is_for_and_no_others(policy):
    await check_access_of_all(application(Service(), POLICIES[policy]), POLICIES[policy])


async def test_a_route_that_nobody_has_declared_is_found():
    app = create_app(Service())
    app.add_api_route("/v1/reset", lambda: None, methods=["POST"])
    with pytest.raises(AssertionError, match="say in AUDIENCES who may call /v1/reset"):
        await check_access_of_all(app, AccessPolicy())


async def test_an_operators_route_that_is_mounted_anywhere_checks_its_caller():
    service = Service()
    inner, outer = create_app(service), FastAPI()
    outer.mount("/inner", inner)
    for target in ("/inner/v1/sleep", "/inner/v1/sleep%0a", "/inner%0a/v1/sleep"):
        assert await status_of(outer, "POST", target, None, b"{}") >= 400
    assert not service.changes


def spellings(path: str) -> list[str]:
    head, last = path.rsplit("/", 1)
    last = last or "x"
    encoded = f"%{ord(last[0]):02x}{last[1:]}"
    suffixes = ["%0a", "%0A", "%0d", "%0d%0a", "%0a%0a", "%00", "%09", "%0b", "%7f", "%c2%85", "%e2%80%a8", "/", "//"]
    suffixes += ["/%0a", ";x", "%3bx", "%20", ".", "/.", "%2f", "%250a", "%ff", "?x=%0a", "%3f", "%23"]
    others = [f"/{path}", f"{head}//{last}", f"{head}/./{last}", f"/x/..{path}", f"{head}/{last}/../{last}"]
    others += [f"{head}%2f{last}", f"{head}%0a/{last}", f"{head}/%0a{last}", path.upper(), f"{head}/{last.title()}"]
    others += [f"{head}/{encoded}", f"{path.replace('/', '%5c')}", f"http://localhost{path}", f"{head}/{encoded}%0a"]
    return [path + suffix for suffix in suffixes] + others


def same_paths(name: str) -> set[str]:
    """The spellings that a client may use for the same path, by RFC 3986."""
    return {f"/%{ord(name[0]):02x}{name[1:]}", f"%2f{name}", f"/{name}?x=%0a"}


@pytest.mark.parametrize("policy", POLICIES)
async def test_no_spelling_of_a_path_opens_what_the_path_does_not(policy):
    service = Service()
    app, allowed, changed = application(service, POLICIES[policy]), POLICIES[policy], set()
    for method, path, audience in audiences(app):
        if "{" in path or audience == "anybody":
            continue
        for target in spellings(path):
            for caller in ("nobody", "client", "operator"):
                key = CALLERS[caller]
                status = await status_of(app, method, target, key, BODIES.get(path, b"{}"))
                said = (method, target, caller, status)
                control = any(not (" " <= char <= "~") for char in unquote(target.partition("?")[0], "latin-1"))
                if control and "%ff" not in target:
                    assert status == 400, said
                elif audience == "operators" and not may_call(audience, allowed, key):
                    assert status in (307, 401, 403, 404), said
                elif audience == "clients" and not may_call("clients", allowed, key) and key != "sesame":
                    assert status == 401, said
                if service.changes:
                    assert (audience, caller, bool(allowed.operators)) == ("operators", "operator", True), said
                    changed.add(target)
                    service.changes.clear()
    same = {f"/v1{path}" for name in ("sleep", "wake", "update_weights", "drafter") for path in same_paths(name)}
    assert changed == (same if allowed.operators else set())
