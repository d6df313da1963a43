"""The backbone: any causal LM of transformers that takes a 4-D attention mask and position ids.

`prefill` commits tokens to a TreeCache; `verify` runs a tree's rows behind it. Both return the hidden states that
the LM head reads (after the final norm) and the logits of the model's own forward, scaling and soft-cap included.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa_viz.models import adapter as adapters
from medusa_viz.models import attention as attentions
from medusa_viz.models import packed as packing
from medusa_viz.models import placing
from medusa_viz.models import static as statics
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.device import Placement
from medusa_viz.models.placing import BackboneError
from medusa_viz.models.slab import StaticCache

PREFILL_CHUNK = 512  # rows per prefill forward; bounds the mask to PREFILL_CHUNK x prompt
SELF_CHECK_TOLERANCE = 0.05  # share of the largest logit, in half precision
SELF_CHECK_TOLERANCE_EXACT = 1e-3  # in fp32 and fp64, where kernels differ by about 1e-6
CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers 5.24 renamed the forward's cache argument


@dataclass(frozen=True)
class Forward:
    """What one forward gave. hidden [rows, d], logits [rows, V]; prefill returns the last row only."""

    hidden: Tensor
    logits: Tensor


class Backbone:
    """A frozen causal LM. Stateless: caches and masks belong to the callers. Use it from one thread at a time."""

    def __init__(self, model: PreTrainedModel, placement: Placement, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.placement = placement
        self.name = name or model.config.name_or_path or type(model).__name__
        self.config = model.config.get_text_config()
        self.layer_kinds = _layer_kinds(model)
        self.linears = "plain"
        """How the linears run, in words: plain, or packed with what that gains; see `packed.pack`."""
        self.static: statics.StaticStep | None = None
        self._eager = "eager"
        parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
        self._cache_argument = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        if self.lm_head is None or self._cache_argument is None:
            raise BackboneError(f"{type(model).__name__} is no causal language model with a key-value cache.")
        if "position_ids" not in parameters:
            raise BackboneError(f"{type(model).__name__} takes no position ids, without which siblings of a tree "
                                "cannot share a position.")
        self._can_slice = "logits_to_keep" in parameters
        weight = self.lm_head.weight  # read once: a packed one is unpacked for it
        self.device = weight.device
        self.vocab_size, self.hidden_size = weight.shape

    @property
    def lm_head(self) -> torch.nn.Module:
        """The module that maps hidden states to logits; another one once the linears are packed."""
        return self.model.get_output_embeddings()

    @property
    def context(self) -> int:
        """Most tokens, prompt included, that the positions allow."""
        return getattr(self.config, "max_position_embeddings", None) or 1 << 20

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end the text, as the generation config names them; the model config's where it names none."""
        named = self.model.generation_config.eos_token_id if self.model.generation_config else None
        named = self.config.eos_token_id if named is None else named
        return frozenset([named] if isinstance(named, int) else named or [])

    @property
    def step(self) -> str:
        """How a tree's forward runs, in words; see `static`."""
        return self.static.words if self.static else self._eager

    @cached_property
    @torch.inference_mode()
    def has_plain_head(self) -> bool:
        """Whether the logits are just the LM head's product, neither scaled nor capped."""
        ids = [token % self.vocab_size for token in (11, 7, 5, 3)]
        forward = self.prefill(ids, self.new_cache(len(ids)), keep=len(ids))
        return torch.allclose(self.lm_head(forward.hidden), forward.logits, rtol=1e-2, atol=1e-3)

    def new_cache(self, capacity: int) -> TreeCache:
        if self.static:
            return self.static.new_cache(capacity)
        return TreeCache(self.config.num_hidden_layers, capacity)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], cache: TreeCache, keep: int = 1) -> Forward:
        """Commit `ids` to the cache; hidden [keep, d] and logits [keep, V] of the last `keep` of them."""
        if not ids:
            raise BackboneError("The prompt holds no token; type at least one character.")
        if cache.length + len(ids) > self.context:
            raise BackboneError(f"The text has {cache.length + len(ids):,} tokens, but {self.name} has room for "
                                f"{self.context:,}.")
        kept: list[Forward] = []
        for first in range(0, len(ids), PREFILL_CHUNK):
            chunk = torch.tensor(ids[first : first + PREFILL_CHUNK], device=self.device)
            rows = len(chunk)
            wanted = max(min(rows, rows - (len(ids) - keep - first)), 1)
            cache.reserve(rows)
            depth = torch.arange(rows, device=self.device)
            block = self.additive(torch.ones(rows, rows, dtype=torch.bool, device=self.device).tril())
            forward = self._forward(chunk, depth, block, cache, keep=wanted)
            kept.append(Forward(forward.hidden[-wanted:], forward.logits[-wanted:]))
            cache.length += rows
        hidden, logits = (torch.cat([getattr(part, name) for part in kept])[-keep:] for name in ("hidden", "logits"))
        return Forward(hidden, logits)

    @torch.inference_mode()
    def verify(self, tokens: Tensor, depth: Tensor, block: Tensor, cache: TreeCache) -> Forward:
        """Run a tree's rows behind the prefix, without committing them.

        tokens [rows] and depth [rows] are int64, block [rows, rows] is additive (`additive` of the tree's mask):
        which rows see which. Every row sees the whole prefix, as far as a sliding window allows.
        """
        if self.static and isinstance(cache, StaticCache):
            return Forward(*self.static.run(tokens, depth, block, cache))
        return self.verify_eagerly(tokens, depth, block, cache)

    def ready(self, cache: TreeCache, rows: int) -> None:
        """Prepare what the first `verify` of so many rows on this cache would otherwise take time for. What lies behind
        the prefix is lost."""
        if self.static and isinstance(cache, StaticCache):
            self.static.ready(cache, rows)

    def verify_eagerly(self, tokens: Tensor, depth: Tensor, block: Tensor, cache: TreeCache) -> Forward:
        """`verify` with shapes that follow the tree and the prefix."""
        cache.reserve(len(tokens))
        return self._forward(tokens, depth, block, cache)

    def states(self, texts: Sequence[Tensor]) -> Tensor:
        """[n, longest, d]: what the LM head reads at every token of every text, without a cache; gradients flow where
        weights are trainable. Texts are padded on the right, where causal attention never looks: no mask."""
        padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(self.device)
        captured: list[Tensor] = []

        def keep_input(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            captured.append(inputs[0])
            return (inputs[0][:, :1],)  # the logits are not wanted; one row keeps the forward going

        handle = self.lm_head.register_forward_pre_hook(keep_input)
        try:
            self.model(input_ids=padded, use_cache=False)
        finally:
            handle.remove()
        return captured[0]

    def additive(self, mask: Tensor) -> Tensor:
        """0 where the boolean mask is open, the lowest number where it is closed. A boolean 4-D mask would be added
        as 0 and 1 by eager attention, silently wrong, so masks are additive everywhere."""
        lowest = torch.finfo(self.placement.dtype).min
        return torch.zeros(mask.shape, dtype=self.placement.dtype, device=self.device).masked_fill_(
            ~mask.to(self.device), lowest)

    def _forward(self, tokens: Tensor, depth: Tensor, block: Tensor, cache: TreeCache, keep: int = 0) -> Forward:
        positions = depth + cache.length
        arguments = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "attention_mask": self._masks(depth, block, cache.length),
            self._cache_argument: cache,
            "use_cache": True,
        }
        if keep and self._can_slice:
            arguments["logits_to_keep"] = keep
        with _input_of(self.lm_head) as captured:
            logits = self.model(**arguments).logits
        return Forward(captured[0][0].to(self.device), logits[0])  # with layers on several cards it may lie elsewhere

    def _masks(self, depth: Tensor, block: Tensor, prefix: int) -> Tensor | dict[str, Tensor]:
        """4-D additive mask [1, 1, rows, prefix + rows], or one per kind where the model mixes kinds of layers."""
        kinds = set(self.layer_kinds)
        masks = {kind: self._mask(depth, block, prefix, kind) for kind in kinds}
        return masks if len(kinds) > 1 else masks[kinds.pop()]

    def _mask(self, depth: Tensor, block: Tensor, prefix: int, kind: str) -> Tensor:
        rows = len(depth)
        mask = block.new_zeros(1, 1, rows, prefix + rows)
        mask[0, 0, :, prefix:] = block
        if kind == "sliding_attention":
            keys = torch.cat([torch.arange(-prefix, 0, device=depth.device), depth])  # positions relative to the root
            too_far = depth[:, None] - keys[None] >= self.config.sliding_window
            mask[0, 0].masked_fill_(too_far, torch.finfo(mask.dtype).min)
        return mask

    def check_trees(self) -> None:
        """Refuse, before the first token, a model whose logits under a tree mask differ from its plain forward's."""
        # Root with two children, the second of which has a child: siblings, depth and the prefix all count.
        ids = [token % self.vocab_size for token in (11, 7, 5, 3, 2, 13)]
        prefix, root, left, right, below = ids[:2], ids[2], ids[3], ids[4], ids[5]
        mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
        tree = self.new_cache(16)
        try:
            self.prefill(prefix, tree)
            tokens = torch.tensor([root, left, right, below], device=self.device)
            depth = torch.tensor([0, 1, 1, 2], device=self.device)
            seen = self.verify(tokens, depth, self.additive(mask), tree).logits[3]
            path = torch.tensor([[*prefix, root, right, below]], device=self.device)
            with torch.inference_mode():  # no mask, position or cache of ours: what the model does by itself
                expected = self.model(input_ids=path, use_cache=False).logits[0, -1]
        except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, IndexError) as error:
            raise BackboneError(f"{self.name} cannot run a tree: {str(error).splitlines()[0]:.160}") from error
        scale = expected.float().abs().max().clamp_min(1e-6)
        if not ((seen.float() - expected.float()).abs().max() <= tolerance(seen.dtype) * scale):
            raise BackboneError(f"{self.name} does not honour a tree mask: its logits differ from a plain forward's.")

    def speed_up(self, compiled: bool = False) -> None:
        """On a CPU: attention that copies no keys, and packed linears where they are right and faster. On CUDA: the
        static step, `compiled` if asked. For inference only. All must keep the logits of something short; `linears`
        and `step` say what became of them."""
        attentions.stop_repeating(self.model, self._probe)
        self.linears = packing.pack(self.model, self._probe)
        self.static, self._eager = statics.fitting(self, compiled, tolerance(self.placement.dtype))

    def _probe(self) -> Tensor:
        ids = [token % self.vocab_size for token in (11, 7, 5, 3, 2, 13)]
        return self.prefill(ids, self.new_cache(len(ids)), keep=len(ids)).logits


