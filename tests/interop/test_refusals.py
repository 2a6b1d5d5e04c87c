"""What does not fit is refused with one `OriginalError` that names the key; nothing is guessed."""

import re

import pytest
import torch

from deqkit.interop import OriginalError
from interop.original_naming import SCENARIOS

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())


def refusal(scenario, state, **changes):
    """The message of the OriginalError; anything else that is raised, or nothing, is given as such."""
    try:
        scenario.load(state, **changes)
    except OriginalError as error:
        return str(error)
    except Exception as error:
        return error
    return None


def names(message, keys):
    """Whether one of the keys is named; a projection's `.weight` is not asked for, some versions have it, some not."""
    return isinstance(message, str) and any(re.sub(r"(projs\.\d+)\.weight", r"\1", key) in message for key in keys)


def in_other_words(key):
    """Keys that are missing are named as the later code spells them."""
    key = key.removesuffix("_raw").replace("trellisnet.module.", "trellisnet.")
    key = key.replace("tnet.module.full_conv.weight1", "trellisnet.inject_conv.weight")
    return re.sub(r"tnet\.module\.full_conv\.(weight|bias)2", r"trellisnet.func.full_conv.\1", key)


def is_open(key, tensor, changed):
    """Changes that shapes cannot tell: gains are numbers however they lie, and a decoder may be of any width."""
    if "weight" in key and key.endswith("_g"):
        return changed.numel() == tensor.numel()
    return key == "decoder.weight" and changed.ndim == 2 and changed.shape[0] == tensor.shape[0] > changed.shape[1] > 0


def longer(t):
    return torch.cat([t, t[:1]])


RESHAPED = {
    "one row more": longer,
    "one row less": lambda t: t[:-1],
    "one column more": lambda t: torch.cat([t, t[:, :1]], 1) if t.ndim > 1 else t.unsqueeze(1).repeat(1, 2),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[:, :0] if t.ndim > 1 else t.unsqueeze(1)[:, :0],
    "a number": lambda t: t.flatten()[0],
    "flat": lambda t: t.flatten() if t.ndim > 1 else t.view(1, -1),
    "one dimension more": lambda t: t[None],
    "four dimensions": lambda t: t.view(*t.shape, *[1] * (4 - t.ndim)),
    "transposed": lambda t: t.transpose(0, 1) if t.ndim > 1 else t.view(-1, 1),
}


@each_scenario
def test_a_missing_key(scenario):
    accepted = {}
    for key in scenario.keys:
        state = {k: v for k, v in scenario.state.items() if k != key}
        if not names(message := refusal(scenario, state), [key, in_other_words(key)]):
            accepted[key] = message
    assert not accepted


@each_scenario
@pytest.mark.parametrize("change", RESHAPED)
def test_a_wrong_shape(scenario, change):
    """Sizes are read off the tensors, so which of two that disagree is named is open; one of them must be."""
    accepted = {}
    for key in scenario.keys:
        state = dict(scenario.state)
        changed = RESHAPED[change](state[key])
        if changed.shape == state[key].shape or is_open(key, state[key], changed):
            continue
        state[key] = changed
        if not names(message := refusal(scenario, state), scenario.keys):
            accepted[key] = message
    assert not accepted


@each_scenario
@pytest.mark.parametrize(
    ("problem", "change"),
    [
        ("not finite", lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, torch.nan, t)),
        ("not finite", lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, -torch.inf, t)),
        ("int64", lambda t: t.long()),
        ("complex128", lambda t: t.to(torch.complex128)),
        ("list", lambda t: t.tolist()),
        ("NoneType", lambda t: None),
    ],
    ids=["nan", "inf", "int", "complex", "list", "none"],
)
def test_values_that_are_no_weights(scenario, problem, change):
    accepted = {}
    for key in scenario.keys:
        state = {**scenario.state, key: change(scenario.state[key])}
        message = refusal(scenario, state)
        if not names(message, [key]) or problem not in str(message):
            accepted[key] = message
    assert not accepted


@each_scenario
@pytest.mark.parametrize(
    "extra",
    [
        "optimizer.step",
        "encoder.bias",
        "func.dec_attn.qkv_net.bias",
        "func.dec_attn.r_net.bias",
        "func.layer_norm.weight",
        "word_emb.emb_projs.7.weight",
        "crit.out_projs.7",
        "crit.out_layers.9.weight",
        "crit.out_layers.9.bias",
        "word_emb.emb_layers.9.weight",
        "trellisnet.func.full_conv.scale",
        "mixsoft.prior.weight",
    ],
)
def test_a_key_too_many(scenario, extra):
    assert names(refusal(scenario, {**scenario.state, extra: torch.ones(3, 3)}), [extra])


