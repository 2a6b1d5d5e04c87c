"""Stacks of layers, tied and untied, checkpointed or not: the paper's baselines are the same code path."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from deqkit.model import SequenceModel
from model.models import BOTH, CELLS, assert_same_gradients, flat, gradients, in_segments, make, reconfigured, tokens

# B samples, T positions

kinds = pytest.mark.parametrize("kind", CELLS)
both = pytest.mark.parametrize("kind", BOTH)
ALL_DROPOUT: dict[str, Any] = {"embedding_dropout": 0.2, "input_dropout": 0.3, "output_dropout": 0.4}
CELL_DROPOUT: dict[str, dict[str, Any]] = {
    "post": {"dropout": 0.3, "hidden_dropout": 0.2, "attention_dropout": 0.2},
    "trellis": {"hidden_dropout": 0.3, "weight_dropout": 0.2},
}


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def by_hand(model: SequenceModel, ids: torch.Tensor, cells: list[Any]) -> Any:
    """The layers one after the other, from zeros (or from the input where none is injected)."""
    x = model.embed(ids)
    injections = [cell.inject(x) for cell in cells]
    z = cells[0].initial_state(injections[0]) if getattr(model.config.cell, "inject", True) else x
    for cell, u in zip(cells, injections, strict=True):
        z = cell(z, u)
    return z


@kinds
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_tied_stack_applies_its_cell_that_often(kind, depth):
    model = make(kind, depth=depth)
    output = model(tokens())
    close(flat(output.z), flat(by_hand(model, tokens(), [model.cells[0]] * depth)))
    assert output.solutions == () and output.solution is None


@kinds
def test_an_untied_stack_applies_one_cell_after_the_other(kind):
    model = make(kind, depth=3, tied=False)
    assert len(model.cells) == 3
    close(flat(model(tokens()).z), flat(by_hand(model, tokens(), list(model.cells))))
    tied = make(kind, depth=3)
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    own = sum(p.numel() for p in tied.cells[0].parameters())
    assert count(model) == count(tied) + 2 * own


@pytest.mark.parametrize("tied", [True, False])
def test_without_injection_a_stack_starts_at_the_input(tied):
    model = make("post", cell={"inject": False}, depth=3, tied=tied)
    assert not any("injection" in name for name, _ in model.named_parameters())
    cells = list(model.cells) * (3 if tied else 1)
    close(model(tokens()).z, by_hand(model, tokens(), cells))


@kinds
def test_depth_can_be_chosen_per_call(kind):
    model = make(kind)
    stack = reconfigured(model, depth=4)
    assert torch.equal(flat(model(tokens(), depth=4).z), flat(stack(tokens()).z))
    assert torch.equal(flat(stack(tokens(), depth="equilibrium").z), flat(model(tokens()).z))
    assert stack(tokens(), depth="equilibrium").solution is not None
    assert model(tokens(), depth=4).solution is None
    torch.testing.assert_close(flat(model(tokens(), depth=4, max_steps=1).z), flat(stack(tokens()).z))


# --- segments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "inject"), [*((kind, True) for kind in CELLS), ("post", False), ("pre", False)])
def test_an_untied_stack_in_segments_equals_the_joint_run(kind, inject):
    """Each layer remembers what it saw itself, so no position notices where the cuts are."""
    model = make(kind, cell={} if inject else {"inject": False}, depth=3, tied=False)
    ids, targets = tokens(), tokens(seed=6)
    joint = model(ids, targets)
    outputs = in_segments(model, ids, targets, [1, 4, 9])
    close(torch.cat([o.nll for o in outputs], 1), joint.nll)  # pyright: ignore
    assert len(outputs[0].memory) == 3


@kinds
@pytest.mark.parametrize("pieces", [2, 4])
def test_an_untied_stack_in_subsequences_has_the_same_values_and_gradients(kind, pieces):
    model = make(kind, depth=3, tied=False)
    split = reconfigured(model, subsequences=pieces)
    ids, targets = tokens(), tokens(seed=6)
    memory = model(tokens(length=4, seed=8)).memory
    joint, output = model(ids, targets, memory), split(ids, targets, memory)
    close(output.nll, joint.nll)
    assert_same_gradients(gradients(split, output.loss), gradients(model, joint.loss))  # pyright: ignore


@both
def test_a_tied_stack_remembers_its_final_state(kind):
    """Memory of a stack of depth L can go on with an equilibrium: a warm-up changes nothing else."""
    model = make(kind, depth=3)
    ids = tokens(length=8)
    output = model(ids[:, :5])
    remembered = output.memory[0][0]
    final = flat(output.z)[..., : remembered.shape[2]]
    assert torch.equal(remembered, final[:, -remembered.shape[1] :])
    following = model(ids[:, 5:], memory=output.memory, depth="equilibrium")
    assert following.solution is not None and flat(following.z).isfinite().all()


@both
def test_a_stack_is_causal_too(kind):
    for tied in (True, False):
        model = make(kind, depth=4, tied=tied)
        ids = tokens()
        changed = ids.clone()
        changed[:, 6:] = (ids[:, 6:] + 1) % 13
        a, b = flat(model(ids).z), flat(model(changed).z)
        assert torch.equal(a[:, :6], b[:, :6]) and not torch.equal(a[:, 6:], b[:, 6:])


# --- checkpointing ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("pieces", "every"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_checkpointing_changes_neither_values_nor_gradients(kind, tied, dropout, pieces, every):
    options = ALL_DROPOUT if dropout else {}
    cell = CELL_DROPOUT[kind] if dropout else {}
    model = make(kind, cell={**cell, "normalise": "weight"}, depth=4, tied=tied, subsequences=pieces, **options)
    other = reconfigured(model, checkpoint=True, checkpoint_every=every)
    ids, targets = tokens(), tokens(seed=6)
    results = []
    for m in (model, other):
        torch.manual_seed(9)
        output = m(ids, targets, layers_every=2)
        loss = output.loss + sum(output.layer_losses)
        results.append((torch.stack([*output.layers, output.hidden]), gradients(m, loss)))
    close(results[1][0], results[0][0], 1e-12)
    for name, grad in results[0][1].items():
        close(results[1][1][name], grad, 1e-12)


def kept_numbers(model: SequenceModel) -> int:
    """Numbers in distinct storages that one forward pass keeps for its backward pass, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens(), tokens(seed=6))
    assert output.loss is not None and output.loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) // 8


