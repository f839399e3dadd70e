"""Makes the program that measures a training step."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core import _typing
from jaxmp._programs import _observe
from jaxmp._tools.audit import _trace
from jaxmp._tools.stats import _emulate, _measure, _report
from jaxmp.errors import AuditError
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

    Example:
      >>> step = jax.grad(lambda w, x: (x @ w).sum())
      >>> stats = with_stats(step)(jnp.ones((16, 32)), jnp.ones((8, 16)))
      >>> stats.tensors["parameters"]["w"].rms.tolist()
      1.0
    """

    tensors: dict[str, dict[str, _measure.TensorStats]]
    loss_scale: _typing.Array
    errors: dict[str, dict[str, dict[str, _typing.Array]]] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def report(self) -> _report.StatsReport:
        """Returns the losses in each candidate format, and the loss scale to start with."""
        return _report.make_stats_report(self.tensors, self.loss_scale, self.errors, self.modules)

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

    Args:
      step: a function of pytrees of arrays that computes gradients. It may be jitted, and may be a
        function of NNX modules, which are not changed.
      what_if: formats in which the step is run again, of "float16" and "float8", for the errors of
        the gradients and outputs of each module. In "float16", the results of operations are
        rounded, with the suggested loss scale. In "float8", the operands of the matmuls of layers
        are rounded, each with the scale of its largest magnitude, and other results to bfloat16.
        Measure a step in FP32. Each format costs about as much as the step, and so does the
        comparison.

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
    unknown = [name for name in what_if if name not in _emulate.EMULATED]
    if unknown or isinstance(what_if, str):
        raise AuditError(
            f"with_stats received what_if={what_if!r}. Pass a sequence of formats, of "
            f"{', '.join(map(repr, _emulate.EMULATED))}: what_if=[{_emulate.EMULATED[0]!r}]."
        )
    programs: dict[Any, tuple[_Program, Callable[..., Any], Callable[..., Any]]] = {}

    def measured(*args: Any, **kwargs: Any) -> TrainingStats:
        leaves, structure = jax.tree.flatten((args, kwargs))
        types = [jax.typeof(leaf) if _trace.is_array(leaf) else leaf for leaf in leaves]
        key = structure, tuple(x if isinstance(x, Hashable) else repr(x) for x in types)
        if key not in programs:
            shapes, names = structure.unflatten(types)
            # XLA must not leave out roundings.
            options: dict[str, Any] = {"xla_allow_excess_precision": False}
            traced = _trace.trace(step, shapes, names)
            program = _Program(traced)
            samples = jax.jit(program.samples, static_argnums=1, compiler_options=options)
            programs[key] = program, jax.jit(program, compiler_options=options), samples
        program, measure, samples = programs[key]
        arrays = [leaves[n] for n in program.traced.positions]
        stats = measure(arrays)
        if what_if:
            scale = (stats.report().loss_scale or stats.loss_scale) / stats.loss_scale
            runs = {name: samples(arrays, name, scale) for name in ("", *what_if)}
            errors = {name: _emulate.errors_of(runs[""], runs[name]) for name in what_if}
            stats = dataclasses.replace(stats, errors=errors, modules=program.modules)
        return stats

    return measured


class _Measured(_observe.Observer):
    """Observer that computes the statistics of each tensor."""

    measure = staticmethod(_measure.measure_tensor)


class _Program:
    """Statistics of a traced step, as a function of the arrays among its arguments."""

    def __init__(self, traced: _trace.Traced) -> None:
        self.traced, self.names, self.roles = traced, traced.texts(), traced.roles()
        # The modules of `samples` in the order of the forward pass.
        self.modules: tuple[str, ...] = ()

    def __call__(self, arrays: list[Any]) -> TrainingStats:
        observer = _Measured()
        results = observer.run(self.traced.closed, arrays)
        rows: dict[str, dict[str, _measure.TensorStats]] = {}
        counts: collections.Counter[tuple[str, str]] = collections.Counter()

        def add(kind: str, name: str, stats: _measure.TensorStats) -> None:
            counts[kind, name] += 1
            suffix = f"#{counts[kind, name]}" if counts[kind, name] > 1 else ""
            rows.setdefault(kind, {})[name + suffix] = stats

        scales = self._of_role(_roles.FP8)
        for kind, numbers in (("parameters", self._parameters()), (_observe.SCALES, scales)):
            for number in numbers:
                add(kind, self.names[number], _measure.measure_tensor(arrays[number]))
        for key, module, stats in self._by_module(observer):
            if key.kind == _observe.GRADIENTS:
                add(_observe.GRADIENTS, self._parameter(key, module), stats)
            else:
                add(key.kind, f"{module}:{key.label}" if key.label else module, stats)
        for number, new in self._updated(results):
            old = lax.convert_element_type(arrays[number], jnp.float32)
            update = lax.sub(lax.convert_element_type(new, jnp.float32), old)
            add("updates", self.names[number], _measure.measure_tensor(update))
        scale = next((arrays[number] for number in self.traced.scales()), 1.0)
        return TrainingStats(rows, jnp.asarray(scale, jnp.float32))

    def samples(self, arrays: list[Any], name: str, scale: _typing.Array) -> _emulate.Samples:
        """Returns samples of the gradients and outputs of each module in a format."""
        emulation = _emulate.Emulation(name, scale)
        sampler = _emulate.Sampler()
        sampler.run(*emulation.traced(self.traced.closed, arrays))
        samples: _emulate.Samples = {}
        for key, module, sample in self._by_module(sampler):
            if key.kind in (_observe.ACTIVATIONS, _observe.GRADIENTS):
                samples.setdefault(key.kind, {}).setdefault(module, []).append(sample)
        # A module without outputs has its first gradient last.
        order = [
            *samples.get(_observe.ACTIVATIONS, {}),
            *reversed(samples.get(_observe.GRADIENTS, {})),
        ]
        self.modules = tuple(dict.fromkeys(order))
        return samples

    def _by_module(self, observer: _observe.Observer) -> Iterator[tuple[_observe.Key, str, Any]]:
        """Yields (key, module, measurement) of each tensor that an observer measured."""
        of_fp8, of_parameters = (
            {self.traced.arrays[n].shape for n in numbers}
            for numbers in (self._of_role(_roles.FP8), self._parameters())
        )
        modules = _observe.modules_of(key.path for key in observer.side)
        for (key, measured), module in zip(observer.side.items(), modules, strict=True):
            if key.kind != _observe.GRADIENTS or key.shape not in of_fp8 - of_parameters:
                yield key, module, measured

    def _of_role(self, *roles: str) -> list[int]:
        """Returns the numbers of the floating-point arrays with one of these roles."""
        return [
            n
            for n, array in enumerate(self.traced.arrays)
            if self.roles[n] in roles and jnp.issubdtype(array.dtype, jnp.floating)
        ]

    def _parameters(self) -> list[int]:
        return self._of_role(_roles.PARAMETER, _roles.MASTER, _roles.AVERAGE, _roles.STATISTICS)

    def _parameter(self, key: _observe.Key, module: str) -> str:
        """Returns the parameter of a gradient; its module and shape if they fit several ones."""
        arrays = self.traced.arrays
        numbers = [n for n in self._of_role(_roles.PARAMETER) if arrays[n].shape == key.shape]
        fitting = [self.names[n] for n in numbers]
        parts = [part for part in module.split("/") if part]
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
