"""From a desk to its charts and tables: which numbers go into which figure, and the sentence behind every point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from medusa_viz.figures import numbers, tuner_figures
from medusa_viz.figures.texts import Texts
from medusa_viz.figures.tuner_figures import Chart, Setting, Spot, TimedCurve
from medusa_viz.tuning.builders import node_values
from medusa_viz.tuning.recommend import Option
from medusa_viz.tuning.replay import replay
from medusa_viz.ui.tuner_desk import PLAIN, PUBLISHED, Desk, Measured

FIT_POINTS = 40
SWEPT_TEMPERATURE, SWEPT_EPSILON = 0.7, 0.09  # at which the threshold study varies ε and T
PROXIES = ("surprise", "distinct_3", "repeated_4")


def heat(desk: Desk, t: Texts) -> Chart:
    """From the calibration with its intervals, else from the heads' own table."""
    known = desk.study.measured
    if known is not None:
        return tuner_figures.heat(known.share.tolist(), known.low.tolist(), known.high.tolist(), known.positions, t)
    return tuner_figures.heat([row[:10] for row in desk.study.facts.rates], [], [], (), t)


# ------------------------------------------------------------------------------------------------------ trees by nodes


def steps(desk: Desk, t: Texts) -> Chart:
    """Tokens per step against nodes."""
    def spot(kind: str, option: Option) -> Spot:
        return Spot(kind, option.spec, option.nodes, option.tokens_per_step, hover=sentence(option, desk, t))

    best = _best(desk)
    measured = [Spot(one.kind, one.run.name, one.run.nodes, one.run.tokens_per_step, hover=_real(one, t))
                for one in _greedy(desk)]
    published = [replace(spot(PUBLISHED, option), name=option.spec.removeprefix(f"{PUBLISHED}:"))
                 for option in desk.priced(desk.study.published)]
    return tuner_figures.trees(_lines(desk, spot), measured, spot(desk.chosen.kind, _chosen(desk)),
                               best and spot("", best), t("tuner.fig_tokens_per_step"), t, published=published)


def speed(desk: Desk, t: Texts) -> Chart:
    """Predicted tokens per second against nodes; measured ones filled, where they are of this device at batch 1."""
    if not desk.latency:
        return tuner_figures.trees({}, [], None, None, t("tuner.fig_tokens_per_second"), t)

    def spot(kind: str, option: Option) -> Spot:
        rate = option.tokens_per_second
        return Spot(kind, option.spec, option.nodes, rate and desk.batch * rate, hover=sentence(option, desk, t))

    best, plain = _best(desk), desk.batch * 1e3 / desk.step_ms(0)
    here = not desk.latency.recorded and desk.batch == 1
    measured = [Spot(one.kind, one.run.name, one.run.nodes, one.run.tokens_per_second, one.run.slowest, one.run.fastest,
                     _real(one, t)) for one in _greedy(desk)] if here else []
    level = plain, t("tuner.fig_plain", speed=f"{plain:,.1f}")
    return tuner_figures.trees(_lines(desk, spot), measured, spot(desk.chosen.kind, _chosen(desk)),
                               best and spot("", best), t("tuner.fig_tokens_per_second"), t, level)


def scatter(desk: Desk, t: Texts) -> Chart:
    """Dense, random and sparse trees."""
    def spots(options: Sequence[Option]) -> list[tuple]:
        return [(option.nodes, option.tokens_per_step,
                 option.tokens_per_second and desk.batch * option.tokens_per_second, sentence(option, desk, t))
                for option in desk.priced(options) if option.nodes]

    return tuner_figures.scatter({name: spots(options) for name, options in desk.study.scatter.items()}, t)


