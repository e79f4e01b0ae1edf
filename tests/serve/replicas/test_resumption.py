"""Streams that another replica goes on with."""

import json

import pytest

from redrafter.serve.replicas.router import DivergedError, SentStream, can_resume

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


def test_the_end_of_the_stream_is_kept():
    stream = SentStream()
    stream.push(event("a", text("x")))
    stream.resume()
    assert stream.push(event("b", text("x", "stop")) + DONE).endswith(DONE)


def test_several_choices_are_cut_each_by_itself():
    sent = [event("a", text("one")), event("a", text("tw", index=1))]
    again = [event("b", text("two!", index=1)), event("b", text("one", "stop")), event("b", text("", "length", 1))]
    assert [rest["choices"] for rest in resumed(sent, again)] == [
        [text("o!", index=1)],
        [text("", "stop")],
        [text("", "length", 1)],
    ]


def test_a_choice_that_has_ended_ends_once():
    assert resumed([event("a", text("one", "stop"))], [event("b", text("on")), event("b", text("e", "stop"))]) == []


def test_a_chat_opens_once_and_goes_on_with_its_thoughts_and_its_content():
    opening = delta(role="assistant", content="")
    sent = [event("a", opening), event("a", delta(reasoning_content="I thin"))]
    again = [
        event("b", opening),
        event("b", delta(reasoning_content="I think")),
        event("b", delta("stop", content="Yes.")),
    ]
    assert [rest["choices"] for rest in resumed(sent, again)] == [
        [delta(reasoning_content="k")],
        [delta("stop", content="Yes.")],
    ]


def test_an_opening_that_comes_with_text_is_not_told_again():
    sent = [event("a", delta(role="assistant", content="")), event("a", delta(content="Once"))]
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


def test_an_error_of_the_replica_is_passed_on():
    error = {"error": {"message": "cut off"}}
    stream = SentStream()
    stream.push(event("a", text("x")))
    stream.resume()
    assert json.loads(stream.push(b"data: " + json.dumps(error).encode() + b"\n\n")[6:]) == error


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/responses", {}),
        ("/v1/completions", {"logprobs": 0}),
        ("/v1/chat/completions", {"logprobs": True}),
        ("/v1/chat/completions", {"tools": [{}]}),
        ("/v1/chat/completions", {"stream_options": {"include_drafts": True}}),
    ],
)
def test_a_stream_that_tells_more_than_text_is_not_resumed(path, document):
    assert not can_resume(path, document)


@pytest.mark.parametrize("document", [{}, {"logprobs": None, "stream_options": {"include_usage": True}, "tools": None}])
def test_a_stream_of_text_is_resumed(document):
    assert can_resume("/v1/chat/completions", document)
