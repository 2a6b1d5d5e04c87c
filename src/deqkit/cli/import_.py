"""`deqkit import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deqkit.cli._command import Command
from deqkit.interop import import_original
from deqkit.model import num_parameters


@dataclass(frozen=True, kw_only=True)
class Import(Command):
    """Make a run of a checkpoint of the original authors' code."""

    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A state dict saved by torch.save, or safetensors."""
    out: Path
    """The run's folder."""
    data: str = ""
    """A prepared folder with the checkpoint's vocabulary, to evaluate with."""
    pre_norm: bool = False
    """The transformer was trained with --pre_lnorm."""
    mem_len: int = 150
    """Positions of memory."""
    local_size: int = 0
    """Attention window; 0 for none."""
    dilation: int = 1
    """Dilation of a TrellisNet."""
    splits: tuple[int, ...] | None = None
    """Where the classes of a softmax with one table begin."""

    def run(self) -> int:
        model = import_original(
            self.checkpoint,
            self.out,
            data=self.data,
            pre_norm=self.pre_norm,
            mem_len=self.mem_len,
            local_size=self.local_size,
            dilation=self.dilation,
            splits=self.splits,
        )
        count, kind = num_parameters(model), type(model.config.cell).__name__.removesuffix("Config")
        print(f"{kind} model with {count.total:,} parameters, {count.rest:,} outside embedding and softmax")
        print(f"The run is in {self.out}. Next: deqkit eval {self.out} --data DIR --split test")
        return 0
