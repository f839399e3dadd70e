"""Makes the program that measures a training step, and runs a step again in another format."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core._compat import AnyJaxpr
from jaxmp._policies import _op_table
from jaxmp._tools.audit import _trace
from jaxmp._tools.stats import _measure, _report
from jaxmp._tools.stats._measure import clipped
from jaxmp.errors import AuditError
from jaxmp.fp8 import _operands
from jaxmp.optim import _roles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingStats:
    """Statistics of a training step: a pytree of arrays.

    Attributes:
      tensors: kind -> name -> statistics. Kinds are "parameters", "gradients", "updates",
        "activations", "operands" and "fp8_scales".
      loss_scale: the loss scale among the arguments, of which the gradients are multiples; 1
        without one.
      errors: format of `what_if` -> "gradients" or "activations" -> module -> relative error: the
        norm of the difference that the format makes, over the norm of the module's tensors.
      modules: the modules of `errors`, in the order of the forward pass (static).
      unknown: operations that contain functions, whose tensors are not measured (static).

    Example:
      >>> step = jax.grad(lambda w, x: (x @ w).sum())
      >>> stats = with_stats(step)(jnp.ones((16, 32)), jnp.ones((8, 16)))
      >>> stats.tensors["parameters"]["w"].rms.tolist()
      1.0
    """

    tensors: dict[str, dict[str, _measure.TensorStats]]
    loss_scale: _core.Array
    errors: dict[str, dict[str, dict[str, _core.Array]]] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    unknown: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def report(self) -> _report.StatsReport:
        """Returns the losses in each candidate format, and the loss scale to start with."""
        return _report.make_stats_report(self)

    def __str__(self) -> str:
        return str(self.report())


def with_stats(
    step: Callable[..., Any], *, what_if: Sequence[str] = ()
) -> Callable[..., TrainingStats]:
    """Returns a function that measures a training step instead of running it.

    The function has the arguments of the step, and returns statistics of its parameters, gradients
    and updates, of the outputs of its modules, of the operands of its matmuls, and of its FP8
    scales. It compiles a second program, so that the program of the training and its results do
    not change. Select the steps to measure yourself, and call it before the step if the step
    donates its arguments, outside of `jax.jit`::

        measure = jaxmp.with_stats(train_step)
        for number, batch in enumerate(batches):
            if number % 100 == 0:
                stats = measure(state, batch)
            state, loss = train_step(state, batch)

    Tensors inside jitted functions, loops, branches, rematerialized functions, `shard_map` and
    microbatches are included. In a loop and in a `shard_map`, they have a first axis with one
    element per iteration or device; of a while loop, the last iteration is measured.

    The rows of networks with the same modules begin with the argument that has their parameters,
    such as `generator/Dense_0:lhs`. Networks that one line calls, as in a loop, share their rows,
    and so do models of Flax NNX without a recipe.

    Args:
      step: a function of pytrees of arrays that computes gradients. It may be jitted, and may be a
        function of NNX modules, which are not changed.
      what_if: formats in which the step is run again, of "float16" and "float8", for the errors of
        the gradients and outputs of each module. In "float16", the results of operations are
        rounded, with the suggested loss scale. In "float8", the operands of the matmuls of layers
        are rounded, each with the scale of its largest magnitude, and other results to bfloat16.
        As in the recipes, heads and routers return FP32 and are not in FP8. Measure a step in FP32.
        Each format costs about as much as the step, and so does the comparison.

    Returns:
      A function that returns `TrainingStats`, a pytree; its `report()` compares formats. Arguments
      that are not arrays are static: it is traced again when they change.

    Raises:
      AuditError: if `step` is not a function; if a format is unknown; if the step, or a function
        that it calls, was jitted with `compiler_options`.

    Example:
      >>> def loss_fn(w, x):
      ...     with jax.named_scope("dense"):
      ...         return jnp.square(x @ w).mean()
      >>> stats = with_stats(jax.grad(loss_fn))(jnp.ones((16, 32)), jnp.ones((8, 16)) * 2.0**-30)
      >>> sorted(stats.tensors["operands"]), float(stats.tensors["gradients"]["w"].amax) == 2.0**-60
      (['dense:lhs', 'dense:output_grad', 'dense:rhs'], True)
    """
    _trace.check_function(step, "with_stats")
    unknown = [name for name in what_if if name not in EMULATED]
    if unknown or isinstance(what_if, str):
        raise AuditError(
            f"with_stats received what_if={what_if!r}. Pass a sequence of formats, of "
            f"{', '.join(map(repr, EMULATED))}: what_if=[{EMULATED[0]!r}]."
        )
    programs: dict[Any, _Program] = {}

    def measured(*args: Any, **kwargs: Any) -> TrainingStats:
        leaves, structure = jax.tree.flatten((args, kwargs))
        types = [jax.typeof(leaf) if _trace.is_array(leaf) else leaf for leaf in leaves]
        key = structure, tuple(x if isinstance(x, Hashable) else repr(x) for x in types)
        if key not in programs:
            pairs = zip(leaves, types, strict=True)
            shapes, names = structure.unflatten(
                leaf if isinstance(leaf, jax.Ref) else kind for leaf, kind in pairs
            )
            programs[key] = _Program(_trace.trace(step, shapes, names))
        program = programs[key]
        arrays = [_trace.value_of(leaves[n]) for n in program.traced.positions]
        stats = program.measured(arrays)
        if what_if:
            scale = (stats.report().loss_scale or stats.loss_scale) / stats.loss_scale
            runs = {name: program.sampled(arrays, name, scale) for name in ("", *what_if)}
            errors = {name: errors_of(runs[""], runs[name]) for name in what_if}
            stats = dataclasses.replace(stats, errors=errors, modules=program.modules)
        return stats

    return measured


class _Program:
    """Statistics of a traced step, as a function of the arrays among its arguments."""

    def __init__(self, traced: _trace.Traced) -> None:
        self.traced, self.names, self.roles = traced, traced.texts(), traced.roles()
        # The first key is that of all positional or all named arguments, the second the argument.
        keys = [leaf.path[1:] if leaf.path[2:] else () for leaf in traced.leaves]
        paths = list(map(_core.path_names, keys))
        name_of = lambda number, length: traced.text_of(keys[number][: length or 1])
        self.networks = _programs.networks_of(traced.closed, paths, name_of)
        # The modules of `samples` in the order of the forward pass.
        self.modules: tuple[str, ...] = ()
        # XLA must not leave out roundings.
        compiled = functools.partial(
            jax.jit, compiler_options={"xla_allow_excess_precision": False}
        )
        self.measured = compiled(self.__call__)
        self.sampled = compiled(self.samples, static_argnums=1)

    def __call__(self, arrays: list[Any]) -> TrainingStats:
        observer = self._observer(_measure.measure_tensor)
        results = observer.run(self.traced.closed, arrays)
        rows: dict[str, dict[str, _measure.TensorStats]] = {}
        counts: collections.Counter[tuple[str, str]] = collections.Counter()

        def add(kind: str, name: str, stats: _measure.TensorStats) -> None:
            counts[kind, name] += 1
            suffix = f"#{counts[kind, name]}" if counts[kind, name] > 1 else ""
            rows.setdefault(kind, {})[name + suffix] = stats

        scales = self._of_role(_roles.FP8)
        for kind, numbers in (("parameters", self._parameters()), (_programs.SCALES, scales)):
            for number in numbers:
                add(kind, self.names[number], _measure.measure_tensor(arrays[number]))
        for key, module, stats in self._by_module(observer):
            if key.kind == _programs.GRADIENTS:
                add(_programs.GRADIENTS, self._parameter(key, module), stats)
            else:
                add(key.kind, f"{module}:{key.label}" if key.label else module, stats)
        for number, new in self._updated(results):
            old = lax.convert_element_type(arrays[number], jnp.float32)
            update = lax.sub(lax.convert_element_type(new, jnp.float32), old)
            add("updates", self.names[number], _measure.measure_tensor(update))
        scale = next((arrays[number] for number in self.traced.scales()), 1.0)
        unknown = tuple(sorted(observer.unknown))
        return TrainingStats(rows, jnp.asarray(scale, jnp.float32), unknown=unknown)

    def samples(self, arrays: list[Any], name: str, scale: _core.Array) -> Samples:
        """Returns samples of the gradients and outputs of each module in a format."""
        emulation = Emulation(name, scale)
        sampler = self._observer(lambda x, *_: _core.sampled(x))
        sampler.run(*emulation.traced(self.traced.closed, arrays))
        samples: Samples = {}
        for key, module, sample in self._by_module(sampler):
            if key.kind in (_programs.ACTIVATIONS, _programs.GRADIENTS):
                samples.setdefault(key.kind, {}).setdefault(module, []).append(sample)
        # A module without outputs has its first gradient last.
        order = [
            *samples.get(_programs.ACTIVATIONS, {}),
            *reversed(samples.get(_programs.GRADIENTS, {})),
        ]
        self.modules = tuple(dict.fromkeys(order))
        return samples

    def _by_module(self, observer: _programs.Observer) -> Iterator[tuple[_programs.Key, str, Any]]:
        """Yields (key, module, measurement) of each tensor that an observer measured."""
        of_fp8, of_parameters = (
            {self.traced.arrays[n].shape for n in numbers}
            for numbers in (self._of_role(_roles.FP8), self._parameters())
        )
        modules = _programs.modules_of(key.path for key in observer.side)
        for (key, measured), module in zip(observer.side.items(), modules, strict=True):
            if key.kind != _programs.GRADIENTS or key.shape not in of_fp8 - of_parameters:
                yield key, "/".join(filter(None, (key.network, module))), measured

    def _observer(self, measure: Callable[..., Any]) -> _programs.Observer:
        """Returns an observer that distinguishes networks with the same modules."""
        observer = _programs.Observer()
        observer.measure, observer.networks = measure, self.networks
        return observer

    def _of_role(self, *roles: str) -> list[int]:
        """Returns the numbers of the floating-point arrays with one of these roles."""
        return [
            n
            for n, array in enumerate(self.traced.arrays)
            if self.roles[n] in roles and jnp.issubdtype(array.dtype, jnp.floating)
        ]

    def _parameters(self) -> list[int]:
        return self._of_role(_roles.PARAMETER, _roles.MASTER, _roles.AVERAGE, _roles.STATISTICS)

    def _parameter(self, key: _programs.Key, module: str) -> str:
        """Returns the parameter of a gradient; its module and shape if they fit several ones."""
        arrays = self.traced.arrays
        numbers = [n for n in self._of_role(_roles.PARAMETER) if arrays[n].shape == key.shape]
        is_own = re.compile(rf"{re.escape(key.network)}(\W|\Z)" if key.network else "").match
        fitting = list(filter(is_own, (self.names[n] for n in numbers)))
        parts = [part for part in module.removeprefix(key.network).split("/") if part]
        named = [n for n in fitting if all(re.search(rf"\b{re.escape(p)}\b", n) for p in parts)]
        unique = named if len(named) == 1 else fitting
        return unique[0] if len(unique) == 1 else f"{module}[{','.join(map(str, key.shape))}]"

    def _updated(self, results: list[Any]) -> list[tuple[int, Any]]:
        """Returns (number of a parameter, its new value); none without an optimizer's state."""
        traced = self.traced
        if not any(traced.in_optimizer()):
            return []
        paths = [path for path, _ in traced.results]
        new = {path[1:]: results[n] for n, path in reversed([*enumerate(paths)])}
        new |= {path: results[n] for n, path in enumerate(paths)}
        written = dict(zip(traced.written, results[len(paths) :], strict=True))
        pairs = []
        for number in self._parameters():
            leaf = traced.leaves[number]
            value = written.get(number, new.get(leaf.path[2:]))
            if value is not None and value.shape == leaf.value.shape:
                pairs.append((number, value))
        return pairs


