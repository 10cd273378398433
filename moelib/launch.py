"""Named configs from a command line: flags, the config they describe, and its training run.

    python -m moelib.launch --module=M --config=C --trainer_dir=D

trains, as `moelib train` does.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from moelib.core import config_text, trusted_code
from moelib.core.config import ConfigBase, config_origin, get_named_trainer_config
from moelib.core.config_modifier import apply_mesh_rule
from moelib.core.config_types import check_parameters, map_elements
from moelib.core.errors import UsageError, UserError, refuse_single_strings
from moelib.core.module_names import find_module
from moelib.runs import phases
from moelib.runtime import platforms, simulated, storage
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.compilation_cache import use_compilation_cache

if TYPE_CHECKING:
    from moelib.tasks.fit import FitResult

logger = logging.getLogger(__name__)

# -- Flags ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """Flags that name and change a config."""

    module: str | None = flag(None, "Module that defines named_trainer_configs().", short="m")
    config: str | None = flag(None, "Name of a config of the module.", short="c")
    set: tuple[str, ...] = flag(
        (), "Field of the config and its value, such as learner.ema.decay=0.999."
    )
    data_dir: str | None = flag(None, "Folder that replaces {data_dir} in the config's paths.")
    max_step: int | None = flag(None, "Number of steps to train for.", lower_bound=1)
    mesh_selector: str | None = flag(
        None, "Name of the hardware, which selects the first mesh rule that matches it."
    )

    def set_first(self, cfg: Any) -> None:
        """Sets what `--set` may then change."""

    def load(self) -> Any:
        """Returns the config that the flags describe."""
        return load_config(
            self.module,
            self.config,
            set_first=self.set_first,
            sets=self.set,
            data_dir=self.data_dir,
            max_step=self.max_step,
            mesh_selector=self.mesh_selector,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Flags that select devices."""

    jax_backend: Literal["cpu", "gpu", "tpu"] | None = flag(
        None, "Platform to compute on; by default the fastest one found."
    )
    num_cpu_devices: int | None = flag(
        None, "Number of devices to simulate on the CPU.", lower_bound=1
    )
    distributed_coordinator: str | None = flag(None, "Address of process 0, as host:port.")
    num_processes: int | None = flag(None, "Number of processes of the job.", lower_bound=1)
    process_id: int | None = flag(None, "Index of this process, from 0.", lower_bound=0)
    heartbeat_timeout_seconds: int = flag(
        10, "Seconds without a heartbeat of a process before the others end.", lower_bound=1
    )
    start_timeout_seconds: int = flag(
        300, "Seconds that a process waits for the others to start.", lower_bound=1
    )

    def set_up(self, before_devices: Callable[[], None] | None = None) -> None:
        """Selects the devices and the compilation cache. Call it before anything computes.

        Args:
            before_devices: Called before a device is opened, unless there are several processes.

        Raises:
            UsageError: If only some flags of a distributed job are set, or are wrong, or the
                platform is missing.
            UserError: If another process does not start.
        """
        from moelib.runtime.distributed import initialize_distributed

        if self.jax_backend is not None:
            platforms.use_backend(self.jax_backend)
        if self.num_cpu_devices is not None:
            simulated.simulate_devices(self.num_cpu_devices)
        job = initialize_distributed(
            self.distributed_coordinator,
            self.num_processes,
            self.process_id,
            start_timeout_seconds=self.start_timeout_seconds,
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
        )
        if job is None:
            # Processes that find different programs in their caches would wait for each other.
            use_compilation_cache()
            if before_devices is not None:
                before_devices()
        if self.jax_backend is not None:
            platforms.check_backend(self.jax_backend)
        elif os.environ.get("JAX_PLATFORMS"):
            platforms.check_devices(f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}")


MODEL_SHARDS = "Devices for tensor parallelism, with --mesh=auto."


