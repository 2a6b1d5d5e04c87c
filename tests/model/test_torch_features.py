"""A model under the rest of PyTorch: copies, state dicts, dtypes, autocast, DDP, optimisers, torch.compile."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from deqkit import Status, Tolerance
from deqkit.layers import VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel, num_parameters
from model.models import (
    BOTH,
    CELLS,
    SIZE,
    WIDTH,
    assert_same_gradients,
    first,
    flat,
    gradients,
    make,
    reconfigured,
    tokens,
)

# B samples, T positions

both = pytest.mark.parametrize("kind", BOTH)
VOCABULARIES = {
    "plain": VocabularyConfig(size=SIZE, embedding_width=WIDTH),
    "untied": VocabularyConfig(size=SIZE, embedding_width=WIDTH, tie_weights=False),
    "split": VocabularyConfig(size=SIZE, embedding_width=WIDTH, cutoffs=(3, 7)),
    "adaptive": VocabularyConfig(size=SIZE, embedding_width=WIDTH, cutoffs=(3, 7), div_val=2),
    "projected": VocabularyConfig(size=SIZE, embedding_width=4),
}
TARGETS = tokens(seed=6)


# --- copies ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("normalise", ["none", "weight", "spectral"])
@pytest.mark.parametrize("depth", ["equilibrium", 3])
def test_a_state_dict_restores_every_value(kind, normalise, depth):
    options: dict[str, Any] = {"cell": {"normalise": normalise}, "depth": depth, "tied": depth == "equilibrium"}
    model, other = make(kind, **options).eval(), make(kind, seed=7, **options).eval()
    assert not torch.allclose(other(tokens(), TARGETS).nll, model(tokens(), TARGETS).nll, atol=1e-3)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(tokens(), TARGETS).nll, model(tokens(), TARGETS).nll)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_copies_keep_their_ties(name):
    """Deep copies, and models whose weights were loaded: the shared tables are still one tensor."""
    model = make("post", vocabulary=VOCABULARIES[name])
    twin, loaded = copy.deepcopy(model), reconfigured(model)
    for other in (twin, loaded, pickle.loads(pickle.dumps(model))):
        assert num_parameters(other) == num_parameters(model)
        shared = [a is b for a, b in zip(other.embedding.tables, other.softmax.tables, strict=True)]
        assert set(shared) == {name != "untied"}
        assert torch.equal(other(tokens(), TARGETS).nll, model(tokens(), TARGETS).nll)
        other(tokens(), TARGETS).loss.backward()
    assert all(p.grad is None for p in model.parameters())


@both
def test_a_copy_in_training_leaves_the_original_alone(kind):
    model = make(kind)
    before = model(tokens(), TARGETS).nll
    twin = copy.deepcopy(model)
    optimiser = torch.optim.Adam(twin.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = twin(tokens(), TARGETS).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(model(tokens(), TARGETS).nll, before)


@both
def test_parameters_are_counted_once_and_split(kind):
    model = make(kind)
    count = num_parameters(model)
    assert count.total == sum(p.numel() for p in set(model.parameters()))
    assert count.rest == sum(p.numel() for p in model.cells[0].parameters())
    assert count.embedding == SIZE * WIDTH + SIZE


# --- dtypes ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("depth", ["equilibrium", 4])
def test_dtypes_follow_the_model(kind, depth):
    model = make(kind, depth=depth, tol=Tolerance(rtol=1e-5), eval_tol=Tolerance(rtol=1e-5))
    expected = model(tokens(), TARGETS)
    single = copy.deepcopy(model).float()
    output = single(tokens(), TARGETS)
    assert {t.dtype for t in (output.hidden, output.nll, first(output.z), *output.memory[0])} == {torch.float32}
    torch.testing.assert_close(output.nll.double(), expected.nll, rtol=1e-4, atol=1e-4)
    again = single.double()(tokens(), TARGETS)
    torch.testing.assert_close(again.nll, expected.nll, rtol=1e-4, atol=1e-4)
    assert again.nll.dtype == torch.float64


@both
@pytest.mark.parametrize("depth", ["equilibrium", 4])
@pytest.mark.usefixtures("without_onednn")
def test_autocast_to_bfloat16(kind, depth):
    """To 2e-2, with a tolerance that bfloat16, which rounds to 4e-3, can meet."""
    model = make(kind, depth=depth, tol=Tolerance(rtol=1e-2)).float()
    ids, targets = tokens(seed=8), tokens(seed=9)
    before = model(tokens(), TARGETS)
    after = model(ids, targets, before.memory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_before = model(tokens(), TARGETS)
        cast_after = model(ids, targets, cast_before.memory)
    for actual, expected in ((cast_before, before), (cast_after, after)):
        error = (actual.nll - expected.nll).norm() / expected.nll.norm()
        assert error < 2e-2
        if actual.solution is not None:
            assert actual.solution.status is Status.CONVERGED
    cast_after.loss.backward()
    grads = [p.grad for p in model.parameters() if p.numel()]
    assert all(g is not None and g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@both
@pytest.mark.usefixtures("without_onednn")
def test_memory_made_under_autocast_serves_without_it_and_the_other_way_round(kind):
    model = make(kind, tol=Tolerance(rtol=1e-2)).float()
    before = model(tokens(), TARGETS)
    expected = model(tokens(seed=8), TARGETS, before.memory)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_before = model(tokens(), TARGETS)
        cast_after = model(tokens(seed=8), TARGETS, before.memory)
    after_cast = model(tokens(seed=8), TARGETS, cast_before.memory)
    for output in (cast_after, after_cast):
        assert (output.nll - expected.nll).norm() < 2e-2 * expected.nll.norm()


# --- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "name"), [*(("post", name) for name in VOCABULARIES), ("trellis", "plain"), ("trellis", "split")]
)
@pytest.mark.filterwarnings("ignore")  # DDP looks at `.grad` of non-leaves
@pytest.mark.usefixtures("one_process")
def test_ddp_takes_every_step(kind, name):
    """DDP stops at the second step if a parameter had no gradient in the first; here some classes have no targets."""
    model = make(kind, vocabulary=VOCABULARIES[name])
    expected = gradients(model, model(tokens() % 3, TARGETS % 3).loss)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        model.zero_grad()
        wrapped(tokens() % 3, TARGETS % 3).loss.backward()
    for parameter_name, parameter in model.named_parameters():  # some are zero: their class has no targets
        torch.testing.assert_close(parameter.grad, expected[parameter_name], rtol=1e-8, atol=1e-8)


@both
def test_gradients_add_up_over_calls(kind):
    """Two calls before one backward pass, and two backward passes: gradient accumulation."""
    model = make(kind)
    a, b = (gradients(model, model(ids, TARGETS).loss) for ids in (tokens(), tokens(seed=8)))
    both_losses = model(tokens(), TARGETS).loss + model(tokens(seed=8), TARGETS).loss
    together = gradients(model, both_losses)
    assert_same_gradients(together, {name: a[name] + b[name] for name in a})


@both
@pytest.mark.parametrize("name", ["plain", "split"])
def test_a_float32_model_with_default_settings_learns(kind, name):
    torch.manual_seed(0)
    model = SequenceModel(ModelConfig(vocabulary=VOCABULARIES[name], cell=CELLS[kind], mem_len=5))
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-2)
    ids = (torch.arange(13).repeat(4, 1) + torch.arange(4).unsqueeze(1)) % 3 + 5  # three tokens in turn
    losses = []
    for _ in range(25):
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 2.2 and losses[-1] < 1.3  # from about ln 13 to about ln 3


@both
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_loss_and_gradient(kind):
    torch._dynamo.reset()
    model = make(kind)
    output = torch.compile(model, backend="aot_eager")(tokens(), TARGETS)
    expected = model(tokens(), TARGETS)
    torch.testing.assert_close(flat(output.z), flat(expected.z), rtol=1e-9, atol=1e-9)
    assert_same_gradients(gradients(model, output.loss), gradients(model, expected.loss))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "depth"), [("post", "equilibrium"), ("trellis", "equilibrium"), ("trellis", 3)])
def test_compile_gives_the_same_losses_and_gradients(kind, depth):
    """Two segments, so that memory is there, with Inductor, which is what `compile` means."""
    torch._dynamo.reset()
    plain, compiled = make(kind, depth=depth, mem_len=3), make(kind, depth=depth, mem_len=3, compile=True)
    compiled.load_state_dict(plain.state_dict())
    found = []
    for model in (plain, compiled):
        before = model(tokens(), TARGETS)
        output = model(tokens(seed=9), TARGETS, memory=before.memory)
        found.append((output, gradients(model, before.loss + output.loss)))
    (expected, expected_gradients), (actual, actual_gradients) = found
    torch.testing.assert_close(actual.nll, expected.nll, rtol=1e-9, atol=1e-9)
    assert_same_gradients(actual_gradients, expected_gradients)
    torch._dynamo.reset()
