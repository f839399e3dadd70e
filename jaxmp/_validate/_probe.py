"""Gradients and activations of a step on given parameters, and their differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core import _trees
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._locations import module_of, root_of
from jaxmp._core._shardings import sampled
from jaxmp._core._typing import Array, PyTree
from jaxmp._validate._capture import SAMPLES, with_outputs
from jaxmp._validate._check_run import check_grads
from jaxmp._validate._patterns import Pattern, difference, find_patterns, joined
from jaxmp._validate._pure import PureRun
from jaxmp._validate._rows import GradientRow, ModuleRow
from jaxmp._validate._train import global_norm

# Path of a parameter, such as "block_0/dense:kernel" -> values on the host.
Leaves = Mapping[str, np.ndarray]


class Probe(NamedTuple):
    """Measurements of one step on the host.

    Args:
      loss: loss of the batch.
      grads: gradients by path; empty if the step does not return them.
      outputs: a sample of the output of each module, in the order of the forward pass.
      stalled: share of the parameters with a nonzero gradient that the update does not change.
      update: norm of the difference that the step makes to all parameters.
      updates: a sample of that difference, by path.
      changes: a sample of the difference that it makes to other leaves of the state, by path.
      params: the same sample of the parameters before the step.
      dtypes: dtypes of these leaves; empty for a reference that was read from a file.
    """

    loss: float
    grads: Leaves
    outputs: Leaves
    stalled: float
    update: float
    updates: Leaves
    changes: Leaves
    params: Leaves = MappingProxyType({})
    dtypes: Mapping[str, str] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """Differences of a candidate from the reference at all compared steps.

    Args:
      gradients: a row for each step.
      modules: a row for each step and module.
      patterns: differences of gradients, updates and states that have a known form.
    """

    gradients: tuple[GradientRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    patterns: tuple[Pattern, ...] = ()

    def add(self, step: int, reference: Probe, candidate: Probe) -> Measurements:
        """Returns the measurements with those of another step."""
        gradients, patterns = self.gradients, self.patterns
        if reference.grads and candidate.grads:
            row = gradient_row(step, reference, candidate)
            gradients += (row,)
            patterns += tuple(find_patterns(row, reference, candidate))
        return Measurements(
            gradients=gradients,
            modules=self.modules + tuple(module_rows(step, reference, candidate)),
            patterns=patterns,
        )


def make_probe(run: PureRun) -> Callable[[PyTree, PyTree], Probe]:
    """Returns a function of (arrays, batch) that measures one step, compiled once.

    Args:
      run: the run.
    """

    def measure(arrays: PyTree, batch: PyTree) -> PyTree:
        (new, result), outputs = with_outputs(run.step)(arrays, batch)
        paths[:] = outputs
        before, after = run.params(arrays), run.params(new)
        changes = _stalled(before, after, result.grads), _update_norm(before, after)
        state, other = (
            {k: x for k, x in run.state(y).items() if not _trees.is_key(x)} for y in (arrays, new)
        )
        samples = (
            _samples(jax.tree.map(_difference, after, before)),
            {
                path: sampled(_difference(other[path], leaf), SAMPLES)
                for path, leaf in state.items()
            },
            _samples(before),
        )
        dtypes.update({path: str(leaf.dtype) for path, leaf in state.items()})
        return result, list(outputs.values()), changes, samples

    paths: list[tuple[str, ...]] = []
    dtypes: dict[str, str] = {}
    compiled = jax.jit(measure)

    def probe(arrays: PyTree, batch: PyTree) -> Probe:
        result, outputs, (stalled, update), samples = jax.device_get(compiled(arrays, batch))
        names = dict.fromkeys(path[:n] for path in paths for n in range(1, len(path) + 1))
        root = root_of(names)
        modules = [module_of(path, root) for path in paths]
        return Probe(
            loss=float(result.loss),
            grads=leaves_of(result.grads),
            outputs={
                module: output.values
                for module, output in zip(modules, outputs, strict=True)
                if output.is_computed
            },
            stalled=float(stalled),
            update=float(update),
            updates=samples[0],
            changes=samples[1],
            params=samples[2],
            dtypes=dict(dtypes),
        )

    return probe


def leaves_of(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree of parameters by their paths, on the host."""
    return {
        _trees.parameter_path(path): np.asarray(leaf)
        for path, leaf in _trees.leaves_with_path(tree)
    }


