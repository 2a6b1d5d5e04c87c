"""Training memory (the last column of tables 2 and 3), counted storage by storage at the paper's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from deqkit.analysis.memory_bench import COMPARISONS, GROUPS, MAX_CHANGE_BY_STEPS, MemoryBenchConfig, checkpointed
from deqkit.analysis.training_memory import inference_memory, training_memory
from deqkit.model import ModelConfig
from deqkit.model.paper import PAPER_MODELS
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.workshop import Workshop
from deqkit.solve import Anderson, Broyden

MIB = 2**20
SIZES = MemoryBenchConfig()
QUICK_STEPS, FULL_STEPS = 12, SIZES.max_steps
"""Limits of every solve. From ten steps on, a training step's peak is what it is with any limit."""
INFERENCE_STEPS = (20, 100)
"""Between which prediction's peak should not change: before, solvers do not have all the pairs that they ever hold, and
there is no graph beside which these would not count."""
DEPTHS = (5, 10, 20, 40)
GROWS = 0.8
"""Memory that grows with depth is this share of proportional at least."""
TIED_TRANSFORMER, TRELLIS_PTB, TRELLIS_WT103 = "transformer-small-tied-16", "trellis-ptb", "trellis-wt103"
SCALE = f"the paper's sizes, batch {SIZES.batch}, length {SIZES.length}, embeddings excluded, float32"
METHOD = (
    "Every storage that a training step makes is counted; nothing is computed. `deqkit bench memory` has the parts."
)


def peak(workshop: Workshop, name: str, model: ModelConfig) -> int:
    """Bytes at the peak of a training step."""
    return _counted(
        workshop, name, lambda: training_memory(model, batch=SIZES.batch, length=SIZES.length, body_only=True).peak
    )


def _counted(workshop: Workshop, name: str, count: Callable[[], int]) -> int:
    key = ("memory", name)
    if key not in workshop.kept:
        workshop.tell(f"memory of {name}")
        workshop.kept[key] = count()
    return workshop.kept[key]


def equilibrium(workshop: Workshop, name: str, max_steps: int) -> int:
    """The peak of a model of the paper whose solves have a step limit."""
    model = PAPER_MODELS[name]()
    adjoint: Any = model.adjoint
    model = replace(model, max_steps=max_steps, adjoint=replace(adjoint, max_steps=max_steps))
    return peak(workshop, f"{name}, {max_steps} steps", model)


def _inference(workshop: Workshop, name: str, max_steps: int) -> int:
    """The peak without gradients."""
    model = replace(PAPER_MODELS[name](), eval_max_steps=max_steps)
    return _counted(
        workshop,
        f"{name}, {max_steps} steps, inference",
        lambda: inference_memory(model, batch=SIZES.batch, length=SIZES.length),
    )


def _tried(workshop: Workshop, missed: Sequence[dict[str, Any]], max_steps: int, tell: Callable[[float], str]) -> str:
    """What the equilibria of comparisons that fall short need when their solvers keep as little as they can.

    `tell` says what a ratio to the layers' memory means for the claim.
    """
    told = []
    for name in dict.fromkeys(one["equilibrium"] for one in missed):
        model = PAPER_MODELS[name]()
        adjoint: Any = replace(cast(Any, model.adjoint), max_steps=max_steps, solver=Anderson(memory=1))
        model = replace(model, max_steps=max_steps, adjoint=adjoint, solver=Broyden(memory=2, group="prefix"))
        compared = [one for one in missed if one["equilibrium"] == name]
        few, own = peak(workshop, f"{name}, {max_steps} steps, few pairs", model) / MIB, compared[0]["own_mib"]
        if round(few) >= round(own):
            told.append(f"no less for {name}")
            continue
        ratios = ", ".join(f"{tell(few / one['layers_mib'])} {one['layers']}" for one in compared)
        told.append(f"{few:,.0f} MiB instead of {own:,.0f} for {name} ({ratios})")
    if not told:
        return ""
    return f" Tried: solvers that keep two pairs forward and one backward, which need {'; '.join(told)}."


