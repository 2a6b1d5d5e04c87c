"""Configurations as plain values: expressions that cannot execute anything, round trips, and mistakes by name."""

import ast
import dataclasses
import functools
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deqkit._plain import decode, encode, parse_expression, unknown
from deqkit.adjoint import Implicit, OneStep, Unrolled
from deqkit.solve import Anderson, Broyden, Fallback, NewtonKrylov, Tolerance
from deqkit.train.config import MAKERS, parse_value

# --- expressions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Anderson()", Anderson()),
        ("Anderson", Anderson()),
        ("  Broyden( memory = 3,group='prefix' ) ", Broyden(memory=3, group="prefix")),
        ("Tolerance(rtol=1e-2, atol=0)", Tolerance(rtol=1e-2, atol=0)),
        ("Implicit(Anderson(2), tol=Tolerance(rtol=.1))", Implicit(Anderson(2), tol=Tolerance(rtol=0.1))),
        ("Fallback(Anderson(), NewtonKrylov(), patience=3)", Fallback(Anderson(), NewtonKrylov(), patience=3)),
        ("Anderson(ridge=None)", Anderson(ridge=None)),
    ],
)
def test_expressions_make_what_they_say(text, value):
    assert parse_value(text) == value


ATTACKS = [
    "__import__('os').system('touch {path}')",
    "open('{path}', 'w')",
    "Anderson(memory=__import__('os').system('touch {path}'))",
    "Anderson.__init__.__globals__",
    "(lambda: 1)()",
    "[open('{path}', 'w') for _ in (1,)]",
    "Anderson(**{{'memory': 5}})",
    "Anderson(*[5])",
    "Anderson(memory=5 if True else 6)",
    "(x := Anderson())",
    "eval('1')",
    "Anderson; Broyden",
    "Anderson(memory=os)",
    "Anderson(memory=2**99999999)",
    "Anderson(memory='a' * 10**9)",
    "Anderson()()",
    "Anderson() + Anderson()",
    "Anderson(memory=(yield))",
    "AbstractSolver()",
    "",
    "(",
    "\x00",
    "Anderson(\x00)",
    "\N{FULLWIDTH LATIN CAPITAL LETTER A}nderson(__class__=1)",
    "-" * 20_000 + "1",
    "(" * 5_000 + ")" * 5_000,
    "Anderson(" * 300 + ")" * 300,
    "[" * 90 + "]" * 90 + "(1)",
    "9" * 6_000,
    "{{[]: 1}}",
    "'\\ud800'(1)",
]


_seen: list[str] | None = None
_DANGEROUS = ("exec", "import", "open", "os.system", "subprocess.Popen", "os.remove", "socket.connect")


@functools.cache
def _install_audit():
    def audit(event, args):
        if _seen is not None and event in _DANGEROUS and not (event == "exec" and args[0].co_name != "<module>"):
            _seen.append(event)

    sys.addaudithook(audit)


@contextmanager
def watching():
    """Collects what Python's audit hook reports: imports, files, processes, code that is executed."""
    global _seen
    _install_audit()
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda text: repr(text[:25]))
def test_nothing_else_is_evaluated(attack, tmp_path):
    """A ValueError of one line, and no trace on the disk."""
    with watching() as events, pytest.raises(ValueError) as caught:
        parse_value(attack.format(path=tmp_path / "trace"))
    assert not (tmp_path / "trace").exists()
    assert events == []
    assert "\n" not in str(caught.value)


def test_the_watch_sees_what_it_should(tmp_path):
    """Otherwise the attacks above would prove nothing."""
    with watching() as events:
        (tmp_path / "file").write_text("")
        exec("1")
    assert events == ["open", "exec"]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="Anderso()[]{}.,=*'\"_1 :\\\n#@", max_size=40))
