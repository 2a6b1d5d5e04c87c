"""Solving against stacking: figure 2, right, and appendix D."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from deqkit.model import SequenceModel
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.solves import (
    account,
    curve,
    equation_of,
    evals_to,
    figure,
    median_traces,
    sample_text,
    solutions_on_test,
    turns,
    yes,
)
from deqkit.paper.subjects import Scale, at_both_scales, changed, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import AbstractSolver, Broyden, FixedPointIteration, Tolerance
from deqkit.train.load import LoadedRun

SOLVED = 1e-3
"""A relative residual at which an equilibrium counts as found."""
QUICKER = 0.9
"""At most this share of the evaluations is fewer of them; more is as many."""
SETTLED = 0.1
"""A stack has come to rest once the change from layer to layer is this share of the second layer's."""
TURNING = -0.5
"""A cosine between successive steps below which layers undo each other for the most part: an oscillation."""
STACKING, SOLVING, MORE = "layer after layer", "Broyden", "Broyden with more pairs"
MORE_PAIRS = 30
ANOTHER_STACK = (
    " Whether a stack oscillates is a matter of its training: tried was another one of the same recipe and seed, on a "
    "processor of another make, whose steps turn back at every T, so that this row holds for it (its result is in this "
    "row's file at commit fe8e7a1)."
)
"""Of the trained stacks of the mini recipes, where appendix D looks at one that does not oscillate."""
SOLVED_BATCHES = 2
"""Of the test split: solves to a tight tolerance, by plain iteration too, take long."""
MOST_EVALUATIONS = 200
MORE_OFTEN = 0.01
"""A share of solves by which more of them converge."""
NO_WORSE = 1.005
"""Up to this factor a perplexity is no worse."""


