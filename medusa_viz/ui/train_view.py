"""What the Train page shows of runs, from their folders alone: state, progress, the latest numbers, the curves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from medusa_viz.figures import curves, numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import train_runner
from medusa_viz.ui.train_log import Pace, RunLog, StepLine, heads_written, progress
from medusa_viz.ui.train_runner import Running

ENDED = ("finished", "stopped", "broken")
PHASES = ("hidden", "teacher", "train")
NODES = "15"  # size of the tree whose tokens per step stand in the list


@dataclass
class Shown:
    """One run as it is looked at: its folder, what it says of itself, its log, and how fast it goes."""

    folder: Path
    log: RunLog
    pace: Pace
    own: bool
    """It lies among this server's runs."""

    @property
    def id(self) -> str:
        return self.folder.name if self.own else str(self.folder)


def state(shown: Shown, running: Running | None, saved: dict) -> str:
    """running, stopping, finished, stopped, broken, interrupted (its server ended), elsewhere, or found."""
    if running is not None and running.plan.folder == shown.folder:
        return "stopping" if running.stopping else "running"
    if saved.get("state") in ENDED:
        return saved["state"]
    now = progress(shown.folder)
    if now is not None and now.fresh:
        return "elsewhere"
    return "interrupted" if saved.get("state") == "running" else "found"


