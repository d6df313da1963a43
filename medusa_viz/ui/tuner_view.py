"""What the Tuner shows to one visitor, as plain data: advice, sources, settings, the chosen tree, and keyed parts
(figures, tables, texts) that are sent only where the page does not have them yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from medusa_viz.decoding.settings import SIZE_DETENTS
from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning import specs
from medusa_viz.tuning.accuracy import INTERVALS
from medusa_viz.tuning.formats import FORMATS, export
from medusa_viz.tuning.latency import BATCHES
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.recommend import Option
from medusa_viz.ui import tuner_charts, tuner_tree
from medusa_viz.ui.running import Model
from medusa_viz.ui.tuner_desk import CHAIN, OWN, PUBLISHED, Chosen, Desk
from medusa_viz.ui.tuner_plan import Plan, duration
from medusa_viz.ui.tuner_task import FAILED, RUNNING

JOB_MS, SURVEY_MS, IDLE_MS = 400, 800, 4000  # between looks


def loading(fault: str, t: Texts) -> dict:
    """Before there is a model, or before what is known of it was read; `fault` says why there is none."""
    title = t("tuner.no_model" if fault else "tuner.loading")
    return {"poll": JOB_MS, "ready": False, "advice": {"state": "loading", "title": title, "text": fault}}


def view(desk: Desk, model: Model, have: dict[str, str], t: Texts) -> dict:
    """Everything; of the parts only those that the page does not `have`."""
    study, task = desk.study, desk.task
    running = task is not None and task.state == RUNNING
    give, desk.give = desk.give, None
    return {
        "poll": JOB_MS if running else SURVEY_MS if study.surveying else IDLE_MS, "ready": True,
        "surveying": study.surveying, "advice": advice(desk, t), "sources": _sources(desk, Plan(desk, model), t),
        "job": job(desk, t), "controls": _controls(desk, t), "chosen": chosen(desk, t), "give": give,
        "plans": Plan(desk, model).texts(t), "parts": _parts(desk, have, t),
    }


# -------------------------------------------------------------------------------------------------------------- advice


def advice(desk: Desk, t: Texts) -> dict:
    """The recommendation, or what is needed before there can be one."""
    study, latency = desk.study, desk.latency
    if not study.facts.rates:
        return _say("calibrate", t)
    if not latency:
        return _say("time", t)
    found = desk.advice()
    if found is None:
        return _say("survey" if study.surveying else "nothing", t)
    where = latency.about.get("device", "") if latency.recorded else t("tuner.here")
    plain = _per_second(desk.batch * found.plain_tokens_per_second)
    if found.plain_is_faster:
        return {"state": "plain", "title": t("tuner.advice_plain", where=where), "spec": "", "taken": False,
                "text": t("tuner.advice_plain_text", plain=plain)}
    best = found.best
    more = "" if study.settled else " " + t("tuner.advice_more")
    text = t("tuner.advice_text", speed=_per_second(desk.batch * best.tokens_per_second), gain=f"{found.gain:.2f}",
             plain=plain, where=where)
    return {"state": "tree", "title": t("tuner.advice_tree", spec=best.spec), "spec": best.spec, "text": text + more,
            "taken": desk.chosen.option.spec == best.spec}


def _say(state: str, t: Texts) -> dict:
    return {"state": state, "title": t(f"tuner.advice_{state}"), "text": t(f"tuner.advice_{state}_text"), "spec": "",
            "taken": False}


def _sources(desk: Desk, plan: Plan, t: Texts) -> dict:
    """Where accuracies and step times come from."""
    study, known, latency = desk.study, desk.study.known, desk.latency
    if known is not None:
        rates = t("tuner.rates_known", n=len(known.table.ranks), replies=len(known.table.lengths),
                  date=str(known.about.get("date", "")) and f" · {known.about['date']}")
        rates += t("tuner.rates_others") if known.about.get("own_text") is False else ""
    else:
        rates = t("tuner.rates_config" if study.facts.rates else "tuner.rates_none")
    times, details = t("tuner.times_none"), ""
    if latency:
        fit = latency.fits[desk.place]
        times = latency.title
        details = t("tuner.times_details", mean=f"{fit.mean_error:.0%}", most=f"{fit.max_error:.0%}",
                    heads=numbers.milliseconds(latency.heads.median), rows=fit.rows_to,
                    rebuilt=numbers.milliseconds(latency.redraft.median))
    return {"rates": rates, "rates_kind": "known" if known else "config" if study.facts.rates else "none",
            "rates_hint": t("tuner.rates_hint", intervals=INTERVALS), "times": times, "details": details,
            "times_kind": "none" if not latency else "recorded" if latency.recorded else "measured",
            "calibrate": t("tuner.calibrate_again" if known else "tuner.calibrate",
                           time=duration(plan.calibrate_seconds, t)),
            "time": t("tuner.time_again" if study.latency else "tuner.time", time=duration(plan.timing_seconds, t)),
            "own": study.latency is not None, "loaded": desk.loaded.title if desk.loaded else "",
            "elsewhere": desk.elsewhere and desk.loaded is not None}


def job(desk: Desk, t: Texts) -> dict | None:
    """The job under way, or the fault that the last one ended with."""
    task = desk.task
    if task is None or task.state not in (RUNNING, FAILED):
        return None
    name = t(f"tuner.job_{task.name}")
    if task.state == FAILED:
        return {"live": False, "fraction": 0.0, "name": task.name,
                "text": task.fault or t("session.failed", name=name)}
    progress, left = task.progress, task.seconds_left
    text = t("tuner.job", name=name, part=progress.part) if progress.part else name
    if left is not None:
        several = task.name == "calibrate"  # it answers, fits and ranks in turn
        text += t("tuner.job_left_part" if several else "tuner.job_left", time=duration(left, t))
    return {"live": True, "name": task.name, "text": text,
            "fraction": progress.done / progress.total if progress.total else None}


# ------------------------------------------------------------------------------------------------------------ settings


def _controls(desk: Desk, t: Texts) -> dict:
    study, latency, kind = desk.study, desk.latency, desk.chosen.kind
    kinds = [{"name": name, "label": t(f"tuner.builder.{name}"), "help": builder.help,
              "lacking": specs.lacking(name, study.facts)} for name, builder in specs.BUILDERS.items()]
    kinds += [{"name": CHAIN, "label": t("tuner.builder.chain"), "help": t("tuner.help_chain"), "lacking": ""}]
    prefixes = [t("tuner.prefix", n=curve.prefix) for curve in latency.curves] if latency else []
    return {
        "kind": kind, "kinds": kinds, "published": list(published()), "name": desk.chosen.name,
        "budget": desk.chosen.budget, "detents": SIZE_DETENTS,
        "fixed": kind in (OWN, PUBLISHED), "seeded": kind in specs.BUILDERS and specs.BUILDERS[kind].seeded,
        "help": next((one["help"] for one in kinds if one["name"] == kind), ""), "prefixes": prefixes,
        "sized": _sized(desk, t) if kind == "sequoia" else None,
        "curve": desk.place, "batch": desk.batch, "batches": [_batch(desk, batch, t) for batch in BATCHES],
        "editing": desk.editing, "cutting": desk.cutting, "can_undo": bool(desk.undone), "can_redo": bool(desk.redone),
        "format": desk.format,
        "formats": [{"name": name, "title": one.title, "ending": one.ending} for name, one in FORMATS.items()],
        "proxy": desk.proxy,
    }


def _sized(desk: Desk, t: Texts) -> dict:
    """The size that step times favour, and a sentence; without one it says why."""
    best = desk.favoured()
    if best is None:
        return {"nodes": None, "text": t("tuner.sized_plain" if desk.latency else "tuner.sized_none")}
    return {"nodes": best.nodes, "text": t("tuner.sized_by", n=best.nodes, depth=best.tree.height)}


def _batch(desk: Desk, batch: int, t: Texts) -> dict:
    """The best tree at a batch: the same heads, perhaps another tree."""
    found = desk.advice(batch)
    said = "" if found is None else t("tuner.batch_plain") if found.best is None else t(
        "tuner.batch_best", spec=found.best.spec, gain=f"{found.gain:.2f}")
    rows = batch * (found.best.nodes + 1) if found and found.best else batch
    beyond = bool(found) and rows > desk.latency.fits[desk.place].rows_to
    return {"n": batch, "text": said + (t("tuner.batch_beyond") if beyond else "")}


# ------------------------------------------------------------------------------------------------------ the chosen tree


def title(chosen: Chosen, t: Texts) -> str:
    """What a tree is called."""
    if chosen.kind == OWN:
        return t("tuner.own", n=chosen.option.nodes)
    return chosen.name if chosen.kind == PUBLISHED else chosen.option.spec


def chosen(desk: Desk, t: Texts) -> dict:
    """The chosen tree in numbers, each with its definition."""
    tree, option = desk.chosen, desk.priced([desk.chosen.option])[0]
    shape = tree.shape
    nodes = t("tuner.nodes_dynamic", n=option.nodes)
    if shape is not None:
        nodes = t("tuner.nodes", n=shape.nodes, parts="/".join(f"{n:,}" for n in shape.depth_counts) or "0",
                  leaves=shape.leaves)
    rows = [_fact("nodes", nodes, t), _fact("expected", _number(option.expected, 3), t),
            _fact("replayed", _interval(option), t), *_speeds(desk, option, t), *_real(desk, option, t)]
    notes = [*desk.imported, *option.notes]
    return {"title": title(tree, t), "facts": rows, "notes": notes, "dynamic": shape is None, "nodes": option.nodes,
            "fingerprint": "" if shape is None else shape.fingerprint}


def _fact(key: str, value: str, t: Texts, **more: object) -> dict:
    return {"key": key, "label": t(f"tuner.fact_{key}"), "value": value, "hint": t(f"tuner.hint_{key}", **more)}


def _number(value: float | None, places: int) -> str:
    return numbers.NONE if value is None else f"{value:.{places}f}"


def _per_second(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def _interval(option: Option) -> str:
    rate = option.replayed
    return numbers.NONE if rate is None else f"{rate.tokens_per_step:.3f}  [{rate.low:.3f}, {rate.high:.3f}]"


def _speeds(desk: Desk, option: Option, t: Texts) -> list[dict]:
    """Step time and predicted speed, where step times are known."""
    if not desk.latency:
        return [_fact(key, numbers.NONE, t) for key in ("ms", "second")]
    plain = 1e3 / desk.step_ms(0)
    rate = option.tokens_per_second
    speed = numbers.NONE if rate is None else t("tuner.second", speed=_per_second(desk.batch * rate),
                                                gain=f"{rate / plain:.2f}")
    return [_fact("ms", t("tuner.ms", ms=numbers.milliseconds(option.milliseconds),
                          rows=desk.batch * (option.nodes + 1)), t), _fact("second", speed, t)]


def _real(desk: Desk, option: Option, t: Texts) -> list[dict]:
    done = desk.measured.get((desk.chosen.key, 0.0))
    if done is None:
        return [_fact("measured", numbers.NONE, t)]
    off = tuner_charts.error(option.tokens_per_step, done.run.tokens_per_step)
    return [_fact("measured", t("tuner.measured", rate=f"{done.run.tokens_per_step:.3f}", error=off,
                                speed=_per_second(done.run.tokens_per_second)) + tuner_charts.part(done, t), t)]


# --------------------------------------------------------------------------------------------------------------- parts


def _parts(desk: Desk, have: dict[str, str], t: Texts) -> dict[str, dict]:
    """By name: {key, body}, the body None where the page has it."""
    study, tree = desk.study, desk.chosen
    times = (desk.latency, desk.batch, desk.place)
    trees, drawn = (study.options, *times), (desk.editing, desk.cutting, desk.grown, desk.opened, desk.room)
    makers: dict[str, tuple[tuple, Callable[[], Any]]] = {
        "tree": ((tree, *drawn), lambda: tuner_tree.draw(desk, t)),
        "following": ((tree, *times), lambda: tuner_tree.following(desk, t)),
        "heat": ((study.measured, study.facts), lambda: tuner_charts.heat(desk, t)),
        "latency": ((*times, tree.option.nodes), lambda: tuner_charts.latency(desk, t)),
        "steps": ((*trees, study.published, tree, desk.measured), lambda: tuner_charts.steps(desk, t)),
        "speed": ((*trees, tree, desk.measured), lambda: tuner_charts.speed(desk, t)),
        "reached": ((tree,), lambda: tuner_charts.reached(desk, t)),
        "scatter": ((study.scatter, *times), lambda: tuner_charts.scatter(desk, t)),
        "measured": ((desk.measured,), lambda: tuner_charts.table(desk, t)),
        "thresholds": ((desk.swept, desk.proxy), lambda: tuner_charts.thresholds(desk, t)),
        "exchange": ((tree, desk.format), lambda: _exchange(desk, t)),
    }
    parts = {}
    for name, (inputs, make) in makers.items():
        kept = desk.parts.get(name)
        if kept is None or not _same(kept[0], inputs):
            kept = desk.parts[name] = inputs, f"{desk.mark}.{next(desk.count)}", _sent(make())
        parts[name] = {"key": kept[1], "body": None if have.get(name) == kept[1] else kept[2]}
    return parts


def _same(old: tuple, new: tuple) -> bool:
    """Settings are compared by value, everything else is the same only if it is the same object."""
    return len(old) == len(new) and all(
        a is b or (isinstance(a, (int, str, tuple, frozenset)) and a == b) for a, b in zip(old, new, strict=True))


def _sent(body: Any) -> dict:
    return tuner_charts.packed(body) if isinstance(body, tuner_charts.Chart) else body


def _exchange(desk: Desk, t: Texts) -> dict:
    """The chosen tree in the chosen format, with its limits in words."""
    shape = desk.chosen.shape
    if shape is None:
        return {"text": "", "notes": [t("tuner.no_dynamic")], "exact": False, "values": "", "possible": False}
    written = export(shape, desk.format)
    values: Sequence[str] = [f"{name} {value:,}" for name, value in written.values.items()]
    state = "exact" if written.exact else "approximate" if written.expressible else "impossible"
    return {"text": written.text, "notes": written.notes, "exact": written.exact, "values": " · ".join(values),
            "possible": written.expressible, "state": t(f"tuner.exchange_{state}")}
