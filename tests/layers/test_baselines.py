"""LSTM, GRU and TCN against recurrences and convolutions written as loops, and segments against one long one."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from deqkit.analysis.training_memory import training_memory
from deqkit.layers import (
    ConvolutionConfig,
    ConvolutionNetwork,
    RecurrentConfig,
    RecurrentNetwork,
    VocabularyConfig,
)
from deqkit.model import ModelConfig, SequenceModel, num_parameters
from layers.naive import fill, normal

# B samples, T positions, D input width, H hidden width

INPUT, HIDDEN, OUTPUT, SIZE = 3, 4, 5, 11
RECURRENT: dict[str, Any] = {"unit": "lstm", "input_width": INPUT, "hidden_width": HIDDEN}
CONVOLUTION: dict[str, Any] = {"input_width": INPUT, "hidden_width": HIDDEN, "kernel_size": 3, "num_levels": 2}
NETWORKS: dict[str, RecurrentConfig | ConvolutionConfig] = {
    "lstm": RecurrentConfig(**RECURRENT),
    "lstm-2": RecurrentConfig(**RECURRENT, num_layers=2, output_width=OUTPUT, dropout=0.3),
    "gru": RecurrentConfig(**{**RECURRENT, "unit": "gru"}),
    "gru-3": RecurrentConfig(**{**RECURRENT, "unit": "gru"}, num_layers=3, dropout=0.3),
    "tcn": ConvolutionConfig(**CONVOLUTION, dropout=0.3),
    "tcn-wide": ConvolutionConfig(
        input_width=4, hidden_width=4, kernel_size=2, num_levels=3, output_width=OUTPUT, input_scale=1.5
    ),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def make(name: str, *, scale: float = 0.5) -> Any:
    config = NETWORKS[name]
    kind = RecurrentNetwork if isinstance(config, RecurrentConfig) else ConvolutionNetwork
    network = kind(config).double().eval()  # pyright: ignore[reportArgumentType]
    fill(network, seed=0, scale=scale)
    return network


def model_of(name: str, **options: Any) -> SequenceModel:
    """A language model whose untied softmax takes any width."""
    cell = NETWORKS[name]
    vocabulary = VocabularyConfig(size=SIZE, embedding_width=cell.input_width, tie_weights=False)
    torch.manual_seed(1)
    config = ModelConfig(vocabulary=vocabulary, cell=cell, **{"depth": 1, "mem_len": 1, **options})
    model = SequenceModel(config).double().eval()
    fill(model, seed=2)
    return model


def tokens(batch: int = 2, length: int = 23, *, seed: int = 3) -> torch.Tensor:
    return torch.randint(SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def recurrence(network: RecurrentNetwork, x_TD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One sample by the textbook's equations: outputs (T, H), and the last states layer by layer."""
    lasts = []
    for layer in network.layers:
        weights = {name.removesuffix("_l0"): p.detach().numpy() for name, p in layer.named_parameters()}
        h, c, outputs = np.zeros(HIDDEN), np.zeros(HIDDEN), []
        for x_D in x_TD:
            own = np.split(weights["weight_ih"] @ x_D + weights["bias_ih"], 4 if network.config.unit == "lstm" else 3)
            past = np.split(weights["weight_hh"] @ h + weights["bias_hh"], len(own))
            if network.config.unit == "lstm":
                i, f, g, o = (a + b for a, b in zip(own, past, strict=True))
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            else:
                r, z = (sigmoid(a + b) for a, b in zip(own[:2], past[:2], strict=True))
                h = (1 - z) * np.tanh(own[2] + r * past[2]) + z * h
            outputs.append(h)
        lasts.append(np.concatenate([h, c]) if network.config.unit == "lstm" else h)
        x_TD = np.stack(outputs)
    return x_TD, np.stack(lasts)


@pytest.mark.parametrize("name", ["lstm", "lstm-2", "gru", "gru-3"])
def test_recurrent_networks_are_the_textbooks(name):
    network, x = make(name), normal(2, 7, INPUT, seed=1)
    hidden, memory = network.inject(x)
    for b in range(2):
        expected, lasts = recurrence(network, x[b].numpy())
        if network.project is not None:
            expected = expected @ network.project.weight.detach().numpy().T + network.project.bias.detach().numpy()
        close(hidden[b], expected)
        close(memory.states_BLS[b], lasts)


