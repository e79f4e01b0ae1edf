"""Servers that one command starts, loads in turn and ends, whatever happens to them."""

import inspect
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fastapi")

import servers
from helpers.processes import command_of, soon
from redrafter.serve.engine_process import warm_up

# A server of OpenAI's protocol that starts a process, and notes both; what goes wrong is in its flags.
FAKE = """
import argparse, http.server, json, os, subprocess, sys, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--text", default="a")
parser.add_argument("--die-at", type=int, default=-1)  # number of a request
parser.add_argument("--hang-at", type=int, default=-1)
parser.add_argument("--log", default="")
parser.add_argument("--later", default="")  # printed while it is healthy
args = parser.parse_args()
asked = 0
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("began", time.time(), "pids", os.getpid(), helper.pid, flush=True)
print(args.log, flush=True)
if args.die_at == 0:
    sys.exit("no such model")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "7"}, "/health": {}}
        self.answer(json.dumps(found[self.path]))

    def do_POST(self):
        global asked
        asked += 1
        if asked == args.die_at:
            print("out of memory", flush=True)
            os._exit(3)
        if asked == args.hang_at:
            time.sleep(600)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        os.write(1, f"asked {body['temperature']} {body.get('seed')}\\n".encode())  # threads would mix their prints
        events = [{"choices": [{"text": args.text}]}, {"choices": [], "usage": {"completion_tokens": 1}}]
        self.answer("".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n")

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def say_later():
    time.sleep(1)
    print(args.later, "at", time.time(), flush=True)


threading.Thread(target=say_later, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    """Return a function that returns the command of a server with some flags."""
    (tmp_path / "fake.py").write_text(FAKE)
    return lambda *flags: shlex.join([sys.executable, str(tmp_path / "fake.py"), *flags])


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Return a function that runs the script on servers by name; whatever it returns, none is left."""

    def run(words: str = "--loads 2:3", **commands: str) -> int:
        flags = [word for name, command in commands.items() for word in ("--server", f"{name}={command}")]
        arguments = [*flags, "--output", str(tmp_path / "out"), "--max-new-tokens", "12", *words.split()]
        monkeypatch.setattr(sys, "argv", ["servers.py", *arguments])
        try:
            return servers.main()
        finally:
            assert not left_of(tmp_path)

    return run


def left_of(folder: Path) -> list[str]:
    """Return the processes that fake servers noted in logs and that have not ended."""
    pids = re.findall(r"pids (\d+) (\d+)", "".join(log.read_text() for log in folder.glob("out/*.log")))
    return [pid for both in pids for pid in both if not soon(lambda pid=pid: not command_of(int(pid)), 10)]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "loads.jsonl").read_text().splitlines()]


def test_each_load_goes_to_each_server_with_prompts_of_its_own(compare, fake, tmp_path, capsys):
    assert compare("--loads 1:2,3:4 --temperatures 0,0.5", one=fake(), other=fake("--text", "b")) == 0
    out, err = capsys.readouterr()
    header, *rows = [line.split() for line in out.splitlines()]
    assert header[:5] == ["T", "streams", "server", "tok/s", "steady"]
    places = [(t, size, name) for t in ("0", "0.5") for size in ("1", "3") for name in ("one", "other")]
    assert [tuple(row[:3]) for row in rows] == places
    lines = lines_of(tmp_path)
    assert [(f"{line['T']:g}", str(line["streams"]), line["server"]) for line in lines] == places
    assert [line["same texts"] for line in lines] == ["2/2", "0/2", "4/4", "0/4"] * 2
    asked = re.findall(r"asked (\S+) (\d+)", (tmp_path / "out" / "one.log").read_text())
    for temperature, first in (("0.0", 0), ("0.5", 6)):  # after warm-ups by the last prompts
        seeds = [1, first, first + 1, 1, 2, 3, *range(first + 2, first + 6)]
        assert sorted(int(seed) for t, seed in asked if t == temperature) == sorted(seeds)
    conditions = lines[0]["conditions"]
    assert all(line["conditions"] == conditions for line in lines)
    assert conditions["servers"]["other"]["version"] == {"version": "7"}
    assert re.fullmatch(r".*fake\.py --text b --port \d+", conditions["servers"]["other"]["command"])
    assert len(conditions["commit"] or "x" * 40) >= 40
    assert conditions["versions"]["torch"]
    assert "there are 16 prompts" not in err
    assert "one is ready after" in err


def test_rates_send_requests_at_random_times(compare, fake, tmp_path):
    assert compare("--rates 40:6", one=fake()) == 0
    assert [(line["req/s sent"], line["steady"]) for line in lines_of(tmp_path)] == [(40, None)]


