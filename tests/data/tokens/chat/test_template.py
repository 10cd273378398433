"""Chat templates: texts equal to those of transformers, and limits of what a template may do."""

import datetime
import json
import os
import pathlib
import subprocess
import time

import pytest

from moelib.core.errors import UserError
from moelib.data.tokens.chat import template as template_lib
from moelib.data.tokens.chat.template import BUILT_IN, ChatTemplate, TemplateError, find_template
from moelib.data.tokens.tokenizer import ByteTokenizer, Tokenizer
from tests.data.tokens.chat.templates import CONVERSATIONS, TEMPLATES, TOKENS, TOOLS, cases

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
]
WHOLE = "{% for m in messages %}{{ m.content }}{% endfor %}"
RENDERINGS = pathlib.Path(__file__).with_name("renderings.json")


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name):
    expected = dict(zip(cases(), json.loads(RENDERINGS.read_text("utf-8")), strict=True))
    template = ChatTemplate(TEMPLATES[name], **TOKENS)
    for case, text in expected.items():
        if case[0] == name:
            tools = TOOLS if case[1] == "a call" else None
            how = {"add_generation_prompt": case[2], "tools": tools}
            if text is None:
                with pytest.raises(TemplateError, match="alternate"):
                    template.render(CONVERSATIONS[case[1]], **how)
            else:
                assert template.render(CONVERSATIONS[case[1]], **how) == text


@pytest.mark.hf
def test_transformers_renders_what_the_file_says():
    python = os.environ.get("MOELIB_HF_PYTHON") or pytest.skip("MOELIB_HF_PYTHON is not set")
    command = [python, "-m", "tests.data.tokens.chat.make_renderings"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout == RENDERINGS.read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            (
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
                "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (
            "llama3",
            (
                "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        ("plain", "System:\nS\n\nUser:\nU\n\nAssistant:\nA<|endoftext|>\n\nAssistant:\n"),
    ],
)
def test_templates_of_moelib(tmp_path, name, text):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer.default_config().instantiate().to_json())
    tokenizer = Tokenizer.default_config().set(path=str(tmp_path)).instantiate()
    template = find_template(None, name, tokenizer)
    assert template.render(TALK, add_generation_prompt=True) == text
    marked = template.render_marked(TALK)
    assert marked.text == template.render(TALK)
    (span,) = marked.spans
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "plain": "<|endoftext|>"}[name]
    assert marked.text[slice(*span)] == "A" + end


def test_a_folder_has_a_template_in_a_file_or_in_its_settings(tmp_path):
    tokenizer = ByteTokenizer.default_config().instantiate()
    assert find_template(str(tmp_path), None, tokenizer) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": WHOLE + " of settings"}))
    assert find_template(str(tmp_path), None, tokenizer).render(TALK) == "SUA of settings"
    named = [
        {"name": "tools", "template": "x"},
        {"name": "default", "template": WHOLE + " of a list"},
    ]
    settings.write_text(json.dumps({"chat_template": named}))
    assert find_template(str(tmp_path), None, tokenizer).render(TALK) == "SUA of a list"
    (tmp_path / "chat_template.jinja").write_text(WHOLE + "{{ eos_token }}")
    assert find_template(str(tmp_path), None, tokenizer).render(TALK) == "SUA<|endoftext|>"
    with pytest.raises(UserError, match=r"chat_template='nothing'.*chatml"):
        find_template(None, "nothing", tokenizer)
    assert set(BUILT_IN) == {"chatml", "llama3", "plain"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ absent.field }}", r": line 1: .*absent.*; correct it"),
        (
            "{% for m in messages %}{{ m.role }}: hello{% endfor %}",
            r"\['user', 'assistant'\]; corr",
        ),
        ("{{ messages[0].content }}", r"does not write the content of \['assistant'\]"),
        ("{% import 'os' as os %}" + WHOLE, "no loader"),
    ],
)
def test_a_template_that_writes_no_answer_is_blamed(tmp_path, source, message):
    (tmp_path / "own.jinja").write_text(source)
    with pytest.raises(UserError, match="own.jinja.*" + message):
        find_template(
            None, str(tmp_path / "own.jinja"), ByteTokenizer.default_config().instantiate()
        )


def test_the_day_is_that_of_the_template():
    day = datetime.date(2024, 7, 26)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", today=day)
    assert template.render(TALK) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", r"line 2: TemplateSyntaxError: .*; correct it.*--chat_template"),
        ("a\nb\n{{ nothing.at_all }}", "line 3: UndefinedError"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ nothing.at_all }}", "nothing"),
        ("{{ 'a' * 10**12 }}", "MemoryError|MB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_is_wrong_or_does_too_much_is_refused(source, message):
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(TALK)


def test_a_template_that_loops_ends_and_works_for_other_messages(monkeypatch):
    monkeypatch.setattr(template_lib, "_SECONDS", 0.3)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages %}" + loop + "{% endif %}done")
    begin = time.monotonic()
    with pytest.raises(TemplateError, match=r"took more than 0\.3 s"):
        template.render(TALK)
    assert time.monotonic() - begin < 30
    assert template.render([]) == "done"


def test_a_template_of_a_megabyte_is_refused():
    with pytest.raises(TemplateError, match="1048577 characters"):
        ChatTemplate("x" * ((1 << 20) + 1))
