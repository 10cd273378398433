"""Prompts, scores and metrics of lm-eval for the files in data/.

    python -m tests.evaluation.lm_eval_reference

writes lm_eval_fixtures.json again; it needs `pip install 'moelib[lm-eval]'`. The model is
`bag_lm` in NumPy, one request at a time. Of moelib.evaluation only the files' names are used.
"""

import json
import os
import pathlib
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), "moelib_datasets"))

import lm_eval
import numpy as np
import yaml
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moelib.data.tokens.tokenizer import Tokenizer
from moelib.evaluation.tasks import TASKS
from tests.evaluation import folders
from tests.evaluation.bag_lm import bag_log_probs, bag_params

MAX_LENGTH = 1024
ROLLING_LENGTH = 32

# Name: (lm-eval's file, our task, examples, seed of their draw).
CASES = {
    "arc_easy": ("arc/arc_easy.yaml", "arc_easy", 10, 1234),
    "arc_challenge": ("arc/arc_challenge.yaml", "arc_challenge", 10, 42),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag", 10, 1234),
    "piqa": ("piqa/piqa.yaml", "piqa", 10, 1234),
    "openbookqa": ("openbookqa/openbookqa.yaml", "openbookqa", 0, 1234),
    "openbookqa_3": ("openbookqa/openbookqa.yaml", "openbookqa", 3, 1234),
    "winogrande": ("winogrande/default.yaml", "winogrande", 0, 1234),
    "winogrande_3": ("winogrande/default.yaml", "winogrande", 3, 7),
}
# The split that lm-eval takes questions from, where it is not "test".
SPLITS = {"hellaswag": "validation", "piqa": "validation", "winogrande": "validation"}


class NumpyLM(TemplateLM):
    """The bag model, one request at a time."""

    def __init__(self, max_length=MAX_LENGTH):
        super().__init__()
        path = str(folders.DATA)
        self.moelib_tokenizer = Tokenizer.default_config().set(path=path).instantiate()
        self.max_length = max_length
        self.params = bag_params(folders.PADDED_VOCAB_SIZE)

    @property
    def eot_token_id(self):
        return self.moelib_tokenizer.eos_id

    def tok_encode(self, string, add_special_tokens=None, **unused):
        return self.moelib_tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests, **unused):
        scores = []
        for _, context, continuation in requests:
            ids = (context + continuation)[-(self.max_length + 1) :]
            rows = bag_log_probs(self.params, ids[:-1], self.moelib_tokenizer.vocab_size)
            rows = rows[-len(continuation) :]
            log_prob = sum(row[token] for row, token in zip(rows, continuation, strict=True))
            scores.append((float(log_prob), bool(np.all(rows.argmax(-1) == continuation))))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def write_tasks(folder):
    """Writes lm-eval's own tasks, over files in a folder, into that folder."""
    official = pathlib.Path(lm_eval.__file__).parent / "tasks"
    folders.write_hugging_face_files(folder)
    for case, (yaml_file, name, _, _) in CASES.items():
        split = SPLITS.get(name, "test")
        files = {"train": TASKS[name].shots_file, split: TASKS[name].file}
        task = {
            "include": str(official / yaml_file),
            "task": case,
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {s: os.path.join(folder, f) for s, f in files.items()}
            },
            # There are no files for the others. Which there are decides how examples are drawn.
            "validation_split": "validation" if split == "validation" else None,
            "test_split": "test" if split == "test" else None,
        }
        (pathlib.Path(folder) / f"{case}.yaml").write_text(yaml.safe_dump(task))
    rolling = {
        "task": "rolling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folders.DATA / "corpus.jsonl")}},
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    }
    (pathlib.Path(folder) / "rolling.yaml").write_text(yaml.safe_dump(rolling))


def metrics_of(found):
    """Returns {name: number}, without lm-eval's ",none" and without "N/A"."""
    return {
        key.removesuffix(",none"): value
        for key, value in found.items()
        if key.endswith(",none") and not isinstance(value, str)
    }


def reference():
    """Returns the prompts, scores and metrics of every task."""
    fixtures = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(folder)
        manager = TaskManager(include_path=folder, include_defaults=False)
        for name, (_, _, num_fewshot, seed) in CASES.items():
            out = lm_eval.simple_evaluate(
                model=NumpyLM(),
                tasks=[name],
                num_fewshot=num_fewshot,
                fewshot_random_seed=seed,
                task_manager=manager,
            )
            samples = sorted(out["samples"][name], key=lambda sample: sample["doc_id"])
            fixtures[name] = {
                "num_fewshot": num_fewshot,
                "fewshot_seed": seed,
                "metrics": metrics_of(out["results"][name]),
                "samples": [sample_of(sample) for sample in samples],
            }
        out = lm_eval.simple_evaluate(
            model=NumpyLM(ROLLING_LENGTH), tasks=["rolling"], task_manager=manager
        )
        fixtures["rolling"] = {
            "metrics": metrics_of(out["results"]["rolling"]),
            "log_probs": [sample["resps"][0][0] for sample in out["samples"]["rolling"]],
        }
    return fixtures


def sample_of(sample):
    """Returns the prompts and scores of a question; a context that all choices share is one."""
    contexts, continuations = zip(*sample["arguments"], strict=True)
    log_probs, greedy = zip(*(answers[0] for answers in sample["resps"]), strict=True)
    return {
        "contexts": list(dict.fromkeys(contexts)),
        "continuations": list(continuations),
        "log_probs": list(log_probs),
        "greedy": list(greedy),
    }


def main():
    """Writes the fixtures."""
    text = json.dumps(reference(), indent=1, ensure_ascii=False, sort_keys=True)
    folders.FIXTURES.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {folders.FIXTURES}, {len(text)} characters, lm-eval {lm_eval.__version__}")


if __name__ == "__main__":
    main()
