"""Maps the name scopes of each equation to a module path, and resolves its policy and category.

The function is traced first.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._policies import _load, _op_table, _policy, _resolve
from jaxmp._policies._required import check_module_dtypes, check_required
from jaxmp._programs import Path, Traced
from jaxmp.errors import CompositionError, PolicyError, RuleError
from jaxmp.fp8._scaling import Scaling

# Scopes that mark equations. They are not part of module paths.
IN_BACKWARD = "jaxmp_backward"
IN_CUSTOM_JVP = "jaxmp_custom_jvp"
IN_CUSTOM_VJP = "jaxmp_custom_vjp"
IN_JVP_RULE = "jaxmp_jvp_rule"
# Mark -> why matmuls in such a scope do not run in FP8.
_EXCLUSION_REASONS = {
    IN_BACKWARD: (
        "a matmul of the backward pass, in which the gradient and the other operand cannot be "
        "distinguished: write jax.grad(autocast(f)), not autocast(jax.grad(f))"
    ),
    IN_CUSTOM_JVP: "inside a custom_jvp, whose rule must stay linear",
    IN_CUSTOM_VJP: "inside a custom_vjp, which runs as its author wrote it",
}
_MARKS = {_programs.FULL_PRECISION, IN_JVP_RULE, *_EXCLUSION_REASONS}


@dataclasses.dataclass(frozen=True)
class ScopePolicy:
    """Resolved policy of a scope, with the marks of the scope.

    Equal objects have the same effect, so calls at different scopes can share a retraced jaxpr.

    Attributes:
      policy: the policy.
      wide_output: dtype that the matmuls emit; None: the compute dtype.
      is_full_precision: True inside `full_precision()`.
      uses_fp8: True if the policy sets `matmul = "fp8"`.
      exclusion_reason: why matmuls do not run in FP8 although the policy sets it; "" if they do.
      in_jvp_rule: True in the rule of a `custom_jvp`.
      reason: the rule that decides, or the default policy, as text.
    """

    policy: _policy.Policy
    wide_output: np.dtype | None
    is_full_precision: bool
    uses_fp8: bool
    exclusion_reason: str
    in_jvp_rule: bool
    reason: str = dataclasses.field(compare=False)

    @property
    def dtype(self) -> np.dtype:
        """Compute dtype; FP32 inside `full_precision()`."""
        return _core.FLOAT32 if self.is_full_precision else self.policy.compute_dtype

    @property
    def is_fp32(self) -> bool:
        """True if the scope computes in FP32 or wider, so that all operations do."""
        return not _core.is_16bit(self.dtype)


class AutocastConfig:
    """Policies and op table of one `autocast`, with a cache of the policy of each scope.

    Args:
      policies: the policies.
      ops: the op table.

    Raises:
      RuleError: if a required rule names a module type.
      CompositionError: if the FP8 scaling is stateful.
    """

    def __init__(self, policies: _load.PolicyMap, ops: _op_table.OpTable) -> None:
        check_module_dtypes(policies)
        for rule in policies.rules:
            if rule.module_type is not None and rule.required:
                raise RuleError(
                    f"{rule!r}: autocast sees name scopes but no module types. Select the module "
                    "by its path, or allow the rule to match nothing: required=False."
                )
        # Scaling of FP8 matmuls; None if no policy sets `matmul = "fp8"`.
        self.scaling = _scaling_of(policies)
        self.policies, self.ops = policies, ops
        self.by_path = bool(policies.rules)
        # The operations of a scope share it.
        self.scope_policy = functools.cache(self._scope_policy)

    @property
    def output_dtype(self) -> Any:
        """Output dtype of a rule for the root; None without one."""
        rule = _resolve.resolve_policy(self.policies, "").rule
        return None if rule is None else rule.output_dtype

    def category(self, equation: _compat.JaxprEqn) -> str:
        """Returns the op-table category of an equation.

        Equations with inner jaxprs are "opaque", since these were traced for the recorded dtypes.
        The interpreter handles control flow and calls separately.
        """
        name = equation.primitive.name
        if _programs.is_outer_product(equation):
            return "widest"  # an outer product sums nothing; rotary angles require FP32
        if _programs.is_inner_product(equation):
            return "fp32"  # a sum, such as of the log-probabilities that labels select
        if name == "mul" and equation.invars[0] is equation.invars[1]:
            name = "square"
        if name == "scatter" and _programs.sub_jaxprs(equation):
            return "opaque"  # `x.at[i].apply(f)`: f was traced for its dtypes
        inner = name not in _programs.SCATTERS and _programs.sub_jaxprs(equation)
        return "opaque" if inner else self.ops.category(name)

    def check_required(self, scope_paths: set[Path]) -> None:
        """Raises RuleError if a required rule matches none of the scopes."""
        paths = {
            path
            for scopes in scope_paths
            for path in _programs.module_paths_of(_without_marks(scopes))
        }
        segments = [path.split("/") for path in paths]
        known = {"/".join(each[:length]) for each in segments for length in range(len(each) + 1)}
        modules = [rule for rule in self.policies.rules if not rule.addresses_parameter]
        try:
            check_required(self.policies, dict.fromkeys(known), modules)
        except RuleError as error:
            raise RuleError(
                f"{error} autocast matches name scopes: Linen modules create them, NNX modules do "
                "wrapped by jaxmp.load_recipe('fp32'), and other code does in a block "
                "`with jax.named_scope(...):`."
            ) from None

    def _scope_policy(self, scope_path: Path) -> ScopePolicy:
        """Returns the resolved policy of scopes."""
        resolved = _resolve.resolve_first(
            self.policies, _programs.module_paths_of(_without_marks(scope_path))
        )
        is_full = _programs.FULL_PRECISION in scope_path
        in_fp8 = resolved.scaling is not None and not is_full
        reasons = (_EXCLUSION_REASONS[s] for s in scope_path if s in _EXCLUSION_REASONS)
        return ScopePolicy(
            policy=resolved.policy,
            # The output dtype of the root is that of the whole function, not of its matmuls.
            wide_output=resolved.wide_output if resolved.path else None,
            is_full_precision=is_full,
            uses_fp8=in_fp8,
            exclusion_reason=next(reasons, "") if in_fp8 else "",
            in_jvp_rule=IN_JVP_RULE in scope_path,
            reason="inside jaxmp.full_precision()" if is_full else resolved.reason,
        )


def _scaling_of(policies: _load.PolicyMap) -> Scaling | None:
    scaling = _resolve.matmul_scaling(policies)
    if scaling is not None and scaling.is_stateful:
        name = type(scaling).__name__
        raise CompositionError(
            f"{name} stores a state for each matmul, but a traced function has no state. Scale by "
            "the tensors themselves: autocast(fn, recipe.replace(fp8='current')), or "
            "PolicyMap(..., fp8=fp8.CurrentScaling()). Or call "
            f"fp8.dot_general(fp8.{name}()) in the function, and pass it a state."
        )
    return scaling


def _without_marks(scope_path: Path) -> Path:
    return tuple(scope for scope in scope_path if scope not in _MARKS)


def path_of(scope_path: Path) -> str:
    """Returns scopes joined by "/", without marks."""
    return "/".join(_without_marks(scope_path))


# ---------------------------------------------------------------------------
# Tracing
# ---------------------------------------------------------------------------


# True while autocast traces a function.
_traces: contextvars.ContextVar[bool] = contextvars.ContextVar("traces", default=False)


def is_traced_by_autocast() -> bool:
    """Returns True in a function whose operations autocast casts."""
    return _traces.get()


def make_config(
    fn: Callable[..., Any],
    recipe: _load.RecipeLike,
    ops: Mapping[str, str] | _op_table.OpTable | None,
    name: str,
) -> AutocastConfig:
    """Checks the arguments of the public function `name` and returns them as `AutocastConfig`.

    Raises:
      PolicyError: if `fn` is not a function, or the recipe is not valid.
      RuleError, CompositionError, OpError: as `autocast`.
    """
    if not callable(fn):
        raise PolicyError(
            f"{name} received {fn!r} instead of a function. Pass the function first, and then the "
            f"recipe: {name}(loss_fn, 'bf16')."
        )
    table = _load.as_op_table(recipe).replace({} if ops is None else ops)
    return AutocastConfig(_load.as_policy_map(recipe), table)


def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Traced, bool]:
    """Traces the function of `autocast`; leaves that are not arrays are passed unchanged.

    Returns:
      The traced function, and True if it was traced inside a rule of a `custom_vjp`.

    Raises:
      TypeError, ValueError, IndexError, NotImplementedError: as JAX does, with a note if `fn` reads
        the values of arrays, or if an argument in 16 bits may be the cause.
    """
    in_custom_vjp = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_custom_vjp
        in_custom_vjp = _compat.is_in_custom_vjp(_compat.source_info_util.current())
        return fn(*args, **kwargs)

    try:
        with _compat.assigned(_traces, True):
            return _programs.trace(run, args, kwargs), in_custom_vjp
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        if not isinstance(error, jax.errors.UnexpectedTracerError):
            error.add_note(_READS_VALUES)
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        _explain_arguments(error, (args, kwargs))
        raise


_READS_VALUES = (
    "jaxmp: autocast traces the function, as `jax.jit` does, which therefore cannot read the values"
    " of arrays, as `if` and float() do. Use jnp.where or jax.lax.cond instead of `if`."
)


def _explain_arguments(error: Exception, arguments: Any) -> None:
    """Adds a note to an error of JAX that names the 16-bit dtype of an argument."""
    dtypes = {str(getattr(leaf, "dtype", None)) for leaf in jax.tree.leaves(arguments)}
    named = [name for name in ("bfloat16", "float16") if name in dtypes and name in str(error)]
    if named and not any("jaxmp: " in note for note in getattr(error, "__notes__", ())):
        error.add_note(
            "jaxmp: autocast traces a function in the dtypes of its arguments, of which some are "
            f"{named[0]}. Convert them to float32 at the start of the function; autocast casts "
            "them again for each matmul: "
            "params = jaxmp.get_policy('float32').cast_to_compute(params)"
        )
