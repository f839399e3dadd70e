"""Counts the verdicts of `jaxmp.validate` on ten healthy trainings of different kinds.

    python benchmarks/validate_healthy.py                   # all trainings in bf16 and fp16
    python benchmarks/validate_healthy.py --only gan elbo
    python benchmarks/validate_healthy.py --out benchmarks/results

The recipes are unchanged, so a verdict of "fail" or "differs" is false. The losses are positive,
negative, cross zero, or become almost zero. Takes about ten minutes on one core.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from result_file import parser_of, write_result

RECIPES = ("bf16", "fp16")
SEEDS = 3
FP32 = jnp.float32

Batch = dict[str, np.ndarray]
# (function that applies the model, parameters, batch) -> FP32 scalar.
Loss = Callable[[Any, Any, Any], jax.Array]


class Training(NamedTuple):
    """Model, loss, batches by seed, optimizer, steps, and further held-out metrics."""

    model: nn.Module
    loss: Loss
    batches: Callable[[int], Iterator[Batch]]
    tx: optax.GradientTransformation
    steps: int = 200
    metrics: Mapping[str, Loss] = MappingProxyType({})
    directions: dict[str, str] | None = None
    held_out: Batch | None = None


class Perceptron(nn.Module):
    """Two hidden layers."""

    outputs: int
    width: int = 48

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Dense(self.width)(x))
        x = nn.gelu(nn.Dense(self.width)(x))
        return nn.Dense(self.outputs, name="out")(x)


def rows(seed: int, make: Callable[[np.random.Generator], Batch]) -> Iterator[Batch]:
    """Yields batches, of which each is made from one generator of random numbers."""
    rng = np.random.default_rng(seed)
    while True:
        yield {
            key: value.astype(np.float32) if value.dtype == np.float64 else value
            for key, value in make(rng).items()
        }


# ---------------------------------------------------------------------------
# Supervised
# ---------------------------------------------------------------------------


def curve(rng: np.random.Generator, noise: float = 0.3, size: int = 64) -> Batch:
    """Returns a batch of a regression with noise."""
    x = rng.normal(size=(size, 8))
    y = np.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + noise * rng.normal(size=(size, 1))
    return {"x": x, "y": y}


def squared_error(apply: Any, params: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(apply(params, batch["x"]).astype(FP32) - batch["y"]))


def subset(rng: np.random.Generator) -> Batch:
    """Returns half of the 64 noisy examples that a model of this size learns by heart."""
    examples = curve(np.random.default_rng(9), noise=0.5)
    index = rng.integers(0, 64, 32)
    return {key: value[index] for key, value in examples.items()}


def gaussian_nll(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Negative log-likelihood of a predicted mean and deviation; it crosses zero."""
    mean, log_scale = jnp.split(apply(params, batch["x"]).astype(FP32), 2, axis=-1)
    log_scale = jnp.clip(log_scale, -6, 3)
    return jnp.mean(log_scale + 0.5 * jnp.square((batch["y"] - mean) * jnp.exp(-log_scale)))


class Recurrent(nn.Module):
    """Classifier of sequences with a GRU."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        states: Any = nn.RNN(nn.GRUCell(24))(x)
        return nn.Dense(4, name="head")(states[:, -1])


def sequences(rng: np.random.Generator) -> Batch:
    x = rng.normal(size=(64, 12, 4))
    return {"x": x, "y": np.argmax(x[:, 3] + x[:, 9], -1).astype(np.int32)}


def cross_entropy(apply: Any, params: Any, batch: Any) -> jax.Array:
    logits = apply(params, batch["x"]).astype(FP32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# ---------------------------------------------------------------------------
# Contrastive and generative
# ---------------------------------------------------------------------------


def views(rng: np.random.Generator) -> Batch:
    """Returns two noisy views of the same points, one after the other."""
    point = rng.normal(size=(32, 8))
    return {"x": np.concatenate([point + 0.5 * rng.normal(size=point.shape) for _ in range(2)])}


def contrastive(apply: Any, params: Any, batch: Any) -> jax.Array:
    """InfoNCE with a temperature of 0.07."""
    z = apply(params, batch["x"]).astype(FP32)
    z = z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-6)
    first, second = jnp.split(z, 2)
    logits = first @ second.T / 0.07
    labels = jnp.arange(len(first))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Autoencoder(nn.Module):
    """Variational autoencoder; the input has the noise of the latent variables as last columns."""

    latent: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, noise = x[:, : -self.latent], x[:, -self.latent :]
        hidden = nn.gelu(nn.Dense(48, name="encoder")(x))
        mean, log_scale = jnp.split(nn.Dense(2 * self.latent, name="posterior")(hidden), 2, -1)
        z = mean + jnp.exp(log_scale.astype(FP32)).astype(mean.dtype) * noise.astype(mean.dtype)
        decoded = nn.Dense(x.shape[-1], name="decoder")(nn.gelu(nn.Dense(48, name="hidden")(z)))
        return jnp.concatenate([decoded, mean, log_scale], -1)


MIXTURE = np.random.default_rng(5).normal(size=(3, 16))


def factors(rng: np.random.Generator) -> Batch:
    x = np.tanh(rng.normal(size=(64, 3)) @ MIXTURE) + 0.05 * rng.normal(size=(64, 16))
    return {"x": np.concatenate([x, rng.normal(size=(64, 4))], -1)}


def negative_elbo(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Gaussian reconstruction with a deviation of 0.1, and the divergence; it becomes negative."""
    outs = apply(params, batch["x"]).astype(FP32)
    decoded, mean, log_scale = outs[:, :16], outs[:, 16:20], outs[:, 20:]
    errors = 0.5 * jnp.square((batch["x"][:, :16] - decoded) / 0.1) + np.log(0.1)
    divergence = 0.5 * (jnp.square(mean) + jnp.exp(2 * log_scale) - 1) - log_scale
    return jnp.mean(errors.sum(-1) + divergence.sum(-1))