def _checkpointed(workshop: Workshop, label: str, model: ModelConfig) -> int:
    """With checkpoints between groups of layers of the size that needs least."""
    return min(peak(workshop, f"{label} {every}", grouped) for every, grouped in checkpointed(model))


def pairs(workshop: Workshop, names: Sequence[str], max_steps: int) -> list[dict[str, Any]]:
    """The comparisons of `deqkit bench memory` with these counterparts in layers."""
    found = []
    for name, layers, checkpointing, paper_own, paper_layers in COMPARISONS:
        if layers not in names:
            continue
        label = f"{layers}, checkpointing" if checkpointing else layers
        own = equilibrium(workshop, name, max_steps)
        other = (_checkpointed if checkpointing else peak)(workshop, label, PAPER_MODELS[layers]())
        found.append(
            {
                "equilibrium": name,
                "layers": layers,
                "checkpointing": checkpointing,
                "own_mib": own / MIB,
                "layers_mib": other / MIB,
                "ratio": own / other,
                "paper_ratio": paper_own / paper_layers if paper_own and paper_layers else None,
                "paper_gb": [paper_own, paper_layers],
            }
        )
    return found


def column(workshop: Workshop, *, names: Sequence[str], max_steps: int) -> Outcome:
    """The memory column of a table: the ratio is at most the paper's."""
    found = pairs(workshop, names, max_steps)
    compared = [one for one in found if one["paper_ratio"] is not None]
    missed = [one for one in compared if one["ratio"] > one["paper_ratio"]]
    return Outcome(
        measured="; ".join(
            f"{one['own_mib']:,.0f} MiB against {one['layers_mib']:,.0f}{_with(one)}: {one['ratio']:.2f} "
            f"(paper {one['paper_ratio']:.2f})"
            for one in compared
        ),
        scale=SCALE,
        holds=not missed,
        numbers={"found": found, "table": _table(found), "figure": _bars(found)},
        remark=f"Asked: a ratio of at most the paper's. {METHOD}"
        + (" Our models in layers need far less than the paper's, so that its ratios are hard to reach." * bool(missed))
        + _tried(workshop, missed, max_steps, lambda ratio: f"{ratio:.2f} of"),
    )


def _with(one: dict[str, Any]) -> str:
    depth = one["layers"].rsplit("-", 1)[-1]
    return f" in {depth} layers" + (" with checkpointing" if one["checkpointing"] else "")


