"""`redrafter bench --url` on servers that a test makes up, and on our own."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from helpers.command_line import fails, measured, ran
from helpers.stub_server import StubServer, completion, reply
from redrafter.bench import server_load

QUICK = ("--concurrency", "1,2", "--num-requests", "4", "--max-new-tokens", "3")


bench = partial(measured, "bench")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    for name in ("REDRAFTER_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    return str(tmp_path / "prompts.txt")


def echo(body):
    return completion([body["prompt"], " and", " on"])


def test_a_report_has_a_row_for_each_concurrency_and_server(tmp_path, prompts):
    with StubServer(echo) as first, StubServer(echo) as second:
        urls = ("--url", f"{first.url},{second.url}/v1", "--url", first.url)
        document, tables = bench(*urls, *QUICK, "--prompts", prompts, "--json", str(tmp_path / "load.json"))
    assert document == json.loads((tmp_path / "load.json").read_text())
    assert document["complete"]
    assert [server["url"] for server in document["servers"]] == [first.url, second.url]
    assert [(load["concurrency"], load["server"]) for load in document["loads"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for load in document["loads"]:
        assert (load["requests"], load["failed"], load["prompt_tokens"], load["completion_tokens"]) == (4, 0, 12, 12)
        assert (load["equal_texts"], load["compared_texts"]) == (4, 4)
        assert load["first_token_ms"]["p50"] > 0
    assert tables.count("4/4") == 4
    assert f"server 2: {second.url}, model stub, nobody" in tables
    assert "first p50" in tables


def test_rows_of_messages_are_asked_as_chats(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    function, result = {"name": "f", "arguments": {"x": 1}}, {"role": "tool", "content": "2"}
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    rows = [
        {"messages": [*turns, {"role": "assistant", "content": "Me."}]},
        {"prompt": "It was"},
        {"turns": ["And?", "So?"]},
        {"prompt": [turns[1], call, result], "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with StubServer(lambda body: completion(["a", "b"])) as server:
        words = ("--concurrency", "1", "--num-requests", "4", "--prompts", str(tmp_path / "rows.jsonl"))
        document, _ = bench("--url", server.url, *words)
    assert [load["failed"] for load in document["loads"]] == [0]
    chat, text, questions, agent = server.bodies[-4:]
    assert (chat["messages"], "prompt" in chat) == (turns, False)
    assert (text["prompt"], "messages" in text) == ("It was", False)
    assert questions["messages"] == [{"role": "user", "content": "And?"}]
    called = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert agent["messages"] == [turns[1], {"role": "assistant", "content": "", "tool_calls": [called]}, result]
    assert agent["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert agent["chat_template_kwargs"] == {"a": 1}
    assert all(body["ignore_eos"] for body in server.bodies)
    paths = [head.split()[1] for head in server.headers[-4:]]
    chats, texts = "/v1/chat/completions", "/v1/completions"
    assert paths == [chats, texts, chats, chats]


def test_four_requests_a_slot_are_sent_by_default(prompts):
    with StubServer(echo) as server:
        document, _ = bench("--url", server.url, "--concurrency", "1,3", "--num-prompts", "5", "--prompts", prompts)
    assert [load["requests"] for load in document["loads"]] == [5, 12]


def test_other_texts_are_counted(prompts):
    def other(body):
        return completion(["something", " else", "."] if body["prompt"] == "two" else [body["prompt"], " and", " on"])

    with StubServer(echo) as first, StubServer(other) as second:
        document, _ = bench("--url", f"{first.url},{second.url}", *QUICK, "--prompts", prompts)
    equal = [(load["equal_texts"], load["compared_texts"]) for load in document["loads"]]
    assert equal == [(4, 4), (3, 4), (4, 4), (3, 4)]


def test_the_model_and_the_key_are_sent_and_the_key_is_not_shown(monkeypatch, prompts):
    with StubServer(echo) as server:
        args = ["--url", server.url, "--api-key=secret", "--model", "other", *QUICK, "--prompts", prompts]
        monkeypatch.setattr(sys, "argv", ["redrafter", "bench", *args])
        code, out, err = ran("bench", *args)
    assert code == 0
    assert f"redrafter bench --url {server.url} KEY --model other" in out
    assert {body["model"] for body in server.bodies} == {"other"}
    assert all("bearer secret" in head for head in server.headers)
    assert "secret" not in out + err


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({"REDRAFTER_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "bearer ours"),
        ({"OPENAI_API_KEY": "theirs"}, "bearer theirs"),
    ],
)
def test_the_key_may_be_in_the_environment(monkeypatch, prompts, keys, sent):
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    with StubServer(echo) as server:
        ran("bench", "--url", server.url, *QUICK, "--prompts", prompts)
    assert all(sent in head for head in server.headers)


def test_failed_requests_are_told_with_the_first_error_and_the_exit_code(prompts):
    with StubServer(lambda body: reply(b"broken", 500) if body["prompt"] == "two" else echo(body)) as server:
        document, out = bench("--url", server.url, *QUICK, "--prompts", prompts, code=1)
    assert "1 of 4 requests failed; the first: HTTP 500: broken" in out
    sections = [f"server 1 ({server.url}), {count} at once" for count in (1, 2)]
    assert [error["section"] for error in document["errors"]] == sections
    assert [(load["failed"], load["compared_texts"]) for load in document["loads"]] == [(1, 3), (1, 3)]


def test_a_server_that_fails_does_not_end_the_others(prompts):
    with StubServer(lambda body: reply(b"broken", 500)) as broken, StubServer(echo) as fine:
        code, out, err = ran("bench", "--url", f"{broken.url},{fine.url}", *QUICK, "--prompts", prompts)
    assert code == 1
    assert "LoadError: no request was answered; the first: HTTP 500: broken" in out
    assert "Traceback" not in err
    loads = json.loads(out.splitlines()[-1])["loads"]
    assert [(load["server"], load["equal_texts"]) for load in loads] == [(2, 4), (2, 4)]


def test_what_limits_a_measurement_is_told(monkeypatch, prompts):
    monkeypatch.setattr(server_load, "BUSY_CLIENT", 0.0)
    with StubServer(lambda body: completion(["a"])) as server:
        _, out = bench("--url", server.url, *QUICK, "--prompts", prompts)
    assert "4 texts have fewer than 3 tokens" in out
    assert "the client limits this: it was busy for" in out


def test_servers_without_aiohttp_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("redrafter.cli.bench.find_spec", lambda name: None)
    assert "--url needs aiohttp: pip install '.[bench]' in a checkout" in fails(capsys, "bench", "--url", "http://a")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--batch-sizes 1,8", "--batch-sizes has no meaning with --url: leave it out, and give --concurrency"),
        ("--repeats 2", "--repeats has no meaning with --url: leave it out, and give --num-requests"),
        ("--prompt-tokens 9", "--prompt-tokens has no meaning with --url"),
        ("--against eager", "--against has no meaning with --url"),
        ("--drafter d", "--drafter has no meaning with --url"),
        ("--device cpu", "--device has no meaning with --url"),
        ("--no-compile", "--no-compile has no meaning with --url"),
        ("--plots p", "--plots has no meaning with --url"),
        ("--concurrency 0", "--concurrency must be from 1"),
        ("--num-requests 3 --concurrency 1,4", "--num-requests must be at least"),
        ("--max-new-tokens 1", "--max-new-tokens must be from 2 to"),
        ("--url localhost:8000", "--url must be like http://127.0.0.1:8000, got 'localhost:8000'"),
        ("--api-key=two words", "an API key must be"),
        ("--json /nowhere/load.json", "cannot write /nowhere/load.json"),
        ("--prompts nowhere.txt", "nowhere.txt"),
        ("--prompts {rows}", "p.jsonl:2 has nothing to send to a server"),
        ("", "--url http://127.0.0.1:9: GET /v1/models: the connection failed"),
    ],
)
def test_what_cannot_be_asked_of_a_server_is_refused_in_one_line(capsys, tmp_path, args, message):
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n{"input_ids": [1, 2], "loss_mask": [0, 1]}')
    words = [args] if "key" in args else args.format(rows=tmp_path / "p.jsonl").split()
    assert message in fails(capsys, "bench", "--url", "http://127.0.0.1:9", *words)


@pytest.mark.parametrize("args", ["--concurrency 1", "--num-requests 9", "--api-key k"])
def test_options_of_servers_need_a_server(capsys, args):
    assert f"{args.split()[0]} is for --url: give that too" in fails(capsys, "bench", *args.split())


@pytest.mark.variant
def test_ctrl_c_leaves_the_document_of_what_was_measured(tmp_path, prompts):
    def answer(body):
        return completion(["a", "b", "c"], 0.0 if len(server.bodies) <= 5 else 60.0)

    (tmp_path / "out").mkdir()
    with StubServer(answer) as server:
        words = [sys.executable, "-m", "redrafter", "bench", "--url", server.url, *QUICK, "--prompts", prompts]
        process = subprocess.Popen(
            [*words, "--json", str(tmp_path / "out" / "load.json")],
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
        )
        end = time.monotonic() + 300
        while len(server.bodies) < 7 and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["load.json"]
    document = json.loads((tmp_path / "out" / "load.json").read_text())
    assert not document["complete"]
    assert [load["concurrency"] for load in document["loads"]] == [1]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_our_own_server_writes_the_same_texts_whatever_runs_beside_them(program, temperature):
    args = ("--url", program.url, "--concurrency", "1,4", "--num-requests", "8", "--max-new-tokens", "12")
    document, _ = bench(*args, "--temperature", temperature, "--seed", "5")
    assert document["servers"][0]["kind"] == "redrafter"
    for load in document["loads"]:
        assert (load["failed"], load["short_texts"], load["completion_tokens"]) == (0, 0, 96)
        assert (load["equal_texts"], load["compared_texts"]) == (8, 8)
        assert load["tokens_per_chunk"] > 1
        assert load["steady_tokens_per_second"] > 0
        assert load["first_token_ms"]["p50"] <= load["first_token_ms"]["p99"] < load["request_ms"]["p99"]
