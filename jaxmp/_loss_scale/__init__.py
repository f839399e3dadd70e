"""Loss scales (none, static, dynamic): immutable pytrees with FP32 and int32 leaves."""

from jaxmp._loss_scale._arguments import SMALLEST_SCALE as SMALLEST_SCALE
from jaxmp._loss_scale._base import LossScale as LossScale
from jaxmp._loss_scale._base import LossScaleLike as LossScaleLike
from jaxmp._loss_scale._base import NoLossScale as NoLossScale
from jaxmp._loss_scale._base import StaticLossScale as StaticLossScale
from jaxmp._loss_scale._base import as_loss_scale as as_loss_scale
from jaxmp._loss_scale._dynamic import DynamicLossScale as DynamicLossScale
