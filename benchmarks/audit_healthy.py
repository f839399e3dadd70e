"""Healthy training steps, in which the audit must find no error.

They are written in the manner of the examples of optax (lookahead, gradient accumulation, freezing
parameters, adversarial training), Flax (graph networks, recurrent networks, VAE, decoders) and of
single-file libraries for reinforcement learning (DQN, PPO, SAC), in bfloat16 or float16 with FP32
where it belongs. `audit_plants.py` audits them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import jaxmp
from audit_plants import (
    BF16,
    CLASSES,
    F16,
    F32,
    HIDDEN,
    ROWS,
    WIDTH,
    cross_entropy,
    forward,
    head,
    hidden,
    inputs,
    labels,
    parameters,
    sgd,
    wide_dot,
)

# Name -> (function that returns a step and its arguments, policies).
STEPS: dict[str, tuple[Callable[[], Any], str]] = {}
X, Y = inputs(F32), labels()


# Arguments of a layer that returns the FP32 sums of its matmul.
HEAD = {"dtype": BF16, "dot_general": wide_dot}


def healthy(build: Callable[[], Any]) -> Callable[[], Any]:
    STEPS[build.__name__] = build, "fp16" if "float16" in build.__name__ else "bf16"
    return build


def loss_of(p: Any, x: Any, y: Any, low: Any = BF16) -> jax.Array:
    return cross_entropy(forward(p, x, low), y, F32)


def norm_of(grads: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


def optimized(tx: Any, loss: Callable[..., Any], p: Any, *batch: Any) -> Any:
    def step(p, state, *batch):
        value, grads = jax.value_and_grad(loss)(p, *batch)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    return step, (p, tx.init(p), *batch)


@healthy
def clipped_adamw_with_a_schedule():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 10_000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return optimized(tx, loss_of, parameters(F32), X, Y)


@healthy
def lookahead():
    tx = optax.lookahead(optax.sgd(1e-2), sync_period=5, slow_step_size=0.5)
    p = optax.LookaheadParams.init_synced(parameters(F32))

    def step(p, state, x, y):
        value, grads = jax.value_and_grad(loss_of)(p.fast, x, y)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    return step, (p, tx.init(p), X, Y)


@healthy
def accumulated_over_steps():
    tx = optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4)
    return optimized(tx, loss_of, parameters(F32), X, Y)


@healthy
def accumulated_over_microbatches():
    def step(p, xs, ys):
        def body(carry, batch):
            total, losses = carry
            value, grads = jax.value_and_grad(loss_of)(p, *batch)
            return (jax.tree.map(jnp.add, total, grads), losses + value), None

        start = jax.tree.map(jnp.zeros_like, p), jnp.zeros(())
        (total, losses), _ = lax.scan(body, start, (xs, ys))
        return sgd(p, jax.tree.map(lambda g: g / 4, total)), losses / 4

    return step, (parameters(F32), jnp.stack([X] * 4), jnp.stack([Y] * 4))


@healthy
def frozen_base_with_adapters():
    base = parameters(BF16)
    a, b = jnp.zeros((WIDTH, 8)), jnp.zeros((8, HIDDEN))

    def loss(adapters, base, x, y):
        x = x.astype(BF16)
        low = (x @ adapters["a"].astype(BF16)) @ adapters["b"].astype(BF16)
        rows = jax.nn.gelu(x @ base["w"] + low)
        return cross_entropy(head(rows, base["v"]), y, F32)

    return optimized(optax.adam(1e-3), loss, {"a": a, "b": b}, base, X, Y)


@healthy
def adversarial_examples():
    def loss(p, x, y):
        grads = jax.grad(lambda x: loss_of(p, x, y))(x)
        nearby = lax.stop_gradient(jnp.clip(x + 0.03 * jnp.sign(grads), -3, 3))
        return loss_of(p, x, y) + loss_of(p, nearby, y)

    return optimized(optax.sgd(1e-2), loss, parameters(F32), X, Y)


@healthy
def average_and_its_evaluation():
    def step(p, average, count, x, y):
        value, grads = jax.value_and_grad(loss_of)(p, x, y)
        p = sgd(p, grads)
        decay = jnp.minimum(0.999, (1 + count) / (10 + count))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, p)
        return p, average, count + 1, value, loss_of(average, x, y)

    return step, (parameters(F32), parameters(F32), jnp.zeros((), jnp.int32), X, Y)


@healthy
def graph_network():
    senders, receivers = jnp.arange(64) % ROWS, (jnp.arange(64) * 7) % ROWS

    def loss(p, x, y):
        rows = hidden(p, x, BF16)
        messages = rows[senders].astype(F32)
        totals = jax.ops.segment_sum(messages, receivers, num_segments=ROWS)
        counts = jax.ops.segment_sum(jnp.ones(64), receivers, num_segments=ROWS)
        rows = (totals / jnp.maximum(counts, 1)[:, None]).astype(BF16)
        return cross_entropy(head(rows, p["v"]), y, F32)

    return optimized(optax.adam(1e-2), loss, parameters(F32), X, Y)


class Reader(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, WIDTH, dtype=BF16)(tokens)
        x = nn.RNN(nn.GRUCell(HIDDEN, dtype=BF16))(x)
        return nn.Dense(CLASSES, **HEAD)(x[:, -1])


@healthy
def gru_classifier():
    model, tokens = Reader(), jnp.zeros((ROWS, 12), jnp.int32)
    variables = model.init(jax.random.key(0), tokens)
    loss = lambda v, tokens, y: cross_entropy(model.apply(v, tokens), y, F32)
    return optimized(optax.adam(1e-3), loss, variables, tokens, Y)


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        rows = nn.relu(nn.Dense(HIDDEN, dtype=BF16)(x))
        mean = nn.Dense(8, **HEAD)(rows)
        log_variance = nn.Dense(8, **HEAD)(rows)
        code = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        rows = nn.relu(nn.Dense(HIDDEN, dtype=BF16)(code))
        return nn.Dense(WIDTH, **HEAD)(rows), mean, log_variance


@healthy
def variational_autoencoder():
    model, key = Autoencoder(), jax.random.key(0)

    def loss(v, x, key):
        logits, mean, log_variance = model.apply(v, x, key)
        entropies = optax.sigmoid_binary_cross_entropy(logits.astype(F32), x).sum(-1)
        kl = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return (entropies + kl).mean()

    return optimized(optax.adam(1e-3), loss, model.init(key, X, key), X, key)


@healthy
def decoder_with_rotary_positions():
    def rotated(x):
        angles = jnp.arange(len(x))[:, None] * 1e4 ** (-jnp.arange(HIDDEN // 2) / (HIDDEN // 2))
        first, second = jnp.split(x.astype(F32), 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)
        return turned.astype(BF16)

    def loss(p, tokens, y):
        x = p["table"].astype(BF16)[tokens]
        variance = jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True)
        x = (x.astype(F32) * lax.rsqrt(variance + 1e-6)).astype(BF16)
        q = rotated(x).reshape(1, 512, 1, HIDDEN)
        x = x + jax.nn.dot_product_attention(q, q, x.reshape(q.shape), is_causal=True)[0, :, 0]
        return cross_entropy(head(x, p["v"]), y, F32)

    p = parameters(F32) | {"table": jnp.zeros((600, HIDDEN))}
    return optimized(optax.adamw(1e-3), loss, p, jnp.arange(512), labels(512))


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), dtype=BF16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, **HEAD, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(x.astype(F32).mean((1, 2)).astype(BF16))


@healthy
def convolutions_with_batch_norm():
    model = Residual(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss = lambda model: cross_entropy(model(x), y, F32)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step, (model, optimizer, jnp.ones((ROWS, 8, 8, 3)), Y)


@healthy
def distillation():
    def step(p, teacher, x, y):
        soft = jax.nn.softmax(forward(teacher, x, BF16).astype(F32) / 2)

        def loss(p):
            logits = forward(p, x, BF16).astype(F32)
            kl = optax.kl_divergence(jax.nn.log_softmax(logits / 2), soft).mean()
            return 0.5 * cross_entropy(logits, y, F32) + 2 * kl

        value, grads = jax.value_and_grad(loss)(p)
        return sgd(p, grads), value

    return step, (parameters(F32), parameters(F32), X, Y)


@healthy
def q_learning_with_a_target_network():
    def step(p, target, count, x, actions, rewards):
        values = forward(target, x, BF16).astype(F32).max(-1)
        goals = rewards + 0.99 * values

        def loss(p):
            q = forward(p, x, BF16).astype(F32)[jnp.arange(ROWS), actions]
            return optax.huber_loss(q, goals).mean()

        p = sgd(p, jax.grad(loss)(p))
        target = optax.periodic_update(p, target, count, 100)
        return p, target, count + 1

    count = jnp.zeros((), jnp.int32)
    return step, (parameters(F32), parameters(F32), count, X, Y, jnp.ones(ROWS))


@healthy
def policy_gradient_with_advantages():
    def step(p, x, actions, old, rewards, values):
        def body(advantage, row):
            reward, value, following = row
            advantage = reward + 0.99 * following - value + 0.99 * 0.95 * advantage
            return advantage, advantage

        rows = rewards, values, jnp.roll(values, -1)
        _, advantages = lax.scan(body, jnp.zeros(()), rows, reverse=True)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        def loss(p):
            log_p = jax.nn.log_softmax(forward(p, x, BF16).astype(F32))[jnp.arange(ROWS), actions]
            ratio = jnp.exp(log_p - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            return -jnp.minimum(ratio * advantages, clipped * advantages).mean()

        return sgd(p, jax.grad(loss)(p))

    ones = jnp.ones(ROWS)
    return step, (parameters(F32), X, Y, -3 * ones, ones, ones)


@healthy
def squashed_gaussian_policy():
    def loss(p, x, key):
        mean, log_std = jnp.split(forward(p, x, BF16).astype(F32), 2, -1)
        noise = jax.random.normal(key, mean.shape)
        std = jnp.exp(jnp.clip(log_std, -5, 2))
        action = mean + std * noise
        log_p = (
            -0.5 * noise**2
            - jnp.log(std)
            - 2 * (jnp.log(2.0) - action - jax.nn.softplus(-2 * action))
        )
        return log_p.sum(-1).mean() + jnp.tanh(action).mean()

    return optimized(optax.adam(3e-4), loss, parameters(F32), X, jax.random.key(0))


@healthy
def loss_scale_by_hand_in_float16():
    def step(p, scale, good, x, y):
        loss = lambda p: loss_of(p, x, y, F16) * scale
        value, grads = jax.value_and_grad(loss)(p)
        grads = jax.tree.map(lambda g: g / scale, grads)
        norm = norm_of(grads)
        finite = jnp.isfinite(norm)
        factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        new = sgd(p, jax.tree.map(lambda g: g * factor, grads))
        p = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, p)
        grown = jnp.where(good >= 200, scale * 2, scale)
        scale, good = jnp.where(finite, grown, scale / 2), jnp.where(finite, good + 1, 0)
        return p, scale, good, value / scale, norm

    return step, (parameters(F32), jnp.float32(2.0**12), jnp.zeros((), jnp.int32), X, Y)


@healthy
def recipe_in_float16():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = jaxmp.load_recipe("fp16").optimizer(tx)
    state = jaxmp.TrainState.create(apply_fn=None, params=parameters(F32), tx=tx)

    def step(state, x, y):
        value, grads = state.value_and_grad(lambda p: loss_of(p, x, y, F16))()
        return state.apply_gradients(grads=grads), value, norm_of(grads)

    return step, (state, X, Y)


@healthy
def codebook_with_averages():
    def step(p, counts, sums, x):
        def loss(p):
            rows = hidden(p, x, BF16).astype(F32)
            codes = sums / counts[:, None]
            distances = ((rows[:, None] - codes) ** 2).sum(-1)
            index = distances.argmin(-1)
            chosen = rows + lax.stop_gradient(codes[index] - rows)
            outputs = chosen.astype(BF16) @ p["v"].astype(BF16)
            one_hot = jax.nn.one_hot(index, 16)
            new = 0.99 * counts + 0.01 * one_hot.sum(0), 0.99 * sums + 0.01 * one_hot.T @ rows
            return jnp.mean(outputs.astype(F32) ** 2) + jnp.mean((rows - codes[index]) ** 2), new

        (value, (counts, sums)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return sgd(p, grads), counts, sums, value

    return step, (parameters(F32), jnp.ones(16), jnp.ones((16, HIDDEN)), X)


@healthy
def state_space_layer():
    def loss(p, x, y):
        rows = hidden(p, x, BF16)
        decay = jnp.exp(-jax.nn.softplus(p["decay"]))

        def body(state, row):
            state = decay * state + row.astype(F32)
            return state, state.astype(BF16)

        _, outputs = lax.scan(body, jnp.zeros(HIDDEN), rows)
        gated = outputs * jax.nn.silu(rows)
        return cross_entropy(head(gated, p["v"]), y, F32)

    return optimized(optax.adam(1e-3), loss, parameters(F32) | {"decay": jnp.zeros(HIDDEN)}, X, Y)
