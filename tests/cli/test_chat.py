"""`moelib chat`, `serve` and `inspect`: conversations on the terminal and by HTTP, and a page."""

import io
import json
import signal
import socket
import subprocess
import sys
from typing import Any

import openai
import pytest

import moelib
from moelib.cli import chat, inspect, serve
from moelib.core.errors import UserError
from moelib.inference.conversation import Conversation
from moelib.runtime.command_line import parse_flags
from tests.operations import browser
from tests.train import small_run

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Returns the folder of a model with a chat template."""
    folder = tmp_path_factory.mktemp("hub")
    small_run.make_hub(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


GREEDY = ("--dtype=float32", "--temperature=0", "--max_new_tokens=5")


def talk(monkeypatch, hub, lines, *flags):
    """Runs the command with lines as standard input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    args = [f"--hf_dir={hub}", *GREEDY, *flags]
    chat.run(*parse_flags(chat.Flags, args))


def answers(hub, *contents):
    """Returns what follows each of the messages of a conversation, without template or command."""
    model, text, found = moelib.load_model(hub, dtype="float32"), "", []
    for content in contents:
        text += content + "\n"
        prompt = model.tokenizer.encode_rendered(text)
        stop = ["\n"]
        settings = {"temperature": 0.0, "max_new_tokens": 5, "stop": stop}
        found.append(next(moelib.generate(model, [prompt], **settings)).text)
        text += found[-1] + "\n"
    return found


def test_answers_are_those_of_the_templates_text(monkeypatch, hub, capsys):
    talk(monkeypatch, hub, ["document", "", "number"])
    assert capsys.readouterr().out == "".join(f"{x}\n" for x in answers(hub, "document", "number"))


def test_a_stop_string_ends_an_answer(monkeypatch, hub, capsys):
    (whole,) = answers(hub, "document")
    talk(monkeypatch, hub, ["document"], f"--stop={whole[-1]}")
    assert capsys.readouterr().out == whole.partition(whole[-1])[0] + "\n"
    with pytest.raises(UserError, match=r"'11'.*\['11'\]"):
        Conversation(None, None, stop="11")


def test_commands(monkeypatch, hub, tmp_path, capsys):
    file = tmp_path / "talk.json"
    lines = [
        "document",
        "/clear",
        "/again",
        "number",
        "/again",
        f"/save {file}",
        "/nothing",
        "/quit now",
        "/save",
        "/quit",
    ]
    talk(monkeypatch, hub, [*lines, "/quit", "never read"], "--system=s")
    out = capsys.readouterr()
    (first,), (second,) = answers(hub, "s\ndocument"), answers(hub, "s\nnumber")
    assert out.out == f"{first}\n{second}\n{second}\n{file}: 3 messages.\n"
    assert out.err.splitlines() == [
        "error: There is no message to answer; write one first.",
        "error: '/nothing': write /again, /clear, /save FILE or /quit.",
        "error: '/quit now': write /again, /clear, /save FILE or /quit.",
        "error: /save needs a file: write /save FILE.",
    ]
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "number"},
        {"role": "assistant", "content": second},
    ]


def test_a_bad_line_or_file_does_not_end_a_conversation(monkeypatch, hub, tmp_path, capsys):
    kept = tmp_path / "talk.json"
    lines = ["document", *2 * [f"/save {kept}"], "/save /none/x.json", "caf\udce9", "number"]
    content = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode(errors="surrogateescape")))
    monkeypatch.setattr(sys, "stdin", content)
    chat.run(*parse_flags(chat.Flags, [f"--hf_dir={hub}", *GREEDY]))
    out = capsys.readouterr()
    first, second = answers(hub, "document", "number")
    assert out.out == f"{first}\n{kept}: 2 messages.\n{second}\n"
    exists, missing, no_text = out.err.splitlines()
    assert f"'{kept}' exists" in exists
    assert missing == "error: /none/x.json: No such file or directory"
    assert "no text of Unicode near 'caf\\udce9'" in no_text
    (line,) = kept.read_text().splitlines()  # Which JSON Lines need.
    assert json.loads(line)["messages"][1] == {"role": "assistant", "content": first}