def line(shown: Shown, running: Running | None, t: Texts) -> dict:
    """One run in the list."""
    saved = train_runner.read(shown.folder)
    is_now = state(shown, running, saved)
    plan = saved.get("plan") if isinstance(saved.get("plan"), dict) else {}
    begun = saved.get("begun") if isinstance(saved.get("begun"), (int, float)) else _changed(shown.folder)
    return {"id": shown.id, "name": shown.folder.name, "recipe": str(plan.get("recipe", ""))[:20], "state": is_now,
            "state_text": t(f"train.state.{is_now}"), "begun": begun,
            "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(begun)), "numbers": _numbers(shown.log, t)}


def opened(shown: Shown, running: Running | None, in_use: bool, t: Texts) -> dict:
    """The run whose curves are shown."""
    saved = train_runner.read(shown.folder)
    is_now, usable = state(shown, running, saved), heads_written(shown.folder) is not None
    mine = running is not None and running.plan.folder == shown.folder
    again = is_now in ("stopped", "broken", "interrupted") and "plan" in saved
    return {
        **line(shown, running, t), **_progress(shown, running if mine else None, is_now, t),
        "sentence": _sentence(shown.folder, saved, is_now, usable, t), "in_use": in_use,
        "can": {"stop": mine, "resume": again and running is None, "use": usable and not in_use},
        "total": total(shown.log.steps[-1], t) if shown.log.steps else "", "held_out": _held_out(shown.log, t),
    }


def figures(log: RunLog, t: Texts) -> dict:
    """The four figures as JSON strings, each with its legend."""
    steps, passes, heads = log.steps, log.passes, log.heads
    x, stages = [step.step for step in steps], _stages(steps)
    loss = curves.head_curves(x, [step.loss for step in steps], heads, t)
    if any(step.lm_loss is not None for step in steps):
        loss.insert(0, curves.backbone_curve(x, [step.lm_loss for step in steps], t))
    loss.insert(0, curves.total_curve(x, [step.total for step in steps], t))
    top1 = curves.head_curves(x, [step.top1 for step in steps], heads, t)
    at = [one.step for one in passes]
    most = max((len(one.top1) for one in passes), default=0)
    held = curves.head_curves(at, [one.top1 for one in passes], most, t, "circle")
    rates = curves.nodes_curves(at, [one.tokens_per_step for one in passes], t)
    axis = curves.StepAxis(t("fig.steps"), max([1, *x, *at]), stages)
    return {
        "loss": _figure(loss, curves.figure(loss, axis, t)),
        "top1": _figure(top1, curves.figure(top1, axis, t, share=True)),
        "held_out": _figure(held, curves.figure(held, axis, t, share=True)),
        "rates": _figure(rates, curves.figure(rates, axis, t)),
    }


def total(step: StepLine, t: Texts) -> str:
    """`total 3.412 = KL 0.012 + λ0 0.2 · (0.8·2.91 + 0.64·3.40)`, with the numbers of one step."""
    terms = [f"{weight:.3g}·{loss:.3f}" for weight, loss in zip(step.weights, step.loss)
             if weight is not None and loss is not None]
    if step.total is None or not terms:
        return ""
    heads = " + ".join(terms)
    if step.lm_loss is not None or step.lambda0 != 1:
        heads = t("train.total_heads", weight=f"{step.lambda0:.3g}", terms=heads)
    if step.lm_loss is not None:
        heads = t("train.total_backbone", loss=f"{step.lm_loss:.4f}", heads=heads)
    return t("train.total", step=step.step, total=f"{step.total:.3f}", terms=heads)


def _figure(drawn: list[curves.Curve], figure: dict) -> dict:
    points = len(drawn[0].x) if drawn else 0
    return {"figure": orjson.dumps(figure).decode(), "legend": curves.legend(drawn), "points": points}


def _stages(steps: list[StepLine]) -> list[float]:
    """Where another stage begins."""
    return [b.step for a, b in zip(steps, steps[1:]) if b.stage != a.stage]


def _numbers(log: RunLog, t: Texts) -> str:
    """The latest numbers of a run in a few words."""
    parts = []
    if log.steps and log.steps[-1].total is not None:
        parts.append(t("train.list_loss", step=log.steps[-1].step, loss=f"{log.steps[-1].total:.2f}"))
    judged = log.passes[-1].top1 if log.passes else []
    if any(share is not None for share in judged):
        parts.append(t("train.list_top1", shares=_shares(judged)))
    if log.passes and NODES in log.passes[-1].tokens_per_step:
        parts.append(t("train.list_rate", rate=f"{log.passes[-1].tokens_per_step[NODES]:.2f}"))
    return " · ".join(parts)


def _held_out(log: RunLog, t: Texts) -> str:
    """What the last pass came to on held-out replies."""
    if not log.passes:
        return t("train.no_pass") if log.steps else ""
    last = log.passes[-1]
    if not last.top1:
        return t("train.no_held_out")
    parts = [t("train.held_out_top1", n=last.number, shares=_shares(last.top1))]
    if last.perplexity:
        before, after = numbers.compared(*last.perplexity)
        parts.append(t("train.perplexity", before=before, after=after))
    if last.same_choice is not None:
        parts.append(t("train.same_choice", share=f"{last.same_choice:.1%}"))
    if last.tokens_per_step:
        rates = " · ".join(f"{rate:.2f}" for rate in last.tokens_per_step.values())
        parts.append(t("train.held_out_rates", rates=t("train.rates_at", rates=rates,
                                                      nodes=" · ".join(last.tokens_per_step))))
    return "; ".join(parts)


def _shares(shares: list[float | None]) -> str:
    return " ".join(numbers.NONE if share is None else numbers.probability(share) for share in shares)


def _sentence(folder: Path, saved: dict, is_now: str, usable: bool, t: Texts) -> str:
    """How it ended, where that needs saying."""
    if is_now == "broken":
        said = str(saved.get("sentence") or "")[:400]
        return said or t("train.broken", code=str(saved.get("code", "?"))[:20])
    if is_now in ("stopped", "interrupted"):
        return t(f"train.{is_now}_with_heads" if usable else f"train.{is_now}_without")
    return "" if usable or is_now != "finished" else t("train.no_heads")


def _progress(shown: Shown, running: Running | None, is_now: str, t: Texts) -> dict:
    """Phase, share done, pace and time left."""
    if running is None and is_now != "elsewhere":
        return {"progress": "", "fraction": 1.0 if is_now == "finished" else None, "live": False}
    phase, counted, seconds = "loading", None, 0.0
    now = progress(shown.folder)
    if running is not None and running.phase == "distil":
        counted = train_runner.counted(shown.folder)
        phase, seconds = ("distil" if counted else "loading"), time.monotonic() - running.since
    elif now is not None and now.fresh and now.phase in PHASES:
        phase, counted, seconds = now.phase, (now.done, now.total), now.seconds
    if not counted or not counted[1]:
        return {"progress": t("train.phase.loading"), "fraction": None, "live": True}
    done, whole = counted
    rate = shown.pace.rate(phase, done, seconds)
    text = t(f"train.phase.{phase}", done=done, total=whole)
    if rate:
        unit = "train.pace_steps" if phase == "train" else "train.pace_tokens"
        left = max(0, whole - done) / rate
        text += t(unit, rate=f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}")
        # The last replies that are written side by side may take long: what is left of them says nothing.
        text += "" if phase == "distil" else t("train.left", time=_minutes(left, t))
    return {"progress": text, "fraction": min(1.0, done / whole), "live": True}


def _minutes(seconds: float, t: Texts) -> str:
    if seconds < 90:
        return t("train.seconds", n=round(seconds))
    return t("train.minutes", n=round(seconds / 60)) if seconds < 5400 else t("train.hours", n=f"{seconds / 3600:.1f}")


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
