"""A headless Chromium, controlled through a pipe by the DevTools protocol."""

import base64
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-pipe", "--disable-dev-shm-usage", "about:blank"),
)


class Page:
    """A page of the browser."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._next_id, self._session, self._buffer = 0, None, b""
        self.messages = []  # Errors and output of the page's script, and what its policy blocked.
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Returns the result of a method of the protocol."""
        self._next_id += 1
        request = {"id": self._next_id, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        while (answer := self._read()).get("id") != self._next_id:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(answer["params"]))
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        while b"\0" not in self._buffer:
            part = os.read(self._from, 1 << 16)
            assert part, "The browser has ended."
            self._buffer += part
        answer, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(answer)

    def show(self, url, width=1300, height=1000, scheme="light"):
        """Opens an address in a window of this size."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)

    def value(self, script):
        """Returns the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script, seconds=60):
        """Returns the value of an expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(script)):
            assert time.monotonic() < end, (script, self.messages)
            time.sleep(0.1)
        return value

    def screenshot(self, path):
        """Writes a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        pathlib.Path(path).write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def open_page(folder):
    """Starts Chromium with an empty profile in a folder, and yields a page of it."""
    to_child, to_browser = os.pipe()
    from_browser, from_child = os.pipe()
    command = shlex.join([CHROMIUM or "", *_FLAGS, f"--user-data-dir={folder}"])
    command = f"exec {command} 3<&{to_child} 4>&{from_child}"
    with open(pathlib.Path(folder) / "chromium.log", "wb") as log:
        fds = (to_child, from_child)
        process = subprocess.Popen(["bash", "-c", command], pass_fds=fds, stderr=log)
    for descriptor in fds:
        os.close(descriptor)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
