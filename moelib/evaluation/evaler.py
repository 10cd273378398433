"""Benchmarks during training: an evaler that answers questions beside reading its input."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.module import Module, nowrap
from moelib.data.token_store import TokenStore
from moelib.evaluation.evaluations import Evaluation, evaluate
from moelib.evaluation.multiple_choice import task_evaluation
from moelib.evaluation.scoring import BATCH_TOKENS, Scorer
from moelib.train.evaler import SpmdEvaler
from moelib.train.metrics import Scalars


class TaskEvaler(SpmdEvaler):
    """Evaluates on an input, as every evaler does, and then on tasks.

    The input, of a token store, gives the tokenizer and the length that the model reads
    (`seq_len`).
    """

    @config_class
    class Config(SpmdEvaler.Config):
        tasks: Required[Sequence[str]] = REQUIRED  # Of moelib.evaluation.tasks.TASKS.
        data_dir: Required[str] = REQUIRED  # Folder of the tasks' files.
        num_fewshot: int | None = None  # Examples before a question; None takes each task's.
        limit: int | None = 200  # The first questions of each task; None takes all.
        # Tokens of a batch of questions, padding included; a row for each part of the mesh at
        # least. Logits of all of them are kept at once, in float32.
        batch_tokens: int = BATCH_TOKENS

    def __init__(
        self, cfg: Any, *, parent: Module | None, model: Any, train_dtype: str | None = None
    ) -> None:
        """As `SpmdEvaler` takes them; reads no file.

        Raises:
            ValueError: If the input is not of a token store.
        """
        super().__init__(cfg, parent=parent, model=model, train_dtype=train_dtype)
        if not isinstance(getattr(self.config.input, "source", None), TokenStore.Config):
            raise ValueError(
                f"{self.path() or self.name}: input.source names no token store, so there is no "
                "tokenizer to ask questions with; set it to one."
            )
        self._model, self._train_dtype = model, train_dtype
        self._evaluations: list[Evaluation] = []
        self._scorer: Scorer | None = None

    @nowrap
    def open_input(self, mesh: jax.sharding.Mesh) -> None:
        """Opens the input and reads the tasks' files, if that is not done yet.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the mesh does not divide the batch, the input or a file is broken, or
                batch_tokens is not positive.
        """
        super().open_input(mesh)
        if self._scorer is not None:
            return
        cfg = self.config
        tokenizer = cfg.input.source.clone(split=None).instantiate().tokenizer()
        self._evaluations = [
            task_evaluation(
                name, cfg.data_dir, tokenizer, num_fewshot=cfg.num_fewshot, limit=cfg.limit
            )
            for name in cfg.tasks
        ]
        self._scorer = Scorer(
            self._model,
            vocab_size=tokenizer.vocab_size,
            max_length=cfg.input.seq_len,
            batch_tokens=cfg.batch_tokens,
            train_dtype=self._train_dtype,
            mesh=mesh,
        )

    @nowrap
    def evaluate(
        self,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> Scalars:
        """Returns the metrics of the input, and `<task>/<metric>` of each task.

        To be called inside `jax.set_mesh(mesh)`.

        Args:
            params: The model's parameters, sharded over `mesh`.
            mesh: The mesh.
            on_batch: Called after each batch, with the number of batches of the input or of
                questions done.

        Raises:
            ValueError: If the input has no token to predict, or a score is not a number.
        """
        scalars = super().evaluate(params, mesh, on_batch=on_batch)
        assert self._scorer is not None  # The input was opened.
        found = evaluate(self._scorer, params, self._evaluations, on_batch=on_batch)
        return scalars | {
            f"{name}/{metric}": value.value
            for name, metrics in found.items()
            for metric, value in metrics.items()
        }
