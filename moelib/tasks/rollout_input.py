"""Batches of answers that the model itself gives to prompts, with advantages by their rewards.

The prompts are a folder with a tokenizer and `prompts.jsonl`, each line {"ids", "messages",
"columns"}. At each rollout, every process draws the same answers on the training mesh.

Letters: N prompts, G answers to each, B sequences of a batch, S sequence length, L MoE layers, K
experts per token.
"""

import functools
import hashlib
import json
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import trusted_code
from moelib.core.config import REQUIRED, InstantiableConfig, config_class, maybe_instantiate
from moelib.core.config_types import PositiveFloat, PositiveInt, check_parameters
from moelib.core.errors import MissingFileError, UserError
from moelib.core.module import functional
from moelib.core.tree import Batch
from moelib.data.batches.input import (
    Input,
    State,
    StepBatches,
    check_rows,
    empty_batch,
)
from moelib.data.hashing import random_bits, random_permutation
from moelib.data.tokens.tokenizer import Tokenizer, saved_tokenizer
from moelib.inference.rollout import Rollout, rollouts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import expert_id_dtype
from moelib.layers.moe.replay import moe_layers
from moelib.models.preferences import group_advantages
from moelib.parallel import sharding
from moelib.runtime import storage
from moelib.runtime.processes import on_process_0
from moelib.tasks.openai_sampler import OpenAISampler

logger = logging.getLogger(__name__)

PROMPTS = "prompts.jsonl"
# Arguments `prompts` (messages of each), `completions` (texts), and the columns of the records by
# name, each a list of one per answer; returns a number for each.
Reward = Callable[..., Sequence[float]]
# (prompts, seeds) -> an answer to each; the sampler of another process.
Sampler = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Rollout]]


class RewardError(UserError):
    """A reward that gives no numbers."""


class Answer(NamedTuple):
    """An answer of a rollout."""

    prompt: str  # Content of the last message.
    text: str
    reward: float


