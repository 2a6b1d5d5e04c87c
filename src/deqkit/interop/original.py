"""Models of the original authors' code: state dicts of every version of it, read into a `SequenceModel`.

DEQ-Transformer (2019 to 2021) and DEQ-TrellisNet; also the TrellisNet of their earlier repository, whose weights make
the same cell. Sizes, weight norm and tying are read off the tensors; what they do not reveal is an argument.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from deqkit.adjoint import Implicit
from deqkit.interop._keys import OriginalError, Reader
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.layers.linear import Normalisation
from deqkit.model import ModelConfig, SequenceModel
from deqkit.solve import GMRES, Broyden, Tolerance

# Copies of the weights that DEQModule and its predecessors kept for the backward pass, and a buffer.
_ALIASES = r"(.*\.)?(func_copy|deq|deqback)\..*|pos_emb\.inv_freq|network\.0\..*"
# What torch.load raises for files that are no state dict or are cut short, as far as is known.
_DAMAGED = (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, OSError)
# As exact as float32 allows: an import is for reproducing what was published. The hard cells among the recordings need
# a long memory and some patience.
_EXACT = Tolerance(rtol=3e-7, patience=30)
_SOLVE: dict[str, Any] = {
    "solver": Broyden(memory=30, group="prefix"),
    "tol": _EXACT,
    "max_steps": 100,
    "eval_tol": Tolerance(rtol=1e-4),
    "eval_max_steps": 100,
    "adjoint": Implicit(solver=GMRES(), tol=_EXACT, max_steps=100),
}
_TRANSFORMER_LINEARS = {
    "qkv": "func.dec_attn.qkv_net",
    "position": "func.dec_attn.r_net",
    "project": "func.dec_attn.o_net",
    "expand": "func.pos_ff.ff1_net",
    "contract": "func.pos_ff.ff2_net",
}


def load_original(
    path_or_state_dict: str | Path | Mapping[str, Tensor],
    *,
    pre_norm: bool = False,
    mem_len: int = 0,
    local_size: int = 0,
    dilation: int = 1,
    splits: Sequence[int] | None = None,
    vocabulary: int | Sequence[str] | None = None,
) -> SequenceModel:
    """A model with the weights of a checkpoint of the original code, in the checkpoint's dtype.

    It solves as exactly as float32 allows in training mode, and to 1e-4 in evaluation mode; pass `tol` and `max_steps`
    with a call, or change `model.config`, for quicker and coarser solves.

    Args:
        path_or_state_dict: a file (`torch.save` of a state dict, or safetensors) or the state dict itself. Files are
            loaded as weights only: nothing in them is executed.
        pre_norm: whether it was trained with `--pre_lnorm`, which leaves no trace in the weights.
        mem_len: positions of memory; for a TrellisNet any number but 0 keeps its history.
        local_size: the attention window, 0 for none (the original's 0 meant 1000).
        dilation: of the TrellisNet's convolution.
        splits: where the classes of a softmax with one table begin (the TrellisNet's split softmax, or an adaptive
            softmax with div_val 1). Without them a TrellisNet has a plain softmax.
        vocabulary: its size or its words, checked against the embedding.

    Raises:
        OriginalError: a key that does not fit, by name; or a file that holds no state dict.
    """
    state = path_or_state_dict if isinstance(path_or_state_dict, Mapping) else read_state_dict(path_or_state_dict)
    reader = Reader(state, ignore=_ALIASES)
    if "inject_conv.weight" in reader:
        if dilation != 1:
            raise ValueError("dilation is for a TrellisNet; this is a transformer")
        config, weights = _read_transformer(reader, pre_norm=pre_norm, local_size=local_size, splits=splits)
    elif "encoder.weight" in reader:
        if pre_norm or local_size:
            raise ValueError("pre_norm and local_size are for a transformer; this is a TrellisNet")
        config, weights = _read_trellis(reader, dilation=dilation, splits=splits)
    else:
        raise OriginalError(
            "neither a DEQ-Transformer (no key inject_conv.weight) nor a TrellisNet (no key encoder.weight); "
            f"the keys begin with {', '.join(sorted(state)[:3]) or 'nothing'}"
        )
    reader.finish()
    _check_vocabulary(config["vocabulary"], vocabulary)
    with torch.random.fork_rng():  # the initial weights are thrown away; the caller's random numbers are not
        model = SequenceModel(ModelConfig(mem_len=mem_len, **config, **_SOLVE)).to(weights["embedding.tables.0"].dtype)
    model.load_state_dict(_tied(weights, model))
    return model


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, without executing anything in it."""
    path = Path(path)
    if path.is_dir():
        raise OriginalError(f"{path} is a directory, not a file")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise OriginalError(f"{path} is not a complete safetensors file: {error}") from error
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except _DAMAGED as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OriginalError(
            f"{path} cannot be read as a state dict ({reason}). A file that pickles a whole model must be converted "
            "where its code is at hand: torch.save(model.state_dict(), FILE)"
        ) from error
    if not isinstance(content, Mapping):
        raise OriginalError(f"{path} does not hold a state dict, but {type(content).__name__}")
    return dict(content)


def _read_transformer(
    reader: Reader, *, pre_norm: bool, local_size: int, splits: Sequence[int] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    kinds: dict[str, Normalisation] = {}
    for name, key in _TRANSFORMER_LINEARS.items():
        kinds[name] = reader.linear(f"core.cell.{name}", key, weights, bias=name not in ("qkv", "position"))
    normalise = _one_kind(kinds, _TRANSFORMER_LINEARS)
    weights["core.cell.content_bias"] = reader.take("func.dec_attn.r_w_bias", ndim=2)
    num_heads, head_width = weights["core.cell.content_bias"].shape
    weights["core.cell.position_bias"] = reader.take("func.dec_attn.r_r_bias", (num_heads, head_width))
    reader.linear("core.cell.injection", "inject_conv", weights)
    width, inner = weights["core.cell.project.bias"].numel(), num_heads * head_width
    hidden = weights["core.cell.expand.bias"].numel()
    shapes = {"qkv": (3 * inner, width), "position": (inner, width), "project": (width, inner)}
    shapes |= {"expand": (hidden, width), "contract": (width, hidden), "injection": (3 * inner, width)}
    reader.check_linears(shapes, weights, {**_TRANSFORMER_LINEARS, "injection": "inject_conv"})
    cell = TransformerConfig(
        width=width,
        num_heads=num_heads,
        head_width=head_width,
        hidden_width=hidden,
        pre_norm=pre_norm,
        local_size=local_size,
        normalise=normalise,
    )
    return {"cell": cell, "vocabulary": _read_vocabulary(reader, weights, width, splits)}, weights


def _read_vocabulary(
    reader: Reader, weights: dict[str, Tensor], width: int, splits: Sequence[int] | None
) -> VocabularyConfig:
    """Embedding and softmax, plain or adaptive."""
    tables = reader.take_all("word_emb.emb_layers.{}.weight", ndim=2)
    reader.expect(bool(tables), "word_emb.emb_layers.0.weight", "missing")
    outputs = reader.take_all("crit.out_layers.{}.weight", ndim=2)
    problem = f"missing: {len(tables)} tables in the embedding, {len(outputs)} in the softmax"
    reader.expect(len(outputs) >= len(tables), f"crit.out_layers.{len(outputs)}.weight", problem)
    reader.expect(len(outputs) <= len(tables), f"word_emb.emb_layers.{len(tables)}.weight", problem)
    for i, (table, output) in enumerate(zip(tables, outputs, strict=True)):
        shape = tuple(table.shape)
        reader.expect(output.shape == table.shape, f"crit.out_layers.{i}.weight", f"expected shape {shape}")
        reader.expect(table.numel() > 0, f"word_emb.emb_layers.{i}.weight", f"has no numbers, shape {shape}")
    cutoffs, div_val = _read_classes(reader, weights, tables, splits)
    config = VocabularyConfig(
        size=sum(table.shape[0] for table in tables),
        embedding_width=tables[0].shape[1],
        cutoffs=cutoffs,
        div_val=div_val,
        tie_weights=all(torch.equal(a, b) for a, b in zip(tables, outputs, strict=True)),
    )
    for i, (table, shape) in enumerate(zip(tables, config.table_shapes, strict=True)):
        reader.expect(tuple(table.shape) == shape, f"word_emb.emb_layers.{i}.weight", f"expected shape {shape}")
    _place("embedding.tables", tables, weights)
    _place("softmax.tables", outputs, weights)
    biases = [reader.take(f"crit.out_layers.{i}.bias", (table.shape[0],)) for i, table in enumerate(tables)]
    _place("softmax.biases", biases, weights)
    if config.needs_projection(width):
        _read_projections(reader, config, width, weights)
    return config


def _read_classes(
    reader: Reader, weights: dict[str, Tensor], tables: list[Tensor], splits: Sequence[int] | None
) -> tuple[tuple[int, ...], int]:
    """The classes after the first, whose rows stand in reverse order: cutoffs and div_val."""
    num_tails, width = 0, tables[0].shape[1]
    if "crit.cluster_weight" in reader:
        rows = reader.take("crit.cluster_weight", ndim=2)
        num_tails = rows.shape[0]
        reader.expect(rows.shape[1] == width, "crit.cluster_weight", f"expected {width} columns, got {rows.shape[1]}")
        weights["softmax.class_table"] = rows.flip(0)
        weights["softmax.class_bias"] = reader.take("crit.cluster_bias", (num_tails,)).flip(0)
    if len(tables) == 1:
        problem = f"{num_tails} classes share one table: pass splits with {num_tails} numbers, got {splits}"
        reader.expect(len(splits or ()) == num_tails, "crit.cluster_weight", problem)
        return tuple(splits or ()), 1
    if splits is not None:
        raise ValueError("the sizes of the tables give the cutoffs of this checkpoint; leave out splits")
    reader.expect(len(tables) == num_tails + 1, "crit.cluster_weight", f"{num_tails} rows but {len(tables)} tables")
    ends = torch.tensor([table.shape[0] for table in tables]).cumsum(0).tolist()
    return tuple(ends[:-1]), width // tables[1].shape[1]


def _read_projections(reader: Reader, config: VocabularyConfig, width: int, weights: dict[str, Tensor]) -> None:
    """One a table for the embedding and one a class for the softmax; later versions wrapped them in modules."""
    embed = reader.take_all("word_emb.emb_projs.{}", "word_emb.emb_projs.{}.weight", ndim=2)
    out = reader.take_all("crit.out_projs.{}", "crit.out_projs.{}.weight", ndim=2)
    for name, found, count in (
        ("word_emb.emb_projs", embed, len(config.table_shapes)),
        ("crit.out_projs", out, len(config.classes)),
    ):
        first = f"{name}.{min(len(found), count)}"
        reader.expect(len(found) == count, first, f"expected {count} projections, found {len(found)}")
        for i, tensor in enumerate(found):
            shape = (width, config.widths[i])
            reader.expect(tuple(tensor.shape) == shape, f"{name}.{i}", f"expected {shape}, got {tuple(tensor.shape)}")
    for i in range(1, len(out)) if config.tie_weights else ():
        source = 0 if config.div_val == 1 else i
        same = torch.equal(out[i], embed[source])
        reader.expect(same, f"crit.out_projs.{i}", "the tables are tied, so it must equal the embedding's projection")
    _place("embedding.projections", embed, weights)
    _place("softmax.projections", out, weights)


def _read_trellis(
    reader: Reader, *, dilation: int, splits: Sequence[int] | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    reader.rename(r"trellisnet\.module\.", "trellisnet.")
    reader.rename(r"(trellisnet|tnet\.module)\.(.*)_raw$", r"\1.\2")
    is_first = [
        reader.rename(r"tnet\.module\.full_conv\.weight1", "trellisnet.inject_conv.weight"),
        reader.rename(r"tnet\.module\.full_conv\.weight2", "trellisnet.func.full_conv.weight"),
        reader.rename(r"tnet\.module\.full_conv\.bias2", "trellisnet.func.full_conv.bias"),
    ]
    if any(is_first):  # the first TrellisNet adds one bias for both
        reader.put("trellisnet.inject_conv.bias", torch.zeros_like(reader.peek("trellisnet.func.full_conv.bias")))
        if dilation != 1:
            raise ValueError(f"the first TrellisNet dilates its injection too, ours does not: dilation={dilation}")
    keys = {"conv": "trellisnet.func.full_conv", "injection": "trellisnet.inject_conv"}
    sizes = {name: reader.conv(f"core.cell.{name}", key, weights) for name, key in keys.items()}
    normalise = _one_kind({name: kind for name, (kind, _) in sizes.items()}, keys)
    encoder = reader.take("encoder.weight", ndim=2)
    decoder = reader.take("decoder.weight", ndim=2)
    kernel = sizes["conv"][1]
    reader.expect(sizes["injection"][1] == kernel, "trellisnet.inject_conv", f"expected {kernel} taps")
    state_width = weights["core.cell.conv.bias"].numel() // 4
    shapes = {
        "conv": (4 * state_width, kernel * state_width),
        "injection": (4 * state_width, kernel * encoder.shape[1]),
    }
    reader.check_linears(shapes, weights, keys)
    got = decoder.shape[1]
    reader.expect(0 < got <= state_width, "decoder.weight", f"expected 1 to {state_width} columns, got {got}")
    cell = TrellisConfig(
        input_width=encoder.shape[1],
        hidden_width=state_width - decoder.shape[1],
        output_width=decoder.shape[1],
        kernel_size=kernel,
        dilation=dilation,
        normalise=normalise,
    )
    vocabulary = _read_split_softmax(reader, encoder, decoder, weights, splits)
    return {"cell": cell, "vocabulary": vocabulary}, weights


def _read_split_softmax(
    reader: Reader, encoder: Tensor, decoder: Tensor, weights: dict[str, Tensor], splits: Sequence[int] | None
) -> VocabularyConfig:
    cutoffs = tuple(split for split in splits or () if split < encoder.shape[0])
    reader.expect(decoder.shape[0] == encoder.shape[0], "decoder.weight", f"expected {encoder.shape[0]} rows")
    # The original never saved the tail vectors; they start at zero there. As in
    # the adaptive softmax they stand in reverse order.
    tails = (len(cutoffs), decoder.shape[1])
    for key, other in (("tail_vectors", "tail_bias"), ("tail_bias", "tail_vectors")):
        reader.expect(f"criterion.{key}" in reader or f"criterion.{other}" not in reader, f"criterion.{key}", "missing")
    table = _optional(reader, "criterion.tail_vectors", tails, decoder)
    bias = _optional(reader, "criterion.tail_bias", tails[:1], decoder)
    if cutoffs:
        weights["softmax.class_table"], weights["softmax.class_bias"] = table.flip(0), bias.flip(0)
    _place("embedding.tables", [encoder], weights)
    _place("softmax.tables", [decoder], weights)
    _place("softmax.biases", [reader.take("decoder.bias", (encoder.shape[0],))], weights)
    return VocabularyConfig(
        size=encoder.shape[0],
        embedding_width=encoder.shape[1],
        cutoffs=cutoffs,
        tie_weights=encoder.shape == decoder.shape and torch.equal(encoder, decoder),
    )


def _optional(reader: Reader, key: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor of a split softmax; without splits the softmax is plain and what is there is not needed."""
    found = reader.take(key) if key in reader else None
    if found is None or shape[0] == 0:
        return like.new_zeros(shape)
    reader.expect(tuple(found.shape) == shape, key, f"expected {shape} for these splits, got {tuple(found.shape)}")
    return found


def _one_kind(kinds: Mapping[str, Normalisation], keys: Mapping[str, str]) -> Normalisation:
    first = next(iter(kinds.values()))
    for name, kind in kinds.items():
        if kind != first:
            raise OriginalError(f"{keys[name]}: weight norm on some layers but not on others")
    return first


def _place(name: str, tensors: list[Tensor], weights: dict[str, Tensor]) -> None:
    weights.update({f"{name}.{i}": tensor for i, tensor in enumerate(tensors)})


def _tied(weights: dict[str, Tensor], model: SequenceModel) -> dict[str, Tensor]:
    """Only names that the model has: a mismatch is a mistake of this module, not of the user."""
    expected = set(model.state_dict())
    assert set(weights) == expected, sorted(set(weights) ^ expected)
    return weights


def _check_vocabulary(config: VocabularyConfig, vocabulary: int | Sequence[str] | None) -> None:
    if vocabulary is None:
        return
    size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    if size != config.size:
        raise OriginalError(f"the checkpoint has a vocabulary of {config.size} words, the one given has {size}")
