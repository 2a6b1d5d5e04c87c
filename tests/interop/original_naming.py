"""Checkpoints as the original's versions would have saved them, made from models of ours.

| version | what                                                                      |
|---------|---------------------------------------------------------------------------|
| v1a     | first code: everything a convolution, copies under func_copy, deq, deqback |
| v1b     | the same with other copies                                                 |
| v2      | feed-forward as linear maps, projections as modules, no copies             |
| tnet    | the authors' earlier TrellisNet, one bias, weights dropped by name         |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from deqkit.interop import load_original
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel

GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"
_COPIES = {
    "v1a": ("func_copy", "deq.func", "deqback.func", "deqback.func_copy"),
    "v1b": ("func_copy", "deq.func", "deq.func_copy"),
}


def make_model(vocabulary: VocabularyConfig, cell: TransformerConfig | TrellisConfig, **options: Any) -> SequenceModel:
    """A model of small random weights, biases too, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = SequenceModel(ModelConfig(vocabulary=vocabulary, cell=cell, **options)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def original_state(model: SequenceModel, version: str, *, weight_drop: bool = False) -> dict[str, Tensor]:
    """The state dict that the original would have for these weights."""
    ours = {key: value.detach().clone() for key, value in model.state_dict().items()}
    if isinstance(model.config.cell, TransformerConfig):
        return _transformer(ours, version)
    assert isinstance(model.config.cell, TrellisConfig)
    return _first_trellis(ours, model.config.cell) if version == "tnet" else _trellis(ours, version, model, weight_drop)


def _linear(ours: dict[str, Tensor], name: str, key: str, *, taps: int | None) -> dict[str, Tensor]:
    """One map with its weight as a convolution with so many taps, or as a matrix."""
    theirs: dict[str, Tensor] = {}
    for ending, last in (("weight", "weight"), (DIRECTION, "weight_v")):
        if (weight := ours.get(f"core.cell.{name}.{ending}")) is not None:
            theirs[f"{key}.{last}"] = weight if taps is None else weight.unflatten(1, (taps, -1)).transpose(1, 2)
    if (gain := ours.get(f"core.cell.{name}.{GAIN}")) is not None:
        theirs[f"{key}.weight_g"] = gain if taps is None else gain.unsqueeze(2)
    if (bias := ours.get(f"core.cell.{name}.bias")) is not None:
        theirs[f"{key}.bias"] = bias
    return theirs


def _transformer(ours: dict[str, Tensor], version: str) -> dict[str, Tensor]:
    wrapped = ".weight" if version == "v2" else ""
    theirs = {"pos_emb.inv_freq": torch.rand(4, dtype=torch.float64)}
    for name, tensor in ours.items():
        part, kind, number = (name.split(".") + [""])[:3]
        if part == "embedding":
            key = f"emb_layers.{number}.weight" if kind == "tables" else f"emb_projs.{number}{wrapped}"
            theirs[f"word_emb.{key}"] = tensor
        elif part == "softmax" and kind in ("tables", "biases"):
            theirs[f"crit.out_layers.{number}.{'weight' if kind == 'tables' else 'bias'}"] = tensor
        elif part == "softmax" and kind == "projections":
            theirs[f"crit.out_projs.{number}{wrapped}"] = tensor
        elif part == "softmax" and tensor.numel():
            theirs["crit.cluster_weight" if kind == "class_table" else "crit.cluster_bias"] = tensor.flip(0)
    theirs |= _linear(ours, "injection", "inject_conv", taps=1)
    cell = {"dec_attn.r_w_bias": ours["core.cell.content_bias"], "dec_attn.r_r_bias": ours["core.cell.position_bias"]}
    for name, key in (("qkv", "qkv_net"), ("position", "r_net"), ("project", "o_net")):
        cell |= _linear(ours, name, f"dec_attn.{key}", taps=1)
    for name, key in (("expand", "ff1_net"), ("contract", "ff2_net")):
        cell |= _linear(ours, name, f"pos_ff.{key}", taps=None if version == "v2" else 1)
    return theirs | _with_copies(cell, version, prefix="")


def _with_copies(cell: dict[str, Tensor], version: str, *, prefix: str) -> dict[str, Tensor]:
    """The copies of the weights are not of the trained ones: nothing may be read from them."""
    theirs = {f"{prefix}func.{key}": value for key, value in cell.items()}
    for copy in _COPIES.get(version, ()):
        theirs |= {f"{prefix}{copy}.{key}": torch.full_like(value, torch.nan) for key, value in cell.items()}
    return theirs


def _trellis(ours: dict[str, Tensor], version: str, model: SequenceModel, weight_drop: bool) -> dict[str, Tensor]:
    cell = model.config.cell
    assert isinstance(cell, TrellisConfig)
    prefix = "trellisnet.module." if weight_drop else "trellisnet."
    theirs = _with_copies(_linear(ours, "conv", "full_conv", taps=cell.kernel_size), version, prefix=prefix)
    theirs |= _linear(ours, "injection", f"{prefix}inject_conv", taps=cell.kernel_size)
    if weight_drop:
        theirs = {f"{key}_raw" if key.endswith(("weight", "weight_v")) else key: v for key, v in theirs.items()}
    return theirs | _vocabulary_of_trellis(ours)


def _first_trellis(ours: dict[str, Tensor], cell: TrellisConfig) -> dict[str, Tensor]:
    theirs: dict[str, Tensor] = {}
    for name, number in (("injection", 1), ("conv", 2)):
        for key, value in _linear(ours, name, "full_conv", taps=cell.kernel_size).items():
            last = key.rpartition(".")[2]
            last = last.replace("weight", f"weight{number}").replace("bias", f"bias{number}")
            theirs[
                f"full_conv.{last}_raw" if last in (f"weight{number}", f"weight{number}_v") else f"full_conv.{last}"
            ] = value
    assert not theirs.pop("full_conv.bias1").any(), "it has one bias: that of the injection must be zero"
    both = {f"{prefix}.module.{key}": value for prefix in ("tnet", "network.0") for key, value in theirs.items()}
    return both | _vocabulary_of_trellis(ours)


def _vocabulary_of_trellis(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    theirs = {"encoder.weight": ours["embedding.tables.0"], "decoder.weight": ours["softmax.tables.0"]}
    theirs["decoder.bias"] = ours["softmax.biases.0"]
    if "softmax.class_bias" in ours:
        theirs["criterion.tail_vectors"] = ours["softmax.class_table"].flip(0)
        theirs["criterion.tail_bias"] = ours["softmax.class_bias"].flip(0)
    return theirs


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A model of ours, and how a checkpoint of it in the original's naming is read."""

    model: SequenceModel
    version: str
    weight_drop: bool = False

    @functools.cached_property
    def _state(self) -> dict[str, Tensor]:
        return original_state(self.model, self.version, weight_drop=self.weight_drop)

    @property
    def state(self) -> dict[str, Tensor]:
        """A new dict every time, of the same tensors."""
        return dict(self._state)

    @property
    def arguments(self) -> dict[str, Any]:
        config = self.model.config
        splits = config.vocabulary.cutoffs if config.vocabulary.div_val == 1 and config.vocabulary.cutoffs else None
        if isinstance(config.cell, TrellisConfig):
            return {"mem_len": config.mem_len, "dilation": config.cell.dilation, "splits": splits}
        assert isinstance(config.cell, TransformerConfig)
        cell = {"pre_norm": config.cell.pre_norm, "local_size": config.cell.local_size}
        return {"mem_len": config.mem_len, "splits": splits, **cell}

    def load(self, source: Any = None, **changes: Any) -> SequenceModel:
        return load_original(self.state if source is None else source, **{**self.arguments, **changes})

    @property
    def keys(self) -> list[str]:
        """The keys that carry weights, without copies and buffers."""
        ignored = ("func_copy.", "deq.", "deqback.", "inv_freq", "network.0.")
        return [key for key in self.state if not any(part in key for part in ignored)]


def _transformer_model(normalise: Any = "none", pre_norm: bool = False, local_size: int = 0, **words: Any):
    vocabulary = VocabularyConfig(**{"size": 20, "embedding_width": 8, **words})
    cell = TransformerConfig(
        width=8,
        num_heads=2,
        head_width=4,
        hidden_width=6,
        normalise=normalise,
        pre_norm=pre_norm,
        local_size=local_size,
    )
    return make_model(vocabulary, cell, mem_len=5)


def _trellis_model(
    normalise: Any = "none", kernel_size: int = 2, dilation: int = 1, output_width: int = 6, **words: Any
):
    vocabulary = VocabularyConfig(**{"size": 20, "embedding_width": 6, **words})
    sizes = {"input_width": 6, "hidden_width": 3, "output_width": output_width}
    cell = TrellisConfig(**sizes, kernel_size=kernel_size, dilation=dilation, normalise=normalise)
    return make_model(vocabulary, cell, mem_len=1)


def _without_injection_bias(model: SequenceModel) -> SequenceModel:
    with torch.no_grad():
        model.cells[0].injection.bias.zero_()
    return model


ADAPTIVE = {"cutoffs": (7, 13), "div_val": 2}
SCENARIOS = {
    "v1a": Scenario(_transformer_model(), "v1a"),
    "v1b-weight-norm": Scenario(_transformer_model("weight"), "v1b"),
    "v2-pre-norm-local": Scenario(_transformer_model(pre_norm=True, local_size=3), "v2"),
    "v2-weight-norm": Scenario(_transformer_model("weight"), "v2"),
    "v1b-untied": Scenario(_transformer_model(tie_weights=False), "v1b"),
    "v1a-adaptive": Scenario(_transformer_model("weight", **ADAPTIVE), "v1a"),
    "v2-adaptive": Scenario(_transformer_model(**ADAPTIVE), "v2"),
    "v2-adaptive-untied": Scenario(_transformer_model(**ADAPTIVE, tie_weights=False), "v2"),
    "v2-classes-of-one-table": Scenario(_transformer_model(cutoffs=(7, 13)), "v2"),
    "v1b-projected": Scenario(_transformer_model(embedding_width=4), "v1b"),
    "v2-projected-classes": Scenario(_transformer_model(embedding_width=4, cutoffs=(7, 13)), "v2"),
    "trellis-v1a": Scenario(_trellis_model(cutoffs=(7, 13)), "v1a"),
    "trellis-v1b-kernel-3": Scenario(_trellis_model("weight", 3, 2, 4, tie_weights=False), "v1b"),
    "trellis-dropped": Scenario(_trellis_model(), "v1b", weight_drop=True),
    "trellis-dropped-weight-norm": Scenario(_trellis_model("weight"), "v1a", weight_drop=True),
    "first-trellis": Scenario(_without_injection_bias(_trellis_model()), "tnet"),
    "first-trellis-weight-norm": Scenario(_without_injection_bias(_trellis_model("weight", 3)), "tnet"),
}
