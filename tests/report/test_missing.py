"""What a run does not have is said in a sentence, and the rest of its page is there."""

import hashlib
import json
import shutil

import pytest

from deqkit.report import write_report
from deqkit.report.comparison import findings
from deqkit.report.page import gather
from deqkit.report.sections.overview import summary
from deqkit.train.run_folder import RunError
from report.reading import Element, captions, read_text, rows, tiles
from report.small import make_corpus, small, small_of, train_run

SWEEP = [(0.3, 9.0, 2.0), (0.1, 7.45, 3.0), (0.01, 7.40, 4.5)]
"""Tolerances, perplexities and evaluations."""

pytestmark = pytest.mark.usefixtures("quick")


def report(path) -> Element:
    page = read_text(write_report([path], path / "report.html").read_text(encoding="utf-8"))
    assert [section.attributes["id"] for section in page.all("section")][0] == "run1-learning"
    return page


def section(page: Element, name: str) -> str:
    return page.one("section", id=f"run1-{name}").text


def change(state, **fields):
    """Another state of a checkpoint, with the hash of that."""
    state.write_text(json.dumps({**json.loads(state.read_text()), **fields}))
    hashes = state.with_name("sha256.json")
    own = {"state.json": hashlib.sha256(state.read_bytes()).hexdigest()}
    hashes.write_text(json.dumps({**json.loads(hashes.read_text()), **own}))


def test_a_run_that_is_not_evaluated_says_how(pages):
    text = section(read_text(pages["equilibrium"]), "evaluation")
    assert "Not evaluated apart from training" in text and "deqkit eval " in text


def test_a_run_that_goes_on(corpus, tmp_path):
    path = train_run(small_of("equilibrium", corpus), tmp_path / "run", max_steps=2)
    page = report(path)
    assert "2 of 8 steps so far" in page.all("p", class_="lead")[0].text
    assert tiles(page)["Validation perplexity"] == ("none yet", "not evaluated so far")
    assert tiles(page)["Evaluations a solve"][0] == "none yet"
    assert "has not been validated yet" in captions(page)["Loss"]
    assert "Nothing has been solved in training yet." in section(page, "solving")
    assert "the latest checkpoint, of step 2, when it was still a network of 2 layers" in section(page, "samples")


def test_no_checkpoint_yet(copied):
    path = copied("equilibrium")
    shutil.rmtree(path / "checkpoints")
    page = report(path)
    for name in ("convergence", "samples"):
        assert "has no checkpoint: the run ended before the first was written" in section(page, name)
    assert captions(page).keys() >= {"Loss", "Solver steps", "Memory of a training step"}


def test_a_damaged_checkpoint(copied):
    path = copied("equilibrium")
    for weights in path.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"half")
    page = report(path)
    assert "is damaged or was cut short" in section(page, "samples")
    assert "Loss" in captions(page)


def test_the_best_checkpoint_was_not_kept(copied):
    path = copied("equilibrium")
    states = sorted(path.glob("checkpoints/*/state.json"))
    change(states[-1], best_step=5)
    assert "the latest checkpoint, of step 8" in section(report(path), "convergence")


def test_data_that_is_gone(tmp_path):
    corpus = make_corpus(tmp_path / "raw")
    path = train_run(small(corpus, steps=2), tmp_path / "run")
    shutil.rmtree(corpus)
    page = report(path)
    for name in ("convergence", "samples"):
        assert corpus in section(page, name)
    assert tiles(page)["Validation perplexity"][0] != "none yet"


def test_data_with_another_vocabulary(copied):
    path = copied("equilibrium")
    for file in path.glob("checkpoints/*/state.json"):
        change(file, vocabulary="another")
    assert "another vocabulary" in section(report(path), "samples")


def test_an_imported_model_has_no_training(copied):
    path = copied("tied")
    (path / "metrics.jsonl").unlink()
    page = report(path)
    assert "No training is recorded here." in page.all("p", class_="lead")[0].text
    assert captions(page).keys() == {"From layer to layer", "Memory of a training step"}
    assert "Time of a step" not in tiles(page)


def test_a_stack_solves_nothing(pages):
    assert "a stack of 3 layers: nothing is solved" in section(read_text(pages["tied"]), "solving")


def test_a_measurement_that_was_not_finite_is_left_out(copied):
    path = copied("equilibrium")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-2]["residual"] = None
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Residuals" in captions(report(path))