class RolloutInput(Input):
    """Answers to prompts in epochs of random orders, drawn when a batch needs them."""

    reads_parameters = is_endless = True

    @config_class
    class Config(Input.Config):
        path: str = REQUIRED  # Folder of the prompts.
        reward: str = REQUIRED  # Function, as "module:function"; see `Reward`.
        group_size: PositiveInt = 8  # G, 2 or more.
        max_new_tokens: PositiveInt = 256  # Maximum number of tokens of an answer.
        # Number of steps on the same answers, each on a part; 1 draws answers for each step.
        steps_per_rollout: PositiveInt = 1
        scale_advantages: bool = True  # Whether they are divided by the deviation in the group.
        # Whether tokens go to the experts that they visited when the answer was drawn.
        replay_routing: bool = True
        seed: int = 0  # Seed of the orders and of the answers.
        reward_seconds: PositiveFloat = 300.0  # Time that the reward of a rollout may take.
        # Builds a `Sampler`; None for the model that is trained.
        sampler: InstantiableConfig | None = None
        # Of the model: its MoE layers (L), their experts, and experts per token (K).
        experts: list[int] | None = None

        def complete(self, model: Any) -> None:
            """Sets `experts` to those of the model."""
            if self.experts is None:
                self.experts = _experts_of(model) if self.replay_routing else []

        def abstract_batch(self, opened: Callable[[], Input]) -> Batch:
            """Returns a global batch as `jax.ShapeDtypeStruct`s."""
            rows = _empty(self, self.global_batch_size, eos_id=0)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)

    def __init__(self, cfg: Config) -> None:
        """Reads the prompts.

        Raises:
            UserError: If there are none, a size does not fit, or there is no such reward.
        """
        super().__init__(cfg)
        self.prompts = read_prompts(cfg.path)
        ids = json.dumps([prompt["ids"] for prompt in self.prompts]).encode()
        self._digest = hashlib.sha256(ids).hexdigest()[:16]
        self._rows_per_rollout = cfg.steps_per_rollout * cfg.global_batch_size
        if cfg.group_size < 2 or self._rows_per_rollout % cfg.group_size:
            raise UserError(
                f"group_size={cfg.group_size}: set it to 2 or more, and to a divisor of the "
                f"{self._rows_per_rollout} answers of a rollout (steps_per_rollout="
                f"{cfg.steps_per_rollout} times global_batch_size={cfg.global_batch_size})."
            )
        longest = max(len(prompt["ids"]) for prompt in self.prompts)
        if longest + cfg.max_new_tokens - 1 > cfg.seq_len:
            raise UserError(
                f"seq_len={cfg.seq_len}, but a prompt has {longest} tokens and an answer up to "
                f"max_new_tokens={cfg.max_new_tokens}; set seq_len to "
                f"{longest + cfg.max_new_tokens - 1} or more."
            )
        self._reward: Reward = trusted_code.resolve(cfg.reward)
        self._check_reward()
        self.tokenizer = self.load_tokenizer(cfg)
        self._stop_ids = read_stop_ids(cfg.path, self.tokenizer)
        sampler = cfg.sampler
        if isinstance(sampler, OpenAISampler.Config):
            sampler = sampler.clone(stop_ids=sorted({*sampler.stop_ids, *self._stop_ids}))
        self._sampler: Sampler | None = maybe_instantiate(sampler)
        self._made: tuple[int, Batch] = (-1, {})  # Number and rows of the newest rollout.
        self.newest: Sequence[Answer] = ()  # Those of the newest rollout.

    def _check_reward(self) -> None:
        """Raises UserError if the reward does not take its arguments."""
        columns = {name for prompt in self.prompts for name in prompt["columns"]}
        if taken := columns & {"prompts", "completions"}:
            raise UserError(
                f"records have the field {min(taken)!r}, but a reward gets the answers and their "
                "prompts under this name; rename the field."
            )
        named = dict.fromkeys(("prompts", "completions", *sorted(columns)))
        check_parameters(f"reward={self.config.reward}", self._reward, **named)

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer in the folder."""
        return saved_tokenizer(cfg.path)

    @property
    def identity(self) -> State:
        """The settings that determine the batches, given the parameters."""
        cfg = self.config
        names = ("global_batch_size", "group_size", "steps_per_rollout", "seed", "max_new_tokens")
        settings = {name: getattr(cfg, name) for name in names}
        return {"prompts": self._digest, "reward": cfg.reward, **settings}

    def examples_taken(self, identity: State, num_steps: int) -> dict[str, int]:
        """Returns the number of prompts of the rollouts of some steps, by their order."""
        if "prompts" not in identity:
            return {}
        size, per_rollout = identity["global_batch_size"], identity["steps_per_rollout"]
        num_answers = -(-num_steps // per_rollout) * per_rollout * size
        order = f"prompts={identity['prompts']} seed={identity['seed']}"
        return {order: num_answers // identity["group_size"]}

    def iterator(self, rows: range | None = None) -> "_Rollouts":
        """Returns some rows of each batch."""
        return _Rollouts(self, check_rows(rows, self.config.global_batch_size))

    def batch(self, step: int, rows: range) -> Batch:
        """Returns some rows of a batch; all processes must call it."""
        cfg = self.config
        number, part = divmod(step - self.begin.step, cfg.steps_per_rollout)
        if self._made[0] != number:
            self._made = number, self._rollout(number)
        first = part * cfg.global_batch_size
        inside = slice(first + rows.start, first + rows.stop)
        return {name: array[inside] for name, array in self._made[1].items()}

    def _rollout(self, number: int) -> Batch:
        """Returns the rows of all steps of a rollout."""
        cfg = self.config
        policy = self.policy()
        if policy is None:
            raise UserError("There are no parameters to draw answers with; train on this input.")
        prompts = [self.prompts[i] for i in self._chosen(number) for _ in range(cfg.group_size)]
        of_run = self.begin.step + number  # Another for each rollout.
        seeds = (random_bits(len(prompts), cfg.seed, of_run) >> np.uint64(33)).tolist()
        answers = self._answers([prompt["ids"] for prompt in prompts], seeds, policy)
        stops = {*self._stop_ids}
        texts = [self.tokenizer.decode([i for i in x.ids if i not in stops]) for x in answers]
        rewards = on_process_0(lambda: self._rewards(prompts, texts))
        asked = [prompt["messages"][-1]["content"] for prompt in prompts]
        self.newest = [Answer(*each) for each in zip(asked, texts, rewards, strict=True)]
        batch = self._rows(prompts, answers, np.asarray(rewards, np.float32))
        if cfg.steps_per_rollout > 1:
            batch["old_log_probs"] = self._log_probs(policy, batch)
        return batch

    def _chosen(self, number: int) -> list[int]:
        """Returns the indices of the prompts of a rollout."""
        num, count = len(self.prompts), self._rows_per_rollout // self.config.group_size
        first = self.first_example(self.begin.step + number * self.config.steps_per_rollout)
        order = functools.cache(lambda epoch: random_permutation(num, self.config.seed, epoch))
        return [int(order(i // num)[i % num]) for i in range(first, first + count)]

    def _answers(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], policy: Any
    ) -> Sequence[Rollout]:
        if (sampler := self._sampler) is not None:
            found = on_process_0(lambda: [_as_json(x) for x in sampler(prompts, seeds)])
            return self._checked([_from_json(each) for each in found], len(prompts))
        model, params = policy
        return rollouts(
            model,
            params,
            prompts,
            stop_ids=self._stop_ids,
            max_new_tokens=self.config.max_new_tokens,
            seeds=seeds,
            vocab_size=self.tokenizer.vocab_size,
            with_experts=bool(self.config.experts),
        )

    def _checked(self, answers: list[Rollout], number: int) -> list[Rollout]:
        """Returns the answers of another sampler. Raises UserError if they are not of use."""
        cfg = self.config
        longest = max((len(answer.ids) for answer in answers), default=0)
        if len(answers) != number or longest > cfg.max_new_tokens:
            raise UserError(
                f"input.sampler gave {len(answers)} answers of up to {longest} tokens to {number} "
                f"prompts; make it give one to each, of max_new_tokens={cfg.max_new_tokens} at "
                "most."
            )
        if cfg.experts and any(answer.expert_ids is None for answer in answers):
            raise UserError(
                "input.sampler gave answers without the experts of their tokens; set its "
                "with_experts to True, or replay_routing to False."
            )
        return answers

    def _rewards(self, prompts: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
        """Returns the reward of each answer. Raises RewardError if it gives no numbers in time."""
        cfg = self.config
        names = sorted({name for prompt in prompts for name in prompt["columns"]})
        columns = {name: [prompt["columns"].get(name) for prompt in prompts] for name in names}
        messages = [prompt["messages"] for prompt in prompts]
        call = lambda: self._reward(prompts=messages, completions=texts, **columns)
        found = _within(cfg.reward_seconds, cfg.reward, call)
        try:
            rewards = [float(x) for x in found]
        except (TypeError, ValueError):
            rewards = []
        if len(rewards) != len(texts):
            raise RewardError(
                f"reward={cfg.reward} returned {found!r:.80}; return a list of {len(texts)} "
                "numbers, one for each completion."
            )
        for text, reward in zip(texts, rewards, strict=True):
            if not math.isfinite(reward):
                raise RewardError(
                    f"reward={cfg.reward} gave {reward} to the completion {text!r:.80}; return "
                    "finite numbers."
                )
        return rewards

    def _rows(
        self,
        prompts: Sequence[Mapping[str, Any]],
        answers: Sequence[Rollout],
        rewards: np.ndarray,
    ) -> Batch:
        """Returns the rows of answers. Those of a group with equal rewards have no labels."""
        cfg = self.config
        grouped = jnp.asarray(rewards.reshape(-1, cfg.group_size))
        advantages, differ = group_advantages(grouped, scale=cfg.scale_advantages)
        teaches = np.repeat(np.asarray(differ), cfg.group_size)
        batch = _empty(cfg, len(answers), self.tokenizer.eos_id)
        batch |= {"advantages": np.asarray(advantages, np.float32).reshape(-1), "rewards": rewards}
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids, begin = [*prompt["ids"], *answer.ids], len(prompt["ids"]) - 1
            size = len(ids) - 1
            batch["input_ids"][row, :size] = ids[:-1]
            batch["positions"][row, :size] = np.arange(size)
            batch["segment_ids"][row, :size] = 1
            batch["sampler_log_probs"][row, begin:size] = answer.log_probs
            if teaches[row]:
                batch["target_labels"][row, begin:size] = answer.ids
            if "expert_ids" in batch and answer.expert_ids is not None:
                batch["expert_ids"][row, :size] = answer.expert_ids
        return batch

    def _log_probs(self, policy: Any, batch: Batch) -> np.ndarray:
        """Returns the log probabilities of the labels before the first step, B rows at a time."""
        size, found = self.config.global_batch_size, []
        for first in range(0, self._rows_per_rollout, size):
            part = {name: x[first : first + size] for name, x in batch.items()}
            found.append(np.asarray(log_probs(*policy, part)))
        return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)
def log_probs(model: Any, params: Any, batch: Batch) -> jax.Array:
    """Returns the log probability of each label of a batch in nats, on all devices."""
    found, _ = functional(model, None, params, (batch,), is_training=False, method="log_probs")
    return sharding.constrain(found, (None, None))


class _Rollouts(StepBatches):
    """One host's batches of a `RolloutInput`."""

    def restore(self, state: State) -> None:
        super().restore(state)
        source = self.source
        if within := (self.step - source.begin.step) % source.config.steps_per_rollout:
            logger.warning(
                "step %d is within a rollout, whose answers are drawn again with the parameters of "
                "this step instead of step %d, so that the run differs from an uninterrupted one; "
                "save at multiples of steps_per_rollout.",
                *(self.step, self.step - within),
            )