@each_scenario
def test_both_a_weight_and_a_normalised_weight(scenario):
    """Which of them would be in use is not known."""
    accepted = {}
    for key in scenario.keys:
        if "weight_v" not in key and "_v_raw" not in key:
            continue
        plain = key.replace("_v", "")
        message = refusal(scenario, {**scenario.state, plain: scenario.state[key]})
        if not names(message, [plain]):
            accepted[plain] = message
    assert not accepted


@pytest.mark.parametrize(
    "name", ["v1b-weight-norm", "v2-weight-norm", "trellis-v1b-kernel-3", "first-trellis-weight-norm"]
)
def test_weight_norm_on_some_layers_only(name):
    scenario = SCENARIOS[name]
    for key in scenario.keys:
        if "_v" not in key:
            continue
        state = scenario.state
        gain = key.replace("_v_raw", "_g").replace("_v", "_g")
        state[key.replace("_v", "")] = state.pop(key)
        del state[gain]
        message = refusal(scenario, state)
        assert isinstance(message, str) and "weight norm on some layers" in message


@pytest.mark.parametrize("name", ["v1a", "v2-adaptive", "trellis-v1a"])
@pytest.mark.parametrize("vocabulary", [19, 21, 0, ["word"] * 19, []])
def test_another_vocabulary(name, vocabulary):
    message = refusal(SCENARIOS[name], SCENARIOS[name].state, vocabulary=vocabulary)
    assert isinstance(message, str) and "vocabulary of 20 words" in message


@pytest.mark.parametrize("splits", [None, (), (7,), (7, 13, 16)])
def test_the_wrong_number_of_splits(splits):
    for name in ("v2-classes-of-one-table", "v2-projected-classes"):
        message = refusal(SCENARIOS[name], SCENARIOS[name].state, splits=splits)
        assert names(message, ["crit.cluster_weight"]) and "2" in str(message)


@pytest.mark.parametrize("splits", [(7,), (7, 13, 16)])
def test_splits_that_do_not_fit_the_tail_vectors(splits):
    message = refusal(SCENARIOS["trellis-v1a"], SCENARIOS["trellis-v1a"].state, splits=splits)
    assert names(message, ["criterion.tail_vectors"])


@pytest.mark.parametrize("splits", [(13, 7), (0, 7), (7, 20), (7, 7), (7, 25)])
@pytest.mark.parametrize("name", ["v2-classes-of-one-table", "trellis-v1a"])
def test_splits_that_make_no_classes(name, splits):
    with pytest.raises(ValueError, match="cutoffs|splits"):
        SCENARIOS[name].load(splits=splits)


@pytest.mark.parametrize("splits", [(7, 13), (), (7,)])
def test_splits_for_tables_that_are_split_already(splits):
    with pytest.raises(ValueError, match="splits"):
        SCENARIOS["v2-adaptive"].load(splits=splits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v1a", {"dilation": 2}),
        ("trellis-v1a", {"pre_norm": True}),
        ("trellis-v1a", {"local_size": 3}),
        ("v1a", {"local_size": -1}),
        ("v1a", {"mem_len": -1}),
        ("trellis-v1a", {"dilation": 0}),
        ("first-trellis", {"dilation": 2}),  # whose injection would be dilated, too
    ],
)
def test_arguments_that_are_not_for_this_model(name, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SCENARIOS[name].load(**options)


def test_projections_that_are_tied_in_name_only():
    """Tied tables mean tied projections; where they differ, one of them would be lost."""
    for name, key in (("v2-adaptive", "crit.out_projs.2.weight"), ("v2-projected-classes", "crit.out_projs.1.weight")):
        state = SCENARIOS[name].state
        state[key] = state[key] + 1
        assert names(refusal(SCENARIOS[name], state), [key.removesuffix(".weight")])


@pytest.mark.parametrize("state", [{}, {"a": torch.ones(1)}, {"layers.0.weight": torch.ones(2, 2)}])
def test_other_models(state):
    assert names(refusal(SCENARIOS["v1a"], state), ["inject_conv.weight"])