# ---------------------------------------------------------------------------
# Emulation of formats
# ---------------------------------------------------------------------------


EMULATED = FLOAT16, FLOAT8 = "float16", "float8"
_TABLE = _op_table.OpTable()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Value:
    """Value of a variable of an emulated step.

    array: the array.
    is_wide: True if it is an FP32 result that is not rounded yet.
    """

    array: Any
    is_wide: bool = dataclasses.field(default=False, metadata={"static": True})


class Emulation(_programs.Interpreter):
    """Interpreter that computes in another format.

    The results of the operations that the op table runs in 16 bits are rounded, in modules and of
    all matmuls: to float16, or to bfloat16 for FP8. Operations that read an FP32 result, as in a
    norm, compute in FP32 until a matmul, the end of the module, or that of a loop or branch. For
    FP8, the operands of matmuls without batch axes are rounded to E4M3, and to E5M2 in the backward
    pass, each with the scale of its largest magnitude. As in the recipes, matmuls whose results are
    compared return FP32 and are not in FP8. Numbers beyond the range of a format become its largest
    number.

    Args:
      name: "float16", "float8", or "" for the step as it is.
      scale: the loss scale of the backward pass in float16.
    """

    drops_derivatives = True

    def __init__(self, name: str, scale: Any) -> None:
        super().__init__()
        self.name, self.scale = name, scale
        self._dtype = jnp.dtype(np.float16 if name == FLOAT16 else jnp.bfloat16)
        # Scopes with FP32 results, such as norms, which also sum their gradients in FP32.
        self._fp32_modules: set[_programs.Path] = set()
        # Scopes and calls of heads and routers, whose matmuls are not in FP8.
        self._compared: set[tuple[_programs.Path, Any]] = set()
        self._uses: dict[_programs.Atom, _programs.Use] = {}

    def traced(self, closed: ClosedJaxpr, arrays: list[Any]) -> tuple[ClosedJaxpr, list[Any]]:
        """Returns the emulated step as a program, and its arguments."""

        def step(scale: Any, *arrays: Any) -> list[Any]:
            self.scale = scale
            return list(map(self.array, self.run(closed, list(map(_Value, arrays)))))

        self._uses = _programs.uses(closed.jaxpr)
        args = [self.scale, *arrays]
        return jax.make_jaxpr(step)(*args), args

    def constant(self, array: Any) -> _Value:
        return _Value(array)

    def array(self, value: Any) -> Any:
        return value.array if isinstance(value, _Value) else value

    def entered(self, values: list[Any], entry: _programs.Entry, operands: list[Any]) -> list[Any]:
        # The result of an iteration has the type of the carry.
        return list(map(self.array, values)) if entry is _programs.Entry.CARRY else values

    def run(
        self, jaxpr: AnyJaxpr, args: Sequence[Any], start: _programs.Start = _programs.PROGRAM
    ) -> list[Any]:
        inside = _programs.Inside(jaxpr, start)
        return super().run(jaxpr, _as_values(args), start._replace(state=inside))

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _programs.Frame
    ) -> list[Any]:
        place, inside, name = frame.place.of(equation), frame.state, equation.primitive.name
        is_matmul, flags = name in _programs.DOTS, list(map(inside.is_cotangent, equation.invars))
        is_inside = self.name and (place.names or is_matmul) and _programs.runs_in_fp32(equation)
        arrays = list(map(self.array, operands))
        if not is_inside or not any(map(_is_fp32, arrays)):
            entered = inside.entered(equation, place.phase)
            return _as_values(self.enter(equation, operands, frame, entered))
        is_wide = any(x.is_wide for x in operands) and name != "add_any"
        is_batch_sum = name == "reduce_sum" and 0 in _programs.axes_of(equation)
        if is_batch_sum and flags[0] and not is_wide and place.names not in self._fp32_modules:
            # A sum over the batch, as of a bias, accumulates in the format.
            narrow = lax.convert_element_type(self._scaled(arrays[0], True), self._dtype)
            (result,) = self.bound(equation, [lax.optimization_barrier(narrow)])
            wide = lax.convert_element_type(result, _core.FLOAT32)
            return [_Value(lax.div(wide, self._scale(True)))]
        if is_matmul:
            # Parameters, inputs and cotangents may come from outside of the module, in FP32.
            arrays = [self._rounded(x, f) for x, f in zip(arrays, flags, strict=True)]
            if self._is_compared(equation.outvars[0]):
                self._compared.add((place.names, _programs.call_site(equation)))
        is_dot = name == "dot_general" and not (
            self._compared and (place.names, _programs.call_site(equation)) in self._compared
        )
        if self.name == FLOAT8 and is_dot and not _programs.dot_of(equation).batch[0]:
            arrays = [_fp8(x, f) if _is_fp32(x) else x for x, f in zip(arrays, flags, strict=True)]
        results = self.bound(equation, arrays)
        ends = equation.outvars
        if not is_matmul and (is_wide or _TABLE.category(name) == "fp32"):
            ends = inside.outputs.last
            self._fp32_modules.add(place.names)
        flags = list(map(inside.is_cotangent, equation.outvars))
        return [
            _Value(self._rounded(x, flag))
            if var in ends and (flag or not self._is_compared(var))
            else _Value(x, is_wide=True)
            for var, x, flag in zip(equation.outvars, results, flags, strict=True)
        ]

    def _is_compared(self, var: _programs.Atom) -> bool:
        """Returns True for the logits of a head or router, which recipes return in FP32."""
        return bool(self._uses.get(var, _programs.Use.NONE) & _programs.DECISIONS)

    def _scale(self, is_cotangent: bool) -> Any:
        return self.scale if is_cotangent and self.name == FLOAT16 else np.float32(1)

    def _scaled(self, x: _core.Array, is_cotangent: bool) -> _core.Array:
        """Returns an array times its scale, in the range of the format."""
        scale = _core.moved_to_mesh_of(self._scale(is_cotangent), x)
        return clipped(lax.mul(x, scale), self._dtype)

    def _rounded(self, x: Any, is_cotangent: bool) -> Any:
        if not _is_fp32(x):
            return x
        scaled = _programs.rounded_to(self._scaled(x, is_cotangent), self._dtype)
        return lax.div(scaled, _core.moved_to_mesh_of(self._scale(is_cotangent), scaled))


