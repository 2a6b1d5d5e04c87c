"""What the adjoints need to know of autograd: one application of f with a graph, and what that graph leads to."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqkit.solve._packing import Packing, map_tensors, select, tensors_in

# B samples, P groups of positions, N numbers in a group


class TakesParameters(abc.ABC):
    """A function with inputs beside its arguments: tensors that all samples share."""

    parameters: dict[str, Tensor]

    @abc.abstractmethod
    def __call__(self, z: Any, *args: Any) -> Any: ...

    @abc.abstractmethod
    def again(self, parameters: dict[str, Tensor] | None = None) -> TakesParameters:
        """The function for use after the forward pass, with others in the place of its parameters if some are given."""


class WithParameters(TakesParameters):
    """f together with the parameters that its module has now.

    The backward pass may evaluate f again when these are no longer in place (`torch.func.functional_call`).
    """

    def __init__(self, f: Callable[..., Any], module: nn.Module) -> None:
        self._f = f
        self._caller = _Caller(f, module)
        self._in_place = True
        self.parameters = {f"module.{name}": t for name, t in (*module.named_parameters(), *module.named_buffers())}

    def __call__(self, z: Any, *args: Any) -> Any:
        if self._in_place:
            return self._f(z, *args)
        return torch.func.functional_call(self._caller, self.parameters, (z, *args))

    def again(self, parameters: dict[str, Tensor] | None = None) -> WithParameters:
        later = copy.copy(self)
        later._in_place = False
        later.parameters = self.parameters if parameters is None else parameters
        return later


class _Caller(nn.Module):
    def __init__(self, f: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._f = (f,)  # in a tuple, so that it is not a child: it may be the module itself

    def forward(self, *args: Any) -> Any:
        return self._f[0](*args)


class Equation:
    """z = f(z, *args) in packed form, evaluated under the autocast setting of the forward pass."""

    def __init__(self, f: Callable[..., Any], packing: Packing, args: tuple[Any, ...]) -> None:
        self.f, self.packing, self.args = f, packing, args
        device = packing.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        self._autocast_dtype = torch.get_autocast_dtype(device) if autocast else None

    def __call__(self, z_BPN: Tensor) -> Tensor:
        if self._autocast_dtype is None:
            return self._evaluate(z_BPN)
        # Without the cache, which in older torch kept weights cast under no_grad, through which no gradient passes
        # (torch 2.13 does not, so no test here can tell).
        with torch.autocast(self.packing.device.type, dtype=self._autocast_dtype, cache_enabled=False):
            return self._evaluate(z_BPN)

    def _evaluate(self, z_BPN: Tensor) -> Tensor:
        output = self.f(self.packing.unpack(z_BPN), *self.args)
        self.packing.check_output(output, z_BPN.shape[0], autocast=self._autocast_dtype is not None)
        return self.packing.pack(output)

    @property
    def rounding(self) -> float:
        """How much two evaluations at one point may differ, relative to the value, and still be the same function."""
        dtype = self.packing.dtype if self._autocast_dtype is None else self._autocast_dtype
        return min(0.1, 30 * torch.finfo(dtype).eps ** 0.5)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self.f.parameters if isinstance(self.f, TakesParameters) else {}

    @property
    def inputs(self) -> list[Tensor]:
        """What f is known to take and gradients are wanted for: tensors of its arguments, and its parameters."""
        return differentiable_args((self.args, self.parameters))

    def again(
        self,
        *,
        index: Tensor | None = None,
        args: tuple[Any, ...] | None = None,
        parameters: dict[str, Tensor] | None = None,
    ) -> Equation:
        """The same equation for use after the forward pass; for some samples, cut off from what made its arguments."""
        later = copy.copy(self)
        if isinstance(self.f, TakesParameters):
            later.f = self.f.again(parameters)
        if args is not None:
            later.args = args
        if index is not None:
            later.args = select(map_tensors(Tensor.detach, self.args), index)
        return later


class _Source(torch.autograd.Function):
    """The point at which f is linearised. Gradients can be asked for here; they never go further.

    `before` are tensors that f takes besides. Made after them, this node is what autograd need not look behind when a
    product ends here; it would otherwise look through all that made them, at every product: in the last of many
    subsequences that is all the others.
    """

    @staticmethod
    def forward(ctx: Any, z_BPN: Tensor, anchor: Tensor, *before: Tensor) -> Tensor:
        ctx.num_before = len(before)
        return z_BPN.view_as(z_BPN)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *(None for _ in range(ctx.num_before))


class Gates:
    """Tensors in whose graph we can stop: while closed, gradients that reach a gate go no further.

    Second derivatives need partial derivatives of f, its arguments held fixed, as expressions that still know how the
    arguments depend on everything else (and on each other).
    """

    def __init__(self) -> None:
        self._open = [True]  # not an attribute of this object, which would make a cycle with the graph
        self._behind: dict[int, tuple[Tensor, Tensor]] = {}

    def put_before(self, tree: Any) -> Any:
        """`tree` with every tensor that needs a gradient behind a gate of its own."""
        return map_tensors(self._gate, tree)

    def _gate(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if id(tensor) not in self._behind:
            self._behind[id(tensor)] = (tensor, _Gate.apply(tensor, self._open))  # pyright: ignore
        return self._behind[id(tensor)][1]

    def partial_derivatives(self, value: Tensor, inputs: list[Tensor], weight: Tensor) -> list[Tensor | None]:
        """By what lies behind the gates, and by the same tensors where f closes over what was made from them."""
        gates = {place: self._behind[id(t)][1] for place, t in enumerate(inputs) if id(t) in self._behind}
        self._open[0] = False
        try:
            return gradients_up_to(value, inputs, weight, instead=gates, create_graph=True)
        finally:
            self._open[0] = True


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, is_open: list[bool]) -> Tensor:
        ctx.is_open = is_open
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grads[0] if ctx.is_open[0] else None), None


class Linearised:
    """f at one point, with the graph of that one evaluation."""

    def __init__(self, equation: Equation, z_BPN: Tensor) -> None:
        with torch.enable_grad():
            anchor = torch.empty(0, device=z_BPN.device, requires_grad=True)
            source = _Source.apply(z_BPN.detach(), anchor, *differentiable_args(equation.args))
            self.source: Tensor = source  # pyright: ignore[reportAttributeAccessIssue]
            self.value = equation(self.source)
        self._anchor = anchor

    def transposed(self, y_BPN: Tensor) -> Tensor:
        """J'y, one vector-Jacobian product."""
        return transposed_product(self.value, self.source, y_BPN, create_graph=False)

    def touched(self, inputs: list[Tensor]) -> Touched:
        """What gradients of this evaluation flow to."""
        first = self.source.grad_fn
        assert first is not None
        found = touched_by(self.value, inputs, made_before=first._sequence_nr())
        tensors = [t for t in found.tensors if t is not self._anchor]
        with torch.enable_grad():
            routes = [t.view_as(t) for t in tensors] if found.closed_over else tensors
        return dataclasses.replace(found, tensors=tensors, routes=routes)


