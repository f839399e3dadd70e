"""Adapter from a `TrainingRun` to functions of arrays, for pytree states and NNX objects."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxmp import _core
from jaxmp._core import Array, PyTree, _compat
from jaxmp._flax import _nnx_optimizer
from jaxmp._tools.validate._run import TrainingRun, check_run, check_state
from jaxmp.errors import JaxmpError, ValidationError
from jaxmp.optim import _find, _skip

# Path of a parameter, such as "block_0/dense:kernel" -> values on the host.
Leaves = Mapping[str, np.ndarray]


class StepResult(NamedTuple):
    """Result of a training step: the loss, and the gradients if the step returns them."""

    loss: Array
    grads: PyTree | None


class PureRun(NamedTuple):
    """Training run whose state is a pytree of arrays. All functions can be traced.

    Args:
      arrays: the initial state.
      step: (arrays, batch) -> (arrays, StepResult).
      evaluate: arrays -> metrics.
      params: arrays -> parameters, with FP32 masters where there are any.
      with_params: (arrays, parameters by path) -> arrays, with the parameters cast to the storage
        dtypes.
      opt_state: arrays -> state of the optimizer, with its loss scale and skipped steps.
      state: arrays -> all other leaves by path, such as statistics, averages and moments.
      paths: path of each array of the state, and of each parameter in the tree of parameters.
      audited: the function to audit, and the objects that precede the batch in its arguments.
      first: the first batch, with JAX arrays as leaves; `as_pure` adds it and `batches`.
      batches: all batches; they can be read once.
    """

    arrays: PyTree
    step: Callable[[PyTree, PyTree], tuple[PyTree, StepResult]]
    evaluate: Callable[[PyTree], dict[str, Array]]
    params: Callable[[PyTree], PyTree]
    with_params: Callable[[PyTree, Leaves], PyTree]
    opt_state: Callable[[PyTree], PyTree]
    state: Callable[[PyTree], dict[str, Array]]
    paths: list[_core.Path]
    audited: tuple[Any, ...]
    first: PyTree = None
    batches: Iterator[PyTree] = iter(())


def as_pure(run: object, name: str, steps: int) -> PureRun:
    """Converts the result of `make_run`.

    Args:
      run: what `make_run` returned.
      name: the call, for error messages.
      steps: number of training steps.

    Raises:
      ValidationError: if it is not a `TrainingRun`, or is known to have fewer batches than steps.
    """
    run = check_run(run, name)
    batches = iter(run.batches)
    try:
        first = next(batches)
    except StopIteration:
        raise ValidationError(
            f"{name} returned no batches. Make a new list or generator of batches in each call, "
            "such as batches=make_batches(seed)."
        ) from None
    if isinstance(run.batches, Sized) and len(run.batches) < steps:
        raise too_few_batches(name, len(run.batches), steps)
    nodes = run.state if isinstance(run.state, tuple) else ()
    is_nnx = any(isinstance(node, nnx.Module) for node in nodes)
    pure = _pure_nnx(run, nodes) if is_nnx else _pure_tree(run)
    return pure._replace(first=as_arrays(first), batches=itertools.chain([first], batches))


def too_few_batches(name: str, count: int, steps: int) -> ValidationError:
    """Returns the error for a run with fewer batches than steps."""
    return ValidationError(
        f"{name} has {count} batches, and validate trains for {steps} steps. Pass "
        f"steps={count}, or more batches."
    )


def as_arrays(batch: PyTree) -> PyTree:
    """Returns a batch with JAX arrays as leaves."""
    return jax.tree.map(jnp.asarray, batch)


def _result(metrics: PyTree) -> StepResult:
    """Returns loss and gradients from the metrics of a step.

    Raises:
      ValidationError: if there is no scalar loss.
    """
    values = metrics if isinstance(metrics, Mapping) else {"loss": metrics}
    if "loss" not in values:
        raise ValidationError(
            f"The step returned the metrics {sorted(values)} without 'loss'. Return:\n"
            '    return state, {"loss": loss, "grads": grads}'
        )
    return StepResult(_scalar(values["loss"], "step", "loss"), values.get("grads"))


def _metrics(values: PyTree) -> dict[str, Array]:
    """Returns the metrics of an evaluation as FP32 scalars by name.

    Raises:
      ValidationError: if there is none, or it is not a scalar.
    """
    named = values if isinstance(values, Mapping) else {"loss": values}
    if not named:
        raise ValidationError(
            'evaluate returned no metrics. Return the held-out loss, or {"loss": loss}.'
        )
    return {str(name): _scalar(value, "evaluate", str(name)) for name, value in named.items()}


def _scalar(value: object, function: str, name: str) -> Array:
    """Returns a metric as an FP32 scalar.

    Raises:
      ValidationError: naming the function that returned it.
    """
    is_array = isinstance(value, (int, float, np.generic, np.ndarray, jax.Array))
    if is_array and jnp.shape(value) == ():
        return jnp.asarray(value, jnp.float32)
    actual = f"of shape {jnp.shape(value)}" if is_array else f"= {value!r}"
    remedy = "Return its mean: jnp.mean(" if is_array else "Return a number, such as jnp.mean("
    raise ValidationError(
        f"{function} returned the metric {name!r} {actual}, which is not a scalar. {remedy}{name})."
    )


def loss_scale_of(opt_state: PyTree) -> Array:
    """Returns the loss scale of an optimizer as a float32 scalar; 1 without one."""
    scales = [node.scale_value for _, node in _find.find_loss_scales(opt_state)]
    return jnp.asarray(_compat.plain_array(scales[0]) if scales else 1, jnp.float32)


def skipped_of(opt_state: PyTree) -> Array:
    """Returns the number of skipped steps of an optimizer as an int32 scalar."""
    counts = [node.total for _, node in _find.find(opt_state, _skip.SkipStats)]
    return jnp.asarray(_compat.plain_array(counts[0]) if counts else 0, jnp.int32)


# ---------------------------------------------------------------------------
# Pytree states
# ---------------------------------------------------------------------------


def _pure_tree(run: TrainingRun) -> PureRun:
    state = run.state
    if _stored(state) is None:
        raise ValidationError(
            f"The state of type {type(state).__name__} has no parameters that validate can read. "
            "Use jaxmp.TrainState, a dict with the key 'params', a dataclass or NamedTuple with a "
            "field 'params', or a tuple or dict with one train state, such as (state, ema)."
        )
    functions = ("/".join(path) for path, x in _core.leaves_with_path(state) if callable(x))
    if name := next(functions, ""):
        raise ValidationError(
            f"The leaf {name} of the state is a function. Keep only arrays in the state. With "
            "Equinox, write params, static = eqx.partition(model, eqx.is_array) before the run, "
            "and model = eqx.combine(params, static) in the step."
        )

    # The structure contains functions, such as `tx`, which differ between seeds.
    leaves, structure = jax.tree.flatten(state)
    opened, initial = structure.unflatten, list(map(_strong, leaves))
    # The parameters of a state whose leaves are their own positions.
    stored = _stored(opened(range(len(leaves))))
    paths = {n: path for path, n in _core.leaves_with_path(_inner(stored))}
    of_collections = set(jax.tree.leaves(stored))

    def step(arrays: PyTree, batch: PyTree) -> tuple[PyTree, StepResult]:
        out = run.step(opened(arrays), batch)
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValidationError(
                f"step(state, batch) returned {type(out).__name__} instead of "
                '(new_state, metrics). Return: return state, {"loss": loss, "grads": grads}'
            )
        loss, grads = _result(out[1])
        check_state(opened(arrays), out[0])
        return list(map(_strong, jax.tree.leaves(out[0]))), StepResult(loss, _inner(grads))

    def with_params(arrays: PyTree, params: Leaves) -> PyTree:
        own = {n: params[_core.parameter_path(path)] for n, path in paths.items()}
        return [jnp.asarray(own[n], x.dtype) if n in own else x for n, x in enumerate(arrays)]

    def state_of(arrays: PyTree) -> dict[str, Array]:
        leaves = enumerate(_core.leaves_with_path(opened(arrays)))
        return {"/".join(path): x for n, (path, x) in leaves if n not in of_collections}

    return PureRun(
        arrays=initial,
        step=step,
        evaluate=lambda arrays: _metrics(run.evaluate(opened(arrays))),
        params=lambda arrays: _full_params(opened(arrays)),
        with_params=with_params,
        opt_state=opened,
        state=state_of,
        paths=[paths.get(n, path) for n, (path, _) in enumerate(_core.leaves_with_path(state))],
        audited=(run.step, state),
    )


def _strong(leaf: PyTree) -> PyTree:
    """Returns an array that is not weakly typed, as compiled steps require."""
    array = jnp.asarray(leaf)
    return lax.convert_element_type(array, array.dtype)


def _is_train_state(node: object) -> bool:
    return _core.has_fields(node, "params", "opt_state")


def _owner(state: PyTree) -> PyTree:
    """Returns the only train state in a tuple or dict, such as one with averages beside it."""
    if isinstance(state, Mapping) and _core.PARAMS in state:
        return state
    nodes = jax.tree.leaves(state, is_leaf=_is_train_state)
    owners = [node for node in nodes if _is_train_state(node)]
    return owners[0] if len(owners) == 1 else state


def _stored(state: PyTree) -> PyTree | None:
    """Returns the tree of parameters of a state; None if there is none."""
    owner = _owner(state)
    if isinstance(owner, Mapping):
        return owner.get(_core.PARAMS)
    return getattr(owner, _core.PARAMS, None)


def _inner(tree: PyTree) -> PyTree:
    """Returns the parameters of a dict of Flax collections; any other tree unchanged."""
    return tree[_core.PARAMS] if _core.has_collections(tree) else tree


def _full_params(state: PyTree) -> PyTree:
    owner = _owner(state)
    if _is_train_state(owner):
        with contextlib.suppress(JaxmpError):
            return _inner(_find.get_master_params(owner))
    return _inner(_stored(state))


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


def _pure_nnx(run: TrainingRun, nodes: tuple[Any, ...]) -> PureRun:
    graphdef, state = nnx.split(nodes)
    arrays = _core.owned(nnx.as_pure(state))
    number = _number_of_model(nodes)

    def objects(arrays: PyTree) -> tuple[Any, ...]:
        return nnx.merge(graphdef, arrays)

    def step(arrays: PyTree, batch: PyTree) -> tuple[PyTree, StepResult]:
        live = objects(arrays)
        result = _result(run.step(*live, batch))
        new_graphdef, state = nnx.split(live)
        if new_graphdef != graphdef:
            raise ValidationError(
                "The step adds, removes or changes attributes of its NNX objects, such as a sown "
                "nnx.Intermediate. Remove them at the end of the step: "
                "nnx.pop(model, nnx.Intermediate)."
            )
        new = nnx.as_pure(state)
        check_state(arrays, new)
        grads = result.grads
        grads = None if grads is None else nnx.as_pure(nnx.state(grads, nnx.Param))
        return new, result._replace(grads=grads)

    def with_params(arrays: PyTree, params: Leaves) -> PyTree:
        live = objects(arrays)
        new = lambda path, x: jnp.asarray(params[_core.parameter_path(path)], x.dtype)
        stored = nnx.as_pure(nnx.state(live[number], nnx.Param))
        nnx.update(live[number], _core.map_with_path(new, stored))
        return nnx.as_pure(nnx.split(live)[1])

    titles = [f"{type(node).__name__}[{index}]" for index, node in enumerate(nodes)]

    def path_of(index: str, *names: str) -> _core.Path:
        return names if int(index) == number else (titles[int(index)], *names)

    def opt_states(arrays: PyTree) -> list[PyTree]:
        optimizers = (node for node in objects(arrays) if _core.has_fields(node, "opt_state"))
        return [nnx.as_pure(node.opt_state) for node in optimizers]

    def params(arrays: PyTree) -> PyTree:
        stored = nnx.as_pure(nnx.state(objects(arrays)[number], nnx.Param))
        states = opt_states(arrays)
        return _find.replace_by_masters(stored, states[0]) if states else stored

    def state_of(arrays: PyTree) -> dict[str, Array]:
        trees = {}
        for index, node in enumerate(objects(arrays)):
            kinds = (nnx.Not(nnx.Param),) if index == number else ()
            is_optimizer = _core.has_fields(node, "opt_state")
            values = node.opt_state if is_optimizer else nnx.state(node, *kinds)
            trees[titles[index]] = nnx.as_pure(values)
        return {"/".join(path): leaf for path, leaf in _core.leaves_with_path(trees)}

    return PureRun(
        arrays=arrays,
        step=step,
        evaluate=lambda arrays: _metrics(run.evaluate(*objects(arrays))),
        params=params,
        with_params=with_params,
        opt_state=opt_states,
        state=state_of,
        paths=[path_of(*path) for path, _ in _core.leaves_with_path(arrays)],
        audited=(run.step, *nodes),
    )


def _number_of_model(nodes: tuple[Any, ...]) -> int:
    """Returns the index of the model of an optimizer; otherwise of the first module."""
    modules = [i for i, node in enumerate(nodes) if isinstance(node, nnx.Module)]
    trained = [_nnx_optimizer.trained_model(node) for node in nodes]
    return next((i for i in modules if any(nodes[i] is m for m in trained)), modules[0])


# ---------------------------------------------------------------------------
# Identity of runs
# ---------------------------------------------------------------------------


def checksum(tree: PyTree, start: int = 0) -> int:
    """Returns a CRC-32 of all arrays of a tree, in their order."""
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(jax.random.key_data(leaf) if _core.is_key(leaf) else leaf)
        start = zlib.crc32(np.ascontiguousarray(array).tobytes(), start)
    return start


def leaves_of(tree: PyTree, convert: Callable[[Array], Any] = np.asarray) -> dict[str, Any]:
    """Returns the leaves of a tree of parameters by their paths, by default on the host."""
    leaves = _core.leaves_with_path(tree)
    return {_core.parameter_path(path): convert(leaf) for path, leaf in leaves}


def check_same_params(reference: Leaves, params: PyTree, name: str, seed: int) -> None:
    """Checks that the initial parameters are those of the reference, up to their storage dtype.

    Args:
      reference: parameters of the reference by path.
      params: those of a candidate.
      name: the candidate.
      seed: the seed.

    Raises:
      ValidationError: naming the first parameter that differs.
    """
    actual = leaves_of(params)
    for path in sorted(actual.keys() ^ reference.keys()):
        raise ValidationError(
            f"{name!r} has other parameters than the reference for seed {seed}: only "
            f"{name if path in actual else 'the reference'} has {path!r}. make_run has to return "
            "the same model for every recipe."
        )
    for path, leaf in actual.items():
        if np.asarray(jnp.asarray(reference[path], leaf.dtype)).tobytes() != leaf.tobytes():
            raise ValidationError(
                f"The initial parameter {path!r} of {name!r} differs from the reference for seed "
                f"{seed}. Initialize the parameters in FP32 from the seed alone, such as "
                "model.init(jax.random.key(seed), x), before casting them."
            )
