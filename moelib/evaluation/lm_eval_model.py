"""A trained model as lm-eval knows models, so that any of its tasks can be run on it.

Needs `pip install 'moelib[lm-eval]'`.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from moelib.core.context import Nested
from moelib.core.param import cast_parameters
from moelib.data.tokenizer import Tokenizer
from moelib.evaluation.evaluations import Metric
from moelib.evaluation.perplexity import rolling_windows
from moelib.evaluation.requests import Request, encode_texts
from moelib.evaluation.scoring import Score, Scorer
from moelib.inference.generate import Settings, generate_tokens
from moelib.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)

# Settings of lm-eval's that `generate_many` knows by the same names.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LmEvalModel(TemplateLM):
    """A model with its parameters; `lm_eval.simple_evaluate(model=...)` takes it."""

    def __init__(
        self, model: CausalLM, params: Nested, tokenizer: Tokenizer, scorer: Scorer
    ) -> None:
        """Takes what it asks.

        Args:
            model: Generates.
            params: The model's parameters; it computes with them in the scorer's `train_dtype`.
            tokenizer: That the model was trained with.
            scorer: Of the model.
        """
        super().__init__()
        specs = model.create_parameter_specs_recursively()
        self._params = cast_parameters(params, specs, scorer.train_dtype)
        self._model, self._scorer = model, scorer
        self._tokenizer = tokenizer

    @property
    def eot_token_id(self) -> int:
        """The end of text, which also stands before a text that is scored whole."""
        return self._tokenizer.eos_id

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads."""
        return self._scorer.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """Returns the ids of a text, with nothing added."""
        del add_special_tokens, unused
        return self._tokenizer.encode(string)

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
        """Returns the log-probability of each text, in nats, by windows of `max_length`."""
        texts = [request.args[0] for request in requests]
        windows = [
            list(rolling_windows(ids, self.max_length, self.eot_token_id))
            for ids in encode_texts(self._tokenizer, texts)
        ]
        scores = iter(self._score([w for of_text in windows for w in of_text], disable_tqdm))
        return [sum(next(scores).log_prob for _ in of_text) for of_text in windows]

    def _score(self, requests: Sequence[Request], disable_tqdm: bool) -> list[Score]:
        with tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm) as bar:

            def show(done: int) -> None:
                bar.update(done - bar.n)

            return self._scorer.score(self._params, requests, on_batch=show)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns what follows each context, up to the first of the texts in `until`.

        Request number i draws with seed i, if it draws. Contexts that leave no room for
        `max_gen_toks` tokens are cut from the left, and a warning says how many.

        Raises:
            ValueError: If a task asks for a way of generating that is not known here.
        """
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        num_cut = 0
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm) as bar:
            for indices in alike.values():
                settings = normalize_gen_kwargs(requests[indices[0]].args[1])
                room = self._room(settings)
                prompts = {}
                for i in indices:
                    ids = self.tok_encode(requests[i].args[0]) or [self.eot_token_id]
                    num_cut += len(ids) > room
                    prompts[i] = ids[-room:]
                longest_first = sorted(indices, key=lambda i: -len(prompts[i]))
                rows = [prompts[i] for i in longest_first]
                found = self._generate(rows, longest_first, settings)
                for i, text in zip(longest_first, found, strict=True):
                    texts[i] = text
                    bar.update()
        if num_cut:
            logger.warning(
                "%d of %d contexts leave no room to generate within max_length, which is %d "
                "tokens: they are cut from the left.",
                num_cut,
                len(requests),
                self.max_length,
            )
        return texts

    def _room(self, settings: Mapping[str, Any]) -> int:
        """Returns how many tokens a context may have. Raises ValueError if settings are bad."""
        if unknown := settings.keys() - {"until", "max_gen_toks", "do_sample", *_SAMPLING}:
            raise ValueError(
                f"generation_kwargs has {', '.join(sorted(unknown))}; known are until, "
                f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}: leave the others out of it."
            )
        room = self.max_length - settings["max_gen_toks"]
        if room < 1:
            raise ValueError(
                f"max_gen_toks is {settings['max_gen_toks']}, and the model reads "
                f"{self.max_length} tokens with the context; set it to {self.max_length - 1} or "
                "less in the task's generation_kwargs."
            )
        return room

    def _generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], settings: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yields the text that follows each prompt."""
        stops = [stop for stop in settings["until"] if stop]
        sampling: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0}
        sampling |= {name: settings[name] for name in _SAMPLING if name in settings}
        for tokens in generate_tokens(
            self._model,
            self._params,
            prompts,
            Settings(
                **sampling,
                max_new_tokens=settings["max_gen_toks"],
                stop_ids=(self.eot_token_id,),
                vocab_size=self._tokenizer.vocab_size,
            ),
            seeds=seeds,
            batch_size=max(1, self._scorer.batch_tokens // self.max_length),
        ):
            text = self._tokenizer.decode(tokens)
            for stop in stops:
                text = text.split(stop)[0]
            yield text


def run_tasks(
    model: LmEvalModel,
    manager: TaskManager,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None,
    limit: int | None,
    fewshot_seed: int,
) -> dict[str, Mapping[str, Metric]]:
    """Returns the metrics of lm-eval's tasks, by task or group.

    Standard errors that lm-eval estimates by bootstrap are from 1000 samples.

    Args:
        model: What is evaluated.
        manager: Knows the tasks.
        tasks: Names of tasks, groups or tags.
        num_fewshot: Examples before a question; None takes each task's.
        limit: The first questions of each task; None takes all.
        fewshot_seed: Decides which examples are drawn.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # Of bootstraps: a process with JAX in it cannot fork.
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
    """Returns lm-eval's "acc,none" and "acc_stderr,none" as `acc`; filters but none stay named."""
    metrics = {}
    for key, value in results.items():
        name, comma, answers = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        stderr = results.get(f"{name}_stderr,{answers}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        metrics[name if answers == "none" else key] = Metric(float(value), stderr)
    return metrics
