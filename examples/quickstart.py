"""A deep equilibrium model in twenty lines: write a cell, wrap it, train it."""

import torch
from torch import nn

from deqkit import DEQ


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        nn.init.normal_(self.inner.weight, std=0.3 * width**-0.5)  # a small operator norm: easy to solve at first

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(z) + self.outer(x))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), DEQ(Cell(32)), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(256, 2)
y = (x[:, 0] * x[:, 1] > 0).long()  # XOR of the signs: no linear model can do it
for _ in range(150):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

deq = model[1]
assert isinstance(deq, DEQ)
accuracy = (model(x).argmax(1) == y).float().mean().item()
_, solution = deq(model[0](x), return_solution=True)
print(f"loss {loss.item():.4f}, accuracy {accuracy:.1%}")
print(f"last solve: {solution.describe()}")
print(f"all solves: { {status.name: count for status, count in deq.verdicts.items()} }")
