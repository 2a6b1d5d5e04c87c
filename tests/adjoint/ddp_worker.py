"""What each process of tests/test_distributed.py runs; a module of its own so that a spawned process can import it."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adjoint.cells import RatedCell, loss_of, solve_tightly
from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit, OneStep, Reversible, Unrolled

# B samples, N numbers in a state

# Two samples a process: the first process has easy ones, the second hard ones.
RATES = (0.0, 0.1, 0.9, 0.95)
RULES: dict[str, dict[str, Any]] = {
    "implicit": {},
    "one-step": {"adjoint": OneStep()},
    "unrolled": {"adjoint": Unrolled(steps=30)},
    "checkpointed": {"adjoint": Unrolled(steps=30, checkpoint=True)},
    "reversible": {"adjoint": Reversible(), "max_steps": 40, "tol": Tolerance(rtol=1e-2)},
}


class Model(nn.Module):
    """Layers before and after the equilibrium, so that their gradients are synchronised too."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.deq: DEQ = solve_tightly(RatedCell(), **settings)
        self.num_steps: list[int] = []

    def forward(self, x_BN: Tensor, rate_B1: Tensor) -> Tensor:
        z_BN, solution = self.deq(self.before(x_BN), rate_B1, return_solution=True)
        self.num_steps = solution.num_steps.tolist()
        return self.after(z_BN)


def loss_of_samples(output_BN: Tensor) -> Tensor:
    """The mean over samples of a loss that each has by itself, so that it splits over processes."""
    return torch.stack([loss_of(row) for row in output_BN]).mean()


def gradients_of(model: nn.Module, x_BN: Tensor, rate_B1: Tensor, *, calls: int = 1) -> dict[str, Tensor]:
    """Gradients after so many forward passes and one backward pass."""
    model.zero_grad()
    outputs = [model((1 + i) * x_BN, rate_B1) for i in range(calls)]
    torch.stack([loss_of_samples(output) for output in outputs]).sum().backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run(rank: int, folder: str) -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # fail, with a trace, instead of hanging
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(_measure(rank), Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    # Torch 2.13 sometimes deadlocks when a gloo group and its DDP modules are torn down: leave without doing so.
    os._exit(0)


def _measure(rank: int) -> dict[str, Any]:
    x_BN, rate_B1 = RatedCell.batch(*RATES)
    own = slice(2 * rank, 2 * rank + 2)
    results: dict[str, Any] = {}
    for name, settings in RULES.items():
        model = Model(settings)
        wrapped = DistributedDataParallel(model)
        results[name] = gradients_of(wrapped, x_BN[own], rate_B1[own])
        results[f"{name}-steps"] = model.num_steps
    wrapped = DistributedDataParallel(Model({"adjoint": Implicit(max_steps=400)}))
    results["two-calls"] = gradients_of(wrapped, x_BN[own], rate_B1[own], calls=2)
    with wrapped.no_sync():  # gradient accumulation: one pass without, one with synchronisation
        gradients_of(wrapped, x_BN[own], rate_B1[own])
    loss_of_samples(wrapped(2 * x_BN[own], rate_B1[own])).backward()
    results["accumulated"] = {n.removeprefix("module."): p.grad for n, p in wrapped.named_parameters()}
    return results
