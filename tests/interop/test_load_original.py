"""`load_original` gives back the model whose weights went into a checkpoint of any of the original's versions."""

import pytest
import torch

from deqkit import Tolerance
from deqkit.interop import load_original
from interop.original_naming import SCENARIOS, original_state

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
TOKENS = torch.tensor([[3, 19, 0, 7, 12, 13], [5, 6, 18, 1, 13, 8]])


def outputs(model, **settings):
    """States, losses and whole distributions of two segments."""
    with torch.no_grad():
        first = model(TOKENS, TOKENS.flip(1), **settings)
        second = model(TOKENS.flip(0), TOKENS, first.memory, **settings)
        scores = [model.log_probs(first), model.log_probs(second), first.nll, second.nll]
    return [*scores, first.hidden, second.hidden]


@each_scenario
def test_configuration_and_weights_come_back(scenario):
    model, loaded = scenario.model, scenario.load()
    for field in ("vocabulary", "cell", "depth", "mem_len"):
        assert getattr(loaded.config, field) == getattr(model.config, field)
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert state[name].dtype is torch.float64 and torch.equal(state[name], tensor), name


@each_scenario
def test_outputs_are_the_same(scenario):
    settings = {"tol": Tolerance(rtol=1e-14), "max_steps": 200, "solver": scenario.model.config.solver}
    for options in ({"depth": 3}, settings):
        for actual, expected in zip(
            outputs(scenario.load(), **options), outputs(scenario.model, **options), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@each_scenario
def test_what_was_tied_is_tied(scenario):
    def sharing(model):
        names = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        return sorted(names.values())

    assert sharing(scenario.load()) == sharing(scenario.model)


@each_scenario
def test_it_trains(scenario):
    model = scenario.load()
    model(TOKENS, TOKENS.flip(1)).loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.numel() or (parameter.grad is not None and parameter.grad.any()), name


@each_scenario
def test_the_state_dict_is_left_alone(scenario):
    before = scenario.state
    state = {key: value.clone() for key, value in before.items()}
    model = scenario.load(state)
    assert list(state) == list(before)
    for parameter in model.parameters():
        parameter.detach().add_(1)
    for key, value in state.items():
        assert torch.equal(value.nan_to_num(), before[key].nan_to_num()), key


@each_scenario
def test_the_callers_random_numbers_are_left_alone(scenario):
    state, before = scenario.state, torch.get_rng_state()
    scenario.load(state)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_of_the_checkpoint_is_kept(dtype):
    for scenario in SCENARIOS.values():
        model = scenario.load({key: value.to(dtype) for key, value in scenario.state.items()})
        assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}


def test_parameters_and_tensors_that_are_not_contiguous_are_read_too():
    scenario = SCENARIOS["v2-adaptive"]
    state = {
        key: torch.nn.Parameter(value.mT.contiguous().mT if value.ndim > 1 else value)
        for key, value in scenario.state.items()
    }
    for name, tensor in scenario.load(state).state_dict().items():
        assert torch.equal(tensor, scenario.model.state_dict()[name]), name


def test_a_trellis_net_without_saved_tail_vectors_starts_them_at_zero():
    """The original never saved them with the model; without splits the softmax is plain."""
    scenario = SCENARIOS["trellis-v1a"]
    state = {key: value for key, value in scenario.state.items() if not key.startswith("criterion.")}
    softmax = scenario.load(state).softmax
    assert softmax.class_table.shape == (2, 6) and not softmax.class_table.any() and not softmax.class_bias.any()
    for without_splits in (state, scenario.state):
        assert scenario.load(without_splits, splits=None).config.vocabulary.cutoffs == ()


@pytest.mark.parametrize("name", ["v1a", "trellis-v1a"])
def test_the_vocabulary_may_be_given_as_a_size_or_as_words(name):
    scenario = SCENARIOS[name]
    assert scenario.load(vocabulary=20).config.vocabulary.size == 20
    assert scenario.load(vocabulary=[f"word{i}" for i in range(20)]).config.vocabulary.size == 20


def test_defaults():
    """Post-norm, no memory, no window, plain softmax."""
    model = load_original(original_state(SCENARIOS["v1a"].model, "v1a"))
    assert model.config.mem_len == 0 and model.config.cell == SCENARIOS["v1a"].model.config.cell
