"""Benchmarks during training: an evaler that also answers questions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.metrics import Scalars
from moelib.data.batches.input import load_tokenizer
from moelib.evaluation.evaluations import Evaluation, run_evaluations
from moelib.evaluation.multiple_choice import task_evaluation
from moelib.evaluation.scoring import BATCH_TOKENS, Scorer
from moelib.train.evaler import SpmdEvaler


class TaskEvaler(SpmdEvaler):
    """Evaluates on an input, as every evaler does, and then on tasks.

    The input provides the tokenizer and the maximum length of a sequence (`seq_len`).
    """

    @config_class
    class Config(SpmdEvaler.Config):
        tasks: Required[Sequence[str]] = REQUIRED  # Names in moelib.evaluation.tasks.TASKS.
        data_dir: Required[str] = REQUIRED  # Folder of the tasks' files.
        num_fewshot: int | None = None  # Examples before a question; None for each task's default.
        limit: int | None = 200  # Number of questions of each task, from the first; None for all.
        # Number of tokens of a batch of questions, padding included; a batch has at least one
        # sequence per part of the batch that the mesh makes.
        batch_tokens: int = BATCH_TOKENS

    _scorer: Scorer | None = None  # Created, with the evaluations, by open_input.
    _evaluations: Sequence[Evaluation] = ()

    def open_input(self, mesh: jax.sharding.Mesh) -> None:
        """Opens the input and reads the tasks' files, if that is not done yet.

        Raises:
            MissingFileError: If a file is missing.
            UserError: If the mesh does not divide the batch, the input has no tokenizer, a file is
                invalid, or batch_tokens is not positive.
        """
        super().open_input(mesh)
        if self._scorer is not None:
            return
        cfg = self.config
        tokenizer = load_tokenizer(cfg.input)
        self._evaluations = [
            task_evaluation(
                name, cfg.data_dir, tokenizer, num_fewshot=cfg.num_fewshot, limit=cfg.limit
            )
            for name in cfg.tasks
        ]
        self._scorer = Scorer(
            model=self._model,
            vocab_size=tokenizer.vocab_size,
            max_length=cfg.input.seq_len,
            batch_tokens=cfg.batch_tokens,
            train_dtype=self._train_dtype,
            mesh=mesh,
        )

    def evaluate(
        self,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> Scalars:
        """Returns the metrics of the input, and `<task>/<metric>` of each task.

        Must be called inside `jax.set_mesh(mesh)`. `on_batch` is called after each batch with the
        number of batches of the input, then of questions, done so far.

        Raises:
            ValueError: If the input has no token to predict, or a score is not a number.
        """
        scalars = super().evaluate(params, mesh, on_batch=on_batch)
        assert self._scorer is not None
        found = run_evaluations(self._scorer, params, self._evaluations, on_batch=on_batch)
        return scalars | {
            f"{name}/{metric}": value.value
            for name, metrics in found.items()
            for metric, value in metrics.items()
        }
