"""The model card of a heads folder, written from the facts of the run and its scores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.training.data import HELD_OUT, TRAIN, Replies
from medusa_viz.training.evaluate import Scores
from medusa_viz.tuning.calibration import prompt_of

NO_SCORES = "No reply was held out, or training stopped early: nothing was measured."


def model_card(config: HeadsConfig, scores: dict[str, Scores], replies: Replies, log: list[dict]) -> str:
    """Markdown. `log` holds the lines of the training log."""
    parts = [_head(config), _data(config, replies), _recipe(config), _scores(scores), _curve(log),
             _limits(config, replies)]
    return "\n".join(parts) + "\n"


def _head(config: HeadsConfig) -> str:
    trained, joint = config.trained, _is_joint(config.trained)
    layers = f"{config.medusa_num_layers} residual layer{'s' * (config.medusa_num_layers > 1)} each"
    kind = (f"Medusa-2 heads with {layers} and a LoRA adapter of rank {trained['rank']} for the backbone, trained "
            "together." if joint else f"Medusa-1 heads with {layers} over a frozen backbone.")
    text = "the adapted backbone's own, close to the original's but not the same" if joint else "the backbone's own"
    adapter = "; `adapter_model.safetensors` is the adapter in peft's format, without the LM head" if joint else ""
    return f"""# Medusa heads for {config.base_model_name_or_path}

{config.medusa_num_heads} {kind} Width {config.hidden_size}. The heads share the backbone's LM head and draft from \
{trained["draft_rows"]:,} of its {config.vocab_size:,} rows. Head k at position t predicts the token at t+k+1. \
Verification by the backbone keeps the full vocabulary, so the text is {text}, whatever the heads draft.

Weights in fp16, `{{head}}.{{layer}}.linear.weight|bias` with heads from 0, and `draft_vocabulary`, the ids of the \
rows{adapter}.
"""


def _data(config: HeadsConfig, replies: Replies) -> str:
    parts = [replies.split == TRAIN, replies.split == HELD_OUT]
    greedy_alone = config.trained.get("replies") == "greedy"
    if greedy_alone:
        parts[0] &= replies.temperature == 0
    reply_tokens = np.diff(replies.offsets) - replies.reply_start
    rows = [[kind] + [_count(reply_tokens[(replies.kind == i) & part]) for part in parts]
            for i, kind in enumerate(replies.kinds)]
    drawn, whole = config.trained["tokens"], int(reply_tokens[parts[0]].sum())
    sequences = f"{config.trained['sequences']:,} replies"
    share = "" if drawn == whole else (f"\nOf the training part {drawn:,} reply tokens in {sequences} were drawn, "
                                       "those to written prompts first.\n")
    chosen = " Of the training part only the greedy replies were used." if greedy_alone else ""
    base = config.base_model_name_or_path
    licence = (f"The text is the output of {base}; that model's licence (Apache-2.0 for SmolLM2) covers heads derived "
               "from it." if replies.self_written else
               f"The heads derive from {base} and from this text; the licences of both apply.")
    return f"""## Data

`{replies.name}` (fingerprint {config.trained["data_fingerprint"]}): {_origin(replies, parts[0])} \
{_split(replies)}{chosen}

