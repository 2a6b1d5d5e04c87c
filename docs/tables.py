"""Fill the tables of README.md and docs/performance.md from results/: `make documents`.

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`; what is written there by hand is overwritten.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from deqkit.analysis.runtime import STAGES
from deqkit.paper.document import told_verdict
from deqkit.paper.rows import find
from deqkit.paper.run import read_best

ROOT = Path(__file__).parents[1]
WIDTH = 124
DOCUMENTS = ("README.md", "docs/performance.md")

PAPER_ROWS = (
    "theorem-1",
    "copy-memory",
    "copy-memory-longest",
    "table-2-ptb",
    "table-3-small",
    "table-3-small-wikitext-2",
    "best-perplexity-ptb",
    "best-perplexity-wikitext-2",
    "causal-evaluation",
    "table-4-transformer",
    "table-4-trellisnet",
)
SOLVER_ROWS = (
    ("torchdeq", "fixed_point_iter"),
    ("torchdeq", "anderson"),
    ("torchdeq", "broyden"),
    ("torchdeq", "fixed_point_iter hook"),
    ("deqkit", "default"),
    ("deqkit", "0.4 tol fwd, 3 tol bwd"),
    ("deqkit", "anderson, 0.4 tol fwd, 3 tol bwd"),
    ("deqkit", "broyden + gmres"),
    ("deqkit", "broyden prefix"),
)
LENGTHS = {"TrellisNet": "bench_length", "Transformer": "bench_length_transformer"}


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(columns)
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (columns, *rows)).replace(
        "\n", f"\n|{'---|' * len(columns)}\n", 1
    )


def prose(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def memory() -> str:
    results = read("bench_memory")
    rows = []
    for compared in results["comparisons"]:
        names = compared["equilibrium"], compared["layers"]
        peaks = [f"{results['bytes'][name]['peak'] / 2**20:,.0f}" for name in names]
        paper = "-" if compared["paper_ratio"] is None else f"{compared['paper_ratio']:.2f}"
        rows.append([*(f"`{name}`" for name in names), *peaks, f"{compared['ratio']:.2f}", paper])
    return table(("equilibrium", "in layers", "MiB", "MiB in layers", "ratio", "paper"), rows)


def paper() -> str:
    results, rows = read_best(ROOT / "results"), []
    for claim in find(PAPER_ROWS):
        result = results[claim.row]
        name = f"[{claim.row}](docs/paper.md#{claim.row})"
        rows.append([name, claim.claim, claim.paper, result["measured"], told_verdict(claim, result)])
    return table(("row", "claim", "paper", "here", "verdict"), rows)


def solvers() -> str:
    (measured,) = [cell["rows"] for cell in read("bench_solvers")["cells"] if cell["cell"] == "transformer"]
    rows = []
    for library, method in SOLVER_ROWS:
        (row,) = [r for r in measured if (r["library"], r["method"], r["tol"]) == (library, method, 1e-3)]
        counts = [f"{row['evals_forward']}", f"{row['vjps']}", f"{row['grad_error']:.1e}", f"{row['cost']:.0f}"]
        rows.append([f"{library} `{method}`", *counts, f"{row['outside_share']:.0%}".replace("%", " %")])
        rows[-1].append(f"{row['peak_mib']:.0f}")
    return table(("", "evaluations", "products", "gradient error", "cost", "outside f", "MiB"), rows)


def runtime() -> str:
    parts, rows = read("bench_runtime")["breakdown"], []
    for stage in STAGES:
        seconds = [(part["seconds"][stage], part) for part in parts.values()]
        rows.append([stage, *(f"{1e6 * s / p['tokens']:.1f} ({100 * s / p['total']:.0f} %)" for s, p in seconds)])
    for name in ("evaluations", "products"):
        counts = [part[name] for part in parts.values()]
        rows.append([f"{name} a solve", *("-" if count is None else f"{count:.1f}" for count in counts)])
    return table(("stage", *(f"{phase}, µs a token" for phase in parts)), rows)


def ratios() -> str:
    rows = [
        [other, phase, f"{found['ratio']:.2f}x", f"{found['low']:.2f} to {found['high']:.2f}"]
        for phase, compared in read("bench_runtime")["comparison"].items()
        for other, found in compared["ratios"].items()
    ]
    return table(("DEQ beside", "step", "ratio", "range"), rows)


def trellisnet() -> str:
    results = read("bench_runtime_trellisnet")
    both = [results["comparison"][p]["ratios"]["70 tied layers"]["ratio"] for p in ("training", "inference")]
    solver = results["breakdown"]["training"]["seconds"]["solver"] / results["breakdown"]["training"]["total"]
    return prose(
        f"A DEQ-TrellisNet trained on Penn Treebank (`{results['config']['subject']}`) takes {both[0]:.2f}x the time "
        f"of 70 tied layers in training and {both[1]:.2f}x in inference (`results/bench_runtime_trellisnet.json`; the "
        f"paper: 2.40x and 1.64x). Its solver takes {100 * solver:.0f} % of a training step: pieces of 8 positions are "
        "small."
    )


def compiled() -> str:
    results = read("bench_runtime_compile")
    slower = [1 / results["comparison"][p]["ratios"]["DEQ, compiled"]["ratio"] for p in ("training", "inference")]
    return prose(
        f"With its cell compiled, a training step of `{results['config']['subject']}` takes {slower[0]:.2f} times as "
        f"long as without, and inference {slower[1]:.2f} times (`deqkit bench runtime RUN --compile`, "
        "`results/bench_runtime_compile.json`, one thread)."
    )


def bf16() -> str:
    results = read("bench_runtime_bf16")
    times = 1 / results["comparison"]["training"]["ratios"]["DEQ, bf16"]["ratio"]
    return prose(
        f"In bf16 (`--precision bf16`) a training step of `{results['config']['subject']}` takes {times:.2f} times as "
        f"long as in float32 on a processor that has instructions for it ({results['machine']['cpu']}; `deqkit bench "
        "runtime RUN --bf16`, `results/bench_runtime_bf16.json`, one thread). Inference is in float32 in any case."
    )


def length() -> str:
    rows, told = [], []
    for model, name in LENGTHS.items():
        results = read(name)
        for row in results["rows"]:
            training, inference = row["training"], row["inference"]
            times = [f"{1e6 * part['seconds_per_token']:.0f}" for part in (training, inference)]
            counts = [f"{training['evaluations']:.1f}", f"{training['products']:.1f}"]
            rows.append([model, f"{row['length']:,}", *times, *counts, f"{row['peak_bytes'] / 2**20:.0f}"])
        growth = [found["value"] for found in results["summary"]]
        told.append(
            prose(
                f"From the shortest to the longest, a token of the {model} takes {growth[0]:.2f} times as long in "
                f"training and {growth[1]:.2f} times in inference; one more token takes {growth[2]:.2f} times the "
                "memory."
            )
        )
    times = ("training, µs a token", "inference, µs a token")
    columns = ("model", "positions", *times, "evaluations", "products", "MiB a training step")
    return "\n\n".join((table(columns, rows), "\n".join(told)))


def generation() -> str:
    results = read("bench_generate")
    rows = [
        [way["way"], f"{way['tokens_per_second']:.0f}", f"{way['evaluations_per_token']:.1f}"]
        for way in results["rows"]
    ]
    again, stack = (found["value"] for found in results["summary"])
    told = prose(
        f"One text, after {results['config']['context']} positions, one thread: {again:.1f} times the speed of solving "
        f"everything again, and {stack:.1f} times that of {results['config']['depth']} tied layers with a cache of "
        f"their own, trained on the same data (perplexity {results['perplexity']['equilibrium']:.1f} against "
        f"{results['perplexity']['stack']:.1f} on a part of the validation text)."
    )
    return "\n\n".join((table(("way", "tokens a second", "evaluations a token"), rows), told))


def long_text() -> str:
    results = read("eval_enwik8")
    figures, seconds = results["figures"], results["seconds"]
    return prose(
        f"{figures['num_tokens'] / 1e6:,.0f} million bytes of enwik8 with the recipe `{results['config']['run']}` at "
        f"width 32 (`deqkit eval RUN --data data/enwik8 --split {results['split']}`, `results/eval_enwik8.json`): "
        f"{seconds / 60:.0f} minutes on one thread, beside other jobs, {figures['num_tokens'] / seconds:,.0f} bytes a "
        f"second, with {results['memory_mib']:,.0f} MiB for the whole process. Killed on the way, "
        f"{results['interruptions']} times, it went on where it was. ({figures['bits_per_byte']:.2f} bits a byte: the "
        "model had been trained for a minute.)"
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "memory": memory,
    "paper": paper,
    "solvers": solvers,
    "runtime": runtime,
    "ratios": ratios,
    "compiled": compiled,
    "bf16": bf16,
    "trellisnet": trellisnet,
    "length": length,
    "generation": generation,
    "long-text": long_text,
}


def filled(text: str) -> str:
    """The text with every marked section written anew.

    Raises:
        ValueError: a mark names no section.
    """

    def section(match: re.Match[str]) -> str:
        name = match[1]
        if name not in SECTIONS:
            raise ValueError(f"<!-- {name} --> is none of {', '.join(SECTIONS)}")
        return f"<!-- {name} -->\n\n{SECTIONS[name]()}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
