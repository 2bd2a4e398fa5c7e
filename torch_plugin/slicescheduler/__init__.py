"""Run PyTorch inference through SliceScheduler."""

from .errors import *  # noqa: F401,F403
