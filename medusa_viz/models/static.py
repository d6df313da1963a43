"""The static step: a tree's forward in shapes and at addresses that never change, as CUDA graphs need it.

Rows are padded to a few sizes; a padded row sees itself alone. Tokens, depths, the tree's mask and the prefix length
lie in buffers that every step refills; positions, slots and the additive mask over the whole cache buffer are made
from them on the device. Nothing here asks the device for a number. With `--compile` the step is captured once per
size, with kernels that torch.compile fused where it can, and replayed after that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from medusa_viz.models import memory
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.copies import own_copy
from medusa_viz.models.packed import relative_error
from medusa_viz.models.slab import Slab, Slabs, StaticCache

if TYPE_CHECKING:
    from medusa_viz.models.backbone import Backbone

ROOM = 64  # rows of a new cache beyond what is asked for: padding adds fewer to any tree
WARM_UPS = 2  # before a capture, so that kernels are chosen and workspaces made
NO_CARD = "eager (--compile is for CUDA cards and changes nothing on {})"
EIGHT_BIT = "eager (8-bit linears ask the host)"  # each of them, where its outliers lie

Step = Callable[[], tuple[Tensor, Tensor]]
"""Runs on static buffers alone; hidden [rows, d] and logits [rows, V]."""


class Captured(Protocol):
    """A step that was captured."""

    def replay(self) -> tuple[Tensor, Tensor]:
        """What the step gives for what its buffers hold now, as tensors that no later step changes."""


def padded(rows: int) -> int:
    """The size that this many rows, root included, are padded to. Trees have 16, 32, 64, 128 nodes more often than
    rows, so sizes lie just above such numbers too."""
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 72 else 16 if rows <= 144 else 32 if rows <= 288 else 64
    return -(-rows // step) * step


@dataclass
class Inputs:
    """What a step of one size reads; refilled in place."""

    tokens: Tensor
    """int64 [size]; a padded row is the root once more, so that no step depends on the one before: where a linear looks
    at all rows together, what an earlier tree left there would count."""
    depth: Tensor
    """int64 [size]"""
    sees: Tensor
    """bool [size, size]: which rows see which; a padded row sees itself alone."""
    length: Tensor
    """int64 []: rows of the prefix."""
    tree: tuple[Tensor, Tensor] | None = None
    """Depth and block that `depth` and `sees` were filled from."""

    @staticmethod
    def of_size(size: int, device: torch.device) -> Inputs:
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return Inputs(zeros, zeros.clone(), torch.eye(size, dtype=torch.bool, device=device),
                      torch.zeros((), dtype=torch.int64, device=device))

    def fill(self, tokens: Tensor, depth: Tensor, block: Tensor, length: int) -> None:
        """Take over a tree as `Backbone.verify` gets it."""
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.tokens[rows:] = tokens[:1]
        self.length.fill_(length)
        if self.tree is not None and self.tree[0] is depth and self.tree[1] is block:
            return
        self.depth.zero_()
        self.depth[:rows] = depth
        self.sees.zero_()
        self.sees.fill_diagonal_(True)
        self.sees[:rows, :rows] = block == 0
        self.tree = depth, block


def full_mask(depth: Tensor, sees: Tensor, length: Tensor, capacity: int, window: int | None, dtype: torch.dtype
              ) -> Tensor:
    """Additive [1, 1, rows, capacity]: every row sees the prefix and, behind it, what `sees` says; with a window, only
    keys less than `window` positions back."""
    rows = depth.shape[0]
    behind = torch.arange(capacity, device=depth.device) - length  # rows behind the prefix count from 0
    is_row = (behind >= 0) & (behind < rows)
    row = behind.clamp(0, rows - 1)
    is_open = torch.where(is_row, sees[:, row], behind < 0)
    if window is not None:
        relative = torch.where(is_row, depth[row], behind)  # positions relative to the root
        is_open = is_open & (depth[:, None] - relative < window)
    return torch.zeros(is_open.shape, dtype=dtype, device=depth.device).masked_fill(
        ~is_open, torch.finfo(dtype).min)[None, None]


class StaticStep:
    """Runs trees of one backbone on StaticCaches. Raises BackboneError for a model that cannot be copied."""

    def __init__(self, backbone: Backbone, capture: Callable[[Step], Captured] | None = None,
                 compiler: Callable[[Callable], Callable] | None = None) -> None:
        """`capture` makes a graph of a step; `compiler` is what the step goes through before that."""
        self._device, self._dtype = backbone.device, backbone.placement.dtype
        self._kinds = sorted(set(backbone.layer_kinds))
        self._window = getattr(backbone.config, "sliding_window", None)
        self._cache_argument = backbone._cache_argument
        self._model = own_copy(backbone.model)
        self._tap = _Tap(backbone.lm_head)
        self._model.set_output_embeddings(self._tap)
        self._slabs = Slabs(_buffers(backbone))
        self._capture = capture
        self._compiled = compiler(self._run) if compiler else None
        self.faults: list[str] = []
        """Why graphs or compiled kernels were given up, first words of the error."""

    @property
    def words(self) -> str:
        """What runs, in a few words."""
        why = f" ({self.faults[-1]})" if self.faults else ""
        if self._capture is None:
            return f"static buffers{why and ' without CUDA graphs'}{why}"
        return f"static buffers, CUDA graphs of {'compiled' if self._compiled else 'plain'} kernels{why}"

    def new_cache(self, capacity: int) -> StaticCache:
        return StaticCache(self._slabs, capacity + ROOM)

    @torch.inference_mode()
    def run(self, tokens: Tensor, depth: Tensor, block: Tensor, cache: StaticCache) -> tuple[Tensor, Tensor]:
        """`Backbone.verify`: hidden [rows, d] and logits [rows, V]."""
        rows = len(tokens)
        slab, inputs = self._place(cache, rows)
        inputs.fill(tokens, depth, block, cache.length)
        with _giving_way(slab):
            graph = self._graph(slab, inputs, cache.length)
            hidden, logits = graph.replay() if graph else self._run(inputs, slab.slots)
        return hidden[:rows], logits[:rows]

    @torch.inference_mode()
    def ready(self, cache: StaticCache, rows: int) -> None:
        """Make room for a tree of so many rows, and its graph where graphs are captured, so that its first step takes
        no longer than the next ones. What lies behind the prefix is lost."""
        slab, inputs = self._place(cache, rows)
        with _giving_way(slab):
            self._graph(slab, inputs, cache.length)

    def _place(self, cache: StaticCache, rows: int) -> tuple[Slab, Inputs]:
        """The cache's slab, with room for so many rows, and what a step of their size reads."""
        size = padded(rows)
        cache.reserve(size)
        slab = cache.slab
        slab.clear_behind(cache.length + size)
        if size not in slab.steps:
            slab.steps[size] = Inputs.of_size(size, self._device)
        return slab, slab.steps[size]

    def _run(self, inputs: Inputs, slots: Any) -> tuple[Tensor, Tensor]:
        """The forward, on static buffers alone."""
        size, capacity = inputs.tokens.shape[0], slots.layers[0].keys.shape[2]
        places = inputs.length + torch.arange(size, device=inputs.length.device)
        for layer in slots.layers:
            layer.slots = places
        masks = {kind: full_mask(inputs.depth, inputs.sees, inputs.length, capacity,
                                 self._window if kind == "sliding_attention" else None, self._dtype)
                 for kind in self._kinds}
        logits = self._model(input_ids=inputs.tokens[None], position_ids=(inputs.length + inputs.depth)[None],
                             attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]], use_cache=True,
                             **{self._cache_argument: slots}).logits
        return self._tap.seen[0], logits[0]

    def _graph(self, slab: Slab, inputs: Inputs, length: int) -> Captured | None:
        """This size's graph, captured when it is first asked for, with what works; None where nothing does. A card that
        is full now may have room later, so that gives nothing up."""
        size = inputs.tokens.shape[0]
        while self._capture and size not in slab.graphs:
            inputs.length.fill_(length)  # a capture warms up, and so writes behind the prefix
            try:
                slab.graphs[size] = self._capture(partial(self._compiled or self._run, inputs, slab.slots))
            except Exception as error:  # torch.compile and capture raise many kinds; the run must go on
                if memory.ran_out(error):
                    raise
                self._give_up(error)
        return slab.graphs[size] if self._capture else None

    def _give_up(self, error: Exception) -> None:
        """First on compiled kernels, then on graphs."""
        self.faults.append(f"{type(error).__name__}: {_first_line(error)}")
        if self._compiled:
            self._compiled = None
        else:
            self._capture = None


