"""A form that an answer is to have."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a random model would make use of the freedom

    sky: Literal["clear", "cloudy", "rain"]
    windy: bool
    degrees: Literal[-5, 10, 25]
