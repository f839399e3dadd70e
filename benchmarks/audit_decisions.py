"""Plants 20 rounded decisions for `audit_plants.py`, and six healthy neighbors.

The result of a 16-bit matmul is rounded before a loss, log-softmax, top-k or argmax reads it.
Each repair returns the FP32 sums of the same matmul.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from audit_plants import (
    BF16,
    CLASSES,
    F16,
    F32,
    HIDDEN,
    PLANTS,
    ROWS,
    WIDTH,
    cross_entropy,
    hidden,
    inputs,
    labels,
    normal,
    parameters,
    plant,
    sgd,
    trained,
)

# The operands of these matmuls were rounded before, or XLA's CPU compiler skips the rounding,
# so that only the audit shows a difference.
decision = functools.partial(plant, "rounded_output", "preferred_element_type", repeats=0)
# These matmuls read numbers of 16 bits, so that the repair makes the results exact.
exact = functools.partial(plant, "rounded_output", "preferred_element_type")


def dot_of(d: Any) -> Any:
    """Returns the matmul of a layer, with wide results if the plant is repaired."""

    def dot(*operands: Any, preferred_element_type: Any = None, **options: Any) -> jax.Array:
        return lax.dot_general(*operands, preferred_element_type=d.spot, **options)

    return dot if d.fixed else lax.dot_general


def numbers(dtype: Any, seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Returns bfloat16 numbers in another dtype."""
    return jnp.asarray(normal(seed, *shape, scale=scale), BF16).astype(dtype)


def stepped(loss: Any, p: Any, *batch: Any) -> Any:
    """Returns a step of SGD, and its arguments."""

    def step(p, *batch):
        value, grads = jax.value_and_grad(loss)(p, *batch)
        return sgd(p, grads), value

    return step, (p, *batch)


# ---------------------------------------------------------------------------
# Language models and classifiers
# ---------------------------------------------------------------------------


@decision()
def linen_language_model(d):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(CLASSES, WIDTH, dtype=d.low)(tokens)
            x = nn.relu(nn.Dense(HIDDEN, dtype=d.low)(x))
            output = nn.Dense(CLASSES, False, d.low, dot_general=dot_of(d), name="vocabulary")
            return output(x)  # planted

    model, tokens = Model(), labels()
    variables = model.init(jax.random.key(0), tokens)
    return stepped(lambda v, t: cross_entropy(model.apply(v, t), t, d.wide), variables, tokens)


@decision()
def tied_embedding(d):
    def loss(p, tokens):
        table = p["table"].astype(d.low)
        x = jnp.tanh(table[tokens])
        logits = jnp.einsum("td,vd->tv", x, table, preferred_element_type=d.spot)  # planted
        logits = 30 * jnp.tanh(logits.astype(d.wide) / 30)
        return cross_entropy(logits, tokens, d.wide)

    return stepped(loss, {"table": numbers(d.wide, 0, CLASSES, WIDTH)}, labels())


