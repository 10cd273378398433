"""The data and the reward of the page from a base model to one that answers."""

import json
import runpy

from tests.docs import blocks


def test_the_task_has_right_answers_in_both_styles_and_holds_questions_out(tmp_path, monkeypatch):
    (block,) = [each for each in blocks.blocks("docs/assistant.md") if each.title]
    (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    task = runpy.run_path(block.title)
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