def test_prompts_that_loads_repeat_are_noted(compare, fake, capsys):
    assert compare("--loads 8:16", one=fake()) == 0
    assert "there are 16 prompts, fewer than 24: loads repeat some" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words", "messages"),
    [
        (["--die-at", "0"], "", ["server bad has ended with code 1", "no such model"]),
        (["--die-at", "1"], "", ["server bad has ended with code 3", "out of memory"]),
        (["--die-at", "4"], "", ["server bad has ended with code 3", "out of memory"]),
        (["--log", servers.CAPTURING], "--start-seconds 1.5", ["server bad is not ready after 1.5 s", "began"]),
        (["--hang-at", "4"], "--load-seconds 2", ["server bad has not answered 3 requests in 2 s", "began"]),
    ],
)
def test_a_server_that_fails_is_left_out_with_the_end_of_its_log(
    compare, fake, tmp_path, capsys, flags, words, messages
):
    assert compare(f"--loads 2:3,1:1 {words}", one=fake(), bad=fake(*flags), other=fake()) == 2
    err = capsys.readouterr().err
    assert all(message in err for message in messages)
    assert [line["server"] for line in lines_of(tmp_path)] == ["one", "other"] * 2


def test_running_servers_are_taken_by_address_and_left_running(compare, fake, tmp_path, capfd):
    assert compare("--loads 1:2 --temperatures 1 --unseeded other", one=fake(), other=fake()) == 0
    seeds = [
        re.findall(r"asked 1.0 (\S+)", (tmp_path / "out" / f"{name}.log").read_text())[1:] for name in ("one", "other")
    ]
    assert seeds == [["0", "1"], ["None", "None"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen(shlex.split(fake("--port", str(port))), stdout=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        assert compare("--loads 1:2", one=fake(), running=f"{address}/v1") == 0
        first, second = lines_of(tmp_path)
        assert (second["server"], second["failed"]) == ("running", 0)
        assert first["conditions"]["servers"]["running"] == {"command": f"{address}/v1", "version": {"version": "7"}}
        assert running.poll() is None
    finally:
        running.terminate()
        running.wait()
    capfd.readouterr()
    assert compare("--loads 1:2 --start-seconds 1", gone=address, one=fake()) == 2
    assert "server gone is not ready after 1 s\n" in capfd.readouterr().err
    assert [line["server"] for line in lines_of(tmp_path)] == ["one"]


def test_the_next_server_starts_when_the_one_before_has_captured_its_steps(compare, fake, tmp_path):
    later = f"40 {servers.CAPTURED}2 s after the first one"
    assert compare(first=fake("--log", servers.CAPTURING, "--later", later), second=fake()) == 0
    captured, began = (
        float(re.search(text, (tmp_path / "out" / f"{name}.log").read_text())[1])
        for text, name in ((r"first one at ([\d.]+)", "first"), (r"began ([\d.]+)", "second"))
    )
    assert began > captured
    logged = re.sub(r'"\s+"', "", inspect.getsource(warm_up))
    assert servers.CAPTURING in logged
    assert servers.CAPTURED in logged


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_servers_end_with_the_script(fake, tmp_path, number):
    words = [servers.__file__, "--server", f"one={fake('--hang-at', '1')}", "--loads", "1:1"]
    script = subprocess.Popen([sys.executable, *words, "--output", str(tmp_path / "out")], stderr=subprocess.PIPE)
    assert soon(lambda: (tmp_path / "out" / "loads.jsonl").exists())
    time.sleep(0.5)  # until the request hangs
    script.send_signal(number)
    assert script.wait(300) == 130, script.stderr.read()
    assert not left_of(tmp_path)


@pytest.mark.parametrize(
    ("words", "commands", "message"),
    [
        ("--loads 1:1", {"a": "no-such-program serve"}, "server a: there is no program no-such-program"),
        ("--loads 1:1", {"a": " "}, "write NAME=COMMAND"),
        ("--loads 1:1", {"a/b": "true"}, "write NAME=COMMAND"),
        ("--loads 1:1 --server a=true", {"a": "true"}, "two servers have the same name"),
        ("--loads 1:1 --unseeded b", {"a": "true"}, "--unseeded names no server: b"),
        ("--loads 1:0", {"a": "true"}, "at least one stream and one request, got 1 and 0"),
        ("--loads 1", {"a": "true"}, "invalid loads value: '1'"),
        ("", {"a": "true"}, "one of the arguments --loads --rates is required"),
        ("--loads 1:1 --prompts no-such-file.jsonl", {"a": "true"}, "no-such-file.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(compare, capsys, words, commands, message):
    try:
        code = compare(words, **commands)
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.variant  # starts two servers
def test_our_servers_write_equal_texts(compare, tmp_path):
    ours = f"{sys.executable} -m redrafter serve"
    assert compare("--loads 2:2 --temperatures 0,1", drafter=ours, undrafted=f"{ours} --no-speculate") == 0
    lines = lines_of(tmp_path)
    assert len(lines) == 4
    assert all((line["failed"], line["tokens"], line["same texts"]) == (0, 24, "2/2") for line in lines)
    assert [line["tokens/step"] is not None for line in lines] == [True, False] * 2
    for server in lines[0]["conditions"]["servers"].values():
        assert server["version"]["version"] == lines[0]["conditions"]["versions"]["redrafter"]
        port = server["command"].rpartition(" ")[2]
        assert not any(f"\0{port}\0".encode() in command_of(pid) for pid in psutil.pids())