@decision()
def nnx_in_a_scan_over_layers(d):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.mix = nnx.Linear(WIDTH, WIDTH, dtype=d.low, rngs=rngs)

        def __call__(self, x):
            return x + jax.nn.relu(self.mix(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(nnx.Rngs(0))
            self.project = nnx.Linear(
                WIDTH, CLASSES, use_bias=False, dtype=d.low, dot_general=dot_of(d), rngs=rngs
            )

        def __call__(self, x):
            over = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.project(over(x.astype(d.low), self.blocks))  # planted

    model = Model(nnx.Rngs(0))
    graph, state = nnx.split(model)
    loss = lambda state, x, y: cross_entropy(nnx.merge(graph, state)(x), y, d.wide)
    return stepped(loss, state, inputs(d.wide), labels())


@decision()
def linen_in_a_scan_with_remat(d):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nn.relu(nn.Dense(WIDTH, dtype=d.low)(x))
            # A head after each layer, as for deep supervision.
            probe = nn.Dense(CLASSES, False, d.low, dot_general=dot_of(d), name="probe")
            return x, probe(x)  # planted

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            rngs, axes = {"params": True}, {"params": 0}
            layers = nn.scan(nn.remat(Layer, prevent_cse=False), axes, split_rngs=rngs, length=2)
            return layers()(x.astype(d.low), None)[1]

    model, x = Model(), inputs(d.wide)
    loss = lambda v, x, y: cross_entropy(model.apply(v, x)[1], y, d.wide)
    return stepped(loss, model.init(jax.random.key(0), x), x, labels())


@decision()
def equinox_classifier(d):
    class Model(eqx.Module):
        first: eqx.nn.Linear
        weight: jax.Array

        def __call__(self, x):
            x = jax.nn.relu(self.first(x.astype(d.low)))
            weight = self.weight.astype(d.low)
            return jnp.matmul(weight, x, preferred_element_type=d.spot)  # planted

    first = eqx.nn.Linear(WIDTH, HIDDEN, key=jax.random.key(0), dtype=d.low)
    model = Model(first, numbers(d.wide, 1, CLASSES, HIDDEN, scale=0.1))

    def step(weight, x, y):
        def loss(weight):
            return cross_entropy(
                jax.vmap(eqx.tree_at(lambda m: m.weight, model, weight))(x), y, d.wide
            )

        return sgd(weight, jax.grad(loss)(weight))

    return step, (model.weight, inputs(d.wide), labels())


@exact(low=F16)
def logits_in_float16(d):
    def loss(p, x, y):
        p = jnp.matmul(x.astype(d.low), p.astype(d.low), preferred_element_type=d.spot)  # planted
        return cross_entropy(p, y, d.wide)

    weight = numbers(d.wide, 0, WIDTH, CLASSES)
    evaluate = lambda p, x, y: loss(p, x, y)
    return evaluate, (weight, numbers(d.wide, 1, ROWS, WIDTH), labels())


@exact()
def chunks_of_rows(d):
    def loss(p, x, y):
        def chunk(total, batch):
            rows, targets = batch
            left, right = rows.astype(d.low), p.astype(d.low)
            scores = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
            scores = scores.astype(d.wide)
            chosen = jnp.take_along_axis(scores, targets[:, None], 1)[:, 0]
            return total + (jax.nn.logsumexp(scores, -1) - chosen).sum(), None

        parts = x.reshape(4, -1, WIDTH), y.reshape(4, -1)
        return lax.scan(jax.checkpoint(chunk), jnp.zeros((), d.wide), parts)[0] / ROWS

    batch = numbers(d.wide, 1, ROWS, WIDTH), labels()
    return loss, (numbers(d.wide, 0, WIDTH, CLASSES), *batch)


@exact()
def loss_with_its_own_derivative(d):
    @jax.custom_vjp
    def loss(w, x, y):
        return passed(w, x, y)[0]

    def passed(w, x, y):
        z = jnp.dot(x.astype(d.low), w.astype(d.low), preferred_element_type=d.spot)  # planted
        log_p = jax.nn.log_softmax(z.astype(d.wide))
        return -jnp.take_along_axis(log_p, y[:, None], 1).mean(), (w, x, y, log_p)

    def backward(saved, cotangent):
        _, x, y, log_p = saved
        error = (jnp.exp(log_p) - jax.nn.one_hot(y, CLASSES)) * cotangent / ROWS
        return (x.T.astype(d.low) @ error.astype(d.low)).astype(d.wide), None, None

    loss.defvjp(passed, backward)
    return stepped(
        loss, numbers(d.wide, 0, WIDTH, CLASSES), numbers(d.wide, 1, ROWS, WIDTH), labels()
    )


@exact()
def two_towers(d):
    def loss(p, images, texts):
        left, right = images.astype(d.low), texts.T.astype(d.low)
        scores = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
        scores = scores.astype(d.wide) * jnp.exp(p["temperature"])
        y = jnp.arange(ROWS)
        return cross_entropy(scores, y, d.wide) + cross_entropy(scores.T, y, d.wide)

    rows = [numbers(d.wide, n, ROWS, WIDTH) for n in (0, 1)]
    return loss, ({"temperature": jnp.zeros((), d.wide)}, *rows)


@exact()
def binary_labels(d):
    def loss(p, x, y):
        left, right = x.astype(d.low), p.astype(d.low)
        scores = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
        return optax.sigmoid_binary_cross_entropy(scores.astype(d.wide), y).mean()

    batch = numbers(d.wide, 1, ROWS, WIDTH), jnp.eye(ROWS, CLASSES, dtype=d.wide)
    return loss, (numbers(d.wide, 0, WIDTH, CLASSES), *batch)


# ---------------------------------------------------------------------------
# Routers and choices
# ---------------------------------------------------------------------------


@decision()
def router_with_noise(d):
    def loss(p, x, noise):
        rows = hidden(p, x, d.low)
        affinity = jnp.matmul(rows, p["v"].astype(d.low), preferred_element_type=d.spot)  # planted
        affinity = affinity.astype(d.wide) + 0.01 * noise
        weights, experts = lax.top_k(jax.nn.softmax(affinity), 2)
        return ((rows.astype(d.wide) * weights[:, :1]) ** 2).mean() + 0 * experts.sum()

    return trained(loss, d, inputs(d.wide), jnp.asarray(normal(3, ROWS, CLASSES), d.wide))


@decision()
def router_with_sigmoids(d):
    class Router(nn.Module):
        @nn.compact
        def __call__(self, x):
            picker = nn.Dense(8, False, d.low, dot_general=dot_of(d), name="picker")
            scores = picker(x)  # planted
            balance = self.param("balance", nn.initializers.zeros, (8,), d.wide)
            scores = jax.nn.sigmoid(scores.astype(d.wide))
            _, experts = lax.top_k(scores + balance, 2)
            return jnp.take_along_axis(scores, experts, 1)

    model, x = Router(), inputs(d.wide)
    loss = lambda v, x: jnp.mean(model.apply(v, x) ** 2)
    return stepped(loss, model.init(jax.random.key(0), x), x)


@decision()
def nearest_code(d):
    def nearest(codes, x):
        left, right = x.astype(d.low), codes.T.astype(d.low)
        overlap = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
        distance = (codes**2).sum(-1) - 2 * overlap.astype(d.wide)
        return distance.argmin(-1).astype(d.wide)

    return nearest, (numbers(d.wide, 0, 512, WIDTH), numbers(d.wide, 1, 2048, WIDTH))


@decision()
def sampled_tokens(d):
    def sample(p, x, key):
        rows = hidden(p, x, d.low)
        z = jnp.matmul(rows, p["v"].astype(d.low), preferred_element_type=d.spot)  # planted
        z = jnp.where(jnp.arange(CLASSES) < 60, z.astype(d.wide) / 0.7, -jnp.inf)
        return jax.random.categorical(key, z)

    return sample, (parameters(d.wide), inputs(d.wide), jax.random.key(0))


@decision()
def sparse_attention_by_hand(d):
    def loss(p, x):
        rows = hidden(p, x, d.low)
        match = jnp.einsum("qd,kd->qk", rows, rows, preferred_element_type=d.spot)  # planted
        match = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), match.astype(d.wide), -1e9)
        best, keys = lax.top_k(match * HIDDEN**-0.5, 4)
        weights = jax.nn.softmax(best).astype(d.low)
        mixed = jnp.einsum("qk,qkd->qd", weights, rows[keys])
        return jnp.mean(mixed.astype(d.wide) ** 2)

    return trained(loss, d, inputs(d.wide))


