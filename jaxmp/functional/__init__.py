"""Rotary position embeddings, activations and linear layers for 16-bit models.

Rotary embeddings lose precision if they are computed in 16 bits. The function accepts 16-bit
operands, computes in FP32 (float64 for float64 operands), and rounds once, to the dtype of the
operand.

Activations have the results of `jax.nn`, and save only their inputs for the backward pass. The
gradients of a linear layer's FP32 parameters are never rounded to 16 bits.

Shape suffixes: ... any dimensions, D features, T positions, N heads, H features of a head.
"""

from jaxmp.functional._activations import gelu as gelu
from jaxmp.functional._activations import silu as silu
from jaxmp.functional._activations import swiglu as swiglu
from jaxmp.functional._linear import linear as linear
from jaxmp.functional._rotary import rotary_embedding as rotary_embedding

__all__ = ["gelu", "linear", "rotary_embedding", "silu", "swiglu"]
