"""Proof that a run can be read: its config is read back before the first step."""

import itertools
import re
import sys
from typing import Any, cast

from moelib.core import config_types, tree, trusted_code
from moelib.core.config_text import Line, is_plain, lines, parse
from moelib.core.errors import UserError
from moelib.runs.folder import CONFIG_FILE
from moelib.runs.identity import named

# Names that a config may only have by the rules of `trusted_code`, whatever flags a reader passes.
_ALWAYS_CHECKED = {*sys.stdlib_module_names, "moelib"}


def check_readable(cfg: Any, specs: tree.Nested) -> None:
    """Checks that another process can read the weights of a run: reads back the text of its config.

    The text names classes and functions, which that process imports: a lambda, a class of a
    notebook, or one whose module has another under its name, cannot be imported.

    Args:
        cfg: Config of the trainer.
        specs: Specs of the model's parameters in this run.

    Raises:
        UserError: If a value cannot be read back, or the model has other parameters then; names
            the field, its value and the cure.
    """
    written = list(lines(cfg, unset=False))
    for line in written:
        name, value = named(line)
        if re.match(r"[\w.]+:", name) and not is_plain(value):
            _check_name(line.path, name, value)
    back = parse(cfg.debug_string(), source=f"{CONFIG_FILE}:", trusted=True)
    for line, other in itertools.zip_longest(written, lines(back, unset=False)):
        if line is None or other is None or line[:2] != other[:2]:
            path, text = (line or cast("Line", other))[:2]
            read = "not set" if other is None else config_types.cut(f"{other.path}: {other.text}")
            raise UserError(
                f"{path} is {config_types.cut(text)}, but {CONFIG_FILE} would read {read}; set it "
                "to plain data, or describe it by config_for_function or config_for_class."
            )
    found = back.model.clone(name="model").instantiate(parent=None)
    difference = tree.mismatch(found.create_parameter_specs_recursively(), specs, dtypes=True)
    if difference is not None:
        raise UserError(
            f"model: built from {CONFIG_FILE}, {difference}; set what its parameters depend on as "
            "fields of its config."
        )


def _check_name(path: str, name: str, value: Any) -> None:
    """Raises UserError if another process does not find a value of a config by its name."""
    module = name.partition(":")[0]
    if "<" in name and module.partition(".")[0] == "optax":
        raise UserError(
            f"{path} is {config_types.cut(name)}, which has no text; set a config, such as "
            "config_for_function(optax.adam).set(learning_rate=1e-3)."
        )
    if module == "__main__" or "<" in name:
        raise UserError(
            f"{path} is {config_types.cut(name)}, which no later process can import: put it into "
            "a file of its own, outside of any function, and import it from there; or set "
            "checkpointer=None, to save nothing."
        )
    limited = module.partition(".")[0] in _ALWAYS_CHECKED
    try:
        found = (trusted_code.resolve if limited else config_types.resolve_reference)(name)
    except UserError as error:
        raise UserError(f"{path}: {error} Set a def or class of a module of your own.") from None
    if found is not value and found != value:
        raise UserError(
            f"{path} is {name}, but this name stands for {found!r:.80}: define it in its module "
            "under a name of its own."
        )
