"""Notes on errors of JAX that the dtypes of a policy cause."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._trees import is_castable
from jaxmp._flax._casts import ARRAYS, IsLeaf, ModulePolicy

_NOTE = "jaxmp: "
# JAX's messages for an operation that has no 16-bit form; the last one is that of JAX 0.10.
_NO_16BIT = re.compile(r"(\w+) does not accept dtype|(\w+) input must be|Unsupported dtype")


def explain_mismatch(
    error: Exception,
    module_policy: ModulePolicy,
    arguments: Mapping[str, Any],
    is_param: IsLeaf = None,
    method: str = "",
) -> None:
    """Adds a note to an error of JAX about the dtypes of a module that computes in 16 bits.

    Either two dtypes do not match, or an operation such as `lu` or `rfft` has no 16-bit form. The
    note contains the module, the arguments concerned and the fix.

    Args:
      error: raised by a method of the module.
      module_policy: that of the module.
      arguments: name -> value of the method's arguments.
      is_param: returns True for a parameter in the arguments; a policy casts it when it is read.
      method: name of the method, if it is not a forward pass, so that its arguments are not cast.
    """
    compute, text = module_policy.policy.compute_dtype, str(error)
    has_note = any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
    refusal = _NO_16BIT.search(text)
    concerns = compute.name in text and ("float32" in text or refusal is not None)
    if not (is_16bit(compute) and concerns) or has_note:
        return
    name = module_policy.resolved.path
    subtree = f"{name}/**" if name else "**"
    where = f"the module {name!r}" if name else "the root module"
    start = (
        f"{_NOTE}this happened in {module_policy.cls.__name__}, {where}, which computes in "
        f"{compute} under its policy ({module_policy.policy})"
    )
    if refusal is not None:
        operation = next(filter(None, refusal.groups()), "the operation")
        error.add_note(f"{start}. {_fix_operand(operation, name, arguments)}")
        return
    lines = [f"{start}; another array is float32."]
    if "carry" in text:
        lines.append(
            "Create the initial carry of the loop in the dtype of what the loop computes: "
            "jnp.zeros(shape, x.dtype), not jnp.zeros(shape). If the loop calls a module that "
            "returns the next carry, you can also let it return float32: "
            f"Rule({(f'{name}/*' if name else '*')!r}, 'o=f32')."
        )
        if module_policy.policy.fp32_outputs_below:
            lines.append(
                f"Layers with fewer than {module_policy.policy.fp32_outputs_below} outputs return "
                f"float32. If they compute the carry: Rule({subtree!r}, fp32_outputs_below=0)."
            )
    wide = _float32_names(arguments, is_param)
    if method:
        lines.append(
            f"The method {method!r} is not a forward pass, so its arguments are not cast, but "
            "modules return 16 bits. Convert their results: self(x).astype(jnp.float32). Or "
            f"declare the method as a forward pass: Rule({name!r}, forward_methods=[{method!r}])."
        )
    elif wide:
        lines.append(
            f"Its arguments contain float32 arrays that are not cast: {', '.join(wide)}. Create "
            f"them in the compute dtype: jnp.zeros(shape, jnp.{compute})."
        )
    lines.append(f"Or compute this module in float32: Rule({subtree!r}, 'c=f32').")
    error.add_note(" ".join(lines))


def _fix_operand(operation: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the fix for an operation without a 16-bit form in the module called `name`."""
    arrays = [key for key, value in arguments.items() if is_castable(value)]
    kept = repr(arrays[0]) if arrays else "'x'"
    return (
        f"JAX does not compute {operation} in 16 bits. Convert its operand in the module: "
        f"x.astype(jnp.float32). If the operand is an argument of the module, do not cast it: "
        f"Rule({name!r}, keep_inputs=[{kept}])."
    )


def _float32_names(arguments: Mapping[str, Any], is_param: IsLeaf) -> list[str]:
    """Returns the names of float32 arrays in arguments, such as `cache[0].k_cache`; at most 3."""
    names = [
        name + jax.tree_util.keystr(key_path)
        for name, value in arguments.items()
        for key_path, leaf in jax.tree.leaves_with_path(value, is_leaf=is_param)
        if isinstance(leaf, ARRAYS) and leaf.dtype == FLOAT32
    ]
    return names[:3] + ["..."] * (len(names) > 3)


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"args[{index}]": arg for index, arg in enumerate(args)}, **kwargs}