def mesh_of_flags(cfg: Any, mesh: str | None, model_shards: int | None) -> str | None:
    """Returns the mesh of --mesh and --model_shards; "auto" turns automatic shardings on.

    Raises:
        UsageError: If --model_shards is set without --mesh=auto.
    """
    if mesh != "auto":
        if model_shards is not None:
            raise UsageError(f"--model_shards={model_shards} requires --mesh=auto.")
        return mesh
    with config_origin("--mesh=auto"):
        cfg.set(auto_sharding=True)
    return f"fsdp=-1,model={model_shards or 1}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainFlags(ConfigFlags, DeviceFlags):
    """Flags of a training run."""

    trainer_dir: str | None = flag(None, "Folder of the run, which an existing run resumes from.")
    accept_changes: tuple[str, ...] = flag(
        (),
        "Changes to a run: schedule, train_dtype, accumulation, config, data, tokenizer.",
        split=True,
    )
    trainer_prng_seed: int | None = flag(None, "Seed of initial parameters and dropout.")
    mesh: str | None = flag(
        None, "Sizes of mesh axes, such as fsdp=4,expert=2; auto: FSDP, and --model_shards."
    )
    model_shards: int | None = flag(None, MODEL_SHARDS, lower_bound=1)
    dump: str | None = flag(None, "Folder for the compiled step and its report.")
    stopped_status: int = flag(
        0, "Exit status after SIGTERM, such as 75, so that a supervisor starts the run again."
    )
    init_from: str | None = flag(
        None, "Run, RUN@STEP or RUN@best, or Hugging Face model, that a new run starts from."
    )
    init_from_state: Literal["params", "state", "all"] | None = flag(
        None, "Whether it starts from the parameters, also from step and optimizer, or from all."
    )
    init_from_rules: tuple[str, ...] = flag(
        (), "Parameters with other names there: 'regex -> replacement', 'dropped ->', '-> new'."
    )
    rewind_to: int | None = flag(
        None, "Step whose checkpoint the run resumes from, once; later ones are moved aside."
    )
    skip_batches: tuple[str, ...] = flag(
        (), "Range first:stop of batches, counted from 0, that are never trained on."
    )
    skip_kernel_check: bool | None = flag(
        None, "Whether to start without checking the accelerator's kernels against references."
    )
    skip_checksums: bool | None = flag(
        None, "Whether to resume without comparing the checkpoint with its checksums."
    )
    status_port: int | None = flag(
        None, "Port of a page that shows the run; 0 for any free one.", lower_bound=0
    )
    status_host: str | None = flag(
        None, "Address to serve it on instead of 127.0.0.1; others can then read the run."
    )

    def set_first(self, cfg: Any) -> None:
        """Sets `init_from`, which `--set` may then change."""
        if self.init_from is not None:
            from moelib.train.init_from import InitFrom

            with config_origin("--init_from"):
                cfg.init_from = InitFrom.default_config().set(run=self.init_from)

    def load(self) -> Any:
        """Returns the config that the flags describe."""
        cfg = super().load()
        if mesh := mesh_of_flags(cfg, self.mesh, self.model_shards):
            set_field(cfg, f"mesh_shape={mesh}", flag="--mesh")
        if cfg.init_from is None and (self.init_from_state or self.init_from_rules):
            raise UsageError("--init_from_state and --init_from_rules require --init_from.")
        fields = {
            "trainer_dir": "dir",
            "init_from_state": "init_from.state",
            "init_from_rules": "init_from.rules",
            "trainer_prng_seed": "prng_seed",
            "skip_kernel_check": "skip_kernel_check",
            "skip_checksums": "checkpointer.skip_checksums",
            "accept_changes": "accept_changes",
            "rewind_to": "rewind_to",
            "skip_batches": "skip_batches",
        }
        if self.accept_changes:
            from moelib.runs.identity import check_accepted

            check_accepted(self.accept_changes)
        for name, field in fields.items():
            if (value := getattr(self, name)) not in (None, ()):
                with config_origin(f"--{name}"):
                    config_text.set_at(cfg, field, value)
        return cfg

    @contextlib.contextmanager
    def status_page(self, directory: str) -> Iterator[None]:
        """Serves the status page of a run during the body, if a port is set, from process 0.

        A port that is in use is a warning, as a run that is started again must not fail by it.

        Raises:
            UsageError: If there is a host, but no port.
        """
        if self.status_host is not None and self.status_port is None:
            raise UsageError(f"--status_host={self.status_host} requires --status_port.")
        import jax

        with contextlib.ExitStack() as stack:
            if self.status_port is not None and jax.process_index() == 0:
                from moelib.operations import status_page

                page = status_page.status_page(directory, self.status_port, self.status_host)
                try:
                    print(f"status page: {stack.enter_context(page)}", file=sys.stderr)
                except UserError as error:
                    logger.warning("NO STATUS PAGE, training goes on: --status_port: %s", error)
            yield


