"""Explains the decisions of a recipe on a model or a function, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable
from typing import Any

from jaxmp import _core
from jaxmp._attention import AttentionExplanation, recorded_choices
from jaxmp._autocast import _resolve, autocast, explain_operations
from jaxmp._autocast._explain import AutocastExplanation
from jaxmp._core import _compat
from jaxmp._policies import _load, _recipe, _required
from jaxmp._tools.audit import _fp8_forms
from jaxmp.errors import JaxmpError
from jaxmp.fp8 import _explain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Decisions of a recipe on a model or a function, in sections.

    Each section has `rows` with named fields, a `summary` and `notes`. `str()` formats all sections
    as tables.

    Attributes:
      policies: the policy and the deciding rule of each module of a Flax model, `unused` rules, the
        `paths` that rules can match, and the `low_precision_share` of its matmul FLOPs. None for a
        function.
      autocast: each matmul and convolution of a function under `jaxmp.autocast`, its dtype and the
        reason; `share` is that of the FLOPs in 16 bits or FP8. None for a model, and without a
        recipe.
      fp8: each linear layer (under autocast: each matmul) with `matmul = "fp8"`, and why it does
        not run in FP8.
      attention: for each call of `jaxmp.dot_product_attention`, also by a layer, the
        `implementation`, the `reason`, and in `rows` what prevents the fused kernel.

    Example:
      >>> explanation = explain(lambda x: jnp.exp(x @ x), "bf16")(jnp.ones((32, 32)))
      >>> [row.dtype for row in explanation.autocast.rows]
      ['bfloat16']
    """

    policies: _required.PolicyExplanation | None = None
    autocast: AutocastExplanation | None = None
    fp8: _explain.Fp8Explanation = dataclasses.field(default_factory=_explain.Fp8Explanation)
    attention: tuple[AttentionExplanation, ...] = ()

    def sections(self) -> list[tuple[str, _core.ExplanationSection[Any]]]:
        """Returns the sections with content, by title."""
        titled: list[tuple[str, _core.ExplanationSection[Any] | None]] = [
            ("policies", self.policies),
            ("autocast", self.autocast),
            ("fp8", self.fp8 if self.fp8.rows else None),
            *(("attention", call) for call in self.attention),
        ]
        return [(title, section) for title, section in titled if section is not None]

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{section}" for title, section in self.sections())

    def to_json(self) -> str:
        """Returns all sections as JSON; policies, rules and dtypes are strings."""
        fields = {
            "policies": self.policies and self.policies.to_dict(),
            "autocast": self.autocast and self.autocast.to_dict(),
            "fp8": self.fp8.to_dict(),
            "attention": [call.to_dict() for call in self.attention],
        }
        return json.dumps(fields, indent=1, default=_core.to_text)


