"""The ops as torch operators, for whatever looks at a call instead of running it.

torch.compile, torch.export, fake and meta tensors and dispatch modes see one opaque call, whose shapes come from
its fake and whose gradients come from autograd through the implementation, run again in the backward. Plain eager
calls never reach the operator.
"""

from collections.abc import Callable
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
    _library.define(f"{name}({arguments}) -> {returns}")

    def compute(*values: Any) -> Any:
        return run(*(tuple(value) if isinstance(value, list) else value for value in values))

    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(torch.ops, _NAMESPACE)
    if "!" in arguments:
        _library.impl(name, _refuse_gradients(name, getattr(operator, name), problem), "Autograd")
    else:
        _define_backward(name, arguments, compute, problem)
    return getattr(operator, name).default


def _define_backward(name: str, arguments: str, run: Callable[..., Any], problem: Callable[..., Any]) -> None:
    backward_name = f"{name}_backward"
    _library.define(f"{backward_name}({arguments}, Tensor?[] grads, bool[] wanted) -> Tensor[]")

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

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        with torch.enable_grad():
            registry.select(name, problem(*inputs[:-1]), inputs[-1])  # raises if the backend has no backward
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))
        ctx.others = tuple(None if isinstance(value, Tensor) else value for value in inputs)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad)
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        inputs = [other if saved is None else saved for saved, other in pairs]
        operator = getattr(getattr(torch.ops, _NAMESPACE), backward_name)
        found = iter(operator(*inputs, list(grads), wanted))
        return tuple(next(found) if want else None for want in wanted)

    _library.impl(backward_name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{backward_name}", compute_fake, lib=_library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)


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