@decision()
def pointers(d):
    def loss(queries, keys, y):
        left, right = queries.astype(d.low), keys.T.astype(d.low)
        match = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
        pointed = jax.nn.softmax(match.astype(d.wide) * WIDTH**-0.5)
        return -jnp.log(jnp.take_along_axis(pointed, y[:, None], 1) + 1e-9).mean()

    rows = [numbers(d.wide, n, CLASSES, WIDTH) for n in (0, 1)]
    return loss, (*rows, labels(CLASSES))


# ---------------------------------------------------------------------------
# Reinforcement learning and preferences
# ---------------------------------------------------------------------------

ATOMS = 16


@exact()
def distribution_of_returns(d):
    def act(w, x):
        z = jnp.matmul(x.astype(d.low), w.astype(d.low), preferred_element_type=d.spot)  # planted
        atoms = jax.nn.softmax(z.astype(d.wide).reshape(ROWS, -1, ATOMS))
        values = (atoms * jnp.linspace(-10, 10, ATOMS, dtype=d.wide)).sum(-1)
        return values.argmax(-1), jnp.log(atoms)

    return act, (numbers(d.wide, 0, WIDTH, 4 * ATOMS), numbers(d.wide, 1, ROWS, WIDTH))


@decision()
def preferences(d):
    def log_p(p, x, y):
        rows = hidden(p, x, d.low)
        z = jnp.matmul(rows, p["v"].astype(d.low), preferred_element_type=d.spot)  # planted
        z = z.astype(d.wide)
        z = z - z.max(-1, keepdims=True)
        return jnp.take_along_axis(z - jnp.log(jnp.exp(z).sum(-1, keepdims=True)), y[:, None], 1)

    def loss(p, reference, x, y, worse):
        ratio = log_p(p, x, y) - log_p(p, x, worse) - reference
        return -jax.nn.log_sigmoid(0.1 * ratio).mean()

    reference = jnp.zeros((ROWS, 1), d.wide)
    return trained(loss, d, reference, inputs(d.wide), labels(), labels()[::-1])


