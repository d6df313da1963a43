"""The rank table of heads: which one counts, whether it is theirs, and the accuracies that it holds.

One may lie beside the heads, another in the user's cache, where the Tuner's calibration leaves it. `tuning.accuracy`
writes such tables and reads the whole of them. Here is what loading heads needs, so that whoever builds a tree for them
goes by the same accuracies.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

import numpy as np

from medusa_viz.models.fetch import cache_root
from medusa_viz.models.memory import QUANTISED

if TYPE_CHECKING:
    from medusa_viz.models.heads import MedusaHeads

RANKS_NAME = "ranks.npz"
FINGERPRINT_DIGITS = 16
UNREADABLE = "The rank table {} cannot be read; `calibrate` writes one."
NPZ_FAULTS = (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What numpy raises for an .npz that is missing, of another kind, cut short or damaged anywhere."""


def heads_fingerprint(module: MedusaHeads) -> str:
    """First hex digits of the SHA-256 of the heads' residual weights: tells one set of heads from another.

    They are rounded as on disk (half) and then as on a card (bfloat16), so that training, a CPU and a card agree.
    """
    weights = module.weight.detach()
    weights = weights.half() if weights.dtype.itemsize > 2 else weights
    data = weights.bfloat16().float().cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:FINGERPRINT_DIGITS]


def is_of(about: Mapping[str, object], module: MedusaHeads, model: str = "", dtype: str = "") -> bool:
    """Whether a table was made with these heads, and on this backbone as far as both say: another model drafts from
    other states, and a quantised one writes another text."""
    if about.get("heads_fingerprint") != heads_fingerprint(module):
        return False
    made_on, made_in = about.get("model"), about.get("dtype")
    if model and made_on and Path(str(made_on)).name.lower() != Path(model).name.lower():
        return False
    return not (dtype and made_in) or made_in == dtype or not {made_in, dtype} & set(QUANTISED)


def rank_table(source: str, module: MedusaHeads, model: str = "", dtype: str = "") -> Path | None:
    """The rank table that counts for heads: the one in their folder if it is theirs, else the user's own. Raises
    ValueError for one in their folder that cannot be read, where there is no other."""
    folder = Path(source)
    path = (folder if folder.is_dir() else folder.parent) / RANKS_NAME
    try:
        if _belongs(path, module, model, dtype):
            return path
    except ValueError:
        if (own := own_table(module, model, dtype)) is None:
            raise
        return own
    return own_table(module, model, dtype)


def own_table(module: MedusaHeads, model: str = "", dtype: str = "") -> Path | None:
    """The rank table in the user's cache, if there is one and it is theirs."""
    if not own_folder().is_dir():
        return None
    path = own_place(module)
    try:
        return path if _belongs(path, module, model, dtype) else None
    except ValueError:  # calibrating writes it anew
        return None


def own_place(module: MedusaHeads) -> Path:
    """Where the user's own rank table of heads lies."""
    return own_folder() / f"{heads_fingerprint(module)}.npz"


def own_folder() -> Path:
    return cache_root() / "ranks"


def _belongs(path: Path, module: MedusaHeads, model: str, dtype: str) -> bool:
    """There is a table, and it is of these heads. Raises ValueError for one that cannot be read."""
    if not path.is_file():
        return False
    try:
        about = dict(json.loads(str(_array(path, "about"))))
    except (TypeError, ValueError) as error:
        raise ValueError(UNREADABLE.format(path)) from error
    return is_of(about, module, model, dtype)


def accuracies(path: Path) -> list[list[float]]:
    """K rows of a_k(i), as the table holds them. Raises ValueError."""
    return _array(path, "accuracy").tolist()


def _array(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file[name]
    except NPZ_FAULTS as error:
        raise ValueError(UNREADABLE.format(path)) from error
