"""What `tune` found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_viz.decoding.tree import TreeShape
from medusa_viz.tuning.latency import BATCHES, Latency
from medusa_viz.tuning.measure_trees import PLAIN_NAME, Measured, error_percent
from medusa_viz.tuning.recommend import Option, Recommendation, recommend, repriced

if TYPE_CHECKING:
    from medusa_viz.tuning.thresholds import Studied

SHOWN_PATHS = 64
DEFINITIONS = ("tokens per step: committed tokens / steps. Replayed on recorded greedy replies: each tree is built "
               "from one half of them and judged on the other; in brackets what the product of accuracies makes one "
               "expect")
GREEDY_ONLY = "These predictions hold for greedy acceptance; for temperatures above 0 only measuring counts."


def latency(curve: Latency, place: int) -> str:
    """The measured curve, one line for each prefix, and how well the fit meets it."""
    width = max(len(f"{spread.median:.0f}") for line in curve.curves for spread in line.verify) + 2
    lines = [f"step times: {curve.title}; forward pass in ms by rows (nodes + root), medians",
             f"{'rows':>18}" + "".join(f"{rows:>{max(width, 6)}}" for rows in curve.rows)]
    lines += [f"{f'prefix of {line.prefix:,}':>18}"
              + "".join(f"{spread.median:>{max(width, 6)}.1f}" for spread in line.verify) for line in curve.curves]
    fit = curve.fits[place]
    lines.append(f"heads {curve.heads.median:.1f} ms (tree rebuilt at each step {curve.redraft.median:.1f} ms); the "
                 f"fit is off by {fit.mean_error:.0%} on average, {fit.max_error:.0%} at most; beyond {fit.rows_to} "
                 "rows it is drawn on")
    return "\n".join(lines) + "\n"


def builders(trees: Sequence[Option], sizes: Sequence[int], batch: int, favoured: int) -> str:
    """Builders × sizes: replayed tokens per step and predicted tokens per second, of all texts of a batch together; and
    the size that `sequoia` favours."""
    names = list(dict.fromkeys(option.spec.partition(":")[0] for option in trees))
    by_spec = {option.spec: option for option in trees}
    of_all = f" of all {batch} texts" if batch > 1 else ""
    lines = [f"{DEFINITIONS}; /s: predicted tokens per second{of_all}",
             f"{'nodes':>12}" + "".join(f"{size:>24}" for size in sizes)]
    for name in names:
        lines.append(f"{name:>12}" + "".join(f"{_cell(by_spec.get(f'{name}:{size}'), batch):>24}" for size in sizes))
    sized = by_spec.get(f"sequoia:{favoured}")
    lines.append(f"without a number, step times favour sequoia:{favoured}: {_cell(sized, batch)}" if sized else
                 "without a number, step times favour no sequoia tree: plain decoding is expected to be as fast")
    return "\n".join(lines) + "\n"


def _cell(option: Option | None, batch: int) -> str:
    if option is None:
        return "-"
    steps = f"{option.replayed.tokens_per_step:.3f}" if option.replayed else "-"
    expected = f" [{option.expected:.3f}]" if option.expected is not None else ""
    speed = f" {batch * option.tokens_per_second:.1f}/s" if option.tokens_per_second else ""
    return steps + expected + speed


def advice(found: Recommendation, curve: Latency, batch: int) -> str:
    """The recommendation in words."""
    where = f"on {curve.about.get('device')}" if curve.recorded else "here"
    at = f" at batch {batch}" if batch > 1 else ""
    plain = f"plain decoding: {batch * found.plain_tokens_per_second:.1f} tokens per second"
    if found.plain_is_faster:
        return f"plain decoding is faster {where}{at} than any of these trees ({plain}, predicted). {GREEDY_ONLY}\n"
    best = found.best
    lines = [f"recommended {where}{at}: {best.spec}, {batch * best.tokens_per_second:.1f} tokens per second predicted, "
             f"{found.gain:.2f} times plain decoding ({plain})", *(f"note: {note}" for note in best.notes)]
    if isinstance(best.tree, TreeShape):
        shape = best.tree
        lines.append(f"{shape.nodes} nodes, by depth {'/'.join(map(str, shape.depth_counts))}, {shape.leaves} leaf "
                     f"paths, fingerprint {shape.fingerprint}")
        if shape.nodes <= SHOWN_PATHS:
            lines.append(str([list(path) for path in shape.paths[1:]]))
    return "\n".join([*lines, GREEDY_ONLY]) + "\n"


def batches(trees: Sequence[Option], curve: Latency, place: int) -> str:
    """The best tree at other batches: rows = batch × (nodes + 1)."""
    lines = ["by batch (rows = batch × (nodes + 1); heads and acceptance as measured for one text):"]
    for batch in BATCHES:
        found = recommend(repriced(trees, curve, batch, place), curve.step_ms(0, batch, place))
        rows = batch * (found.best.nodes + 1) if found.best else batch
        beyond = ", beyond the rows measured" if rows > curve.rows[-1] else ""
        said = f"{found.best.spec}, {found.gain:.2f} times plain decoding" if found.best else "plain decoding is faster"
        lines.append(f"{batch:>6}  {said}{beyond}")
    return "\n".join(lines) + "\n"


def measured(runs: Sequence[Measured], predicted: Sequence[Option], elsewhere: bool) -> str:
    """What was measured beside what was predicted for one text behind a short prefix, as these are decoded; errors in
    percent of the measured figure. Speeds predicted for another device (`elsewhere`) are not held against this one."""
    options = {option.spec: option for option in predicted}
    lines = ["measured just now, greedy, one text at a time, taking turns; errors of expected and replayed tokens per "
             "step and of predicted tokens per second, in percent of the measured figure",
             f"{'tree':>16}{'nodes':>7}{'tokens/step':>13}{'expected':>10}{'replayed':>10}{'ms/step':>9}{'tokens/s':>10}"
             f"{'predicted':>11}{'/plain':>8}   equals greedy"]
    plain = next(run for run in runs if run.name == PLAIN_NAME)
    for run in runs:
        option = options.get(run.name)
        expected, replayed, speed = (None,) * 3 if option is None else (
            option.expected, option.replayed and option.replayed.tokens_per_step,
            None if elsewhere else option.tokens_per_second)
        lines.append(f"{run.name:>16}{run.nodes:>7}{run.tokens_per_step:>13.3f}"
                     f"{_error(expected, run.tokens_per_step):>10}{_error(replayed, run.tokens_per_step):>10}"
                     f"{run.ms_per_step:>9.1f}{run.tokens_per_second:>10.1f}{_error(speed, run.tokens_per_second):>11}"
                     f"{run.tokens_per_second / plain.tokens_per_second:>8.2f}   {_equal(run)}")
    return "\n".join(lines) + "\n"


def thresholds(spec: str, studied: Studied) -> str:
    """The threshold study, one line for each setting."""
    lines = [f"typical acceptance with {spec}, measured just now: tokens per step against proxies of quality, which "
             "are no judgement of it; δ = √ε",
             "surprise: mean of -log p - H at the same T, 0 for text drawn from the backbone; distinct-3, repeated-4: "
             "shares of 3-grams that are distinct, of 4-grams that stood earlier in their text",
             f"{'':>16}{'T':>6}{'ε':>7}{'δ':>7}{'tokens':>8}{'tokens/step':>13}{'surprise':>10}{'distinct-3':>12}"
             f"{'repeated-4':>12}"]
    for point in studied.points:
        name = "typical" if point.kind == "typical" else f"plain {point.kind}"
        epsilon, delta = ("-", "-") if point.epsilon is None else (f"{point.epsilon:g}", f"{point.delta:.2f}")
        proxy = point.proxy
        lines.append(f"{name:>16}{point.temperature:>6g}{epsilon:>7}{delta:>7}{point.tokens:>8}"
                     f"{point.tokens_per_step:>13.3f}{proxy.surprise:>10.3f}{proxy.distinct_3:>12.3f}"
                     f"{proxy.repeated_4:>12.3f}")
    return "\n".join(lines) + "\n"


def _error(predicted: float | None, found: float) -> str:
    off = error_percent(predicted, found)
    return "-" if off is None else f"{off:+.1f}%"


def _equal(run: Measured) -> str:
    if run.equals_greedy is True:
        return "yes"
    return "but for rounding ties" if run.equals_greedy and run.equals_greedy["tie"] else "no"
