"""Checkpoints that preserve precision: parameters, masters, loss scale and the recipe."""

from jaxmp.checkpoint._checkpointer import Checkpointer as Checkpointer
from jaxmp.checkpoint._info import CheckpointInfo as CheckpointInfo
from jaxmp.checkpoint._safetensors import load_safetensors as load_safetensors
from jaxmp.checkpoint._safetensors import save_safetensors as save_safetensors
from jaxmp.errors import CheckpointError as CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "load_safetensors",
    "save_safetensors",
]
