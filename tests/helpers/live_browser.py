"""A page in a headless browser that a test operates: clicks, drags and keys, then its DOM."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import browser
from tests.helpers.deadline import DEADLINE


class Page:
    """One page of a browser, over the pipe of its DevTools protocol.

    Args:
        commands: file descriptor that the browser reads
        answers: file descriptor that it writes
    """

    def __init__(self, commands: int, answers: int):
        self._commands = commands
        self._answers = answers
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []  # exceptions of the page's scripts

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises: RuntimeError with the browser's reason."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], DEADLINE)[0]:
                raise TimeoutError(f"browser: no answer within {DEADLINE:g} s")
            part = os.read(self._answers, 2**20)
            if not part:
                raise RuntimeError("browser: it ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address: str, dark: bool = False, size: tuple[int, int] = (1280, 1600)) -> None:
        """Load a page and wait for its scripts; ``size`` is of the window [px]."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Runtime.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + DEADLINE
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(f"browser: never true: {script}")
            time.sleep(0.05)

    def texts(self, selector: str) -> list[str]:
        """Texts of the elements that a selector finds."""
        found = f"document.querySelectorAll({json.dumps(selector)})"
        return self.run(f"Array.from({found}, (e) => e.textContent.trim())")

    def place(self, selector: str, number: int = 0) -> tuple[float, float, float, float]:
        """left, top, width and height [px] of an element, which is scrolled into view."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.run(f"(({{x, y, width, height}}) => [x, y, width, height])"
                       f"({element}.getBoundingClientRect())")  # fmt: skip
        return tuple(box)

    def click(self, selector: str, number: int = 0, times: int = 1) -> None:
        """Click the middle of an element, ``times`` in a row."""
        left, top, width, height = self.place(selector, number)
        at = {"x": left + width / 2, "y": top + height / 2, "button": "left"}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at | {"button": "none"})
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, clickCount=count, **at)

    def drag(
        self, selector: str, start: float, end: float, above: float = 0, button: str = "left"
    ) -> None:
        """Press at the share ``start`` of an element's width, and release at ``end``.

        Args:
            selector: of the element
            start: share of its width
            end: share of its width
            above: where to press, from the element's top up [px]; 0: press its middle
            button: of the mouse
        """
        left, top, width, height = self.place(selector)
        middle = top + height / 2
        pressed = top - above if above else middle
        for kind, share, y, held in (
            ("mouseMoved", start, pressed, "none"),
            ("mousePressed", start, pressed, button),
            ("mouseMoved", (start + end) / 2, middle, button),
            ("mouseMoved", end, middle, button),
            ("mouseReleased", end, middle, button),
        ):
            at = {"x": left + share * width, "y": y, "button": held}
            self.call("Input.dispatchMouseEvent", type=kind, clickCount=1, **at)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input field by key strokes."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))


@contextmanager
def opened(
    address: str, dark: bool = False, size: tuple[int, int] = (1280, 1600)
) -> Generator[Page]:
    """The page at ``address``, loaded; its browser ends with the context."""
    found = browser.find()
    if found is None:
        names = ", ".join(browser.BROWSERS)
        raise FileNotFoundError(f"browser: none of {names} found. Run make .venv/.browser")
    reads, commands = os.pipe()
    answers, writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            found, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--no-first-run",
            f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "browser", *command]
        process = subprocess.Popen(
            shell, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        try:
            page = Page(commands, answers)
            page.open(address, dark, size)
            yield page
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
