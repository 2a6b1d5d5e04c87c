"""Recorded gradients against ours: every recorded key is used and every parameter of the model is compared.

The correspondence of names is written out here a second time, on purpose: the reader under test must not judge itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from deqkit.model import SequenceModel

QUIRK = "@reference_padding_idx_quirk"

# Patterns of the original's names, and ours. `\1` carries on; weights of convolutions are treated in `_ours`.
_NAMES = {
    r"word_emb\.emb_layers\.(\d+)\.weight": r"embedding.tables.\1",
    r"word_emb\.emb_projs\.(\d+)(?:\.weight)?": r"embedding.projections.\1",
    r"crit\.out_layers\.(\d+)\.weight": r"softmax.tables.\1",
    r"crit\.out_layers\.(\d+)\.bias": r"softmax.biases.\1",
    r"crit\.out_projs\.(\d+)(?:\.weight)?": r"softmax.projections.\1",
    r"(?:crit\.cluster_weight|criterion\.tail_vectors)": "softmax.class_table",
    r"(?:crit\.cluster_bias|criterion\.tail_bias)": "softmax.class_bias",
    r"func\.dec_attn\.r_w_bias": "core.cell.content_bias",
    r"func\.dec_attn\.r_r_bias": "core.cell.position_bias",
    r"func\.dec_attn\.qkv_net\.(.*)": r"core.cell.qkv.\1",
    r"func\.dec_attn\.r_net\.(.*)": r"core.cell.position.\1",
    r"func\.dec_attn\.o_net\.(.*)": r"core.cell.project.\1",
    r"func\.pos_ff\.ff1_net\.(.*)": r"core.cell.expand.\1",
    r"func\.pos_ff\.ff2_net\.(.*)": r"core.cell.contract.\1",
    r"trellisnet\.func\.full_conv\.(.*)": r"core.cell.conv.\1",
    r"(?:trellisnet\.)?inject_conv\.(.*)": r"core.cell.injection.\1",
    r"encoder\.weight": "embedding.tables.0",
    r"decoder\.weight": "softmax.tables.0",
    r"decoder\.bias": "softmax.biases.0",
}
_PARAMETRISED = {
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}


def _ours(key: str, value: Tensor) -> tuple[str, Tensor]:
    """Our name of a parameter of the original, and a tensor of its shape in our layout."""
    names = [re.sub(pattern, name, key) for pattern, name in _NAMES.items() if re.fullmatch(pattern, key)]
    assert len(names) == 1, f"{key} corresponds to {names}"
    name = names[0]
    if name.startswith("softmax.class_"):
        return name, value.flip(0)  # the original counts the classes from the back
    stem, _, last = name.rpartition(".")
    if last == "weight_g":
        value = value.reshape(-1, 1)
    elif value.ndim == 3:  # taps side by side, oldest first
        value = value.transpose(1, 2).flatten(1)
    return f"{stem}.{_PARAMETRISED.get(last, last)}", value


def pair_up(model: SequenceModel, recorded: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """(name, our gradient, the recorded one) for every parameter. Fails if a key or a parameter is left over."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    actual: dict[nn.Parameter, Tensor] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        actual[parameter] = parameter.new_zeros(parameter.shape) if gradient is None else gradient
    expected: dict[nn.Parameter, Tensor] = {}
    for key, recorded_value in recorded.items():
        if key.endswith(QUIRK):
            _check_quirk(recorded_value, recorded[key.removesuffix(QUIRK)])
            continue
        name, value = _ours(key, recorded_value)
        if name not in parameters:  # a plain softmax has no classes, and the recorded gradient of theirs is zero
            assert name in ("softmax.class_table", "softmax.class_bias") and not value.any(), key
            continue
        parameter = parameters[name]
        if parameter.numel() == 0:  # classes of a split softmax, where our softmax is full
            assert not value.any(), f"{key} has a gradient, but nothing of the model corresponds to it"
            continue
        assert value.shape == parameter.shape, (key, value.shape, parameter.shape)
        # The original's second version ties projections as two parameters with one storage: the gradient is the sum.
        expected[parameter] = expected[parameter] + value if parameter in expected else value
    _join_projections(model, actual, expected)
    missing = {name for name, p in model.named_parameters() if p.numel() and p in actual and p not in expected}
    assert not missing, f"no gradient was recorded for {missing}"
    return [(name, actual[p], expected[p]) for name, p in model.named_parameters() if p in expected]


def _join_projections(
    model: SequenceModel, actual: dict[nn.Parameter, Tensor], expected: dict[nn.Parameter, Tensor]
) -> None:
    """The original's first version ties projections even where tables are not tied: one gradient for two of ours."""
    for i, parameter in enumerate(model.softmax.projections):
        if i and parameter not in expected:
            source = model.embedding.projections[i if model.config.vocabulary.div_val > 1 else 0]
            actual[source] = actual[source] + actual.pop(parameter)


def _check_quirk(quirk: Tensor, exact: Tensor) -> None:
    """The original's own gradient of the encoder misses the inputs that are the last token, and nothing else."""
    assert quirk.shape == exact.shape and quirk[:-1].equal(exact[:-1])


def assert_gradients(model: SequenceModel, recorded: Mapping[str, Tensor], *, rtol: float = 1e-7) -> None:
    """Relative agreement, tensor by tensor, in the 2-norm; what is exactly zero must be zero."""
    errors = {}
    for name, actual, expected in pair_up(model, recorded):
        error, size = float((actual - expected).norm()), float(expected.norm())
        if not error <= rtol * size:
            errors[name] = f"|error| {error:.1e}, |gradient| {size:.1e}"
    assert not errors, errors


def global_error(model: SequenceModel, recorded: Mapping[str, Tensor]) -> float:
    """||ours - exact|| / ||exact|| over all parameters together, computed in float64."""
    pairs = [(actual.double(), expected.double()) for _, actual, expected in pair_up(model, recorded)]
    error = sum(float((actual - expected).square().sum()) for actual, expected in pairs)
    return (error / sum(float(expected.square().sum()) for _, expected in pairs)) ** 0.5
