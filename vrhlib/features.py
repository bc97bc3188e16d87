"""Vision features on disk: pictures that many notebooks show need to be looked at once.

Off unless VRHLIB_FEATURES_GB says how much room they may take; then the least recently used make way. A file is one
picture, in safetensors, found by its key alone (see `VLM.see`); it can be deleted at any time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vrhlib import store

if TYPE_CHECKING:
    import torch


def limit_gb() -> float:
    """How much room features may take, GB; 0 where they are not kept. Raises ValueError for what is no number."""
    text = os.environ.get("VRHLIB_FEATURES_GB") or "0"
    try:
        if 0 <= (limit := float(text)) < float("inf"):
            return limit
    except ValueError:
        pass
    raise ValueError(f"VRHLIB_FEATURES_GB={text!r}: it takes a number of gigabytes, such as 20; 0 keeps nothing.")


def _folder(profile: str | None) -> Path:
    return store.runs_dir(profile) / "features"


def load(profile: str | None, key: str, device: torch.device) -> tuple[torch.Tensor, ...] | None:
    """What was kept under a key; None if there is nothing that can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = _folder(profile) / f"{key}.safetensors"
    try:
        found = load_file(path, str(device))
        os.utime(path)  # used now
        return tuple(found[str(level)] for level in range(len(found)))
    except (OSError, SafetensorError, KeyError):
        return None


def save(profile: str | None, key: str, levels: tuple[torch.Tensor, ...]) -> None:
    """Keep a picture's features and let the least recently used go. A disk that cannot take them costs nothing but time
    later: it is said once."""
    from safetensors.torch import save as packed

    content = packed({str(i): level.contiguous().cpu() for i, level in enumerate(levels)})
    if len(content) > limit_gb() * 1e9:
        return
    folder = _folder(profile)
    try:
        store.write_atomic(folder / f"{key}.safetensors", content)
    except OSError as error:
        store.say_once(f"Vision features are not kept: {error}")
        return
    files = []
    for path in folder.glob("*.safetensors"):
        with suppress(OSError):  # another process may have removed it
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    room = limit_gb() * 1e9 - sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if room >= 0:
            break
        with suppress(OSError):
            path.unlink()
            room += size
