"""An extension of griffe for the reference: fields with their comments, and what authors override.

A comment behind or above a field is its documentation. Classes whose fields have comments get a
list "Attributes" of all their fields, with defaults. Methods of `CONTRACT` begin with an
underscore, because only classes override or call them, and are shown all the same.
"""

import ast
import io
import tokenize
from typing import Any

import griffe

# Methods that the authors of layers, norms, stacks and dispatchers override or call, by class.
CONTRACT = {
    "moelib.core.module.Module": ("_add_child", "_title"),
    "moelib.layers.base.BaseLayer": (
        "_create_layer_parameter_specs",
        "_initializer",
        "_create_layer_cache_specs",
        "_end_step",
        "_own_active_parameters",
        "_own_forward_flops_per_token",
        "_own_matrix_flops_per_token",
    ),
    "moelib.layers.norm.BaseNorm": ("_scaled",),
    "moelib.layers.transformer.BaseStack": ("_apply",),
    "moelib.layers.moe.dispatch.Dispatcher": ("_dispatch",),
}


class Fields(griffe.Extension):
    """Documents fields by their comments, and shows the methods of `CONTRACT`."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **unused: Any) -> None:
        """Adds the section "Attributes" to a class, and shows its part of the contract."""
        del unused
        for name in CONTRACT.get(cls.path, ()):
            cls[name].public = True
        text = cls.docstring.value if cls.docstring else ""
        if not isinstance(node, ast.ClassDef) or "Attributes:" in text:
            return
        comments = field_comments(node, "\n".join(cls.module.lines))
        if any(comments.values()):
            text = text or f"The config of `{cls.path.split('.')[-2]}`."
            lines = [f"    {_described(cls[name], text)}" for name, text in comments.items()]
            text = "\n".join([text, "", "Attributes:", *lines])
            cls.docstring = griffe.Docstring(text, parent=cls, parser="google")


def _described(field: griffe.Attribute, comment: str) -> str:
    """Returns the line of a field: its name, its comment, and its default."""
    default = ""
    if field.annotation is not None and field.value is not None:
        required = str(field.value) == "REQUIRED"
        default = "Required." if required else f"Default: `{field.value}`."
    comment = comment or field.name.replace("_", " ").capitalize() + "."
    return f"{field.name}: {comment} {default}".rstrip()


def field_comments(node: ast.ClassDef, source: str) -> dict[str, str]:
    """Returns the comment of each field of a class, "" for a field without one.

    Args:
        node: A class.
        source: Text of its file.
    """
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ").strip()
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    found = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
        elif isinstance(field, ast.Assign) and isinstance(field.targets[0], ast.Name):
            name = field.targets[0].id
        else:
            continue
        if name.startswith("_"):
            continue
        first = field.lineno
        while first - 1 in alone and not comments[first - 1].startswith("--"):
            first -= 1
        lines = [*range(first, field.lineno), *range(field.lineno, (field.end_lineno or 0) + 1)]
        texts = [comments[line] for line in lines if line in comments]
        found[name] = " ".join(text for text in texts if not text.startswith(("noqa", "fmt:")))
    return found
