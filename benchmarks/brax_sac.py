"""Trains SAC of brax with 16-bit parameters, and target networks in FP32 and in bfloat16.

    python benchmarks/brax_sac.py
    python benchmarks/brax_sac.py --steps 4000 --seeds 5

Needs brax 0.14. Networks and losses are those of brax, and a step updates them in its order. The
networks are smaller, and the transitions are those of a linear system, so that it takes minutes.
All seeds train in one program under `jax.vmap`, and all forms with the same random numbers.
For each form of the target network it prints the actor loss at the end (the mean of the last tenth
of the steps), and the 95 % interval of its difference to FP32 training, paired by seed. It exits
with 0 if the interval covers 0 or is within 10 % for the FP32 target network, not the other.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
import typer
from brax.training.acme import running_statistics, specs
from brax.training.agents.sac import losses, networks
from brax.training.types import Transition

import jaxmp

OBSERVATIONS, ACTIONS, BATCH, TAU = 8, 2, 64, 0.005
FORMS = {
    "fp32": ("fp32", "optax"),
    "ours": ("bf16_params", "jaxmp"),
    "bf16": ("bf16_params", "optax"),
}


def make_transitions(key: jax.Array) -> Transition:
    """A batch of a stable linear system, with a reward near 1 in each step."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (BATCH, OBSERVATIONS))
    action = jax.random.uniform(keys[1], (BATCH, ACTIONS), minval=-1, maxval=1)
    noise = 0.1 * jax.random.normal(keys[2], x.shape)
    after = 0.9 * x + noise + 0.1 * jnp.pad(action, ((0, 0), (0, OBSERVATIONS - ACTIONS)))
    reward = 1 - 0.05 * jnp.mean(jnp.square(after), axis=-1)
    extras = {"state_extras": {"truncation": jnp.zeros(BATCH)}, "policy_extras": {}}
    return Transition(x, action, reward, jnp.ones(BATCH), after, extras)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(recipe_name: str, target_form: str, steps: int, seeds: jax.Array) -> jax.Array:
    """The actor loss of each step, for each seed."""
    recipe = jaxmp.load_recipe(recipe_name)
    network = networks.make_sac_networks(OBSERVATIONS, ACTIONS, hidden_layer_sizes=(64, 64))
    alpha_loss, critic_loss, actor_loss = (
        jaxmp.autocast(fn, recipe) for fn in losses.make_losses(network, 1.0, 0.95, ACTIONS)
    )
    statistics = running_statistics.init_state(specs.Array((OBSERVATIONS,), jnp.dtype("float32")))
    tx, alpha_tx = recipe.optimizer(optax.adam(1e-3)), optax.adam(3e-4)

    def make(params):
        return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)

    def step(carry, key):
        actor, critic, target, log_alpha, alpha_state = carry
        keys = jax.random.split(key, 4)
        batch = make_transitions(keys[0])
        grads = jax.grad(alpha_loss)(log_alpha, actor.params, statistics, batch, keys[1])
        alpha = jnp.exp(log_alpha)
        updates, alpha_state = alpha_tx.update(grads, alpha_state)
        _, critic_grads = critic.value_and_grad(critic_loss)(
            actor.params, statistics, target, alpha, batch, keys[2]
        )
        value, actor_grads = actor.value_and_grad(actor_loss)(
            statistics, critic.params, alpha, batch, keys[3]
        )
        critic = critic.apply_gradients(grads=critic_grads)
        actor = actor.apply_gradients(grads=actor_grads)
        if target_form == "jaxmp":
            target = jaxmp.optim.incremental_update(critic, target, TAU)
        else:
            target = optax.incremental_update(critic.params, target, TAU)
        log_alpha = optax.apply_updates(log_alpha, updates)
        return (actor, critic, target, log_alpha, alpha_state), value

    def run(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        actor = make(network.policy_network.init(keys[0]))
        critic = make(network.q_network.init(keys[1]))
        target = jaxmp.optim.fp32_copy(critic) if target_form == "jaxmp" else critic.params
        log_alpha = jnp.float32(0)
        carry = (actor, critic, target, log_alpha, alpha_tx.init(log_alpha))
        return jax.lax.scan(step, carry, jax.random.split(keys[2], steps))[1]

    return jax.vmap(run)(seeds)


def main(steps: int = 4000, seeds: int = 5) -> None:
    """Trains all forms and prints a line for each."""
    numbers = jnp.arange(seeds)
    final, passed = {}, {}
    for name, (recipe, form) in FORMS.items():
        values = np.asarray(train(recipe, form, steps, numbers), np.float64)
        final[name] = values[:, -steps // 10 :].mean(axis=1)
        difference = final[name] - final["fp32"]
        mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(seeds)
        width = scipy.stats.t.ppf(0.975, seeds - 1) * error
        scale = abs(final["fp32"].mean())
        passed[name] = abs(mean) <= width or abs(mean) + width <= 0.1 * scale
        print(
            f"{name:<5} actor loss {final[name].mean():8.3f}  difference to FP32 "
            f"[{mean - width:.3f}, {mean + width:.3f}] = "
            f"[{(mean - width) / scale:+.1%}, {(mean + width) / scale:+.1%}]",
            flush=True,
        )
    raise typer.Exit(0 if passed["ours"] and not passed["bf16"] else 1)


if __name__ == "__main__":
    typer.run(main)
