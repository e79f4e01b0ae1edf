"""A page of a headless Chromium, over the DevTools protocol."""

import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
QUIET = ("background-networking", "component-update", "gpu", "quic", "sync")
WORDS = (
    "--headless=new",
    "--no-sandbox",
    "--remote-debugging-port=0",
    "--no-first-run",
    *map("--disable-{}".format, QUIET),
)


class Page:
    """errors: what its scripts threw, and what the browser complained of."""

    def __init__(self, profile: Path):
        words = [str(CHROMIUM), *WORDS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = profile / "DevToolsActivePort"
        while not (port.is_file() and "\n" in port.read_text()):
            assert self._process.poll() is None, "the browser did not start"
            time.sleep(0.05)
        pages = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list", timeout=300).json()
        [own] = [each["webSocketDebuggerUrl"] for each in pages if each["type"] == "page"]
        self._closing, self._numbers = ExitStack(), count(1)
        self._socket = self._closing.enter_context(connect(own, max_size=None))
        self.errors: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(self._socket.recv(timeout=300))).get("id") != number:
            if said["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(said["params"])
        return said["result"]

    def run(self, script: str) -> Any:
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 300) -> None:
        """Until it is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"{script} never came true: {self.run('document.body.innerText')}"
            time.sleep(0.03)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait(f"location.href.startsWith('{url}') && document.readyState == 'complete'")

    def press_enter(self, modifiers: int = 0) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self) -> None:
        self._closing.close()
        self._process.terminate()
        self._process.wait(timeout=300)
