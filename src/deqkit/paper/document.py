"""docs/paper.md: every row as the claim, the paper's figure, the command, what was measured, the scale, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deqkit.analysis.results import told_commit
from deqkit.paper.claim import Claim
from deqkit.paper.figures import draw, panels_of
from deqkit.paper.rows import CLAIMS, PARTS
from deqkit.paper.run import Result, read_best, read_quick, told_elsewhere, verdict

FIGURES = "figures"
INTRODUCTION = """\
# The paper, claim by claim

Every table, figure, theorem and remark of "Deep Equilibrium Models" (Bai, Kolter, Koltun, NeurIPS 2019) is a row here:
the claim in our words, the paper's figure, the command that checks it, what that measured, at which scale, and whether
the claim holds there. A result that does not hold is shown as such. What needs GPUs or text that is not here says so,
and names the command that would measure it.

```
deqkit paper                                  # the quick version of every row
deqkit paper copy-memory                      # of one
deqkit paper --full copy-memory               # at full length
deqkit paper --full lstm --seeds 2 --reuse    # another seed, beside those that results/ has
deqkit paper --document                       # write this page from results/
```

All numbers come from `results/paper_quick.json` and `results/paper/ROW.json`; where a row was measured at full length,
that is what is shown. Quick checks use what deqkit carries with it: small models, short trainings, the embedded corpus.
They show that a check works, and little about the size of an effect (those of memory count the paper's sizes, and
differ from the full ones in their step limits alone). A *complete check* has no longer version. The time of a row is
that of the check: a model that was there already, trained for this row before or for another one, is not counted in it;
what the training of its models took stands beside it where that is known.

Words that come back: an *evaluation* is one application of f; a *product* is one of a vector with its Jacobian J, in
the backward solve; ||J|| is the largest singular value of J. *Pairs* are the changes of state and residual that a
solver keeps from its last evaluations. An *injection* is what a cell adds of the input at every evaluation. A *learned
start* is a guess at the equilibrium from the input, trained beside the model, where its solves begin. A *recipe* is a
complete configuration of a training (`deqkit recipes`); a *nat* is the unit of a loss in natural logarithms. A *stack*
has layers in the place of an equilibrium: *tied* ones are one cell applied again and again, *untied* ones have weights
of their own. A *shallow start* trains a stack of few tied layers first. *Compaction* lets samples leave the batch once
they are solved; a *piece* is a part of a sequence that is solved after the one before. *Our penalty* is a term of the
training loss that holds back eigenvalues of J beyond 1; the paper has none. A *leak* is how much a change of later text
changes the loss of earlier text. Of two models one is *ahead* if it is better by more than 1 %, else they are *level*,
which refutes a claim to be ahead if several seeds disagree. A row is *open* if it was measured and nothing follows: two
models are level on the one seed there is, too few solves converged, a difference is within its error or the row's bar,
not all models were trained, or the one that is ahead was trained for longer.

