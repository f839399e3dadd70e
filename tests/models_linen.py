"""A zoo of small Linen models, and what tests ask of the programs they trace to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._rules import PolicyMap, Rule

# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.LayerNorm()(x)
        return nn.Dense(4, name="head")(x)


class TiedLM(nn.Module):
    """Embedding used twice: looked up, and attended to for the logits."""

    def setup(self):
        self.embed = nn.Embed(32, 16)
        self.body = nn.Sequential([nn.Dense(32), nn.gelu, nn.Dense(16)])
        self.norm = nn.RMSNorm()

    def __call__(self, tokens):
        return self.embed.attend(self.encode(tokens))

    def encode(self, tokens):
        x = self.embed(tokens)
        return self.norm(x + self.body(x))

    def transposed(self, tokens):
        return self.encode(tokens) @ self.embed.embedding.T


class CNN(nn.Module):
    @nn.compact
    def __call__(self, images, train=True):
        x = nn.Conv(8, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.ConvTranspose(4, (3, 3))(x)
        x = nn.relu(nn.GroupNorm(num_groups=2)(x))
        return nn.Dense(4, name="head")(x.mean(axis=(1, 2)))


class Recurrent(nn.Module):
    cell: type[nn.RNNCellBase]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(self.cell(8), name="rnn")(x))


class Bidirectional(nn.Module):
    @nn.compact
    def __call__(self, x):
        forward, backward = nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.GRUCell(8))
        return nn.Bidirectional(forward, backward)(x)


class ConvRecurrent(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.RNN(nn.ConvLSTMCell(4, (3, 3)))(images)


class Attention(nn.Module):
    normalize_qk: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=2, normalize_qk=self.normalize_qk, name="attention"
        )
        return x + attention(x, mask=mask)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=mask)
        y = nn.Dense(32, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1], name="down")(nn.gelu(y)), None


class Transformer(nn.Module):
    """Embedding, blocks (a Python loop, or scanned and rematerialised), norm, head."""

    layers: int = 2
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        if self.scanned:
            blocks = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = blocks(name="blocks")(x, None)
        else:
            for layer in range(self.layers):
                x, _ = Block(name=f"block_{layer}")(x)
        return nn.Dense(32, name="lm_head")(nn.LayerNorm()(x))


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            MLP,
            in_axes=None,
            axis_size=3,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return members(name="members")(x).mean(axis=0)


class Shared(nn.Module):
    """One Dense, used by its owner and handed to a child."""

    def setup(self):
        self.dense = nn.Dense(8)
        self.child = Borrower(self.dense)

    def __call__(self, x):
        return self.child(self.dense(x))


class Borrower(nn.Module):
    dense: nn.Module

    def __call__(self, x):
        return self.dense(nn.relu(x))


class HardCoded(nn.Module):
    """An author who asks for FP32 in every layer, through a field of the user's own."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        return nn.Dense(4, dtype=jnp.float32, name="head")(x)


class RawParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 8))
        v = self.param("v", boxed, (8, 4))
        return x @ w @ v


class MoE(nn.Module):
    """Two experts; the router's softmax is raw user code."""

    @nn.compact
    def __call__(self, x):
        gates = Router(name="router")(x)
        experts = jnp.stack([nn.Dense(8, name=f"expert_{i}")(x) for i in range(2)], axis=-1)
        return (experts * gates[..., None, :].astype(experts.dtype)).sum(axis=-1)


