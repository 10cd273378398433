import dataclasses
import re
from typing import Any, NamedTuple

import pytest

from moelib.core.config import ConfigBase, InvalidConfigValueError, UnknownFieldError, config_class
from moelib.core.config_text import get, join_path, set_at, split_path, sub_configs


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int = dataclasses.field(default=0, kw_only=True)


@config_class
class Holder(ConfigBase):
    sizes: tuple[int, ...] = (1, 2)
    more: Any = None


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("a", ["a"]),
        ("a.b_c[0].d", ["a", "b_c", 0, "d"]),
        ("a[10]", ["a", 10]),
        ("a['b.c']", ["a", "b.c"]),
        ("a.val/c4-en*", ["a", "val/c4-en*"]),
        ("['x: y\\'\"[']", ["x: y'\"["]),
        ("['']", [""]),
        ("", []),
    ],
)
def test_a_path_is_split_into_its_keys_and_joined_again(path, keys):
    assert split_path(path) == keys
    assert split_path(join_path(keys)) == keys


def test_keys_given_one_by_one_are_taken_as_they_are():
    assert split_path(("a.b", 0, "c")) == ["a.b", 0, "c"]


@pytest.mark.parametrize("path", ["a[", "a]", "a.[b]", "a b", "a..b"])
def test_a_malformed_path_is_refused(path):
    with pytest.raises(UnknownFieldError, match=re.escape(repr(path))):
        split_path(path)


def test_elements_of_records_tuples_and_dicts_are_set():
    cfg = Holder(more={"k": [Pair(1, 2), Point(1, y=2)], 3: (4,)})
    set_at(cfg, "more.k[0].b", 5)
    set_at(cfg, "more.k[1].y", 6)
    set_at(cfg, "more[3][0]", 7)
    set_at(cfg, "sizes[0]", 8)
    assert cfg.more == {"k": [Pair(1, 5), Point(1, y=6)], 3: (7,)}
    assert cfg.sizes == (8, 2)


def test_setting_an_element_does_not_change_a_container_that_others_hold():
    shared = [1, 2]
    cfg = Holder(more=shared)
    set_at(cfg, "more[0]", 5)
    assert shared == [1, 2]


def test_an_element_of_another_type_is_refused():
    with pytest.raises(InvalidConfigValueError, match=r"Holder.sizes=\('a', 2\):.*tuple"):
        set_at(Holder(), "sizes[0]", "a")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path"),
        ("size", r"'size'.*'sizes'"),
        ("sizes[2]", "sizes .*2;.* 0, 1"),
        ("sizes[0].x", r"sizes\[0\].*1:.*'x'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, message):
    with pytest.raises(UnknownFieldError, match=message):
        set_at(Holder(), path, 1)


def test_the_empty_path_is_the_config_itself():
    cfg = Holder()
    assert get(cfg, "") is cfg


def test_configs_inside_are_found_outermost_first():
    inner = Holder(more=Holder())
    found = dict(sub_configs(Holder(more=[{"k": inner}])))
    assert list(found) == ["more[0].k", "more[0].k.more"]
    assert found["more[0].k"] == inner
