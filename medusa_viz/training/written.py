"""Files of a distillation: the part file of a run under way, the token file it ends with, and the data card."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from medusa_viz.decoding import loops
from medusa_viz.decoding.batch import TRUNCATION, Written
from medusa_viz.training import data
from medusa_viz.training.data import HELD_OUT, TRAIN, DataError, Replies


class PartFile:
    """Finished texts, one JSON line each, behind a first line that names the run."""

    def __init__(self, path: Path, run: dict, resume: bool) -> None:
        """Start a part file, or with `resume` go on with one. Raises DataError where that would lose or mix work."""
        self.path = path
        self.texts: dict[int, Written] = {}
        lines = _whole_lines(path)
        if lines and not resume:
            raise DataError(f"{path} holds an unfinished run: add --resume to go on with it, or delete it.")
        if lines:
            self._take(lines, run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines) or json.dumps(run) + "\n", "utf-8")  # drops a last line that was torn
        self._file = path.open("a", encoding="utf-8")

    def _take(self, lines: list[str], run: dict) -> None:
        try:
            first, *rest = map(json.loads, lines)
            texts = [Written(**line) for line in rest]
        except (ValueError, TypeError) as error:
            raise DataError(f"{self.path} is no part file of a run ({error}); delete it.") from error
        changed = [name for name in run | first if run.get(name) != first.get(name)]
        if changed:
            raise DataError(f"{self.path} belongs to a run with other settings ({', '.join(changed)}); repeat those, "
                            "or delete it.")
        self.texts = {text.number: text for text in texts}

    def add(self, text: Written) -> None:
        """Keep a finished text, on disk too."""
        self.texts[text.number] = text
        self._file.write(json.dumps(asdict(text)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """A run that was killed may have left half a line."""
    if not path.is_file():
        return []
    return [line for line in path.read_text("utf-8", "replace").splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class Label:
    """What is stored with a reply: index into `kinds`, split, place of its prompt in its file (-1: none), and the
    pass over the file that it belongs to."""

    kind: int
    split: int
    prompt: int = -1
    turn: int = 0


@dataclass(frozen=True)
class Entry:
    """A text that goes into the token file."""

    text: Written
    label: Label
    temperature: float


def replies_of(entries: Sequence[Entry], kinds: Sequence[str], name: str) -> Replies:
    """Entries as the sequences that training and calibration read, by pass and prompt."""
    entries = in_order(entries)
    lengths = [len(entry.text.ids) for entry in entries]
    return Replies(name, np.array([token for entry in entries for token in entry.text.ids], np.int32),
                   np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                   np.array([entry.text.starts[-1] for entry in entries], np.int32),
                   np.array([entry.temperature for entry in entries], np.float32),
                   np.array([entry.label.kind for entry in entries], np.uint8), tuple(kinds),
                   np.array([entry.label.split for entry in entries], np.uint8), self_written=True)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """By pass over the prompts and place of the prompt; by number where there is no file of prompts."""
    return sorted(entries, key=lambda entry: (entry.label.turn, entry.label.prompt))


def save_replies(path: Path, entries: Sequence[Entry], kinds: Sequence[str], vocab_size: int) -> None:
    """Write a token file (see `training.data`); a further array `prompt` says which prompt of its file each answers."""
    replies = replies_of(entries, kinds, path.name)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(
            file, ids=replies.ids.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), offsets=replies.offsets,
            reply_start=replies.reply_start, temperature=replies.temperature.astype(np.float16), kind=replies.kind,
            kinds=np.array(kinds), split=replies.split,
            prompt=np.array([entry.label.prompt for entry in in_order(entries)], np.int32))
    os.replace(part, path)


def card_path(path: Path) -> Path:
    """The data card lies beside its token file."""
    return path.with_suffix(".json")


def save_card(path: Path, entries: Sequence[Entry], kinds: Sequence[str], facts: dict) -> None:
    """Write the data card of a token file: `facts` of the run, and counts taken from the file itself."""
    replies = data.load([path])
    tokens = np.diff(replies.offsets) - replies.reply_start
    groups = [(f"{kind}, {name}", (replies.kind == n) & (replies.split == split))
              for n, kind in enumerate(kinds) for split, name in ((TRAIN, "train"), (HELD_OUT, "held out"))]
    by_temperature = [(f"{heat:g}", np.isclose(replies.temperature, heat, atol=1e-3))
                      for heat in sorted({entry.temperature for entry in entries})]

    def counted(named: list[tuple[str, np.ndarray]]) -> dict:
        return {name: {"replies": int(chosen.sum()), "reply_tokens": int(tokens[chosen].sum())}
                for name, chosen in named if chosen.any()}

    card = {
        "file": path.name, "fingerprint": replies.fingerprint,
        "what": "Replies that a language model wrote itself, as token ids, for training and judging its Medusa heads.",
        "replies": len(replies), "reply_tokens": int(tokens.sum()), "tokens": len(replies.ids),
        "by_kind_and_split": counted(groups), "by_temperature": counted(by_temperature),
        "ended_by": dict(Counter(entry.text.finishes[-1] for entry in entries)),
        "rules": {"loops": loops.RULE, "sampling": f"temperature 0 is greedy; else {TRUNCATION}"},
        **facts, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
    }
    card_path(path).write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", "utf-8")
