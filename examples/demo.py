"""`make demo`: train a small deep equilibrium model and its layer-by-layer counterpart, and compare them.

The task is next-character prediction on the documentation that every Python carries. Both models have the same causal
cell and the same parameters; one is solved to equilibrium, the other applies the cell a fixed number of times. Writes
`demo/report.html`; nothing is downloaded.
"""

import base64
import html
import io
import pydoc_data.topics
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from deqkit import DEQ, Tolerance
from deqkit.adjoint import AbstractAdjoint, Implicit, Unrolled
from deqkit.analysis import causality_leak, convergence_trace, peak_memory, spectral_penalty
from deqkit.solve import Broyden, FixedPointIteration

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BATCH, LENGTH, WIDTH, HEADS, DEPTH, STEPS = 16, 64, 64, 4, 12, 400
console = Console()


class CausalCell(nn.Module):
    """LN(u + W2 relu(W1 u)), u = LN(z + attention(z W + x)): the paper's weight-tied transformer, in miniature."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.inject = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH)
        with torch.no_grad():  # z enters gently, so that the first solves are easy
            self.qkv.weight.mul_(0.1)
            self.feed_out.weight.mul_(0.3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        qkv = self.qkv(z) + self.inject(x)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        u = F.layer_norm(z + self.project(mixed), (WIDTH,))
        return F.layer_norm(u + self.feed_out(F.relu(self.feed_in(u))), (WIDTH,))


class CharacterModel(nn.Module):
    def __init__(self, num_characters: int, adjoint: AbstractAdjoint) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, WIDTH)
        self.position = nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        # group="prefix": no step, stop or choice looks at later characters, however few steps are taken
        solver = None if adjoint.owns_forward else Broyden(memory=5, group="prefix")
        self.deq = DEQ(CausalCell(), solver=solver, tol=Tolerance(rtol=1e-2), max_steps=20, adjoint=adjoint)
        self.head = nn.Linear(WIDTH, num_characters)

    def inputs(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.deq(self.inputs(tokens)))


def corpus() -> tuple[Tensor, int]:
    text = "".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    index = {character: place for place, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text]), len(characters)


def batch(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=generator)
    windows = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: CharacterModel, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(name: str, ids: Tensor, num_characters: int, adjoint: AbstractAdjoint) -> tuple[CharacterModel, dict]:
    torch.manual_seed(0)
    model = CharacterModel(num_characters, adjoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(1)
    losses, evaluations, products = [], [], []
    began = time.perf_counter()
    for step in track(range(STEPS), f"training {name}", console=console):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 30)
        tokens, targets = batch(ids, generator)
        x = model.inputs(tokens)
        z, solution = model.deq(x, return_solution=True)
        loss = F.cross_entropy(model.head(z).flatten(0, 1), targets.flatten())
        objective = loss
        if not adjoint.owns_forward and step % 3 == 0:  # keeps the equilibrium easy to find, see docs/failing-solves.md
            objective = loss + 0.05 * spectral_penalty(model.deq.cell, solution.z, (x.detach(),))
        optimizer.zero_grad()
        objective.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        evaluations.append(solution.num_evals.float().mean().item())
        if solution.backward is not None:
            products.append(solution.backward.num_evals.float().mean().item())
    return model, dict(losses=losses, evaluations=evaluations, products=products, seconds=time.perf_counter() - began)


def measure(model: CharacterModel, ids: Tensor) -> dict:
    """Validation loss in bits per character, and what one training step holds and needs at most."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        bits = sum(loss_of(model, *batch(ids, generator)).item() for _ in range(20)) / 20 / 0.6931
    tokens, targets = batch(ids, generator)
    held = peak_memory(lambda: model(tokens)).held_bytes
    peak = peak_memory(lambda: loss_of(model, tokens, targets).backward()).peak_bytes
    leak = causality_leak(model, tokens, generator=generator).max().item()
    return dict(bits=bits, held=held, peak=peak, leak=leak)


