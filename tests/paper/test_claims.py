"""No table, figure, theorem or remark of the paper is left out."""

import re

import pytest

from deqkit.analysis.memory_bench import COMPARISONS, GROUPS
from deqkit.data import PrepareConfig, prepare
from deqkit.model.paper import PAPER_MODELS
from deqkit.paper import elsewhere, memory, tasks
from deqkit.paper.rows import CLAIMS, PARTS, find
from deqkit.paper.workshop import Workshop
from deqkit.train.recipes import RECIPES

PLACES = [f"table {n}" for n in (1, 2, 3, 4)] + [
    *(f"figure {n}" for n in (1, 2, 3, 4)),
    *(f"appendix {letter}" for letter in "ADEF"),
]
PLACES += [f"theorem {n}" for n in (1, 2, 3)] + ["left", "right"]  # of the figures with two panels


def test_names_are_unique_and_fit_a_command_line():
    names = [claim.row for claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert sum(len(part.claims) for part in PARTS) == len(names)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_has_a_row(place):
    assert any(place.lower() in claim.where.lower() for claim in CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.row)
def test_a_row_is_complete(claim):
    assert claim.where and claim.claim and claim.paper
    if claim.full is not None:
        assert claim.full_time


@pytest.mark.parametrize("model", [size.recipe for size in elsewhere.SIZES])
def test_full_sizes_name_a_command_that_exists(model):
    (claim,) = [claim for claim in CLAIMS if claim.row == f"table-{'2' if model.startswith('ptb') else '3'}-{model}"]
    assert model in RECIPES and claim.elsewhere[0].startswith(f"deqkit train {model} --data.source data/")
    assert not claim.is_checked


def test_equilibria_at_full_size_are_claimed_beside_their_layers():
    rows = {claim.row: claim for claim in elsewhere.CLAIMS}
    assert "on par with the 60-layer TrellisNet" in rows["table-2-ptb-deq-trellisnet"].claim
    small = rows["table-3-wt103-deq-transformer-small"]
    assert "with a lower perplexity than the Transformer-XL (small, 4 layers)" in small.claim
    assert small.paper.startswith("test perplexity 32.4, ") and "(small, 16 tied layers) 34.9" in small.paper


def test_a_row_that_does_not_exist():
    with pytest.raises(ValueError, match="did you mean 'copy-memory'"):
        find(["copy-memry"])
    assert [claim.row for claim in find(["lstm", "copy-memory"])] == ["lstm", "copy-memory"]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("figure-4", "appendix-d"),
        ("table-1", "copy-memory"),
        ("Theorem 2", "theorem-2"),
        ("figure-3-left", "figure-3-tolerance"),
        ("figure-2", "figure-2-left, figure-2-right"),
    ],
)
def test_a_place_of_the_paper_names_its_rows(name, rows):
    with pytest.raises(ValueError, match=rf"of the paper is checked by {rows}$"):
        find([name])


def test_a_place_with_many_rows_names_some_and_one_without_any_is_a_name_like_others():
    with pytest.raises(ValueError, match=r"table-2-ptb, .* and \d+ more; see `deqkit paper --list`"):
        find(["table-2"])
    with pytest.raises(ValueError, match="did you mean 'figure-1a'"):
        find(["figure-9"])


def test_every_model_of_the_memory_bench_is_in_a_row():
    names = {name for _, name, *_ in COMPARISONS}
    assert names == {*memory.TIED, *memory.UNTIED} and names <= set(PAPER_MODELS)


def test_sizes_of_the_tables(tmp_path):
    outcome = elsewhere.parameters(Workshop(runs=tmp_path), table="2")
    assert outcome.holds is True and "24.2 / 20.2" in outcome.measured


def test_full_sizes_are_not_measured_and_say_so(tmp_path):
    outcome = elsewhere.not_here(Workshop(runs=tmp_path), size=elsewhere.SIZES[0])
    assert outcome.holds is None and "not affordable on two cores" in outcome.measured


def test_the_copy_task_is_the_papers(tmp_path):
    outcome = tasks.copy_task(Workshop(runs=tmp_path))
    assert outcome.holds is True and len(outcome.numbers["facts"]) == 5


