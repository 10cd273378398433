"""Paths of the files of these tests, and the same questions with Hugging Face's fields."""

import json
import pathlib

from moelib.evaluation.tasks import TASKS

HERE = pathlib.Path(__file__).parent
DATA = HERE / "data"
FIXTURES = HERE / "lm_eval_fixtures.json"
PADDED_VOCAB_SIZE = 320  # Of the model; the tokenizer has 300 tokens.


def hugging_face_line(name, line, label):
    """Returns a line of a benchmark with the fields of Hugging Face's data set."""
    if name == "piqa":
        return {**line, "label": int(label)}
    if name == "hellaswag":
        return {**line, "label": str(line["label"])}
    if name == "winogrande":
        return {key: value for key, value in line.items() if key != "qID"}
    choices = line["question"]["choices"]  # ARC and OpenBookQA.
    return {
        "id": line["id"],
        "question_stem" if name == "openbookqa" else "question": line["question"]["stem"],
        "choices": {key: [choice[key] for choice in choices] for key in ("text", "label")},
        "answerKey": line["answerKey"],
    }


def write_hugging_face_files(folder):
    """Writes the benchmarks of data/ with Hugging Face's fields, under the same names."""
    for name, task in TASKS.items():
        for file in (task.file, task.shots_file):
            lines = [json.loads(line) for line in (DATA / file).read_text("utf-8").splitlines()]
            labels = [None] * len(lines)
            if name == "piqa":
                labels = (DATA / file.replace(".jsonl", "-labels.lst")).read_text().split()
            path = pathlib.Path(folder) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            converted = map(hugging_face_line, [name] * len(lines), lines, labels)
            path.write_text("".join(json.dumps(line) + "\n" for line in converted), "utf-8")
