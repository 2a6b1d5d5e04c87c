"""The configuration of a training run: complete, frozen, and the same in JSON and on the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import deqkit.adjoint
import deqkit.solve
from deqkit._plain import decode, encode, parse_expression, unknown
from deqkit.adjoint import AbstractAdjoint
from deqkit.layers.checks import check_whole
from deqkit.model import ModelConfig
from deqkit.solve import AbstractSolver, Fallback, Tolerance

EXPRESSIONS = (AbstractSolver, Fallback, AbstractAdjoint, Tolerance)
MAKERS: dict[str, type] = {
    name: value
    for module in (deqkit.solve, deqkit.adjoint)
    for name in module.__all__
    if isinstance(value := getattr(module, name), type) and issubclass(value, EXPRESSIONS) and "Abstract" not in name
}
"""The values that configurations write as expressions: solvers, adjoints and tolerances, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is learned from, and how it is cut into batches."""

    source: str = "embedded"
    """"embedded" (the documentation of Python's standard library), "copy-memory", a folder that `deqkit data prepare`
    made, or for `deqkit train` a text file, which it prepares first."""
    batch: int = 32
    """Sequences side by side, over all processes."""
    length: int = 64
    """Positions of a segment."""
    eval_batch: int = 16
    """Sequences side by side in evaluation."""
    eval_length: int = 64
    """Positions of a segment in evaluation."""
    fit_vocabulary: bool = False
    """Take the number of tokens from the data, whatever the model's configuration says."""
    embedded_vocabulary: int = 2048
    """Word pieces of the embedded corpus."""
    copy_T: int = 400
    """Copy memory: positions between what is to be remembered and when."""
    copy_first_T: int | None = None
    """Copy memory: begin training with fewer; None for copy_T throughout."""
    copy_first_steps: int = 0
    """Copy memory: steps with copy_first_T, and as many again in which it grows to copy_T."""
    copy_train: int = 20_000
    """Copy memory: training samples."""
    copy_test: int = 2_000
    """Copy memory: test samples, and as many for validation."""

    def __post_init__(self) -> None:
        _at_least(1, self, "batch", "length", "eval_batch", "eval_length", "copy_T", "copy_train", "copy_test")
        if bool(self.copy_first_steps) != (self.copy_first_T is not None):
            raise ValueError(
                "copy_first_T and copy_first_steps go together, "
                f"got {self.copy_first_T} for {self.copy_first_steps} steps"
            )
        if self.copy_first_T is not None and not 1 <= self.copy_first_T <= self.copy_T:
            raise ValueError(f"copy_first_T must be from 1 to copy_T, {self.copy_T}, got {self.copy_first_T}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimiserConfig:
    """The optimiser and its learning rate through training."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    """Which one."""
    lr: float = 1e-3
    """Learning rate at its highest."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of Adam and AdamW."""
    weight_decay: float = 0.0
    """Of AdamW decoupled, of the others added to the gradient."""
    clip: float = 0.25
    """Largest norm of the gradient; 0 for no limit."""
    accumulate: int = 1
    """Parts that a batch is cut into, one after the other, to save memory. The result is the same, but for dropout,
    which draws masks for every part."""
    average_after: int | None = None
    """Evaluate with the mean of the weights since this step (averaged SGD); None for the weights themselves."""
    schedule: Literal["constant", "cosine", "inverse-sqrt", "plateau"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    floor: float = 0.0
    """The share of lr at which cosine ends and below which no schedule falls."""
    plateau_factor: float = 0.25
    """By what the learning rate is multiplied when validation has not improved."""
    plateau_patience: int = 5
    """Evaluations without improvement before that."""

    def __post_init__(self) -> None:
        _one_of(("adam", "adamw", "sgd"), name=self.name)
        _one_of(("constant", "cosine", "inverse-sqrt", "plateau"), schedule=self.schedule)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers of at least 0 and below 1, got {self.betas}")
        if self.average_after is not None:
            _at_least(0, self, "average_after")
        if not 0 <= self.floor <= 1 or not 0 < self.plateau_factor < 1:
            raise ValueError(
                f"floor must be in [0, 1] and plateau_factor in (0, 1), got {self.floor}, {self.plateau_factor}"
            )
        if not (self.clip >= 0 and self.weight_decay >= 0):
            raise ValueError(f"clip and weight_decay must not be negative, got {self.clip}, {self.weight_decay}")
        _at_least(0, self, "warmup_steps")
        _at_least(1, self, "accumulate", "plateau_patience")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """The paper's devices for training an equilibrium model."""

    warmup_depth: int = 2
    """Tied layers of the shallow network that training begins with."""
    warmup_steps: int = 0
    """How long; the same weights and optimiser then go on at the equilibrium."""
    random_steps: int = 0
    """Lower the forward step limit by a random number up to this, at every step anew."""
    early_adjoint: AbstractAdjoint | None = None
    """A cheaper adjoint to begin the equilibrium with, for example OneStep()."""
    early_adjoint_steps: int = 0
    """Steps, after the shallow ones, that use it."""
    early_rtol: float | None = None
    """A looser forward tolerance, relative, to begin the equilibrium with."""
    early_rtol_steps: int = 0
    """Steps, after the shallow ones, that use it."""

    def __post_init__(self) -> None:
        _at_least(1, self, "warmup_depth")
        _at_least(0, self, "warmup_steps", "random_steps", "early_adjoint_steps", "early_rtol_steps")
        for name in ("early_adjoint", "early_rtol"):
            value, steps = getattr(self, name), getattr(self, f"{name}_steps")
            if bool(steps) != (value is not None):
                raise ValueError(f"{name} and {name}_steps go together, got {value} for {steps} steps")
        if self.early_rtol is not None and not 0 < self.early_rtol < math.inf:
            raise ValueError(f"early_rtol must be a positive number, got {self.early_rtol}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegulariserConfig:
    """What is added to the loss."""

    activation: float = 0.0
    """Weight of the mean square of what the softmax sees (AR)."""
    temporal: float = 0.0
    """Weight of the mean square of its change from one position to the next (TAR)."""
    jacobian: float = 0.0
    """Weight of the Jacobian penalty at the equilibrium."""
    spectral: float = 0.0
    """Weight of the penalty on Jacobian modes larger than 1, which keeps solves short."""
    every: int = 3
    """Steps from one penalty to the next."""
    auxiliary: float = 0.0
    """Weight of the mean loss after earlier layers of a stack; an equilibrium has none."""
    auxiliary_every: int = 4
    """Layers from one of those losses to the next."""

    def __post_init__(self) -> None:
        for name in ("activation", "temporal", "jacobian", "spectral", "auxiliary"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        _at_least(1, self, "every", "auxiliary_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run."""

    recipe: str
    """The recipe that this began as."""
    model: ModelConfig
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """The optimiser."""
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    """The paper's training devices."""
    regulariser: RegulariserConfig = field(default_factory=RegulariserConfig)
    """What is added to the loss."""
    steps: int = 1000
    """Updates of the weights."""
    eval_every: int = 200
    """Steps from one evaluation on the validation split to the next; the last step is always evaluated."""
    checkpoint_every: int = 100
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """Latest checkpoints that are kept, besides the best."""
    seed: int = 0
    """Of the initial weights, dropout and data order."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the forward pass; weights are float32 in any case."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: trackers of accelerate."""
    expected_time: str = ""
    """What to expect, for `deqkit recipes`."""

    def __post_init__(self) -> None:
        _at_least(1, self, "steps", "eval_every", "checkpoint_every", "keep")
        _at_least(0, self, "seed")
        _one_of(("float32", "bf16"), precision=self.precision)
        if self.model.depth != "equilibrium":
            self._check_stack()
        elif self.regulariser.auxiliary:
            raise ValueError("an equilibrium has no layers for auxiliary losses: set regulariser.auxiliary to 0")
        if self.devices.early_adjoint is not None:
            self.devices.early_adjoint.check_solver(self.model.solver)
        average_after = self.optimiser.average_after
        if average_after is not None and average_after >= self.steps:
            raise ValueError(f"average_after {average_after} lies behind the last of {self.steps} steps")
        if self.data.batch % self.optimiser.accumulate:
            raise ValueError(
                f"batch {self.data.batch} does not divide into accumulate={self.optimiser.accumulate} equal parts"
            )

    def _check_stack(self) -> None:
        """Refuse what only an equilibrium can have."""
        devices, regulariser = self.devices, self.regulariser
        if not self.model.tied and devices.warmup_steps:
            raise ValueError("an untied stack has one depth: set devices.warmup_steps to 0")
        if self.model.is_baseline and devices.warmup_steps:
            raise ValueError("a network to compare with has one depth: set devices.warmup_steps to 0")
        if devices.early_adjoint_steps or devices.early_rtol_steps or devices.random_steps:
            raise ValueError(
                "a stack has no solve: set devices.early_adjoint_steps, early_rtol_steps and random_steps to 0"
            )
        if self.model.start == "learned":
            raise ValueError('a stack has no solve that could start anywhere: set model.start to "zeros"')
        if regulariser.jacobian or regulariser.spectral:
            raise ValueError("Jacobian penalties are for an equilibrium: set regulariser.jacobian and spectral to 0")
        if regulariser.auxiliary and regulariser.auxiliary_every >= int(self.model.depth):
            raise ValueError(
                f"regulariser.auxiliary_every {regulariser.auxiliary_every} leaves no layer before the last of "
                f"{self.model.depth}: set a lower one, or regulariser.auxiliary to 0"
            )


def to_plain(config: Any) -> Any:
    """A configuration as plain values for JSON."""
    return encode(config, EXPRESSIONS)


def from_plain(plain: Any) -> TrainConfig:
    """A configuration from what `to_plain` made of it; a ValueError names what is wrong."""
    return decode(TrainConfig, plain, MAKERS, where="config")


def parse_value(text: str) -> Any:
    """A solver, adjoint or tolerance from an expression such as `Anderson(memory=5)`."""
    return parse_expression(text, MAKERS)


def _one_of(known: tuple[str, ...], **names: str) -> None:
    for field_name, name in names.items():
        if name not in known:
            raise ValueError(unknown(field_name, name, known))


def _at_least(least: int, config: Any, *names: str) -> None:
    check_whole(least, **{name: getattr(config, name) for name in names})
