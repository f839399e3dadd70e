"""Judges of operations in 16 bits: softmax, loss, norm, sums, exponentials; of promotions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jaxmp._audit._context import Body, Drafts, Judge, Site, dtype_of, half_of, named
from jaxmp._audit._kinds import NOTE
from jaxmp._audit._places import call_site
from jaxmp._dtypes import FLOAT32, HALF, is_half
from jaxmp._jaxprs import AUTOCAST, BACKWARD, FORWARD, equations, is_literal, sub_jaxprs

# Primitives that hand an array on, or its absolute value, as jnp's logsumexp does.
_LAYOUT = named(
    "convert_element_type reshape broadcast_in_dim abs squeeze transpose copy expand_dims"
    " stop_gradient reduce_precision"
)
_NEAR = _LAYOUT | {"mul", "div", "add", "sub", "select_n"}
_SUMS = frozenset({"reduce_sum", "cumsum"})
_REDUCTIONS = _SUMS | named(
    "reduce_prod cumprod cumlogsumexp reduce_window_sum scatter-add scatter-sub scatter-mul"
)
# Of the last, tanh's derivative is made.
_POWERS = frozenset({"integer_pow", "square", "one_minus_square"})
_BINARY = named("add sub mul div max min pow rem atan2 select_n concatenate")
# Sums of fewer terms lose less than three bits.
_FEW = 8

_FIX_SOFTMAX = "jax.nn.softmax(logits.astype(jnp.float32)).astype(logits.dtype)"
_FIX_LOSS = "logits = logits.astype(jnp.float32)"
_FIX_SUM = "jnp.sum(x, dtype=jnp.float32), jnp.cumsum(x.astype(jnp.float32))"
_FIX_GRADIENT = "jaxmp.autocast(jax.grad(loss_fn), policies) adds gradients up in FP32"
_FIX_CARRY = "start from jnp.zeros(shape, jnp.float32), and cast the result after the loop"


def judge_half(site: Site, judge: Judge, drafts: Drafts) -> None:
    """An operation of the op table's FP32 rows that reads 16 bits."""
    dtype = half_of(site.equation.invars)
    if dtype is None or judge.ops.category(site.name) != "fp32" or _is_unread(site):
        return
    if site.name in _REDUCTIONS:
        _judge_sum(site, dtype, drafts)
    elif site.place.phase == BACKWARD:
        return
    elif site.name in _POWERS:
        message = f"{site.name} of {dtype.name}; float16 overflows from 65504 on."
        drafts.add("half_exp", site, message, level=NOTE)
    elif site.name == "rsqrt":
        _add_norm(site, dtype, drafts)
    else:
        _judge_exponential(site, dtype, drafts)


def _is_unread(site: Site) -> bool:
    """Whether nothing reads the result: derivatives leave such, and no compiler keeps them."""
    return not any(var in site.body.consumers for var in site.equation.outvars)


def judge_root(site: Site, drafts: Drafts) -> None:
    """A square root of 16 bits whose argument is a mean: a norm that is divided by."""
    dtype = half_of(site.equation.invars)
    if dtype is not None and site.place.phase != BACKWARD:
        makers = _made_of(site.equation.invars[0], site.body, _NEAR)
        if any(map(_holds_sum, makers)):
            _add_norm(site, dtype, drafts)


def _holds_sum(equation: Any) -> bool:
    """Whether an equation, such as jnp.var's, adds up."""
    inside = (inner for jaxpr in sub_jaxprs(equation) for inner in equations(jaxpr))
    return any(found.primitive.name in _SUMS for found in (equation, *inside))


def _add_norm(site: Site, dtype: Any, drafts: Drafts) -> None:
    message = f"{site.name} of {dtype.name}: a variance has {_digits(dtype)} there."
    fix = "x = x.astype(jnp.float32) before mean and variance, and cast the result"
    drafts.add("half_norm", site, message, fix)


def _digits(dtype: Any) -> str:
    return "8 bits of mantissa" if dtype.name == "bfloat16" else "no value below 6e-8"


def _judge_sum(site: Site, dtype: Any, drafts: Drafts) -> None:
    terms = _terms(site.equation)
    if terms < _FEW:
        return
    stall = "256 in bfloat16" if dtype.name == "bfloat16" else "2048 in float16"
    message = f"{site.name} of {terms:,} terms in {dtype.name}: a sum of ones stalls at {stall}."
    if site.place.phase == BACKWARD:
        message = f"gradient of a broadcast or of indexing: {message}"
        drafts.add("half_reduction", site, message, _FIX_GRADIENT, level=NOTE)
    elif site.name == "reduce_window_sum":
        drafts.add("half_reduction", site, message, level=NOTE)
    else:
        drafts.add("half_reduction", site, message, _FIX_SUM)


def _terms(equation: Any) -> int:
    """How many numbers are added up into one, at most."""
    name, params = equation.primitive.name, equation.params
    operand = equation.invars[0].aval
    if "axes" in params:
        return math.prod(operand.shape[axis] for axis in params["axes"])
    if "axis" in params:
        return operand.shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    # A scatter: at most all indices are the same one.
    return math.prod(equation.invars[1].aval.shape[:-1])


