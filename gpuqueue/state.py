"""What a checkpoint says of a queue, and when it may be loaded into another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

VERSION = 1


def describe(thing: Any) -> Any:
    """Plain data that tells two settings apart: numbers and text as they are, objects by type and attributes.

    >>> describe({"spacing": (1.0, 2.0), "mode": "centre"})
    {'spacing': [1.0, 2.0], 'mode': 'centre'}
    """
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, Mapping):
        return {str(key): describe(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [describe(value) for value in thing]
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    attributes = {name: describe(value) for name, value in getattr(thing, "__dict__", {}).items()}
    return {"type": type(thing).__qualname__} | attributes


def digest(values: Sequence[Any]) -> str:
    """A short text that stands for a long list."""
    return hashlib.blake2b(json.dumps(list(values)).encode(), digest_size=8).hexdigest()


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and batches of a state; ValueError naming every setting that differs from this queue's."""
    if state.get("version") != VERSION:
        raise ValueError(f"the state has version {state.get('version')!r}, this gpuqueue reads version {VERSION}")
    saved = state["settings"]
    different = [name for name in settings if saved.get(name) != settings[name]]
    if different:
        pairs = "; ".join(f"{name}: {saved.get(name)!r} in the state, {settings[name]!r} here" for name in different)
        raise ValueError(f"the state is of another queue and its patches would not come again: {pairs}")
    return int(state["epoch"]), int(state["batches"])
