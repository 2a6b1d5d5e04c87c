"""The rows about solves on tiny models, what decides them, and the instruments on maps with known answers."""

import itertools
import math

import pytest
import torch

from deqkit.adjoint import Implicit
from deqkit.paper import behaviour, stability, stacking
from deqkit.paper.behaviour import through_training
from deqkit.paper.solves import (
    ROUNDING,
    Equation,
    account,
    equation_of,
    evals_to,
    median_traces,
    operator_norm,
    sample_text,
    turns,
)
from deqkit.paper.subjects import QUICK, changed, describe, is_transformer, plain, told_plain, untrained
from deqkit.solve import Broyden, FixedPointIteration, Status, Tolerance, fixed_point
from deqkit.train.recipes import RECIPES
from deqkit.train.tasks import make_task
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


def full_checks():
    """One check a claim, whatever its scale."""
    return {claim.row: claim.full.func for claim in behaviour.CLAIMS}  # pyright: ignore


@pytest.mark.parametrize("row", full_checks())
def test_a_row_on_a_tiny_model(row, setting, monkeypatch):
    workshop, scale = setting
    monkeypatch.setattr(stability, "MAX_STEPS", 6)
    monkeypatch.setattr(stability, "NUM_SEEDS", 1)
    check_outcome(full_checks()[row](workshop, scale=scale))


def test_quick_rows_share_the_recipes_that_others_train(setting):
    workshop, _ = setting
    assert QUICK.transformer(workshop) == RECIPES["demo"]()
    assert QUICK.transformer_layers(workshop) == RECIPES["demo-tied-12"]()


def record(step, evals, backward, unconverged=0.0):
    return {"step": step, "evals": evals, "backward_evals": backward, "unconverged": unconverged}


def test_steps_through_training():
    shallow = [{"step": n, "loss": 1.0} for n in range(1, 5)]
    solved = [record(n, evals=n, backward=n / 2) for n in range(5, 29)]
    found = through_training([*shallow, *solved])
    assert found["step"] == list(range(6, 29, 2))  # twelve parts of two
    assert found["forward"][0] == 5.5 and found["backward"][-1] == 13.75
    assert found["first quarter"]["forward"] == 7.5 and found["last quarter"]["backward"] == 12.75
    with pytest.raises(ValueError, match="4 steps at the equilibrium are too few"):
        through_training(solved[:4])


@pytest.mark.parametrize(
    ("last", "backward", "holds"), [(12, 0.5, True), (4, 0.5, False), (12, 1.5, True)]
)  # grows; falls; that there are more products than evaluations is another row's matter
def test_figure_2_left_is_decided_by_the_records(last, backward, holds, setting, monkeypatch):
    workshop, scale = setting
    evals = torch.linspace(6, last, 20).tolist()
    rising = [record(n, evals=e, backward=backward * e, unconverged=n / 20) for n, e in enumerate(evals, 1)]
    monkeypatch.setattr(type(workshop), "metrics", lambda self, run, kind="train": rising)
    outcome = behaviour.figure_2_left(workshop, scale=scale)
    assert outcome.holds is holds and "differ by the penalty alone" in outcome.numbers["caption"]
    assert "90% plain did not converge within the limit" in outcome.remark


def points(name, pairs):
    return [
        {name: value, "perplexity": ppl, "evals": 10 / (i + 1), "num_tokens": 9} for i, (value, ppl) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("perplexities", "holds"),
    [((200, 101, 100.5, 100), True), ((103, 101, 100, 100), False), ((200, 190, 150, 100), False)],
)
def test_figure_3_tolerance_is_decided_by_the_perplexities(perplexities, holds, setting, monkeypatch):
    workshop, scale = setting
    found = points("tolerance", zip((0.9, 0.1, 0.01, 0.001), perplexities, strict=True))
    for point, evals in zip(found, (1, 4, 6, 9), strict=True):
        point["evals"] = evals
    monkeypatch.setattr(behaviour, "sweep", lambda *args, **options: found)
    outcome = behaviour.figure_3_tolerance(workshop, scale=scale)
    assert outcome.holds is holds and "the paper's absolute 0.1 would be" in outcome.remark


