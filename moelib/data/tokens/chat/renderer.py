"""A process that renders a chat template, which may come from a stranger.

It reads lines of JSON and answers each by one. The first is {"source", "variables", "today",
"seconds", "megabytes"}; it limits the memory of the process, and the processor time of each later
line, [[variables, is_marked], ...], whose answer has the "texts". Errors have a "reason". Spans of
`{% generation %}` are between the marks of the first answer where `is_marked` is true.

This file imports nothing of moelib, so that the process starts fast.
"""

import datetime
import json
import resource
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag `{% generation %}` of transformers, which surrounds the text of an assistant."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Returns a call of `_marked` with what the tag surrounds."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        begin, end = environment.marks
        return f"{begin}{caller()}{end}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _template(request: dict[str, Any], marks: list[str]) -> jinja2.Template:
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    today = datetime.datetime.fromisoformat(request["today"])
    environment.extend(marks=marks)
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": today.strftime,
        **request["variables"],
    }
    environment.filters["tojson"] = _tojson
    return environment.from_string(request["source"])


def _answer(texts: Callable[[], dict[str, Any]], seconds: float) -> None:
    """Prints what a function gives, or the error that a template provokes."""
    # SIGVTALRM, which ends the process by default, counts its own processor time.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        answer = json.dumps(texts())
    except Exception as error:  # Of any class.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
        lines += [error.lineno] if isinstance(error, jinja2.TemplateSyntaxError) else []
        line = f"line {lines[-1]}: " if lines else ""
        text = "out of memory" if isinstance(error, MemoryError) else f"{error!s:.300}"
        answer = json.dumps({"reason": f"{line}{type(error).__name__}: {text}"})
    print(answer, flush=True)


def main() -> None:
    """Answers lines until the end of input."""
    request = json.loads(sys.stdin.readline())
    seconds, num_bytes = request["seconds"], request["megabytes"] << 20
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    marks = [f"\ue000{secrets.token_hex(8)}{sign}" for sign in "<>"]
    templates: list[Any] = []

    def compiled() -> dict[str, Any]:
        templates.extend(_template(request, each) for each in (["", ""], marks))
        return {"marks": marks}

    _answer(compiled, seconds)
    for line in sys.stdin:
        jobs = json.loads(line)
        _answer(lambda jobs=jobs: {"texts": [templates[m].render(**x) for x, m in jobs]}, seconds)


if __name__ == "__main__":
    main()
