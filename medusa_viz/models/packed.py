"""Packed linears: fp32 weights laid out once for oneDNN, for inference on a CPU.

`F.linear` lays a weight out anew on every call with a few rows, which costs more than the product itself. Here that
is done once. Linears that read the same input become one product. Private operators of torch do the work, so `pack`
looks for them, compares, times, and says in one sentence what it kept. What is packed has no gradient and cannot be
copied or moved; its weights can still be read and saved, since oneDNN's layout turns back into the plain one exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Siblings, as Llama and its relatives name them, that read the same input."""

TOLERANCE = 1e-3  # of the largest number compared; two right kernels differ by about 1e-6
TRIAL_BYTES = 64 << 20  # weights in a trial: more than caches hold, so that it streams from memory as a step does
TRIAL_ROUNDS = 9
TRIAL_ROWS = (1, 8)  # a plain step; a small tree
INFERENCE_ONLY = "Packed linears are for inference only; load the model with packed=False to train, copy or move it."

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out]"""


class PackedWeight:
    """A weight [out, in] and its bias [out] in oneDNN's own layout; called with x [..., in] it gives [..., out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._product = torch.ops.mkldnn._linear_pointwise.default  # looked up once, not on every call

    def __call__(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise RuntimeError(INFERENCE_ONLY)
        return self._product(x, self._packed, self.bias, "none", [], "")

    def dense(self) -> Tensor:
        """The plain weight, bit for bit, as a new tensor."""
        return self._packed.to_dense()

    def __reduce_ex__(self, protocol: int) -> tuple:
        raise TypeError(INFERENCE_ONLY)  # torch's own error names a storage, which helps nobody


class SharedProduct:
    """Linears with the same input as one product: whoever is called first computes it, the others take their part."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        biases = [linear.bias for linear in linears]
        self._sizes = [linear.out_features for linear in linears]
        self._whole = PackedWeight(torch.cat([linear.weight.detach() for linear in linears]),
                                   None if biases[0] is None else torch.cat(biases))
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(linears)

    def part(self, place: int, x: Tensor) -> Tensor:
        """The product of linear number `place`. Each part is handed out once, so the same tensor object fed again,
        perhaps with new numbers in it, is computed again."""
        if x is not self._input or self._parts[place] is None:
            self._input, self._parts = x, list(self._whole(x).split(self._sizes, dim=-1))
        result, self._parts[place] = self._parts[place], None
        if not any(part is not None for part in self._parts):
            self._input = None
        return result

    def dense(self, place: int) -> Tensor:
        """The plain weight of linear number `place`."""
        return self._whole.dense().split(self._sizes)[place].clone()


class PackedLinear(nn.Module):
    """Stands where an nn.Linear stood. The weight is neither parameter nor buffer: nothing may move or copy it."""

    def __init__(self, linear: nn.Linear, product: Product, dense: Callable[[], Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._product, self._dense = product, dense

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def weight(self) -> Tensor:
        """The plain weight [out, in]: unpacked on each call, unless the model keeps it anyway (tied embeddings)."""
        return self._dense()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach()

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        raise RuntimeError(INFERENCE_ONLY)


@dataclass(frozen=True)
class Trial:
    """Packed against plain on the same linears."""

    gains: tuple[float, float]
    """Time of F.linear / time packed, at 1 row and at 8."""
    error: float
    """Largest difference, as a share of the largest result."""

    @property
    def faster(self) -> bool:
        """Gains at one of the two outweigh a loss at the other."""
        return self.gains[0] * self.gains[1] > 1

    def __str__(self) -> str:
        return " and ".join(f"{gain:.1f}x at {rows} row{'s' * (rows > 1)}"
                            for gain, rows in zip(self.gains, TRIAL_ROWS))


@torch.no_grad()  # no inference mode: should plain linears be put back, they must be ordinary tensors
def pack(model: nn.Module, probe: Callable[[], Tensor]) -> str:
    """Replace the model's fp32 linears by packed ones if they are right and faster here; says which, in a few words.

    `probe` runs the model on a few tokens and returns its logits, before and after.
    """
    linears = [module for module in model.modules() if can_pack(module)]
    if not linears:
        return "plain (packing is for fp32 on a CPU)"
    if not has_operators():
        return "plain (this torch has no packed oneDNN linears)"
    try:
        trial = measure(linears)
        if not trial.error <= TOLERANCE:
            return f"plain (packed oneDNN differs by {trial.error:.0e})"
        if not trial.faster:
            return f"plain (packed oneDNN is no faster here: {trial})"
        del linears  # so that each plain weight goes once it is packed
        expected = probe()
        replace_linears(model)
        if not agree(probe(), expected):
            restore_linears(model)
            return "plain (packed oneDNN changes this model's logits)"
        for parameter in model.parameters():  # the checkpoint is mapped as one piece: a view of it keeps all of it
            parameter.data = parameter.data.clone()
    except (RuntimeError, NotImplementedError) as error:
        restore_linears(model)
        return f"plain (packed oneDNN failed: {str(error).splitlines()[0]:.80})"
    return f"packed oneDNN, {trial}"


def has_operators() -> bool:
    """Whether torch brings the operators; a build without oneDNN, or a later torch, may not."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def can_pack(module: nn.Module) -> bool:
    """A plain fp32 linear on the CPU: no subclass (quantised, adapted), no hook, which may compute something else."""
    return (type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"
            and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)))