@pytest.mark.parametrize(
    ("perplexities", "holds"), [((200, 101, 100), True), ((102, 101, 100), False), ((200, 110, 100), False)]
)  # a low limit suffices; one is no worse; only the highest will do
def test_figure_3_steps_is_decided_by_the_perplexities(perplexities, holds, setting, monkeypatch):
    workshop, scale = setting
    found = points("max_steps", zip((1, 6, 30), perplexities, strict=True))
    monkeypatch.setattr(behaviour, "sweep", lambda *args, **options: found)
    outcome = behaviour.figure_3_steps(workshop, scale=scale)
    assert outcome.holds is holds and "at 6 (the first within 1 %)" in outcome.measured or not holds


def followed(stacking_evals, solving_evals, *, last=1e-4, turn=-0.9):
    traces = {stacking.STACKING: [1.0, 0.5, last], stacking.SOLVING: [1.0, 0.5, 1e-5]}
    evals = {stacking.STACKING: stacking_evals, stacking.SOLVING: solving_evals}
    return {"traces": traces, "evaluations": evals, "last": {n: t[-1] for n, t in traces.items()}, "turn": turn}


@pytest.mark.parametrize(
    ("found", "figure", "appendix"),
    [
        (followed(None, 9), True, True),
        (followed(30, 9), True, True),
        (followed(9, 9), None, False),
        (followed(10, 9.5), None, False),  # by a hair
        (followed(9, 30), False, False),
        (followed(None, None), False, False),
        (followed(30, 9, last=0.2), True, False),  # does not come to rest
        (followed(30, 9, turn=0.3), True, False),  # does not oscillate
    ],
)
def test_solving_against_stacking_is_decided_by_the_traces(found, figure, appendix, setting, monkeypatch):
    workshop, scale = setting
    monkeypatch.setattr(stacking, "_follow", lambda *args, **options: found)
    assert stacking.figure_2_right(workshop, scale=scale).holds is figure
    assert stacking.appendix_d(workshop, scale=scale).holds is appendix


@pytest.mark.parametrize(
    ("transformer", "holds"),
    [
        (followed(None, 9, last=0.2), True),  # circles around a point that a solver finds
        (followed(None, None, last=0.2), False),  # and that nobody finds
        (followed(None, 9, last=0.2, turn=-0.3), False),  # does not circle
    ],
)
def test_a_transformer_may_circle_around_its_point(transformer, holds, setting, monkeypatch):
    workshop, scale = setting
    found = {True: transformer, False: followed(30, 30)}
    monkeypatch.setattr(stacking, "_follow", lambda run, **options: found[is_transformer(run.config)])
    assert stacking.appendix_d(workshop, scale=scale).holds is holds


def affine(matrix, shift):
    return Equation(lambda z, b: z @ matrix.mT + b, torch.zeros_like(shift), (shift,))


def test_turns_tell_an_oscillation():
    shift = torch.ones(2, 3)
    assert turns(affine(-0.5 * torch.eye(3), shift), depth=6) == pytest.approx([-1.0] * 5)
    assert turns(affine(0.5 * torch.eye(3), shift), depth=6) == pytest.approx([1.0] * 5)


def test_turns_end_where_steps_are_rounding():
    """In float32 the steps of a contraction by -0.5 are noise, or nothing, long before the 200th."""
    generator = torch.Generator().manual_seed(0)
    shift = torch.randn(4, 50, generator=generator)
    halving = turns(affine(-0.5 * torch.eye(50), shift), depth=200)
    assert halving == pytest.approx([-1.0] * len(halving), abs=1e-2)
    assert len(halving) == pytest.approx(math.log2(1 / ROUNDING), abs=2)
    slow = torch.tensor([-0.5, -0.9, -0.9, -0.9])[:, None]
    mixed = Equation(
        lambda z, b, a: a * z + b, torch.zeros_like(shift), (shift, slow)
    )  # one is at rest before the rest
    assert len(turns(mixed, depth=200)) > 2 * len(halving)


def test_traces_of_a_contraction_fall_by_its_factor():
    trace = median_traces(affine(0.5 * torch.eye(3), torch.ones(2, 3)), {"plain": FixedPointIteration()}, depth=8)[
        "plain"
    ]
    sizes = [2.0 * (1 - 0.5**n) for n in range(1, 9)]
    assert trace == pytest.approx([0.5 ** (n - 1) / size for n, size in enumerate(sizes, 1)], rel=1e-4)
    assert evals_to(trace, 0.2) == 3 and evals_to(trace, 0.0) is None