def write_prompts(folder: str, prompts: Sequence[Any]) -> None:
    """Writes prompts.jsonl, of `moelib.data.tokens.chat.pairs.Prompt`s, into a folder."""
    with storage.atomic_file(os.path.join(folder, PROMPTS)) as file:
        for prompt in prompts:
            file.write(json.dumps(prompt._asdict(), ensure_ascii=False, default=str) + "\n")


def read_prompts(folder: str) -> list[dict[str, Any]]:
    """Returns the prompts in a folder. Raises UserError if there are none, or one is damaged."""
    path = os.path.join(folder, PROMPTS)
    try:
        lines = storage.read_text(path).split("\n")
    except FileNotFoundError:
        raise MissingFileError(f"There is no {path}; prepare prompts for this run.") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if line:
            try:
                prompt = storage.parse_json(line)
                _ = [int(token) for token in prompt["ids"]], dict(prompt["columns"])
                _ = prompt["messages"][-1]["content"]
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise UserError(
                    f"{path}:{number} is no prompt ({type(error).__name__}: {error!s:.80}); delete "
                    "the folder, which the same command makes again."
                ) from error
            found.append(prompt)
    if not found:
        raise UserError(f"{path} has no prompt; prepare it again.")
    return found


_STOPS = "stop_ids.json"


