"""Local exceptions from strict promotion, for libraries that promote implicitly."""

import jax
import optax


def relaxed(tx):
    """Returns an optax transformation that runs under standard promotion.

    `optax.tree_utils.tree_bias_correction` (used by every Adam) computes `float ** int32`, and
    `optax.clip_by_global_norm` compares mixed types. Code around the transformation stays strict.
    """
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)
