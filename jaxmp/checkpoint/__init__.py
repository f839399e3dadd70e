"""Checkpoints that preserve precision: parameters, masters, loss scale and the recipe."""

from jaxmp.checkpoint._checkpointer import Checkpointer as Checkpointer
from jaxmp.checkpoint._manifest import CheckpointInfo as CheckpointInfo
from jaxmp.checkpoint._safetensors import load_safetensors as load_safetensors
from jaxmp.checkpoint._safetensors import save_safetensors as save_safetensors

__all__ = [
    "Checkpointer",
    "load_safetensors",
    "save_safetensors",
]