def convolved(conv: Any, x_TD: torch.Tensor, dilation: int) -> torch.Tensor:
    """One weight-normed convolution as a sum over taps, oldest first."""
    parts = dict(conv.named_parameters())
    g, v = (parts[f"parametrizations.weight.original{i}"] for i in (0, 1))
    rows = []
    for t in range(len(x_TD)):
        out = parts["bias"].clone()
        for o in range(len(out)):
            norm = v[o].square().sum().sqrt()
            for s in range(v.shape[2]):
                place = t - (v.shape[2] - 1 - s) * dilation
                if place >= 0:
                    out[o] = out[o] + g[o, 0, 0] / norm * (v[o, :, s] * x_TD[place]).sum()
        rows.append(out)
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("name", ["tcn", "tcn-wide"])
def test_convolution_networks_are_explicit_sums(name):
    network = make(name)
    x = normal(1, 12, network.config.input_width, seed=1)
    h = x[0] * network.config.input_scale
    for level in range(network.config.num_levels):
        first, second = network.convolutions[2 * level : 2 * level + 2]
        y = convolved(first, h, 2**level).clamp(min=0)
        y = convolved(second, y, 2**level).clamp(min=0)
        if level == 0 and network.config.input_width != HIDDEN:
            h = h @ network.shortcut.weight.T + network.shortcut.bias
        h = (h + y).clamp(min=0)
    if network.project is not None:
        h = h @ network.project.weight.T + network.project.bias
    close(network.inject(x).hidden_BTH[0], h)


def test_the_taps_reach_as_far_as_the_configuration_says():
    """An impulse is seen by the last position that the network reaches, and not one later. All weights are positive,
    so that no relu hides it."""
    network = make("tcn")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.abs_()
    reach = sum(network.config.reaches)
    assert network.config.dilations == (1, 1, 2, 2) and reach == 12
    x = normal(1, reach + 2, INPUT, seed=1).abs()
    changed = x.clone()
    changed[:, 0] += 10.0
    moved = (network.inject(x).hidden_BTH - network.inject(changed).hidden_BTH).abs().amax(-1)[0]
    assert moved[reach] > 0 and moved[reach + 1] == 0


