"""What a plan does, and whether this machine's PyTorch and annulus fit together: annulus.plan and annulus.doctor."""

import json
from typing import Any

import torch

from . import _library


def plan(*args: Any, **kwargs: Any) -> dict[str, Any]:
    raise NotImplementedError


def doctor() -> str:
    raise NotImplementedError
