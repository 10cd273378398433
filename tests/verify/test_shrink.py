"""Configs are made small, with every kind of layer and the divisors of sizes."""

import math

import jax
import numpy as np
import pytest

from experiments import flame_moe, gpt_oss, open_models
from moelib.core.config_text import sub_configs
from moelib.core.param import is_spec, specs_by_path
from moelib.data.batches.packing import LongDocuments
from moelib.huggingface.families import settings_of
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from moelib.learner.moments import MomentFormat
from moelib.parallel.sharding import DEFAULT_RULES
from moelib.verify.shrink import runnable, shrink
from tests.verify.user_configs import balanced_moe, trainer

CONFIGS = {
    **flame_moe.named_trainer_configs(),
    **gpt_oss.named_trainer_configs(),
    **open_models.named_trainer_configs(),
}


@pytest.mark.parametrize("name", ["flame-moe-tiny", "gpt-oss-20b", "deepseek-v3", "qwen2-57b-a14b"])
def test_a_small_config_is_small_and_has_the_same_kinds_of_layers(name):
    cfg = CONFIGS[name]()
    small, changes = shrink(cfg, 8)
    kinds = lambda cfg: {type(each) for _, each in sub_configs(cfg.model)}
    assert kinds(small) == kinds(cfg)
    trainer = small.set(dir="unused").instantiate(parent=None)
    specs = trainer.model.create_parameter_specs_recursively()
    sizes = [spec.size for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    assert sum(sizes) < 180_000
    assert {change.path for change in changes} >= {"model.dim", "model.vocab_size"}


WITH_STATES = ["qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "granite-4.0-h-tiny"]
FAMILIES = ["flame-moe-tiny", "gpt-oss-20b", "deepseek-v3", "qwen3-30b-a3b", *WITH_STATES]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_config_still_has_its_hugging_face_family(name):
    small, _ = shrink(CONFIGS[name](), 8)
    assert small.model.decoder.block[0].feed_forward.report_expert_counts
    settings_of(small.model)  # Raises NoFamilyError without one.


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_keep_common_divisors_with_the_devices(name):
    cfg = CONFIGS[name]()
    small, _ = shrink(cfg, 8)
    block = {layer.debug_string(): layer for layer in cfg.model.decoder.block}
    cfg.model.decoder.block = list(block.values())  # Of which the small one has one of each kind.
    after = small.to_flat_dict()
    fields = ("dim", "hidden_dim", "num_heads", "num_kv_heads", "num_experts", "vocab_size")
    fields += ("q_lora_rank", "kv_lora_rank")
    compared = 0
    for path, before in cfg.to_flat_dict().items():
        if not path.startswith("model.") or path.rpartition(".")[2] not in fields:
            continue
        if path not in after or not isinstance(before, int):  # Of a layer that was removed.
            continue
        assert math.gcd(after[path], 8) == math.gcd(before, 8), path
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(i, marks=pytest.mark.slow) for i in range(10, 30))]
)
def test_every_part_of_a_random_config_splits_over_the_same_meshes(seed):
    """A dimension splits over a divisor of the devices that it has in common with them."""
    rng = np.random.default_rng(seed)
    num_devices, num_kv_heads = rng.choice([4, 6, 8, 16]), int(rng.integers(1, 13))
    num_experts = int(rng.integers(2, 97))
    cfg = CONFIGS["flame-moe-tiny"]()
    cfg.model.set(dim=int(rng.integers(2, 40)) * 4)
    sizes = {
        "num_heads": num_kv_heads * int(rng.integers(1, 9)),
        "num_kv_heads": num_kv_heads,
        "head_dim": 16,
        "num_experts": num_experts,
        "num_experts_per_token": int(rng.integers(1, min(num_experts, 8) + 1)),
        "hidden_dim": int(rng.integers(2, 200)),
    }
    for _, holder in sub_configs(cfg.model):
        holder.set(**{name: size for name, size in sizes.items() if name in dict(holder.items())})
    small, _ = shrink(cfg, int(num_devices))
    before, after = (specs_of(each) for each in (cfg, small))
    for path, spec in after.items():
        for name, size, new in zip(spec.axes, before[path].shape, spec.shape, strict=True):
            if DEFAULT_RULES.get(name):
                assert math.gcd(new, num_devices) == math.gcd(size, num_devices), (path, name)