def load(folder: str | Path, placement: Placement, name: str = "", attention: str | None = None, packed: bool = True,
         adapter: str | Path | None = None, compiled: bool = False, heads: int = 0) -> Backbone:
    """Load a backbone from its folder, and check that it can run trees. Raises BackboneError or AdapterError.

    `adapter` is the folder of a LoRA adapter to merge into the weights (Medusa-2). `packed` lays fp32 linears out for
    a CPU's inference where that is faster, and steps on CUDA run in static buffers, `compiled` if asked; without it the
    model is as transformers made it, and can be trained, copied and moved. `heads` are numbers of Medusa heads, for
    which there must be room.
    """
    name = name or str(folder)
    if adapter is not None and placement.quantised:
        raise BackboneError(f"{name} has an adapter, which cannot be merged into {placement.quantised} weights: choose "
                            "--dtype bf16.")
    model = placing.load_model(folder, placement, name, attention, heads)
    if adapter is not None:
        model = adapters.merge(model, adapter)
    backbone = Backbone(model, placement, name)
    backbone.check_trees()
    if packed:
        backbone.speed_up(compiled)
    return backbone


def tolerance(dtype: torch.dtype) -> float:
    """By how much, as a share of the largest logit, two right ways to run a model may differ."""
    return SELF_CHECK_TOLERANCE if torch.finfo(dtype).bits < 32 else SELF_CHECK_TOLERANCE_EXACT


def _layer_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise BackboneError(f"{type(model).__name__} is an encoder-decoder; Medusa needs a decoder-only model.")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others:
        raise BackboneError(f"{type(model).__name__} has {others[0]} layers, whose state cannot hold a tree of "
                            "candidates; choose a model with attention layers only.")
    return tuple(kinds)


@contextmanager
def _input_of(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Collects what `module` is fed while the block runs: for the LM head, the state that the heads read too."""
    captured: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    try:
        yield captured
    finally:
        handle.remove()
