"""Gradients and activations of a step on given parameters, and their differences.

A module is a name scope of the forward pass. Its output is the result of the last operation in its
scope that an operation outside of the scope reads in the forward pass. Modules in jitted functions,
rematerialized regions, loops, branches and `shard_map` are included:

- in a scan, the outputs of all iterations are joined; in a while loop, those of the last one count;
- a branch that was not taken has no outputs, and neither has a loop without iterations;
- in a `shard_map`, the outputs of all devices are joined.

Modules in other operations that contain functions, such as `lax.custom_linear_solve` and callbacks,
have no outputs.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._core import Array, PyTree
from jaxmp._tools.report import _section
from jaxmp._tools.validate._pure import Leaves, PureRun, leaves_of
from jaxmp._tools.validate._rows import CandidateResult, GradientRow, ModuleRow, Pattern
from jaxmp._tools.validate._run import check_grads
from jaxmp._tools.validate._train import global_norm


class Output(NamedTuple):
    """Output of a module.

    Args:
      values: at most 65,536 elements as a float32 vector; zeros if the module did not run.
      is_computed: boolean scalar; False in a branch that was not taken.
    """

    values: Array
    is_computed: Array


# Module -> output. JAX does not sort the keys of this type.
Outputs = OrderedDict[str, Output]


def with_outputs(
    fn: Callable[..., PyTree], paths: Sequence[_programs.Path] = ()
) -> Callable[..., tuple[PyTree, Outputs]]:
    """Transforms `fn` so that it also returns the outputs of its modules.

    Args:
      fn: a function of pytrees of arrays that computes gradients.
      paths: those of the first arrays, by which networks with the same modules are named.

    Returns:
      A function of the same arguments that returns `(result, outputs)`. `outputs` is a dict from a
      module to its `Output`, in the order of the forward pass.

    Example:
      >>> def loss(w, x):
      ...     with jax.named_scope("dense"):
      ...         y = x @ w
      ...     return y.sum()
      >>> _, outputs = with_outputs(jax.grad(loss))(jnp.ones((2, 3)), jnp.ones((4, 2)))
      >>> {module: output.values.shape for module, output in outputs.items()}
      {'dense': (12,)}
    """

    def observed(*args: PyTree) -> tuple[PyTree, Outputs]:
        closed, shape = _programs.record(fn, *args)
        observer, leaves = _Outputs(), jax.tree.leaves(args)
        named = [*paths, *[()] * (len(leaves) - len(paths))]
        name_of = lambda number, length: "/".join(named[number][:length])
        observer.networks = _programs.networks_of(closed, named, name_of) if paths else {}
        results = observer.run(closed, leaves)
        outputs: Outputs = OrderedDict()
        modules = _programs.modules_of(key.path for key in observer.side)
        for (key, new), module in zip(observer.side.items(), modules, strict=True):
            name = "/".join(filter(None, (key.network, module)))
            # Moves the module to its position in the forward pass.
            outputs[name] = _last(outputs.pop(name, new), new)
        return jax.tree.unflatten(jax.tree.structure(shape), results), outputs

    return observed


class _Outputs(_programs.Observer):
    """Observer that samples the outputs of modules."""

    consequence = "the outputs of the modules inside of it are not compared"
    only_outputs = True

    def measure(self, x: Array, *_: Any) -> Output:
        return Output(_core.sampled(x), jnp.array(True))

    def joined(self, value: Output) -> Output:
        return Output(_core.sampled(value.values), jnp.any(value.is_computed))


def _last(old: Output, new: Output) -> Output:
    """Returns the output of a module that was computed last, such as that of one branch."""
    if old is new or old.values.shape != new.values.shape:
        return new
    values = jnp.where(new.is_computed, new.values, old.values)
    return Output(values, old.is_computed | new.is_computed)


# ---------------------------------------------------------------------------
# Probes
# ---------------------------------------------------------------------------


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


def make_probe(run: PureRun) -> Callable[[PyTree, PyTree], Probe]:
    """Returns a function of (arrays, batch) that measures one step, compiled once.

    Args:
      run: the run.
    """

    def measure(arrays: PyTree, batch: PyTree) -> PyTree:
        (new, result), outputs = with_outputs(run.step, run.paths)(arrays, batch)
        before, after = run.params(arrays), run.params(new)
        update = jax.tree.map(_difference, after, before)
        state, other = run.state(arrays), run.state(new)
        state = {path: leaf for path, leaf in state.items() if not _core.is_key(leaf)}
        changes = {path: _difference(other[path], leaf) for path, leaf in state.items()}
        numbers = {"stalled": _stalled(before, after, result.grads), "update": global_norm(update)}
        samples = {
            "updates": leaves_of(update, _core.sampled),
            "changes": jax.tree.map(_core.sampled, changes),
            "params": leaves_of(before, _core.sampled),
        }
        return result, outputs, numbers, samples

    compiled = jax.jit(measure)

    def probe(arrays: PyTree, batch: PyTree) -> Probe:
        result, outputs, numbers, samples = jax.device_get(compiled(arrays, batch))
        return Probe(
            loss=float(result.loss),
            grads=leaves_of(result.grads),
            outputs={
                module: output.values for module, output in outputs.items() if output.is_computed
            },
            dtypes={path: str(leaf.dtype) for path, leaf in run.state(arrays).items()},
            **{name: float(number) for name, number in numbers.items()},
            **samples,
        )

    return probe


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


def _difference(x: Array, y: Array) -> Array:
    """Returns the difference of leaves in FP32 as they are stored."""
    # XLA may omit their roundings before a conversion.
    stored = lambda z: _programs.rounded_to(z.astype(jnp.float32), z.dtype)
    return stored(x) - stored(y)


# ---------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------


def with_step(
    result: CandidateResult, step: int, reference: Probe, candidate: Probe
) -> CandidateResult:
    """Returns the result of a candidate with its differences from the reference at a step."""
    modules = (*result.modules, *module_rows(step, reference, candidate))
    result = dataclasses.replace(result, modules=modules)
    if not (reference.grads and candidate.grads):
        return result
    row = gradient_row(step, reference, candidate)
    return dataclasses.replace(
        result,
        gradients=(*result.gradients, row),
        patterns=(*result.patterns, *find_patterns(row, reference, candidate)),
    )


def gradient_row(step: int, reference: Probe, candidate: Probe) -> GradientRow:
    """Returns the difference of the gradients of all parameters at one step."""
    x, y = (joined(probe.grads, reference.grads) for probe in (reference, candidate))
    updates = (joined(probe.updates, reference.updates) for probe in (reference, candidate))
    return GradientRow(
        step=step,
        **difference(x, y)._asdict(),
        underflow=_underflow(x, y),
        nonfinite=float(np.mean(~np.isfinite(y))) if y.size else 0.0,
        stalled=candidate.stalled,
        reference_stalled=reference.stalled,
        update_ratio=candidate.update / reference.update if reference.update else float("nan"),
        loss_error=abs(candidate.loss - reference.loss) / max(abs(reference.loss), 1e-30),
        loss=reference.loss,
        update_error=difference(*updates).error,
    )


def _module_of(path: str) -> str:
    """Returns the module of a parameter."""
    return path.rpartition(":")[0]


def _underflow(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Returns the share of the reference's nonzero elements that are zero in the candidate."""
    nonzero = reference != 0
    return float(np.mean(candidate[nonzero] == 0)) if nonzero.any() else 0.0


