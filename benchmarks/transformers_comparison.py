"""Training steps and generation on CPU, compared with the same model in Hugging Face transformers.

Both run alternately in one process, with as many threads as the process has cores: the Mixtral of
`step` in float32, with its AdamW, clipping and load-balance loss, and greedy text with a KV cache.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import model_config, step_case
from benchmarks.sizes import Sizes, check_sizes
from moelib.core import tree
from moelib.core.errors import UsageError
from moelib.inference.generate import Settings, generate_tokens
from moelib.runtime.table import Table

# Experts of each layer, and experts of each token, unless the flags set others.
EXPERTS = ((16, 2), (64, 8), (128, 8))
BATCH_SIZES = (1, 8, 32)  # Sequences generated together.
PROMPT_TOKENS, NEW_TOKENS = 32, 128
GENERATIONS = 5  # Measurements of each generation, of at most `repeats`.


class Times(NamedTuple):
    """Seconds of runs: of the wall clock, and of all cores."""

    wall: list[float]
    cpu: list[float]


def check(sizes: Sizes) -> None:
    """Raises UsageError if the comparison cannot run."""
    check_sizes("step", sizes, 1)
    if sizes.dtype != "float32":
        raise UsageError(f"--dtype={sizes.dtype}: transformers is compared in float32.")
    if jax.default_backend() != "cpu":
        raise UsageError("transformers is compared on CPUs: set JAX_PLATFORMS=cpu.")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'moelib[transformers]'.") from error
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{versions}, jax {jax.__version__}; {torch.get_num_threads()} thread(s)")


def compare(sizes: Sizes, repeats: int) -> Iterator[Table]:
    """Yields a table of training steps for each number of experts, and one of generation.

    Ratios above 1 are for moelib; those of medians are the median of neighboring runs.
    """
    columns = ("moelib>", "transformers>", "ratio>", "ratio of CPU time>")
    default = sizes.num_experts, sizes.num_experts_per_token
    chosen = EXPERTS if default == EXPERTS[0] else (default,)
    for num_experts, k in chosen:
        one = dataclasses.replace(sizes, num_experts=num_experts, num_experts_per_token=k)
        runs = {"moelib": step_case(one, "learned")["step"].run, "transformers": _step(one)}
        name = f"{num_experts} experts, top-{k}"
        found = list(rows(name, alternate(runs, repeats), lambda seconds: f"{1e3 * seconds:,.0f}"))
        yield Table("Training step, ms", ("model", "time", *columns), found)
    texts = []
    for batch_size in BATCH_SIZES:
        rate = lambda seconds, n=batch_size: f"{n * NEW_TOKENS / seconds:,.0f}"
        times = alternate(_generations(sizes, batch_size), min(repeats, GENERATIONS))
        texts += rows(str(batch_size), times, rate)
    yield Table("Generation, tokens per second", ("sequences", "time", *columns), texts)


def alternate(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Times]:
    """Returns the times of runs, taken alternately; the first two rounds are not counted."""
    times = {name: Times([], []) for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            if repeat >= 2:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    return times


def rows(
    name: str, times: Mapping[str, Times], shown: Callable[[float], str]
) -> Iterator[Sequence[str]]:
    """Yields a row of the least times and one of the median times."""
    ours, theirs = times["moelib"], times["transformers"]
    for statistic, pick in (("least", min), ("median", statistics.median)):
        seconds = [shown(pick(x.wall)) for x in (ours, theirs)]
        ratios = []
        for a, b in ((ours.wall, theirs.wall), (ours.cpu, theirs.cpu)):
            pairs = [y / x for x, y in zip(a, b, strict=True)]
            ratio = min(b) / min(a) if statistic == "least" else statistics.median(pairs)
            ratios.append(f"{ratio:.2f}")
        yield name, statistic, *seconds, *ratios


def _model(sizes: Sizes) -> Any:
    """Returns the model of `step` in transformers, with random parameters."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM._from_config(
        MixtralConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.dim,
            intermediate_size=sizes.hidden_dim,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            num_local_experts=sizes.num_experts,
            num_experts_per_tok=sizes.num_experts_per_token,
            output_router_logits=True,
            router_aux_loss_coef=0.01,
            max_position_embeddings=max(sizes.seq_len, PROMPT_TOKENS + NEW_TOKENS),
            tie_word_embeddings=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    specs = model_config(sizes, "learned").instantiate(parent=None)
    ours = tree.count_elements(specs.create_parameter_specs_recursively())
    theirs = sum(x.numel() for x in model.parameters())
    assert theirs == ours, f"{theirs} parameters in transformers, {ours} in moelib"
    return model


def _step(sizes: Sizes) -> Callable[[], float]:
    """Returns a training step of transformers, which returns its loss."""
    import torch

    model = _model(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, sizes.vocab_size, (sizes.batch_size, sizes.seq_len))

    def run() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def _generations(sizes: Sizes, batch_size: int) -> dict[str, Callable[[], None]]:
    """Returns greedy generations of both libraries from prompts of random tokens."""
    import torch

    theirs = _model(sizes).eval()
    ours = model_config(sizes, "learned").instantiate(parent=None)
    params = ours.initialize_parameters_recursively(jax.random.key(0))
    shape = batch_size, PROMPT_TOKENS
    prompts = np.random.default_rng(0).integers(1, sizes.vocab_size, shape)
    settings = Settings(max_new_tokens=NEW_TOKENS, temperature=0)
    ids = torch.from_numpy(prompts)

    def generate_theirs() -> None:
        with torch.no_grad():
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_router_logits=False,
            )
        assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS

    def generate_ours() -> None:
        texts = list(generate_tokens(ours, params, prompts.tolist(), settings))
        assert all(len(text) == NEW_TOKENS for text in texts)

    return {"moelib": generate_ours, "transformers": generate_theirs}
