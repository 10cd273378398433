"""Samples: what a model writes after fixed prompts while it trains."""

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
from moelib.train.settings import completed
from moelib.train.watcher import Watcher

logger = logging.getLogger(__name__)

_SHOWN = 120  # Characters of a sample in the terminal.


class Samples(Watcher):
    """Continues prompts every N steps and at the end; prints the texts, and logs them as events.

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
            stop_ids=[self._tokenizer.eos_id],
            vocab_size=self._tokenizer.vocab_size,
        )
        self._ids = self._tokenizer.encode_prompts(cfg.prompts)
        for i, ids in enumerate(self._ids):
            limit_of(i, ids, self._settings, self._tokenizer.vocab_size)

    def between_steps(self, step: int) -> None:
        """Writes samples if they are due; a failure is logged, and training continues."""
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
            line = json.dumps(prompt + text, ensure_ascii=False)
            run.print(f"step {step}: {line if len(line) <= _SHOWN else line[:_SHOWN] + '...'}")

    def _texts(self) -> list[str]:
        model, decode, texts = self.run.model, self._tokenizer.decode, []
        specs = model.create_parameter_specs_recursively()
        params = cast_parameters(self.run.eval_params(), specs, self._dtype)
        for ids, tokens in zip(
            self._ids, generate_tokens(model, params, self._ids, self._settings), strict=True
        ):
            texts.append(text_of(tokens, ids, decode))
            self.run.on_batch(len(texts) - 1)
        return texts