def module_rows(step: int, reference: Probe, candidate: Probe) -> list[ModuleRow]:
    """Returns the differences of each module's gradients and output, in forward order."""
    order = {module: position for position, module in enumerate(reference.outputs)}
    own = _section.grouped(reference.grads, _module_of)
    rows = []
    for module in dict.fromkeys([*order, *own]):
        errors: dict[str, float] = {}
        if module in own:
            x, y = (joined(probe.grads, own[module]) for probe in (reference, candidate))
            errors |= {"gradient_error": difference(x, y).error, "underflow": _underflow(x, y)}
        output, other = (probe.outputs.get(module) for probe in (reference, candidate))
        if output is not None and other is not None and output.shape == other.shape:
            errors["activation_error"] = difference(output, other).error
        rows.append(ModuleRow(module=module, step=step, order=order.get(module, -1), **errors))
    return rows


# ---------------------------------------------------------------------------
# Forms of differences
# ---------------------------------------------------------------------------


# Error of an array that a form must leave unexplained at most, relative to what it explains.
_REST = 0.1
# Differences of updates below this are those of a healthy optimizer with its own state.
_CHANGED = 0.05
# Equal magnitudes, up to rounding; the smallest number and share of elements that are clipped.
_SAME, _CLIPPED, _CLIPPED_SHARE = 1e-3, 8, 0.01
# Share of the elements of a leaf that no longer change, if it is stored in fewer bits.
_STALLED = 0.25
# Part of a gradient's norm in a module whose gradient is zero.
_FROZEN = 1e-3
_SUBJECTS = {"gradient": "the gradients are", "update": "gradients agree, and the updates are"}
_REASONS = {"gradient": "", "update": ", as with another learning rate"}


def find_patterns(row: GradientRow, reference: Probe, candidate: Probe) -> Iterator[Pattern]:
    """Yields the forms of the differences at one step.

    Args:
      row: comparison of the gradients.
      reference: measurements of the reference.
      candidate: measurements of the candidate.
    """
    if row.nonfinite:
        return
    grads = [joined(probe.grads, reference.grads) for probe in (reference, candidate)]
    before, after = (joined(each.updates, reference.updates) for each in (reference, candidate))
    if row.error > _CHANGED:
        yield from _common(row.step, "gradient", *grads)
        yield from _frozen(row, reference.grads, candidate.grads)
    if not after.any():
        return  # a skipped step changes nothing
    if max(_CHANGED, 2 * row.error) < row.update_error < np.inf:
        yield from _common(row.step, "update", before, after)
        yield from _decayed(row, before, after, joined(candidate.params, reference.updates))
    # Moments and averages of parameters that do not change do not change, either.
    fixed = [path.replace(":", "/") for path, leaf in candidate.updates.items() if not leaf.any()]
    changes = reference.changes.items()
    moving = {path: change for path, change in changes if not path.endswith(tuple(fixed))}
    yield from _unchanging(row, moving, candidate.changes, candidate.dtypes)


