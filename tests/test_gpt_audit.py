"""Errors planted into the training step of GPT-2 124M, which the fixes of the audit remove."""

import jax
import pytest

import gpt
import jaxmp
from findings import the_only

# A training step in plain JAX and optax, with microbatches. `CLEAN` fills in the lines in brackets.
STEP = """
import jax, jax.numpy as jnp, numpy as np, optax
import gpt, jaxmp

plain_attention = gpt.causal_attention
def causal_attention(q, k, v, split):
    q, k, v = jnp.stack([q, k, v]) * [scale]
    return plain_attention(q, k, v, split)

model = jaxmp.load_recipe("bf16").wrap(gpt.SIZES["gpt2"])
tx = optax.adamw(6e-4)
[optimizer]

def loss_fn(params, tokens):
    return model.apply({"params": params}, tokens[:, :-1], tokens[:, 1:])

def init():
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    state = tx.init(params)
    return jax.tree.map(lambda p: p.astype([stored]), params), state

def start(p):
    [start]
    return total

def add(total, grads):
    [sum]
    return total

def train_step(params, state, tokens):
    def microbatch(total, batch):
        return jax.tree.map(add, total, jax.grad(loss_fn)(params, batch)), None

    total, _ = jax.lax.scan(microbatch, jax.tree.map(start, params), tokens)
    grads = jax.tree.map(lambda total, p: (total / 2).astype(p.dtype), total, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
"""
CLEAN = {
    "scale": "0.5",
    "optimizer": "",
    "stored": "jnp.float32",
    "start": "total = jnp.zeros(p.shape, jnp.float32)",
    "sum": "total = total + grads.astype(jnp.float32)",
}
PLANTED = {
    "implicit_promotion": {"scale": "np.float32(0.5)"},
    "missing_master": {"stored": "jnp.bfloat16"},
    "accumulator_16bit": {
        "start": "total = jnp.zeros(p.shape, jnp.bfloat16)",
        "sum": "total = total + grads.astype(jnp.bfloat16)",
    },
}
# Places in which the lines of each fix are pasted. The source of the step is not in a file, so that
# the fix of a carry has no code.
PASTED = {"implicit_promotion": ("scale",), "missing_master": ("optimizer",)}
TOKENS = jax.ShapeDtypeStruct((2, 4, 1025), "int32")


def audit_step(lines, monkeypatch):
    """Audits the step, of which only shapes are used."""
    source = STEP
    for name, code in (CLEAN | lines).items():
        source = source.replace(f"[{name}]", code)
    names = {}
    exec(source, names)
    with monkeypatch.context() as patched, jax.numpy_dtype_promotion("standard"):
        patched.setattr(gpt, "causal_attention", names["causal_attention"])
        shapes = jax.eval_shape(names["init"])
        return jaxmp.audit(names["train_step"], *shapes, TOKENS, recipe="bf16")


@pytest.mark.slow
def test_the_fixes_of_planted_errors_remove_them(monkeypatch):
    assert audit_step({}, monkeypatch).ok
    for check, lines in PLANTED.items():
        report = audit_step(lines, monkeypatch)
        finding = the_only(report.errors, check)
        fix = [line.strip() for line in finding.fix.splitlines() if line.startswith("    ")]
        if check not in PASTED:
            assert not fix and "first value of the carry to FP32 before the loop" in finding.fix
            continue
        fixed = lines | dict(zip(PASTED[check], fix, strict=True))
        assert audit_step(fixed, monkeypatch).ok, (check, fix)
