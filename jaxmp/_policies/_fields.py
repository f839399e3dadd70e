"""Fields of recipe files: the values that a key allows, and their conversion to settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmp._core._dtypes import bits, canonical_dtype
from jaxmp._core._messages import did_you_mean
from jaxmp._policies import _toml
from jaxmp.errors import RecipeError


class Field(NamedTuple):
    """Values that one key allows, and their conversion to a setting."""

    # Allowed values, for error messages.
    allowed: str
    # An allowed value as TOML text.
    example: str
    # Allowed TOML types; of `bool` and `int` only the exact type counts.
    types: tuple[type, ...] = (str,)
    # Allowed strings -> settings; they need not be of the types above.
    names: Mapping[str, Any] = {}
    # Inclusive bounds of a number; NaN is outside.
    bounds: tuple[float, float] = (-math.inf, math.inf)
    # True for strings without line breaks and control characters.
    is_line: bool = False
    # Converts the TOML value. A ValueError, such as a JaxmpError, means that it is not allowed.
    convert: Callable[[Any], Any] | None = None

    def read(self, value: Any) -> Any:
        """Converts a TOML value to a setting.

        Raises:
          ValueError: if the value is not allowed; the message contains the value and the reason.
        """
        if isinstance(value, str) and value in self.names:
            return self.names[value]
        low, high = self.bounds
        is_outside = isinstance(value, (int, float)) and not low <= value <= high
        is_long = self.is_line and isinstance(value, str) and not value.isprintable()
        if type(value) not in self.types or is_outside or is_long:
            hint = did_you_mean(value, self.names) if isinstance(value, str) else ""
            raise RecipeError(
                f"{_toml.describe(value)} is not allowed.{hint} Allowed: {self.allowed}."
            )
        return value if self.convert is None else self.convert(value)


def choice(*options: str, example: str = "") -> Field:
    allowed = f"one of {', '.join(map(_toml.quoted, options))}"
    names = dict(zip(options, options, strict=True))
    return Field(allowed, _toml.quoted(example or options[0]), (), names)


def _dtype_name(name: str) -> str:
    dtype = canonical_dtype(name)
    if bits(dtype) < 16:
        raise RecipeError(
            f"{dtype.name} is too narrow: values overflow without a scale. Use float32, bfloat16 "
            'or float16; matmul = "fp8" makes linear layers multiply in FP8, with scales.'
        )
    return dtype.name


_FP32_MAX = float(np.finfo(np.float32).max)
BOOLEAN = Field("true or false", "true", (bool,))
NUMBER = Field(
    "a number that FP32 can represent",
    "65536.0",
    (int, float),
    bounds=(-_FP32_MAX, _FP32_MAX),
    convert=float,
)
COUNT = Field("an integer", "2000", (int,), bounds=(-(2**31), 2**31 - 1))
DTYPE = Field("the name of a dtype of at least 16 bits", '"float32"', convert=_dtype_name)


class Setting(NamedTuple):
    """Value of a key after its conversion, and the location of the key."""

    value: Any
    document: _toml.Document
    key: _toml.Key

    @property
    def location(self) -> str:
        """File, line, column and key, for error messages."""
        return self.document.locate(*self.key)