def _table(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns = ["equilibrium", "in layers", "MiB", "MiB in layers", "ratio", "paper's ratio", "paper, GB"]
    rows = [
        [
            one["equilibrium"],
            one["layers"] + (", checkpointing" if one["checkpointing"] else ""),
            f"{one['own_mib']:,.0f}",
            f"{one['layers_mib']:,.0f}",
            f"{one['ratio']:.2f}",
            "-" if one["paper_ratio"] is None else f"{one['paper_ratio']:.2f}",
            " / ".join("-" if gb is None else f"{gb:g}" for gb in one["paper_gb"]),
        ]
        for one in found
    ]
    return {"columns": columns, "rows": rows}


def _bars(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = {one["equilibrium"]: one["own_mib"] for one in found}
    values |= {f"{one['layers']}{', checkpointing' * one['checkpointing']}": one["layers_mib"] for one in found}
    return {"kind": "bars", "y": "MiB", "bars": [{"label": name, "value": value} for name, value in values.items()]}


def reduction(
    workshop: Workshop, *, names: Sequence[str], max_steps: int, least: float, most: float | None = None
) -> Outcome:
    """How much of the layers' memory an equilibrium saves."""
    found = [one for one in pairs(workshop, names, max_steps) if not one["checkpointing"]]
    saved = {one["layers"]: 1 - one["ratio"] for one in found}
    missed = [one for one in found if 1 - one["ratio"] < least]
    asked = f"Asked: at least {least:.0%} for each" + ("" if most is None else f" and {most:.0%} for one") + ". "
    return Outcome(
        measured="; ".join(f"{share:.1%} less than {name}" for name, share in saved.items()),
        scale=SCALE,
        holds=not missed and max(saved.values()) >= (most or 0),
        numbers={"found": found, "saved": saved, "table": _table(found)},
        remark=asked + METHOD + _tried(workshop, missed, max_steps, lambda ratio: f"{1 - ratio:.1%} less than"),
    )


def checkpointing(workshop: Workshop, *, names: Sequence[str], decides: str, max_steps: int) -> Outcome:
    found = [one for one in pairs(workshop, names, max_steps) if one["checkpointing"]]
    (deciding,) = [one for one in found if one["layers"] == decides]
    others = ", ".join(f"{one['layers']} {one['ratio']:.2f}" for one in found if one is not deciding)
    beaten = [one["layers"] for one in found if one["ratio"] >= 1]
    return Outcome(
        measured=f"{deciding['own_mib']:,.0f} MiB against {deciding['layers_mib']:,.0f} with checkpointing: "
        f"{deciding['ratio']:.2f}; the other models: {others}",
        scale=SCALE,
        holds=deciding["ratio"] < 1,
        numbers={"found": found, "table": _table(found)},
        remark="The 70-layer TrellisNet decides, as in the paper. States are kept between groups of "
        f"{', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} layers, whichever needs least. "
        + (f"Checkpointing needs less than the equilibrium for {', '.join(beaten)}. " if beaten else "")
        + METHOD,
    )


def constant(workshop: Workshop, *, limits: Sequence[int]) -> Outcome:
    """The equilibrium against the step limit, and layers against their number."""
    models = (TRELLIS_PTB, "transformer-small")
    by_limit = {name: [equilibrium(workshop, name, limit) / MIB for limit in limits] for name in models}
    predicting = {name: [_inference(workshop, name, limit) / MIB for limit in INFERENCE_STEPS] for name in models}
    changes, changes_in_inference = (
        {name: max(values) / min(values) - 1 for name, values in of.items()} for of in (by_limit, predicting)
    )
    model = PAPER_MODELS["transformer-small"]()
    stacked = {
        label: [count(workshop, f"{label} at {depth}", replace(model, depth=depth)) / MIB for depth in DEPTHS]
        for label, count in (("layers", peak), ("layers, checkpointing", _checkpointed))
    }
    growth = (stacked["layers"][-1] - stacked["layers"][0]) / (DEPTHS[-1] - DEPTHS[0])
    series = [{"label": "equilibrium", "x": list(limits), "y": by_limit["transformer-small"]}]
    series += [{"label": "equilibrium, inference", "x": list(INFERENCE_STEPS), "y": predicting["transformer-small"]}]
    series += [{"label": label, "x": list(DEPTHS), "y": values} for label, values in stacked.items()]
    return Outcome(
        measured=f"from {limits[0]} to {limits[-1]} steps in training, {INFERENCE_STEPS[0]} to {INFERENCE_STEPS[-1]} "
        "in inference: "
        + ", ".join(
            f"{name} {change:+.1%} and {changes_in_inference[name]:+.1%} "
            f"({by_limit[name][-1]:,.0f} and {predicting[name][-1]:,.0f} MiB)"
            for name, change in changes.items()
        )
        + f"; every layer of a stack of the small transformer adds {growth:.0f} MiB in training",
        scale=SCALE,
        holds=all(change <= MAX_CHANGE_BY_STEPS for of in (changes, changes_in_inference) for change in of.values())
        and stacked["layers"][-1] / stacked["layers"][0] >= GROWS * DEPTHS[-1] / DEPTHS[0],
        numbers={
            "limits": list(limits),
            "by_limit": by_limit,
            "limits in inference": list(INFERENCE_STEPS),
            "inference by limit": predicting,
            "depths": list(DEPTHS),
            "stacked": stacked,
            "figure": {
                "x": "layers, or limit on evaluations",
                "y": "MiB at the peak",
                "log_x": False,
                "log_y": False,
                "series": series,
            },
        },
        remark=f"Asked: a change of at most {MAX_CHANGE_BY_STEPS:.0%}, and that {DEPTHS[-1]} layers need at least "
        f"{GROWS:.0%} of {DEPTHS[-1] // DEPTHS[0]} times what {DEPTHS[0]} need. {METHOD} In inference solvers hold all "
        f"their pairs from {INFERENCE_STEPS[0]} steps on at the latest; with fewer, less is needed.",
    )


def _column(row: str, where: str, what: str, paper: str, *names: str) -> Claim:
    return Claim(
        row=row,
        where=where,
        claim=f"{what} trains in less memory than its counterpart in layers, by the paper's factor",
        paper=paper,
        quick=partial(column, names=names, max_steps=QUICK_STEPS),
        full=partial(column, names=names, max_steps=FULL_STEPS),
        full_time="two minutes",
    )


TIED = ("trellis-ptb-tied-60", "trellis-wt103-tied-70", TIED_TRANSFORMER)
UNTIED = ("transformer-small-untied-4", "transformer-medium-untied-16", "transformer-adaptive-untied-18")
FOOTPRINT = "section 5.2, memory footprint"

CLAIMS: tuple[Claim, ...] = (
    _column("table-2-memory", "table 2, memory", "DEQ-TrellisNet (PTB)", "1.2 GB against 8.5 GB", TIED[0]),
    _column(
        "table-3-memory-trellisnet",
        "table 3, memory",
        "DEQ-TrellisNet (WikiText-103)",
        "3.3 GB against 24.7 GB in 70 layers, 5.2 GB with checkpointing",
        TIED[1],
    ),
    _column(
        "table-3-memory-small",
        "table 3, memory",
        "DEQ-Transformer small",
        "1.1 GB against 4.8 GB in 4 untied layers, 6.8 GB in 16 tied ones",
        UNTIED[0],
        TIED_TRANSFORMER,
    ),
    _column("table-3-memory-medium", "table 3, memory", "DEQ-Transformer medium", "2.7 GB against 8.5 GB", UNTIED[1]),
    _column(
        "table-3-memory-adaptive",
        "table 3, memory",
        "DEQ-Transformer medium with adaptive embedding",
        "3.7 GB against 9.0 GB",
        UNTIED[2],
    ),
    Claim(
        row="memory-88-percent",
        where=f"abstract; {FOOTPRINT}",
        claim="against tied layers an equilibrium saves over 80 % of the training memory, up to 88 %",
        paper="over 80 %, up to 88 %",
        quick=partial(reduction, names=TIED, max_steps=QUICK_STEPS, least=0.80, most=0.88),
        full=partial(reduction, names=TIED, max_steps=FULL_STEPS, least=0.80, most=0.88),
        full_time="two minutes",
    ),
    Claim(
        row="memory-untied",
        where=FOOTPRINT,
        claim="against layers that are not tied an equilibrium still saves over 60 %",
        paper="over 60 %",
        quick=partial(reduction, names=UNTIED, max_steps=QUICK_STEPS, least=0.60),
        full=partial(reduction, names=UNTIED, max_steps=FULL_STEPS, least=0.60),
        full_time="two minutes",
    ),
    Claim(
        row="memory-checkpointing",
        where=f"table 3; {FOOTPRINT}",
        claim="an equilibrium needs less memory than 70 layers with gradient checkpointing",
        paper="70-layer TrellisNet: 3.3 GB against 5.2 GB",
        quick=partial(checkpointing, names=(*TIED, *UNTIED), decides=TIED[1], max_steps=QUICK_STEPS),
        full=partial(checkpointing, names=(*TIED, *UNTIED), decides=TIED[1], max_steps=FULL_STEPS),
        full_time="two minutes",
    ),
    Claim(
        row="memory-constant",
        where=f"abstract; figure 1, right; {FOOTPRINT}",
        claim="memory of training and of prediction does not grow with the number of solver steps, the equilibrium's "
        "depth (in prediction: from 20 steps on); training memory of layers grows with theirs",
        paper="O(1) against O(L)",
        quick=partial(constant, limits=(10, 20)),
        full=partial(constant, limits=SIZES.step_limits),
        full_time="two minutes",
    ),
)