def explain(
    fn: Any, recipe: _load.RecipeLike | None = None, *, target: str | None = None
) -> Callable[..., Explanation]:
    """Explains what a recipe decides for a model or a function, and why.

    The model or function is traced and never run. `jax.jit` may return a cached trace, which
    contains no decisions: pass the function itself.

    Args:
      fn: a Flax model, to which `recipe.wrap` would be applied; or a function, to which
        `jaxmp.autocast` would be applied. For `jax.grad(autocast(loss_fn, ...))`, whose backward
        matmuls run in the dtypes of the forward ones, pass `loss_fn`; for
        `autocast(jax.grad(loss_fn), ...)`, pass `jax.grad(loss_fn)`.
      recipe: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. None: the
        function is explained as it is, such as one that calls a wrapped model or
        `jaxmp.dot_product_attention`.
      target: a chip, such as "h200", or "gpu", "tpu" or "cpu" to decide as for any such device;
        None: the default device.

    Returns:
      A function of the arguments of `fn`: arrays, `jax.ShapeDtypeStruct`s or other values. It
      returns an `Explanation` with the sections `policies`, `autocast`, `fp8` and `attention`. An
      NNX model without arguments has only the first.

    Raises:
      RuleError: from the returned function, if a required rule matches nothing.
      AttentionError: from the returned function, if a mask contradicts its declaration, or an
        implementation does not support the call.
      CompositionError: if the GPU has no FP8 matmuls and the scaling does not set `emulate=True`.
      PolicyError, RecipeError: if the recipe is not valid.
      TargetError: from the returned function, if `target` is not a known chip.

    Example:
      >>> x = jnp.ones((2, 32))
      >>> explanation = explain(nn.Dense(10), "p=f32,c=bf16,matmul=fp8")(x)
      >>> explanation.policies.rows[0].policy
      Policy('p=f32,c=bf16,o=bf16,matmul=fp8')
      >>> explanation.fp8.rows[0].exclusion_reason
      'N = 10 is not a multiple of 16'
      >>> print(explain(lambda w, x: x @ w, "bf16")(jnp.ones((32, 10)), x).autocast.summary)
      100.0% of the matmul FLOPs run in 16 bits or FP8: 1 of 1 matmuls and convolutions.
      >>> q = jax.ShapeDtypeStruct((1, 8192, 16, 64), jnp.float32)
      >>> explain(jaxmp.dot_product_attention)(q, q, q, is_causal=True).attention[0].implementation
      'blockwise'
    """
    adapter = _recipe.adapter_name(fn)
    if adapter is not None and recipe is None:
        raise JaxmpError(
            "explain requires a recipe for a model: jaxmp.explain(model, 'bf16')(x). To explain a "
            "wrapped model as it is, pass the function that calls it."
        )
    if isinstance(fn, type) and any(each.__module__ in _recipe.ADAPTERS for each in fn.__mro__):
        raise JaxmpError(
            f"explain received the class {fn.__name__} instead of a model. Pass an instance: "
            f"jaxmp.explain({fn.__name__}(...), 'bf16')(x)."
        )
    if adapter is None and not callable(fn):
        raise JaxmpError(
            f"explain received {fn!r} instead of a model or a function. Pass it first, and its "
            "arguments last: jaxmp.explain(loss_fn, 'bf16')(params, batch)."
        )

    loaded = None if recipe is None else _recipe.load_recipe(recipe)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        context: Any = contextlib.nullcontext()
        if target in ("cpu", "gpu", "tpu"):
            context = _compat.context(target=target)
        elif target is not None:
            context = _core.default_target(target)
        policies, call, first = None, fn, ()
        with context:
            if adapter is not None:
                module = importlib.import_module(adapter)
                policies, call, first = module.explain_model(fn, loaded, args, kwargs)
            if call is None:
                return Explanation(policies=policies)
            operations, run = None, call
            if adapter is None and loaded is not None:
                operations = explain_operations(fn, loaded, args, kwargs)
                run = autocast(fn, loaded)
            with _explain.recorded(is_full=True) as record, recorded_choices() as attention:
                traced, _ = _resolve.trace(run, (*first, *args), kwargs)
        return Explanation(
            policies=policies,
            autocast=operations,
            fp8=_explain_fp8(record, traced.closed),
            attention=tuple(attention),
        )

    return explained


# ---------------------------------------------------------------------------
# FP8
# ---------------------------------------------------------------------------


def _explain_fp8(record: _explain.Record, jaxpr: Any) -> _explain.Fp8Explanation:
    """Returns the decisions of a program as a section of an explanation.

    Its notes describe how the results depend on the rest of the batch, if a scale covers a whole
    tensor.
    """
    notes = list(filter(None, (scaling.batch_note for scaling in record.scalings)))
    if record.otherwise:
        path, tokens = next(iter(record.otherwise.items()))
        notes.insert(0, _explain.other_tokens(path, tokens, len(record.otherwise)))
    if record.rows:
        notes[:0] = _fp8_forms.share_notes(jaxpr)
    return _explain.Fp8Explanation(rows=tuple(record.rows), notes=tuple(notes))