class Router(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.nn.softmax(nn.Dense(2)(x))


# ---------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------

MIXED = "p=f32,c=bf16,o=f32"


def floats(*shape: int) -> jax.Array:
    """Repeatable numbers of order one."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 32, size=shape), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what it is called with, and what is special about it."""

    name: str
    model: nn.Module
    args: Callable[[], tuple[Any, ...]]
    rules: tuple[Rule, ...] = ()
    # Who breaks strict promotion, Flax or the model's author; "": nobody.
    promotes: str = ""

    def policies(self, default: str = MIXED) -> PolicyMap:
        return PolicyMap(default, self.rules)

    def promotion(self) -> Any:
        return jax.numpy_dtype_promotion("standard" if self.promotes else "strict")

    def variables(self) -> Any:
        """Numbers of order one over the square root of the fan-in, in the model's own dtypes."""
        random = np.random.default_rng(1)

        def fill(path: Any, leaf: Any) -> jax.Array:
            if path[0].key == "batch_stats":
                return jnp.ones(leaf.shape, leaf.dtype)
            scale = max(leaf.size // leaf.shape[-1], 1) ** -0.5
            return jnp.asarray(random.normal(size=leaf.shape) * scale, leaf.dtype)

        with self.promotion():
            shapes = jax.eval_shape(self.model.init, jax.random.key(0), *self.args())
        return jax.tree_util.tree_map_with_path(fill, nn.meta.unbox(shapes))

    def run(self, model: nn.Module, variables: Any) -> Any:
        """`(output, changed collections, gradients of the mean square of the output)`, jitted."""
        state = {name: value for name, value in variables.items() if name != "params"}

        def loss(params: Any) -> Any:
            out, new_state = model.apply(
                {"params": params, **state}, *self.args(), mutable=list(state)
            )
            return jnp.square(out.astype(jnp.float32)).mean(), (out, new_state)

        with self.promotion():
            gradients, (out, new_state) = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
        return out, new_state, gradients

    def trace_gradient(self, model: nn.Module, variables: Any) -> list[Any]:
        """The equations of the gradient of the output's sum, forward pass included."""
        state = {name: value for name, value in variables.items() if name != "params"}

        def loss(params: Any) -> jax.Array:
            out, _ = model.apply({"params": params, **state}, *self.args(), mutable=list(state))
            return out.sum()

        with self.promotion():
            return trace(jax.grad(loss), variables["params"])

    def __str__(self) -> str:
        return self.name


_ROUTER = Rule("**/router/**", "c=f32", why="routing is a discrete decision")
_HEAD = Rule("lm_head", "o=f32", why="the loss reads FP32 logits")
_POOL = "nn.avg_pool divides by an int"
_GATES = "Flax's gated cells multiply the FP32 state with a bfloat16 gate"

CASES = [
    Case("mlp", MLP(), lambda: (floats(4, 8),)),
    Case("mlp_wide_head", MLP(), lambda: (floats(4, 8),), (Rule("head", "o=f32"),)),
    Case("tied", TiedLM(), lambda: (tokens(2, 6),)),
    Case(
        "tied_wide",
        TiedLM(),
        lambda: (tokens(2, 6),),
        (Rule("embed", "o=f32"),),
        promotes="TiedLM adds the FP32 embedding to its bfloat16 body",
    ),
    Case("cnn", CNN(), lambda: (floats(2, 8, 8, 3),), promotes=_POOL),
    Case("cnn_wide", CNN(), lambda: (floats(2, 8, 8, 3),), (Rule("Conv_*", "o=f32"),), _POOL),
    Case("lstm", Recurrent(nn.LSTMCell), lambda: (floats(2, 5, 3),), promotes=_GATES),
    Case("fast_lstm", Recurrent(nn.OptimizedLSTMCell), lambda: (floats(2, 5, 3),), promotes=_GATES),
    Case("gru", Recurrent(nn.GRUCell), lambda: (floats(2, 5, 3),), promotes=_GATES),
    Case("mgu", Recurrent(nn.MGUCell), lambda: (floats(2, 5, 3),), promotes=_GATES),
    Case("simple_cell", Recurrent(nn.SimpleCell), lambda: (floats(2, 5, 3),)),
    Case("bidirectional", Bidirectional(), lambda: (floats(2, 5, 3),), promotes=_GATES),
    Case("conv_lstm", ConvRecurrent(), lambda: (floats(2, 3, 8, 8, 1),), promotes=_GATES),
    Case("attention", Attention(), lambda: (floats(2, 6, 8),)),
    Case("qk_norm", Attention(normalize_qk=True), lambda: (floats(2, 6, 8),)),
    Case("transformer", Transformer(), lambda: (tokens(2, 6),), (_HEAD,)),
    Case("scanned", Transformer(scanned=True), lambda: (tokens(2, 6),), (_HEAD,)),
    Case("ensemble", Ensemble(), lambda: (floats(4, 8),)),
    Case("shared", Shared(), lambda: (floats(4, 8),)),
    Case("hard_coded", HardCoded(), lambda: (floats(4, 8),)),
    Case("raw_param", RawParam(), lambda: (floats(4, 8),)),
    Case("moe", MoE(), lambda: (floats(4, 8),), (_ROUTER,)),
]


# ---------------------------------------------------------------------------
# What a jaxpr does
# ---------------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of its sub-jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def trace(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return list(equations(jax.make_jaxpr(fn)(*args).jaxpr))


def module_path(equation: Any) -> str:
    """The modules that emitted an equation, within the scopes that Flax and autodiff leave."""
    return str(equation.source_info.name_stack)


def dtypes(equation: Any) -> tuple[str, ...]:
    """`("bfloat16", "bfloat16", "float32")`: operands, then the result."""
    return tuple(str(v.aval.dtype) for v in (*equation.invars[:2], equation.outvars[0]))


def products(traced: list[Any]) -> list[Any]:
    return [e for e in traced if e.primitive.name in ("dot_general", "conv_general_dilated")]


def named(traced: list[Any], *primitives: str) -> list[Any]:
    return [e for e in traced if e.primitive.name in primitives]


def leaf_dtypes(tree: Any) -> Any:
    """The tree with the name of its dtype in every leaf's place."""
    return jax.tree.map(lambda leaf: str(leaf.dtype), tree)


def relative_error(value: Any, reference: Any) -> float:
    """|value - reference| / |reference| in the 2-norm, over all leaves."""
    flat = [
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (value, reference)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))