@every_network
def test_later_tokens_change_nothing_before(name):
    model, text = model_of(name), tokens()
    changed = text.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SIZE
    before, after = (model.log_probs(model(t)) for t in (text, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-6


@every_network
@pytest.mark.parametrize("cuts", [[11], [1, 2, 20]], ids=str)
def test_segments_with_memory_are_one_long_segment(name, cuts):
    model, text = model_of(name), tokens()
    whole, parts = model(text), []
    for start, end in zip([0, *cuts], [*cuts, text.shape[1]], strict=True):
        parts.append(model(text[:, start:end], memory=parts[-1].memory if parts else None))
    close(torch.cat([part.hidden for part in parts], 1), whole.hidden)
    for kept, last in zip(whole.memory[0], parts[-1].memory[0], strict=True):
        close(last, kept)
        assert not kept.requires_grad and kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


@every_network
def test_subsequences_change_neither_result_nor_gradient(name):
    """One draw of dropout is for all pieces of a sequence."""
    text, found = tokens(), []
    for pieces in (1, 3):
        model = model_of(name, subsequences=pieces).train()
        torch.manual_seed(0)
        output = model(text, text)
        assert output.loss is not None
        output.loss.backward()
        found.append([output.hidden, *(p.grad for p in model.parameters())])
    for cut, whole in zip(found[1], found[0], strict=True):
        close(cut, whole, 1e-10)


@every_network
def test_without_memory_length_segments_are_apart(name):
    model, text = model_of(name, mem_len=0), tokens()
    first = model(text[:, :9])
    assert not any(part.any() for part in first.memory[0])
    close(model(text[:, 9:], memory=first.memory).hidden, model(text[:, 9:]).hidden, 0.0)


@every_network
def test_the_result_is_a_constant_of_the_state(name):
    """What a cell would be asked: any state, one application."""
    network = make(name)
    x = normal(2, 5, network.config.input_width, seed=1)
    u = network.inject(x)
    z = normal(*u.hidden_BTH.shape, seed=2)
    assert torch.equal(network(z, u), u.hidden_BTH) and torch.equal(network.output(z), z)
    assert network.initial_state(u).shape == u.hidden_BTH.shape
    assert u.hidden_BTH.shape[-1] == network.output_width


@pytest.mark.parametrize("name", ["lstm-2", "gru-3", "tcn"])
def test_dropout_takes_whole_channels_in_training_only(name):
    network = make(name)
    x = normal(64, 5, INPUT, seed=1)
    assert all(mask is None for mask in network.sample_noise(x))
    network.train()
    masks = network.sample_noise(x)
    num_masks = {"lstm-2": 1, "gru-3": 2, "tcn": 4}[name]
    assert len(masks) == num_masks and all(mask.shape == (64, 1, HIDDEN) for mask in masks)
    close(torch.cat(masks).unique(), torch.tensor([0.0, 1 / 0.7], dtype=torch.float64))
    zero = tuple(torch.zeros_like(mask) for mask in masks)
    assert not torch.equal(network.inject(x, noise=masks).hidden_BTH, network.inject(x, noise=zero).hidden_BTH)
    assert torch.equal(network.inject(x, noise=zero).hidden_BTH, network.inject(x, noise=zero).hidden_BTH)


def test_a_dropped_layer_hides_what_is_below():
    """With all of its input dropped, the second layer gives what it gives for zeros."""
    network = make("lstm-2")
    zero = (torch.zeros(2, 1, HIDDEN, dtype=torch.float64),)
    one, other = (network.inject(normal(2, 5, INPUT, seed=seed), noise=zero).hidden_BTH for seed in (1, 2))
    assert torch.equal(one, other)


def test_weights_start_as_they_should():
    torch.manual_seed(0)
    lstm = RecurrentNetwork(RecurrentConfig(**RECURRENT, num_layers=2, forget_bias=2.5))
    for layer in lstm.layers:
        bias = layer.bias_ih_l0 + layer.bias_hh_l0  # pyright: ignore
        assert torch.equal(bias[HIDDEN : 2 * HIDDEN], torch.full((HIDDEN,), 2.5))
        assert bias[:HIDDEN].abs().max() < 1 and bias[2 * HIDDEN :].abs().max() < 1
    for std, expected in ((0.01, 0.01), (None, 1 / math.sqrt(40 * 5))):
        config = ConvolutionConfig(input_width=40, hidden_width=40, kernel_size=5, num_levels=1, init_std=std)
        for convolution in ConvolutionNetwork(config).convolutions:
            weight: Any = convolution.weight  # the one in use, under weight norm
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05)


def test_the_embedding_is_of_size_one_whatever_the_weights_are():
    torch.manual_seed(0)
    cell = ConvolutionConfig(input_width=64, hidden_width=64, kernel_size=2, num_levels=1)
    vocabulary = VocabularyConfig(size=500, embedding_width=64)
    model = SequenceModel(ModelConfig(vocabulary=vocabulary, cell=cell, depth=1))
    assert float(model.embed(tokens(4, 50)).detach().std()) == pytest.approx(1.0, rel=0.05)


@every_network
def test_every_parameter_learns(name):
    model, text = model_of(name).train(), tokens()
    output = model(text, text)
    assert output.loss is not None and output.solution is None
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_parameters_counted_by_hand():
    counts = {name: num_parameters(model_of(name)).rest for name in NETWORKS}
    lstm, gru = 4 * HIDDEN * (INPUT + HIDDEN + 2), 3 * HIDDEN * (INPUT + HIDDEN + 2)
    assert counts["lstm"] == lstm
    assert counts["lstm-2"] == lstm + 4 * HIDDEN * (2 * HIDDEN + 2) + (HIDDEN + 1) * OUTPUT
    assert counts["gru-3"] == gru + 2 * 3 * HIDDEN * (2 * HIDDEN + 2)
    assert counts["tcn"] == HIDDEN * (3 * INPUT + 3 * 3 * HIDDEN + 4 * 2) + (INPUT + 1) * HIDDEN
    assert counts["tcn-wide"] == 6 * HIDDEN * (2 * HIDDEN + 2) + (HIDDEN + 1) * OUTPUT


@pytest.mark.parametrize("name", ["gru", "tcn"])
def test_planned_memory_is_what_a_step_needs(name):
    """oneDNN's LSTM holds more than torch's own, which is what is planned."""
    config = model_of(name).config
    planned, real = (training_memory(config, batch=8, length=8, abstract=abstract) for abstract in (True, False))
    assert planned.peak == pytest.approx(real.peak, rel=0.05)


def test_planned_memory_of_an_lstm_grows_with_its_length():
    short, long = (training_memory(model_of("lstm").config, batch=8, length=n).activations for n in (4, 16))
    assert 3.5 < long / short < 4.5 and short > 4 * 8 * 6 * HIDDEN * 4  # at least gates, h and c


@every_network
@pytest.mark.parametrize("depth", ["equilibrium", 2, 0, True, 1.5])
def test_any_other_depth_is_refused(name, depth):
    kind = "recurrent" if isinstance(NETWORKS[name], RecurrentConfig) else "convolution"
    message = f"a {kind} network is run once and has no equilibrium: depth must be 1, got {depth!r}"
    with pytest.raises(ValueError, match=message):
        model_of(name, depth=depth)
    with pytest.raises(ValueError, match=message):
        model_of(name)(tokens(), depth=depth)


@pytest.mark.parametrize("options", [{"tied": False}, {"checkpoint": True}, {"compile": True}], ids=str)
def test_options_for_layers_are_refused(options):
    with pytest.raises(ValueError, match="no layers to untie, to checkpoint or to compile"):
        model_of("lstm", **options)


@pytest.mark.parametrize(
    ("vocabulary", "cell", "message"),
    [
        ({"embedding_width": 5}, {}, "embedding_width 5 and the recurrent cell's input_width 3"),
        ({"cutoffs": (4,), "div_val": 3}, {}, "a recurrent model has one table for all classes"),
        ({"tie_weights": True}, {}, "output_width 4 and input_width 3"),
        ({"tie_weights": True}, {"output_width": 6}, "output_width 6 and input_width 3"),
    ],
)
def test_widths_that_do_not_fit_are_refused(vocabulary, cell, message):
    sizes = {"size": SIZE, "embedding_width": INPUT, "tie_weights": False}
    with pytest.raises(ValueError, match=message):
        ModelConfig(
            vocabulary=VocabularyConfig(**{**sizes, **vocabulary}), cell=RecurrentConfig(**RECURRENT, **cell), depth=1
        )


def test_a_map_to_the_tables_width_lets_the_softmax_share_it():
    cell = RecurrentConfig(**RECURRENT, output_width=INPUT)
    vocabulary = VocabularyConfig(size=SIZE, embedding_width=INPUT, cutoffs=(4,))
    model = SequenceModel(ModelConfig(vocabulary=vocabulary, cell=cell, depth=1))
    assert model.softmax.tables[0] is model.embedding.tables[0]
    close(model.log_probs(model(tokens())).exp().sum(-1).detach(), torch.ones(2, 23), 1e-5)


def test_the_memory_of_another_network_is_refused():
    text = tokens()
    memory = model_of("lstm")(text).memory
    with pytest.raises(ValueError, match="ConvolutionMemory.*RecurrentMemory"):
        model_of("tcn")(text, memory=memory)
    with pytest.raises(ValueError, match="memory does not fit"):
        model_of("gru")(text, memory=memory)


MISTAKES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (RecurrentConfig, RECURRENT, {"unit": "lsmt"}, 'unit must be "lstm" or "gru".*lsmt'),
    *[
        (RecurrentConfig, RECURRENT, {name: 0}, f"{name}.*0")
        for name in ("input_width", "hidden_width", "output_width", "num_layers")
    ],
    (RecurrentConfig, RECURRENT, {"dropout": 1.0, "num_layers": 2}, "dropout.*1.0"),
    (RecurrentConfig, RECURRENT, {"dropout": 0.1}, "between layers.*0.1"),
    (RecurrentConfig, RECURRENT, {"forget_bias": float("inf")}, "forget_bias.*inf"),
    (RecurrentConfig, RECURRENT, {"unit": "gru", "forget_bias": 2.0}, "a GRU has no forget gate.*2.0"),
    *[
        (ConvolutionConfig, CONVOLUTION, {name: 0}, f"{name}.*0")
        for name in ("input_width", "hidden_width", "output_width", "num_levels")
    ],
    (ConvolutionConfig, CONVOLUTION, {"kernel_size": 1}, "kernel_size.*at least 2.*1"),
    (ConvolutionConfig, CONVOLUTION, {"dropout": -0.1}, "dropout.*-0.1"),
    (ConvolutionConfig, CONVOLUTION, {"init_std": -1.0}, "init_std.*-1.0"),
    (ConvolutionConfig, CONVOLUTION, {"input_scale": 0.0}, "input_scale.*0.0"),
]


@pytest.mark.parametrize(("config", "fields", "change", "message"), MISTAKES)
def test_a_mistake_is_refused_by_name(config, fields, change, message):
    config(**fields)
    with pytest.raises(ValueError, match=message):
        config(**{**fields, **change})