def test_any_text_is_an_object_or_a_value_error(text):
    try:
        value = parse_value(text)
    except ValueError:
        return
    allowed = (*MAKERS.values(), int, float, complex, str, bytes, tuple, list, dict, set, type(None), type(...))
    assert isinstance(value, allowed)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_any_arguments_make_an_object_or_a_value_error(data):
    """Also those of a type that a class never expected."""
    values = st.sampled_from(
        [0, 1, -1, 3, 0.5, -2.0, 10**400, "'x'", "None", "True", "[]", "()", "Anderson()", "'sample'"]
    )
    name = data.draw(st.sampled_from(sorted(MAKERS)))
    known = [f.name for f in dataclasses.fields(MAKERS[name])]
    keywords = data.draw(st.dictionaries(st.sampled_from([*known, "memry"]), values, max_size=3))
    text = f"{name}({', '.join(f'{key}={value}' for key, value in keywords.items())})"
    try:
        value = parse_value(text)
    except ValueError:
        return
    assert type(value) is MAKERS[name]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Andersen()", "unknown name 'Andersen'; did you mean 'Anderson'?"),
        ("Implicit(solver=Broydn())", "did you mean 'Broyden'?"),
        ("Anderson(memry=5)", "memry"),
        ("Anderson(memory=0)", "memory"),
        ("Unrolled", "steps"),
        ("Zzz()", "one of "),
    ],
)
def test_mistakes_in_expressions(text, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        parse_value(text)


def test_only_the_given_classes_can_be_made():
    with pytest.raises(ValueError, match="unknown name 'Broyden'"):
        parse_expression("Broyden()", {"Anderson": Anderson})
    assert not any("Abstract" in name or "Error" in name for name in MAKERS)


COUNT, SHARE = st.integers(1, 99), st.floats(0.01, 0.99)
SIMPLE = st.one_of(
    st.builds(Anderson, COUNT, mixing=SHARE, ridge=st.none() | SHARE),
    st.builds(Broyden, COUNT, damping=SHARE),
    st.builds(NewtonKrylov, COUNT, forcing=SHARE),
)
SOLVERS = SIMPLE | st.builds(Fallback, SIMPLE, SIMPLE, patience=st.integers(2, 99))
TOLERANCES = st.builds(Tolerance, rtol=st.floats(0, 1), atol=st.floats(0, 1), per_token=st.booleans())
ADJOINTS = st.one_of(
    st.builds(Implicit, SOLVERS, TOLERANCES, COUNT, grad_rtol=st.none() | SHARE),
    st.just(OneStep()),
    st.builds(Unrolled, COUNT),
)


@settings(max_examples=200, deadline=None)
@given(SOLVERS | TOLERANCES | ADJOINTS)
def test_what_is_written_as_an_expression_is_read_back(value):
    assert parse_value(repr(value)) == value
    assert ast.parse(repr(value), mode="eval")


# --- configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class OtherLeaf:
    size: int


@dataclass(frozen=True, kw_only=True)
class Tree:
    leaf: Leaf | OtherLeaf
    mode: Literal["fast", "slow"] = "fast"
    depth: Literal["all"] | int = "all"
    pair: tuple[float, float] = (0.1, 0.2)
    cuts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    limit: int | None = None
    on: bool = False
    solver: Anderson | None = field(default_factory=Anderson)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.builds(Leaf, size=st.integers(), share=FINITE) | st.builds(OtherLeaf, size=st.integers())
TREES = st.builds(
    Tree,
    leaf=LEAVES,
    mode=st.sampled_from(["fast", "slow"]),
    depth=st.just("all") | st.integers(),
    pair=st.tuples(FINITE, FINITE),
    cuts=st.lists(st.integers(), max_size=4).map(tuple),
    names=st.lists(st.text(), max_size=3).map(tuple),
    limit=st.none() | st.integers(),
    on=st.booleans(),
    solver=st.none() | st.builds(Anderson, COUNT),
)


def read(plain):
    return decode(Tree, plain, {"Anderson": Anderson, "Broyden": Broyden}, where="tree")


def plain_tree(**changes):
    return {**encode(Tree(leaf=Leaf(size=1)), (Anderson,)), **changes}


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_trees_come_back_from_json(tree):
    assert read(json.loads(json.dumps(encode(tree, (Anderson,)), allow_nan=False))) == tree


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mod": "fast"}, "tree: unknown field 'mod'; did you mean 'mode'"),
        ({"mode": "medium"}, "tree.mode must be one of 'fast', 'slow', got 'medium'"),
        ({"depth": 1.5}, "tree.depth must be one of 'all', got 1.5; or tree.depth must be a whole number"),
        ({"pair": [0.1]}, "tree.pair must be a list of 2"),
        ({"pair": [0.1, "x"]}, r"tree.pair\[1\] must be a finite number"),
        ({"pair": [0.1, float("nan")]}, r"tree.pair\[1\] must be a finite number, got nan"),
        ({"pair": [float("inf"), 0.1]}, r"tree.pair\[0\] must be a finite number, got inf"),
        ({"pair": [False, 0.1]}, r"tree.pair\[0\] must be a finite number, got False"),
        ({"pair": 3}, "tree.pair must be a list, got 3"),
        ({"cuts": [1, 2.5]}, r"tree.cuts\[1\] must be a whole number"),
        ({"cuts": [True]}, r"tree.cuts\[0\] must be a whole number"),
        ({"limit": "x"}, "tree.limit must be a whole number, got 'x'"),
        ({"on": 1}, "tree.on must be true or false"),
        ({"solver": "Andersen()"}, "tree.solver: unknown name 'Andersen'; did you mean 'Anderson'"),
        ({"solver": "Broyden()"}, "tree.solver must be a Anderson"),
        ({"solver": 5}, "tree.solver must be an object, got 5"),
        ({"leaf": {"kind": "Leav", "size": 1}}, "tree.leaf: unknown kind 'Leav'; did you mean 'Leaf'"),
        ({"leaf": {"size": 1}}, "tree.leaf: unknown kind 'None'"),
        ({"leaf": {"kind": "Leaf", "share": 0.5}}, "tree.leaf: field 'size' is missing"),
        ({"kind": "Leaf"}, "tree.kind must be Tree, got 'Leaf'"),
    ],
)
def test_mistakes_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        read(plain_tree(**changes))


@pytest.mark.parametrize("plain", [None, [], "x", 3])
def test_something_else_altogether(plain):
    with pytest.raises(ValueError, match="tree"):
        read(plain)


def test_a_field_without_a_default_that_is_missing():
    with pytest.raises(ValueError, match="tree: field 'leaf' is missing"):
        read({name: value for name, value in plain_tree().items() if name != "leaf"})


def test_a_field_that_is_younger_than_the_file_has_its_default():
    plain = plain_tree(on=not Tree(leaf=Leaf(size=1)).on)
    assert read({name: value for name, value in plain.items() if name != "on"}) == Tree(leaf=Leaf(size=1))


def test_what_is_no_plain_value_is_refused():
    with pytest.raises(TypeError, match="a configuration holds plain values, got object"):
        encode(object(), ())
    with pytest.raises(TypeError, match="plain values"):
        encode(Tree, ())


@pytest.mark.parametrize(
    ("name", "message"), [("lerning", "did you mean 'learning'?"), ("zz", "one of learning, rate")]
)
def test_unknown_names(name, message):
    assert unknown("option", name, iter(["learning", "rate"])) == f"unknown option {name!r}; {message}"
