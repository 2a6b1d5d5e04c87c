"""Planned memory against measured memory, and the figures of `bench memory`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deqkit.adjoint import Implicit
from deqkit.analysis.memory import peak_memory
from deqkit.analysis.memory_bench import MemoryBenchConfig, run_memory_bench
from deqkit.analysis.training_memory import _body, _PeakMeter, inference_memory, training_memory
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel
from deqkit.solve import Broyden, Tolerance

BATCH, LENGTH = 6, 24
TRANSFORMER = ModelConfig(
    vocabulary=VocabularyConfig(size=400, embedding_width=32, cutoffs=(40, 150), div_val=2),
    cell=TransformerConfig(width=32, num_heads=2, hidden_width=96, dropout=0.1, normalise="weight", init_std=None),
    mem_len=16,
    max_steps=8,
    adjoint=Implicit(max_steps=8),
)
TRELLIS = ModelConfig(
    vocabulary=VocabularyConfig(size=300, embedding_width=24, cutoffs=(60,)),
    cell=TrellisConfig(input_width=24, hidden_width=40, output_width=24, hidden_dropout=0.1, weight_dropout=0.2),
    mem_len=1,
    max_steps=8,
    adjoint=Implicit(max_steps=8),
    solver=Broyden(memory=2, group="prefix"),
)
MODELS = {
    "transformer": TRANSFORMER,
    "trellis": TRELLIS,
    "subsequences": replace(TRANSFORMER, subsequences=3),
    "layers": replace(TRANSFORMER, depth=4),
    "checkpointing": replace(TRANSFORMER, depth=4, checkpoint=True),
}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("body_only", [True, False], ids=["body", "whole"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_an_abstract_run_needs_what_a_real_one_needs(model, body_only, bf16, without_onednn):
    planned, measured = (
        training_memory(model, batch=BATCH, length=LENGTH, body_only=body_only, abstract=abstract, bf16=bf16)
        for abstract in (True, False)
    )
    assert planned.peak == pytest.approx(measured.peak, rel=0.05)
    assert planned.parameters == measured.parameters


def test_bfloat16_keeps_less_for_the_backward_pass():
    layers = replace(TRANSFORMER, depth=16)
    full, half = (training_memory(layers, batch=BATCH, length=LENGTH, bf16=bf16) for bf16 in (False, True))
    assert full.parameters == half.parameters  # which stay in float32
    assert 0.5 < half.activations / full.activations < 0.9


def test_the_meter_against_a_count_by_hand():
    """A stack keeps for every layer at least its state; four times the layers keep four times as much."""
    few, many = (
        training_memory(replace(TRANSFORMER, depth=depth), batch=BATCH, length=LENGTH, body_only=True)
        for depth in (4, 16)
    )
    state = BATCH * LENGTH * 32 * 4
    assert many.activations - few.activations >= 12 * state
    assert 2.5 < many.activations / few.activations < 4


def test_the_equilibrium_does_not_grow_with_its_step_limit():
    few, many = (
        training_memory(replace(TRANSFORMER, max_steps=limit), batch=BATCH, length=LENGTH, body_only=True)
        for limit in (20, 80)
    )
    assert few.peak == pytest.approx(many.peak, rel=0.02)


@pytest.mark.parametrize("model", [TRANSFORMER, TRELLIS], ids=["transformer", "trellis"])
def test_inference_keeps_no_graph_whatever_the_step_limit(model):
    sizes: dict[str, Any] = {"batch": BATCH, "length": LENGTH}
    few, many = (inference_memory(replace(model, eval_max_steps=limit), **sizes) for limit in (20, 80))
    assert few == pytest.approx(many, rel=0.02)
    assert few < training_memory(replace(model, max_steps=20), **sizes, body_only=True).peak
    config = replace(model, eval_max_steps=20, eval_tol=Tolerance(rtol=0.0, patience=100))
    real = SequenceModel(config).eval()
    parameters = sum(p.numel() * p.element_size() for cell in real.cells for p in cell.parameters())
    with torch.no_grad():
        assert few == pytest.approx(peak_memory(_body(real, **sizes)).peak_bytes + parameters, rel=0.05)


def test_the_benchmark_reports_what_it_measured():
    results = run_memory_bench(
        MemoryBenchConfig(batch=1, length=4, max_steps=3, step_limits=(2, 3)), on_progress=lambda *_: None
    )
    for row in results["comparisons"]:
        peaks = [results["bytes"][row[name]]["peak"] for name in ("equilibrium", "layers")]
        assert row["ratio"] == pytest.approx(peaks[0] / peaks[1])
        assert row["holds"] is (row["ratio"] <= row["bar"])
    for held in results["bytes"].values():
        assert held["peak"] == sum(held[part] for part in ("parameters", "gradients", "activations", "solver"))


def test_the_parts_at_the_peak_against_a_count_by_hand():
    weight = torch.nn.Parameter(torch.ones(1_000))
    meter = _PeakMeter()
    with meter:
        kept = weight.exp()  # the graph keeps its result
        kept.sum().backward()
        with torch.no_grad():
            work = torch.zeros(50_000)
    report = meter.report([weight])
    assert report.parameters == report.gradients == 4 * 1_000
    assert 4 * 1_000 <= report.activations <= 4 * 1_000 + 64  # and the scalar that was differentiated
    assert report.solver >= 4 * work.numel()
    assert report.peak == meter.peak_bytes + report.parameters
