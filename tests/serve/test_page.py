"""The page that a server shows a browser."""

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("fastapi")

from helpers.bare_server import BareServer
from helpers.serving import listening
from redrafter.scheduler.waiting_queue import QueueFullError
from redrafter.serve.engine_process.client import Stopped
from redrafter.serve.network.api_keys import ApiKeys
from redrafter.serve.network.guards import AccessPolicy
from redrafter.serve.protocol.requests import ApiError
from redrafter.serve.routes.app import create_app

if TYPE_CHECKING:
    from helpers.browser import Page


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_may_load_nothing_else(path, url):
    answer = httpx.get(f"{url}{path}", timeout=300)
    policy = answer.headers["Content-Security-Policy"]
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=|style=\"", answer.text)
    elsewhere = r"src=|href=\"(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)"
    assert not re.search(elsewhere, answer.text)
    assert path not in httpx.get(f"{url}/openapi.json", timeout=300).json()["paths"]


class Stub:
    """A service that says what it is told to, and then nothing more for `hold` seconds, or until its client leaves.

    names: Names of the models that it lists. bodies: The requests that it got. pause: Seconds before each run.
    """

    model, created, context, pause, hold = "<b>stub</b>", 0, 100, 0.0, 60.0

    def __init__(self, *runs: tuple[str, bool], error: Exception | None = None, thoughts: Sequence[str] = ()):
        self.runs, self.error, self.left, self.thoughts = runs, error, threading.Event(), thoughts
        self.names, self.bodies = [self.model], []

    @property
    def model_entries(self) -> list[dict[str, Any]]:
        entry = {"object": "model", "created": 0, "owned_by": "redrafter", "max_model_len": 100, "parent": None}
        entry["default_temperature"] = 0.6
        return [entry | {"id": name} for name in self.names]

    async def chat(self, body: Any, facts: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.bodies.append(body)
        if self.error is not None:
            raise self.error
        return self._parts()

    async def _parts(self) -> AsyncIterator[dict[str, Any]]:
        try:
            for thought in self.thoughts:
                yield {"choices": [{"index": 0, "delta": {"reasoning_content": thought}, "finish_reason": None}]}
            for text, accepted in self.runs:
                await asyncio.sleep(self.pause)
                drafts = [{"text": text, "accepted": accepted}]
                yield {"choices": [{"index": 0, "delta": {"content": text}, "drafts": drafts, "finish_reason": None}]}
            await asyncio.sleep(self.hold)
        finally:
            self.left.set()
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        rates = {"mean_acceptance_length": 1.5, "num_spec_steps": 2, "num_accepted_draft_tokens": 1}
        metrics = {"speculative_decoding": rates | {"draft_acceptance_rate": 0.5}}
        yield {"choices": [], "model": self.model, "usage": {"completion_tokens": 3}, "metrics": metrics}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator["Page"]:
    pytest.importorskip("websockets")
    from helpers.browser import CHROMIUM, Page

    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    made = Page(tmp_path_factory.mktemp("profile"))
    made.send("Emulation.setDeviceMetricsOverride", width=400, height=400, deviceScaleFactor=1, mobile=False)
    yield made
    made.close()


def opened(page: "Page", url: str, ready: bool = True, **settings: float) -> None:
    page.open(url)
    page.errors.clear()
    if ready:
        page.wait("!document.getElementById('send').disabled")
    for name, value in settings.items():
        page.run(f"document.getElementById('{name}').value = {value}")


def sent(page: "Page", text: str) -> None:
    page.run("document.getElementById('message').focus()")
    page.send("Input.insertText", text=text)
    page.press_enter()


def ended(page: "Page") -> None:
    page.wait("document.getElementById('log').ariaBusy == 'false'")


def answered(page: "Page", text: str) -> None:
    """Send a text, and wait until the answer to it has ended."""
    sent(page, text)
    page.wait(f"[...document.querySelectorAll('.asked')].at(-1)?.textContent == {json.dumps(text)}")
    ended(page)


def click(page: "Page", selector: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def stop(page: "Page") -> None:
    click(page, "#stop")
    ended(page)


def last(page: "Page", name: str) -> str:
    """The text of the log's last element of a class."""
    return str(page.run(f"[...document.querySelectorAll('#log .{name}')].at(-1)?.textContent"))


LOG = "document.getElementById('log')"
SETTINGS = {"seed": 3, "temperature": 0.5, "max_tokens": 50}


def test_a_conversation_is_what_the_server_answers(page, url):
    opened(page, url, **SETTINGS)
    page.wait("document.title == 'boxed'")
    talk: list[dict[str, str]] = []
    for text in ("How do I list the files of a folder?", "And then?"):
        sent(page, text)
        page.wait(f"document.querySelectorAll('.asked').length == {len(talk) // 2 + 1}")
        ended(page)
        talk.append({"role": "user", "content": text})
        whole = httpx.post(f"{url}/v1/chat/completions", json=SETTINGS | {"messages": talk}, timeout=300).json()
        answer, spec = whole["choices"][0]["message"]["content"], whole["metrics"]["speculative_decoding"]
        assert last(page, "asked") == text
        assert last(page, "answer") == answer
        assert last(page, "draft") in answer
        assert last(page, "numbers").startswith(f"{spec['mean_acceptance_length']:.2f} tokens per step")
        talk.append({"role": "assistant", "content": answer})
    assert page.run(f"{LOG}.scrollTop > 0 && {LOG}.scrollHeight - {LOG}.scrollTop - {LOG}.clientHeight < 2")
    assert page.run("document.documentElement.scrollWidth") == 400
    page.run("document.getElementById('new').click()")
    assert page.run("document.querySelectorAll('article').length") == 0
    assert page.errors == []
    page.run("document.getElementById('message').focus()")  # where shift and enter make a new line
    page.send("Input.insertText", text="one")
    page.press_enter(modifiers=8)
    page.send("Input.insertText", text="two")
    assert page.run("document.getElementById('message').value") == "one\ntwo"
    assert page.run("document.querySelectorAll('article').length") == 0


def test_a_model_without_a_chat_template_goes_on_with_the_text(page, url, server, monkeypatch):
    monkeypatch.setattr(server.tokenizer, "chat_template", None)
    opened(page, url, **SETTINGS)
    for text in ("The old man looked at the sea", "She said"):
        sent(page, text)
        page.wait(f"document.getElementById('log').textContent.includes('{text}')")
        ended(page)
        whole = httpx.post(f"{url}/v1/completions", json=SETTINGS | {"prompt": text}, timeout=300).json()
        assert last(page, "answer") == whole["choices"][0]["text"]
    assert page.run("document.getElementById('message').ariaLabel") == "Text to continue"
    assert page.run("document.getElementById('system').disabled")  # there is nowhere to say it


# Answers with what both pages ask for first.
LOADED = """
async def app(scope, receive, send):
    body = b'{"data": [{"id": "stub"}], "info": {"title": "stub", "version": "1"}, "paths": {}}'
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})
"""


@pytest.mark.parametrize(
    ("path", "where", "loading", "loaded"),
    [
        ("/", "empty", "is being loaded", "document.title == 'stub'"),
        ("/docs", "wrong", "still loading", "document.getElementById('title').textContent == 'stub 1'"),
    ],
    ids=["chat", "docs"],
)
def test_a_page_that_is_opened_while_the_model_loads_goes_on_by_itself(page, path, where, loading, loaded):
    program = BareServer(LOADED)
    try:
        opened(page, f"{program.url}{path}", ready=False)
        page.run("window.opened = 1")
        page.wait(f"document.getElementById('{where}').textContent.includes('{loading}')")
        if path == "/":
            sent(page, "too early")
            assert page.run("document.getElementById('message').value") == "too early"
        program.cue()
        page.wait(loaded)
        assert page.run("window.opened") == 1
        assert path != "/" or not page.run("document.getElementById('send').disabled")
    finally:
        program.close()


def test_an_answer_is_written_again_and_a_question_edited(page):
    service = Stub(("one", True))
    service.hold = 0
    with listening(create_app(service)) as url:
        opened(page, url)
        for text in ("a", "b"):
            answered(page, text)
        service.runs = (("two", False),)
        page.run("[...document.querySelectorAll('[data-do=again]')].at(-1).click()")
        page.wait("[...document.querySelectorAll('.answer')].at(-1).textContent == 'two'")
        ended(page)
        click(page, "[data-do=edit]")
        assert page.run("document.activeElement.value") == "a"
        page.press_enter(modifiers=8)
        page.send("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
        assert page.run("document.querySelectorAll('article').length") == 2
        assert page.run("document.activeElement.dataset.do") == "edit"
        page.press_enter()
        page.wait("document.activeElement.value == 'a'")
        page.send("Input.insertText", text="c")
        page.press_enter()
        page.wait("document.querySelectorAll('article').length == 1")
        ended(page)
        assert last(page, "answer") == "two"
        answered(page, "d")
    told = [[message.text for message in body.messages] for body in service.bodies]
    again = ["a", "one", "b"]
    assert told[:3] == [["a"], again, again]
    assert told[3] in (["ac"], ["ca"])
    assert told[4] == [*told[3], "two", "d"]


def test_the_chosen_model_is_asked_with_the_system_prompt(page):
    service = Stub(("fine", True))
    service.names, service.hold = [Stub.model, "poems"], 0
    with listening(create_app(service)) as url:
        opened(page, url)
        answered(page, "a")
        page.run("document.getElementById('models').value = 'poems'")
        page.run("document.getElementById('models').dispatchEvent(new Event('change'))")
        page.run("document.getElementById('system').value = 'Rhyme.'")
        answered(page, "b")
        assert page.run("document.title") == "poems"
        click(page, "#new")
        service.names.append("law")  # loaded while the server runs
        click(page, "#new")
        page.wait("document.getElementById('models').length == 3")
        assert page.run("document.getElementById('models').value") == "poems"
    assert [body.model for body in service.bodies] == [Stub.model, "poems"]
    told = [[(message.role, message.text) for message in body.messages] for body in service.bodies]
    assert told == [[("user", "a")], [("system", "Rhyme."), ("user", "a"), ("assistant", "fine"), ("user", "b")]]


MARKDOWN = """# Title
Some **bold**, *slanted*, ~~gone~~ and `code` in a
[link](https://example.org/a_(b)), https://example.org/c. 2 * 3 * 4, snake_case_name
1. one
   - nested
2. two

```python
if a < b:
    print("<b>")
```

| a | b |
|---|--:|
| 1 | **2** |

> quoted
---
[bad](javascript:alert(1)) [worse](data:text/html,x) <a href="//b.example">raw</a>
"""


# The text of an element without heads of code, either that of drafts or the rest.
SHOWN = """(selector, drafted) => {
  const walker = document.createTreeWalker(document.querySelector(selector), NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) found.push(walker.currentNode);
  const mine = ({ parentElement: own }) => !own.closest("figcaption") && Boolean(own.closest(".draft")) === drafted;
  return found.filter(mine).map((node) => node.data).join("");
}"""
SHAPE = (
    "H1 P STRONG EM S CODE A A OL LI P UL LI P LI P FIGURE FIGCAPTION BUTTON PRE CODE "
    "DIV TABLE THEAD TR TH TH TBODY TR TD TD STRONG BLOCKQUOTE P HR P"
)


def test_markdown_is_shown_and_copied_and_what_could_run_is_text(page):
    made = random.Random(0)
    service = Stub((MARKDOWN, False))
    service.hold = 0
    with listening(create_app(service)) as url:
        opened(page, url)
        answered(page, "at once")
        left, service.runs, service.pause = MARKDOWN, (), 0.01  # several frames are drawn meanwhile
        while left:
            size = made.randint(1, 12)
            service.runs, left = (*service.runs, (left[:size], made.random() < 0.5)), left[size:]
        answered(page, "in pieces")
        tags = "(each) => [...each.querySelectorAll(':not(span)')].map((own) => own.tagName).join(' ')"
        assert page.run(f"[...document.querySelectorAll('.answer')].map({tags})") == [SHAPE, SHAPE]
        assert len(set(page.run("[...document.querySelectorAll('.answer')].map((each) => each.textContent)"))) == 1
        links = page.run("[...document.querySelectorAll('.answer a')].map((own) => [own.href, own.rel])")
        assert links == 2 * [[f"https://example.org/{end}", "noopener noreferrer"] for end in ("a_(b)", "c")]
        assert page.run("document.querySelector('.answer > p:last-child').textContent") == MARKDOWN.splitlines()[-1]
        for accepted in (True, False):
            shown = page.run(f"({SHOWN})('article:last-child .answer', {json.dumps(accepted)})")
            written = iter("".join(text for text, own in service.runs if own is accepted))
            assert all(character in written for character in shown)  # in this order, but for Markdown's signs
        page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        click(page, "[data-do=copy]")
        assert page.run("window.copied") == MARKDOWN
        click(page, "[data-do=code]")
        assert page.run("window.copied") == 'if a < b:\n    print("<b>")'
        assert page.run("document.querySelector('[data-do=code]').textContent") == "Copied"
        page.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as on http elsewhere
        page.run("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
        page.send("Runtime.evaluate", expression="document.querySelector('[data-do=copy]').click()", userGesture=True)
        assert page.run("window.copied") == MARKDOWN
        assert page.errors == []
        set_html = "(() => { try { document.body.innerHTML = '<b>'; } catch { return 'refused'; } })()"
        assert page.run(set_html) == "refused"


HOSTILE = ("<script>document.title = 'hit'</script>", "<img src=x onerror=\"document.title = 'hit'\">", "</p>&amp;")


def test_html_is_text_and_stop_stops(page):
    service = Stub(*((text, place % 2 == 0) for place, text in enumerate(HOSTILE)))
    with listening(create_app(service)) as url:
        opened(page, url)
        sent(page, HOSTILE[1])
        page.wait("document.querySelector('.answer')?.textContent.endsWith('&amp;')")
        assert not service.left.is_set()
        assert last(page, "answer") == "".join(HOSTILE)
        assert last(page, "asked") == HOSTILE[1]
        assert page.run("document.title") == Stub.model
        assert page.run("document.querySelectorAll('#log :is(script, img, b)').length") == 0
        assert page.run("document.querySelectorAll('#log .draft').length") == 2
        stop(page)
        assert service.left.wait(300)
        assert last(page, "numbers") == "stopped"
        assert last(page, "answer") == "".join(HOSTILE)


def test_thoughts_stand_above_the_answer_and_are_not_sent_back(page):
    service = Stub(("Yes.", False), thoughts=["Hm", "<b>m.</b>"])
    with listening(create_app(service)) as url:
        opened(page, url)
        for _ in range(2):
            sent(page, "Hello")
            page.wait("[...document.querySelectorAll('.answer')].at(-1)?.textContent == 'Yes.'")
            assert last(page, "thoughts") == "Hm<b>m.</b>"
            assert page.run("!!document.querySelector('.thoughts + .answer')")
            stop(page)
    told = [[message.text for message in body.messages] for body in service.bodies]
    assert told == [["Hello"], ["Hello", "Yes.", "Hello"]]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ApiError(400, "<i>no</i>"), "400: <i>no</i>"),
        (QueueFullError("full"), "429: full"),
        (Stopped(), "503: the server is stopping"),
    ],
)
def test_what_is_wrong_is_said(page, error, said):
    with listening(create_app(Stub(error=error))) as url:
        opened(page, url)
        sent(page, "Hello")
        page.wait("document.querySelector('.error')")
        assert last(page, "error") == said
        assert page.run("document.getElementById('message').value") == "Hello"  # to be sent again


def test_a_full_conversation_offers_a_new_one(page):
    class Full(Stub):
        async def chat(self, body: Any, facts: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            if len(body.messages) > 1:
                raise ApiError(400, "too long", "messages", "context_length_exceeded")
            return self._parts()

    with listening(create_app(Full(("fine", False)))) as url:
        opened(page, url)
        sent(page, "one")
        page.wait("document.querySelector('.answer')?.textContent == 'fine'")
        stop(page)
        sent(page, "two")
        page.wait("document.querySelector('.error button')")
        assert page.run("document.getElementById('message').value") == "two"
        page.run("document.querySelector('.error button').click()")
        assert page.run("document.querySelectorAll('article').length") == 0
        assert page.run("document.getElementById('message').value") == "two"
        sent(page, "")
        page.wait("document.querySelector('.answer')?.textContent == 'fine'")
        page.run("document.getElementById('stop').click()")


DOCUMENTED = ("POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /metrics")


def test_the_protocol_is_shown_without_anything_from_elsewhere(page):
    with listening(create_app(Stub(), AccessPolicy(ApiKeys(["secret"])))) as url:
        opened(page, f"{url}/docs", ready=False)
        page.wait("document.getElementById('key').hidden === false")
        page.run("document.getElementById('secret').value = 'secret'")
        page.run("document.getElementById('key').requestSubmit()")
        page.wait("document.querySelectorAll('#routes > details').length > 4")
        shown = page.run("document.getElementById('routes').textContent")
        assert all(route in shown for route in DOCUMENTED)
        assert "temperature" in shown
        assert "at most 2" in shown
        page.run("document.querySelectorAll('details').forEach((each) => each.open = true)")
        page.wait("document.getElementById('routes').textContent.includes('json_schema')")
        assert not [error for error in page.errors if "401" not in str(error)]


def test_a_server_that_has_gone_is_said(page):
    with listening(create_app(Stub())) as url:
        opened(page, url)
        page.wait("document.title != 'redrafter'")
    sent(page, "Hello")
    page.wait("document.querySelector('.error')")
    assert re.fullmatch("The server cannot be reached: .+", last(page, "error"))


def test_a_key_is_asked_for_and_kept_in_the_tab(page):
    with listening(create_app(Stub(("fine", False)), AccessPolicy(ApiKeys(["secret"])))) as url:
        opened(page, url, ready=False)
        for key, hidden in ((None, False), ("wrong", False), ("secret", True)):
            if key is not None:
                page.run(f"document.getElementById('secret').value = '{key}'")
                page.run("document.getElementById('empty').textContent = ''")
                page.run("document.getElementById('key').requestSubmit()")
            page.wait("document.getElementById('empty').textContent != ''")
            assert page.run("document.getElementById('key').hidden") is hidden
            assert page.run("document.getElementById('empty').textContent").startswith("401") is not hidden
        sent(page, "Hello")
        page.wait("document.querySelector('.answer')?.textContent == 'fine'")
        page.run("document.getElementById('stop').click()")
        assert page.run("localStorage.length + document.cookie.length") == 0
