"""The model menu: what can run here, what cannot and why, and what a choice in it asks of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.models import memory
from medusa_viz.models.presets import DEFAULT_TREE, PRESETS, Preset, heads_folder, shipped
from medusa_viz.models.published import PUBLISHED, Fit, Published, fits
from medusa_viz.ui import running
from medusa_viz.ui.knobs import ActionError

DTYPES = ("auto", "fp32", "bf16", "fp16", "8bit", "4bit")
LONGEST = 500  # characters of a model's name or path


def menu(host: Any, token: str, t: Texts) -> dict:
    """Everything that the menu shows to a page; a server that keeps its model tells no paths."""
    kind, astray = _device(host), host.told(token).astray
    free = memory.free(kind)
    what = t("models.gpu_memory" if kind == "cuda" else "models.memory")
    return {
        "locked": host.locked, "busy": host.loading,
        "free": t("models.free", free=memory.gb(free), what=what),
        "local": [_entry(host, t, *entry) for entry in _local(host, t)],
        "published": [_published(host, fit, t) for fit in fits(kind, free)],
        "dtypes": list(DTYPES[1:]), "model": "" if host.locked else host.options["model"],
        "astray": {"heads": astray.heads, "model": astray.model} if astray and not host.locked else None,
    }


def facts(name: str, t: Texts, fit: Fit | None = None) -> list[dict[str, str]]:
    """Label and value of each fact of a preset or a published model, whose fit on this machine is told too; nothing
    of other models."""
    known = PRESETS.get(name) or PUBLISHED.get(name)
    if known is None:
        return []
    rows = _shipped_facts(known, t) if name in PRESETS else _published_facts(known, t)
    if fit:
        rows["fits"] = t("models.fits_in", dtypes=", ".join(fit.dtypes)) if fit.dtypes else t("models.fits_not")
    rows["licence"] = known.licence
    return [{"label": t(f"models.fact.{key}"), "value": value} for key, value in rows.items()]


def _shipped_facts(preset: Preset, t: Texts) -> dict[str, str]:
    wheel = t("models.wheel", requirement=preset.requirement, size=round(preset.wheel_bytes / 1e6))
    folder = "/".join(heads_folder(preset).parts[-3:])
    return {"base": wheel, "heads": t("models.heads_shipped", folder=folder), "template": t("models.template_own"),
            "tree": DEFAULT_TREE}


def _published_facts(preset: Published, t: Texts) -> dict[str, str]:
    is_inside = preset.heads == preset.backbone
    heads = t("models.heads_inside" if is_inside else "models.heads_beside", place=preset.heads, n=preset.head_count,
              matrix=t("models.heads_own" if preset.own_output else "models.heads_shared"))
    template = t("models.template", name=preset.template) if preset.template else t("models.template_own")
    needs = {key: memory.gb(preset.need(dtype))
             for key, dtype in (("fp32", "fp32"), ("half", "bf16"), ("eight", "8bit"), ("four", "4bit"))}
    return {"base": preset.backbone, "heads": heads, "template": template, "tree": preset.tree,
            "needs": t("models.needs", **needs)}


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


def _entry(host: Any, t: Texts, title: str, model: str, heads: str, note: str) -> dict:
    now = host.model is not None and (host.options["model"], host.options["heads"]) == (model, heads)
    return {"title": title, "note": note, "fits": True, "running": now, "facts": [] if heads else facts(model, t),
            "choice": {} if host.locked else {"model": model, "heads": heads}}


def _published(host: Any, fit: Fit, t: Texts) -> dict:
    preset = fit.preset
    entry = {**_entry(host, t, preset.title, preset.name, "", ""), "facts": facts(preset.name, t, fit)}
    if fit.dtype or entry["running"]:
        dtype = host.options["dtype"] if entry["running"] else fit.dtype
        note = t("models.fits", need=memory.gb(preset.need(dtype if dtype in memory.BYTES else "bf16")), dtype=dtype,
                 licence=preset.licence)
        return {**entry, "note": note}
    return {**entry, "note": t("models.too_large", needs=fit.needs, licence=preset.licence), "fits": False}