def figure(curves: dict[str, list[float]], title: str, x_label: str, y_label: str, *, log: bool = False) -> str:
    plot, axes = plt.subplots(figsize=(6, 3.6), dpi=110)
    for name, values in curves.items():
        axes.plot(values, label=name, linewidth=1.6)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    plot.savefig(buffer, format="png", bbox_inches="tight")
    plt.close(plot)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{encoded}">'


def smooth(values: list[float], window: int = 15) -> list[float]:
    return [sum(values[max(0, i - window) : i + 1]) / (i + 1 - max(0, i - window)) for i in range(len(values))]


def main() -> None:
    ids, num_characters = corpus()
    cut = int(0.9 * len(ids))
    console.print(f"{len(ids):,} characters of Python's own documentation, {num_characters} different ones")
    implicit = Implicit(tol=Tolerance(rtol=3e-2), max_steps=20)
    deq, deq_run = train("the DEQ", ids[:cut], num_characters, implicit)
    stack, stack_run = train(f"{DEPTH} tied layers", ids[:cut], num_characters, Unrolled(steps=DEPTH))
    names = ("DEQ", f"{DEPTH} tied layers")
    rows = [measure(model, ids[cut:]) for model in (deq, stack)]

    table = Table(title="Same cell, same parameters, same data")
    heads = ("", "bits per character", "held for backward", "peak of a step", "time", "leak")
    for head in heads:
        table.add_column(head, justify="left" if not head else "right", no_wrap=not head)
    cells = [
        (name, f"{row['bits']:.3f}", f"{row['held'] / 2**20:.1f} MiB", f"{row['peak'] / 2**20:.1f} MiB",
         f"{run['seconds']:.0f} s", f"{row['leak']:.1e}")
        for name, row, run in zip(names, rows, (deq_run, stack_run), strict=True)
    ]  # fmt: skip
    for row in cells:
        table.add_row(*row)
    console.print(table)

    tokens, _ = batch(ids[cut:], torch.Generator().manual_seed(3))
    x = deq.inputs(tokens).detach()
    traces = convergence_trace(
        deq.deq.cell, torch.zeros_like(x), (x,), tol=Tolerance(rtol=1e-6), max_steps=40,
        solvers={"Broyden": Broyden(), "plain stacking": FixedPointIteration()},
    )  # fmt: skip
    curves = {name: max(trace, key=len).tolist() for name, trace in traces.items()}
    figures = [
        figure({n: smooth(r["losses"]) for n, r in zip(names, (deq_run, stack_run), strict=True)},
               "Training loss (running mean)", "step", "nats per character"),
        figure({"evaluations of the cell, forward": smooth(deq_run["evaluations"]),
                "vector-Jacobian products, backward": smooth(deq_run["products"])},
               "What a solve costs through training", "step", "per sample"),
        figure(curves, "Solving the trained cell (slowest sample)", "evaluation", "relative residual", log=True),
    ]  # fmt: skip
    out = Path("demo") / "report.html"
    out.parent.mkdir(exist_ok=True)
    out.write_text(page(heads, cells, figures), encoding="utf-8")
    console.print(f"report: {out.resolve()}")


def page(heads: tuple[str, ...], cells: list[tuple[str, ...]], figures: list[str]) -> str:
    def row(tag: str, values: tuple[str, ...]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    body = row("th", heads) + "".join(row("td", cell) for cell in cells)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>deqkit demo</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; white-space: nowrap; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid #8886; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; background: white; border-radius: 6px; margin: .5rem 0; }}
</style>
<h1>An equilibrium instead of a stack</h1>
<p>Next-character prediction on the documentation that comes with Python. Both models have the same cell,
the same number of parameters and the same data. The stack applies the cell {DEPTH} times and keeps every one for
the backward pass; the DEQ solves for the fixed point and keeps one.</p>
<div class="wide"><table>{body}</table></div>
<p>“Held for backward” is what a forward pass leaves in memory. “Leak” is how much an output changes when later
characters change: zero, because the solver is strictly causal even before it has converged.</p>
{"".join(figures)}
</html>
"""


if __name__ == "__main__":
    main()