def _stalled(before: PyTree, after: PyTree, grads: PyTree | None) -> Array:
    """Returns the share of elements with a nonzero gradient that a step leaves unchanged."""
    if grads is None:
        return jnp.float32(0)
    check_grads(before, grads)
    moving = lambda g: jnp.isfinite(g) & (g != jnp.zeros((), g.dtype))
    trees = (before, after, grads)
    leaves = list(zip(*map(jax.tree.leaves, trees), strict=True))
    unchanged = sum(jnp.sum((p == q) & moving(g), dtype=jnp.float32) for p, q, g in leaves)
    moved = sum(jnp.sum(moving(g), dtype=jnp.float32) for _, _, g in leaves)
    return jnp.asarray(unchanged / jnp.maximum(moved, 1.0), jnp.float32)


def _update_norm(before: PyTree, after: PyTree) -> Array:
    """Returns the norm of the difference of two trees of parameters, in FP32."""
    return global_norm(jax.tree.map(_difference, after, before))


def _difference(x: Array, y: Array) -> Array:
    return _stored(x) - _stored(y)


def _stored(x: Array) -> Array:
    """Returns a leaf in FP32 as it is stored: XLA may omit its rounding before a conversion."""
    wide = x.astype(jnp.float32)
    if not is_16bit(x.dtype):
        return wide
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(wide, info.nexp, info.nmant)


def _sample(x: Array) -> Array:
    return sampled(x, SAMPLES)


def _samples(tree: PyTree) -> dict[str, Array]:
    """Returns a sample of each leaf of a tree of parameters, by path."""
    leaves = _trees.leaves_with_path(tree)
    return {_trees.parameter_path(path): _sample(leaf) for path, leaf in leaves}


# ---------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------


def gradient_row(step: int, reference: Probe, candidate: Probe) -> GradientRow:
    """Returns the difference of the gradients of all parameters at one step."""
    x, y = (joined(probe.grads, reference.grads) for probe in (reference, candidate))
    total = difference(x, y)
    updates = (joined(probe.updates, reference.updates) for probe in (reference, candidate))
    return GradientRow(
        step=step,
        error=total.error,
        cosine=total.cosine,
        norm=total.norm,
        underflow=_underflow(x, y),
        nonfinite=float(np.mean(~np.isfinite(y))) if y.size else 0.0,
        stalled=candidate.stalled,
        reference_stalled=reference.stalled,
        update_ratio=candidate.update / reference.update if reference.update else float("nan"),
        loss_error=abs(candidate.loss - reference.loss) / max(abs(reference.loss), 1e-30),
        loss=reference.loss,
        update_error=difference(*updates).error,
    )


def _underflow(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Returns the share of the reference's nonzero elements that are zero in the candidate."""
    nonzero = reference != 0
    return float(np.mean(candidate[nonzero] == 0)) if nonzero.any() else 0.0


def module_rows(step: int, reference: Probe, candidate: Probe) -> list[ModuleRow]:
    """Returns the differences of each module's gradients and output, in forward order."""
    order = {module: position for position, module in enumerate(reference.outputs)}
    own: dict[str, list[str]] = {}
    for path in reference.grads:
        own.setdefault(path.rpartition(":")[0], []).append(path)
    rows = []
    for module in dict.fromkeys([*order, *own]):
        row = ModuleRow(module=module, step=step, order=order.get(module, -1))
        rows.append(_module_row(row, own.get(module, []), reference, candidate))
    return rows


def _module_row(row: ModuleRow, paths: list[str], reference: Probe, candidate: Probe) -> ModuleRow:
    fields = {"module": row.module, "step": row.step, "order": row.order}
    values: dict[str, float] = {}
    if paths:
        x, y = (joined(probe.grads, paths) for probe in (reference, candidate))
        gradient = difference(x, y)
        values |= {
            "gradient_error": gradient.error,
            "gradient_cosine": gradient.cosine,
            "gradient_norm": gradient.norm,
            "underflow": _underflow(x, y),
        }
    output, other = reference.outputs.get(row.module), candidate.outputs.get(row.module)
    if output is not None and other is not None and output.shape == other.shape:
        activation = difference(output, other)
        values |= {
            "activation_error": activation.error,
            "activation_cosine": activation.cosine,
            "activation_amax": float(np.max(np.abs(output), initial=0.0)),
            "activation_rms": float(np.sqrt(np.mean(np.square(output, dtype=np.float64)))),
        }
    return ModuleRow(**fields, **values)  # type: ignore[arg-type]