def linear_like(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Product:
    """x -> F.linear(x, weight, bias), packed if `module` is."""
    if isinstance(module, PackedLinear):
        return PackedWeight(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def replace_linears(model: nn.Module) -> None:
    """Put packed linears in place of all that can be packed, those that share an input as one product."""
    kept = _shared_weights(model)
    for parent in [module for module in model.modules() if not isinstance(module, nn.Linear)]:  # frees each weight
        for names in FUSED_NAMES:
            group = [getattr(parent, name, None) for name in names]
            if _fits_together(group) and not any(id(linear.weight) in kept for linear in group):
                shared = SharedProduct(group)
                for place, (name, linear) in enumerate(zip(names, group)):
                    part, dense = partial(shared.part, place), partial(shared.dense, place)
                    setattr(parent, name, PackedLinear(linear, part, dense))
        for name, child in list(parent.named_children()):
            if can_pack(child):
                packed = PackedWeight(child.weight, child.bias)
                dense = (lambda plain=child.weight: plain) if id(child.weight) in kept else packed.dense
                setattr(parent, name, PackedLinear(child, packed, dense))


def restore_linears(model: nn.Module) -> None:
    """Put plain linears back in place of packed ones, tied where they were."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                linear, weight = nn.Linear(child.in_features, child.out_features, device="meta"), child.weight
                tied = isinstance(weight, nn.Parameter)
                linear.weight = weight if tied else nn.Parameter(weight, requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear.train(child.training))


@torch.no_grad()
def measure(linears: Iterable[nn.Linear]) -> Trial:
    """Pack some of the linears aside, compare one with F.linear, and time both kinds side by side."""
    some = list(_up_to(TRIAL_BYTES, linears))
    packed = [PackedWeight(linear.weight, linear.bias) for linear in some]
    one, eight = (_race(some, packed, rows) for rows in TRIAL_ROWS)
    return Trial((one[0], eight[0]), float(torch.tensor([one[1], eight[1]]).max()))  # no number if either is none


def _race(linears: list[nn.Linear], packed: list[PackedWeight], rows: int) -> tuple[float, float]:
    """Gain of the packed ones over all linears at `rows` rows, and the error of the first."""
    inputs = {width: torch.linspace(-1, 1, rows * width).view(rows, width)
              for width in {product.in_features for product in packed}}
    feeds = [inputs[product.in_features] for product in packed]
    plain: list[Product] = [partial(F.linear, weight=linear.weight, bias=linear.bias) for linear in linears]
    plain_s, packed_s = [float("inf")] * len(plain), [float("inf")] * len(packed)
    for _ in range(TRIAL_ROUNDS):
        _time(plain, feeds, plain_s)
        _time(packed, feeds, packed_s)
    return sum(plain_s) / sum(packed_s), relative_error(packed[0](feeds[0]), plain[0](feeds[0]))


def _time(products: Sequence[Product], feeds: Sequence[Tensor], best: list[float]) -> None:
    """Lower `best` [s] where a product was faster: each one's fastest run, since whatever else runs here only adds."""
    for place, (product, x) in enumerate(zip(products, feeds)):
        begun = perf_counter()
        product(x)
        best[place] = min(best[place], perf_counter() - begun)


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected number."""
    return float((seen - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def agree(seen: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding; false where either holds what is no number."""
    return relative_error(seen, expected) <= TOLERANCE


def _fits_together(group: list[nn.Module | None]) -> bool:
    return (all(module is not None and can_pack(module) for module in group)
            and len({(linear.in_features, linear.bias is None) for linear in group}) == 1)


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of parameters that stand in more than one module, such as an LM head tied to the embeddings."""
    seen: set[int] = set()
    several: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (several if id(parameter) in seen else seen).add(id(parameter))
    return several


def _up_to(limit: int, linears: Iterable[nn.Linear]) -> Iterator[nn.Linear]:
    """The first linears, as long as their weights come to `limit` bytes at most; at least one."""
    total = 0
    for linear in linears:
        total += linear.weight.nbytes
        if total > limit and total > linear.weight.nbytes:
            return
        yield linear

