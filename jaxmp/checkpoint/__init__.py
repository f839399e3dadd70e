"""Checkpoints that preserve precision: parameters, masters, loss scale and the recipe."""

from jaxmp.checkpoint._checkpointer import Checkpointer
from jaxmp.checkpoint._manifest import CheckpointInfo as CheckpointInfo
from jaxmp.checkpoint._safetensors import load_safetensors, save_safetensors

__all__ = [
    "Checkpointer",
    "load_safetensors",
    "save_safetensors",
]
