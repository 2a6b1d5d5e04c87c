"""The recordings of the original code: where they are, and how their arrays correspond to our states and memories.

Everything is read from a folder's `meta.json` and its array names, so a new recording is tested by putting it there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deqkit.interop import load_original
from deqkit.layers import TransformerMemory, TrellisCell, TrellisMemory
from deqkit.model import SequenceModel

# B samples, T positions, D channels, M positions of memory


def _places() -> list[Path]:
    """Where recordings may be: $DEQKIT_PARITY, $DEQKIT_DATA/parity, ../shared/parity beside the repository."""
    places = [Path(os.environ["DEQKIT_PARITY"])] if "DEQKIT_PARITY" in os.environ else []
    if "DEQKIT_DATA" in os.environ:
        places.append(Path(os.environ["DEQKIT_DATA"]) / "parity")
    return [*places, Path(__file__).parents[3] / "shared" / "parity"]


def _find_folders() -> list[Path]:
    for place in _places():
        if folders := sorted(path.parent for path in place.glob("*/meta.json")):
            return folders
    return []


@functools.cache
def _load(path: Path) -> dict[str, Tensor]:
    return load_file(path)


@dataclasses.dataclass(frozen=True)
class Recording:
    """One folder."""

    folder: Path

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())

    @property
    def config(self) -> dict[str, Any]:
        return self.meta["config"]

    @property
    def is_trellis(self) -> bool:
        return "ninp" in self.config

    @property
    def data(self) -> dict[str, Tensor]:
        return _load(self.folder / "data.safetensors")

    @property
    def state(self) -> dict[str, Tensor]:
        return _load(self.folder / "state_dict.safetensors")

    @property
    def segments(self) -> list[str]:
        return sorted({match[0] for key in self.data if (match := re.match(r"seg\d+", key))})

    @property
    def losses(self) -> tuple[str, ...]:
        """A TrellisNet is recorded with a full softmax and a split one; a transformer has one softmax."""
        return ("full", "split") if self.is_trellis else ("",)

    def model(self, loss: str = "", dtype: torch.dtype = torch.float64) -> SequenceModel:
        """Our model, in training mode (there is no dropout) so that nothing is relaxed for evaluation."""
        config, state = self.config, {key: value.to(dtype) for key, value in self.state.items()}
        if self.is_trellis:
            splits = config["splits"] if loss == "split" else None
            return load_original(state, mem_len=1, dilation=config["dilation"], splits=splits)
        return load_original(
            state,
            pre_norm=config["pre_lnorm"],
            mem_len=config["mem_len"],
            local_size=config["local_size"],
            splits=config["cutoffs"] if config["cutoffs"] and config["div_val"] == 1 else None,
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """One segment of a recording, with one of its softmaxes."""

    recording: Recording
    segment: str
    loss: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, [self.recording.folder.name, self.segment, self.loss]))

    def array(self, name: str) -> Tensor:
        return self.recording.data[f"{self.segment}_{name}"]

    def of_loss(self, name: str) -> Tensor:
        """An array that depends on the softmax: nll, nll_full, nll_split."""
        return self.array(f"{name}_{self.loss}" if self.loss else name)

    @property
    def mean_loss(self) -> Tensor:
        return self.array("_".join(filter(None, ["loss", self.loss, "mean"])))

    @property
    def log_probs(self) -> Tensor:
        """(B, T, V)"""
        names = {"": "logprob", "full": "logits", "split": "split_logprob"}
        return self.array(names[self.loss]).log_softmax(-1).transpose(0, 1)

    @property
    def tokens(self) -> Tensor:
        return self.array("tokens").T

    @property
    def targets(self) -> Tensor:
        return self.array("targets").T

    @property
    def depths(self) -> list[int]:
        """The depths of the stacks of tied layers that were recorded with this softmax."""
        pattern = rf"{self.segment}_stack(\d+)_.*"
        depths = {int(match[1]) for key in self.recording.data if (match := re.fullmatch(pattern, key))}
        return sorted(depth for depth in depths if self.gradients(f"stack{depth}") is not None)

    def gradients(self, of: str) -> dict[str, Tensor] | None:
        """The recorded gradients of the loss, of a stack's loss, of the cell; None if there is no such file."""
        parts = ["grads", self.segment, of, "" if of in ("cell", "jac") else self.loss]
        path = self.recording.folder / ("_".join(filter(None, parts)) + ".safetensors")
        return _load(path) if path.exists() else None

    def model(self, dtype: torch.dtype = torch.float64) -> SequenceModel:
        return self.recording.model(self.loss, dtype)

    def state(self, name: str) -> Any:
        """A recorded state, (B, D, T), as our state: (B, T, D), or the pair (h, c)."""
        state_BTD = self.array(name).transpose(1, 2).contiguous()
        return state_BTD.chunk(2, -1) if self.recording.is_trellis else state_BTD

    def memory(self, model: SequenceModel) -> tuple[Any, ...]:
        """What the original saw before this segment.

        Of a TrellisNet's history it kept one position of h, which it repeated as far as its kernel reached, and no
        inputs. Ours keeps all that the kernel reaches, so what the original did is one of the memories it may have.
        """
        if not self.recording.is_trellis:
            return (TransformerMemory(self.array("mem_z").transpose(0, 1), self.array("mem_u").transpose(0, 1)),)
        cell = model.cells[0]
        assert isinstance(cell, TrellisCell)
        h_B1H, c_B1H = self.array("mem").transpose(0, 1).chunk(2, -1)
        inputs = h_B1H.new_zeros(h_B1H.shape[0], cell.config.kernel_size - 1, cell.config.input_width)
        return (TrellisMemory(h_B1H.repeat(1, cell.config.reach, 1), c_B1H, inputs),)


def as_recorded(state: Any) -> Tensor:
    """Our state in the layout of the recordings, (B, D, T)."""
    state_BTD = state if isinstance(state, Tensor) else torch.cat(state, -1)
    return state_BTD.transpose(1, 2)


def assert_same(actual: Tensor, expected: Tensor, *, atol: float = 1e-9) -> None:
    """Absolute agreement; the recorded values are of order 1."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


RECORDINGS = [Recording(folder) for folder in _find_folders()]


def _absent() -> Any:
    reason = "no recording has this" if RECORDINGS else f"no recordings in {' or in '.join(map(str, _places()))}"
    return pytest.param(None, id="absent", marks=pytest.mark.skip(reason))


def each_recording(where: Callable[[Recording], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Parametrise by `recording`; skipped, with the reason, if there is none."""
    wanted = [recording for recording in RECORDINGS if where(recording)]
    return pytest.mark.parametrize("recording", wanted or [_absent()], ids=lambda r: r and r.folder.name)


def each_case(where: Callable[[Case], Any] = lambda _: True, *, each_loss: bool = True) -> pytest.MarkDecorator:
    """Parametrise by `case`, a segment of a recording; with `each_loss` once for every softmax."""
    cases = [
        Case(recording, segment, loss)
        for recording in RECORDINGS
        for segment in recording.segments
        for loss in (recording.losses if each_loss else recording.losses[:1])
    ]
    return pytest.mark.parametrize("case", [case for case in cases if where(case)] or [_absent()], ids=str)
