"""Solvers and tolerances are values: checked, frozen, hashable, and they survive pickle, copy and repr."""

import copy
import dataclasses
import fractions
import pickle

import numpy as np
import pytest

import deqkit.solve
from deqkit.solve import GMRES, Anderson, Broyden, FixedPointIteration, NewtonKrylov, Tolerance
from problems import SOLVERS

VALUES = {**SOLVERS, "tolerance": Tolerance(rtol=1e-4, atol=1e-6, per_token=True), "ridge": Anderson(ridge=1e-6)}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_frozen_hashable_and_equal_to_copies(value):
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert same == value and hash(same) == hash(value) and type(same) is type(value)
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, getattr(value, field.name))
    with pytest.raises((AttributeError, TypeError)):
        value.memmory = 3


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_repr_is_code(value):
    assert eval(repr(value), {name: getattr(deqkit.solve, name) for name in deqkit.solve.__all__}) == value


def test_different_settings_are_different_values():
    assert len(set(SOLVERS.values())) == len(SOLVERS)
    assert Anderson(memory=5) == Anderson() != Anderson(memory=6)


BAD = [
    *[(cls, "damping", v) for cls in (FixedPointIteration, Broyden) for v in (0.0, -0.5, 1.5, float("nan"))],
    *[(Anderson, "mixing", v) for v in (0.0, -0.5, 1.5, float("nan"), float("inf"))],
    *[(cls, "memory", v) for cls in (Anderson, Broyden) for v in (0, -1, 2.5)],
    *[(Anderson, "ridge", v) for v in (-1e-9, 1.0, float("nan"))],
    *[(cls, "group", v) for cls in (FixedPointIteration, Anderson, Broyden) for v in ("token", "", None, "Prefix")],
    *[(GMRES, "restart", v) for v in (0, -3, 1.5)],
    *[(NewtonKrylov, "inner_steps", v) for v in (0, -1, 0.5, 1.5)],
    *[(NewtonKrylov, "forcing", v) for v in (0.0, 1.0, -0.1, float("nan"))],
    *[(Tolerance, field, v) for field in ("rtol", "atol") for v in (-1e-3, float("nan"), float("inf"))],
    *[(Tolerance, "patience", v) for v in (1, 0, -5, 2.5)],
]


@pytest.mark.parametrize(("cls", "field", "value"), BAD, ids=lambda v: getattr(v, "__name__", str(v)))
def test_bad_settings_are_rejected_by_name_and_value(cls, field, value):
    with pytest.raises(ValueError, match=field) as error:
        cls(**{field: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize("cls", [FixedPointIteration, Anderson, Broyden, GMRES, NewtonKrylov, Tolerance])
def test_every_setting_is_covered_and_unknown_ones_are_errors(cls):
    checked = {field for c, field, _ in BAD if c is cls}
    assert {field.name for field in dataclasses.fields(cls)} - {"per_token"} == checked
    with pytest.raises(TypeError):
        cls(memmory=3)
    with pytest.raises(TypeError):  # one setting at most goes without its name
        cls(*(field.default for field in dataclasses.fields(cls)), 1)


@pytest.mark.parametrize("number", [np.float32(0.25), np.float64(0.25), fractions.Fraction(1, 4)])
def test_any_real_number_is_a_tolerance_and_is_kept_as_a_float(number):
    assert type(Tolerance(rtol=number).rtol) is float
    assert Tolerance(rtol=number) == Tolerance(rtol=0.25)
