"""Prompts to distil from: read from a file, or written by the model itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_viz.decoding.batch import shared_prefix
from medusa_viz.models.presets import REPOSITORY
from medusa_viz.models.text import TextCodec
from medusa_viz.training.data import HELD_OUT, TRAIN, DataError

SHIPPED = REPOSITORY / "assets" / "prompts" / "prompts.jsonl"
SPLITS = {"train": TRAIN, "held_out": HELD_OUT}
UNNAMED = "unnamed"


def splits(choice: str) -> list[int]:
    """The splits that `all`, `train` or `held_out` stands for."""
    return list(SPLITS.values()) if choice == "all" else [SPLITS[choice]]


@dataclass(frozen=True)
class Prompt:
    """One user turn: its text, the kind of question it is, and the split that its replies belong to."""

    text: str
    kind: str = UNNAMED
    split: int = TRAIN


def read(path: Path, splits: Sequence[int] = (TRAIN, HELD_OUT)) -> list[Prompt]:
    """Prompts of the wanted splits, from JSON lines ({"prompt": …, "kind": …, "split": "train" or "held_out"}) or from
    any other text file, one prompt a line. Raises DataError."""
    try:
        lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The prompts {path} cannot be read ({error}).") from error
    as_json = Path(path).suffix in (".jsonl", ".json")
    prompts = [_prompt(path, n, line) if as_json else Prompt(line.strip()) for n, line in enumerate(lines, start=1)]
    chosen = [prompt for prompt in prompts if prompt.split in splits]
    if not chosen:
        raise DataError(f"{path} holds no prompt{' of the wanted split' if prompts else ''}.")
    return chosen


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        entry = json.loads(line)
        text, kind, split = entry["prompt"], entry.get("kind", UNNAMED), SPLITS[entry.get("split", "train")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"Line {number} of {path} is no prompt: it must be a JSON object with `prompt`, and perhaps "
                        "`kind` and `split` (train or held_out).") from error
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"Line {number} of {path} holds an empty prompt.")
    return Prompt(text, str(kind), split)


@dataclass(frozen=True)
class TurnFrame:
    """What a chat template puts around a user turn: ids before it, and behind it up to where the reply starts."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def end(self) -> int:
        """The special token that ends a user turn."""
        return self.after[0]


def turn_frame(codec: TextCodec) -> TurnFrame:
    """The frame, read off two templated prompts. Raises DataError for models that cannot write a user turn."""
    one, other = codec.encode_prompt("alpha"), codec.encode_prompt("Zulu")
    before, after = shared_prefix([one, other]), shared_prefix([one[::-1], other[::-1]])[::-1]
    if not before or not after or codec.token_kind(after[0]) != "special":
        raise DataError("This model's chat template ends a user turn with no token of its own, so the model cannot "
                        "write one by itself; name a file with --prompts.")
    return TurnFrame(tuple(before), tuple(after))
