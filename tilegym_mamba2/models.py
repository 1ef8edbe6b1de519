"""Geometry of released models: what their Mamba-2 layers ask of the scan."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of the Mamba-2 layers of a released model."""

    name: str
    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int


_SIZES = {
    "mamba2-130m": (24, 64, 128, 1, 256),
    "mamba2-370m": (32, 64, 128, 1, 256),
    "mamba2-780m": (48, 64, 128, 1, 256),
    "mamba2-1.3b": (64, 64, 128, 1, 256),
    "mamba2-2.7b": (80, 64, 128, 1, 256),
    "codestral-mamba-7b": (128, 64, 128, 8, 256),
    "zamba2-2.7b": (80, 64, 64, 1, 256),
    "zamba2-7b": (112, 64, 64, 2, 256),
    "bamba-9b": (128, 64, 128, 1, 256),
    "nemotron-h-8b": (128, 64, 128, 8, 128),
    "nemotron-h-56b": (256, 64, 256, 8, 128),
    "nemotron-nano-9b-v2": (128, 80, 128, 8, 128),
    "nemotron-3-nano-4b": (96, 80, 128, 8, 256),
    "nemotron-3-nano-30b": (64, 64, 128, 8, 128),
    "falcon-h1-1.5b": (48, 64, 256, 1, 256),
    "falcon-h1-7b": (24, 128, 256, 1, 128),
    "falcon-h1-tiny": (24, 32, 64, 1, 256),
    "granite-4-h-tiny": (48, 64, 128, 1, 256),
    "granite-4-h-small": (128, 64, 128, 1, 256),
}

MODELS: dict[str, Model] = {name: Model(name, *sizes) for name, sizes in _SIZES.items()}


def find_model(name: str) -> Model:
    """The model of that name. Raises ValueError, with the nearest name and the list, if there is none."""
    if name not in MODELS:
        nearest = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"there is no model {name!r}{hint}; models: {', '.join(MODELS)}")
    return MODELS[name]
