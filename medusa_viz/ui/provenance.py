"""Where the heads come from, in the words of their own file, and where they and their backbone run, and why there.
Nothing is known of the training of heads that bring no facts."""

from __future__ import annotations

from pathlib import PurePath

from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning.builders import expected_tokens_per_step, sparse
from medusa_viz.ui.snapshot import Heads

NODES = 15  # of the tree whose tokens per step are told
LONGEST = 80  # characters of a fact: config files are written by anybody


def provenance(heads: Heads | None, t: Texts) -> dict:
    """`line`: one sentence; `rows`: label and value of each fact."""
    if heads is None:
        return {"line": t("view.heads_facts.none"), "rows": []}
    facts = {name: fact(heads.trained, name) for name in ("recipe", "init", "data", "tokens", "date")}
    rows = [("name", PurePath(heads.source).name[:LONGEST]), ("recipe", facts["recipe"]), ("init", facts["init"]),
            ("data", " · ".join(part for part in (facts["data"], _tokens(facts["tokens"], t)) if part)),
            ("date", facts["date"]), *_reached(heads, t), *_loaded(heads, t)]
    known = facts["recipe"] or facts["data"]
    line = t("view.heads_facts.line", facts=" · ".join(
        part for part in (facts["recipe"], facts["date"]) if part)) if known else t("view.heads_facts.unknown")
    return {"line": line, "rows": [{"label": t(f"view.heads_facts.{key}"), "value": value}
                                   for key, value in rows if value]}


def fact(trained: dict[str, object], name: str) -> str:
    """A fact as short text; nothing where it is missing or no plain value."""
    value = trained.get(name) if isinstance(trained, dict) else None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.split())[:LONGEST]


def _tokens(count: str, t: Texts) -> str:
    return t("view.heads_facts.tokens", n=count) if count.strip("0") else ""


def _reached(heads: Heads, t: Texts) -> list[tuple[str, str]]:
    """Top-1 per head and tokens per step: on held-out replies where their makers measured that, else what the accuracy
    table says and promises."""
    accuracy = heads.accuracy if all(heads.accuracy) else []
    rows, key, rate = [], "replayed", _replayed(heads.trained)
    if held_out := _held_out(heads.trained):
        rows.append(("top1", _shares(held_out)))
    elif accuracy:
        rows.append(("first_guess", t("view.heads_facts.from_table", shares=_shares([row[0] for row in accuracy]))))
    if rate is None and accuracy:
        key, rate = "promised", expected_tokens_per_step(sparse(accuracy, NODES), accuracy)
    if rate is not None:
        rows.append(("rate", t(f"view.heads_facts.{key}", value=f"{rate:.2f}", nodes=NODES)))
    return rows


def _shares(shares: list[float]) -> str:
    return " · ".join(map(numbers.probability, shares))


def _loaded(heads: Heads, t: Texts) -> list[tuple[str, str]]:
    """What was read of the heads' file, device and dtype with their reason, how the model's parts run, and what was
    noticed."""
    place = t("view.heads_facts.placed", place=heads.place, reason=heads.reason) if heads.place else ""
    return [("tensors", heads.tensors), ("drafts_from", heads.drafts_from), ("place", place),
            ("linears", heads.linears), ("step", heads.step),
            *(("notice", notice) for notice in heads.notices)]


def _held_out(trained: dict[str, object]) -> list[float]:
    shares = trained.get("held_out_top1") if isinstance(trained, dict) else None
    plain = isinstance(shares, list) and all(isinstance(share, float) and 0 <= share <= 1 for share in shares)
    return shares if plain else []


def _replayed(trained: dict[str, object]) -> float | None:
    rates = trained.get("tokens_per_step") if isinstance(trained, dict) else None
    rate = rates.get(str(NODES)) if isinstance(rates, dict) else None
    return float(rate) if isinstance(rate, (int, float)) else None
