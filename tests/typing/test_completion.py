"""Names that an editor with the language server of pyright offers in a config."""

import json
import pathlib
import subprocess
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]
_SERVER = pathlib.Path(sys.executable).parent / "basedpyright-langserver"
_TEXT = """from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer

SpmdTrainer.default_config().learner.
CausalLM.default_config().decoder.
"""


class _Server:
    """A language server, asked over pipes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._number = 0

    def notify(self, method: str, **params: Any) -> None:
        """Sends a message that has no answer."""
        self._send({"method": method, "params": params})

    def ask(self, method: str, **params: Any) -> Any:
        """Returns the answer to a request; questions of the server get an empty answer."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while (message := self._receive()).get("id") != self._number or "method" in message:
            if "method" in message and "id" in message:
                items = message["params"].get("items", ())
                self._send({"id": message["id"], "result": [None] * len(items)})
        return message["result"]

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return json.loads(self._process.stdout.read(length))


def test_fields_of_inner_configs_are_offered(tmp_path):
    settings = {"extraPaths": [str(_ROOT)], "pythonPath": sys.executable}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(_ROOT)]}))
    (tmp_path / "mine.py").write_text(_TEXT)
    uri = (tmp_path / "mine.py").as_uri()
    command = [_SERVER, "--stdio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        server = _Server(process)
        folder = {"uri": tmp_path.as_uri(), "name": "mine"}
        server.ask("initialize", processId=None, capabilities={}, workspaceFolders=[folder])
        server.notify("initialized")
        server.notify("workspace/didChangeConfiguration", settings={"python": settings})
        document = {"uri": uri, "languageId": "python", "version": 1, "text": _TEXT}
        server.notify("textDocument/didOpen", textDocument=document)
        names = []
        for line in (3, 4):
            found = server.ask(
                "textDocument/completion",
                textDocument={"uri": uri},
                position={"line": line, "character": len(_TEXT.splitlines()[line])},
            )
            names.append({item["label"] for item in found["items"]})
        process.kill()
    assert {"optimizer", "ema", "set", "clone"} <= names[0]
    assert {"dtype", "param_init", "set", "clone"} <= names[1]