class Adversarial(nn.Module):
    """Generator of points on a ring, and its discriminator."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        generator, discriminator = Perceptron(2, 32, name="generator"), Perceptron(1, 32, name="d")
        noise, real = x[:, :4], x[:, 4:]
        fake = generator(noise)
        # The discriminator learns from detached samples, the generator from its frozen judgement.
        learns = discriminator(jnp.concatenate([real, jax.lax.stop_gradient(fake).astype(FP32)]))
        frozen = jax.lax.stop_gradient(self.variables["params"].get("d", {}))
        judge: Any = Perceptron(1, 32, parent=None)
        judged = judge.apply({"params": frozen}, fake) if frozen else fake
        return jnp.concatenate([learns.ravel(), judged.ravel(), fake.ravel()])


def ring(rng: np.random.Generator) -> Batch:
    angle = rng.uniform(0, 2 * np.pi, 64)
    real = np.stack([np.cos(angle), np.sin(angle)], -1) + 0.05 * rng.normal(size=(64, 2))
    return {"x": np.concatenate([rng.normal(size=(64, 4)), real], -1)}


def gan_loss(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Sum of the losses of discriminator and generator."""
    outs = apply(params, batch["x"]).astype(FP32)
    real, fake, judged = outs[:64], outs[64:128], outs[128:192]
    bce = lambda logits, label: jnp.mean(optax.sigmoid_binary_cross_entropy(logits, label))
    return bce(real, jnp.ones(64)) + bce(fake, jnp.zeros(64)) + bce(judged, jnp.ones(64))


