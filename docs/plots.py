"""Draw the figures of docs/performance.md from results/: `make documents`.

They show what the tables beside them say (docs/tables.py), drawn as those of docs/paper.md are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tables import LENGTHS, ROOT, read

from deqkit.paper.figures import draw

Panel = dict[str, Any]

PHASES = ("training", "inference")
STAGES_SHOWN = ("cell", "products", "solver", "softmax", "penalty")
"""Of more than a few percent of a step; all others are drawn as one."""
RUNTIMES = {
    "Transformer": ("bench_runtime", "paper/table-4-transformer"),
    "TrellisNet": ("bench_runtime_trellisnet", "paper/table-4-trellisnet"),
}
"""What was measured here, and the result that holds the paper's own figures."""
WAYS = {"cached": "DEQ, past kept", "solved again": "DEQ, solved again", "stack": "{depth} tied layers, past kept"}
OURS, THEIRS = 0, 1
"""Colours of what is measured here or is deqkit's, and of what is the paper's or torchdeq's."""


def step() -> list[Panel]:
    bars = []
    for phase, found in read("bench_runtime")["breakdown"].items():
        micros = {stage: 1e6 * seconds / found["tokens"] for stage, seconds in found["seconds"].items()}
        parts = [*(micros.pop(stage) for stage in STAGES_SHOWN), sum(micros.values())]
        bars.append({"label": phase, "value": sum(parts), "parts": parts})
    return [{"kind": "bars", "y": "µs a token", "parts": [*STAGES_SHOWN, "all others"], "bars": bars}]


def ratios() -> list[Panel]:
    panels = []
    for model, (measured, claim) in RUNTIMES.items():
        compared, paper = read(measured)["comparison"], read(claim)["numbers"]["paper"]
        bars = []
        for phase in PHASES:
            for layers, found in compared[phase]["ratios"].items():
                bars.append({"label": f"{phase}, {layers}", "value": found["ratio"], "colour": OURS})
            bars.append({"label": f"{phase}, the paper", "value": paper[phase], "colour": THEIRS})
        scale = "times as long as the layers"
        panels.append({"kind": "bars", "title": f"DEQ-{model}", "y": scale, "mark": 1.0, "bars": bars})
    return panels


def length() -> list[Panel]:
    times, peaks = [], []
    for colour, (model, name) in enumerate(LENGTHS.items()):
        results = read(name)
        rows = results["rows"]
        curve = {"x": [row["length"] for row in rows], "colour": colour}
        for style, phase in enumerate(PHASES):
            micros = [1e6 * row[phase]["seconds_per_token"] for row in rows]
            times.append({**curve, "label": f"{model}, {phase}", "y": micros, "style": style})
        mib = [row["peak_bytes"] / 2**20 for row in rows]
        peaks.append({**curve, "label": f"{model}, {results['config']['batch']} at once", "y": mib, "style": 0})
    axes = {"x": "positions", "log_x": True}
    return [
        {**axes, "title": "time", "y": "µs a token", "series": times},
        {**axes, "title": "memory", "y": "MiB a training step", "log_y": True, "series": peaks},
    ]


def generation() -> list[Panel]:
    results = read("bench_generate")
    config, bars = results["config"], []
    for row in results["rows"]:
        rates = [1e3 * config["batch"] / milliseconds for milliseconds in row["milliseconds_per_step"]]
        label = WAYS[row["way"]].format(depth=config["depth"])
        bars.append({"label": label, "value": row["tokens_per_second"], "points": rates})
    return [{"kind": "bars", "y": "tokens a second", "bars": bars}]


def solvers() -> list[Panel]:
    cells = read("bench_solvers")["cells"]
    looks = _looks(cells)
    axes = {"kind": "points", "x": "cost, in evaluations of f", "y": "gradient error", "log_x": True, "log_y": True}
    panels = []
    for cell in cells:
        done = [row for row in cell["rows"] if row["failure"] is None]
        failed = [f", {row['library']} {row['method']} failed" for row in cell["rows"] if row not in done]
        points = [{**looks[_name(row)], "x": [row["cost"]], "y": [row["grad_error"]]} for row in done]
        panels.append({**axes, "title": "".join([f"{cell['cell']} cell", *failed]), "series": points})
    return [*panels, {"kind": "legend", "series": list(looks.values())}]


def _looks(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Label, colour and mark of every method: the library has the colour, and a name the mark in either library."""
    rows = [row for cell in cells for row in cell["rows"]]
    marks = list(dict.fromkeys(row["method"] for row in rows))
    colours = {"deqkit": OURS, "torchdeq": THEIRS}
    return {
        _name(row): {"label": _name(row), "colour": colours[row["library"]], "style": marks.index(row["method"])}
        for row in rows
    }


def _name(row: dict[str, Any]) -> str:
    return f"{row['library']} {row['method']}"


FIGURES: dict[str, Callable[[], list[Panel]]] = {
    "performance-step.svg": step,
    "performance-ratios.svg": ratios,
    "performance-length.svg": length,
    "performance-generation.svg": generation,
    "performance-solvers.svg": solvers,
}


def drawn() -> Iterator[tuple[str, bytes]]:
    """Every figure by the name of its file."""
    for name, panels in FIGURES.items():
        yield name, draw(panels())


if __name__ == "__main__":
    for name, figure in drawn():
        (ROOT / "docs" / "figures" / name).write_bytes(figure)