def joined(leaves: Leaves, paths: Iterable[str]) -> np.ndarray:
    """Returns the elements of some leaves as one FP64 vector."""
    return np.concatenate([np.zeros(0), *(leaves[path].ravel() for path in paths)])


def _common(step: int, stage: str, x: np.ndarray, y: np.ndarray) -> Iterator[Pattern]:
    """Finds a factor that all elements have in common, and elements that are clipped."""
    factor = float(x @ y / (x @ x)) if x.any() else 0.0
    error = difference(x, y).error
    if y.any() and difference(factor * x, y).error < _REST * min(abs(factor - 1), 1):
        text = f"{_SUBJECTS[stage]} {factor:.2g} times as large as in the reference, in the same "
        text += f"direction{_REASONS[stage]}"
        id_ = f"{stage}_factor"
        yield Pattern(step=step, id=id_, text=text, error=min(error, 1.0), factor=factor)
        return
    top = float(np.max(np.abs(y), initial=0.0))
    is_clipped = (np.abs(y) >= (1 - _SAME) * top) & (np.abs(x) > (1 + _CHANGED) * top)
    share = float(np.mean(is_clipped)) if y.size else 0.0
    rest = difference(x[~is_clipped], y[~is_clipped]).error if not is_clipped.all() else 0.0
    if top and is_clipped.sum() >= _CLIPPED and share >= _CLIPPED_SHARE and rest < _REST:
        text = f"{100 * share:.3g} % of the elements of the {stage} are clipped to {top:.3g}"
        yield Pattern(step=step, id="clipping", text=text, error=min(error, 1.0))


def _frozen(row: GradientRow, reference: Leaves, candidate: Leaves) -> Iterator[Pattern]:
    """Finds modules whose gradient is zero, unless that of all modules is."""
    modules = _section.grouped(reference, _module_of)
    names = [
        _section.module_text(module)
        for module, paths in modules.items()
        if not joined(candidate, paths).any()
        and np.linalg.norm(joined(reference, paths)) > _FROZEN * row.norm
    ]
    if 0 < len(names) < len(modules):
        text = f"the gradient of {', '.join(names)} is zero"
        yield Pattern(step=row.step, id="zero_gradient", text=text, error=1.0)


def _decayed(
    row: GradientRow, x: np.ndarray, y: np.ndarray, params: np.ndarray
) -> Iterator[Pattern]:
    """Finds an update that differs by a multiple of the parameters."""
    factor = float((y - x) @ params / (params @ params)) if params.any() else 0.0
    if factor and difference(factor * params, y - x).error < 2 * _REST:
        text = f"the update differs by {factor:.2g} times the parameters, as with another weight "
        text += "decay"
        error = min(row.update_error, 1.0)
        yield Pattern(step=row.step, id="weight_decay", text=text, error=error)


def _unchanging(
    row: GradientRow, reference: Leaves, candidate: Leaves, dtypes: Mapping[str, str]
) -> Iterator[Pattern]:
    """Finds the leaf of the state of which most elements do not change, as in the reference."""
    shares: dict[str, float] = {}
    for path, change in reference.items():
        other, moves = candidate.get(path), change != 0
        if other is not None and other.shape == change.shape and moves.any():
            shares[path] = float(np.mean(other[moves] == 0))
    limit = lambda path: _STALLED if dtypes[path] in ("bfloat16", "float16") else 1.0
    shares = {path: share for path, share in shares.items() if share >= limit(path)}
    if shares:
        path = max(shares, key=lambda key: (shares[key], candidate[key].size))
        part = "" if shares[path] == 1 else f" in {100 * shares[path]:.3g} % of its elements"
        text = f"{path!r} ({dtypes[path]}) does not change{part}, as it does in the reference"
        error = min(shares[path] + row.update_error / 2, 1.5)
        yield Pattern(step=row.step, id="state", text=text, error=error)


# ---------------------------------------------------------------------------
# Differences of arrays
# ---------------------------------------------------------------------------


class Difference(NamedTuple):
    """Difference of two arrays: relative error, cosine and norm of the reference."""

    error: float
    cosine: float
    norm: float


def difference(reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """Returns |candidate - reference| / |reference|, their cosine, and |reference|, in FP64.

    Example:
      >>> difference(np.array([3.0, 4.0]), np.array([3.0, 4.5])).error
      0.1
    """
    x, y = (np.asarray(a, np.float64).ravel() for a in (reference, candidate))
    norm = float(np.linalg.norm(x))
    if not np.isfinite(y).all():
        return Difference(float("inf"), float("nan"), norm)
    distance, other = float(np.linalg.norm(y - x)), float(np.linalg.norm(y))
    if norm == 0:
        return Difference(0.0 if distance == 0 else float("inf"), float(other == 0), norm)
    cosine = float(x @ y / (norm * other)) if other else 0.0
    return Difference(distance / norm, min(cosine, 1.0), norm)
