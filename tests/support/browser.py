"""Headless Chromium, driven over its debugging pipe: what a person's browser makes of a page."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
LEAST_CONTRAST = 4.5
"""Least contrast of text and background by WCAG 2.2, level AA."""
CONTRASTS = """
(() => {
  const channel = value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = rgb => rgb.slice(0, 3).map(v => channel(v / 255)).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parse = text => text.match(/[0-9.]+/g).map(Number);
  const poor = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()) || node.tagName === "SCRIPT") continue;
    let ground = node;
    while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] === 0)) ground = ground.parentElement;
    const pair = [parse(getComputedStyle(node).color), parse(getComputedStyle(ground || document.body).backgroundColor)];
    const [light, dark] = pair.map(luminance).sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < LEAST) poor.push(`${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return poor;
})()
""".replace("LEAST", str(LEAST_CONTRAST))


class Tab:
    """Tab of a browser; messages are JSON that ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method and return its result; complaints that come meanwhile are kept."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, *, width: int, theme: str) -> None:
        """Open a page at a width in a theme, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def poor_contrasts(self) -> Any:
        """Return the texts of the page that are hard to read before their background."""
        return self.value(CONTRASTS)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text="\r" if key == "Enter" else "",
            )

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._from_browser, 65536)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        if event.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"}:
            self.complaints.append(json.dumps(event["params"]))
        return event


@contextlib.contextmanager
def new_tab(profile: Path) -> Iterator[Tab]:
    """Start the browser with a profile of its own, and end it afterwards."""
    assert CHROMIUM is not None
    read_by_browser, to_browser = _pipe()
    from_browser, written_by_browser = _pipe()

    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}")
    # Chromium reads descriptor 3 and writes descriptor 4; the shell moves the pipes there.
    command = f'exec "$@" 3<&{read_by_browser} 4>&{written_by_browser}'
    browser = subprocess.Popen(
        ["/bin/bash", "-c", command, "browser", CHROMIUM, *flags],
        pass_fds=(read_by_browser, written_by_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_browser)
    os.close(written_by_browser)
    try:
        yield Tab(to_browser, from_browser)
    finally:
        browser.terminate()
        browser.wait(20)
        os.close(to_browser)
        os.close(from_browser)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors are none of those that the browser expects."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