def _judge_exponential(site: Site, dtype: Any, drafts: Drafts) -> None:
    if site.name in ("exp", "exp2"):
        sums = [e for e in _reads(site.equation, site.body) if e.primitive.name in _SUMS]
        if sums:
            logs = (e.primitive.name for total in sums for e in _reads(total, site.body))
            loss = "log" in logs
            kind, words = ("half_loss", "log-sum-exp") if loss else ("half_softmax", "softmax")
            message = f"{words} in {dtype.name}: its weights have {_weight_digits(dtype)}."
            drafts.add(kind, site, message, _FIX_LOSS if loss else _FIX_SOFTMAX)
            return
    if site.name == "log" and _follows_sum_of_exp(site):
        drafts.add("half_loss", site, f"log-sum-exp in {dtype.name}.", _FIX_LOSS)
        return
    fix = f"jnp.{site.name}(x.astype(jnp.float32)), or jaxmp.autocast"
    drafts.add("half_exp", site, f"{site.name} of {dtype.name}.", fix)


def _weight_digits(dtype: Any) -> str:
    return "8 bits" if dtype.name == "bfloat16" else "11 bits, and logits end at 65504"


def _follows_sum_of_exp(site: Site) -> bool:
    makers = list(_made_of(site.equation.invars[0], site.body, _LAYOUT))
    return any(
        "exp" in (inner.primitive.name for inner in _made_of(maker.invars[0], site.body, _LAYOUT))
        for maker in makers
        if maker.primitive.name in _SUMS
    )


def _reads(equation: Any, body: Body) -> Iterator[Any]:
    """The equations that read a result, through casts and changes of shape."""
    waiting = list(equation.outvars)
    while waiting:
        for reader in body.readers(waiting.pop()):
            yield reader
            if reader.primitive.name in _LAYOUT:
                waiting += reader.outvars


def _made_of(var: Any, body: Body, through: frozenset[str], depth: int = 12) -> Iterator[Any]:
    """The equations that a value comes from, through those named."""
    waiting = [var]
    while waiting and depth:
        depth -= 1
        maker = body.maker(waiting.pop())
        if maker is not None:
            yield maker
            if maker.primitive.name in through:
                waiting += maker.invars


# ---------------------------------------------------------------------------
# Running sums in loops
# ---------------------------------------------------------------------------


def judge_carry(site: Site, loop: Body, carry: list[tuple[Any, Any]], drafts: Drafts) -> None:
    """A loop that adds to a carry in 16 bits what does not depend on that carry.

    A residual stream, whose addend is computed from the carry itself, is no running sum.

    Args:
      site: of the loop.
      loop: the loop's body.
      carry: (variable that comes in, variable that goes out) of each carry.
      drafts: where findings go.
    """
    for before, after in carry:
        if is_literal(after) or dtype_of(before) not in HALF:
            continue
        for adding in _made_of(after, loop, _LAYOUT):
            if adding.primitive.name in ("add", "add_any", "sub") and _adds_to(
                adding, before, loop
            ):
                name = dtype_of(before).name
                message = f"a running sum over the steps of a loop in {name}."
                inner = site._replace(equation=adding, around=(site.equation, *site.around))
                drafts.add("half_reduction", inner, message, _FIX_CARRY)
                break


def _adds_to(adding: Any, before: Any, loop: Body) -> bool:
    sides = [_plain(var, loop) for var in adding.invars]
    if before not in sides:
        return False
    other = adding.invars[1 - sides.index(before)]
    return is_literal(other) or other not in _dependents(before, loop)


def _plain(var: Any, body: Body) -> Any:
    """The variable that `var` is a mere cast of."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name == "convert_element_type":
        var = maker.invars[0]
        maker = body.maker(var)
    return None if is_literal(var) else var


def _dependents(start: Any, body: Body) -> set[Any]:
    found = {start}
    for equation in body.jaxpr.eqns:
        if any(not is_literal(var) and var in found for var in equation.invars):
            found.update(equation.outvars)
    return found


# ---------------------------------------------------------------------------
# Silent promotion
# ---------------------------------------------------------------------------


def judge_promotion(site: Site, judge: Judge, drafts: Drafts) -> None:
    """A cast from 16 bits to FP32 that JAX put in, because the other operand is FP32.

    JAX casts and computes in one call, at one place of the source; a cast that somebody wrote
    has a place of its own, and autocast marks those that it puts in.
    """
    if AUTOCAST in str(site.equation.source_info.name_stack):
        return
    source, target = dtype_of(site.equation.invars[0]), dtype_of(site.equation.outvars[0])
    if site.place.phase != FORWARD or target != FLOAT32 or not is_half(source):
        return
    wanted = judge.wanted(site.place)
    if wanted and not any(is_half(dtype) for dtype in wanted):
        return
    (result,) = site.equation.outvars
    for reader in site.body.readers(result):
        if reader.primitive.name in _BINARY and _meets_fp32(reader, result, site):
            message = f"{source.name} {_symbol(reader)} float32 gives float32."
            fix = f"cast the FP32 operand: y.astype(x.dtype), so that the result is {source.name}"
            drafts.add("silent_promotion", site._replace(equation=reader), message, fix)


def _symbol(equation: Any) -> str:
    return {"add": "+", "sub": "-", "mul": "*", "div": "/"}.get(equation.primitive.name, "and")


def _meets_fp32(reader: Any, upcast: Any, site: Site) -> bool:
    call = call_site(site.equation)
    if call != call_site(reader) or not (call or _is_where(site)):
        return False
    others = [var for var in reader.invars if var is not upcast and dtype_of(var) == FLOAT32]
    return bool(others) and not any(_is_of_call(var, call, site.body) for var in others)


def _is_where(site: Site) -> bool:
    """Whether an equation is inside jnp.where, which promotes and does nothing else."""
    return bool(site.around) and site.around[0].params.get("name") == "_where"


def _is_of_call(var: Any, call: Any, body: Body) -> bool:
    """Whether an operand is made within the same call: then the call upcast on purpose."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape"):
        maker = body.maker(maker.invars[0])
    return maker is not None and call is not None and call_site(maker) == call