def reached(desk: Desk, t: Texts) -> dict:
    """P(L ≥ m) of the chosen tree with the sums in words."""
    study, shape = desk.study, desk.chosen.shape
    expected: list[float] = []
    replayed: Sequence[float] = ()
    if shape is not None and study.facts.rates:
        values = node_values(shape, study.facts.rates)
        expected = [sum(value for value, depth in zip(values, shape.depth.tolist(), strict=True) if depth == m)
                    for m in range(1, shape.height + 1)]
    if shape is not None and study.known is not None:
        replayed = replay(shape, study.known.table).reached
    chart = tuner_figures.reached(expected, replayed, t)
    return {**packed(chart), "caption": t("tuner.no_dynamic") if shape is None else _sum(expected, replayed, t)}


def _sum(expected: Sequence[float], replayed: Sequence[float], t: Texts) -> str:
    shown = replayed or expected
    if not shown:
        return t("tuner.reached_none")
    kind = t("tuner.fig_replayed" if replayed else "tuner.fig_expected")
    terms = " + ".join(f"{value:.3f}" for value in shown) + " = " if len(shown) > 1 else ""
    return t("tuner.reached", kind=kind, sum=terms, total=f"{sum(shown):.3f}", rate=f"{1 + sum(shown):.3f}")


def _lines(desk: Desk, spot: Any) -> dict[str, list[Spot]]:
    return {kind: [spot(kind, option) for option in options if option.nodes]
            for kind, options in desk.surveyed().items()}


def _best(desk: Desk) -> Option | None:
    found = desk.advice()
    return found.best if found else None


def _chosen(desk: Desk) -> Option:
    return desk.priced([desk.chosen.option])[0]


def _greedy(desk: Desk) -> list[Measured]:
    return [one for (name, heat), one in desk.measured.items() if not heat and name != PLAIN]


def sentence(option: Option, desk: Desk, t: Texts) -> str:
    """What is known of a tree before it runs, in one sentence."""
    parts = [t("tuner.tree_nodes", spec=option.spec, n=option.nodes)]
    if option.replayed:
        rate = option.replayed
        parts.append(t("tuner.tree_replayed", rate=f"{rate.tokens_per_step:.3f}", low=f"{rate.low:.3f}",
                       high=f"{rate.high:.3f}"))
    if option.expected is not None:
        parts.append(t("tuner.tree_expected", rate=f"{option.expected:.3f}"))
    if option.tokens_per_second:
        parts.append(t("tuner.tree_second", speed=f"{desk.batch * option.tokens_per_second:,.1f}",
                       ms=numbers.milliseconds(option.milliseconds)))
    return "\n".join([*parts, *option.notes])


def _real(one: Measured, t: Texts) -> str:
    run = one.run
    return t("tuner.tree_measured", spec=run.name, rate=f"{run.tokens_per_step:.3f}",
             speed=f"{run.tokens_per_second:.1f}", ms=numbers.milliseconds(run.ms_per_step)) + part(one, t)


def part(one: Measured, t: Texts) -> str:
    """How much a run covers that was stopped; nothing for a whole one."""
    return "" if one.whole else t("tuner.measured_part", n=one.run.prompts, asked=one.run.asked)


# ---------------------------------------------------------------------------------------------------------- step times


def latency(desk: Desk, t: Texts) -> Chart:
    """The curves in force with their fits, and heads and acceptance below them."""
    found = desk.latency
    if found is None:
        return tuner_figures.latency([], {}, False, None, t)
    most = found.rows[-1]
    grid = [math.exp(math.log(most) * place / FIT_POINTS) for place in range(FIT_POINTS + 1)]
    curves = [TimedCurve(t("tuner.fig_prefix", n=curve.prefix), found.rows,
                         [(spread.median, spread.low, spread.high) for spread in curve.verify],
                         [(x, found.fits[place](x)) for x in grid], place == desk.place)
              for place, curve in enumerate(found.curves)]
    parts = {t("tuner.fig_heads"): [found.heads.median] * len(found.rows),
             t("tuner.fig_accept"): [a.median + c.median for a, c in zip(found.accept, found.commit, strict=True)]}
    return tuner_figures.latency(curves, parts, found.recorded, desk.batch * (desk.chosen.option.nodes + 1), t)


# ------------------------------------------------------------------------------------------------------------ measured


