"""The command `chat`, in process on a tiny pair."""

import re

import pytest

from helpers.command_line import (
    byte_tokenizer,
    fails,
    merge,
    typed,
)
from redrafter.cli import main
from redrafter.cli.chat import History
from redrafter.measure.trial import Trial


@pytest.fixture
def chat(monkeypatch, capsys, folder):
    """Return a function that runs `redrafter chat` on what is said, and returns its stdout and stderr."""

    def run(said: str, *args: str) -> tuple[str, str]:
        typed(monkeypatch, said)
        assert main(["chat", "--model", str(folder / "merged"), "--max-new-tokens", "8", *args]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def answers(expected):
    """Return a function that gives the answers to the questions of a chat after a system message."""

    def run(*questions: str, head: str = "") -> str:
        text, found = head, ""
        for question in questions:
            text += f"u:{question}\na:"
            answer = expected(text, templated=True, max_new_tokens=8)
            text, found = f"{text}{answer}\n", f"{found}{answer}\n"
        return found

    return run


def test_chat_remembers_its_turns(chat, answers):
    out, err = chat("ja\n\n10\n/stats\n", "--system", "Sei")
    assert out == answers("ja", "10", head="s:Sei\n")
    assert re.match(r"2 answers, 16 tokens in .+ tokens per step; share of steps .+: \d", err)


def test_chat_commands(chat, answers):
    out, err = chat("/stats\nja\n/reset\nja\n/nope\n/exit\nja\n")
    assert out == 2 * answers("ja")
    assert err == "no answers yet\nthe talk so far is forgotten\nthere is no /nope; there are /exit, /reset, /stats\n"


def test_chat_compares_its_answers_with_undrafted_decoding_when_it_ends(chat, answers):
    for last in ("", "/exit\n"):
        out, err = chat(f"ja\n10\n{last}", "--compare", "--dtype", "float32")
        assert out == answers("ja", "10")
        waits, totals, columns, plain, drafted = err.splitlines()
        assert waits.startswith("(decoding the same answers without drafts")
        assert totals.startswith("2 answers, 16 tokens in ")
        assert columns.split() == ["tok/s", "speedup", "tokens/step", "same", "texts"]
        assert re.fullmatch(r"  undrafted +[\d.]+ +1.000 +1.000 +-", plain)
        assert re.fullmatch(r"  drafter +[\d.]+ +[\d.]+ +[\d.]+ +2 of 2", drafted)
    assert chat("", "--compare") == ("", "")


def test_a_terminal_is_shown_how_a_chat_ends_and_what_is_drafted(folder, capsys, monkeypatch, answers):
    def on_terminal(*args: str) -> tuple[str, str]:
        typed(monkeypatch, "ja\n")
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        assert main(["chat", "--model", str(folder / "merged"), "--max-new-tokens", "8", *args]) == 0
        return capsys.readouterr()

    out, err = on_terminal()
    assert out == f"> {answers('ja')}> "
    loading, hint, speed, end = err.splitlines()
    assert (loading, hint, end) == ("(loading the model)", "(type a question; Ctrl-D ends the talk)", "")
    assert re.fullmatch(r"\(8 tokens, [\d.]+ tokens/s\)", speed)
    assert "what was drafted is green" in on_terminal("--color", "always")[1]
    assert "green" not in on_terminal("--color", "always", "--no-speculate")[1]


def test_chat_forgets_the_oldest_turns_and_says_so(chat, answers):
    question, head = "ja" * 25, "s:S\n"
    out, err = chat(f"{question}\n" * 3, "--system", "S")
    first, second = answers(question, question, head=head).splitlines()
    third = answers(question, head=f"{head}u:{question}\na:{second}\n")
    assert out == f"{first}\n{second}\n{third}"
    assert err == "(the context is full: the oldest turn is forgotten)\n"


def test_history_keeps_room_for_the_answer_and_the_system_message():
    class Words:
        def encode(self, messages):
            return [word for message in messages for word in message["content"].split()]

    history = History(Words(), "be brief", context=10, answer_tokens=3)
    history.turns = [("a b", "c"), ("d", "e")]
    assert history.prompt("f") == (["be", "brief", "d", "e", "f"], 1)
    assert history.turns == [("d", "e")]
    assert History(Words(), None, context=None, answer_tokens=3).prompt("x " * 99)[1] == 0


def test_an_interrupt_stops_the_answer_and_not_the_talk(chat, answers, monkeypatch):
    honest, tokenizer = Trial.run_batch, byte_tokenizer()

    def interrupted(self, *args, streamer):
        monkeypatch.setattr(Trial, "run_batch", honest)
        streamer.put_step(0, tokenizer("ach").input_ids, 0, ended=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "run_batch", interrupted)
    out, err = chat("ja\n10\n/stats\n")
    assert err.startswith("(stopped)\n1 answer, ")
    assert out == "ach\n" + answers("10", head="u:ja\na:ach\n")


def test_chat_mistakes(folder, capsys, monkeypatch, tmp_path):
    line = fails(capsys, "chat", "--model", str(folder / "merged"), "--compare", "--no-speculate")
    assert "leave out --no-speculate" in line
    typed(monkeypatch, "ja " * 99 + "\nja\n")
    assert "a prompt may have 159" in fails(capsys, "chat", "--model", str(folder / "merged"))
    mute = merge(folder / "base", folder / "drafter", tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    assert "chat template" in fails(capsys, "chat", "--model", str(mute))
    (mute / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    typed(monkeypatch, "ja\n")
    assert "no such role" in fails(capsys, "chat", "--model", str(mute))


@pytest.mark.parametrize(
    ("args", "drafts"),
    [
        (("--draft-model", "{small}", "--draft-len", "2"), r"share of steps .+ drafts:( \d\.\d\d){2}"),
        (("--prompt-lookup",), r".+ steps left out drafts, as the text repeats too little.+"),
    ],
)
def test_chat_with_other_drafts(folder, chat, answers, args, drafts):
    out, err = chat("ja\n10\n/stats\n", *(arg.format(small=folder / "small") for arg in args))
    assert out == answers("ja", "10")
    assert re.fullmatch(rf"2 answers, 16 tokens in .+; {drafts}\n", err)
