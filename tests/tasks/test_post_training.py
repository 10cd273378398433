"""Preferences and rewards: what a run learns, what is recorded, and what is refused."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.huggingface.families import read_model
from moelib.huggingface.pretrained import save_pretrained
from moelib.tasks.fine_tuning import FineTuning
from moelib.tasks.finetune import finetune_config
from moelib.tasks.fit import fit
from moelib.tasks.rollout_input import RewardError

MODEL = {"model_type": "mixtral", "vocab_size": 264, "hidden_size": 16, "intermediate_size": 24}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a model and records."""
    root, tokenizer = tmp_path_factory.mktemp("base"), ByteTokenizer.default_config().instantiate()
    cfg = read_model(MODEL, "MODEL")[1]
    params = jax.jit(cfg.instantiate(parent=None).initialize_parameters_recursively)(
        jax.random.key(0)
    )
    save_pretrained(str(root / "model"), cfg, params, tokenizer=tokenizer)
    pairs = [
        {"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no, not {i}"} for i in range(9)
    ]
    lines = {"pairs": pairs, "prompts": [{"prompt": f"{i}?", "wanted": "e"} for i in range(5)]}
    for name, records in lines.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    return root


def settings(folder, trainer_dir, objective, **fields):
    data = folder / ("pairs.jsonl" if objective == "dpo" else "prompts.jsonl")
    base = {"max_step": 4, "batch_size": 8, "seq_len": 64, "lr": 1e-2, "dtype": "float32"}
    base |= {"chat_template": "plain", "group_size": 4, "max_new_tokens": 6, "full": True}
    if objective != "dpo":
        base["reward"] = f"{__name__}:share_of_letters"
    return FineTuning(
        model=str(folder / "model"),
        data=str(data),
        trainer_dir=str(trainer_dir),
        objective=objective,
        **base | fields,
    )


def share_of_letters(prompts, completions, wanted):
    """Returns the share of ASCII letters in each answer; a reward."""
    assert prompts[0][0]["role"] == "user"
    assert wanted == ["e"] * len(completions)
    return [sum(x.isascii() and x.isalpha() for x in text) / 3 for text in completions]


def metrics_of(settings):
    """Returns the metrics of all steps of a run."""
    fit(finetune_config(settings).set(log_every_n_steps=1))
    lines = (pathlib.Path(settings.trainer_dir) / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "loss" in (found := json.loads(line))]


@pytest.mark.parametrize("full", [True, False])
def test_preferences_begin_at_the_reference_and_are_learned(folder, tmp_path, full):
    steps = metrics_of(settings(folder, tmp_path / "run", "dpo", full=full, max_step=8))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert steps[-1]["margin"] > 1
    assert steps[-1]["accuracy"] == 1
    assert steps[-1]["loss"] < 0.6


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_rewards_rise_and_the_sampler_agrees_with_the_trainer(folder, tmp_path, objective):
    steps = metrics_of(
        settings(folder, tmp_path, objective, max_step=20, batch_size=64, lr=3e-2, max_new_tokens=3)
    )
    assert all(x["mismatch"] < 1e-5 for x in steps)
    replaced = [name for name in steps[0] if "replaced" in name]
    assert len(replaced) == 2
    assert all(x[name] < 0.01 for x in steps for name in replaced)
    print(
        "REW", [round(x["reward"], 3) for x in steps], [x["mismatch"] for x in steps][:3], replaced
    )
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.1
