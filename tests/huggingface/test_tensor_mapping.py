"""Views of Hugging Face tensors as parameters, and back."""

import numpy as np
import pytest

from experiments import mixtral
from moelib.huggingface.families import settings_of, tensor_mappings
from moelib.huggingface.tensor_mapping import (
    Part,
    TensorMapping,
    join_rows,
    take_rows,
    tensor_shape,
    to_parameter,
    to_tensor,
)
from tests.oracles import tensor_names


def mapping(view, at=(), **fields):
    return TensorMapping("tensor", "path", at, Part("tensor", view, at, **fields))


def test_a_projection_is_transposed_and_split_into_heads():
    theirs = np.arange(24.0).reshape(6, 4)  # 3 heads of 2, width 4.
    ours = to_parameter(theirs, mapping("(h k) d -> d h k"), (4, 3, 2))
    for d, h, k in np.ndindex(4, 3, 2):
        assert ours[d, h, k] == theirs[h * 2 + k, d]


def test_rotated_pairs_become_halves():
    theirs = np.arange(8.0).reshape(8, 1)  # One head: 2 entries without position, 3 pairs.
    ours = to_parameter(theirs, mapping("(h k) d -> d h k", pairs_from=2), (1, 1, 8))
    np.testing.assert_array_equal(ours[0, 0], [0, 1, 2, 4, 6, 3, 5, 7])


@pytest.mark.parametrize(
    ("made", "shape", "shape_of_tensor"),
    [
        (mapping("(h k) d -> d h k"), (4, 3, 2), (6, 4)),
        (mapping("(h k) d -> d h k", pairs_from=2), (4, 3, 6), (18, 4)),
        (mapping("(g k) d -> d g k", (1, None, 0)), (5, 4, 2, 3, 2), (6, 4)),
        (mapping("f d -> d f", (3, 1, 0)), (5, 2, 2, 4, 6), (6, 4)),
        (mapping("e d (f n) -> e n d f", (1,)), (2, 5, 2, 4, 3), (5, 4, 6)),
        (mapping("d f -> f d", (0,), factor=0.5), (2, 3, 4), (4, 3)),
        (mapping("n d -> d n"), (4, 1), (1, 4)),
        (mapping("(h k) 1 w -> h k w", (1,)), (2, 3, 4, 5), (12, 1, 5)),
        (mapping("1 e -> e"), (5,), (1, 5)),
        (mapping("e (n f) d -> e n d f"), (5, 2, 4, 3), (5, 6, 4)),
    ],
)
def test_back_and_forth_is_the_same(made, shape, shape_of_tensor):
    assert tensor_shape(made, shape) == shape_of_tensor
    theirs = np.random.default_rng(0).normal(size=shape_of_tensor).astype(np.float32)
    np.testing.assert_array_equal(to_tensor(to_parameter(theirs, made, shape), made), theirs)


def test_rows_of_each_group_are_taken_and_joined():
    theirs = np.arange(20.0).reshape(10, 2)  # Two groups: 3 rows of one part, then 2 of another.
    parts = [Part("tensor", "", rows=rows, row_groups=2) for rows in ((0, 3), (3, 5))]
    first, second = (take_rows(theirs, part) for part in parts)
    np.testing.assert_array_equal(first, theirs[[0, 1, 2, 5, 6, 7]])
    np.testing.assert_array_equal(second, theirs[[3, 4, 8, 9]])
    np.testing.assert_array_equal(join_rows([(second, parts[1]), (first, parts[0])]), theirs)


@pytest.mark.parametrize("name", [x for x in mixtral.named_trainer_configs() if "mixtral" in x])
def test_every_tensor_of_a_published_model_is_its_part_of_its_parameter(name):
    cfg = mixtral.named_trainer_configs()[name]().model.set(name="model")
    mappings = tensor_mappings(settings_of(cfg)[0], cfg.instantiate(parent=None))
    want = set(tensor_names.mixtral(cfg.decoder.num_layers, num_experts=8))
    assert {(each.tensor, each.path, each.index) for each in mappings} == want
    assert len(mappings) == len(want)