{_table(["kind of prompt", "reply tokens in replies, training", "held out"], rows)}
{share}
{licence}
"""


def _origin(replies: Replies, training: np.ndarray) -> str:
    """Who wrote the text, as far as the files say it."""
    if not replies.self_written:
        return ("text whose files do not give the kind of prompt and the temperature of every reply, so who wrote it "
                "is not known; replies without a temperature count as greedy.")
    drawn_at = replies.temperature[training].astype(np.float16)  # as token files have them: prints 0.7, not 0.7002
    counted = ", ".join(f"{t!s} ({count:,} replies)" for t, count in zip(*np.unique(drawn_at, return_counts=True)))
    return ("replies that the backbone wrote itself (self-distillation). Temperatures in the training part, "
            f"0 = greedy: {counted}.")


def _shared_prompts(replies: Replies) -> int | None:
    """Number of prompts on both sides of the split, found by their tokens; None where the files do not say of every
    sequence where its prompt ends."""
    if not replies.reply_start.all():
        return None
    prompts = prompt_of(replies)
    return len(np.intersect1d(prompts[replies.split == TRAIN], prompts[replies.split == HELD_OUT]))


def _split(replies: Replies) -> str:
    """What is known of the prompts on both sides."""
    if not (replies.split == HELD_OUT).any():
        return "Nothing is held out."
    shared = _shared_prompts(replies)
    if shared is None:
        return "The files do not say where all prompts end, so some may be both trained on and held out."
    return f"Prompts on both sides of the split: {shared:,}." if shared else "Split by prompt."


def _target(trained: dict) -> str:
    own = f"the backbone's own distribution there (its {trained['teacher_width']} likeliest drafting rows)"
    share = trained["distill"]
    if share in (0, 1):
        return own if share else "the token that came"
    return f"{1 - share:g} · the token that came + {share:g} · {own}"


def _count(tokens: np.ndarray) -> str:
    return f"{tokens.sum():,} in {len(tokens):,}"


def _is_joint(t: dict) -> bool:
    """Whether the backbone was trained too; the first stage of Medusa-2 leaves it alone."""
    return t["stage"] == 2


def _objective(t: dict) -> str:
    heads = f"Σ 0.8^k · L_k; L_k: mean over head k's own labels of the cross entropy with {_target(t)}"
    if not _is_joint(t):
        return heads
    own = ("KL of the backbone's distribution before training and now" if t["lm_loss"] == "kl" else
           "cross entropy of the text")
    return f"L_LM + λ0 · {heads}; L_LM: {own}, mean over reply tokens; λ0 = {t['lambda0']:g} ({t['lambda0_schedule']})"


def _recipe(config: HeadsConfig) -> str:
    t = config.trained
    facts = [
        ("recipe", t["recipe"] + (f", from the heads `{t['init']}`" if t["init"] else "")),
        ("objective", _objective(t)),
        ("labels", "prompts and replies" if t["whole_text"] else "reply tokens only"),
        ("labels per head", ", ".join(f"{n:,}" for n in t["labels_per_head"])),
        ("draft vocabulary", f"{t['draft_rows']:,} rows: the most frequent reply tokens and all single bytes; holds "
                             f"{t['draft_coverage']:.1%} of the training targets, the others give no label"),
        ("optimiser", f"AdamW, peak learning rate {t['lr']:g}, {t['warmup']} warm-up steps, cosine to 0, weight decay "
                      f"{t['weight_decay']:g}, gradient norm at most {t['clip']:g}"),
        ("length", f"{t.get('passes_done', 0)} of {t['passes']} passes over {t['positions']:,} positions, about "
                   f"{t['batch']:,} a step, {t['steps']:,} steps in all"),
        ("time", f"{t['seconds'] / 60:.0f} minutes of optimiser steps on {t['device']} ({t['matrix_precision']} matrix "
                 f"products); torch {t['torch']}; {t['date']}"),
    ]
    if _is_joint(t):
        stages = f"{t['heads_passes']} passes of heads alone at {t['heads_lr']:g}, then both"
        stages = stages if t["heads_passes"] else "both from the start"
        facts.insert(6, ("adapter", f"LoRA of rank {t['rank']}, alpha {t['alpha']}, on all linears but the LM head; "
                                    f"the heads learn {t['heads_rate']:g} times as fast; {stages}"))
    if "perplexity" in t:
        found = t["perplexity"]
        facts.append(("perplexity of the backbone on the held-out replies", f"{found['before']:.3f} before, "
                      f"{found['after']:.3f} after ({found['after'] / found['before'] - 1:+.1%})"))
    if "same_choice" in t:
        facts.append(("its first choice is what it was", f"at {t['same_choice']:.1%} of those replies' tokens"))
    return f"## Recipe\n\n{_table(['', ''], facts)}\n\n```\n{t['command']}\n```\n"


def _scores(scores: dict[str, Scores]) -> str:
    if not scores:
        return f"## Held-out scores\n\n{NO_SCORES}\n"
    text = ["## Held-out scores", "",
            "Share of a head's own scorable positions where one of its first n tokens is right. A target outside the "
            "draft vocabulary counts as a miss.", ""]
    for score in scores.values():
        rows = [[k, f"{score.positions[k - 1]:,}"] + [f"{sum(row[:n]):.3f}" for n in range(1, len(row) + 1)]
                for k, row in enumerate(score.accuracy, start=1)]
        text += [f"**{score.name}** ({score.replies} replies)", "",
                 _table(["head", "positions", *(f"top-{n}" for n in range(1, 11))], rows), ""]
    replayed = [score for score in scores.values() if score.tokens_per_step]
    if replayed:
        nodes = list(replayed[0].tokens_per_step)
        text += ["Replayed tokens per step, greedy replies (committed tokens / steps, the root counted; sparse trees "
                 "built from the replies to one half of the prompts and replayed on those to the other):", "",
                 _table(["nodes", *map(str, nodes)],
                        [[s.name, *(f"{s.tokens_per_step[n]:.3f}" for n in nodes)] for s in replayed]), ""]
    return "\n".join(text)


def _curve(log: list[dict]) -> str:
    """Per pass: the mean logged training loss and the held-out scores."""
    rows, losses = [], []
    for line in log:
        if "total" in line:
            losses.append(line["total"])
        elif "pass" in line:
            judged = line.get("held_out", {})
            judged = judged.get("all, greedy") or judged.get("all")
            scores = ["–"] * 3 if judged is None else [
                " ".join(f"{row[0]:.3f}" for row in judged["accuracy"]),
                *(f"{rate:.3f}" if (rate := judged["tokens_per_step"].get(n)) else "–" for n in ("15", "63"))]
            found = line.get("perplexity")
            rows.append([line["stage"], line["pass"], f"{np.mean(losses):.3f}" if losses else "–", *scores,
                         f"{found['before']:.3f} → {found['after']:.3f}" if found else "–"])
            losses = []
    header = ["stage", "pass", "training loss", "held-out top-1, heads in order", "tokens per step, 15 nodes",
              "63 nodes", "perplexity"]
    return f"## Learning curve\n\n{_table(header, rows)}\n"


def _limits(config: HeadsConfig, replies: Replies) -> str:
    apart = ", and no prompt is on both sides, but" if _shared_prompts(replies) == 0 else ";"
    held_out = ("" if not (replies.split == HELD_OUT).any() else
                f"- The held-out replies come from the same sources as the training data{apart} topics and wordings "
                "are alike; on other questions the heads do worse.\n")
    return f"""## Limits

- Made for {config.base_model_name_or_path} alone; on another backbone the heads draft noise.
{held_out}- Tokens outside the draft vocabulary are never drafted; such places cost a plain step.
- Text sampled at a high temperature is drafted worse than greedy text.
"""


def _table(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
