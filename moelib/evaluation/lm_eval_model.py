"""A trained model as a model of lm-eval, for any of its tasks.

Needs `pip install 'moelib[lm-eval]'`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.evaluation.evaluations import Metric, Metrics
from moelib.evaluation.perplexity import rolling_windows
from moelib.evaluation.requests import Request, encode_texts
from moelib.evaluation.scoring import Score, Scorer
from moelib.inference.generate import generate
from moelib.runs.loading import LoadedModel
from moelib.runtime.progress import Progress

logger = logging.getLogger(__name__)

# Settings that lm-eval and `generate` name alike.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LmEvalModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`.

    Prompts begin with BOS where lm-eval's own Hugging Face model has it.
    """

    def __init__(self, model: LoadedModel, scorer: Scorer) -> None:
        """Takes a model and its scorer."""
        super().__init__()
        self._model, self._scorer, self._tokenizer = model, scorer, model.tokenizer

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before the first one of a text that is scored whole."""
        return self._tokenizer.prefix_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self._scorer.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """Returns the ids of a text, by default as the model reads prompts."""
        del unused
        if add_special_tokens is False:
            return self._tokenizer.encode(string)
        return self._tokenizer.encode_prompts([string])[0]

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        del unused
        encoded = [
            Request(np.array(context, np.int32), np.array(continuation, np.int32))
            for _, context, continuation in requests
        ]
        return [tuple(score) for score in self._score(encoded, disable_tqdm)]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text, in nats, by windows of `max_length`.

        BOS itself is not scored.
        """
        texts = [request.args[0] for request in requests]
        windows = [
            list(rolling_windows(ids, self.max_length, self.prefix_token_id))
            for ids in encode_texts(self._tokenizer.encode_batch, texts)
        ]
        scores = iter(self._score([w for of_text in windows for w in of_text], disable_tqdm))
        return [sum(next(scores).log_prob for _ in of_text) for of_text in windows]

    def _score(self, requests: Sequence[Request], disable_tqdm: bool) -> list[Score]:
        with _progress("score", len(requests), disable_tqdm) as progress:
            parameters = self._model.parameters
            return self._scorer.score(parameters, requests, on_batch=progress.update)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each context, up to the first string in `until`.

        Request i draws with seed i. Contexts that leave no room for `max_gen_toks` tokens are cut
        from the left, and a warning counts them.

        Raises:
            UserError: If a task has settings of generation that are not supported.
        """
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(i)
        contexts = [
            self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests
        ]
        texts = [""] * len(requests)
        num_cut = 0
        with _progress("generate", len(requests), disable_tqdm) as progress:
            for indices in by_settings.values():
                settings = normalize_gen_kwargs(requests[indices[0]].args[1])
                room = self._room(settings)
                sampling: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0}
                sampling |= {name: settings[name] for name in _SAMPLING if name in settings}
                num_cut += sum(len(contexts[i]) > room for i in indices)
                indices.sort(key=lambda i: -len(contexts[i]))  # Batches of similar lengths.
                found = generate(
                    self._model,
                    [contexts[i][-room:] for i in indices],
                    seeds=indices,
                    batch_size=max(1, self._scorer.batch_tokens // self.max_length),
                    stop=[stop for stop in settings["until"] if stop],
                    max_new_tokens=settings["max_gen_toks"],
                    max_length=self.max_length,
                    **sampling,
                )
                for i, completion in zip(indices, found, strict=True):
                    texts[i] = completion.text
                    progress.advance(1)
        if num_cut:
            logger.warning(
                "%d of %d contexts leave no room to generate within max_length=%d tokens: they are "
                "cut from the left.",
                num_cut,
                len(requests),
                self.max_length,
            )
        return texts

    def _room(self, settings: Mapping[str, Any]) -> int:
        """Returns the maximum number of tokens of a context, after checking the settings."""
        known = ("until", "max_gen_toks", "do_sample", *_SAMPLING)
        if unknown := sorted(settings.keys() - set(known)):
            raise UserError(
                f"generation_kwargs has the unknown setting {unknown[0]!r}; known are "
                f"{', '.join(known)}."
            )
        room = self.max_length - settings["max_gen_toks"]
        if room < 1:
            raise UserError(
                f"max_gen_toks is {settings['max_gen_toks']}, but sequences have at most "
                f"{self.max_length} tokens with the context; set max_gen_toks to "
                f"{self.max_length - 1} or less in the task's generation_kwargs."
            )
        return room


def _progress(title: str, total: int, disabled: bool) -> Progress:
    return Progress(title, total, enabled=not disabled, seconds_between_lines=10.0)


def task_manager(tasks: Sequence[str], include_path: str | None) -> TaskManager:
    """Returns lm-eval's task manager. Raises UserError if it does not know a task."""
    if include_path is not None:
        if not os.path.isdir(include_path):
            raise UserError(f"include_path (--include_path) {include_path} is not a folder.")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own  # Finding all of lm-eval's tasks takes half a minute.
    manager = TaskManager(include_path=include_path)
    for name in tasks:
        if name not in manager.all_tasks:
            raise UserError(
                f"lm-eval has no task {name!r}; {did_you_mean(name, manager.all_tasks)}"
            )
    return manager


def run_tasks(
    model: LmEvalModel,
    manager: TaskManager,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None,
    limit: int | None,
    fewshot_seed: int,
) -> dict[str, Metrics]:
    """Returns the metrics of lm-eval's tasks, groups or tags, by task or group.

    Bootstrapped standard errors are from 1000 samples. `evaluate_model` documents the options.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # For bootstraps: a process with JAX in it cannot fork.
    found: Any = simple_evaluate(
        model=model,
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        fewshot_random_seed=fewshot_seed,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    return {name: _metrics(results) for name, results in found["results"].items()}


def _metrics(results: Mapping[str, Any]) -> dict[str, Metric]:
    """Returns "acc,none" and "acc_stderr,none" as `acc`; other filters keep their name."""
    metrics = {}
    for key, value in results.items():
        name, comma, answers = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        stderr = results.get(f"{name}_stderr,{answers}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        metrics[name if answers == "none" else key] = Metric(float(value), stderr)
    return metrics
