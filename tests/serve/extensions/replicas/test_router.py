"""What clients get of a router whose replicas are made up, and streams that another replica goes on with."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from redrafter.extensions.replicas.router import DivergedError, SentStream, can_resume

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from redrafter.extensions.replicas.exchange import AnswerPart, AnswerStart, HttpCall, ReplicaLostError
from redrafter.extensions.replicas.router import MAX_RETRIES, create_router
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.network.guards import AccessPolicy

JSON = AnswerStart(200, [(b"content-type", b"application/json"), (b"x-request-id", b"of the replica")])
EVENTS = AnswerStart(200, [(b"content-type", b"text/event-stream")])
DONE = b"data: [DONE]\n\n"
Part = AnswerPart | Exception | float
LOST = ReplicaLostError("replica a has ended")


def piece(text: str, finish: str | None = None, identity: str = "a") -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"id": identity, "created": 1, "choices": [choice]}).encode() + b"\n\n"


class Replicas:
    """Answers calls with one list of parts after the other, and keeps the calls."""

    def __init__(self, *answers: list[Part]):
        self.answers, self.calls, self.closed = iter(answers), [], 0

    async def ask(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        self.calls.append(call)
        try:
            for part in next(self.answers):
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, float):  # a pause in seconds
                    await asyncio.sleep(part)
                else:
                    yield part
        finally:
            self.closed += 1

    async def metrics(self) -> bytes:
        return b"all metrics"


def router(*answers: list[Part], policy: AccessPolicy | None = None, limit: int = 1 << 20):
    replicas = Replicas(*answers)
    app = create_router(replicas.ask, replicas.metrics, (ReplicaLostError,), policy or AccessPolicy(), limit)
    return replicas, TestClient(app)


def texts(answer: str) -> str:
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_request_reaches_a_replica_and_its_answer_the_client():
    replicas, client = router([AnswerPart(JSON, b'{"a":'), AnswerPart(None, b" 1}")])
    answer = client.get("/v1/models?x=1", headers={"X-Request-Id": "mine"})
    assert answer.json() == {"a": 1}
    assert "x-request-id" not in answer.headers  # Ray's proxy adds it
    [call] = replicas.calls
    assert (call.scope["path"], call.scope["query_string"], call.key) == ("/v1/models", b"x=1", None)
    assert (b"x-request-id", b"mine") in call.scope["headers"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_request_that_writes_without_a_seed_gets_one(path):
    replicas, client = router([AnswerPart(JSON, b"{}")])
    client.post(path, json={"prompt": "Once", "seed": None})
    [call] = replicas.calls
    assert 0 <= json.loads(call.body).pop("seed") < 1 << 62
    assert (b"content-length", b"%d" % len(call.body)) in call.scope["headers"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", b'{"seed":  7}'), ("/tokenize", b'{"prompt":  "a"}'), ("/v1/completions", b"{no JSON")],
    ids=["seeded", "other route", "no JSON"],
)
def test_any_other_body_reaches_the_replica_as_it_is(path, body):
    replicas, client = router([AnswerPart(JSON, b"{}")])
    client.post(path, content=body)
    assert replicas.calls[0].body == body


@pytest.mark.parametrize("path", ["/v1/completions%0a", "/v1/sleep%0A", "/health%0d", "/metrics%0a", "/v1/%00models"])
def test_a_path_with_a_control_character_reaches_no_replica(path):
    replicas, client = router([AnswerPart(JSON, b"{}")])
    answer = client.post(path, json={"prompt": "Once"})
    assert (answer.status_code, "control character" in answer.text) == (400, True)
    assert not replicas.calls


def test_a_call_has_the_key_of_its_session_or_prompt():
    replicas, client = router([AnswerPart(JSON, b"")], [AnswerPart(JSON, b"")])
    client.post("/v1/completions", json={"prompt": "Once"})
    client.post("/v1/completions", json={"prompt": "Once"}, headers={"X-Session-Id": "s"})
    assert "Once" in replicas.calls[0].key
    assert replicas.calls[1].key == "session s"


def test_a_request_whose_replica_is_lost_is_answered_by_another_one():
    replicas, client = router([AnswerPart(JSON, b'{"half"'), LOST], [AnswerPart(JSON, b'{"whole": 1}')])
    assert client.post("/v1/completions", json={"prompt": "Once"}).json() == {"whole": 1}
    assert replicas.calls[0] == replicas.calls[1]


def test_a_message_whose_replica_is_lost_ends_as_the_protocol_has_it():
    begun = b'event: message_start\ndata: {"type": "message_start"}\n\n'
    _, client = router([AnswerPart(EVENTS, begun), LOST], *[[LOST]] * (MAX_RETRIES + 1))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stream": True}
    first, last = client.post("/v1/messages", json=body).text.strip().split("\n\n")
    assert first.encode() + b"\n\n" == begun
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    answer = client.post("/v1/messages", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (529, "1")
    assert answer.json()["type"] == "error"


def test_a_stream_whose_replica_is_lost_goes_on_from_another_one():
    _, client = router(
        [AnswerPart(EVENTS, piece("Once ")), AnswerPart(None, piece("upon")), LOST],
        [AnswerPart(EVENTS, piece("Once upon a", identity="b")), AnswerPart(None, piece(" time", "stop") + DONE)],
    )
    answer = client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert texts(answer.text) == "Once upon a time"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"b"' not in answer.text


def test_replicas_are_lost_so_often_and_no_more():
    replicas, client = router(*[[LOST]] * (MAX_RETRIES + 1))
    answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "send the request again" in answer.json()["error"]["message"]
    assert len(replicas.calls) == MAX_RETRIES + 1


@pytest.mark.parametrize(
    ("more", "then", "message"),
    [
        ({"logprobs": 1}, [], "send the request again"),
        ({}, [AnswerPart(EVENTS, piece("Twice"))], "another one writes another text"),
        ({}, [AnswerPart(AnswerStart(429, []), b"{}")], "no other one takes it on now"),
    ],
    ids=["with log-probabilities", "another text", "no room"],
)
def test_a_stream_that_cannot_go_on_ends_with_an_error(more, then, message):
    _, client = router([AnswerPart(EVENTS, piece("Once")), LOST], then)
    answer = client.post("/v1/completions", json={"prompt": "x", "stream": True, **more})
    last = json.loads(answer.text.strip().split("\n\n")[-1][6:])
    assert message in last["error"]["message"]


def test_a_key_is_checked_before_a_replica_is_asked():
    replicas, client = router(policy=AccessPolicy(ApiKeys(["secret"])))
    assert client.post("/v1/completions", json={}).status_code == 401
    assert client.get("/metrics").status_code == 401
    assert not replicas.calls


def test_a_body_that_is_too_long_is_refused():
    replicas, client = router(limit=1 << 10)
    answer = client.post("/v1/completions", json={"prompt": "x" * 2000})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert not replicas.calls


def test_metrics_are_those_of_all_replicas_and_health_is_503_while_none_answers(monkeypatch):
    monkeypatch.setattr("redrafter.extensions.replicas.router.HEALTH_SECONDS", 0.05)
    _, client = router([60.0])
    assert client.get("/metrics").text == "all metrics"
    assert client.get("/health").status_code == 503


def test_a_replica_hears_of_an_answer_that_nobody_waits_for():
    replicas, client = router([AnswerPart(EVENTS, piece("Once")), LOST], [AnswerPart(EVENTS, piece("Twice"))] * 2)
    client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert replicas.closed == 2


DONE = b"data: [DONE]\n\n"


def event(identity: str, *choices: dict, **more: object) -> bytes:
    document = {"id": identity, "created": len(identity), "choices": list(choices), **more}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def text(written: str, finish: str | None = None, index: int = 0) -> dict:
    return {"index": index, "text": written, "finish_reason": finish}


def delta(finish: str | None = None, **fields: str) -> dict:
    return {"index": 0, "delta": fields, "finish_reason": finish}


def resumed(sent: list[bytes], again: list[bytes]) -> list[dict]:
    """The events that a client gets of the second stream."""
    stream = SentStream()
    for part in sent:
        assert stream.push(part) == part
    stream.resume()
    rest = b"".join(map(stream.push, again))
    return [json.loads(line[6:]) for line in rest.decode().split("\n\n") if line and "[DONE]" not in line]


def test_a_text_goes_on_where_it_was_cut_whatever_its_pieces():
    sent = [event("first", text("Once ")), event("first", text("upon a"))]
    again = [event("another", text("Once upon")), event("another", text(" a time"), usage=None), DONE]
    [rest] = resumed(sent, again)
    assert rest["choices"] == [text(" time")]
    assert (rest["id"], rest["created"]) == ("first", 5)


def test_the_end_of_the_stream_is_kept_and_an_error_of_the_replica_passed_on():
    stream, error = SentStream(), {"error": {"message": "cut off"}}
    stream.push(event("a", text("x")))
    stream.resume()
    assert stream.push(event("b", text("x", "stop")) + DONE).endswith(DONE)
    stream.resume()
    assert json.loads(stream.push(b"data: " + json.dumps(error).encode() + b"\n\n")[6:]) == error


def test_several_choices_are_cut_each_by_itself():
    sent = [event("a", text("one")), event("a", text("tw", index=1))]
    again = [event("b", text("two!", index=1)), event("b", text("one", "stop")), event("b", text("", "length", 1))]
    expected = [[text("o!", index=1)], [text("", "stop")], [text("", "length", 1)]]
    assert [rest["choices"] for rest in resumed(sent, again)] == expected


def test_a_choice_that_has_ended_ends_once():
    assert resumed([event("a", text("one", "stop"))], [event("b", text("on")), event("b", text("e", "stop"))]) == []


def test_a_chat_opens_once_and_goes_on_with_its_thoughts_and_its_content():
    opening = delta(role="assistant", content="")
    sent = [event("a", opening), event("a", delta(reasoning_content="I thin"))]
    answer = delta("stop", content="Yes.")
    again = [event("b", opening), event("b", delta(reasoning_content="I think")), event("b", answer)]
    assert [rest["choices"] for rest in resumed(sent, again)] == [[delta(reasoning_content="k")], [answer]]
    sent = [event("a", opening), event("a", delta(content="Once"))]
    [rest] = resumed(sent, [event("b", delta(role="assistant", content="Once upon"))])
    assert rest["choices"] == [delta(content=" upon")]


@pytest.mark.parametrize("had", [False, True], ids=["lacked", "had"])
def test_the_usage_is_told_once(had):
    usage = event("a", usage={"total_tokens": 3})
    sent = [event("a", text("x", "stop"))] + [usage] * had
    assert len(resumed(sent, [event("b", text("x", "stop")), usage])) == (not had)


def test_a_stream_may_be_resumed_twice():
    stream = SentStream()
    stream.push(event("a", text("on")))
    stream.resume()
    stream.push(event("b", text("one t")))
    stream.resume()
    assert b'"text": "wo"' in stream.push(event("c", text("one two")))


@pytest.mark.parametrize("again", [text("Twice"), text("On", "stop")], ids=["other", "shorter"])
def test_another_text_is_told_from_the_same_one(again):
    with pytest.raises(DivergedError):
        resumed([event("a", text("Once"))], [event("b", again)])


@pytest.mark.parametrize(
    ("path", "document", "can"),
    [
        ("chat/completions", {}, True),
        ("chat/completions", {"logprobs": None, "stream_options": {"include_usage": True}, "tools": None}, True),
        ("responses", {}, False),
        ("messages", {}, False),
        ("completions", {"logprobs": 0}, False),
        ("chat/completions", {"logprobs": True}, False),
        ("chat/completions", {"tools": [{}]}, False),
        ("chat/completions", {"stream_options": {"include_drafts": True}}, False),
    ],
)
def test_a_stream_of_text_is_resumed_and_one_that_tells_more_is_not(path, document, can):
    assert can_resume(f"/v1/{path}", document) == can