def _as_values(results: Sequence[Any]) -> list[_Value]:
    """Returns values of results, of which those of loops and branches are plain arrays."""
    return [x if isinstance(x, _Value) else _Value(x) for x in results]


def _is_fp32(x: Any) -> bool:
    return getattr(x, "dtype", None) == _core.FLOAT32


def _fp8(x: _core.Array, is_cotangent: bool) -> _core.Array:
    name = "float8_e5m2" if is_cotangent else "float8_e4m3fn"
    scale = _operands.compute_scale(_operands.amax(x), name, power_of_two=True)
    return lax.div(_programs.rounded_to(clipped(lax.mul(x, scale), name), name), scale)


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


# Kind -> module -> samples of its tensors.
Samples = dict[str, dict[str, list[_core.Array]]]


@jax.jit
def errors_of(exact: Samples, rounded: Samples) -> dict[str, dict[str, _core.Array]]:
    """Returns the norm of the difference of a module's tensors, over the norm of the tensors."""

    def error(first: list[_core.Array], second: list[_core.Array]) -> _core.Array:
        unit = jnp.finfo(_core.FLOAT32).tiny
        for x in first:
            unit = jnp.maximum(unit, jnp.max(jnp.abs(x), initial=0))
        norm = lambda xs: jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in xs))
        differences = [x - y for x, y in zip(first, second, strict=True)]
        return norm(differences) / jnp.maximum(norm(first), jnp.finfo(_core.FLOAT32).tiny)

    return {
        kind: {module: error(tensors, rounded[kind][module]) for module, tensors in group.items()}
        for kind, group in exact.items()
    }