@contextmanager
def _giving_way(slab: Slab) -> Iterator[None]:
    """Where the card runs out of memory, give back what this slab's graphs hold; the next step captures them anew."""
    try:
        yield
    except Exception as error:
        if memory.ran_out(error):
            slab.graphs.clear()
            memory.give_back()
        raise


class _Tap(nn.Module):
    """An LM head that keeps what it was fed: the state that the heads read too."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.seen: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return self.head(hidden)


class CudaGraphs:
    """Captures steps on one card, one at a time in the whole process. All graphs share one pool of memory, since their
    results are copied out at once, and the stream that goes with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None
        self._anchor: torch.cuda.CUDAGraph | None = None  # holds the pool, however many graphs come and go

    def __call__(self, step: Step) -> Captured:
        with memory.capturing, torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                if self._anchor is None:
                    self._beside, anchor = torch.cuda.Stream(), torch.cuda.CUDAGraph()
                    with _capture_of(anchor, self._beside):
                        torch.zeros(1, device=self._device)
                    self._anchor = anchor
                return _CudaGraph(step, self._beside, self._anchor.pool())
            finally:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own stream behind


def _capture_of(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.graph:
    """thread_local: another thread may free a closed session's tensors meanwhile."""
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


class _CudaGraph:
    def __init__(self, step: Step, beside: torch.cuda.Stream, pool: Any) -> None:
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with _capture_of(self._graph, beside, pool):
            self._hidden, self._logits = step()

    def replay(self) -> tuple[Tensor, Tensor]:
        self._graph.replay()
        return self._hidden.clone(), self._logits.clone()


def fused(step: Callable) -> Callable:
    """Kernels fused by torch.compile, once for all sizes; the graph is ours, so no mode of its own. Every model's are
    counted apart, where this torch can: it compiles no function more than a few times."""
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    return torch.compile(step, fullgraph=True, dynamic=True, **apart)


def fitting(backbone: Backbone, compiled: bool, tolerance: float) -> tuple[StaticStep | None, str]:
    """The static step of a backbone on one CUDA card, if it says what the eager one does, but for `tolerance`; and in
    words why steps are eager where they are."""
    if backbone.device.type != "cuda":
        return None, NO_CARD.format(backbone.device.type) if compiled else "eager"
    if backbone.placement.quantised == "8bit":
        return None, EIGHT_BIT
    if len({parameter.device for parameter in backbone.model.parameters()}) > 1:
        return None, "eager (layers lie on several devices)"
    try:
        step = StaticStep(backbone, *((CudaGraphs(backbone.device), fused) if compiled else ()))
        agrees = says_the_same(step, backbone, tolerance)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        return None, f"eager (static buffers failed: {_first_line(error)})"
    return (step if agrees else None), "eager (static buffers change this model's logits)"


@torch.inference_mode()
def says_the_same(step: StaticStep, backbone: Backbone, tolerance: float) -> bool:
    """Three small trees, the second and third behind a longer prefix, against the eager step."""
    shapes = [torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
              torch.ones(1, 1)]
    caches = [step.new_cache(1), TreeCache(backbone.config.num_hidden_layers, 16)]
    ids = [token % backbone.vocab_size for token in (11, 7, 5, 3, 2, 13)]
    for cache in caches:
        backbone.prefill(ids, cache)
    for shape in shapes:
        tokens = torch.tensor(ids[: len(shape)], device=backbone.device)
        depth = (shape.sum(1) - 1).long().to(backbone.device)
        block = backbone.additive(shape.bool())
        _, seen = step.run(tokens, depth, block, caches[0])
        expected = backbone.verify_eagerly(tokens, depth, block, caches[1]).logits
        if not relative_error(seen.float(), expected.float()) <= tolerance:
            return False
        for cache in caches:
            cache.commit([0, len(shape) - 1] if len(shape) > 1 else [0])
    return True


def _buffers(backbone: Backbone) -> list[Tensor]:
    """Keys and values of each layer, as a forward of one token leaves them."""
    probe = TreeCache(backbone.config.num_hidden_layers, 1)
    backbone.prefill([0], probe)
    return [buffer for layer in probe.layers for buffer in (layer.keys, layer.values)]


def _first_line(error: Exception) -> str:
    return f"{(str(error).strip().splitlines() or [''])[0]:.120}"
