"""What a person asked to train, checked, and the commands that do it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from medusa_viz.models.fetch import cache_root
from medusa_viz.models.memory import QUANTISED
from medusa_viz.models.presets import REPOSITORY
from medusa_viz.training.distil_settings import DistilSettings
from medusa_viz.training.settings import RECIPES, settings_for
from medusa_viz.training.shipped import HELD_OUT_EVERY
from medusa_viz.ui.knobs import ActionError

PROMPTS = REPOSITORY / "assets" / "prompts" / "train.jsonl"
TOKENS_PER_ROW = 256  # replies written side by side: no more than the wanted tokens need
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
MODEL = 300  # longest name of a model


def runs_root() -> Path:
    """Where runs lie, one folder each."""
    return cache_root() / "runs"


def data_root() -> Path:
    """Where token files lie."""
    return cache_root() / "data"


@dataclass(frozen=True)
class Plan:
    """One run: `distil` reply tokens are written first (0: none), then heads are trained on them and on `data`."""

    name: str
    recipe: str
    model: str
    data: tuple[str, ...] = ()
    distil: int = 0
    settings: dict[str, object] = field(default_factory=dict)
    """Those that are not the recipe's defaults."""
    dtype: str = ""
    """Of the backbone, where the commands' own default would not do."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ActionError("train_name", name=str(self.name)[:60])
        if self.recipe not in RECIPES:
            raise ActionError("train_recipe", name=str(self.recipe)[:40])
        if not isinstance(self.settings, dict) or not isinstance(self.model, str) or len(self.model) > MODEL \
                or self.dtype not in ("", *QUANTISED):
            raise ActionError("odd_payload", name="start")
        DistilSettings(tokens=self.distil)
        settings_for(self.recipe, self.settings)
        if not self.distil and not self.data:
            raise ActionError("train_no_data")

    @property
    def folder(self) -> Path:
        return runs_root() / self.name

    @property
    def written(self) -> Path:
        """The token file that the model writes first."""
        return data_root() / f"{self.name}.npz"

    def commands(self, device: str = "auto") -> list[tuple[str, list[str]]]:
        """Phase and words of each command that is left to do, in order. All go on with what there is already."""
        done = self.written.is_file() or not self.distil
        place = ["--device", device, *(["--dtype", self.dtype] if self.dtype else [])]
        words = ([] if done else [("distil", self._distil())]) + [("train", self._train())]
        return [(phase, [*command, *place]) for phase, command in words]

    def _distil(self) -> list[str]:
        rows = max(4, min(DistilSettings().rows, self.distil // TOKENS_PER_ROW))
        resume = ["--resume"] * self.written.with_name(self.written.name + ".texts.jsonl").is_file()
        prompts = str(_prompts(self.written))
        return ["distill", "--model", self.model, "--prompts", prompts, "--tokens", str(self.distil),
                "--rows", str(rows), "--out", str(self.written), *resume]

    def _train(self) -> list[str]:
        files = [*self.data, *([str(self.written)] if self.distil else [])]
        resume = ["--resume"] * (self.folder / "log.jsonl").is_file()
        words = ["train", "--recipe", self.recipe, "--model", self.model, "--data", *files, "--out", str(self.folder)]
        for name, value in self.settings.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return words + resume

    def to_json(self) -> dict:
        return asdict(self)


def from_json(saved: object) -> Plan | None:
    """A plan as a run's folder keeps it; None where that is not readable."""
    try:
        return Plan(**{**saved, "data": tuple(saved["data"])})
    except (TypeError, KeyError, ValueError):
        return None


def changed(recipe: str, values: dict[str, object]) -> dict[str, object]:
    """Of the settings a page sends, those that are not the recipe's defaults, in the types of their fields."""
    if recipe not in RECIPES:
        raise ActionError("train_recipe", name=str(recipe)[:40])
    found = {}
    for one in fields(RECIPES[recipe].defaults):
        default = getattr(RECIPES[recipe].defaults, one.name)
        value = values.pop(one.name, default)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value != default or isinstance(value, bool):
            found[one.name] = value
    if values:
        raise ActionError("train_setting", recipe=recipe, name=str(next(iter(values)))[:40])
    return found


def token_file(name: str) -> Path:
    """The token file of that path. Raises ActionError where there is none that could be trained on."""
    try:
        path = Path(name).expanduser().absolute()
        reply_tokens(path)
    except (OSError, ValueError, KeyError, RuntimeError, IndexError, TypeError, EOFError) as error:
        raise ActionError("train_bad_data", path=str(name)[:200]) from error
    return path


def reply_tokens(path: Path) -> int:
    """Reply tokens of the training split in a token file, read without the tokens themselves."""
    with np.load(path, allow_pickle=False) as file:
        _ = file.files.index("ids")
        offsets = file["offsets"].astype(np.int64)
        lengths = np.diff(offsets)
        start = file["reply_start"].astype(np.int64) if "reply_start" in file.files else np.zeros_like(lengths)
        train = file["split"] == 0 if "split" in file.files else np.ones(len(lengths), bool)
        return int(np.maximum(lengths - start, 0)[train].sum())


def _prompts(written: Path) -> Path:
    """The shipped training prompts, some of them marked as held out, in a file beside what will be written."""
    path = written.with_suffix(".prompts.jsonl")
    if not path.is_file():
        lines = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines() if line.strip()]
        for place in range(0, len(lines), HELD_OUT_EVERY):
            lines[place]["split"] = "held_out"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    return path
