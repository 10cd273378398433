"""Samples: what a model writes after fixed prompts while it trains."""

import dataclasses
import json
import logging
from typing import Any

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import NonNegativeFloat, PositiveInt
from moelib.core.errors import UserError, first_line
from moelib.core.precision import cast_parameters
from moelib.data.batches.input import load_tokenizer
from moelib.inference.generate import Settings, generate_tokens, limit_of
from moelib.inference.text import text_of
from moelib.runs.folder import SAMPLE
from moelib.runs.loading import stop_ids_of_model
from moelib.train.settings import completed
from moelib.train.watcher import Watcher

logger = logging.getLogger(__name__)

_SHOWN = 120  # Characters of a sample in the terminal.


class Samples(Watcher):
    """Continues prompts every N steps and after the last; the texts are printed, and logged.

    The status page shows the newest. Training is the same with and without samples.
    """

    @config_class
    class Config(Watcher.Config):
        prompts: Required[list[str]] = REQUIRED  # Texts to continue.
        every_n_steps: PositiveInt = 1000  # Steps from one sample to the next.
        max_new_tokens: PositiveInt = 64  # Maximum number of tokens of a text.
        temperature: NonNegativeFloat = 0.8  # Of the draws; 0 takes the most likely token.
        seed: int = 0  # Seed of the draws, which are the same at all steps.

    def prepare(self, trainer: Any) -> None:
        """Encodes the prompts.

        Raises:
            UserError: If the model is no language model, the input has no tokenizer, or a prompt is
                empty or too long.
        """
        cfg, trainer_cfg = self.config, completed(trainer.config)
        if not trainer.model.is_language_model:
            raise UserError(
                f"{self.path}: {type(trainer.model).__qualname__} writes no text; remove this "
                "watcher."
            )
        self._tokenizer = load_tokenizer(trainer_cfg.input)
        self._dtype = trainer_cfg.train_dtype
        self._settings = Settings(
            max_new_tokens=cfg.max_new_tokens,
            max_length=trainer_cfg.input.seq_len,
            temperature=cfg.temperature,
            seed=cfg.seed,
            vocab_size=self._tokenizer.vocab_size,
        )
        self._ids = self._tokenizer.encode_prompts(cfg.prompts)
        for i, ids in enumerate(self._ids):
            limit_of(i, ids, self._settings, self._tokenizer.vocab_size)

    def between_steps(self, step: int) -> None:
        """Writes samples if they are due; if logits are not finite, that is logged instead."""
        run = self.run
        if step % self.config.every_n_steps and step != run.last_step:
            return
        run.wait()
        with run.spent_on("evaluation"):
            try:
                texts = self._texts()
            except UserError as error:
                logger.error("NO SAMPLES of step %d: %s", step, first_line(error))
                return
        for prompt, text in zip(self.config.prompts, texts, strict=True):
            run.note(SAMPLE, step=step, prompt=prompt, text=text)
            run.print(f"step {step}: {shortened_sample(prompt + text)}")

    def _texts(self) -> list[str]:
        model, decode = self.run.model, self._tokenizer.decode
        specs = model.create_parameter_specs_recursively()
        params = cast_parameters(self.run.eval_params(), specs, self._dtype)
        stop_ids = stop_ids_of_model(self.run.folder.path, self._tokenizer, model.config.vocab_size)
        found = generate_tokens(
            *(model, params, self._ids),
            dataclasses.replace(self._settings, stop_ids=stop_ids),
            on_token=self._goes_on,
        )
        return [text_of(x, ids, decode) for ids, x in zip(self._ids, found, strict=True)]

    def _goes_on(self, index: int, token: int) -> bool:
        """Tells the run of a token; ends the work if it is asked to stop."""
        del token
        self.run.on_batch(index)
        return False


def shortened_sample(text: str, length: int = _SHOWN) -> str:
    """Returns the beginning of a text on one line, in quotes."""
    line = json.dumps(text, ensure_ascii=False)
    return line if len(line) <= length else line[:length] + "..."