def radius_error(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Mean distance of generated points from the ring."""
    fake = apply(params, batch["x"]).astype(FP32)[192:].reshape(-1, 2)
    return jnp.mean(jnp.abs(jnp.linalg.norm(fake, axis=-1) - 1))


# ---------------------------------------------------------------------------
# Reinforcement
# ---------------------------------------------------------------------------


def actions(rng: np.random.Generator) -> Batch:
    """Returns states, random actions and their noisy advantages."""
    x, a = rng.normal(size=(256, 8)), rng.integers(0, 4, 256).astype(np.int32)
    best = np.argmax(x[:, :4], -1)
    return {"x": x, "a": a, "advantage": (a == best) - 0.25 + rng.normal(size=256)}


def policy_gradient(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Loss whose value is negative, and of which only the gradient has a meaning."""
    log_probs = jax.nn.log_softmax(apply(params, batch["x"]).astype(FP32))
    chosen = jnp.take_along_axis(log_probs, batch["a"][:, None], -1)[:, 0]
    return -jnp.mean(chosen * batch["advantage"])


def reward(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Expected reward of the policy."""
    probs = jax.nn.softmax(apply(params, batch["x"]).astype(FP32))
    best = jnp.argmax(batch["x"][:, :4], -1)
    return jnp.mean(jnp.take_along_axis(probs, best[:, None], -1))


def negative_reward(apply: Any, params: Any, batch: Any) -> jax.Array:
    return -reward(apply, params, batch)


def transitions(rng: np.random.Generator) -> Batch:
    x, a = rng.normal(size=(128, 8)), rng.integers(0, 4, 128).astype(np.int32)
    move = 0.5 * np.eye(8)[a]
    return {"x": x, "a": a, "next": 0.7 * x + move, "r": x[np.arange(128), a]}


def q_learning(apply: Any, params: Any, batch: Any) -> jax.Array:
    """Error of the values of one step, with a bootstrapped target."""
    values = apply(params, batch["x"]).astype(FP32)
    following = apply(jax.lax.stop_gradient(params), batch["next"]).astype(FP32)
    target = batch["r"] + 0.9 * following.max(-1)
    chosen = jnp.take_along_axis(values, batch["a"][:, None], -1)[:, 0]
    return jnp.mean(jnp.square(chosen - target))


# ---------------------------------------------------------------------------
# Trainings and results
# ---------------------------------------------------------------------------

MODEL, ADAM = Perceptron(1), optax.adam(3e-3)
REWARD = {"reward": reward}
# fmt: off
TRAININGS = {
    "regression": Training(MODEL, squared_error, lambda s: rows(s, curve), ADAM),
    "overfitting": Training(
        Perceptron(1, 96), squared_error, lambda s: rows(s, subset), ADAM, 400,
        held_out=next(rows(77, lambda rng: curve(rng, 0.5, 256))),
    ),
    "gaussian_nll": Training(
        Perceptron(2), gaussian_nll, lambda s: rows(s, lambda rng: curve(rng, 0.05)), ADAM,
    ),
    "recurrent": Training(Recurrent(), cross_entropy, lambda s: rows(s, sequences), ADAM),
    "contrastive": Training(Perceptron(16), contrastive, lambda s: rows(s, views), ADAM),
    "elbo": Training(Autoencoder(), negative_elbo, lambda s: rows(s, factors), ADAM),
    "gan": Training(
        Adversarial(), gan_loss, lambda s: rows(s, ring), optax.adam(1e-3, b1=0.5),
        metrics={"radius_error": radius_error}, directions={"radius_error": "min"},
    ),
    "policy_gradient": Training(
        Perceptron(4), policy_gradient, lambda s: rows(s, actions), optax.adam(1e-3),
        metrics=REWARD, directions={"reward": "max"},
    ),
    "reward": Training(Perceptron(4), negative_reward, lambda s: rows(s, actions), ADAM),
    "q_learning": Training(Perceptron(4), q_learning, lambda s: rows(s, transitions), ADAM),
}
# fmt: on


def make_run(training: Training, recipe: jaxmp.Recipe, seed: int) -> jaxmp.TrainingRun:
    """Returns the run of a training with one recipe and seed."""
    held_out = training.held_out or next(training.batches(77))
    params = training.model.init(jax.random.key(seed), held_out["x"])
    apply = recipe.wrap(training.model).apply
    tx = recipe.optimizer(training.tx)
    state = jaxmp.TrainState.create(apply_fn=apply, params=params, tx=tx)

    def step(state: jaxmp.TrainState, batch: Any) -> Any:
        loss_of = lambda params, batch: training.loss(apply, params, batch)
        loss, grads = state.value_and_grad(loss_of)(batch)
        return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}

    def evaluate(state: jaxmp.TrainState) -> dict[str, jax.Array]:
        functions = {"loss": training.loss, **training.metrics}
        return {name: fn(apply, state.params, held_out) for name, fn in functions.items()}

    batches = training.batches(seed)
    return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)


def measure(name: str, seeds: int = SEEDS, steps: int | None = None) -> list[dict[str, Any]]:
    """Validates both recipes on a training, and returns their verdicts and first lines."""
    training, since = TRAININGS[name], time.process_time()
    report = jaxmp.validate(
        lambda recipe, seed: make_run(training, recipe, seed),
        RECIPES,
        steps=steps or training.steps,
        seeds=seeds,
        metrics=training.directions,
        progress=False,
    )
    seconds = round(time.process_time() - since, 1)
    shared = {"training": name, "reason": report.metric.reason, "cpu_seconds": seconds}
    return [
        {**shared, "recipe": each.name, "verdict": each.verdict, "headline": each.headline}
        for each in report.candidates
    ]


def main() -> None:
    parser = parser_of(__doc__, TRAININGS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    results = []
    for name in options.only:
        results += measure(name, options.seeds)
        for row in results[-len(RECIPES) :]:
            print(f"{name}: {row['headline']}", flush=True)
    counts = Counter(row["verdict"] for row in results)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.out:
        file = options.out / "validate_healthy_cpu.json"
        machine = f"{jax.default_backend()} ({platform.machine()})"
        write_result(file, machine=machine, counts=counts, trainings=results)


if __name__ == "__main__":
    main()
