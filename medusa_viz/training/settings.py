"""The knobs of training runs, and the recipes by name. No torch: pages and `--help` read this."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from medusa_viz.decoding.settings import Checked, SettingsError, setting


@dataclass(frozen=True)
class TrainSettings(Checked):
    """Knobs of every run."""

    heads: int = setting(4, "number of heads K; head k predicts the token k+1 places ahead", 1, 16, 1)
    layers: int = setting(2, "residual layers per head", 1, 8, 1)
    draft_vocabulary: int = setting(16_384, "most frequent reply tokens that heads can draft; 0 = all", 0, 1_000_000, 1)
    tokens: int = setting(0, "reply tokens to train on, whole replies drawn by seed, those to written prompts first; "
                          "0 = all", 0, 10**9, 1)
    replies: str = setting("all", "which replies to train on. greedy: only those written at temperature 0, the text "
                           "that greedy decoding drafts", choices=("all", "greedy"))
    passes: int = setting(5, "passes over the training text", 1, 1_000, 1)
    batch: int = setting(512, "positions per optimiser step", 1, 1_000_000, 1)
    micro_batch: int = setting(2_048, "most tokens at once; a larger batch adds up their gradients", 1, 1_000_000, 1)
    lr: float = setting(1.5e-3, "peak learning rate; cosine decay to 0 after the warm-up", 1e-7, 1.0)
    warmup: int = setting(50, "optimiser steps of linear warm-up", 0, 100_000, 1)
    weight_decay: float = setting(0.0, "AdamW weight decay", 0.0, 10.0)
    distill: float = setting(1.0, "share of the heads' target taken from the backbone's own distribution", 0.0, 1.0)
    clip: float = setting(1.0, "largest gradient norm", 1e-6, 1e6)
    seed: int = setting(0, "seed of the order and of the choice of replies", 0, 2**31 - 1, 1)
    log_every: int = setting(20, "optimiser steps between log lines", 1, 100_000, 1)
    checkpoint_every: int = setting(500, "optimiser steps between checkpoints", 1, 1_000_000, 1)

    @property
    def decisive(self) -> dict[str, int | float | str]:
        """The settings that the finished heads depend on."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("_every")}


@dataclass(frozen=True)
class JointSettings(TrainSettings):
    """Knobs of a Medusa-2 run besides those of every run; `lr` is the backbone's."""

    batch: int = setting(1_024, "positions per optimiser step, in whole replies", 1, 1_000_000, 1)
    passes: int = setting(1, "joint passes over the training text", 1, 1_000, 1)
    lr: float = setting(5e-4, "peak learning rate of the backbone's adapter; cosine to 0 after the warm-up", 1e-7, 1.0)
    heads_rate: float = setting(4.0, "the heads' learning rate over the backbone's", 1e-3, 1e3)
    heads_passes: int = setting(1, "passes of the first stage, which trains heads alone, under the adapter of given "
                                "heads if they bring one; 0 = none", 0, 1_000, 1)
    heads_lr: float = setting(1.5e-3, "peak learning rate of the first stage", 1e-7, 1.0)
    lambda0: float = setting(0.2, "weight λ0 of the heads' loss beside the backbone's own", 0.0, 100.0)
    lambda0_schedule: str = setting("constant", "constant, or sine: λ0 grows as sin(π/2 · share of the steps)",
                                    choices=("constant", "sine"))
    lm_loss: str = setting("kl", "the backbone's own loss. kl: divergence from itself before training, for replies "
                           "that it wrote; ce: cross entropy of the text, for data from elsewhere",
                           choices=("kl", "ce"))
    rank: int = setting(8, "rank of the LoRA adapter", 1, 1024, 1)
    alpha: int = setting(16, "LoRA's scale: the adapter's product times alpha / rank", 1, 4096, 1)

    @property
    def first_stage(self) -> JointSettings:
        """Those of the stage that trains heads alone."""
        return replace(self, passes=self.heads_passes, lr=self.heads_lr)


@dataclass(frozen=True)
class Recipe:
    """One way to train; the kind of its settings says whether the backbone learns too."""

    help: str
    defaults: TrainSettings


RECIPES = {
    "medusa1": Recipe("heads alone, over a frozen backbone", TrainSettings()),
    "medusa2": Recipe("heads alone first, then heads and a LoRA adapter of the backbone together", JointSettings()),
    "direct": Recipe("both together from the start, at one rate and full weight, without any warm-up; it is here to "
                     "show why the stages are needed",
                     JointSettings(heads_passes=0, heads_rate=1.0, lambda0=1.0, warmup=0)),
}


def settings_for(recipe: str, changes: dict[str, object]) -> TrainSettings:
    """A recipe's settings with some changed. Raises SettingsError."""
    defaults = RECIPES[recipe].defaults
    foreign = sorted(set(changes) - {field.name for field in fields(defaults)})
    if foreign:
        raise SettingsError(f"{foreign[0]} belongs to the recipes that train the backbone; {recipe} does not.")
    return replace(defaults, **changes)