def test_words_and_vocabulary_of_a_corpus(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "valid", "test"):
        (raw / f"{split}.txt").write_text("a b <unk>\n" * 40)
    prepare(PrepareConfig(dataset="ptb", source=raw, out=tmp_path / "data" / "ptb"))
    workshop = Workshop(runs=tmp_path, data=tmp_path / "data")
    outcome = tasks.text_task(workshop, name="ptb", words=120, vocabulary=4, at_least=False)
    assert (outcome.numbers["words"], outcome.numbers["line_ends"]) == (120, 40)
    assert outcome.holds is None and "only a part is here" in outcome.scale  # not the published corpus


def test_memory_rows_follow_their_figures(tmp_path):
    workshop = Workshop(runs=tmp_path)
    for name, layers, *_ in COMPARISONS:  # as if measured: 3 of 10, and 5 with checkpointing
        workshop.kept[("memory", f"{name}, 12 steps")] = 3 * memory.MIB
        workshop.kept[("memory", f"{name}, 12 steps, few pairs")] = 2 * memory.MIB
        workshop.kept[("memory", layers)] = 10 * memory.MIB
        for every in GROUPS:  # most with groups of one and of eight
            workshop.kept[("memory", f"{layers}, checkpointing {every}")] = (9 if every in (1, 8) else 5) * memory.MIB
    saved = memory.reduction(workshop, names=memory.UNTIED, max_steps=12, least=0.6)
    assert saved.holds is True and saved.numbers["saved"][memory.UNTIED[0]] == pytest.approx(0.7)
    assert memory.reduction(workshop, names=memory.TIED, max_steps=12, least=0.6, most=0.88).holds is False
    assert memory.column(workshop, names=[memory.UNTIED[2]], max_steps=12).holds is True  # the paper's ratio is 0.41
    short = memory.column(workshop, names=[memory.UNTIED[0]], max_steps=12)
    assert short.holds is False  # 0.23
    assert "which need 2 MiB instead of 3 for transformer-small (0.20 of transformer-small-untied-4)" in short.remark
    tried = memory.reduction(workshop, names=memory.TIED[2:], max_steps=12, least=0.75).remark
    assert "instead of 3 for transformer-small (80.0% less than transformer-small-tied-16)." in tried
    few = ("memory", "transformer-small, 12 steps, few pairs")
    workshop.kept[few] = 3 * memory.MIB - 1000  # less, but not by a MiB
    assert (
        "which need no less for transformer-small."
        in memory.column(workshop, names=[memory.UNTIED[0]], max_steps=12).remark
    )
    less = memory.checkpointing(workshop, names=memory.TIED, decides=memory.TIED[1], max_steps=12)
    assert less.holds is True and "0.60" in less.measured


@pytest.mark.parametrize(
    ("inference", "layer", "holds"), [((1.0, 1.01), 1, True), ((1.0, 1.5), 1, False), ((1.0, 1.0), 0, False)]
)
def test_constant_memory_is_of_training_and_of_prediction(inference, layer, holds, tmp_path):
    workshop = Workshop(runs=tmp_path)
    for name in (memory.TRELLIS_PTB, "transformer-small"):
        for training, limit, share in zip((10, 20), memory.INFERENCE_STEPS, inference, strict=True):
            workshop.kept[("memory", f"{name}, {training} steps")] = 3 * memory.MIB
            workshop.kept[("memory", f"{name}, {limit} steps, inference")] = int(share * memory.MIB)
    for depth in memory.DEPTHS:
        for label in ("layers at", *(f"layers, checkpointing at {depth} {every}" for every in GROUPS)):
            name = f"{label} {depth}" if label == "layers at" else label
            workshop.kept[("memory", name)] = (5 + layer * (depth - 5)) * memory.MIB
    outcome = memory.constant(workshop, limits=(10, 20))
    assert outcome.holds is holds and f"adds {layer} MiB in training" in outcome.measured


def test_memory_is_measured(tmp_path):
    workshop = Workshop(runs=tmp_path)
    found = memory.equilibrium(workshop, "trellis-ptb", 3)
    assert found > 80_000_000  # its parameters alone
    assert memory.equilibrium(workshop, "trellis-ptb", 3) == found and len(workshop.kept) == 1