def error(predicted: float | None, found: float) -> str:
    """`+2.1 %`, or a dash where nothing was predicted."""
    from medusa_viz.tuning.measure_trees import error_percent

    off = error_percent(predicted, found)
    return numbers.NONE if off is None else f"{off:+.1f} %".replace("-", numbers.MINUS)


def table(desk: Desk, t: Texts) -> dict:
    """Trees decoded for real: measured beside predicted, errors in percent of the measured figure."""
    rows = []
    for (_, heat), one in desk.measured.items():
        run, option = one.run, one.option
        rows.append({
            "name": (run.name if not heat else t("tuner.row_typical", name=run.name, heat=f"{heat:g}")) + part(one, t),
            "nodes": run.nodes, "rate": f"{run.tokens_per_step:.3f}", "ms": numbers.milliseconds(run.ms_per_step),
            "expected": numbers.NONE if heat or not option else error(option.expected, run.tokens_per_step),
            "replayed": numbers.NONE if heat or not option or not option.replayed
            else error(option.replayed.tokens_per_step, run.tokens_per_step),
            "speed": f"{run.tokens_per_second:.1f}",
            "predicted": numbers.NONE if heat else error(one.second, run.tokens_per_second),
            "gain": numbers.NONE if one.gain is None else f"{one.gain:.2f}",
            "equal": _equal(run.equals_greedy, t), "kind": one.kind,
            "look": {"color": tuner_figures.look(one.kind).color, "glyph": tuner_figures.look(one.kind).glyph},
        })
    return {"rows": rows, "note": t("tuner.measured_note" if rows else "tuner.measured_none")}


def _equal(equal: Any, t: Texts) -> dict:
    """Whether the text was plain greedy's."""
    state = "none" if equal is None else "yes" if equal is True else "tie" if equal.get("tie") else "no"
    return {"state": state, "text": t(f"tuner.equal_{state}")}


# ----------------------------------------------------------------------------------------------------------- threshold


def thresholds(desk: Desk, t: Texts) -> dict:
    """The threshold study in the proxy chosen."""
    swept = desk.swept
    points = sorted(swept.found.points if swept else (), key=lambda point: (point.epsilon or 0.0, point.temperature))
    settings = [_setting(kind, point, desk.proxy, t) for point in points for kind in _kinds(point)]
    chart = tuner_figures.thresholds(settings, t(f"tuner.proxy_{desk.proxy}"), t)
    caption = t("tuner.studied", tree=swept.title) if swept else t("tuner.studied_none")
    if swept and len(points) < swept.found.asked:
        caption += t("tuner.studied_part", n=len(points), asked=swept.found.asked)
    return {**packed(chart), "caption": caption, "hint": t(f"tuner.proxy_{desk.proxy}_hint")}


def _kinds(point: Any) -> list[str]:
    """Which lines a point belongs to: where both sweeps cross it is on both."""
    if point.kind != "typical":
        return [point.kind]
    return [*(["epsilon"] if point.temperature == SWEPT_TEMPERATURE else []),
            *(["temperature"] if point.epsilon == SWEPT_EPSILON else [])]


def _setting(kind: str, point: Any, proxy: str, t: Texts) -> Setting:
    label = {"epsilon": f"ε {point.epsilon}", "temperature": f"T {point.temperature:g}"}.get(kind, "")
    what = t(f"tuner.fig_{kind}") if kind in ("greedy", "sampling") else t(
        "tuner.point_typical", epsilon=point.epsilon, delta=f"{point.delta:.2f}")
    values = {name: f"{getattr(point.proxy, name):.3f}" for name in PROXIES}
    hover = t("tuner.point", what=what, heat=f"{point.temperature:g}", rate=f"{point.tokens_per_step:.3f}", **values)
    return Setting(kind, point.tokens_per_step, getattr(point.proxy, proxy), label, hover)


def packed(chart: Chart) -> dict:
    """A chart as the page takes it: its figure as a JSON string."""
    return {"figure": orjson.dumps(chart.figure).decode(), "legend": chart.legend, "points": chart.points}