@both
def test_checkpointing_keeps_little_per_layer(kind):
    plain = [kept_numbers(make(kind, depth=depth)) for depth in (4, 8)]
    saving = [kept_numbers(make(kind, depth=depth, checkpoint=True)) for depth in (4, 8)]
    assert plain[1] - plain[0] > 4 * (saving[1] - saving[0]) >= 0


@both
def test_an_equilibrium_keeps_no_more_than_one_layer_whatever_it_took(kind):
    one = kept_numbers(make(kind, depth=1))
    short, long = (kept_numbers(make(kind, max_steps=steps)) for steps in (3, 100))
    assert short == long <= 2 * one


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, -3, 2.5, "deep", True])
def test_an_impossible_depth_for_a_call_is_refused(depth):
    with pytest.raises(ValueError, match="depth"):
        make("post")(tokens(), depth=depth)


@both
def test_untied_cells_have_the_depth_they_have(kind):
    model = make(kind, depth=3, tied=False)
    assert torch.equal(flat(model(tokens(), depth=3).z), flat(model(tokens()).z))
    for depth in (2, 4, "equilibrium"):
        with pytest.raises(ValueError, match="untied"):
            model(tokens(), depth=depth)


def test_no_equilibrium_without_injection_per_call_either():
    """It would not depend on the input."""
    model = make("post", cell={"inject": False}, depth=3)
    with pytest.raises(ValueError, match="inject"):
        model(tokens(), depth="equilibrium")


# --- reading out earlier layers --------------------------------------------------------------------------------------


@kinds
def test_layers_on_the_way_can_be_read_out(kind):
    model = make(kind, depth=5)
    output = model(tokens(), tokens(), layers_every=2)
    assert len(output.layers) == len(output.layer_losses) == 2  # the last layer is the output itself
    for n, hidden, loss in zip((2, 4), output.layers, output.layer_losses, strict=True):
        cut = model(tokens(), tokens(), depth=n)
        close(hidden, cut.hidden)
        close(loss, cut.loss)
    assert model(tokens()).layers == () and model(tokens(), layers_every=5).layers == ()


def test_layers_read_out_have_the_dropout_of_the_output():
    model = make("post", depth=2, output_dropout=0.5).train()
    output = model(tokens(), layers_every=1)
    assert torch.equal(output.layers[0] == 0, output.hidden == 0) and bool((output.hidden == 0).any())


def test_pieces_of_a_sequence_are_read_out_as_one():
    model = make("post", depth=3, subsequences=2)
    output = model(tokens(), layers_every=1)
    assert [hidden.shape for hidden in output.layers] == [output.hidden.shape] * 2
    first = tokens()[:, : -(-tokens().shape[1] // 2)]
    alone = reconfigured(model, subsequences=1)(first, layers_every=1)
    close(output.layers[1][:, : first.shape[1]], alone.layers[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers_every": 1, "depth": "equilibrium"}, "an equilibrium has no layers to read out"),
        ({"layers_every": 0, "depth": 2}, "layers_every must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_read_out_is_told(settings, message):
    with pytest.raises(ValueError, match=message):
        make("post")(tokens(), **settings)
