# SPDX-License-Identifier: Apache-2.0
"""Whether what a model caches as K is what its rotary embedding returned.

That a layer has a rotary embedding beside it does not say that it uses it (some leave it out in
some layers), nor that nothing comes between (some multiply K by a norm's weights after it). Either
would make moved K wrong, so the forward pass is read, and what is not understood is refused.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from attnstore_vllm.errors import UnsupportedError

_RESHAPES = frozenset({"view", "reshape", "contiguous", "flatten"})


def check_use(holder: torch.nn.Module, layer: torch.nn.Module) -> None:
    """That `holder`'s forward pass gives `layer` K as its rotary embedding returns it.

    Args:
        holder: has both as members.
    Raises: UnsupportedError, with the reason, if that is not to be seen in its source.
    """
    name = type(holder).__name__
    try:
        source = textwrap.dedent(inspect.getsource(type(holder).forward))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise UnsupportedError(f"the source of {name}.forward cannot be read: {error}") from error
    assert isinstance(function, ast.FunctionDef)
    key: str | None = None
    for statement in _taken(function.body, holder):
        ropes = [
            c for c in _calls(statement) if isinstance(_member(holder, c), RotaryEmbeddingBase)
        ]
        if ropes:
            if key is not None or len(ropes) > 1:
                raise UnsupportedError(f"{name}.forward rotates more than once")
            key = _rotated_key(statement)
            if key is None:
                raise UnsupportedError(f"{name}.forward rotates in a way that is not understood")
            continue
        attends = [call for call in _calls(statement) if _member(holder, call) is layer]
        if attends:
            given = attends[0].args[1] if len(attends[0].args) > 1 else None
            if key is None or not isinstance(given, ast.Name) or given.id != key:
                raise UnsupportedError(f"{name}.forward does not cache K as it was rotated")
            return
        if key is not None and not _leaves(statement, key):
            raise UnsupportedError(f"{name}.forward changes K after it was rotated")
    raise UnsupportedError(f"{name}.forward does not say where it attends")


def _taken(body: Iterable[ast.stmt], holder: torch.nn.Module) -> Iterator[ast.stmt]:
    """The statements that are run; an `if` is followed where a member of the holder decides."""
    for statement in body:
        test = statement.test if isinstance(statement, ast.If) else None
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if isinstance(test, ast.UnaryOp) and negated:
            test = test.operand
        if isinstance(statement, ast.If) and _is_member(test):
            assert isinstance(test, ast.Attribute)
            is_so = bool(getattr(holder, test.attr, False)) is not negated
            yield from _taken(statement.body if is_so else statement.orelse, holder)
        elif isinstance(statement, ast.With):
            yield from _taken(statement.body, holder)
        elif isinstance(statement, (ast.If, ast.For, ast.While, ast.Try)) and any(
            isinstance(_member(holder, call), RotaryEmbeddingBase) for call in _calls(statement)
        ):
            raise UnsupportedError(
                f"{type(holder).__name__}.forward rotates K in some cases only: "
                f"{ast.unparse(statement).splitlines()[0]}"
            )
        else:
            yield statement


def _is_member(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _calls(node: ast.AST) -> list[ast.Call]:
    return [child for child in ast.walk(node) if isinstance(child, ast.Call)]


def _member(holder: torch.nn.Module, call: ast.Call) -> object:
    """The member that is called, if it is a member of the holder."""
    function = call.func
    return getattr(holder, function.attr, None) if _is_member(function) else None  # type: ignore[attr-defined]


def _rotated_key(statement: ast.stmt) -> str | None:
    """K's name, of `q, k = self.rotary_emb(positions, q, k)`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return None
    key = target.elts[1]
    return key.id if isinstance(key, ast.Name) else None


def _leaves(statement: ast.stmt, key: str) -> bool:
    """Whether K has the same numbers in the same order afterwards."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == key and isinstance(node.ctx, ast.Store):
            return isinstance(statement, ast.Assign) and _is_reshape(statement.value, key)
        if isinstance(node, ast.Call) and _is_in_place(node, key):
            return False
        # `k[...] = x`, `k.data = x`
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if _names(node, key):
                return False
    # A call whose result nobody takes is made for what it does to its arguments.
    return not (isinstance(statement, ast.Expr) and _names(statement, key))


def _names(node: ast.AST, key: str) -> bool:
    return any(isinstance(child, ast.Name) and child.id == key for child in ast.walk(node))


def _is_reshape(value: ast.expr, key: str) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _RESHAPES
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == key
    )


def _is_in_place(call: ast.Call, key: str) -> bool:
    """`k.mul_(...)`."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr.endswith("_")
        and isinstance(function.value, ast.Name)
        and function.value.id == key
    )
