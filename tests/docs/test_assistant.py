"""The data and the reward of the page from a base model to one that answers."""

import ast
import json
import runpy
import shlex
import subprocess

import pytest

from tests.docs import blocks
from tests.operations import browser

PAGE = "docs/assistant.md"


def test_the_task_has_right_answers_in_both_styles_and_holds_questions_out(tmp_path, monkeypatch):
    blocks.write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    task = runpy.run_path("numbers_task.py")
    task["write_data"]()
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    chat, pairs, prompts = map(read, ["chat.jsonl", "pairs.jsonl", "prompts.jsonl"])
    held_out = {task["question"](digits) for digits in task["HELD_OUT"]}
    assert len(held_out) == 100
    assert len(chat) == len(pairs) == len(prompts) == 500
    assert not held_out & {each["prompt"] for each in chat + pairs + prompts}
    for each in prompts:
        digits = [int(word) for word in each["prompt"].split() if word.isdigit()]
        assert each["answer"] == f"It is {max(digits)} ."
    right = [each["chosen"] for each in pairs]
    assert right == [each["answer"] for each in prompts]
    assert sum(task["is_right"](None, [x["completion"] for x in chat], right)) == 200
    assert sum(task["is_right"](None, [x["rejected"] for x in pairs], right)) == 0


@pytest.mark.slow
def test_each_part_of_the_page_raises_the_score(tmp_path):
    """Runs the first tutorial to its export, and then every command of the page."""
    tutorial = "docs/tutorial.md"
    for page in tutorial, PAGE:
        blocks.write_files(page, tmp_path)
    for block in blocks.blocks(tutorial):
        if not block.title and block.language != "text" and not (tmp_path / "exported").exists():
            blocks.run(block, tmp_path)
    commands = [block for block in blocks.blocks(PAGE) if not block.title]
    for block in commands[:-1]:
        output = blocks.run(block, tmp_path)
    scores = ast.literal_eval(output.splitlines()[-1])
    exported, full, dpo, grpo = map(sum, scores.values())
    assert exported == 0.0
    assert full > 0.2
    assert min(dpo, grpo) > 2 * full
    assert (tmp_path / "assistant.svg").exists()
    command = commands[-1].text.removeprefix("$ ")
    assert command.startswith("moelib serve ")
    if browser.CHROMIUM is not None:
        talk(tmp_path, command)


def talk(folder, command):
    """Asks on the page of the server, whose pictures are those of docs/images."""
    question = "What is the largest of 3 8 5 ?"
    with (
        subprocess.Popen(
            [*shlex.split(command), "--port=0"],
            cwd=folder,
            env=blocks.environment(),
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        browser.open_page(folder) as page,
    ):
        try:
            url = process.stdout.readline().partition(": ")[0]
            for width, height in (1280, 800), (390, 700):
                page.show(url, width=width, height=height)
                page.wait_for("document.title === 'grpo'")
                page.value("at('temperature').value = 0")
                page.value(f"at('text').value = '{question}'; at('form').requestSubmit()")
                page.wait_for("running === null && messages.length === 2")
                assert page.value("messages[1].content").strip() == "It is 8 ."
                page.screenshot(folder / f"chat_{width}.png")
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
