"""How configurations look on the command line: nested options, and solvers and adjoints as expressions."""

from __future__ import annotations

from typing import Any

import tyro

from deqkit.adjoint import AbstractAdjoint
from deqkit.solve import AbstractSolver, Fallback
from deqkit.train.config import parse_value

EXPRESSION_TYPES: dict[Any, str] = {
    AbstractSolver: "SOLVER",
    AbstractSolver | Fallback: "SOLVER",
    AbstractAdjoint: "ADJOINT",
}


def registry() -> Any:
    """tyro's rules with ours: `--model.solver 'Broyden(memory=5)'`."""
    rules = tyro.constructors.ConstructorRegistry()
    rules.primitive_rule(_expression_rule)
    return rules


def _expression_rule(info: Any) -> Any:
    if info.type not in EXPRESSION_TYPES:
        return None
    kind = info.type
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=EXPRESSION_TYPES[kind],
        instance_from_str=lambda words: _parse(words[0], kind),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [repr(value).replace("'", '"')],  # it is shown within single quotes
    )


def _parse(text: str, kind: Any) -> Any:
    value = parse_value(text)
    if not isinstance(value, kind):
        raise ValueError(f"{text!r} is not a {EXPRESSION_TYPES[kind].lower()}")
    return value
