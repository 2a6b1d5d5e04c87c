"""A cell whose state is a pair of tensors, with work that is done once per solve.

The cell is a small trellis: a causal convolution with LSTM gates, state (h, c). Its `bind` projects the inputs and
draws the dropout mask before the solve, so that the solve sees one fixed function and pays for them once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit
from deqkit.solve import Broyden

State = tuple[Tensor, Tensor]


class TrellisCell(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.hidden = nn.Linear(2 * width, 4 * width)
        self.inject = nn.Linear(width, 4 * width)
        nn.init.normal_(self.hidden.weight, std=0.05)

    def initial_state(self, x: Tensor) -> State:
        return torch.zeros_like(x), torch.zeros_like(x)

    def bind(self, x: Tensor) -> tuple[Callable[..., State], tuple[Tensor, Tensor]]:
        keep = 1 - self.dropout if self.training else 1.0
        mask = torch.empty(x.shape[0], 1, x.shape[2]).bernoulli_(keep) / keep  # one mask a sample, for all positions
        return self.step, (self.inject(x), mask)

    def step(self, state: State, injected: Tensor, mask: Tensor) -> State:
        h, c = state
        h_before = F.pad(h, (0, 0, 1, 0))[:, :-1]
        c_before = F.pad(c, (0, 0, 1, 0))[:, :-1]
        i, o, g, f = (self.hidden(torch.cat((h_before, h), dim=2) * mask.repeat(1, 1, 2)) + injected).chunk(4, dim=2)
        c = f.sigmoid() * c_before + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


torch.manual_seed(0)
solve = Tolerance(rtol=1e-4)
deq = DEQ(TrellisCell(32), solver=Broyden(), tol=solve, max_steps=60, adjoint=Implicit(tol=solve, max_steps=60))
x = torch.randn(8, 50, 32)
(h, c), solution = deq(x, return_solution=True)
h.square().mean().backward()

print(f"state: h {tuple(h.shape)}, c {tuple(c.shape)}")
print(f"forward:  {solution.describe()}")
assert solution.backward is not None and solution.grad_error is not None
print(f"backward: {solution.backward.describe()}")
print(f"estimated relative error of the gradient: {solution.grad_error:.1e}")
