"""Matmuls of a model that ignore its policy, found in the program that the search traces."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._core import PyTree, _compat
from jaxmp._flax._casts import ModulePolicy
from jaxmp._flax._labels import PARAMETER, PREFIX, RESULT, CalledModule, Labeling, label_owner
from jaxmp._flax._layer_table import CONV
from jaxmp._programs import Frame, Lines
from jaxmp.fp8 import _explain


def low_precision_share(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> float | None:
    """Returns the share of a function's matmul FLOPs in 16 bits or fewer; None without matmuls.

    Args:
      fn: any JAX function; nothing is computed.
      *args, **kwargs: its arguments, or their shapes.
    """
    with _explain.recorded():
        return _share(_programs.trace(fn, args, kwargs).closed)


def _share(closed: _compat.ClosedJaxpr) -> float | None:
    flops = _programs.count_flops(closed)
    is_float = lambda dtype: jnp.issubdtype(dtype, jnp.floating)
    flops = Counter({pair: n for pair, n in flops.items() if all(map(is_float, pair))})
    if not isinstance(flops.total(), (int, float)):  # They depend on a symbolic shape.
        return None
    low = sum(flops[pair] for pair in flops if all(_core.bits(dtype) <= 16 for dtype in pair))
    return low / flops.total() if flops.total() else None


class _WeightMatmuls(_programs.Forward):
    """Finds the FP32 matmuls whose operand is a weight: an argument or constant, also if cast."""

    nothing = False

    def __init__(self, modules: dict[str, CalledModule]) -> None:
        super().__init__()
        self._modules = modules
        # Path -> FLOPs and an equation; first of modules that should read 16 bits, then of others.
        self.found: tuple[dict[str, tuple[float, _compat.JaxprEqn]], ...] = {}, {}

    def constant(self, array: Any) -> bool:
        return np.ndim(array) > 1

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name in _programs.MATMULS and any(operands):
            matmul = _programs.matmul_of(equation)
            path = self._path(frame.place.of(equation).names)
            # A function that `apply` calls with the model may multiply outside of all modules.
            if _core.FLOAT32 in (matmul.lhs, matmul.rhs) and path in self._modules:
                self.found[not self._modules[path].is_low][path] = matmul.flops, equation
            return [False]
        if name in _programs.EXACT:
            return [any(operands)] * len(equation.outvars)
        is_converted = _programs.name_of(equation) == _core.WIDENED_MATMUL
        return [False] if is_converted else self.enter(equation, operands, frame)

    def _path(self, scopes: _programs.Path) -> str:
        """Returns the path of the innermost module of the scopes of an equation."""
        inward = [scopes[:length] for length in range(len(scopes), -1, -1)]
        paths = (path for each in inward for path in _programs.module_paths_of(each))
        return next((path for path in paths if path in self._modules), "")


def low_share(cls: type, closed: _compat.ClosedJaxpr, count: int, labeling: Labeling) -> str:
    """Returns a warning of a model whose matmuls mostly ignore its 16-bit policy; "" for others."""
    share = _share(closed)
    if share is None or share >= 0.5:
        return ""
    matmuls, arguments = _WeightMatmuls(labeling.modules), len(closed.jaxpr.invars)
    matmuls.run(closed, [n < count for n in range(arguments)])
    ignored, chosen = ({path: row[0] for path, row in rows.items()} for rows in matmuls.found)
    if not ignored or sum(ignored.values()) < sum(chosen.values()):
        return ""
    path = max(ignored, key=ignored.__getitem__)
    module, method, _ = labeling.modules[path]
    file, line = Lines().of([matmuls.found[0][path][1]])
    where = f"the module {path!r}" if path else "the model"
    if method:
        reason = (
            f"The method {method!r} of the module {path!r} multiplies by its own parameters, but "
            "its arguments are cast only in a forward pass. Declare the method as one: "
            f"Rule({path!r}, forward_methods=[{method!r}])."
        )
    else:
        reason = (
            f"Matmuls of {where}, a {module.__name__} ({os.path.basename(file)}, line {line}), "
            "read float32 operands: it casts them, or multiplies by float32 arrays that it makes, "
            "as jax.nn.one_hot does, or it calls layers that are not its attributes, such as those "
            "of a closure, which policies do not reach and Flax NNX does not train. "
            "Apply the same recipe to each operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
        )
    return f"{share:.0%} of the matmul FLOPs of {cls.__name__} run in 16 bits or fewer. {reason}"


def note_weights(module_policy: ModulePolicy, own: list[Any]) -> None:
    """Records a module with a policy for FP8 and weights, `own`, that no FP8 dot multiplies."""
    traits, cls, path = module_policy.traits, module_policy.cls, module_policy.resolved.path
    if module_policy.policy.matmul != "fp8":
        return
    if module_policy.resolved.scaling is None:
        kernel = next(array for array in own if array.ndim > 1)
        _explain.note_decision(path, kernel.shape[::-1] if traits.embedding else kernel.shape)
        return
    has_fp8 = getattr(traits.dot, "fp8", None) is not None
    # A layer of Flax that is wrapped alone is a part of a model.
    is_part = not path and cls.__module__.startswith("flax.")
    has_matrix = any(getattr(array, "ndim", 0) > 1 for array in own)
    if has_matrix and not (has_fp8 or is_part or traits.is_norm or traits.embedding):
        why = "FP8 has no convolutions" if traits.dot is CONV else f"{cls.__name__} {_NO_DOT}"
        _explain.note_unsupported(path, why)


_NO_DOT = _explain.UNKNOWN_DOT


def refused_sums(
    rounded: list[str], dtype: np.dtype, reasons: dict[str, str], error: Exception
) -> str:
    """Returns a warning of layers whose FP32 sums strict promotion refuses.

    Args:
      rounded: labels of the layers.
      dtype: of their results.
      reasons: label -> why the result should be FP32.
      error: of the operation of FP32 sums and a 16-bit array.
    """
    label, *others = rounded
    path = label.removeprefix(PREFIX).rpartition(".")[0]
    more = f" (and {len(others)} other{'s' * (len(others) > 1)})" if others else ""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    file, line = Lines().first_own((frame.filename, frame.lineno or 0) for frame in frames)
    return (
        f"The result of the layer {path!r}{more} is rounded to {dtype}, although "
        f"{reasons[label]}: jax_numpy_dtype_promotion='strict' refuses its FP32 sums beside the "
        f"16-bit array in {os.path.basename(file)}, line {line}. Convert this array there, "
        f"y.astype(jnp.float32), and add a rule for the layer, Rule({path!r}, 'o=f32')."
    )


def stored_parameters(stored: dict[str, np.dtype], reasons: dict[str, str]) -> list[str]:
    """Returns a warning of each parameter in 16 bits of which a small change is magnified.

    Args:
      stored: label -> dtype of the parameters in 16 bits.
      reasons: label -> why the value should be FP32.
    """
    uses, messages = _programs.Use, []
    magnified = uses.ORDER, uses.SOLVED, uses.CHAINED, uses.DISTANCE, uses.ANGLE, uses.DIGITS
    for label, dtype in stored.items():
        if reasons[label] in map(_programs.why_wide, magnified):
            owner = label.removeprefix(PREFIX).rpartition(f" {PARAMETER} ")[0]
            path, _, name = owner.rpartition(".")
            messages.append(
                f"The parameter {name!r} of {f'the module {path!r}' if path else 'the model'} is "
                f"stored in {dtype}, although {reasons[label]}. Store it in FP32: "
                f"Rule({f'{path}:{name}'!r}, 'p=f32')."
            )
    return messages


def unused_fp8(cls: type, rows: list[Any], labels: dict[str, str], jaxpr: _compat.Jaxpr) -> str:
    """Returns a warning of a model that has matmuls, none of which computes in FP8; else ""."""
    decided = [_without_decisions(row, labels) for row in rows]
    if not decided or not all(row.exclusion_reason for row in decided):
        return ""
    equations = list(_programs.equations(jaxpr))
    if set(_programs.MATMULS).isdisjoint(equation.primitive.name for equation in equations):
        return ""
    # A layer that was jitted before records no decision.
    casts = (each for each in equations if each.primitive.name == "convert_element_type")
    if decided == rows and any("float8" in str(_programs.new_dtype_of(each)) for each in casts):
        return ""
    return _explain.unused_text(cls.__name__, [row for row in decided if row.path or not row.k])


def _without_decisions(row: _explain.LayerDecision, labels: dict[str, str]) -> Any:
    """Returns the decision on a layer, which does not run in FP8 if its results are not rounded."""
    why = labels.get(f"{label_owner(row.path, '__call__', RESULT)}0", "")
    return row if row.exclusion_reason else dataclasses.replace(row, exclusion_reason=why)