def transposed_product(value_BPN: Tensor, at_BPN: Tensor, y_BPN: Tensor, *, create_graph: bool) -> Tensor:
    if not value_BPN.requires_grad:
        return torch.zeros_like(y_BPN)
    (product,) = torch.autograd.grad(
        value_BPN, at_BPN, y_BPN, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    return torch.zeros_like(y_BPN) if product is None else product


def gradients_up_to(
    value: Tensor, inputs: list[Tensor], weight: Tensor, *, instead: dict[int, Tensor], create_graph: bool
) -> list[Tensor | None]:
    """The derivatives by `inputs`, where f took others `instead` of some of them (by place in the list).

    f may close over tensors that were made from such an input, so it is asked for as well. Its gradient stops there:
    the caller sends the sum on to what the input was made from, which may be among the inputs too.
    """
    stopped: dict[int, Tensor] = {}

    def stop_at(place: int) -> Callable[[Tensor], Tensor | None]:
        def hook(grad: Tensor | None) -> Tensor | None:
            if grad is None:  # the way here was through a closed gate
                return None
            stopped[place] = grad
            return torch.zeros_like(grad)

        return hook

    with _hooks_asleep(inputs):
        hooks = [inputs[place].register_hook(stop_at(place)) for place in instead if inputs[place].grad_fn is not None]
        try:
            found = torch.autograd.grad(
                value,
                [*inputs, *instead.values()],
                weight,
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
    totals: list[Tensor | None] = [stopped.get(place, grad) for place, grad in enumerate(found[: len(inputs)])]
    for place, grad in zip(instead, found[len(inputs) :], strict=True):
        before = totals[place]
        totals[place] = grad if before is None else before if grad is None else before + grad
    return totals


@contextmanager
def _hooks_asleep(tensors: list[Tensor]) -> Iterator[None]:
    """Hooks that the caller has put on tensors run when their gradients arrive, not in what is computed on the way."""
    asleep = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    for hooks, _ in asleep:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, were in asleep:
            hooks.update(were)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Touched:
    """What the gradients of one evaluation of f flow to."""

    tensors: list[Tensor]
    """Known inputs of f where they are met, else autograd leaves."""
    in_another: bool = False
    """Whether the way to them leads through the argument of another equilibrium that is being differentiated."""
    closed_over: list[Any] = dataclasses.field(default_factory=list)
    """Nodes of tensors that f closes over: made before it was evaluated, and neither its inputs nor leaves."""

    routes: list[Tensor] = dataclasses.field(default_factory=list)
    """The inputs of a backward pass that sends gradients straight to `tensors`, past what f closes over: these, or
    where f does that views of them, which tell whether their gradient is asked for."""

    def refuse_gradients_of_closures(self, name: str) -> None:
        """To be called in such a backward pass.

        Raises:
            RuntimeError: the gradient of something that f closes over is asked for, and of nothing it was made from.
        """
        asked: Any = torch._C._will_engine_execute_node
        for node in self.closed_over:
            behind = _behind(node)
            made_from = [route for t, route in zip(self.tensors, self.routes, strict=True) if _root(t) in behind]
            if asked(node) and not any(asked(route.grad_fn) for route in made_from):
                raise RuntimeError(
                    f"{name} has no gradient of a tensor that f closes over and that was itself computed "
                    f"({node.name()}): pass it to f as an argument, batch first, or put it in the place of a parameter "
                    "of the cell with torch.func.functional_call"
                )


def _root(tensor: Tensor) -> Any:
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def touched_by(value: Tensor, inputs: list[Tensor], *, made_before: int) -> Touched:
    """Walk the graph of `value` down to leaves, not beyond `inputs`."""
    if value.grad_fn is None:
        return Touched(tensors=[])
    in_another = False
    stop_at = {(t.grad_fn, t.output_nr): t for t in inputs if t.grad_fn is not None}
    found: dict[int, Tensor] = {}
    closed_over: list[Any] = []
    seen = {value.grad_fn}
    todo = [value.grad_fn]
    while todo:
        parent = todo.pop()
        for node, output in parent.next_functions:
            if node is None:
                continue
            if (stopped := stop_at.get((node, output))) is not None:
                found[id(stopped)] = stopped
            elif hasattr(node, "variable"):
                found[id(node.variable)] = node.variable  # pyright: ignore[reportAttributeAccessIssue]
            elif node not in seen and not isinstance(node, _Source._backward_cls):  # pyright: ignore
                in_another |= isinstance(node, _Gate._backward_cls)  # pyright: ignore[reportAttributeAccessIssue]
                if node._sequence_nr() < made_before <= parent._sequence_nr():
                    closed_over.append(node)
                seen.add(node)
                todo.append(node)
    return Touched(tensors=list(found.values()), in_another=in_another, closed_over=closed_over)


def _behind(node: Any) -> set[Any]:
    """All nodes that gradients of this one flow to, and the identities of the leaves."""
    found: set[Any] = set()
    todo = [node]
    while todo:
        for behind, _ in todo.pop().next_functions:
            if hasattr(behind, "variable"):
                found.add(id(behind.variable))
            elif behind is not None and behind not in found:
                found.add(behind)
                todo.append(behind)
    return found


def differentiable_args(args: Any) -> list[Tensor]:
    return [t for t in tensors_in(args) if t.requires_grad]


def twice_differentiable() -> AbstractContextManager[Any]:
    """Evaluate f so that its derivatives can be differentiated: fused attention has no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def refuse_tangents(name: str, tensors: Iterable[Tensor]) -> None:
    """Forward-mode derivatives would follow the solver's steps, which are not those of z*."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative; use torch.autograd (backward, grad)")


def refuse_transforms(name: str, *grads: Tensor | None) -> None:
    """`torch.func` transforms cannot see through a solve whose length depends on the data."""
    # `is_grads_batched` of torch.autograd.grad still uses the vmap that came before torch.func.
    is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
    batched = any(g is not None and is_batched(g) for g in grads)
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name} does not run inside torch.func transforms (vmap, jvp, grad, ...). Batches need no vmap: every "
            "sample is solved on its own. For derivatives use torch.autograd (backward, grad, also of higher order)"
        )