def _follow(run: LoadedRun, *, length: int, scale: Scale) -> dict[str, Any]:
    """Test sequences without context: what stacking does to them, and what Broyden's method does."""
    tokens = sample_text(run.task(), length=length, count=scale.num_samples)
    equation = equation_of(run.model, tokens)
    solvers = {STACKING: FixedPointIteration(), SOLVING: Broyden(memory=10)}
    traces = median_traces(equation, solvers, depth=scale.depth)
    cosines = turns(equation, depth=scale.depth)
    late = cosines[len(cosines) // 2 :]
    return {
        "traces": traces,
        "evaluations": {name: evals_to(trace, SOLVED) for name, trace in traces.items()},
        "last": {name: trace[-1] for name, trace in traces.items()},
        "turn": statistics.fmean(late) if late else None,
        "turns": len(cosines),
    }


def _fewer(a: int | None, b: int | None) -> bool:
    """Whether a is reached, and clearly before b."""
    return a is not None and (b is None or a <= QUICKER * b)


def _as_many(a: int | None, b: int | None) -> bool:
    """Whether neither is reached clearly before the other."""
    return not _fewer(a, b) and not _fewer(b, a)


def figure_2_right(workshop: Workshop, *, scale: Scale) -> Outcome:
    equilibrium = workshop.trained(scale.transformer(workshop))
    stack = workshop.trained(scale.transformer_layers(workshop))
    length = equilibrium.config.data.eval_length
    found = {
        "DEQ": _follow(equilibrium, length=length, scale=scale),
        "stack": _follow(stack, length=length, scale=scale),
    }
    series = [curve(f"{model}, {name}", trace) for model, one in found.items() for name, trace in one["traces"].items()]
    solve, stacking = found["DEQ"]["evaluations"][SOLVING], found["stack"]["evaluations"][STACKING]
    own = found["DEQ"]["evaluations"][STACKING]
    quicker = [_fewer(solve, other) for other in (stacking, own)]
    level = solve is not None and any(_as_many(solve, other) for other in (stacking, own))
    oscillates = {name: one["turn"] is not None and one["turn"] < TURNING for name, one in found.items()}
    return Outcome(
        measured=f"evaluations to a residual of {SOLVED:g}: DEQ with Broyden {_count(solve, scale)}, its cell stacked "
        f"{_count(own, scale)}; the layer-trained transformer stacked {_count(stacking, scale)} "
        f"(residual {found['stack']['last'][STACKING]:.0e} after {scale.depth} layers; cosine between successive steps "
        f"{_number(found['stack']['turn'])}, in the DEQ's cell {_number(found['DEQ']['turn'])})",
        scale=f"{scale.num_samples} test sequences of {length}; {describe(equilibrium, stack)}",
        holds=None if level else all(quicker),
        numbers={
            "found": found,
            "quicker than the stack, than its own cell stacked": quicker,
            "oscillates": oscillates,
            "figure": figure(x="evaluations of f", y="relative residual", series=series, log_y=True),
        },
        remark=f"Asked: at most {QUICKER:.0%} of the evaluations of either; open where they need as many. A cosine "
        f"near -1 means that layers undo each other: an oscillation, if below {TURNING:g}. The stack "
        f"{_oscillates(oscillates['stack'])} here, the DEQ's cell stacked {_oscillates(oscillates['DEQ'])}. The paper "
        "says that stacking may oscillate; the verdict does not depend on it. Counts are of the median sequence. "
        "`solve-quicker` asks the same of all solves of test segments, and of a TrellisNet.",
    )


def _oscillates(yes: bool) -> str:
    return "oscillates" if yes else "does not"


def _count(evals: int | None, scale: Scale) -> str:
    return f"not within {scale.depth}" if evals is None else str(evals)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def appendix_d(workshop: Workshop, *, scale: Scale) -> Outcome:
    runs = {
        "transformer": workshop.trained(scale.transformer_layers(workshop)),
        "trellis": workshop.trained(scale.trellis_layers(workshop)),
    }
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, run in runs.items():
        found[name] = {}
        for length in scale.lengths:
            workshop.tell(f"appendix D: {name}, T = {length}")
            found[name][length] = _follow(run, length=length, scale=scale)
    # From the second layer on: the first starts from zero, where the change is 1 whatever the layer does.
    falls = {
        name: [one["last"][STACKING] / one["traces"][STACKING][1] for one in of.values()] for name, of in found.items()
    }
    converges = {name: all(fall < SETTLED for fall in of) for name, of in falls.items()}
    turning = [one["turn"] for one in found["transformer"].values()]
    oscillates = all(turn is not None and turn < TURNING for turn in turning)
    easier = {
        name: all(_fewer(one["evaluations"][SOLVING], one["evaluations"][STACKING]) for one in of.values())
        for name, of in found.items()
    }
    # A stack that circles around its point need not come to rest, if the point is there: a solver finds it.
    is_full = scale.max_batches is None
    tends = converges["trellis"] and (converges["transformer"] or (oscillates and easier["transformer"]))
    panels = [
        {
            "title": name,
            **figure(x="evaluations of f", y="relative residual", log_y=True, series=_panel(of)),
        }
        for name, of in found.items()
    ]
    return Outcome(
        measured="; ".join(
            f"{name}: change after {scale.depth} layers "
            + ", ".join(f"{fall:.2g}" for fall in falls[name])
            + f" of that of the second; evaluations to {SOLVED:g}: Broyden "
            + ", ".join(_count(one["evaluations"][SOLVING], scale) for one in of.values())
            + ", stacking "
            + ", ".join(_count(one["evaluations"][STACKING], scale) for one in of.values())
            for name, of in found.items()
        )
        + f"; the transformer's cosine between successive steps {', '.join(map(_number, turning))}",
        scale=f"T = {', '.join(map(str, scale.lengths))}, {scale.num_samples} test sequences each; "
        f"{describe(*runs.values())}",
        holds=tends and oscillates and easier["transformer"],
        numbers={
            "found": {name: {str(length): one for length, one in of.items()} for name, of in found.items()},
            "converges": converges,
            "oscillates": oscillates,
            "quasi-Newton is quicker": easier,
            "figures": panels,
        },
        remark="Asked: the trellis's change falls to a tenth at every T, so does the transformer's, or its stack "
        "circles around a point that Broyden's method finds, its steps turn back (a cosine below "
        f"{TURNING:g}, over the later half of the layers until steps are rounding), and Broyden needs fewer "
        "evaluations than stacking on it. Counts are of the median sequence; a stack's residual is its change by a "
        f"layer. A trellis needs about as many layers as positions, and is cut off at {scale.depth}. Falls to a tenth: "
        f"transformer {yes(converges['transformer'])}, trellis {yes(converges['trellis'])}; turns back: "
        f"{yes(oscillates)}; "
        f"Broyden is quicker: transformer {yes(easier['transformer'])}, trellis {yes(easier['trellis'])} (for which "
        "`solve-quicker` asks). "
        f"All lengths but the shortest are longer than what the models were trained on "
        f"({runs['transformer'].config.data.length} positions and as many of memory)."
        f"{ANOTHER_STACK if is_full and not oscillates else ''}",
    )


def _panel(of: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    stacked = [curve(f"T = {length}", one["traces"][STACKING]) for length, one in of.items()]
    longest = max(of)
    return [*stacked, curve(f"T = {longest}, Broyden", of[longest]["traces"][SOLVING])]


def solve_quicker(workshop: Workshop, *, scale: Scale) -> Outcome:
    runs = {
        "transformer": workshop.trained(scale.transformer(workshop)),
        "trellis": workshop.trained(scale.trellis(workshop)),
    }
    solvers = {SOLVING: Broyden(memory=10, group="prefix"), STACKING: FixedPointIteration()}
    models = {name: changed(run, start="zeros") for name, run in runs.items()}
    found = {name: _solves(workshop, run, models[name], solvers) for name, run in runs.items()}
    quicker = {name: _clearly_fewer(of[SOLVING], of[STACKING]) for name, of in found.items()}
    size = runs["trellis"].config.model.subsequence_length
    uncut = changed(runs["trellis"], subsequence_length=None)
    whole = _solves(workshop, runs["trellis"], uncut, {**solvers, MORE: Broyden(memory=MORE_PAIRS, group="prefix")})
    return Outcome(
        measured="; ".join(
            f"{name}: {SOLVING} {_told_solves(of[SOLVING])}, {STACKING} {_told_solves(of[STACKING])}"
            for name, of in found.items()
        ),
        scale=f"{found['transformer'][SOLVING]['solves']:,} and {found['trellis'][SOLVING]['solves']:,} solves from "
        f"zeros of test segments of {runs['transformer'].config.data.eval_length}, those of the trellis in pieces of "
        f"{size}, to {SOLVED:g} within {MOST_EVALUATIONS} evaluations; {describe(*runs.values())}",
        holds=all(quicker.values()),
        numbers={"found": found, "quicker": quicker, "trellis, not in pieces": whole},
        remark=f"Holds for a model if more of its solves converge (by {MORE_OFTEN:.0%} of all or more), or as many and "
        f"in at most {QUICKER:.0%} of the evaluations: "
        + ", ".join(f"{name} {yes(one)}" for name, one in quicker.items())
        + ". What a trellis cell knows of a position moves on by a kernel's width with every evaluation, whoever asks "
        f"for it: not cut in pieces its segments take {SOLVING} {_told_solves(whole[SOLVING])}, {STACKING} "
        f"{_told_solves(whole[STACKING])}; with {MORE_PAIRS} pairs {_told_solves(whole[MORE])}.",
    )


def _solves(
    workshop: Workshop, run: LoadedRun, model: SequenceModel, solvers: Mapping[str, AbstractSolver]
) -> dict[str, Any]:
    """What solves of test segments take with each solver."""
    tol = Tolerance(rtol=SOLVED, patience=MOST_EVALUATIONS)
    settings: dict[str, Any] = {"tol": tol, "max_steps": MOST_EVALUATIONS, "max_batches": SOLVED_BATCHES}
    found = {}
    for name, solver in solvers.items():
        workshop.tell(f"solving or stacking: {run.config.recipe}, {name}")
        found[name] = account(solutions_on_test(run, model=model, solver=solver, **settings))
    return found


def _clearly_fewer(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    more = ours["converged"] - theirs["converged"]
    if abs(more) >= MORE_OFTEN:
        return more > 0
    return ours["evaluations"]["mean"] <= QUICKER * theirs["evaluations"]["mean"]


def _told_solves(found: dict[str, Any]) -> str:
    missed = "" if found["converged"] == 1 else f" ({found['converged']:.0%} converge, others count as the limit)"
    return f"{found['evaluations']['mean']:.1f} evaluations{missed}"


def unrolling(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer_layers(workshop))
    own = int(run.config.model.depth)
    depths = [own // 8, own // 4, own // 2, own, 2 * own, 4 * own]
    depths = sorted({max(1, depth) for depth in depths})
    found = {depth: workshop.tested(run, max_batches=scale.max_batches, depth=depth)["perplexity"] for depth in depths}
    up_to = [found[depth] for depth in depths if depth <= own]
    enough = next(depth for depth in depths if found[depth] <= NO_WORSE * min(found.values()))
    improves = all(b <= NO_WORSE * a for a, b in pairwise(up_to)) and up_to[-1] < up_to[0]
    stays = all(found[depth] <= NO_WORSE * found[own] for depth in depths if depth > own)
    return Outcome(
        measured="test perplexity " + ", ".join(f"{found[depth]:.1f} with {depth}" for depth in depths) + " layers",
        scale=f"trained with {own} layers; {describe(run)}",
        holds=improves and stays,
        numbers={
            "perplexity": {str(depth): value for depth, value in found.items()},
            "improves": improves,
            "stays": stays,
            "figure": figure(
                x="layers",
                y="test perplexity",
                series=[curve("the trained stack", list(found.values()), depths)],
                log_x=True,
            ),
        },
        remark=f"Holds if perplexity rises by at most {NO_WORSE - 1:.1%} with any doubling up to the depth of "
        f"training, is lower there than at the start, and at up to four times that depth is no more than "
        f"{NO_WORSE - 1:.1%} higher. "
        f"The first depth within {NO_WORSE - 1:.1%} of the lowest: {enough}.",
    )


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        figure_2_right,
        row="figure-2-right",
        where="figure 2, right",
        claim="Broyden's method finds the equilibrium of a trained DEQ in fewer steps than stacked layers take to come "
        "to rest, which may oscillate",
        paper="a plot",
    ),
    at_both_scales(
        appendix_d,
        row="appendix-d",
        where="appendix D, figure 4",
        claim="tied stacks tend to a fixed point as they get deeper, transformers in oscillations; quasi-Newton "
        "methods find that of transformers more easily",
        paper="two plots, T = 100, 200, 400, 800",
    ),
    at_both_scales(
        solve_quicker,
        row="solve-quicker",
        where="section 1",
        claim="to solve for the equilibrium takes fewer evaluations than to iterate the layer until it comes to rest",
        paper="in practice more quickly",
    ),
    at_both_scales(
        unrolling,
        row="unrolling",
        where="section 3, weight tying",
        claim="a trained stack of tied layers loses nothing with any doubling up to its own depth, nor at up to four "
        "times that depth",
        paper="it can be unrolled to any depth, typically with better features (cited)",
    ),
)
