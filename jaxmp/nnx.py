"""Gradients, optimizer and averages of Flax NNX models."""

from jaxmp._flax._nnx_gradients import value_and_grad
from jaxmp._flax._nnx_layers import OverwriteWithGradient
from jaxmp._flax._nnx_optimizer import EMA, Optimizer

__all__ = [
    "EMA",
    "Optimizer",
    "OverwriteWithGradient",
    "value_and_grad",
]
