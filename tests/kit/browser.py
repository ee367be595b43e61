"""A real Chromium without a window, spoken to over a pipe: open a page, run script in it, press keys, turn the wheel, look.

The DevTools protocol over ``--remote-debugging-pipe`` is JSON with a zero byte after each message: no port, no websocket.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.tools import require_tool

_PATIENCE = 30.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in containers; the page is our own file
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)


class PageError(Exception):
    """The browser refused, or script in the page raised."""


class Page:
    """One tab. ``errors``: whatever went to the console as an error, and exceptions that nobody caught."""

    def __init__(self, ask: int, answer: int) -> None:
        self._ask, self._answer = ask, answer
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                if "error" in heard:
                    raise PageError(f"{method}: {heard['error']['message']}")
                return heard["result"]

    def _hear(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answer], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answer, 1 << 16) if ready else b""
            if not data:
                raise PageError("the browser does not answer" if not ready else "the browser has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description", ""))) for a in facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])

    # -- what a person does --------------------------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._hear()

    def size(self, width: int, height: int, *, scale: float = 1.0, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """light or dark, as the system would say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def run(self, script: str) -> Any:
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """One key, on what has the focus."""
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        facts: dict[str, Any] = {"key": key, **({"text": text} if text else {})}
        if key in ("Enter", "Tab"):
            facts["windowsVirtualKeyCode"] = {"Enter": 13, "Tab": 9}[key]
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def middle_of(self, selector: str) -> tuple[float, float]:
        """Where an element is on the screen, after scrolling to it."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return float(box[0]), float(box[1])

    def mouse(self, kind: str, x: float, y: float, **facts: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **facts)

    def click(self, selector: str) -> None:
        x, y = self.middle_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=int(kind == "mousePressed"), clickCount=1)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
        return path


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser for as long as the block lasts; a skip that says why where there is none."""
    program = require_tool("chromium", "chromium")
    to_browser, from_browser = _high_pipe(), _high_pipe()
    command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with open(profile.parent / "chromium.log", "wb") as log:
        # the browser reads its commands from descriptor 3 and answers on descriptor 4
        places = ((log.fileno(), 1), (log.fileno(), 2), (to_browser[0], 3), (from_browser[1], 4))
        actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in places]
        pid = os.posix_spawn(program, command, os.environ, file_actions=actions)
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # the browser ends when nobody can speak to it any more
        os.close(from_browser[0])
        _end(pid)


def _end(pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.05)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are above those that they are copied to."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
