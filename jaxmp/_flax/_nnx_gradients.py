"""Gradients of functions of Flax NNX objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp import _core
from jaxmp._core import Array, PyTree
from jaxmp._flax._nnx_layers import OverwriteWithGradient, trained
from jaxmp._flax._nnx_writes import (
    Slot,
    Write,
    by_position,
    is_ref,
    put_objects,
    ref_indices,
    same,
    take_objects,
)
from jaxmp._flax._shardings import constrain_variable
from jaxmp._gradients import _dynamic_loss_scale, _evaluate, _value_and_grad
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _overwritten

# The tag of the update context that maps objects inside the gradient to those outside.
_TAG = "jaxmp"


def value_and_grad(
    fn: Callable[..., Any] | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: _dynamic_loss_scale.LossScaleLike = None,
    wrt: Filter = nnx.Param,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function that computes the FP32 loss and gradients of a function of Flax objects.

    It corresponds to `flax.nnx.value_and_grad`, for computations in 16 bits. Flax objects (modules,
    `nnx.Rngs`, metrics, Variables) can be in any argument, also inside lists, tuples and dicts.
    Values that `fn` writes to them (batch statistics, RNG counts, metrics, sown values) are written
    to the caller's objects, as in Flax, but elements of statistics that are not finite keep their
    old values.

    Args:
      fn: returns a scalar loss, or another result that `jaxmp.value_and_grad` allows. None: returns
        a decorator: `@value_and_grad(has_aux=True)`.
      argnums: the arguments to differentiate: numbers, or `nnx.DiffState(number, filter)`.
      has_aux: `fn` returns `(loss, aux)`; `aux` can contain Flax objects.
      loss_scale: a loss scale, a number, or None.
      wrt: filter of the Variables to differentiate. The state of delayed scaling
        (`OverwriteWithGradient`) is always differentiated.
      **options: `weighted`, `microbatches`, `batch_argnums`, `rng_argnums`, `axis_name`,
        `interleave`, `accumulate_dtype` and `reduce_dtype` of `jaxmp.value_and_grad`. Each
        microbatch receives the state of all Flax objects after the previous one, including RNG
        counts, but the original parameters. Sown values are stacked, like auxiliary data.

    Returns:
      A function of the same arguments that returns `(loss, grads)`, or `((loss, aux), grads)`.
      `grads` is a tuple if `argnums` is one. It contains an `nnx.State` for each module, in float32
      for 16-bit parameters. It includes the new values of `OverwriteWithGradient`, if the model has
      any: `Optimizer.update` assigns them, and `nnx.state(grads, nnx.Param)` excludes them. Without
      an `Optimizer`, assign them with `nnx.update(model, nnx.state(grads, OverwriteWithGradient))`.

    Raises:
      JaxmpError: if `fn` is a method of a module, if a Variable is both in an argument to
        differentiate and in another one, or if `jaxmp.value_and_grad` refuses an argument.

    Example:
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss, grads = value_and_grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> float(grads["bias"][...][0])
      4.0
    """
    options = {"loss_scale": loss_scale, **options}
    if fn is None:
        return functools.partial(
            value_and_grad, argnums=argnums, has_aux=has_aux, wrt=wrt, **options
        )
    return Gradient(fn, argnums, has_aux, trained(wrt)).function(options)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """`value_and_grad` of a function that takes Flax objects.

    fn: function with Flax objects in any arguments, also inside lists, tuples and dicts.
    argnums: argument numbers, or `nnx.DiffState`.
    has_aux: `fn` also returns auxiliary data.
    wrt: filter of the Variables to differentiate, for each number in `argnums`.
    """

    fn: Callable[..., Any]
    argnums: Any
    has_aux: bool
    wrt: Any

    def __post_init__(self) -> None:
        module = getattr(self.fn, "__self__", None)
        if isinstance(module, nnx.Module):
            name = getattr(self.fn, "__name__", "method")
            raise JaxmpError(
                f"value_and_grad was given {name!r}, a bound method of a {type(module).__name__}, "
                "whose parameters would be constants. Pass the module as an argument: "
                f"value_and_grad(lambda model, *args: model.{name}(*args))(model, ...)."
            )
        _value_and_grad.check_argnums(self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the arguments to differentiate."""
        numbers = _core.as_tuple(self.argnums)
        return tuple(n.argnum if isinstance(n, nnx.DiffState) else n for n in numbers)

    def filters(self, count: int) -> dict[int, Any]:
        """Returns the filter of the Variables of each argument to differentiate."""
        numbers = _core.as_tuple(self.argnums)
        filters = (n.filter if isinstance(n, nnx.DiffState) else self.wrt for n in numbers)
        argnums = _value_and_grad.count_argnums("argnums", self.numbers, count, 1)
        return dict(zip(argnums, filters, strict=True))

    def function(
        self,
        options: dict[str, Any],
        prepare: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options,
        record: Callable[[list[Write]], None] = lambda writes: None,
    ) -> Callable[..., Any]:
        """Returns the function that computes the loss and the gradients.

        Args:
          options: keyword arguments of `jaxmp.value_and_grad`.
          prepare: returns the options of a call.
          record: is called with all writes of `fn` to Flax objects.
        """
        _value_and_grad.value_and_grad(self.fn, **options)  # Checks them before the first call.

        @functools.wraps(self.fn, updated=())
        def value_and_grad_fn(*args: PyTree, **kwargs: PyTree) -> PyTree:
            args, kwargs = by_position(self.fn, args, kwargs)
            with nnx.update_context(_TAG):
                out, writes = _Call(self, args, kwargs, prepare(options)).run()
            for write in writes:
                write.keep_finite()
            record(writes)
            return out

        return value_and_grad_fn


class _NewLeaf(NamedTuple):
    """Leaf of the objects after the call.

    before: index of the same leaf before the call; None for a new one.
    is_changed: the function wrote it, or added it.
    structure: of the leaf.
    """

    before: int | None
    is_changed: bool
    structure: Any


class _Call:
    """One call of a `Gradient`.

    Objects are split into arrays, and merged again inside and outside of the differentiated
    function.
    """

    def __init__(
        self,
        gradient: Gradient,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: dict[str, Any],
    ) -> None:
        self.gradient = gradient
        self.filters = gradient.filters(len(args))
        self.microbatches = options.get("microbatches", 1)
        numbers = {
            name: _value_and_grad.count_argnums(name, options[name], len(args), self.microbatches)
            for name in ("batch_argnums", "rng_argnums")
            if options.get(name) is not None
        }
        self.options = {**options, **numbers}
        self.objects: list[Any] = []
        self.args: tuple[Any, ...] = tuple(take_objects(arg, self.objects) for arg in args)
        self.kwargs = take_objects(kwargs, self.objects)
        with nnx.split_context(_TAG) as context:
            self.graphdef, flat = context.flatten(tuple(self.objects))
        # The caller's Variables and arrays, each once; paths start with the index of the object.
        self.paths: tuple[Any, ...] = tuple(flat.paths)
        self.leaves: list[Any] = list(flat.leaves)
        self.values = [_value(leaf) for leaf in self.leaves]
        self._classify()

    def _classify(self) -> None:
        """Sorts leaves into differentiated, overwritten, carried between microbatches, constant."""
        owner = {k: i for i, arg in enumerate(self.args) for k in ref_indices(arg)}
        predicates = {i: nnx.filterlib.to_predicate(f) for i, f in self.filters.items()}

        def is_differentiated(path: tuple[Any, ...], leaf: nnx.Variable[Any] | Array) -> bool:
            predicate = predicates.get(owner.get(path[0], -1))
            if predicate is None:
                return False
            # A Variable that is itself an argument is differentiated whatever its type, as in Flax.
            is_always = len(path) == 1 or isinstance(leaf, OverwriteWithGradient)
            return is_always or bool(predicate(path[1:], leaf))

        self._check_aliases(is_differentiated)
        self.differentiated: list[list[int]] = [[] for _ in self.objects]
        self.overwritten: list[list[int]] = [[] for _ in self.objects]
        self.carried: dict[int, None] = {}
        for i, (path, leaf) in enumerate(zip(self.paths, self.leaves, strict=True)):
            if is_differentiated(path, leaf):
                is_state = isinstance(leaf, OverwriteWithGradient)
                group = self.overwritten if is_state else self.differentiated
                group[path[0]].append(i)
            elif self.microbatches > 1 and _is_carried(leaf):
                self.carried[i] = None

    def _check_aliases(self, is_differentiated: Callable[..., bool]) -> None:
        if len(self.objects) < 2:
            return
        seen: dict[int, tuple[bool, tuple[Any, ...]]] = {}
        for k, node in enumerate(self.objects):
            for path, leaf in nnx.iter_graph(node):
                if isinstance(leaf, nnx.Variable):
                    decision = is_differentiated((k, *path), leaf), path
                    other = seen.setdefault(id(leaf), decision)
                    if other[0] != decision[0]:
                        inside, outside = (other, decision) if other[0] else (decision, other)
                        raise JaxmpError(
                            f"The {type(leaf).__name__} at {_text(inside[1])} of an argument that "
                            f"is differentiated is also at {_text(outside[1])} of one that is not, "
                            "or that has another filter. Differentiate both: "
                            "value_and_grad(fn, argnums=(0, 1)); or pass a copy as the constant: "
                            "nnx.clone(module)."
                        )

    # Inside the differentiated function.

    def _pure_arg(self, arg: PyTree) -> PyTree:
        """Returns an argument to differentiate as a tree of arrays: the values of its Variables."""
        params = put_objects(arg, list(map(self._nested, self.differentiated)))
        indices = (k for k in ref_indices(arg) if self.overwritten[k])
        states = {str(k): self._nested(self.overwritten[k]) for k in indices}
        return {_core.PARAMS: params, _overwritten.OVERWRITE: states} if states else params

    def _nested(self, indices: list[int]) -> PyTree:
        """Returns the values of leaves of one object by their paths."""
        if indices and not self._path(indices[0]):
            return self.values[indices[0]]  # The object is a Variable.
        return nnx.as_pure(nnx.from_flat_state([(self._path(i), self.leaves[i]) for i in indices]))

    def _path(self, i: int) -> tuple[Any, ...]:
        """Returns the path of a leaf in its object."""
        return self.paths[i][1:]

    def _filled(
        self, arg: PyTree, pure: PyTree, of_object: Callable[[int, dict[int, Any]], PyTree]
    ) -> PyTree:
        """Puts the arrays of a differentiated argument into the argument.

        Args:
          arg: The argument, with a reference for each object.
          pure: Its arrays.
          of_object: Returns what stands for an object; called with the index of the object and
            its Variables by the indices of their leaves, which hold the arrays.
        """
        params, overwritten = _overwritten.split(pure)

        def fill(leaf: Any, value: PyTree) -> PyTree:
            if not is_ref(leaf):
                return value
            k = leaf.index
            states: dict[int, PyTree] = dict.fromkeys(self.differentiated[k], value)
            if overwritten is not None:
                states |= dict.fromkeys(self.overwritten[k], overwritten[str(k)])
            variables = {
                i: _renewed(self.leaves[i], functools.reduce(getitem, self._path(i), state))
                for i, state in states.items()
            }
            return of_object(k, variables)

        return jax.tree.map(fill, arg, params, is_leaf=is_ref)

    def _inner_leaves(self, pure_args: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
        """Creates Variables around the arrays with which the function is differentiated."""
        inner: list[Any] = list(map(_renewed, self.leaves, self.values))
        for i, value in zip(self.carried, carried, strict=True):
            inner[i] = _renewed(self.leaves[i], value)

        def put(_: int, variables: dict[int, Any]) -> None:
            for i, variable in variables.items():
                inner[i] = constrain_variable(variable)

        for i in self.filters:
            self._filled(self.args[i], pure_args[i], put)
        return inner

    def _inner_args(self, pure_args: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
        return [
            self._filled(arg, pure, lambda k, _: objects[k])
            if i in self.filters
            else put_objects(pure, objects)
            for i, (arg, pure) in enumerate(zip(self.args, pure_args, strict=True))
        ]

    def _pure(
        self, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Array, tuple[list[PyTree], tuple[list[PyTree], PyTree]]]:
        """Evaluates the function on arrays; returns `(loss, (carried, (new values, aux)))`."""
        *pure_args, carried = args
        inner = self._inner_leaves(pure_args, carried)
        put = [_value(leaf) for leaf in inner]
        with nnx.merge_context(_TAG, inner=True) as context:
            objects = context.unflatten(self.graphdef, inner)
        inner_args = self._inner_args(pure_args, objects)
        out = self.gradient.fn(*inner_args, **put_objects(kwargs, objects))
        loss, aux = _evaluate.split_aux(out, self.gradient.has_aux)
        aux_objects: list[Any] = []
        aux = take_objects(aux, aux_objects)
        with nnx.split_context(_TAG) as context:
            self.new_graphdef, flat = context.flatten((objects, tuple(aux_objects)))
        known: dict[Any, int] = {
            id(leaf) if isinstance(leaf, nnx.Variable) else (0, *path): i
            for i, (path, leaf) in enumerate(zip(self.paths, inner, strict=True))
        }
        states = {index for indices in self.overwritten for index in indices}
        self.new_leaves: list[_NewLeaf] = []
        present: dict[int, Any] = {}
        values: list[Any] = []
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            i = known.get(id(leaf) if isinstance(leaf, nnx.Variable) else path)
            if i is not None:
                present[i] = leaf
            # Rematerialized functions return all Variables. FP8 states change by their gradients.
            is_changed = i is None or not (i in states or same(_value(leaf), put[i]))
            self.new_leaves.append(_NewLeaf(i, is_changed, jax.tree.structure(leaf)))
            if is_changed:
                self._check_change(path, leaf, i)
                values += [] if i in self.carried else [_value(leaf)]
        return loss, ([_value(present.get(i, inner[i])) for i in self.carried], (values, aux))

    def _check_change(
        self, path: tuple[Any, ...], leaf: nnx.Variable[Any] | Array, i: int | None
    ) -> None:
        """Raises an error for a changed or new leaf that microbatches cannot pass on."""
        microbatches = f"With microbatches={self.microbatches} the function"
        if i in self.carried and not _core.are_alike(_value(leaf), self.values[i]):
            raise JaxmpError(
                f"{microbatches} changes the shape or the dtype of {_text(path[2:])}, from "
                f"{_brief(self.values[i])} to {_brief(_value(leaf))}, so it cannot pass from one "
                "microbatch to the next. Create it with the shape and the dtype that the function "
                "writes."
            )
        is_aux = path[0] == 1 or isinstance(leaf, nnx.Intermediate)
        if i is None and self.microbatches > 1 and not is_aux:
            raise JaxmpError(
                f"{microbatches} adds a {type(leaf).__name__} at {_text(path[2:])}, which cannot "
                "pass from one microbatch to the next. Create it before the first step, or return "
                "it as auxiliary data (has_aux=True)."
            )

    # Outside the differentiated function.

    def run(self) -> tuple[Any, list[Write]]:
        run = _value_and_grad.value_and_grad(
            self._pure,
            argnums=tuple(self.filters),
            mutable_argnum=len(self.args),
            **self.options,
        )
        carried = [self.values[i] for i in self.carried]
        args = (self._pure_arg(a) if i in self.filters else a for i, a in enumerate(self.args))
        (loss, (carried, (values, aux))), grads = run(*args, carried, **self.kwargs)
        aux_objects = self._merge_outside(carried, values)
        grads = tuple(self._grads(i, grad) for i, grad in zip(self.filters, grads, strict=True))
        if not isinstance(self.gradient.argnums, (tuple, list)):
            (grads,) = grads
        loss = (loss, put_objects(aux, aux_objects)) if self.gradient.has_aux else loss
        return (loss, grads), self._writes()

    def _merge_outside(self, carried: Sequence[PyTree], values: list[PyTree]) -> Sequence[object]:
        """Updates the objects and creates new ones; returns the objects in `aux`."""
        by_index = dict(zip(self.carried, carried, strict=True))
        new_values, leaves = iter(values), []
        for i, is_changed, structure in self.new_leaves:
            if i is not None and not is_changed:
                value = _value(self.leaves[i])
            elif i in by_index:
                value = by_index[i]
            else:
                value = next(new_values)
                # An existing Variable gets the value of the last microbatch, a new one all values.
                if i is not None and self.microbatches > 1:
                    value = jax.tree.map(lambda stacked: stacked[-1], value)
            leaves.append(structure.unflatten(jax.tree.leaves(value)))
        with nnx.merge_context(_TAG, inner=False) as context:
            _, aux_objects = context.unflatten(self.new_graphdef, leaves)
        return aux_objects

    def _grads(self, i: int, grads: PyTree) -> PyTree:
        """Returns the gradients of argument `i`, with an `nnx.State` for each module."""

        def of_object(k: int, variables: dict[int, Any]) -> PyTree:
            if isinstance(self.objects[k], nnx.Variable):
                return next(iter(variables.values()))
            return nnx.from_flat_state([(self._path(i), leaf) for i, leaf in variables.items()])

        return self._filled(self.args[i], grads, of_object)

    def _writes(self) -> list[Write]:
        writes = []
        changed = (leaf.before for leaf in self.new_leaves if leaf.is_changed)
        for i in sorted(index for index in changed if index is not None):
            slot = Slot(self.objects[self.paths[i][0]], self._path(i), self.leaves[i])
            after = slot.get()
            writes.append(Write(slot, self.values[i], after, after))
        return writes


def _value(leaf: nnx.Variable[Any] | Array) -> PyTree:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _renewed(leaf: nnx.Variable[Any] | Array, value: PyTree) -> PyTree:
    """Returns a Variable like `leaf` that belongs to the current trace; an array stays an array."""
    if not isinstance(leaf, nnx.Variable):
        return value
    return jax.tree.structure(leaf).unflatten(jax.tree.leaves(value))


def _is_carried(leaf: nnx.Variable[Any] | Array) -> bool:
    """Returns True for arrays, except sown ones, that each microbatch passes to the next."""
    is_sown, arrays = isinstance(leaf, nnx.Intermediate), jax.tree.leaves(_value(leaf))
    return not is_sown and all(hasattr(array, "dtype") for array in arrays)


def _text(path: tuple[Any, ...]) -> str:
    return repr("/".join(map(str, path)))


def _brief(value: PyTree) -> str:
    leaves = jax.tree.leaves(value)
    return ", ".join(
        f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x) for x in leaves
    )
