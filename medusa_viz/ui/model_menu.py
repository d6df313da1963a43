"""The model menu: what can run here, what cannot and why, and what a choice in it asks of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.models import memory
from medusa_viz.models.presets import PRESETS, shipped
from medusa_viz.models.published import PUBLISHED, Fit, fits
from medusa_viz.ui import running
from medusa_viz.ui.knobs import ActionError

DTYPES = ("auto", "fp32", "bf16", "fp16", "8bit", "4bit")
LONGEST = 500  # characters of a model's name or path


def menu(host: Any, t: Texts) -> dict:
    """Everything that the menu shows; a server that keeps its model tells no paths."""
    kind = _device(host)
    free = memory.free(kind)
    what = t("models.gpu_memory" if kind == "cuda" else "models.memory")
    return {
        "locked": host.locked, "busy": host.status.state == "loading" or host.status.coming is not None,
        "free": t("models.free", free=memory.gb(free), what=what),
        "local": [_entry(host, *entry) for entry in _local(host, t)],
        "published": [_published(host, fit, t) for fit in fits(kind, free)],
        "dtypes": list(DTYPES[1:]), "model": "" if host.locked else host.options["model"],
    }


def choice(host: Any, model: object, heads: object, dtype: object) -> dict[str, str]:
    """What the host is to load. No model means the running one with other heads; no dtype, the one that fits or that
    the server was started with. Raises ActionError, or ValueError with one sentence."""
    if not all(isinstance(part, str) and len(part) <= LONGEST for part in (model, heads, dtype)):
        raise ActionError("odd_payload", name="use")
    model, heads = _named(model), _named(heads)
    if dtype not in ("", *DTYPES):
        raise ActionError("no_dtype", name=dtype[:20], dtypes=", ".join(DTYPES))
    if not model and not heads:
        raise ActionError("no_model_named")
    if not model:
        return {"heads": heads, **({"dtype": dtype} if dtype else {})}
    if not dtype:
        dtype = _fitting(host, model) if model in PUBLISHED else host.asked["dtype"]
    return {"model": model, "heads": heads, "dtype": dtype}


def _named(text: str) -> str:
    text = text.strip()
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _fitting(host: Any, name: str) -> str:
    """The first dtype in which a published model fits here."""
    fit = next(fit for fit in fits(_device(host)) if fit.preset.name == name)
    if fit.dtype is None:
        raise ValueError(fit.sentence)
    return fit.dtype


def _device(host: Any) -> str:
    """The kind of device that the next model goes to."""
    if host.model is not None:
        return host.model.engine.backbone.device.type
    try:
        return running.device_kind(host.asked)
    except ValueError:  # no such device: the status line says so
        return "cpu"


def _local(host: Any, t: Texts) -> list[tuple[str, str, str, str]]:
    """(title, model, heads, note) of what the server was started with, and of the shipped presets."""
    asked = host.asked["model"], host.asked["heads"]
    own = asked[0] not in PUBLISHED and (asked[0] not in PRESETS or asked[1])
    found = [(_title(*asked, t), *asked, "")] if own else []
    for preset in shipped():
        title = t("models.joint", model=preset.title) if preset.weights != preset.name else preset.title
        found.append((title, preset.name, "", t("models.anywhere", licence=preset.licence)))
    return found


def _title(model: str, heads: str, t: Texts) -> str:
    title = PRESETS[model].title if model in PRESETS else Path(model).name
    return t("models.with_heads", model=title, heads=Path(heads).name) if heads else title


def _entry(host: Any, title: str, model: str, heads: str, note: str) -> dict:
    now = host.model is not None and (host.options["model"], host.options["heads"]) == (model, heads)
    return {"title": title, "note": note, "fits": True, "running": now,
            "choice": {} if host.locked else {"model": model, "heads": heads}}


def _published(host: Any, fit: Fit, t: Texts) -> dict:
    preset = fit.preset
    entry = _entry(host, preset.title, preset.name, "", "")
    if fit.dtype or entry["running"]:
        dtype = host.options["dtype"] if entry["running"] else fit.dtype
        note = t("models.fits", need=memory.gb(preset.need(dtype if dtype in memory.BYTES else "bf16")), dtype=dtype,
                 licence=preset.licence)
        return {**entry, "note": note}
    return {**entry, "note": t("models.too_large", needs=fit.needs, licence=preset.licence), "fits": False}