# -- Configs -------------------------------------------------------------------------------------


def import_module(name: str) -> types.ModuleType:
    """Returns the module `name`, or else `experiments.<name>`; the current folder is searched too.

    The experiments of an installed moelib are found under the same names. An error inside the
    module is raised unchanged, except for its syntax and a package that is missing. Config files
    may then name the code of its package.

    Raises:
        UsageError: If it is the path of a file, there is no such module, it is no Python, or a
            package that it imports is missing.
    """
    if name.endswith(".py") or not all(map(str.isidentifier, name.split("."))):
        module = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        valid = re.sub(r"(^|\.)(?=\d)", r"\1_", re.sub(r"[^\w.]", "_", module))
        pass_it = f"pass one such as --module={valid}, in the folder that contains it"
        if valid != module:
            pass_it = f"name it {valid!r} in its folder, and pass --module={valid}"
        raise UsageError(f"--module={name} is no name of a module; {pass_it}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    own = f"experiments.{name}"
    try:  # Packages around a module are imported to find it.
        found = find_module(name) or find_module(own)
        module = None if found is None else importlib.import_module(found)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise UsageError(f"--module={name}: {where}: {error.msg}; correct it.") from error
    except ModuleNotFoundError as error:
        frames = traceback.extract_tb(error.__traceback__)
        of_user = [each for each in frames[1:] if "importlib" not in each.filename]
        if error.name is None or not of_user:
            raise
        raise UsageError(
            f"--module={name}: {of_user[-1].filename}:{of_user[-1].lineno} imports {error.name!r}, "
            "which is not installed here; install it, or correct the name."
        ) from error
    if module is None:
        raise UsageError(
            f"--module={name}: there is no module {name!r} or {own!r}, neither installed nor in "
            f"{os.getcwd()}; change to the folder that contains it."
        )
    trusted_code.allow_module(module)
    return module


def load_config(
    module: str | None,
    name: str | None,
    *,
    set_first: Callable[[Any], None] | None = None,
    sets: Sequence[str] = (),
    data_dir: str | None = None,
    max_step: int | None = None,
    mesh_selector: str | None = None,
) -> Any:
    """Returns a named trainer config, changed as the flags demand.

    Args:
        module: Name of a module with `named_trainer_configs()`.
        name: Name of the config.
        set_first: Changes the config before `sets` do.
        sets: Changes "path=value".
        data_dir: Replacement for `{data_dir}` in paths.
        max_step: Number of steps.
        mesh_selector: Name of the hardware, for the config's mesh rules.

    The settings of a phase that the config names, as by `phase=NAME`, are applied.

    Raises:
        UsageError: If `module` or `name` is missing, or no mesh rule matches.
        InvalidConfigNameError: If there is no such config; the message has the nearest name.
    """
    refuse_single_strings(sets=sets)
    if not module or not name:
        raise UsageError(
            "--module and --config are required; `moelib config --module=M` lists the configs of M."
        )
    function = get_named_trainer_config(name, config_module=import_module(module))
    try:
        check_parameters(f"--config={name}: its function in {module}", function)
    except UserError as error:
        raise UsageError(str(error)) from None
    cfg = function()
    if not isinstance(cfg, ConfigBase) or "max_step" not in cfg:
        raise UsageError(
            f"--config={name}: its function in {module} returned {cfg!r:.80}; return a trainer's "
            "config."
        )
    if mesh_selector is not None:
        cfg = select_mesh(cfg, mesh_selector)
    if max_step is not None:
        config_text.set_from_text(cfg, f"max_step={max_step}", flag="--max_step")
    if set_first is not None:
        set_first(cfg)
    for assignment in sets:
        set_field(cfg, assignment)
    if data_dir is not None:
        set_data_dir(cfg, data_dir)
    return phases.applied(cfg) if "phase" in cfg else cfg


def set_field(cfg: ConfigBase, assignment: str, *, flag: str = "--set") -> None:
    """Sets a field from "path=value"; a mesh also from "mesh_shape=fsdp=4,expert=2".

    Raises:
        UnknownFieldError: If there is no such field.
        InvalidConfigValueError: If the text is not a value of the field.
        UserError: If a mesh has unknown axes or wrong sizes.
    """
    path, equals, text = (part.strip() for part in assignment.partition("="))
    is_mesh = path == "mesh_shape" and equals
    if not is_mesh or re.match(r"[(\[]|.*:", text):  # A tuple, or the name of a value.
        config_text.set_from_text(cfg, assignment, flag=flag)
        return
    from moelib.parallel.mesh import parse_mesh

    with config_origin(f"{flag} {assignment}"):
        cfg.set(mesh_shape=parse_mesh(text, axis_names=cfg.mesh_axis_names, field="mesh_shape"))


def select_mesh(cfg: Any, selector: str) -> Any:
    """Returns the config with the first of its `mesh_rules` that matches the selector applied.

    Raises:
        UserError: If no rule matches, or a modifier returns None.
    """
    rules = cfg.mesh_rules or []
    for pattern, rule in rules:
        if re.fullmatch(pattern, selector):
            with config_origin(f"--mesh_selector={selector}"):
                return apply_mesh_rule(cfg, rule)
    known = ", ".join(repr(pattern) for pattern, _ in rules) or "it has none"
    raise UsageError(f"--mesh_selector={selector}: no mesh rule of the config matches ({known}).")


def set_data_dir(cfg: ConfigBase, data_dir: str) -> None:
    """Replaces {data_dir} in every string of the config by the folder's absolute path or URL.

    A run can then be resumed and read from any folder.
    """
    folder = data_dir if "://" in data_dir else os.path.abspath(data_dir)

    def replaced(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{data_dir}", folder.rstrip("/"))
        if isinstance(value, dict):
            value = {replaced(key): element for key, element in value.items()}
        return map_elements(replaced, value)

    with config_origin(f"--data_dir={data_dir}"):
        for path, value in cfg.to_flat_dict().items():
            if "{data_dir}" in repr(value):
                config_text.set_at(cfg, path, replaced(value))


def check_data_dir(cfg: ConfigBase) -> None:
    """Raises UsageError if a path of the config still contains {data_dir}."""
    for path, value in cfg.to_flat_dict().items():
        if "{data_dir}" in repr(value):
            raise UsageError(f"{path}={value!r}: set --data_dir to the folder of the data.")


# -- Training ------------------------------------------------------------------------------------


def train(flags: TrainFlags, arguments: Sequence[str] = ()) -> "FitResult":
    """Trains the config that the flags describe, and returns the outcome of the run.

    Raises:
        UsageError: If a flag is missing or cannot be used.
    """
    no_arguments(arguments, TrainFlags)
    cfg = flags.load()
    check_data_dir(cfg)
    if not cfg.dir:
        raise UsageError("--trainer_dir is required: the folder that the run writes to.")

    def before_devices() -> None:
        from moelib.train.kernel_check import compare_before_devices

        compare_before_devices(cfg)

    flags.set_up(None if cfg.skip_kernel_check else before_devices)
    with flags.status_page(cfg.dir):
        result = fit(cfg, dump=flags.dump, name=flags.config or "step")
    if result.stopped_by == "SIGTERM" and flags.stopped_status:
        sys.exit(flags.stopped_status)
    return result


def fit(cfg: Any, *, dump: str | None = None, name: str = "step") -> "FitResult":
    """Trains a config and returns the outcome of the run.

    Args:
        cfg: The config.
        dump: Folder for the compiled step and its report.
        name: Name of the step in the report.
    """
    from moelib.tasks.fit import fit

    if dump is None:
        return fit(cfg)
    storage.require_local("dump (--dump)", dump, "copy the files afterwards")
    from moelib.planning.compiled.dump import dump_when_compiled

    trainer = cfg.instantiate(parent=None)
    dump_when_compiled(trainer, dump, name=name)
    return fit(trainer)


if __name__ == "__main__":
    platforms.hide_absent_tpus()
    sys.exit(run_command("moelib.launch", TrainFlags, train, sys.argv[1:], __doc__ or ""))
