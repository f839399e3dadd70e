"""Constructs: equations that contain jaxprs, and readers of their parameters.

JAX documents neither the names of these primitives nor their parameters, and renames some of them:
`eval_jaxpr` of JAX 0.12 is the `closed_call` of JAX 0.10. The records below are all that the rest
of the package has to know about them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
from jax import lax

from jaxmp._core import _compat, named
from jaxmp._core._compat import AnyJaxpr, ClosedJaxpr, Jaxpr


class Form(enum.Enum):
    """Manner in which a construct runs its jaxprs."""

    CALL = enum.auto()  # once
    REMAT = enum.auto()  # once, and again in the backward pass
    DERIVATIVE = enum.auto()  # once, unless its own derivative is computed
    SHARDS = enum.auto()  # on each device, for parts of the arrays
    BRANCH = enum.auto()  # one of several
    SCAN = enum.auto()  # for each row of scanned arrays
    WHILE = enum.auto()  # until a test fails


# Primitive -> its form. `eval_jaxpr` is a call of a `Traced` object, and a loop that is
# differentiated leaves a `closed_call`.
_FORMS = {
    **dict.fromkeys(("call", "closed_call", "eval_jaxpr", "jit"), Form.CALL),
    "remat2": Form.REMAT,
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), Form.DERIVATIVE),
    "shard_map": Form.SHARDS,
    "cond": Form.BRANCH,
    "scan": Form.SCAN,
    "while": Form.WHILE,
}


def form_of(equation: Any) -> Form | None:
    """Returns the form of a construct; None for other equations."""
    return _FORMS.get(equation.primitive.name)


def _of(*forms: Form) -> frozenset[str]:
    return frozenset(name for name, form in _FORMS.items() if form in forms)


CALLS, REMATS, CUSTOM_DERIVATIVES = _of(Form.CALL), _of(Form.REMAT), _of(Form.DERIVATIVE)
LOOPS, BRANCHES, SHARD_MAPS = _of(Form.SCAN, Form.WHILE), _of(Form.BRANCH), _of(Form.SHARDS)
CONSTRUCTS = _of(*Form)
# Calls that no interpreter enters, because their jaxpr belongs together with a rule of their
# author. An analysis can enter them.
OPAQUE_CALLS = named("composite compute_on custom_vmap_call linear_call xla_metadata_call")
# Equations whose jaxprs no interpreter enters: these calls, kernels, and functions that combine two
# elements.
OPAQUE = (
    OPAQUE_CALLS
    | {"call_hi_primitive", "call_hi_primitive_linearized", "custom_linear_solve"}
    | {"custom_partitioning", "mpmd_map", "pallas_call", "remat_opt"}
    | {"reduce", "reduce_window", "scatter", "scatter-add", "scatter-max", "scatter-min"}
    | {"scatter-mul", "scatter-sub"}
)
_KNOWN = CONSTRUCTS | OPAQUE


def sub_jaxprs(equation: Any) -> list[Any]:
    """Returns the jaxprs among the parameters of an equation, in order."""
    jaxprs = []
    for value in _compat.parameters_of(equation):
        # Other tuples, such as the shardings of a step, may have thousands of elements.
        if isinstance(value, (tuple, list)) and value and is_jaxpr(value[0]):
            jaxprs += [inner for inner in value if is_jaxpr(inner)]
        elif is_jaxpr(value):
            jaxprs.append(value)
    return jaxprs


def is_jaxpr(value: object) -> TypeGuard[AnyJaxpr]:
    """Returns True for an open or closed jaxpr."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


# ---------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------


