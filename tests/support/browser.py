"""Chromium over the WebDriver protocol, as much of it as the tests of the report need."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--force-device-scale-factor=1", "--hide-scrollbars",
)  # fmt: skip
# The traces of hostile text in a page: ["undefined", 0, 2] if it did nothing.
OWNED = "return [typeof window.owned, document.images.length, document.scripts.length]"


class Browser:
    """A session. `console` is what pages have said since it was last asked: errors, violations."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def send(self, command: str, **values: Any) -> Any:
        """Post a command of the protocol; its value."""
        answer = self._client.post(f"/session/{self._session}/{command}", json=values)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, address: str | Path) -> None:
        """Load a page."""
        self.send("url", url=address.as_uri() if isinstance(address, Path) else address)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that the body of a JavaScript function returns in the page."""
        return self.send("execute/sync", script=script, args=list(arguments))

    def devtools(self, command: str, **values: Any) -> Any:
        """A command of the DevTools protocol, for what WebDriver has no word for."""
        return self.send("goog/cdp/execute", cmd=command, params=values)

    def look(self, *, width: int = 1280, dark: bool = False) -> None:
        """Have a screen of this width and colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, *keys: str) -> None:
        """Press keys, by their names in the DOM (`ArrowLeft`), or one character each."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        codes |= {"Escape": 27, "+": 187, "-": 189}
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                values = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
                if key == "Enter" and kind == "keyDown":
                    values["text"] = "\r"  # without it no button is pressed
                self.devtools("Input.dispatchKeyEvent", type=kind, **values)

    def write(self, text: str) -> None:
        """Write into the focused element, as by a keyboard."""
        self.devtools("Input.insertText", text=text)

    def picture(self) -> bytes:
        """A PNG of the whole page."""
        taken = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def printed(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.send("print", background=True))

    def console(self) -> list[str]:
        """What the console has had since it was last asked for."""
        return [entry["message"] for entry in self.send("se/log", type="browser")]


def started_driver(program: str) -> tuple[subprocess.Popen[str], int]:
    """The running chromedriver and its port.

    chromedriver takes a free IPv4 port and ends if another process holds the same IPv6 port.
    """
    printed = ""
    for _ in range(5):
        driver = subprocess.Popen(
            [program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in driver.stdout:
            if "started successfully on port" in line:
                return driver, int(line.rstrip(".\n").rpartition(" ")[2])
            printed += line
        driver.wait()
    raise RuntimeError(f"chromedriver does not start: {printed}")


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in `folder`; skips the test where there is none."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("no chromium and chromedriver (apt-get install chromium chromium-driver)")
    driver, port = started_driver(programs[1])
    try:
        options = {"binary": programs[0], "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            asked = {"capabilities": {"alwaysMatch": wanted}}
            answer = client.post("/session", json=asked).json()["value"]
            assert "sessionId" in answer, answer
            browser = Browser(client, answer["sessionId"])
            try:
                yield browser
            finally:
                client.delete(f"/session/{answer['sessionId']}")
    finally:
        driver.terminate()
        driver.communicate()