@pytest.mark.parametrize("name", WITH_STATES)
def test_layers_with_a_state_split_over_eight_devices_and_one_of_each_kind_is_kept(name):
    small, _ = shrink(CONFIGS[name](), 8)
    decoder = small.model.decoder
    assert (len(decoder.first_layers), len(decoder.block)) == (3 * ("kimi" in name), 2)
    assert decoder.num_layers == len(decoder.first_layers) + 2 * 2
    for path, spec in specs_of(small).items():
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            assert axis != "embed" or size % 4 == 0, path  # expert=2,fsdp=2


def specs_of(cfg):
    trainer = cfg.clone(dir="unused").instantiate(parent=None)
    return specs_by_path(trainer.model.create_parameter_specs_recursively())


def test_widths_that_differ_still_differ_and_equal_ones_are_equal():
    small, _ = shrink(CONFIGS["flame-moe-38m-100m"](), 8)
    decoder = small.model.decoder
    dense, moe = decoder.first_layers[0], decoder.block[0]
    assert dense.input_dim == moe.input_dim == small.model.dim
    widths = [dense.feed_forward.hidden_dim, moe.feed_forward.hidden_dim, small.model.dim]
    assert len(set(widths)) == 3
    assert moe.feed_forward.shared_experts.hidden_dim not in widths


def test_groups_of_experts_are_larger_than_what_their_score_sums():
    small, _ = shrink(CONFIGS["deepseek-v3"](), 8)
    moe = small.model.decoder.block[0].feed_forward
    router = moe.router
    assert (moe.num_experts, router.num_groups, router.num_groups_per_token) == (16, 4, 2)
    assert len(small.model.decoder.first_layers) == 1  # Three equal ones before.


def test_the_ramp_of_yarn_begins_behind_the_first_pair():
    small, _ = shrink(CONFIGS["deepseek-v3"](), 8)
    attention = small.model.decoder.block[0].self_attention
    rope = attention.rope.clone(name="rope").instantiate(parent=None)
    begin, _ = rope.ramp_ends(attention.rope_head_dim)
    assert begin > 0


@pytest.mark.parametrize(("treatment", "longest"), [("SPLIT", 96), ("ERROR", 32)])
def test_documents_are_longer_than_a_sequence_if_the_input_splits_them(treatment, longest):
    cfg = CONFIGS["flame-moe-tiny"]()
    cfg.input.long_documents = LongDocuments[treatment]
    small, _ = shrink(cfg, 8)
    assert small.input.source.max_document_tokens == longest


def test_the_run_is_in_float32_on_made_up_data():
    small, _ = shrink(CONFIGS["qwen3-30b-a3b"](), 8)
    assert small.train_dtype is None
    batch = small.input.instantiate().batch(0)
    assert batch["input_ids"].shape == (8, 32)
    assert batch["input_ids"].max() < small.model.vocab_size


def test_the_learner_keeps_its_state_in_float32():
    cfg = CONFIGS["flame-moe-tiny"]()
    cfg.learner.first_moment = MomentFormat.BFLOAT16
    for small, _ in (shrink(cfg, 8), runnable(cfg)):
        assert small.learner.first_moment is MomentFormat.FLOAT32


@pytest.mark.parametrize(("num_devices", "rows"), [(2, 4), (3, 12), (8, 8)])
def test_rows_can_be_halved_and_split_over_four_hosts(num_devices, rows):
    small, _ = shrink(CONFIGS["flame-moe-tiny"](), num_devices)
    assert small.input.global_batch_size == rows


def test_without_shrinking_sizes_stay():
    cfg = CONFIGS["flame-moe-tiny"]()
    same, changes = runnable(cfg)
    assert same.model.dim == cfg.model.dim
    model = [change.path for change in changes if change.path.startswith("model.")]
    assert {path.rpartition(".")[2] for path in model} == {"report_expert_counts"}


def test_small_widths_stay():
    cfg = CONFIGS["flame-moe-tiny"]()
    cfg.model.decoder.block[0].feed_forward.shared_experts.hidden_dim = 32
    cfg.model.decoder.block[0].feed_forward.hidden_dim = 20
    small, _ = shrink(cfg, 8)
    moe = small.model.decoder.block[0].feed_forward
    assert (moe.shared_experts.hidden_dim, moe.hidden_dim) == (32, 20)
    assert small.model.dim > 32


def test_a_low_rank_of_the_size_of_values_is_divided_by_meshes():
    mixer = KimiDeltaAttention.default_config().set(
        num_value_heads=8, key_head_dim=64, value_head_dim=128
    )
    layer = balanced_moe(num_experts=8).set(self_attention=mixer)
    small, _ = shrink(trainer(layer, num_layers=2), 8)
    found = small.model.decoder.block[0].self_attention
    assert (found.key_head_dim, found.value_head_dim, found.low_rank_dim) == (8, 6, 8)