class Call(NamedTuple):
    """Equation that runs one jaxpr once: a call, `jax.checkpoint` or a custom derivative.

    jaxpr: the jaxpr.
    is_recomputation: True for the part of a `jax.checkpoint` that belongs to a backward pass.
    prevent_cse: for `jax.checkpoint`, True (or a flag per operand) if XLA must not merge the
      recomputation with the forward pass.
    policy: for `jax.checkpoint`, the residuals that are saved.
    """

    jaxpr: Any
    is_recomputation: bool
    prevent_cse: bool | tuple[bool, ...]
    policy: Any

    @property
    def is_empty(self) -> bool:
        """True if the jaxpr returns arguments and constants, and computes nothing."""
        return not _compat.jaxpr_body(self.jaxpr)[0].eqns

    def separated(self, operands: Sequence[Any]) -> list[Any]:
        """Returns operands behind the barrier with which JAX lowers a recomputation."""
        flags = self.is_recomputation and self.prevent_cse
        flags = flags if isinstance(flags, tuple) else (flags,) * len(operands)
        chosen = [n for n, flag in enumerate(flags) if flag]
        result = list(operands)
        if chosen:
            barred = lax.optimization_barrier([result[n] for n in chosen])
            for n, operand in zip(chosen, barred, strict=True):
                result[n] = operand
        return result

    def rematerialized(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.checkpoint` of another function, with the same options."""
        return jax.checkpoint(function, prevent_cse=self.prevent_cse, policy=self.policy)


class Cond(NamedTuple):
    """`lax.cond` and `lax.switch`: the first operand is the index of the branch.

    platforms: the platforms of each branch of `lax.platform_dependent`, None for its default; None
      for other operations. A branch may not lower on the platforms of the others.
    """

    branches: tuple[Any, ...]
    platforms: tuple[tuple[str, ...] | None, ...] | None

    def taken_on(self, device: str) -> list[bool]:
        """Returns for each branch whether a type of device, such as "gpu", may take it."""
        if self.platforms is None:
            return [True] * len(self.branches)
        is_named = [device in map(_compat.platform_of, names or ()) for names in self.platforms]
        return is_named if any(is_named) else [names is None for names in self.platforms]

    def run(self, index: Any, functions: Sequence[Callable[..., Any]], args: Sequence[Any]) -> Any:
        """Returns the results of one of other functions, which replace the branches."""
        if self.platforms is None:
            return lax.switch(index, functions, *args)
        pairs = [*zip(self.platforms, functions, strict=True)]
        by_name = {name: function for names, function in pairs for name in names or ()}
        default = next((function for names, function in pairs if names is None), None)
        return lax.platform_dependent(*args, default=default, **by_name)


class ShardMap(NamedTuple):
    """`jax.shard_map`."""

    jaxpr: Any
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool
    axis_names: frozenset[Any]

    @property
    def devices(self) -> int:
        """Number of devices; the jaxpr has the shapes of one device."""
        return math.prod(self.mesh.shape[axis] for axis in self.axis_names)

    def run(
        self,
        function: Callable[..., Any],
        operands: Sequence[Any],
        in_specs: Any = None,
        out_specs: Any = None,
    ) -> Any:
        """Returns the results of another function on the same mesh, by default with its specs."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=self.in_specs if in_specs is None else in_specs,
            out_specs=self.out_specs if out_specs is None else out_specs,
            check_vma=self.check_vma,
            axis_names=self.axis_names,
        )(*operands)


def call_of(equation: Any) -> Call:
    """Returns the record of an equation in `CALLS`, `REMATS` or `CUSTOM_DERIVATIVES`."""
    params = equation.params
    return Call(
        params["jaxpr" if "jaxpr" in params else "call_jaxpr"],
        params.get("differentiated", False),
        params.get("prevent_cse", False),
        params.get("policy"),
    )


def cond_of(equation: Any) -> Cond:
    """Returns the record of a `cond`."""
    params = equation.params
    return Cond(tuple(params["branches"]), params.get("branches_platforms"))


def shard_map_of(equation: Any) -> ShardMap:
    """Returns the record of a `shard_map`."""
    params = equation.params
    return ShardMap(
        params["jaxpr"],
        params["mesh"],
        tuple(params["in_specs"]),
        tuple(params["out_specs"]),
        params["check_vma"],
        params["newly_manual_axes"],
    )


def parameters_with(equation: Any, new: Mapping[int, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation that contain jaxprs, with other jaxprs.

    Args:
      equation: the equation.
      new: id of a jaxpr -> the jaxpr that replaces it.
    """
    changed = lambda value: new.get(id(value), value)
    params = {
        key: tuple(map(changed, value)) if isinstance(value, tuple) else changed(value)
        for key, value in equation.params.items()
    }
    return {key: value for key, value in params.items() if value is not equation.params[key]}


class CustomJvp(NamedTuple):
    """Function with a `custom_jvp` rule.

    jaxpr: that of the function.
    rule: (primals, then tangents) -> (primal results, then tangent results).
    symbolic_zeros: True if the rule was defined with `symbolic_zeros=True`.
    """

    jaxpr: Any
    rule: Any
    symbolic_zeros: bool


def custom_jvp_of(equation: Any) -> CustomJvp:
    """Returns the record of a `custom_jvp_call`."""
    params = equation.params
    rule = equation.primitive.get_bind_params(params)["subfuns"][1]
    return CustomJvp(params["call_jaxpr"], rule, params["symbolic_zeros"])


def custom_vmap_of(equation: Any) -> tuple[Any, Callable[..., Any]]:
    """Returns the jaxpr of a `custom_vmap_call`, and its rule."""
    return equation.params["call"], equation.params["rule"]


# ---------------------------------------------------------------------------
# The jaxprs of all constructs
# ---------------------------------------------------------------------------


class Inner(NamedTuple):
    """Jaxpr inside an equation, with the corresponding variables of the equation.

    form: the form of the construct; None for an equation that is none.
    jaxpr: without its constants.
    recorded: the same, as the equation contains it.
    operands: for each argument, the operand of the equation; None if it is unknown.
    results: for each result, the result of the equation; None if it is unknown.
    indices: for each argument, the index of the operand; None if it is unknown.
    carried: of a loop, the arguments that are its first results of the iteration before. Those in
      front of them are constants, and those behind them rows of scanned arrays.
    times: number of executions per execution of the equation; 1 for a while loop.
    step: -1 for a loop from the last row to the first.
    unroll: of a scan, the number of iterations in one iteration of the compiled loop.
    """

    form: Form | None
    jaxpr: Any
    recorded: Any
    operands: list[Any]
    results: list[Any]
    indices: list[int | None]
    carried: range
    times: int = 1
    step: int = 1
    unroll: int = 0

    @property
    def is_unrolled(self) -> bool:
        """True for a loop that JAX compiles as one program of all its iterations."""
        return self.unroll >= self.times > 0

    @property
    def is_loop(self) -> bool:
        """True for the body of a loop, and for its test."""
        return self.form in (Form.SCAN, Form.WHILE)

    @property
    def may_be_skipped(self) -> bool:
        """True for a loop whose results may be its operands."""
        return self.form is Form.WHILE

    @property
    def length(self) -> int | None:
        """Number of iterations or devices; None if it depends on data."""
        return None if self.form is Form.WHILE else self.times

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the constants, the carry and the scanned arrays among the operands of a loop."""
        args = [operands[n] for n in self.indices if n is not None]
        start, stop = self.carried.start, self.carried.stop
        return args[:start], args[start:stop], args[stop:]

    @property
    def incoming(self) -> list[Any]:
        """The arguments that are carried."""
        return [self.jaxpr.invars[n] for n in self.carried]

    @property
    def outgoing(self) -> list[Any]:
        """The results that become `incoming` of the next iteration."""
        return list(self.jaxpr.outvars[: len(self.carried)])


def inners(equation: Any) -> list[Inner]:
    """Returns the jaxprs of an equation, each with its operands and results."""
    form, count = form_of(equation), len(equation.invars)
    if form is Form.WHILE:
        params, indices = equation.params, range(count)
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        of_test = [*indices[:tests], *indices[tests + consts :]]
        test = _inner(equation, params["cond_jaxpr"], of_test)._replace(results=[None])
        body = _inner(equation, params["body_jaxpr"], indices[tests:])
        return [test, body._replace(carried=range(count - tests)[consts:])]
    options: dict[str, Any] = {}
    if form is Form.SCAN:
        consts, carry = _compat.scan_counts(equation.params)
        options["carried"] = range(consts, consts + carry)
        options["times"], options["unroll"] = equation.params["length"], equation.params["unroll"]
        options["step"] = -1 if equation.params["reverse"] else 1
    elif form is Form.SHARDS:
        options["times"] = shard_map_of(equation).devices
    # The first operand of a branch is its index.
    indices = range(form is Form.BRANCH, count)
    return [_inner(equation, jaxpr, indices)._replace(**options) for jaxpr in sub_jaxprs(equation)]


def _inner(equation: Any, jaxpr: AnyJaxpr, indices: Sequence[int]) -> Inner:
    body, _ = _compat.jaxpr_body(jaxpr)
    args, outs = len(body.invars), len(body.outvars)
    known: list[int | None] = [*indices] if len(indices) == args else [None] * args
    operands = [None if n is None else equation.invars[n] for n in known]
    results = list(equation.outvars) if len(equation.outvars) == outs else [None] * outs
    carried = range(args, args)
    return Inner(form_of(equation), body, jaxpr, operands, results, known, carried)


def loop_of(equation: Any) -> Inner | None:
    """Returns the body of a loop; None for other operations."""
    return inners(equation)[-1] if form_of(equation) in (Form.SCAN, Form.WHILE) else None


# ---------------------------------------------------------------------------
# Unknown constructs
# ---------------------------------------------------------------------------


def is_unknown(equation: Any) -> bool:
    """Returns True for an operation with a jaxpr that no table of this module lists."""
    return equation.primitive.name not in _KNOWN and bool(sub_jaxprs(equation))
