"""Starts of a new run: from the checkpoint of another run, or from a Hugging Face model."""

import ast
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from moelib.checkpoint.contents import (
    CheckpointNotFoundError,
    CheckpointRecord,
    best_step,
    step_path,
)
from moelib.checkpoint.restore import (
    find_checkpoints,
    on_all_processes,
    restore_checkpoint,
    restore_params_only,
)
from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    Configurable,
    Required,
    config_class,
    did_you_mean,
    maybe_instantiate,
)
from moelib.core.config_text import text_lines
from moelib.core.errors import UserError
from moelib.core.tree import Nested
from moelib.huggingface import pretrained
from moelib.layers.adapter import is_adapter
from moelib.runs.course import INIT_FROM
from moelib.runs.folder import RunFolder
from moelib.runtime import storage
from moelib.runtime.processes import on_process_0
from moelib.train.state import TrainerState, restart_learner
from moelib.train.upcycle import Upcycle, sharding_of_dense


class Initial(NamedTuple):
    """State of a run before its first step."""

    state: TrainerState
    input: dict[str, Any] | None  # Position in the data as the record has it; None for the first.
    origin: dict[str, Any]  # Where the state is from, for the log and the records of the run.


class InitFrom(Configurable):
    """Reads the state that a new run starts from, on any mesh."""

    @config_class
    class Config(Configurable.Config):
        # Folder of a run, with its newest checkpoint, or that of "@STEP" or "@best" after it; or
        # the folder of a Hugging Face model.
        run: Required[str] = REQUIRED
        # "params": the parameters, as evaluations use them, for a run from step 0 with a new state
        # of the optimizer and all its data. "state": step, optimizer and random key too, for other
        # data. "all": the position in the data too.
        state: Literal["params", "state", "all"] = "params"
        # Rules "regex -> replacement" for paths of parameters there that have other names here;
        # "regex ->" drops them, and "-> regex" keeps the initial values of parameters here. The
        # first match wins; parameters without one have the same path in both runs.
        rules: Sequence[str] = ()
        # Makes experts of the feed-forward layers of a run of a dense model; None copies layers.
        upcycle: Upcycle.Config | None = None
        # Settings of a Hugging Face model's config.json that are known to change nothing.
        ignore_settings: Sequence[str] = ()

    def earlier_step(self, events: Sequence[Mapping[str, Any]]) -> int | None:
        """Returns the step that an earlier start of this run chose, by its log; None without one.

        A run that was killed before its first checkpoint begins again from the same state.
        """
        folder, at = self._named()
        if at.isdigit():
            return None
        chosen = [x["step"] for x in events if x["event"] == INIT_FROM and x["run"] == folder]
        return chosen[-1] if chosen else None

    @property
    def folder(self) -> str:
        """The absolute folder of the weights."""
        return self._named()[0]

    def _named(self) -> tuple[str, str]:
        """Returns the absolute folder, and "", "best" or a step."""
        folder, _, at = self.config.run.rpartition("@")
        if not folder or not re.fullmatch(r"\d+|best", at):
            folder, at = self.config.run, ""
        return storage.absolute(folder), at

    def start(self, state: TrainerState, model: Any, learner: Any, *, step: int | None) -> Initial:
        """Returns the start of a run in place of its initial state, whose arrays are deleted.

        `step` is that of an earlier call for the same run, which is then read again.

        Raises:
            CheckpointMismatchError: If the state is "all", and the arrays are others.
            CheckpointNotFoundError: If there is no such checkpoint.
            DamagedCheckpointError: If it cannot be read.
            UserError: If a rule matches nothing, or a parameter is missing, left over, or of
                another shape.
        """
        cfg = self.config
        folder, at = self._named()
        origin = {"run": folder, "step": step, "state": cfg.state}
        if cfg.state != "params" and (cfg.rules or cfg.upcycle is not None):
            name = "rules" if cfg.rules else "upcycle"
            raise UserError(
                f"init_from.{name} is for parameters only; set init_from.state='params'."
            )
        on_all_processes(lambda: _check_folder(cfg.run, folder), folder)
        checkpoints = RunFolder(folder).checkpoints
        if not storage.exists(checkpoints) and storage.exists(f"{folder}/{pretrained.CONFIG_FILE}"):
            if at or cfg.rules or cfg.state != "params" or cfg.upcycle is not None:
                raise UserError(
                    f"init_from.run={cfg.run!r} is no run; set it alone, or make a run of it by "
                    "`moelib convert`."
                )
            params = pretrained.replaced_parameters(state.model, folder, model, cfg.ignore_settings)
            return Initial(restart_learner(state._replace(model=params), learner), None, origin)
        if step is None:
            found = find_checkpoints(checkpoints, int(at) if at.isdigit() else None, required=True)
            step = origin["step"] = max(found) if at != "best" else _best(checkpoints, max(found))
        path = step_path(checkpoints, step)
        if cfg.state != "params":
            target = _targets(state)
            jax.tree.map(lambda x: x.delete(), state)
            restored = restore_checkpoint(path, target)
            position = restored.record.input if cfg.state == "all" else None
            return Initial(restored.state, position, origin)
        record = on_all_processes(functools.partial(CheckpointRecord.read, path), path)
        params = self._parameters(state.model, record, checkpoints, model)
        return Initial(restart_learner(state._replace(model=params), learner), None, origin)

    def _parameters(
        self, initial: Nested, record: CheckpointRecord, checkpoints: str, model: Any
    ) -> Nested:
        own, run = tree.by_path(initial), self.config.run
        saved = {
            name.removeprefix("model/"): array
            for name, array in record.arrays.items()
            if name.startswith("model/")
        }
        upcycle = maybe_instantiate(self.config.upcycle)
        names, experts = self._names(saved.keys(), own.keys(), upcycle)
        targets = {
            there: _target(own[here], saved[there], here, run) for here, there in names.items()
        }
        if upcycle is not None:
            arrays = {here: saved[there] for here, there in experts.items()}
            shapes = {here: jax.ShapeDtypeStruct(x[1], x[0]) for here, x in arrays.items()}
            upcycle.check_sizes(shapes, own)
        for here in names:
            own[here].delete()
        for here, there in experts.items():
            dtype, shape = saved[there]
            split = sharding_of_dense(here, own[here])
            targets[there] = jax.ShapeDtypeStruct(shape, dtype, sharding=split)
        restored = restore_params_only(
            checkpoints, tree.unflatten(targets), step=record.step, partial=True
        )
        found = tree.by_path(restored.state)
        new = {
            here: jax.device_put(found[there].astype(own[here].dtype), own[here].sharding)
            for here, there in names.items()
        }
        if upcycle is not None:
            dense = {here: found[there] for here, there in experts.items()}
            new |= upcycle.experts(dense, own, model)
        return tree.map_by_path(new.get, initial)

    def _names(
        self, there: Collection[str], here: Collection[str], upcycle: Upcycle | None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Returns {path here: path there} of parameters that are copied, and of experts."""
        rules, run = self.config.rules, self.config.run
        if upcycle is None:
            return sources(there, here, rules, run), {}
        dense = upcycle.dense_names(here, _names_here(there, rules))
        layers = tuple(path.partition("experts/")[0] for path in dense)
        known = [path for path in here if not path.startswith(layers)]
        names = sources(there, [*known, *dense.values()], rules, run)
        return {path: names[path] for path in known if path in names}, {
            path: names[name] for path, name in dense.items()
        }


def sources(
    there: Collection[str], here: Collection[str], rules: Sequence[str], run: str
) -> dict[str, str]:
    """Returns {path of a parameter here: its path there}, without those of initial values.

    Args:
        there: Paths of the parameters of the other run.
        here: Paths of the parameters of this run. Adapters that the other run lacks start anew.
        rules: Rules of `InitFrom.Config`.
        run: The other run, for errors.

    Raises:
        UserError: If a rule matches nothing, or a parameter is missing, left over, or twice there.
    """
    of_there, of_here = _parsed(rules)
    names: dict[str, str] = {}
    used = set()
    for path in there:
        rule, name = _renamed(path, of_there)
        used.add(rule)
        if name in names:
            raise UserError(f"init_from: {names[name]!r} and {path!r} of {run} are both {name!r}.")
        if name:
            names[name] = path
    kept = {path: rule for path in here for rule, p in of_here if p.fullmatch(path)}
    if unused := [rule for rule in rules if rule not in used | set(kept.values())]:
        names_of_both = did_you_mean(unused[0].partition("->")[0].strip(), there)
        raise UserError(
            f"init_from.rules has {unused[0]!r}, which matches no parameter; {names_of_both}"
        )
    if both := [name for name in names if name in kept]:
        raise UserError(
            f"init_from.rules: {kept[both[0]]!r} keeps the initial values of {both[0]!r}, which "
            f"{run} has as {names[both[0]]!r}; drop it there by '{re.escape(names[both[0]])} ->'."
        )
    if extra := [name for name in names if name not in here]:
        nearest = did_you_mean(extra[0], set(here) - {extra[0]})
        raise UserError(
            f"init_from: {run} has a parameter {names[extra[0]]!r}, which is none of this run; "
            f"{nearest} Rename it by a rule 'regex -> replacement', or drop it by 'regex ->'."
        )
    given = {*names, *kept}
    if missing := [name for name in here if name not in given and not is_adapter(name)]:
        nearest = did_you_mean(missing[0], set(there) - {missing[0]})
        raise UserError(
            f"init_from: {run} has no parameter {missing[0]!r}; {nearest} "
            "Rename one by a rule 'regex -> replacement', or keep initial values by '-> regex'."
        )
    return names


def _names_here(there: Collection[str], rules: Sequence[str]) -> set[str]:
    """Returns the paths that the parameters of another run have here."""
    of_there, _ = _parsed(rules)
    return {_renamed(path, of_there)[1] for path in there}


def _renamed(path: str, rules: Sequence[tuple[str, re.Pattern[str], str]]) -> tuple[str, str]:
    """Returns the first rule that matches, or "", and the new path."""
    for rule, pattern, new in rules:
        if found := pattern.fullmatch(path):
            try:
                return rule, found.expand(new)
            except (re.error, IndexError) as error:
                raise UserError(f"init_from.rules has {rule!r}: {error}; correct it.") from None
    return "", path


def _parsed(
    rules: Sequence[str],
) -> tuple[list[tuple[str, re.Pattern[str], str]], list[tuple[str, re.Pattern[str]]]]:
    """Returns (rule, pattern, replacement) of paths there, and (rule, pattern) of paths here."""
    there, here = [], []
    for rule in rules:
        pattern, arrow, new = (part.strip() for part in rule.partition("->"))
        try:
            if pattern and arrow:
                there.append((rule, re.compile(pattern), new))
            else:
                here.append((rule, re.compile(new)))
        except re.error as error:
            raise UserError(f"init_from.rules has {rule!r}: {error}; correct the regex.") from None
        if not arrow or not (pattern or new):
            raise UserError(f"init_from.rules has {rule!r}; set 'regex -> replacement'.")
    return there, here


def _target(own: jax.Array, saved: Any, here: str, run: str) -> jax.ShapeDtypeStruct:
    dtype, shape = saved
    if list(own.shape) != shape:
        raise UserError(
            f"init_from: {here!r} is {shape} in {run}, and {list(own.shape)} in this run; set the "
            "same sizes, or drop it there and keep its initial values here."
        )
    return jax.ShapeDtypeStruct(own.shape, dtype, sharding=own.sharding)


def _targets(arrays: Any) -> Any:
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(struct, arrays)


def _best(checkpoints: str, newest: int) -> int:
    """Returns the step with the best metric of the run, by the config of its newest checkpoint."""

    def find() -> tuple[str | None, int | None]:
        values = text_lines(CheckpointRecord.read(step_path(checkpoints, newest)).config)
        metric = ast.literal_eval(values.get("checkpointer.best_metric", "None"))
        mode = ast.literal_eval(values.get("checkpointer.best_mode", "'min'"))
        return metric, metric and best_step(checkpoints, metric, mode)

    metric, best = on_process_0(find)
    if best is None:
        raise UserError(
            f"init_from: no checkpoint in {checkpoints} has the metric checkpointer.best_metric, "
            f"{metric}; set @STEP instead of @best."
        )
    return best


def _check_folder(name: str, folder: str) -> None:
    if not storage.is_remote(folder) and not os.path.isdir(folder):
        hint = pretrained.hint_of_hub(name) or " Name a run, or a Hugging Face model."
        raise CheckpointNotFoundError(
            f"init_from.run (--init_from) is {name!r}: there is no folder {folder}.{hint}"
        )
