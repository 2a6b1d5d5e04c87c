"""Configurations as plain values, to and from JSON and the command line, with every mistake named.

A configuration is a tree of dataclasses. Values with a method of their own (solvers, adjoints, tolerances) are written
as the expression that makes them, `Broyden(memory=5, group='prefix')`, and read back without evaluating any code.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any, expressions: tuple[type, ...]) -> Any:
    """Plain values for JSON. Instances of `expressions` become the expression that makes them."""
    if isinstance(value, expressions):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name), expressions) for f in dataclasses.fields(value)}
        assert "kind" not in fields, f"a field of {type(value).__name__} has the name under which its type is written"
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [encode(item, expressions) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a configuration holds plain values, got {type(value).__name__}: {value!r}")


def decode(kind: type[T], plain: Any, makers: Mapping[str, type], *, where: str = "") -> T:
    """The dataclass `kind` from what `encode` made of it.

    Args:
        makers: the classes that may occur in expressions, by name.
        where: what the plain value is, for error messages.

    Raises:
        ValueError: a field that is missing, unknown or of another type, by name.
    """
    return _decode(kind, plain, makers, where or kind.__name__)


def parse_expression(text: str, makers: Mapping[str, type]) -> Any:
    """The object that an expression such as `Anderson(memory=5)` makes; only the classes in `makers` may occur."""
    try:
        return _build(ast.parse(text.strip(), mode="eval").body, text, makers)
    except (SyntaxError, RecursionError, MemoryError):  # the last two: thousands of signs or brackets
        raise ValueError(f"{text[:200]!r} is not an expression such as {next(iter(makers), 'Name')}()") from None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist, with the one that was probably meant."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}")


def _build(node: ast.expr, text: str, makers: Mapping[str, type]) -> Any:
    if isinstance(node, ast.Name) and node.id in makers:  # Anderson is short for Anderson()
        node = ast.Call(func=node, args=[], keywords=[])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in makers:
            raise ValueError(unknown("name", node.func.id, makers))
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(f"** is not allowed in {text!r}")
        arguments = [_build(argument, text, makers) for argument in node.args]
        keywords = {str(k.arg): _build(k.value, text, makers) for k in node.keywords}
        try:
            return makers[node.func.id](*arguments, **keywords)
        except (TypeError, AttributeError, ArithmeticError) as error:  # a value of a type that nobody expected
            raise ValueError(f"{text!r}: {error}") from error
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):  # a TypeError for a list inside a set
        name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        raise ValueError(unknown("name", name, makers)) from None


def _decode(kind: Any, plain: Any, makers: Mapping[str, type], where: str) -> Any:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(options, plain, makers, where)
    if origin is typing.Literal:
        return _checked(plain in options, plain, where, f"one of {', '.join(map(repr, options))}")
    if origin is tuple:
        items = _checked(isinstance(plain, list), plain, where, "a list")
        if options[-1] is not Ellipsis:
            _checked(len(items) == len(options), plain, where, f"a list of {len(options)}")
        return tuple(_decode(options[0], item, makers, f"{where}[{i}]") for i, item in enumerate(items))
    if kind is type(None):
        return _checked(plain is None, plain, where, "null")
    if kind is float:
        number = isinstance(plain, int | float) and not isinstance(plain, bool) and math.isfinite(plain)
        return float(_checked(number, plain, where, "a finite number"))
    if kind in (int, str, bool):
        right = isinstance(plain, kind) and (kind is not int or not isinstance(plain, bool))
        return _checked(right, plain, where, {int: "a whole number", str: "a string", bool: "true or false"}[kind])
    if isinstance(plain, str):  # a value that was written as an expression
        try:
            value = parse_expression(plain, makers)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return _checked(isinstance(value, kind), value, where, f"a {kind.__name__}")
    return _decode_dataclass(kind, plain, makers, where)


def _decode_union(options: tuple[Any, ...], plain: Any, makers: Mapping[str, type], where: str) -> Any:
    if isinstance(plain, dict):
        by_name = {option.__name__: option for option in options if isinstance(option, type)}
        if plain.get("kind") not in by_name:
            raise ValueError(f"{where}: {unknown('kind', str(plain.get('kind')), by_name)}")
        return _decode(by_name[plain["kind"]], plain, makers, where)
    failures = []
    for option in options:
        try:
            return _decode(option, plain, makers, where)
        except ValueError as error:
            if option is not type(None):  # that null would have been possible helps nobody
                failures.append(str(error))
    raise ValueError("; or ".join(dict.fromkeys(failures)))


def _decode_dataclass(kind: Any, plain: Any, makers: Mapping[str, type], where: str) -> Any:
    _checked(isinstance(plain, dict), plain, where, "an object")
    _checked(plain.get("kind", kind.__name__) == kind.__name__, plain.get("kind"), f"{where}.kind", kind.__name__)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    names = list(fields)
    given = {name: value for name, value in plain.items() if name != "kind"}
    for name in given:
        if name not in names:
            raise ValueError(f"{where}: {unknown('field', name, names)}")
    # A field that is younger than the file has its default, which is what the code did before there was a choice.
    missing = [name for name in names if name not in given and not _has_default(fields[name])]
    if missing:
        raise ValueError(f"{where}: field {missing[0]!r} is missing")
    return kind(**{name: _decode(hints[name], value, makers, f"{where}.{name}") for name, value in given.items()})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)


def _checked(right: bool, plain: Any, where: str, expected: str) -> Any:
    if not right:
        raise ValueError(f"{where} must be {expected}, got {plain!r}")
    return plain
