"""The first minutes on a GPU or TPU, in one command: `python -m benchmarks.first_hour`.

    kernels     each kernel at the shapes of real models, compared with its definition
    attention   both passes, by each backend, beside the limits of the device
    gmm         grouped matmuls of experts, both passes
    loss        head and cross-entropy, both passes
    step        a training step of a Mixture-of-Experts model
    train       30 steps of a model of 0.5B parameters, and the estimate of `moelib plan`

Each part runs in a process of its own with a time limit, at most 8 minutes in all. A part that
fails or takes too long is a line of the report, with what it found until then. Writes
`first_hour.json` and `first_hour.md`. cuDNN and tokamax are measured too where they are installed.

The limit of a case is the longer of its FLOPs at the peak rate and of the bytes of its arguments
and results at the peak bandwidth.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.sizes import Sizes
from moelib.launch import DeviceFlags
from moelib.runtime import platforms
from moelib.runtime.accelerators import ACCELERATORS, Accelerator
from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.storage import write_json
from moelib.runtime.table import Table, print_table, to_markdown

Row = dict[str, Any]

_SIZES = Sizes(
    batch_size=2,
    seq_len=4096,
    num_experts=32,
    num_experts_per_token=4,
    num_heads=32,
    num_kv_heads=4,
    vocab_size=50304,
    num_layers=6,
    dim=2048,
    hidden_dim=1024,
    dtype="bfloat16",
)
_TINY = Sizes(
    batch_size=2, seq_len=64, num_experts=4, num_heads=2, num_kv_heads=1, vocab_size=64,
    num_layers=1, dim=128, hidden_dim=64,
)  # fmt: skip
_CONFIG = "experiments.flame_moe", "flame-moe-115m-459m"
_NUM_STEPS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    folder: str = flag("runs/first_hour", "Folder of the report.")
    only: tuple[str, ...] = flag((), "Part to run, by default all; repeatable.")
    tiny: bool = flag(False, "Whether sizes are tiny, to try the command on a CPU.")
    in_process: bool = flag(False, "Whether the part of --only runs in this process.")


# -- Parts -----------------------------------------------------------------------------------------


def kernels(flags: Flags) -> Iterator[Row]:
    """Yields a row for each call of a kernel and each backend that computes it here."""
    import jax

    from moelib.core.errors import UserError
    from moelib.kernels.backend import kernel_backends
    from moelib.kernels.check import backend_of, compare
    from moelib.train.kernel_check import calls_of

    calls = [*calls_of(_config(flags), jax.devices()), *_further_calls(flags.tiny)]
    for call in calls:
        for name in (None, *_backends(call.kernel)):
            begin, row = time.perf_counter(), {"case": str(call), "backend": name}
            try:
                with kernel_backends({call.kernel: name}):
                    row["backend"] = backend_of(call)
                    yield {**row, "verdict": "did not end"}
                    row["verdict"] = compare(call) or "right"
            except UserError as error:
                row["verdict"] = str(error)[:300]
            yield {**row, "total_seconds": time.perf_counter() - begin}


def _further_calls(tiny: bool) -> list[Any]:
    """Returns calls with options that the trained model lacks: those of gpt-oss, and FP8."""
    from moelib.kernels.backend import Call
    from moelib.kernels.flash_attention import MaskSpec, flash_attention
    from moelib.kernels.gmm import gmm_activated
    from moelib.kernels.quantized_matmul import Quantization, matmul_of_quantized
    from moelib.layers.activation import Activation

    dtype, length, width = ("float32", 64, 64) if tiny else ("bfloat16", 4096, 2880)
    spec, rows = MaskSpec(0.125, window=min(128, length // 2)), 2 * length
    qkv = [(name, (1, length, heads, 64), dtype) for name, heads in (("q", 8), ("k", 2), ("v", 2))]
    of = [("lhs", (rows, width), dtype), ("rhs", (8, 2, width, width), dtype)]
    of += [("group_sizes", (8,), "int32"), ("bias", (8, 2, width), dtype)]
    dense = [("x", (2, length, 512), dtype), ("weight", (512, 1024), dtype)]
    sinks = ("sinks", (8,), dtype)
    swiglu, scheme = Activation.SWIGLU.function, Quantization.FP8_TENSOR
    return [
        Call("flash_attention", flash_attention, (*qkv, sinks), (("spec", spec),)),
        Call("gmm", gmm_activated, tuple(of), (("activation", swiglu),)),
        Call("quantized_matmul", matmul_of_quantized, tuple(dense), (("scheme", scheme),)),
    ]


def _backends(kernel: str) -> list[str]:
    """Returns backends besides the default one that may compute a kernel on this platform."""
    import jax

    from moelib.kernels.backend import BACKENDS

    own = {"gpu": ("gpu", "cudnn", "float8"), "tpu": ("tpu",)}.get(jax.default_backend(), ())
    return [name for name in BACKENDS[kernel] if name in own]


def attention(flags: Flags) -> Iterator[Row]:
    """Yields a row for each form of causal attention."""
    import jax

    from benchmarks.cases import attention_case
    from moelib.kernels.backend import kernel_backends
    from moelib.layers.attention.on_mesh import MaskSpec, attend

    sizes = _sizes(flags)
    ours = functools.partial(attend, spec=MaskSpec((sizes.dim // sizes.num_heads) ** -0.5))
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    cases: dict[str, Callable[[], Any]] = {}
    for name in ("default", *_backends("flash_attention")):
        cases[name] = functools.partial(attention_case, sizes, ours, sizes.seq_len)
    if jax.default_backend() == "gpu":
        cudnn = functools.partial(plain, implementation="cudnn")
        cases["jax.nn, cuDNN"] = functools.partial(attention_case, sizes, cudnn, sizes.seq_len)
    if tokamax := _tokamax():
        other = functools.partial(tokamax.dot_product_attention, is_causal=True)
        cases["tokamax"] = functools.partial(attention_case, sizes, other, sizes.seq_len)
    for name, build in cases.items():
        chosen = {"flash_attention": name} if name in _backends("flash_attention") else {}
        with kernel_backends(chosen):
            yield from _measured(name, build)


def gmm(flags: Flags) -> Iterator[Row]:
    """Yields rows for the experts of a layer, and for one grouped matmul."""
    import jax
    import jax.numpy as jnp

    from benchmarks.cases import case, gmm_cases
    from moelib.kernels.gmm import gmm as ours

    sizes = _sizes(flags)
    yield from _measured(
        "experts", lambda: gmm_cases(sizes, "learned", only=("grouped",))["grouped"]
    )
    rows, groups = sizes.num_tokens * sizes.num_experts_per_token, sizes.num_experts
    lhs, rhs = (
        jax.random.normal(jax.random.key(0), shape, sizes.dtype)
        for shape in ((rows, sizes.dim), (groups, sizes.dim, sizes.hidden_dim))
    )
    counts = jnp.full(groups, rows // groups, jnp.int32)
    flops = 3 * 2.0 * rows * sizes.dim * sizes.hidden_dim
    forms: dict[str, Callable[..., Any]] = {"gmm": ours, "lax.ragged_dot": jax.lax.ragged_dot}
    if tokamax := _tokamax():
        forms["tokamax.ragged_dot"] = tokamax.ragged_dot
    for name, form in forms.items():
        run = lambda lhs, rhs, form=form: jnp.sum(jnp.square(form(lhs, rhs, counts)))
        build = functools.partial(case, jax.grad(run, (0, 1)), (lhs, rhs), flops, rows)
        yield from _measured(name, build)


def loss(flags: Flags) -> Iterator[Row]:
    """Yields a row for head and cross-entropy."""
    from benchmarks.cases import loss_cases

    sizes = _sizes(flags)
    yield from _measured("loss", lambda: loss_cases(sizes, "learned", only=("loss",))["loss"])


def step(flags: Flags) -> Iterator[Row]:
    """Yields a row for a training step."""
    from benchmarks.cases import step_case

    sizes = _sizes(flags)
    yield from _measured("step", lambda: step_case(sizes, "learned")["step"])


def train(flags: Flags) -> Iterator[Row]:
    """Yields a row for a run, and one for the estimate of its step."""
    import statistics

    import jax

    from moelib.core.errors import UserError
    from moelib.runs.metrics_file import read_metrics
    from moelib.tasks.fit import fit

    cfg, names = _config(flags), ["loss", "mfu", "tokens_per_second"]
    begin = time.perf_counter()
    fit(cfg)
    seconds = time.perf_counter() - begin
    written = list(read_metrics(cfg.dir, names))
    losses = [x["loss"] for x in written if "loss" in x]
    row = {
        "case": f"{len(losses)} steps",
        "total_seconds": seconds,
        "losses": [losses[0], losses[-1]],
    }
    for name in names[1:]:
        if found := [x[name] for x in written[len(written) // 2 :] if name in x]:
            row[name] = statistics.median(found)
    yield row
    accelerator = _accelerator(jax.devices()[0].device_kind)
    if accelerator is None:
        return
    from moelib.planning.plan import plan

    topology = f"{accelerator.name}:1x1"
    try:
        estimate = plan(cfg, topology, current_mesh=True, name=_CONFIG[1]).rows[0]
    except UserError as error:
        yield {"case": f"plan of {topology}", "verdict": str(error)}
    else:
        yield {"case": f"plan of {topology}", "mfu": list(estimate.mfu)}


PARTS: dict[str, tuple[Callable[[Flags], Iterator[Row]], float]] = {  # And its limit in seconds.
    "kernels": (kernels, 130.0),
    "attention": (attention, 70.0),
    "gmm": (gmm, 50.0),
    "loss": (loss, 30.0),
    "step": (step, 60.0),
    "train": (train, 130.0),
}


# -- Measurements ----------------------------------------------------------------------------------


def _tokamax() -> Any:
    """Returns the library tokamax, or None where it is not installed."""
    found = importlib.util.find_spec("tokamax")
    return importlib.import_module("tokamax") if found else None


def _sizes(flags: Flags) -> Sizes:
    return _TINY if flags.tiny else _SIZES


def _config(flags: Flags) -> Any:
    """Returns the config of the run, on data that it makes itself, on one device."""
    from benchmarks.cases import learner_config
    from moelib.data.batches.synthetic import SyntheticInput
    from moelib.launch import load_config
    from moelib.parallel.mesh import mesh_shape_from_axes
    from moelib.verify.shrink import shrink

    cfg = load_config(*_CONFIG)
    if flags.tiny:
        cfg, _ = shrink(cfg, 1)
    vocab, length = cfg.model.vocab_size, cfg.input.seq_len
    data = SyntheticInput.default_config().set(
        global_batch_size=2 if flags.tiny else 8, seq_len=length, vocab_size=vocab
    )
    return cfg.set(
        input=data,
        learner=learner_config(),
        dir=os.path.join(flags.folder, f"run-{time.time():.0f}"),
        max_step=8 if flags.tiny else _NUM_STEPS,
        mesh_shape=mesh_shape_from_axes(data=-1),
        num_microbatches=1,
        checkpointer=None,
        evalers={},
        watchers={},
        log_every_n_steps=1,
    )


def _accelerator(device_kind: str) -> Accelerator | None:
    found = [x for x in ACCELERATORS.values() if x.device_kind == device_kind]
    return found[0] if found else None


def _measured(name: str, build: Callable[[], Any], repeats: int = 5) -> Iterator[Row]:
    """Yields the times of a case, with its limits; the reason if it fails."""
    import jax

    from benchmarks.measure import interleaved

    row: Row = {"case": name}
    try:
        begin = time.perf_counter()
        case = build()
        row["compile_seconds"] = time.perf_counter() - begin
        times = interleaved({name: case.run}, repeats)[name]
    except Exception as error:
        yield {**row, "verdict": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        return
    memory = case.compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
    row |= {"seconds": min(times), "flops": case.flops, "bytes": num_bytes, "tokens": case.tokens}
    if accelerator := _accelerator(jax.devices()[0].device_kind):
        limits = {
            "FLOPs": case.flops / accelerator.flops_per_second,
            "HBM": num_bytes / accelerator.hbm_bytes_per_second,
        }
        row["limit"] = max(limits, key=limits.__getitem__)
        row["limit_seconds"] = limits[row["limit"]]
    yield row


# -- The command -----------------------------------------------------------------------------------


def run_part(flags: Flags, name: str) -> None:
    """Runs a part in this process; what it has found is always in its file."""
    flags.set_up()
    import jax

    device = jax.devices()[0]
    rows: list[Row] = []
    part, _ = PARTS[name]
    for row in part(flags):
        if rows and rows[-1].get("verdict") == "did not end":
            rows.pop()
        rows.append(row)
        write_json(_file(flags, name), {"device": device.device_kind, "rows": rows})


def _file(flags: Flags, name: str) -> str:
    return os.path.join(flags.folder, f"part-{name}.json")


def _in_process_of_its_own(flags: Flags, name: str) -> Row:
    """Returns the rows of a part, its seconds, and the problem, if there is one."""
    _, limit = PARTS[name]
    command = [sys.executable, "-m", "benchmarks.first_hour", f"--only={name}", "--in_process"]
    command += [f"--folder={flags.folder}", *(["--tiny"] if flags.tiny else [])]
    command += [f"--jax_backend={flags.jax_backend}"] if flags.jax_backend else []
    pathlib.Path(_file(flags, name)).unlink(missing_ok=True)
    log = os.path.join(flags.folder, f"part-{name}.log")
    begin = time.perf_counter()
    with open(log, "wb") as out:
        seconds = None if flags.tiny else limit
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            problem = f"exit status {done.returncode}; see {log}" if done.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"stopped after {limit:g} s"
    found: Row = {"device": None, "rows": []}
    if os.path.exists(_file(flags, name)):
        found = json.loads(pathlib.Path(_file(flags, name)).read_text(encoding="utf-8"))
    return {**found, "seconds": time.perf_counter() - begin, "problem": problem}


_COLUMNS: dict[str, Callable[[Row], str]] = {  # Of a table; one without a value is not shown.
    "case": lambda row: row["case"],
    "backend": lambda row: row["backend"] or "default",
    "verdict": lambda row: row["verdict"],
    "s, compilation included>": lambda row: f"{row['total_seconds']:.1f}",
    "ms>": lambda row: f"{1e3 * row['seconds']:,.2f}",
    "TFLOP/s>": lambda row: f"{row['flops'] / row['seconds'] / 1e12:,.1f}",
    "tokens/s>": lambda row: f"{row.get('tokens_per_second') or _rate(row):,.0f}",
    "limit, ms>": lambda row: f"{1e3 * row['limit_seconds']:,.2f} ({row['limit']})",
    "of the limit>": lambda row: f"{row['limit_seconds'] / row['seconds']:.0%}",
    "MFU>": lambda row: _share(row["mfu"]),
    "losses>": lambda row: " to ".join(f"{x:.3f}" for x in row["losses"]),
}


def _rate(row: Row) -> float:
    return row["tokens"] / row["seconds"]


def _share(value: Any) -> str:
    return " to ".join(f"{x:.1%}" for x in (value if isinstance(value, list) else [value]))


def _cell(write: Callable[[Row], str], row: Row) -> str:
    try:
        return write(row)
    except (KeyError, ZeroDivisionError):
        return "-"


def tables(report: dict[str, Row]) -> list[Table]:
    """Returns a table for each part."""
    shown = []
    for name, part in report.items():
        cells = {
            title: [_cell(write, row) for row in part["rows"]] for title, write in _COLUMNS.items()
        }
        cells = {title: column for title, column in cells.items() if {*column} - {"-"}}
        note = f"{part['seconds']:.0f} s on {part['device'] or 'no device'}"
        note += f"; {part['problem']}." if part["problem"] else "."
        shown.append(Table(name, list(cells), list(zip(*cells.values(), strict=True)), [note]))
    return shown


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Runs the parts, and writes and prints the report."""
    no_arguments(arguments, Flags)
    os.makedirs(flags.folder, exist_ok=True)
    from moelib.core.config import did_you_mean
    from moelib.core.errors import UsageError

    names = flags.only or tuple(PARTS)
    for name in names:
        if name not in PARTS:
            raise UsageError(f"--only={name}: there is no such part; {did_you_mean(name, PARTS)}")
    if flags.in_process:
        run_part(flags, names[0])
        return
    report: dict[str, Row] = {}
    pages = ["# The first minutes on this device"]
    for name in names:
        print(f"{name}: at most {PARTS[name][1]:g} s", file=sys.stderr)
        report[name] = _in_process_of_its_own(flags, name)
        write_json(os.path.join(flags.folder, "first_hour.json"), report)
        (table,) = tables({name: report[name]})
        print_table(table)
        pages += [f"## {name}", to_markdown(table)]
        page = pathlib.Path(flags.folder, "first_hour.md")
        page.write_text("\n\n".join(pages) + "\n", encoding="utf-8")


if __name__ == "__main__":
    platforms.hide_absent_tpus()
    sys.exit(run_command("benchmarks.first_hour", Flags, run, sys.argv[1:], __doc__ or ""))