def test_operator_norm_is_the_largest_singular_value():
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    found = operator_norm(affine(matrix, torch.ones(2, 5)), torch.ones(2, 5), steps=100)
    torch.testing.assert_close(found, torch.linalg.matrix_norm(matrix, 2).expand(2), rtol=1e-3, atol=0)


def test_an_account_of_solves():
    equation = affine(0.5 * torch.eye(3), torch.ones(2, 3))
    settings = {"tol": Tolerance(rtol=1e-2), "throw": False, "solver": FixedPointIteration()}
    good = fixed_point(equation.f, equation.start, equation.args, **settings)
    bad = fixed_point(equation.f, equation.start, equation.args, max_steps=2, **settings)
    assert (good.status, bad.status) == (Status.CONVERGED, Status.MAX_STEPS)
    found = account([good, bad])
    assert found["solves"] == 4 and found["converged"] == 0.5
    assert found["evaluations"]["max"] == int(good.num_evals.max())
    assert found["largest residual"] == pytest.approx(float(bad.residual.max()))


def test_an_equation_is_what_the_model_solves(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    tokens = sample_text(run.task(), length=8, count=2)
    tight = {"tol": Tolerance(rtol=1e-5, patience=200), "max_steps": 300}
    equation = equation_of(run.model, tokens)
    with torch.no_grad():
        expected = run.model(tokens, **tight).z
    solution = fixed_point(equation.f, equation.start, equation.args, solver=Broyden(), throw=False, **tight)
    torch.testing.assert_close(solution.z, expected, rtol=0, atol=2e-3)


def test_sequences_come_from_the_test_split(setting):
    workshop, scale = setting
    task = make_task(scale.transformer(workshop))
    text = bytes(task.corpus.split("test").astype("uint8"))  # pyright: ignore
    for row in sample_text(task, length=30, count=3):
        assert bytes(row.tolist()) in text
    with pytest.raises(ValueError, match="too few for sequences of 100000"):
        sample_text(task, length=100_000, count=1)


def test_weights_of_a_scheme(setting):
    workshop, scale = setting
    config = scale.transformer(workshop)
    weight = stability.with_scheme(config, (0.3, None), 0).core.cell.expand.weight
    assert weight.detach().std().item() == pytest.approx(0.3, rel=0.2)
    square = stability.with_scheme(config, stability.SCHEMES["orthogonal"], 0).core.cell.project.weight
    torch.testing.assert_close(square @ square.mT, torch.eye(square.shape[0]), rtol=0, atol=1e-5)


def test_the_untrained_model_is_where_training_began(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    begun = untrained(run)
    assert not torch.equal(begun.core.cell.qkv.weight, run.model.core.cell.qkv.weight)
    other = changed(run, subsequences=2)
    assert torch.equal(other.core.cell.qkv.weight, run.model.core.cell.qkv.weight) and other.config.subsequences == 2
    assert "step 12 of 12, corpus corpus" in describe(run) or "step 6 of 12" in describe(run)


def test_growth_is_decided_by_the_norm_and_the_evaluations(setting, monkeypatch):
    workshop, scale = setting
    values = itertools.count(1.0)

    def norms(model, task, scale, *, sign=1.0):
        value = next(values)
        figures = {"operator norm": value, "evaluations": sign * value, "spectral radius": -value}
        return {**figures, "residual": 0.0, "converged": 1.0 if value < 3 else 0.5}

    monkeypatch.setattr(stability, "_jacobian", norms)
    outcome = stability.jacobian_growth(workshop, scale=scale)
    assert outcome.holds is True and "(50% converge within 200)" in outcome.measured
    assert "an equilibrium for 50% of the sequences in the end" in outcome.remark
    values = itertools.count(1.0)
    monkeypatch.setattr(stability, "_jacobian", lambda *args: norms(*args, sign=-1.0))
    assert stability.jacobian_growth(workshop, scale=scale).holds is False


@pytest.mark.parametrize(
    ("perplexity", "evals", "holds"), [(100.5, 6.0, True), (103.0, 6.0, False), (100.0, 20.0, False)]
)
def test_the_papers_inference_must_be_cheaper_at_no_loss(perplexity, evals, holds, setting, monkeypatch):
    workshop, scale = setting
    solved = {"solves": 4, "converged": 1.0, "evaluations": {"mean": 20.0}}
    tested = {
        "as in training": {"perplexity": 100.0, "evals": 20.0, "num_tokens": 1_234},
        "relaxed": {"perplexity": perplexity, "evals": evals, "num_tokens": 1_234},
    }
    monkeypatch.setattr(stability, "account", lambda solutions: solved)
    monkeypatch.setattr(stability, "_paper_backward", lambda run: solved)
    monkeypatch.setattr(stability, "_paper_inference", lambda *args: tested)
    outcome = stability.paper_tolerance(workshop, scale=scale)
    assert outcome.holds is holds and "perplexities of their 1,234 tokens" in outcome.scale


def solves(converged, mean):
    return {"solves": 64, "converged": converged, "evaluations": {"mean": mean}}


@pytest.mark.parametrize(
    ("solved", "stacked", "holds"),
    [
        (solves(1.0, 8.0), solves(1.0, 10.0), True),
        (solves(1.0, 9.5), solves(1.0, 10.0), False),  # about as many
        (solves(1.0, 90.0), solves(0.2, 10.0), True),  # stacking does not get there
        (solves(0.9, 5.0), solves(1.0, 10.0), False),
        (solves(0.998, 90.0), solves(0.996, 10.0), False),  # a single solve more does not decide
    ],
)
def test_solving_is_quicker_if_it_converges_in_fewer_evaluations(solved, stacked, holds, setting, monkeypatch):
    workshop, scale = setting
    found = {stacking.SOLVING: solved, stacking.STACKING: stacked, stacking.MORE: solved}
    monkeypatch.setattr(stacking, "_solves", lambda *args: found)
    assert stacking.solve_quicker(workshop, scale=scale).holds is holds


@pytest.mark.parametrize(
    ("perplexities", "holds"),
    [
        ([9.0, 8.0, 7.99, 7.98], True),
        ([9.0, 8.0, 8.0, 8.2], False),  # deeper than trained is worse
        ([7.0, 8.0, 8.0, 8.0], False),  # depth does not help
    ],
)
def test_unrolling_is_decided_by_depth(perplexities, holds, setting, monkeypatch):
    """Trained with 3 layers: depths 1, 3, 6 and 12."""
    workshop, scale = setting
    by_depth = dict(zip((1, 3, 6, 12), perplexities, strict=True))
    tested = lambda self, run, *, max_batches, depth: {"perplexity": by_depth[depth]}  # noqa: E731
    monkeypatch.setattr(type(workshop), "tested", tested)
    assert stacking.unrolling(workshop, scale=scale).holds is holds


@pytest.mark.parametrize(
    ("own", "tight", "holds"), [(1.0, 0.96, True), (0.98, 1.0, False), (1.0, 0.9, False)]
)  # of the plain training; the others converge
def test_every_model_must_converge_almost_always(own, tight, holds, setting, monkeypatch):
    workshop, scale = setting
    plain = scale.plain(workshop).recipe

    def found(workshop, run, scale):
        shares = (own, tight) if run.config.recipe == plain else (0.5, 0.5) if "penal" in run.config.recipe else (1, 1)
        return {
            tol: {"converged": share, "solves": 64, "evaluations": {"mean": 9.0, "max": 12}}
            for tol, share in zip(("0.05", "0.001"), shares, strict=True)
        }

    monkeypatch.setattr(stability, "_own_and_tight", found)
    outcome = stability.convergence_always(workshop, scale=scale)
    assert outcome.holds is holds  # what was tried does not decide
    assert "with our penalty, after which it is 50.00% of 64 at 0.05" in outcome.remark


def test_a_plain_training_has_none_of_our_devices():
    config = RECIPES["ptb-mini"]()
    found = plain(config, steps=400, batch=16)
    assert config.model.start == "learned" and config.devices.warmup_steps > 0
    assert found.model.start == "zeros" and found.devices.warmup_steps == 0 and found.regulariser.spectral == 0
    assert isinstance(found.model.adjoint, Implicit)
    assert found.model.max_steps == found.model.adjoint.max_steps == 30
    assert "Anderson to 0.02 of ||f(z)|| within 30 evaluations" in told_plain(found)


def test_the_jacobian_is_taken_where_the_models_own_solver_ends(setting, monkeypatch):
    workshop, scale = setting
    run, solvers = workshop.trained(scale.plain(workshop)), []
    solve = stability._solve

    def note(equation, solver, max_steps):
        solvers.append(solver)
        return solve(equation, solver, max_steps)

    monkeypatch.setattr(stability, "_solve", note)
    stability._jacobian(run.model, run.task(), scale)
    assert solvers == [run.config.model.solver]
