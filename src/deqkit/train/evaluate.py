"""Evaluation: the loss over a split with the context carried, and how hard the solves were."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any

import torch

from deqkit.analysis import causality_leak
from deqkit.data import Batch
from deqkit.model import SequenceModel
from deqkit.model.mode import evaluating
from deqkit.solve import AbstractSolver, Fallback, Status, Tolerance
from deqkit.train.progress import Progress
from deqkit.train.state import memory_of, plain_memory
from deqkit.train.tasks import AbstractTask

# B samples, T positions


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    task: AbstractTask,
    split: str,
    *,
    accelerator: Any = None,
    max_batches: int | None = None,
    depth: Any = None,
    tol: Tolerance | None = None,
    max_steps: int | None = None,
    solver: AbstractSolver | Fallback | None = None,
    on_batch: Any = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The figures of a model on a split.

    Args:
        accelerator: shares the work among processes; None for this one alone.
        max_batches: stop early; the figures are then of a part, and say so (`complete`).
        depth, tol, max_steps, solver: settings of the solve; those of the model's configuration if left out.
        on_batch: called with the number of every batch that is done.
        progress: where the pass is noted down, and where one that was interrupted goes on. For one process.

    Returns:
        The task's figures, `num_tokens`, and with an equilibrium `evals` (mean per segment), `residual` (largest) and
        `unconverged` (share of solves).
    """
    rank, world_size = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    settings = {"depth": depth, "tol": tol, "max_steps": max_steps, "solver": solver}
    totals = _Totals(next(model.parameters()).device)
    num_done = totals.resume(model, progress) if progress else 0
    complete = True
    with evaluating(model):
        for number, batch in enumerate(task.evaluation(split, rank=rank, world_size=world_size)):
            if number < num_done:
                continue
            if max_batches is not None and number >= max_batches:
                complete = False
                break
            totals.add(model, batch, settings)
            if on_batch is not None:
                on_batch(number)
            if progress is not None:
                progress.save(number + 1, totals.state())
    if progress is not None:
        progress.clear()
    return {**totals.figures(task, split, accelerator), "complete": complete}


class _Totals:
    def __init__(self, device: torch.device) -> None:
        # summed loss, tokens, evaluations, solves, solves that did not converge
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._residual = torch.zeros(1, dtype=torch.float64, device=device)
        self._memory: Any = None

    def add(self, model: SequenceModel, batch: Batch, settings: dict[str, Any]) -> None:
        device = self._sums.device
        tokens_BT, targets_BT = batch.tokens_BT.to(device), batch.targets_BT.to(device)
        output = model(tokens_BT, targets_BT, None if batch.new_context else self._memory, **settings)
        self._memory = output.memory
        assert output.nll is not None
        sums = [output.nll.double().sum(), (targets_BT >= 0).sum().double()]
        evals, solves, failed = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
        for solution in output.solutions:
            evals += solution.num_evals.sum()
            solves += solution.num_evals.numel()
            failed += (solution.codes != Status.CONVERGED.severity).sum()
            self._residual = torch.maximum(self._residual, solution.residual.max().double())
        self._sums += torch.stack([*sums, evals, solves, failed])

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums, "residual": self._residual, "memory": plain_memory([self._memory])}

    def resume(self, model: SequenceModel, progress: Progress) -> int:
        """Take up what an interrupted pass had; returns how many batches that were."""
        found = progress.load()
        if found is None:
            return 0
        num_done, state = found
        device, (part,) = self._sums.device, state["memory"]
        self._memory = memory_of(model, part, part[0][0].shape[0], device)
        self._sums, self._residual = state["sums"].to(device), state["residual"].to(device)
        return num_done

    def figures(self, task: AbstractTask, split: str, accelerator: Any) -> dict[str, Any]:
        sums, residual = self._sums, self._residual
        if accelerator is not None and accelerator.num_processes > 1:
            sums = accelerator.reduce(sums, "sum")
            residual = accelerator.gather(residual).max()
        nll, tokens, evals, solves, failed = sums.tolist()
        figures: dict[str, Any] = {**task.figures(nll, int(tokens), split), "num_tokens": int(tokens)}
        if solves:
            figures |= {"evals": evals / solves, "residual": float(residual), "unconverged": failed / solves}
        return figures


@torch.no_grad()
def measure_leak(model: SequenceModel, task: AbstractTask, split: str, **settings: Any) -> float:
    """How much the loss at a position changes when later tokens do: 0 for a strictly causal evaluation."""
    batch: Batch = next(iter(task.evaluation(split)))
    device = next(model.parameters()).device
    tokens_BT, targets_BT = batch.tokens_BT.to(device), batch.targets_BT.to(device)
    if tokens_BT.shape[1] < 2:
        return 0.0

    def nll(changed_BT: torch.Tensor) -> torch.Tensor:
        loss = model(changed_BT, targets_BT, **settings).nll
        assert loss is not None
        return loss

    with evaluating(model):
        leak = causality_leak(nll, tokens_BT, generator=torch.Generator().manual_seed(0))
    return float(leak.max())


def sweep(
    model: SequenceModel,
    task: AbstractTask,
    split: str,
    *,
    tolerances: Iterable[float],
    step_limits: Iterable[int],
    max_batches: int | None = None,
    on_point: Any = None,
) -> list[dict[str, Any]]:
    """The figures against the tolerance, with the configuration's step limit, and against the step limit, solved to
    that limit: the paper's figure 3."""
    points: list[dict[str, Any]] = []
    runs: list[tuple[str, float, dict[str, Any]]] = []
    runs += [("tolerance", value, {"tol": Tolerance(rtol=value)}) for value in tolerances]
    runs += [("max_steps", n, {"tol": Tolerance(rtol=0.0), "max_steps": n}) for n in step_limits]
    for number, (name, value, settings) in enumerate(runs):
        if on_point is not None:
            on_point(f"{name} {value:g}", number, len(runs))
        points.append({name: value, **evaluate(model, task, split, max_batches=max_batches, **settings)})
    return points


def peak_memory_mib() -> float:
    """The most that this process has held so far: of the GPU's memory, or else of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
