"""The reference: comments of fields are their documentation, and each field of a config has one."""

import ast

import griffe
import pytest

from docs import fields
from docs.generate import ROOT

SOURCE = """
class Config:
    # -- Sizes
    dim: int = REQUIRED  # D.
    # Weight of the loss,
    # in the objective.
    weight: float = 0.5
    both: int = (
        3  # The inner one.
    )
    plain: str
    _hidden: int = 0  # Hidden.
"""


def test_comments_behind_and_above_a_field_document_it():
    (node,) = ast.parse(SOURCE).body
    assert fields.field_comments(node, SOURCE) == {
        "dim": "D.",
        "weight": "Weight of the loss, in the objective.",
        "both": "The inner one.",
        "plain": "",
    }


def test_a_class_lists_its_fields_with_defaults(tmp_path):
    (tmp_path / "planted.py").write_text("class Layer:" + SOURCE.replace("\n", "\n    "))
    extensions = griffe.load_extensions(fields.Fields())
    module = griffe.load("planted", search_paths=[tmp_path], extensions=extensions)
    section = module["Layer.Config"].docstring.parsed[-1]
    assert {each.name: each.description for each in section.value} == {
        "dim": "D. Required.",
        "weight": "Weight of the loss, in the objective. Default: `0.5`.",
        "both": "The inner one. Default: `3`.",
        "plain": "Plain.",
    }


def test_every_field_of_a_config_has_a_comment():
    missing = []
    for file in (ROOT / "moelib").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "class Config" in source:
            classes = (
                each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ClassDef)
            )
            for cls in classes:
                found = fields.field_comments(cls, source) if cls.name == "Config" else {}
                missing += [f"{file}: {name}" for name, comment in found.items() if not comment]
    assert not missing


@pytest.mark.parametrize("path", fields.CONTRACT)
def test_methods_for_authors_of_layers_are_public(path):
    module, _, name = path.rpartition(".")
    file = ROOT / (module.replace(".", "/") + ".py")
    extensions = griffe.load_extensions(fields.Fields())
    found = griffe.visit(module, filepath=file, code=file.read_text(), extensions=extensions)
    for method in fields.CONTRACT[path]:
        assert found[name][method].is_public
        assert found[name][method].docstring
