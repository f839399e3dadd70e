"""A policy that is cast to BF16 before its optimizer is created, and is trained in BF16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp


def make_run(recipe, seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (16, 16)) / 4, "scale": jnp.ones(16)}
    params = recipe.policies.default.cast_to_compute(params)  # policy.to(bfloat16)
    tx = optax.adamw(1e-3)

    def loss_fn(params, x):
        w, scale = recipe.policies.default.cast_to_compute((params["w"], params["scale"]))
        return jnp.square((jnp.tanh(x.astype(w.dtype) @ w) * scale).astype(x.dtype) - x).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "grads": grads}

    data = np.random.default_rng(seed).uniform(-0.8, 0.8, size=(200, 32, 16)).astype(np.float32)
    state = {"params": params, "opt_state": tx.init(params)}
    held_out = lambda state: {"loss": loss_fn(state["params"], data[0])}
    return jaxmp.TrainingRun(state=state, step=step, batches=data, evaluate=held_out)