@decision()
def clipped_policy(d):
    class Actor(nnx.Module):
        def __init__(self, rngs):
            self.torso = nnx.Linear(WIDTH, HIDDEN, dtype=d.low, rngs=rngs)
            self.action = nnx.Linear(
                HIDDEN, 8, use_bias=False, dtype=d.low, dot_general=dot_of(d), rngs=rngs
            )

        def __call__(self, x):
            return self.action(nnx.relu(self.torso(x)))  # planted

    actor = Actor(nnx.Rngs(0))
    graph, state = nnx.split(actor)

    def loss(state, x, actions, old, advantages):
        log_p = jax.nn.log_softmax(nnx.merge(graph, state)(x).astype(d.wide))
        ratio = jnp.exp(jnp.take_along_axis(log_p, actions[:, None], 1)[:, 0] - old)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()

    rows = [jnp.asarray(normal(n, ROWS), d.wide) for n in (5, 6)]
    return stepped(loss, state, inputs(d.wide), labels() % 8, *rows)


@exact()
def critic(d):
    def loss(w, x, returns):
        left, right = x.astype(d.low), w.astype(d.low)
        values = jnp.matmul(left, right, preferred_element_type=d.spot)  # planted
        return jnp.mean((values[:, 0].astype(d.wide) - returns) ** 2)

    x = numbers(d.wide, 1, ROWS, WIDTH)
    w = 32 * numbers(d.wide, 0, WIDTH, 1)
    return loss, (w, x, 300 + jnp.asarray(normal(2, ROWS), d.wide))


# ---------------------------------------------------------------------------
# Healthy neighbors
# ---------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, w: Any) -> jax.Array:
    scores = jnp.einsum("qd,kd->qk", q, k).astype(F32) * WIDTH**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), scores, -1e9)
    return jnp.mean(jnp.matmul(jax.nn.softmax(scores).astype(BF16), v).astype(F32) ** 2)


def gate(x: Any, _: Any, v: Any, w: Any) -> jax.Array:
    gates = jax.nn.sigmoid((x @ w).astype(F32))
    return jnp.mean((v @ w).astype(F32) * gates)


def softplus_step(x: Any, _: Any, v: Any, w: Any) -> jax.Array:
    steps = jax.nn.softplus((x @ w).astype(F32))
    return jnp.mean(((v.astype(F32) * steps).astype(BF16) @ w).astype(F32))


def argmax_of_a_mask(x: Any, _: Any, v: Any, w: Any) -> jax.Array:
    return jnp.argmax((x @ w) > 0, -1)


def residual_stream(x: Any, _: Any, v: Any, w: Any) -> jax.Array:
    rows = v.astype(F32) + (x @ w).astype(F32)
    rows = rows - rows.mean(-1, keepdims=True)
    return jnp.mean((rows.astype(BF16) @ w).astype(F32) ** 2)


def average_of_activations(x: Any, _: Any, v: Any, w: Any) -> jax.Array:
    mean = v.astype(F32)
    return mean + 0.01 * ((x @ w).astype(F32) - mean)


NEIGHBORS = (
    attention,
    gate,
    softplus_step,
    argmax_of_a_mask,
    residual_stream,
    average_of_activations,
)
# Operands of the neighbors.
OPERANDS = (
    *[jax.ShapeDtypeStruct((ROWS, WIDTH), BF16)] * 3,
    jax.ShapeDtypeStruct((WIDTH, WIDTH), BF16),
)


def all_plants() -> list[Any]:
    """Returns the plants of this file and of `audit_plants.py`."""
    return PLANTS