def write_stop_ids(folder: str, ids: Sequence[int]) -> None:
    """Writes the ids of the tokens that end an answer into a folder."""
    storage.write_json(os.path.join(folder, _STOPS), {"stop_ids": sorted({*ids})})


def read_stop_ids(folder: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of the tokens that end an answer: those in the folder, and end of text."""
    found = storage.read_json(os.path.join(folder, _STOPS)).get("stop_ids", [])
    return sorted({*found, tokenizer.eos_id})


def _experts_of(model: Any) -> list[int]:
    """Returns [L, experts, K] of a model's config; [] for a model without MoE layers."""
    built = model.clone(name="model").instantiate(parent=None)
    layers = [layer.config for layer, _ in built.walk() if isinstance(layer, MoELayer)]
    found = {(layer.num_experts, layer.num_experts_per_token) for layer in layers}
    if len({top_k for _, top_k in found}) > 1:
        raise UserError(
            "The MoE layers of the model have different num_experts_per_token; set replay_routing "
            "to False."
        )
    if not found:
        return []
    return [len(moe_layers(built)), max(num for num, _ in found), min(k for _, k in found)]


def _empty(cfg: RolloutInput.Config, num_rows: int, eos_id: int) -> Batch:
    """Returns rows of padding, without `old_log_probs` of a rollout for one step."""
    batch = empty_batch(num_rows, cfg.seq_len, eos_id)
    del batch["target_num_bytes"]
    shape = num_rows, cfg.seq_len
    for name in ("sampler_log_probs", *(["old_log_probs"] if cfg.steps_per_rollout > 1 else [])):
        batch[name] = np.zeros(shape, np.float32)
    for name in ("advantages", "rewards"):
        batch[name] = np.zeros(num_rows, np.float32)
    if cfg.experts:
        num_layers, num_experts, top_k = cfg.experts
        dtype = expert_id_dtype(num_experts)
        batch["expert_ids"] = np.full((*shape, num_layers, top_k), num_experts, dtype)
    return batch


def _as_json(rollout: Rollout) -> list[Any]:
    experts = rollout.expert_ids
    return [*rollout[:2], None if experts is None else experts.tolist()]


def _from_json(value: list[Any]) -> Rollout:
    ids, log_probs_of_ids, experts = value
    return Rollout(ids, log_probs_of_ids, None if experts is None else np.asarray(experts))


def _within(seconds: float, name: str, call: Callable[[], Any]) -> Any:
    """Returns the result of a reward. Raises RewardError if it fails or takes longer."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # Raised by the caller.
            results.put((None, error))

    threading.Thread(target=run, name="reward", daemon=True).start()
    try:
        found, error = results.get(timeout=seconds)
    except queue.Empty:
        raise RewardError(
            f"reward={name} took longer than reward_seconds={seconds:g}; make it faster, or set "
            "reward_seconds."
        ) from None
    if error is not None:
        raise RewardError(
            f"reward={name} raised {type(error).__name__}: {error!s:.200}; correct it."
        ) from error
    return found
