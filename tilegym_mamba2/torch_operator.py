"""The ops as torch operators, for whatever looks at a call instead of running it.

torch.compile, torch.export, fake and meta tensors and dispatch modes see one opaque call, whose shapes come from
its fake and whose gradients come from autograd through the implementation, run again in the backward. Plain eager
calls never reach the operator.

A backward runs on the backend that was chosen when its forward was traced. A forward whose backend is chosen each time
that it runs raises if that has no backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilegym_mamba2 import registry

_NAMESPACE = "tilegym_mamba2"
_library = torch.library.Library(_NAMESPACE, "DEF")


def is_traced(value: Any) -> bool:
    """Whether a call with this tensor has to go through its operator."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(value, Tensor) and (
        value.is_meta or type(value) not in (Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]
    )


def define(
    name: str,
    arguments: str,
    returns: str,
    *,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    problem: Callable[..., Any],
) -> Callable[..., Any]:
    """Defines an op's operator, and its gradient unless it writes to an argument.

    Args:
        name: the op's name.
        arguments: the schema of its arguments; the last must be `str? backend`.
        returns: the schema of what it returns.
        run: computes it; called with all arguments by position.
        fake: called likewise with tensors that have no data, returns empty ones like those that `run` returns.
        problem: validates all arguments but the last, and tells whether one requires grad.
    """

    def compute(*values: Any) -> Any:
        return run(*(tuple(value) if isinstance(value, list) else value for value in values))

    operator = _define(name, f"({arguments}) -> {returns}", compute, fake)
    if "!" in arguments:
        _library.impl(name, _refuse_gradients(name, operator, problem), "Autograd")
        return operator

    def select(values: Sequence[Any]) -> registry.Implementation:
        with torch.enable_grad():
            return registry.select(name, problem(*values[:-1]), values[-1])  # raises if that has no backward

    def compute_differentiated(*values: Any) -> Any:
        # In a compiled forward no tensor says that it requires grad.
        select([value.detach().requires_grad_() if _is_float(value) else value for value in values])
        return compute(*values)

    forward = _define(f"{name}_forward", f"({arguments}) -> {returns}", compute_differentiated, fake)
    backward = _define_backward(name, arguments, compute)
    _library.impl(name, _with_gradients(operator, forward, backward, select), "Autograd")
    return operator


def _define(name: str, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    _library.define(name + schema)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _define_backward(name: str, arguments: str, run: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def compute(*values: Any) -> list[Tensor]:
        *inputs, grads, wanted = values
        with torch.enable_grad():
            inputs = [
                value.detach().requires_grad_(want) if isinstance(value, Tensor) else value
                for value, want in zip(inputs, wanted, strict=True)
            ]
            results: Any = run(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        reached = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        leaves = [value for value, want in zip(inputs, wanted, strict=True) if want]
        if not reached:
            return [leaf.new_zeros(leaf.shape) for leaf in leaves]
        outputs, output_grads = zip(*reached, strict=True)
        found = torch.autograd.grad(outputs, leaves, output_grads, allow_unused=True, materialize_grads=True)
        # Copies, as the fake promises: an operator's results are contiguous and never its arguments.
        return [grad.clone(memory_format=torch.contiguous_format) for grad in found]

    def compute_fake(*values: Any) -> list[Tensor]:
        *inputs, _, wanted = values
        return [value.new_empty(value.shape) for value, want in zip(inputs, wanted, strict=True) if want]

    schema = f"({arguments}, Tensor?[] grads, bool[] wanted) -> Tensor[]"
    return _define(f"{name}_backward", schema, compute, compute_fake)


def _with_gradients(
    operator: Callable[..., Any],
    forward_operator: Callable[..., Any],
    backward_operator: Callable[..., list[Tensor]],
    select: Callable[[Sequence[Any]], registry.Implementation],
) -> Callable[..., Any]:
    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            # A compiled backward runs in a thread of autograd's, which is in no use_backend block: it gets a name.
            others = [*inputs[:-1], select(inputs).backend]
            ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))
            ctx.others = [None if isinstance(value, Tensor) else value for value in others]
            with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
                return forward_operator(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            wanted = list(ctx.needs_input_grad)
            pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
            inputs = [other if saved is None else saved for saved, other in pairs]
            found = iter(backward_operator(*inputs, list(grads), wanted))
            return tuple(next(found) if want else None for want in wanted)

    def dispatch(*values: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values):
            return Differentiated.apply(*values)
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return operator(*values)

    return dispatch


def _refuse_gradients(name: str, operator: Any, problem: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*values: Any) -> Any:
        argument = problem(*values[:-1]).differentiated_argument
        if argument is not None:
            raise NotImplementedError(
                f"{name}: {argument} requires grad, and under torch.compile an update in place has no backward: "
                "call it under torch.no_grad() or outside the compiled function"
            )
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            return operator(*values)

    return refuse


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
