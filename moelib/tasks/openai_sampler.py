"""Answers drawn by another server that speaks OpenAI's protocol, such as vLLM.

The server must return token ids (`return_token_ids`) and log probabilities, under temperature 1,
and take vLLM's fields `stop_token_ids`, `top_k`, `min_p` and `repetition_penalty`. A vLLM with
`--enable-return-routed-experts` returns the experts of all tokens too. Its weights are yours to
update: the metric `mismatch` shows how far they are from those in training.
"""

import concurrent.futures
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.inference.rollout import Rollout

_KEY = "OPENAI_API_KEY"  # Environment variable with the server's key, if it wants one.
_MAX_BYTES = 1 << 28  # Of an answer.


class ServerError(UserError):
    """A server that does not answer, or gives no tokens with log probabilities."""


class OpenAISampler(Configurable):
    """Draws answers at `/v1/completions`."""

    @config_class
    class Config(Configurable.Config):
        url: str = REQUIRED  # Such as http://127.0.0.1:8000.
        model: str = REQUIRED  # Name of the model at the server.
        max_new_tokens: PositiveInt = REQUIRED  # Maximum number of tokens of an answer.
        # Tokens that end an answer, besides the model's own and those of the input.
        stop_ids: list[int] = []
        with_experts: bool = False  # Whether the server must return the experts of the tokens.
        num_requests: PositiveInt = 64  # Requests at a time.
        seconds: PositiveFloat = 600.0  # Time for an answer.
        num_retries: int = 3  # Further requests after one that failed.

    def __call__(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Rollout]:
        """Returns an answer to each prompt.

        Raises:
            ServerError: If the server does not give one.
        """
        with concurrent.futures.ThreadPoolExecutor(self.config.num_requests) as pool:
            return list(pool.map(self._answer, prompts, seeds))

    def _answer(self, prompt: Sequence[int], seed: int) -> Rollout:
        cfg = self.config
        body = {
            "model": cfg.model,
            "prompt": [int(i) for i in prompt],
            "max_tokens": cfg.max_new_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            # Unset, vLLM takes those of generation_config.json, which the policy does not have.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "logprobs": 1,
            "return_token_ids": True,
            "stop_token_ids": list(cfg.stop_ids),
        }
        found = self._asked(json.dumps(body).encode())
        try:
            (choice,) = found["choices"]
            ids = [int(i) for i in choice["token_ids"]]
            log_probs = [float(x) for x in choice["logprobs"]["token_logprobs"]]
            experts = self._experts(found, choice, len(prompt) + len(ids) - 1)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{cfg.url} returned {json.dumps(found)[:200]}, without {error}; use a server that "
                "returns token_ids and logprobs, such as vLLM."
            ) from None
        if not ids or len(ids) != len(log_probs) or not all(map(math.isfinite, log_probs)):
            raise ServerError(
                f"{cfg.url} returned {len(ids)} tokens and {len(log_probs)} log probabilities; "
                "each token must have a finite one."
            )
        return Rollout(ids, log_probs, experts)

    def _experts(self, found: Any, choice: Any, num_tokens: int) -> Any:
        """Returns the experts of the prompt and of all tokens of the answer but the last."""
        if not self.config.with_experts:
            return None
        parts = found["prompt_routed_experts"], choice["routed_experts"]
        experts = np.concatenate([np.asarray(part, np.int64) for part in parts])[:num_tokens]
        if experts.ndim != 3 or len(experts) < num_tokens:
            raise ValueError(f"the experts of {num_tokens} tokens")
        return experts

    def _asked(self, body: bytes) -> Any:
        cfg = self.config
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        url, failed = cfg.url.rstrip("/") + "/v1/completions", ""
        for _ in range(cfg.num_retries + 1):
            request = urllib.request.Request(url, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=cfg.seconds) as response:
                    return json.loads(response.read(_MAX_BYTES))
            except urllib.error.HTTPError as error:
                failed = f"{error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError) as error:
                failed = str(error)
        raise ServerError(
            f"{url} does not answer ({failed}); start the server, or correct url or model."
        )