Rows on Penn Treebank, WikiText-2 or WikiText-103 want the corpus: `deqkit data prepare ptb --from RAW --out data/ptb`,
where RAW is a folder with train.txt, valid.txt and test.txt.
"""


@dataclass(frozen=True, kw_only=True)
class Document:
    """The page, and the figures that it shows by the names of their files."""

    text: str
    panels: Mapping[str, Sequence[dict[str, Any]]]


def compose(results: Path) -> Document:
    """The page from a folder of results."""
    best, quick = read_best(results), read_quick(results)
    lines = [INTRODUCTION, *_summary(best, quick)]
    panels: dict[str, Sequence[dict[str, Any]]] = {}
    for part in PARTS:
        lines += [f"## {part.title}", ""]
        for claim in part.claims:
            result = best.get(claim.row)
            lines += _entry(claim, result, quick.get(claim.row))
            if result is not None and (found := panels_of(result["numbers"])):
                panels[f"{claim.row}.svg"] = found
    return Document(text="\n".join(lines).rstrip() + "\n", panels=panels)


def write(results: Path, docs: Path) -> list[Path]:
    """Write docs/paper.md and its figures; figures of rows that have none any more are removed."""
    document = compose(results)
    folder = docs / FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    rows = {f"{claim.row}.svg" for claim in CLAIMS}
    for path in folder.glob("*.svg"):
        if path.name in rows and path.name not in document.panels:
            path.unlink()
    written = [docs / "paper.md"]
    written[0].write_text(document.text, encoding="utf-8")
    for name, panels in document.panels.items():
        (folder / name).write_bytes(draw(panels))
        written.append(folder / name)
    return written


def _summary(best: Mapping[str, Result], quick: Mapping[str, Result]) -> Iterator[str]:
    verdicts = [verdict(best.get(claim.row)) for claim in CLAIMS]
    counts = {text: verdicts.count(text) for text in ("holds", "does not hold", "open", "not measured")}
    yield "## All rows"
    yield ""
    yield (
        f"{len(CLAIMS)} rows: {counts['holds']} hold, {counts['does not hold']} do not, {counts['open']} are open, "
        f"{counts['not measured']} are not measured here."
        + (f" The quick versions took {_minutes(quick):.0f} minutes in all." if quick else "")
    )
    yield ""
    for part in PARTS:
        yield f"**{part.title}**"
        yield ""
        yield "| row | claim | paper | here | verdict |"
        yield "|---|---|---|---|---|"
        for claim in part.claims:
            result = best.get(claim.row)
            here = "-" if result is None else result["measured"]
            cells = (f"[{claim.row}](#{claim.row})", claim.claim, claim.paper, here, told_verdict(claim, result))
            yield f"| {' | '.join(map(_cell, cells))} |"
        yield ""


def _minutes(results: Mapping[str, Result]) -> float:
    return sum(result["seconds"] for result in results.values()) / 60


def _entry(claim: Claim, result: Result | None, quick: Result | None) -> Iterator[str]:
    yield f"### {claim.row}"
    yield ""
    yield f"{_sentence(claim.claim)} *({claim.where})*"
    yield ""
    yield f"- Paper: {claim.paper}"
    if result is None:
        yield "- Here: **not measured** so far"
    else:
        yield f"- Here: {result['measured']}"
        yield f"- Verdict: {told_verdict(claim, result)}"
        yield f"- Scale: {result['scale'] or '-'}"
    yield f"- Command: {_commands(claim)}" if claim.is_checked else f"- Elsewhere: {told_elsewhere(claim)}"
    if result is not None and verdict(result) != "not measured":
        yield f"- Measured: {_provenance(result)}"
        if result["full"] and quick is not None:
            yield f"- Quick check: {verdict(quick)}: {quick['measured']}"
    yield ""
    if result is not None:
        yield from _details(claim, result)


def _details(claim: Claim, result: Result) -> Iterator[str]:
    if result["remark"]:
        yield _sentence(result["remark"])
        yield ""
    if "table" in result["numbers"]:
        yield from _table(result["numbers"]["table"])
        yield ""
    if panels_of(result["numbers"]):
        yield f"![{claim.row}]({FIGURES}/{claim.row}.svg)"
        yield ""
    if "caption" in result["numbers"]:
        yield f"*{result['numbers']['caption']}*"
        yield ""


def _table(table: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {' | '.join(map(_cell, table['columns']))} |"
    yield f"|{'---|' * len(table['columns'])}"
    for row in table["rows"]:
        yield f"| {' | '.join(map(_cell, row))} |"


def _commands(claim: Claim) -> str:
    commands = [f"`deqkit paper {claim.row}`"]
    if claim.full is not None:
        commands.append(f"`deqkit paper --full {claim.row}`" + (f" ({claim.full_time})" if claim.full_time else ""))
    return ", ".join(commands)


def told_verdict(claim: Claim, result: Result | None) -> str:
    """The verdict, and on which check it rests if anything was measured; the same words wherever it is shown."""
    told = f"**{verdict(result)}**"
    if result is None or told == "**not measured**":
        return told
    if result["full"]:
        return f"{told} (at full length)"
    return f"{told} ({'complete check' if claim.full is None else 'quick check'})"


def _provenance(result: Result) -> str:
    machine = result["machine"]
    return (
        f"{result['date'][:10]} in {_time(result['seconds'])}{_trainings(result)}, {told_commit(result['commit'])}, "
        f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _trainings(result: Result) -> str:
    counted = [seconds for seconds in result.get("trainings", {}).values() if seconds is not None]
    if not counted or len(counted) < len(result["trainings"]):  # earlier results and trainings do not tell
        return ""
    models = f"{len(counted)} model{'s' * (len(counted) > 1)}"
    return f" on {models} that took {_time(sum(counted))} of a processor to train"


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
