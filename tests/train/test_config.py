"""Configurations: contradictions are refused, mistakes suggest the right name, and everything survives JSON."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deqkit.adjoint import Implicit, OneStep, Phantom, Unrolled
from deqkit.model import ModelConfig
from deqkit.solve import Anderson, Broyden, Fallback, NewtonKrylov, Tolerance
from deqkit.train.config import (
    DataConfig,
    DeviceConfig,
    OptimiserConfig,
    RegulariserConfig,
    TrainConfig,
    from_plain,
    to_plain,
)
from deqkit.train.tasks import make_task, resolve
from train.runs import TRELLIS, everything, tiny

STACK = {"model": {"depth": 3}}
UNTIED = {"model": {"depth": 3, "tied": False}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**UNTIED, "devices": {"warmup_steps": 2}}, "an untied stack has one depth: set devices.warmup_steps"),
        ({**STACK, "regulariser": {"jacobian": 1.0}}, "penalties are for an equilibrium: set regulariser.jacobian"),
        ({**STACK, "regulariser": {"spectral": 1.0}}, "penalties are for an equilibrium"),
        ({"regulariser": {"auxiliary": 0.1}}, "an equilibrium has no layers for auxiliary losses"),
        ({**STACK, "regulariser": {"auxiliary": 0.1, "auxiliary_every": 9}}, "leaves no layer before the last of"),
        ({"regulariser": {"auxiliary": -0.1}}, "auxiliary must be a number of at least 0"),
        ({"optimiser": {"accumulate": 3}}, "batch 4 does not divide into accumulate=3 equal parts"),
        ({"devices": {"early_adjoint_steps": 3}}, "early_adjoint and early_adjoint_steps go together"),
        ({"model": {"tied": False}}, "untied cells have no equilibrium"),
        ({"model": {"checkpoint": True}}, "set depth, or drop it"),
        ({"cell": {"inject": False}}, "would not depend on the input"),
        ({"optimiser": {"lr": 0.0}}, "lr must be positive, got 0.0"),
        ({"optimiser": {"lr": float("nan")}}, "lr must be positive"),
        ({"optimiser": {"floor": 1.5}}, "floor must be in"),
        ({"optimiser": {"plateau_factor": 1.0}}, "plateau_factor in"),
        ({"optimiser": {"plateau_patience": 0}}, "plateau_patience must be a whole number of at least 1"),
        ({"optimiser": {"clip": -1.0}}, "clip and weight_decay must not be negative"),
        ({"optimiser": {"weight_decay": -1.0}}, "clip and weight_decay must not be negative"),
        ({"optimiser": {"warmup_steps": -1}}, "warmup_steps must be a whole number of at least 0"),
        ({"optimiser": {"accumulate": 0}}, "accumulate must be a whole number of at least 1"),
        ({"data": {"batch": 0}}, "batch must be a whole number of at least 1"),
        ({"data": {"eval_length": 0}}, "eval_length must be a whole number of at least 1"),
        ({"data": {"copy_T": 0}}, "copy_T must be a whole number of at least 1"),
        ({"data": {"copy_first_T": 50}}, "copy_first_T and copy_first_steps go together"),
        ({"data": {"copy_first_steps": 50}}, "copy_first_T and copy_first_steps go together"),
        ({"data": {"copy_first_T": 500, "copy_first_steps": 5}}, "copy_first_T must be from 1 to copy_T, 5"),
        ({"devices": {"warmup_depth": 0}}, "warmup_depth must be a whole number of at least 1"),
        ({"devices": {"random_steps": -1}}, "random_steps must be a whole number of at least 0"),
        ({"regulariser": {"activation": -0.1}}, "activation must be a number of at least 0"),
        ({"regulariser": {"every": 0}}, "every must be a whole number of at least 1"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"eval_every": 0}, "eval_every must be a whole number of at least 1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number of at least 1"),
        ({"keep": 0}, "keep must be a whole number of at least 1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_contradictions_and_impossible_values_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tiny("unused", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"optimiser": {"name": "adagrad"}},  # taken for Adam
        {"optimiser": {"schedule": "linear"}},  # taken for constant
        {"precision": "fp16"},  # taken for float32
        {"optimiser": {"average_after": 6}},  # of six steps: no average is ever made
        {"optimiser": {"average_after": -1}},
        {"optimiser": {"clip": float("nan")}},
        {"optimiser": {"betas": (0.9,)}},
        {"regulariser": {"spectral": float("nan")}},
        {**STACK, "devices": {"random_steps": 2}},  # a stack has no step limit
        {**STACK, "devices": {"early_adjoint": OneStep(), "early_adjoint_steps": 2}},  # nor an adjoint
        {"devices": {"early_adjoint": OneStep()}},  # for no steps
        {**STACK, "devices": {"early_rtol": 0.1, "early_rtol_steps": 2}},
        {"devices": {"early_rtol": 0.1}},
        {"devices": {"early_rtol": -0.1, "early_rtol_steps": 2}},
        {"devices": {"early_rtol_steps": 2}},
        {"model": {**STACK["model"], "start": "learned"}},  # a stack starts nowhere
    ],
    ids=str,
)
def test_names_and_contradictions_that_should_be_refused(options):
    with pytest.raises(ValueError):
        tiny("unused", **options)


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ((), "step", "config: unknown field 'step'; did you mean 'steps'?"),
        (("optimiser",), "learning_rate", "config.optimiser: unknown field 'learning_rate'"),
        (("optimiser",), "warm_up_steps", "did you mean 'warmup_steps'?"),
        (("model", "cell"), "num_head", "config.model.cell: unknown field 'num_head'; did you mean 'num_heads'?"),
        (("data",), "lenght", "did you mean 'length'?"),
    ],
)
def test_an_unknown_field_suggests_the_right_one(path, wrong, words):
    plain = to_plain(tiny("unused"))
    node = plain
    for name in path:
        node = node[name]
    node[wrong] = 1
    with pytest.raises(ValueError) as caught:
        from_plain(plain)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("optimiser", "name"), "adm", "config.optimiser.name must be one of 'adam', 'adamw', 'sgd', got 'adm'"),
        (("optimiser", "betas"), [0.9], "config.optimiser.betas must be a list of 2"),
        (("precision",), "fp16", "config.precision must be one of 'float32', 'bf16'"),
        (("steps",), 1.5, "config.steps must be a whole number"),
        (("steps",), "10", "config.steps must be a whole number"),
        (("optimiser", "lr"), "0.1", "config.optimiser.lr must be a finite number"),
        (("model", "solver"), "Andersen()", "config.model.solver: unknown name 'Andersen'; did you mean 'Anderson'?"),
        (("model", "tol"), "Anderson()", "config.model.tol must be a Tolerance"),
        (("model", "cell", "kind"), "TransformerConf", "did you mean 'TransformerConfig'?"),
        (("devices", "early_adjoint"), "OneStp()", "did you mean 'OneStep'?"),
        (("trackers",), "tensorboard", "config.trackers must be a list"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(path, value, words):
    plain = to_plain(tiny("unused"))
    node = plain
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(ValueError) as caught:
        from_plain(plain)
    assert words in str(caught.value)


ADJOINTS = [Implicit(Anderson(3), Tolerance(rtol=0.1), 7, grad_rtol=0.2), Phantom(3, 0.5), Unrolled(4)]
SOLVERS = [Broyden(3, group="prefix"), Anderson(2, mixing=0.5, ridge=1e-6), NewtonKrylov(5)]
CELLS = [None, {"dropout": 0.25, "head_width": 6, "normalise": "weight"}, {"init_std": 0.1}, TRELLIS]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_configuration_survives_json(data):
    draw = data.draw
    config = tiny(
        draw(st.text(max_size=20)),
        cell=draw(st.sampled_from(CELLS)),
        model={
            "adjoint": draw(st.sampled_from([a for a in ADJOINTS if not a.owns_forward])),
            "solver": draw(st.sampled_from(SOLVERS)),
            "tol": Tolerance(rtol=draw(st.floats(0, 1)), atol=draw(st.floats(0, 1))),
            "input_dropout": draw(st.floats(0, 0.99)),
        },
        optimiser={
            "lr": draw(st.floats(1e-300, 1e300)),
            "betas": (draw(st.floats(0, 0.999)), 0.98),
            "average_after": draw(st.none() | st.integers(0, 5)),
        },
        devices={"early_adjoint": draw(st.sampled_from(ADJOINTS)), "early_adjoint_steps": draw(st.integers(1, 9))},
        trackers=draw(st.sampled_from([(), ("tensorboard",), ("tensorboard", "wandb")])),
        seed=draw(st.integers(0, 2**62)),
    )
    assert from_plain(json.loads(json.dumps(to_plain(config), allow_nan=False))) == config


def test_a_run_with_a_chain_of_solvers_can_be_read_back():
    config = tiny("unused", model={"solver": Fallback(Anderson(), NewtonKrylov())})
    assert from_plain(to_plain(config)) == config


def test_the_config_of_every_device_survives_json(corpus):
    config = everything(corpus)
    assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


@pytest.mark.parametrize("kind", [DataConfig, OptimiserConfig, DeviceConfig, RegulariserConfig, TrainConfig])
def test_configurations_are_frozen_and_keyword_only(kind):
    assert all(f.kw_only for f in fields(kind))
    config = tiny("unused") if kind is TrainConfig else kind()
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(kind)[0].name, None)


def test_the_vocabulary_is_taken_from_the_data_on_request(corpus):
    config = tiny("copy-memory", data={"source": corpus, "fit_vocabulary": True})
    resolved = resolve(config)
    assert resolved.model.vocabulary.size == 256 and not resolved.data.fit_vocabulary
    assert make_task(resolved).vocab_size == 256
    assert resolve(resolved) is resolved
    assert replace(resolved, model=config.model, data=config.data) == config


def test_a_vocabulary_of_another_size_says_what_to_pass(corpus):
    config = tiny("copy-memory", data={"source": corpus})
    with pytest.raises(ValueError, match="10 tokens and the data 256: pass --model.vocabulary.size 256"):
        make_task(config)


def test_the_model_of_a_configuration_is_a_model_configuration():
    assert isinstance(tiny("unused").model, ModelConfig)