def test_quantities_that_were_not_recorded(copied):
    path = copied("equilibrium")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    dropped = {"grad_error", "residual", "backward_residual", "backward_evals"}
    kept = [{name: value for name, value in line.items() if name not in dropped} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page = report(path)
    assert "grad_error was not recorded" in section(page, "solving")
    assert "products with" not in captions(page)["Solver steps"]


def test_half_a_line_at_the_end_is_left_out(copied):
    path = copied("equilibrium")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9, "lo')
    assert "trained for 8 steps" in report(path).all("p", class_="lead")[0].text


@pytest.fixture
def evaluated(copied):
    """A run that `deqkit eval` has looked at."""
    path = copied("equilibrium")
    figures = {"loss": 2.0, "perplexity": 7.389, "num_tokens": 1234, "evals": 5.25, "unconverged": 0.0}
    sweep = [{"tolerance": t, "loss": 2.0, "perplexity": p, "evals": e} for t, p, e in SWEEP]
    sweep += [{"max_steps": n, "loss": 2.0, "perplexity": p, "evals": float(n)} for n, p in ((2, 90.0), (4, 7.4))]
    record = {"split": "test", "figures": figures, "leak": 0.0, "sweep": sweep}
    (path / "evaluation-test.json").write_text(json.dumps(record))
    (path / "evaluation-valid.json").write_text(json.dumps({**record, "split": "valid", "leak": None, "sweep": []}))
    return path


def test_an_evaluation_is_shown(evaluated):
    page = report(evaluated)
    assert tiles(page)["Test perplexity"] == ("7.389", "over 1,234 tokens")
    found = page.one("section", id="run1-evaluation")
    table = rows(found.all("table")[0])
    assert [row[0] for row in table] == ["split", "test", "valid"]
    assert table[1][1:] == ["7.389", "2.000", "5.25", "0%", "1,234", "0"] and table[2][-1] == "not measured"
    tolerance = captions(page)["Perplexity against tolerance"]
    assert "within 1% of its best, 7.400, up to a tolerance of 0.1, with 3.00 evaluations a solve" in tolerance
    assert "it is 9.000 at 0.3" in tolerance
    assert "from a step limit of 4" in captions(page)["Perplexity against the step limit"]


def test_an_evaluation_that_is_not_the_usual_one_says_so(evaluated, runs):
    record = json.loads((evaluated / "evaluation-test.json").read_text())
    record["figures"]["complete"] = False
    record["settings"] = {"max_steps": "<3>"}
    (evaluated / "evaluation-test.json").write_text(json.dumps(record))
    page = report(evaluated)
    assert tiles(page)["Test perplexity"][1] == "over 1,234 tokens, a part"
    assert rows(page.one("section", id="run1-evaluation").all("table")[0])[1][0] == "test, a part, max_steps <3>"
    out = write_report([evaluated, runs["tied"]], evaluated / "two.html")
    compared = rows(read_text(out.read_text(encoding="utf-8")).all("table")[0])
    assert [row[2] for row in compared] == ["test perplexity", "7.389, a part, other settings", "none yet"]


def test_not_a_run(tmp_path):
    with pytest.raises(RunError, match="it has no config.json"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", "{}", "does not hold the configuration"),
        ("metrics.jsonl", "{\n{}\n", "metrics.jsonl is damaged"),
        ("metrics.jsonl", '{"kind": "train"}\n', "was it edited"),
        ("evaluation-test.json", "{", "evaluate again, or remove it"),
        ("evaluation-test.json", '{"split": "test"}', "was it edited"),
    ],
)
def test_a_damaged_run(copied, name, text, message):
    path = copied("tied")
    (path / name).write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        write_report([path], path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (path / "report.html").exists()


def test_a_run_that_has_not_begun(copied):
    path = copied("tied")
    (path / "metrics.jsonl").write_text("")
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(RunError, match="nothing to report yet"):
        write_report([path], path / "report.html")


def test_a_run_that_never_left_its_shallow_phase_says_so(copied):
    path = copied("equilibrium")
    record = json.loads((path / "config.json").read_text())
    record["config"]["devices"] |= {"warmup_steps": 10_000, "warmup_depth": 3}
    (path / "config.json").write_text(json.dumps(record))
    (run,) = gather([path])
    assert "all of them with only 3 layers" in summary(run.history)
    assert "(still shallow)" in findings([run])
