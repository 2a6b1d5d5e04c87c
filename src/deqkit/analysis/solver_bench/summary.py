"""The bars of the benchmark, computed from its rows: what we ask of deqkit, on its own and against torchdeq."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deqkit.analysis.solver_bench.methods import DEFAULT, NO_COMPACTION

BAR_TOL = 1e-3
"""The tolerance the bars are stated for."""

Row = Mapping[str, Any]


def summarise(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every bar with its value and verdict; None where its rows were not measured.

    Returns:
        One entry a bar: `name`, `value`, `bar`, `unit`, `holds` (True, False, or None when not measured), `detail`.
    """
    rows = {cell["cell"]: _by_label(cell["rows"]) for cell in cells}
    transformer, mixed = rows.get("transformer", {}), rows.get("mixed", {})
    return [
        _cost_bar(transformer, ours=_default_row, name="cost of default / torchdeq's best"),
        *(
            _cost_bar(of_cell, ours=_cheapest_as_exact, name=f"cost as exact / torchdeq's, {cell}", bar=0.5)
            for cell, of_cell in rows.items()
        ),
        _overhead_bar(transformer, DEFAULT),
        _overhead_bar(transformer, "deqkit/anderson prefix"),
        _outside_bar(transformer, "anderson"),
        _outside_bar(transformer, "broyden"),
        _count_bar(transformer, DEFAULT, "peak_mib", name="peak tensors, default", bar=61, unit="MiB"),
        _count_bar(transformer, "deqkit/broyden", "peak_mib", name="peak tensors, broyden", bar=61, unit="MiB"),
        _count_bar(transformer, DEFAULT, "vjps", name="products in the backward solve", bar=36, unit=""),
        _compaction_bar(mixed),
        _estimate_bar(transformer),
    ]


def _by_label(rows: Sequence[Row]) -> dict[str, Row]:
    return {
        f"{row['library']}/{row['method']}": row for row in rows if row["tol"] == BAR_TOL and row["failure"] is None
    }


def _cost_bar(
    rows: Mapping[str, Row], *, ours: Callable[[Mapping[str, Row], Row], Row | None], name: str, bar: float = 0.6
) -> dict[str, Any]:
    """The cost of a row of ours against the cheapest row of torchdeq that converged, at a gradient no less exact."""
    peers = [row for label, row in rows.items() if label.startswith("torchdeq/") and row["residual"] <= BAR_TOL]
    best = min(peers, key=lambda row: row["cost"], default=None)
    row = None if best is None else ours(rows, best)
    if best is None or row is None:
        measured = best is not None and any(label.startswith("deqkit/") for label in rows)
        detail = "none of our rows has a gradient as exact" if measured else "rows missing"
        return _entry(name, None, bar, unit="x", holds=False if measured else None, detail=detail)
    ratio = _paired_ratio(row, best)
    no_worse = _no_worse(row, best)
    detail = (
        f"{row['cost']:.0f} f ({row['method']}) against {best['cost']:.0f} f (torchdeq {best['method']}); "
        f"gradient error {_shown(row['grad_error'])} against {_shown(best['grad_error'])}"
    )
    return _entry(
        name, ratio, bar, unit="x", holds=None if no_worse is None else ratio <= bar and no_worse, detail=detail
    )


def _default_row(rows: Mapping[str, Row], best: Row) -> Row | None:
    return rows.get(DEFAULT)


def _cheapest_as_exact(rows: Mapping[str, Row], best: Row) -> Row | None:
    """Our cheapest row whose gradient is at least as exact as that of `best`."""
    exact = [row for label, row in rows.items() if label.startswith("deqkit/") and _no_worse(row, best)]
    return min(exact, key=lambda row: row["cost"], default=None)


def _no_worse(row: Row, other: Row) -> bool | None:
    if row["grad_error"] is None or other["grad_error"] is None:
        return None
    return row["grad_error"] <= other["grad_error"]


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}"


def _overhead_bar(rows: Mapping[str, Row], label: str) -> dict[str, Any]:
    """What a forward solve takes beside f."""
    name, bar = f"forward solver / f, {label.removeprefix('deqkit/')}", 0.05
    overhead = rows.get(label, {}).get("solver_overhead")
    holds = None if overhead is None else overhead <= bar
    return _entry(name, overhead, bar, unit="", holds=holds, detail="rows missing" if overhead is None else "")


def _outside_bar(rows: Mapping[str, Row], solver: str) -> dict[str, Any]:
    """The share of time outside f when the solver does both solves."""
    name, bar = f"time outside f, {solver}", 0.15
    row = rows.get(f"deqkit/{solver}")
    if row is None:
        return _entry(name, None, bar, unit="", holds=None, detail="rows missing")
    others = {
        label: rows[label]["outside_share"]
        for label in (f"torchdeq/{solver}", f"deqkit/{solver} + gmres")
        if label in rows
    }
    detail = ", ".join(f"{label} {share:.1%}" for label, share in others.items())
    share = row["outside_share"]
    return _entry(name, share, bar, unit="", holds=share <= bar, detail=detail)


def _count_bar(rows: Mapping[str, Row], label: str, key: str, *, name: str, bar: float, unit: str) -> dict[str, Any]:
    if label not in rows:
        return _entry(name, None, bar, unit=unit, holds=None, detail="rows missing")
    value = rows[label][key]
    peers = [row[key] for other, row in rows.items() if other.startswith("torchdeq/")]
    detail = f"torchdeq: {min(peers):.0f} to {max(peers):.0f}" if peers else ""
    return _entry(name, value, bar, unit=unit, holds=value <= bar, detail=detail)


def _compaction_bar(rows: Mapping[str, Row]) -> dict[str, Any]:
    name, bar = "compaction speed-up, 7 easy + 1 hard", 1.8
    if DEFAULT not in rows or NO_COMPACTION not in rows:
        return _entry(name, None, bar, unit="x", holds=None, detail="rows missing")
    ratio = _paired_ratio(rows[NO_COMPACTION], rows[DEFAULT])
    detail = f"{rows[DEFAULT]['cost']:.0f} against {rows[NO_COMPACTION]['cost']:.0f} f without"
    return _entry(name, ratio, bar, unit="x", holds=ratio >= bar, detail=detail)


def _estimate_bar(rows: Mapping[str, Row]) -> dict[str, Any]:
    """How far the gradient error we report is from the true one, whichever is larger."""
    name, bar = "reported gradient error, factor off", 3.0
    row = rows.get(DEFAULT, {})
    true, estimate = row.get("grad_error"), row.get("grad_error_estimate")
    if not true or not estimate:
        return _entry(name, None, bar, unit="x", holds=None, detail="no estimate or no reference")
    factor = max(true / estimate, estimate / true)
    detail = f"reported {estimate:.1e}, true {true:.1e}"
    return _entry(name, factor, bar, unit="x", holds=factor <= bar, detail=detail)


def _paired_ratio(above: Row, below: Row) -> float:
    """The median over rounds of a ratio of two rows measured in the same round."""
    pairs = zip(above["total_seconds"], below["total_seconds"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _entry(name: str, value: float | None, bar: float, *, unit: str, holds: bool | None, detail: str) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": bar, "unit": unit, "holds": holds, "detail": detail}
