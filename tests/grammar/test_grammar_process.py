"""The processes of grammars: their limits, their replacement when killed, and their end with their owners."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from helpers.chats import tiny_tokenizer
from helpers.models import tiny_drafter, tiny_model, with_tree
from helpers.processes import children, soon
from redrafter import ArgumentError
from redrafter.grammar.grammar import Grammar, GuidedText, TextTree, compute_masks, server_for
from redrafter.grammar.source import GrammarSource

pytest.importorskip("llguidance")

from llguidance.hf import from_tokenizer

from redrafter.grammar.child import CompiledGrammar, GrammarState

TOKENIZER = tiny_tokenizer()
EOS = 2
SLOW = {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 45)]}  # 174 s, 6 GB
LARGE = {"regex": ".?" * 23_000}  # asks for 0.9 GB at once
HALF = "\ud800"


def own_children() -> list[int]:
    return children(server_for(TOKENIZER).pid)


def only_child() -> int:
    [found] = own_children()
    return found


@pytest.fixture(autouse=True)
def alone():
    gc.collect()
    assert soon(lambda: not own_children())
    yield
    gc.collect()
    assert soon(lambda: not own_children()), "a process has outlived its grammar"


def where(text: list[int], *drafts: int) -> TextTree:
    """Return a text with a chain of drafts after it."""
    return TextTree(text, [text[-1] if text else 0, *drafts], list(range(-1, len(drafts))), 1 + len(drafts))


def test_masks_are_those_of_a_state_in_this_process():
    chance, vocabulary = random.Random(0), from_tokenizer(TOKENIZER)
    specs = [{"regex": "(ab|ba|c){0,9}"}, {"json_object": True}, {"choice": ["abc", "abd", "b"]}]
    grammars = [Grammar(spec, TOKENIZER) for spec in specs]
    ours = [GuidedText(grammar, [EOS, 280]) for grammar in grammars for _ in range(2)]
    compiled = [CompiledGrammar(GrammarSource.from_spec(spec), vocabulary) for spec in specs]
    states = [GrammarState(each, [EOS, 280]) for each in compiled for _ in range(2)]
    texts: list[list[int]] = [[] for _ in ours]
    for _ in range(40):
        trees = [where(text, *(chance.randrange(6, 97) for _ in range(3))) for text in texts]
        found = compute_masks(list(zip(ours, trees, strict=True)))
        for text, tree, state, one, masks in zip(texts, trees, states, ours, found, strict=True):
            state.advance(tree.text)
            expected = state.masks(tree.tokens, tree.parents, tree.levels)
            assert {node: bytes(mask) for node, mask in masks.items()} == expected
            assert (one.ended, one.error) == (state.ended, state.error)
            bits = int.from_bytes(expected.get(0, b"\1"), "little")
            text.append(chance.choice([token for token in range(290) if bits >> token & 1]))
            if chance.random() < 0.1:
                text.clear()  # another text in its place
    assert sum(map(len, texts)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{"json_schema": SLOW}, LARGE], ids=["time", "memory"])
def test_what_needs_much_time_or_memory_is_ended_and_this_process_goes_on(spec):
    bound = "10 s of a processor, 60 s in all, and 1024 MB of memory"
    with pytest.raises(ArgumentError, match=rf"^grammar: too complex: .*{bound}$"):
        Grammar(spec, TOKENIZER)


def test_the_kernel_knows_the_limit_of_memory():
    grammar = Grammar({"regex": "a"}, TOKENIZER)
    lines = Path(f"/proc/{only_child()}/limits").read_text().splitlines()
    soft, hard = next(line.split()[3:5] for line in lines if line.startswith("Max address space"))
    assert grammar.process.alive
    assert 1 << 30 < int(soft) == int(hard) < 3 << 29


def test_a_killed_process_ends_its_own_texts_only():
    mine, other = Grammar({"regex": "[ab]*"}, TOKENIZER), Grammar({"regex": "[ab]*"}, TOKENIZER)
    assert len(own_children()) == 2
    texts = [GuidedText(grammar, [EOS]) for grammar in (mine, mine, other)]
    asked = [(text, where([70, 71], 70)) for text in texts]
    before = [dict(each) for each in compute_masks(asked)]
    assert before[0] == before[1] == before[2]
    assert len(before[0]) == 2
    os.kill(max(own_children()), signal.SIGKILL)
    assert soon(lambda: len(own_children()) == 1)
    dead = other if mine.process.alive else mine
    after = compute_masks(asked)
    for text, masks, old in zip(texts, after, before, strict=True):
        if text.process is dead.process:
            assert text.error.startswith("grammar: given up after 2 tokens: its process has ended")
            assert {node: int.from_bytes(mask, "little") for node, mask in masks.items()} == {0: 1 << EOS, 1: 1 << EOS}
        else:
            assert text.error is None
            assert masks == old
    dead.restore()
    again = GuidedText(dead, [EOS])
    assert compute_masks([(again, where([70, 71], 70))]) == before[:1]
    assert again.error is None


def test_generate_raises_where_a_process_is_killed_and_goes_on_with_a_new_one():
    engine = with_tree(tiny_model("llama", vocab_size=290), tiny_drafter(vocab_size=290), 2, 2)
    grammar, ids = Grammar({"regex": "[a-m]{30}"}, TOKENIZER), torch.tensor([[71, 80, 9]])
    how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "grammar": grammar, "eos_token_id": EOS}
    expected = engine.generate(ids, **how)

    def kill(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 10:
            for child in own_children():
                os.kill(child, signal.SIGKILL)
        return scores

    with pytest.raises(ArgumentError, match=r"^row 0: grammar: given up after \d+ tokens: its process has ended"):
        engine.generate(ids, **how, logits_processor=[kill])
    assert torch.equal(engine.generate(ids, **how), expected)


def test_a_killed_fork_server_is_replaced_and_its_grammars_live_on():
    grammar, server = Grammar({"regex": "[ab]*"}, TOKENIZER), server_for(TOKENIZER)
    text = GuidedText(grammar, [EOS])
    expected = [dict(each) for each in compute_masks([(text, where([70]))])]
    os.kill(server.pid, signal.SIGKILL)
    assert compute_masks([(text, where([70]))]) == expected
    Grammar({"regex": "[ab]*"}, TOKENIZER)
    assert server_for(TOKENIZER).pid != server.pid
    assert compute_masks([(text, where([70]))]) == expected


def test_an_answer_that_nobody_took_is_no_other_questions(monkeypatch):
    grammar = Grammar({"regex": "[ab]*"}, TOKENIZER)
    first = GuidedText(grammar, [EOS])
    expected = [dict(each) for each in compute_masks([(first, where([70]))])]

    def interrupted(process: object, seconds: float) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as change, pytest.raises(KeyboardInterrupt):
        change.setattr("redrafter.grammar.grammar.GrammarProcess.receive", interrupted)
        compute_masks([(first, where([70, 71]))])
    assert not grammar.process.alive
    grammar.restore()
    assert compute_masks([(GuidedText(grammar, [EOS]), where([70]))]) == expected


def test_a_stopped_process_is_given_up(monkeypatch):
    monkeypatch.setattr("redrafter.grammar.grammar.ANSWER_SLACK_SECONDS", -4.0)
    text = GuidedText(Grammar({"regex": "[ab]*"}, TOKENIZER), [EOS])
    child = only_child()
    os.kill(child, signal.SIGSTOP)
    compute_masks([(text, where([70]))])
    assert "its process has ended" in text.error
    os.kill(child, signal.SIGCONT)


def test_a_text_that_is_dropped_is_forgotten():
    grammar = Grammar({"regex": "[ab]*"}, TOKENIZER)
    text = GuidedText(grammar, [EOS])
    compute_masks([(text, where([70]))])
    number = text.number
    del text
    assert list(grammar.process.forgotten) == [number]
    compute_masks([(GuidedText(grammar, [EOS]), where([70]))])
    assert number not in grammar.process.forgotten


def test_threads_share_grammars():
    grammars = [Grammar({"regex": "[ab]*"}, TOKENIZER), Grammar({"regex": "[bc]*"}, TOKENIZER)]
    expected = [dict(compute_masks([(GuidedText(grammar, [EOS]), where([71]))])[0]) for grammar in grammars]
    wrong = []

    def work(order: int) -> None:
        texts = [GuidedText(grammar, [EOS]) for grammar in grammars[::order]]
        for count in range(50):
            found = compute_masks([(text, where([71] * (1 + count))) for text in texts])
            if found != expected[::order]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(order,), daemon=True) for order in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_nothing_is_left_of_a_program_that_ends(how):
    program = (
        "import os, sys, threading, time\n"
        "from helpers.chats import tiny_tokenizer\n"
        "from redrafter.grammar.grammar import Grammar, server_for\n"
        "tokenizer = tiny_tokenizer()\n"
        "grammar = Grammar({'regex': 'a'}, tokenizer)\n"
        f"threading.Thread(target=Grammar, args=({{'json_schema': {SLOW!r}}}, tokenizer), daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print(server_for(tokenizer).pid, flush=True)\n"
        f"{how}\n"
    )
    tests = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, timeout=300)
    assert soon(lambda: int(done.stdout) not in map(group_of, psutil.pids()))
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("each", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_the_program_do_not_end_its_grammars(each):
    text = GuidedText(Grammar({"regex": "[ab]*"}, TOKENIZER), [EOS])
    server = server_for(TOKENIZER)
    os.kill(only_child(), each)
    os.kill(server.pid, each)
    assert os.getpgid(server.pid) == server.pid != os.getpgid(0)  # where Ctrl-C in a terminal does not come to
    compute_masks([(text, where([70]))])
    assert text.error is None
    assert server.alive


def nested(depth: int) -> object:
    schema: object = True
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"json_schema": {"enum": ["x" * 9] * 200_000}}, "characters, 131072 are the most"),
        ({"json_schema": {"enum": [10**5000]}}, "digits"),
        ({"json_schema": nested(100_000)}, "recursion"),
        ({"choice": ["x" * 9] * 200_000}, "characters"),
        ({"regex": "x" * 50_000_000}, "50000000 characters"),
        ([["x" * 100] * 100] * 100_000, "one of json_schema"),
        ({"json_schema": {"enum": [HALF]}}, "a lone surrogate"),
        ({"choice": ["a", HALF]}, "a lone surrogate"),
        *(({kind: HALF}, "a lone surrogate") for kind in ("json_schema", "regex", "lark", "ebnf")),
    ],
)
def test_what_is_large_or_half_a_character_is_refused_before_it_is_compiled(spec, wrong):
    begin = time.process_time()
    with pytest.raises(ArgumentError, match=f"^grammar: .*{wrong}") as caught:
        GrammarSource.from_spec(spec)
    assert time.process_time() - begin < 0.3
    assert len(str(caught.value)) < 400


def test_a_schema_may_be_as_large_and_as_deep_as_is_said():
    room = 131_072 - len('{"description": ""}')
    assert GrammarSource.json_schema({"description": "x" * room}).text
    with pytest.raises(ArgumentError):
        GrammarSource.json_schema({"description": "x" * (room + 1)})
    Grammar({"json_schema": nested(100)}, TOKENIZER)
    with pytest.raises(ArgumentError, match=r"^grammar: .*recursion"):
        Grammar({"json_schema": nested(200)}, TOKENIZER)
