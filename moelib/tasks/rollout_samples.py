"""Answers of rollouts with their rewards, shown while a run trains."""

from typing import Any

from moelib.core.config import config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.inference.samples import shortened_sample
from moelib.runs.folder import SAMPLE
from moelib.tasks.rollout_input import RolloutInput
from moelib.train.watcher import Watcher


class RolloutSamples(Watcher):
    """Prints and logs the best and the worst answer of the newest rollout of a `RolloutInput`.

    That is done every N steps and after the last; the status page shows the newest.
    """

    @config_class
    class Config(Watcher.Config):
        every_n_steps: PositiveInt = 20  # Steps from one sample to the next.

    def prepare(self, trainer: Any) -> None:
        """Raises UserError if the input draws no answers."""
        if not isinstance(trainer.config.input, RolloutInput.Config):
            raise UserError(f"{self.path}: the input draws no answers; remove this watcher.")
        self._trainer = trainer

    def between_steps(self, step: int) -> None:
        """Logs the answers if they are due."""
        run = self.run
        if step % self.config.every_n_steps and step != run.last_step:
            return
        answers = sorted(self._trainer.input.newest, key=lambda each: each.reward)
        for prompt, text, reward in answers[-1:] + answers[:1]:
            run.note(SAMPLE, step=step, prompt=prompt, text=text, reward=reward)
            shown = f"{shortened_sample(prompt, 60)} {shortened_sample(text)}"
            run.print(f"step {step}, reward {reward:g}: {shown}")
