"""`deqkit generate` and `deqkit bench generate`."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from deqkit.analysis.generation_bench import GenerationBenchConfig, run_generation_bench
from deqkit.analysis.results import write_results
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, with_progress
from deqkit.generate import WrittenText, generate_text, trained_context
from deqkit.model import SequenceModel
from deqkit.solve import Tolerance
from deqkit.train.evaluate import evaluate
from deqkit.train.load import LoadedRun, load_run
from deqkit.train.recipes import RECIPES
from deqkit.train.tasks import TextTask


@dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """A run's model goes on from a text, token by token; or from several side by side."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What to begin with. Given several times, that many texts are written."""
    max_tokens: int = 100
    """New tokens of every text."""
    temperature: float = 1.0
    """Below 1 likely tokens become likelier; 0 takes the likeliest every time."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest of the likeliest tokens whose probabilities add up to this."""
    seed: int | None = None
    """Of the first text; each further one has the next number. Another every time if left out."""
    stop: str | None = None
    """A text of one token after which to end."""
    context: int | None = None
    """Positions that attention sees; as far as training ever looked if left out."""
    tol: float | None = None
    """Relative tolerance of the solve; the run's own if left out."""
    max_steps: int | None = None
    """Step limit of the solve; the run's own if left out."""
    checkpoint: str = "best"
    """"best", "latest" or a step."""
    json: bool = False
    """Print texts, tokens and log-probabilities to stdout as JSON."""

    def run(self) -> int:
        if not self.prompt:
            raise ValueError('there is nothing to begin with: pass --prompt "some text"')
        run = _load(self.run_folder, self.checkpoint)
        seed = secrets.randbits(31) if self.seed is None else self.seed
        stream = len(self.prompt) == 1 and not self.json
        begin = time.perf_counter()
        texts = generate_text(
            run,
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            stop=self.stop,
            context=self.context,
            tol=None if self.tol is None else Tolerance(rtol=self.tol),
            max_steps=self.max_steps,
            on_text=(lambda _, piece: print(piece, end="", flush=True)) if stream else None,
        )
        seconds = time.perf_counter() - begin
        if self.json:
            context = trained_context(run) if self.context is None else self.context
            account = {"run": str(self.run_folder), "step": run.step, "seed": seed, "context": context}
            print(json.dumps({**account, "seconds": seconds, "texts": [asdict(text) for text in texts]}))
            return 0
        print() if stream else _print_texts(texts)
        _print_account(texts, seed, seconds)
        return 0


@dataclass(frozen=True, kw_only=True)
class BenchGenerate(Command):
    """Tokens per second with the past cached, by solving everything again, and of a stack with its own cache."""

    run_folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run with an equilibrium. Without one: an untrained model, which shows the cost of a step but needs more or
    fewer of them than a trained one."""
    against: Path | None = None
    """A run with layers to compare with; the run's own cell, --depth times, if left out."""
    recipe: str = "ptb-mini"
    """The recipe of the untrained model."""
    batches: int = 10
    """Batches of the validation text on which perplexities are measured, for runs."""
    config: Annotated[GenerationBenchConfig, tyro.conf.arg(name="")] = field(default_factory=GenerationBenchConfig)
    """What to measure."""
    out: Path = Path("results/bench_generate.json")
    """Where the results are written."""
    json: bool = False
    """Print the results to stdout as JSON instead of tables."""

    def run(self) -> int:
        run = None if self.run_folder is None else _load(self.run_folder, "best")
        stack = None if self.against is None else _load(self.against, "best")
        task = None if run is None else run.text_task()
        text = None if task is None else torch.from_numpy(task.corpus.split("valid").astype("int64"))
        model = self._untrained() if run is None else run.model
        stack_model = None if stack is None else stack.model
        results = with_progress(
            lambda show: run_generation_bench(self.config, model, stack=stack_model, text=text, on_progress=show)
        )
        results["run"], results["against"] = (
            None if loaded is None else {"recipe": loaded.config.recipe, "step": loaded.step} for loaded in (run, stack)
        )
        if run is None or task is None:
            results["perplexity"] = None
        else:
            other = self._perplexity(run, task, self.config.depth) if stack is None else self._perplexity(stack)
            results["perplexity"] = {"equilibrium": self._perplexity(run, task), "stack": other}
        path = write_results(self.out, results)
        if self.json:
            print(json.dumps(results, indent=1))
            return 0
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        console.print(_ways_table(results))
        console.print(_summary_table(results))
        console.print(f"Results written to {path}", soft_wrap=True, highlight=False)
        return 0

    def _untrained(self) -> SequenceModel:
        if self.recipe not in RECIPES:
            raise ValueError(f"there is no recipe {self.recipe!r}: see deqkit recipes")
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            return SequenceModel(RECIPES[self.recipe]().model).eval()

    def _perplexity(self, run: LoadedRun, task: TextTask | None = None, depth: int | None = None) -> float:
        task = run.text_task() if task is None else task
        return evaluate(run.model, task, "valid", max_batches=self.batches, depth=depth)["perplexity"]


def _load(path: Path, checkpoint: str) -> LoadedRun:
    return load_run(path, int(checkpoint) if checkpoint.isdigit() else checkpoint)


def _print_texts(texts: Sequence[WrittenText]) -> None:
    for number, text in enumerate(texts):
        print(f"--- {number}" if number == 0 else f"\n--- {number}")
        print(text.prompt + text.text)


def _print_account(texts: Sequence[WrittenText], seed: int, seconds: float) -> None:
    num_tokens = sum(len(text.tokens) for text in texts)
    evals = [count for text in texts for count in text.num_evals[1:]]
    mean = f", {sum(evals) / len(evals):.1f} evaluations each" if evals else ""
    account = f"{num_tokens} tokens{mean}, {num_tokens / seconds:.0f} a second, seed {seed}"
    print(f"deqkit: {account}", file=sys.stderr)
    if num_failed := sum(text.num_failed for text in texts):
        print(
            f"deqkit: {num_failed} solves did not converge: raise --max-steps or loosen --tol, or take the text for "
            "what it is",
            file=sys.stderr,
        )


def _ways_table(results: dict[str, Any]) -> Table:
    config, perplexity = results["config"], results["perplexity"] or {}
    table = Table(title=f"greedy text after {config['context']} positions, batch {config['batch']}", **STYLE)
    table.add_column("way")
    for name in ("tokens/s", "evaluations a token", "perplexity"):
        table.add_column(name, justify="right")
    for row in results["rows"]:
        quality = perplexity.get("stack" if row["way"] == "stack" else "equilibrium")
        figures = (row["tokens_per_second"], row["evaluations_per_token"], quality)
        table.add_row(row["way"], *("-" if figure is None else f"{figure:.1f}" for figure in figures))
    return table


def _summary_table(results: dict[str, Any]) -> Table:
    table = Table(title="how many times quicker", **STYLE)
    for name in ("what", "measured", "asked", "holds"):
        table.add_column(name)
    for row in results["summary"]:
        table.add_row(row["name"], f"{row['value']:.2f}", f">= {row['bar']:g}", "yes" if row["holds"] else "NO")
    return table