def test_a_conversation_that_is_too_long_is_refused_and_the_next_goes_on(monkeypatch, hub, capsys):
    talk(monkeypatch, hub, ["document " * 60, "/clear", "document"])
    out = capsys.readouterr()
    assert "max_length=40" in out.err
    assert out.out == f"{answers(hub, 'document')[0]}\n"


def test_an_address_is_checked_before_the_model(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [f"--hf_dir={tmp_path}", f"--port={taken.getsockname()[1]}"]
        with pytest.raises(UserError, match="cannot be used for the model"):
            serve.run(*parse_flags(serve.Flags, flags))
    with pytest.raises(UserError, match=r"host='0.0.0.0'.*--api_key_file"):
        serve.run(*parse_flags(serve.Flags, [f"--hf_dir={tmp_path}", "--host=0.0.0.0"]))


def test_a_model_without_a_template_is_refused(monkeypatch, tmp_path):
    small_run.make_hub(tmp_path)
    with pytest.raises(UserError, match="no chat template; set --chat_template"):
        talk(monkeypatch, tmp_path, ["a"])


def test_the_server_answers_until_sigterm(hub, tmp_path):
    command = [sys.executable, "-m", "moelib", "serve", f"--hf_dir={hub}", "--dtype=float32"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--port=0", "--name=tiny"], **pipes) as process:
        try:
            line = process.stdout.readline()
            url = line.partition(": ")[0]
            assert line == f"{url}: tiny, chat and completions. Ctrl-C ends.\n"
            with openai.OpenAI(base_url=url + "/v1", api_key="none") as opened:
                client: Any = opened
                messages = [{"role": "user", "content": "document"}]
                settings = {"model": "tiny", "temperature": 0, "max_tokens": 5}
                answer = client.chat.completions.create(messages=messages, **settings)
            expected = answers(hub, "document")[0]
            assert answer.choices[0].message.content == expected
            if browser.CHROMIUM is not None:
                type_into_page(url, tmp_path, expected)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def type_into_page(url, folder, expected):
    """Sends a message on the page of the server, and reads the answer there."""
    with browser.open_page(folder) as page:
        page.show(url, width=390, height=700)
        page.wait_for("document.title === 'tiny'")
        page.value("at('temperature').value = 0; at('tokens').value = 5")
        page.value("at('text').value = 'document'; at('form').requestSubmit()")
        page.wait_for("running === null && messages.length === 2")
        assert page.value("document.querySelector('.assistant').textContent") == expected
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        page.value("at('text').value = 'x '.repeat(300); at('form').requestSubmit()")
        page.wait_for("document.querySelectorAll('.error').length")
        assert "max_length=40" in page.value("document.querySelector('.error').textContent")
        errors = [each for each in page.messages if '"level": "error"' in each]
        assert [each for each in errors if "status of 400" not in each] == []


def test_inspect_writes_a_page_that_shows_tokens(hub, tmp_path, capsys):
    page_file = tmp_path / "page.html"
    args = [f"--hf_dir={hub}", "--text=document number", f"--output={page_file}"]
    inspect.run(*parse_flags(inspect.Flags, args))
    assert "mean loss" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists"):
        inspect.run(*parse_flags(inspect.Flags, args))
    if browser.CHROMIUM is not None:
        with browser.open_page(tmp_path) as page:
            page.show(page_file.as_uri())
            page.wait_for("document.querySelectorAll('#text span').length > 1")
            assert page.value("at('text').textContent").endswith("document number")
            page.value("at('text').children[1].click()")
            assert page.value("at('layers').rows.length > 1")
            assert page.messages == []
