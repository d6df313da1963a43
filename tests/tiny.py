"""What the decoder's tests share: tiny random models, heads that hit on purpose, random trees, slow references."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from medusa_viz.decoding import acceptance
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.live import LiveRun, Look, Position
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeShape, from_paths
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.device import Placement
from medusa_viz.models.heads import Drafter, MedusaHeads

# Medusa's preset mc_sim_7b_63 as its file lists it, one path per word.
MC_SIM_7B_63 = [[int(rank) for rank in word] for word in (  # noqa: SIM905
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070").split()]
torch.set_num_threads(1)  # these models are too small to share out, least of all on shared cores
VOCAB = 61
SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
KINDS: dict[str, dict] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 20.0},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"logit_scale": 0.25},
    "phi3": {},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
                    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 64},
}
EAGER_ONLY = {"gemma2", "gpt_oss"}  # their own attention has no sdpa form


def model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa",
          spread: float = 0.3, **changes: object) -> PreTrainedModel:
    """A random causal LM with logits lively enough that a wrong mask or position shows."""
    torch.manual_seed(seed)
    sizes = {name: value for name, value in SIZES.items() if kind not in ("gpt2",) or not name.startswith(
        ("hidden_size", "num_", "max_position", "intermediate", "head_dim"))}
    config = AutoConfig.for_model(kind.split()[0], **{**sizes, **KINDS.get(kind, {}), **changes})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind in EAGER_ONLY else attention)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread)
    return made.to(dtype).eval()


def backbone(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa",
             **changes: object) -> Backbone:
    return Backbone(model(kind, seed, dtype, attention, **changes), Placement(torch.device("cpu"), dtype, "test"), kind)


def difference(got: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference as a share of the largest number."""
    return float((got - right).abs().max() / right.abs().max())


def prompt(seed: int, length: int = 6, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def random_drafter(of: Backbone, heads: int = 3, seed: int = 0, own: bool = False,
                   draft_ids: Sequence[int] | None = None, layers: int = 1) -> Drafter:
    """Random heads: with a shared or own output matrix, over the whole or a draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    rows = of.vocab_size if ids is None else len(ids)
    output = torch.randn(heads, rows, of.hidden_size, generator=generator) if own else None
    module = MedusaHeads(heads, of.hidden_size, layers, ids, output)
    with torch.no_grad():
        module.weight.copy_(0.2 * torch.randn(module.weight.shape, generator=generator))
        module.bias.copy_(0.2 * torch.randn(module.bias.shape, generator=generator))
    return Drafter(module, of.lm_head)


def oracle_drafter(of: Backbone, ids: Sequence[int], text: Sequence[int], heads: int = 3,
                   rank: Callable[[int, int], int] = lambda place, k: 0) -> Drafter:
    """Heads that know `text`, what greedy decoding writes after `ids`: with `place` tokens of it committed, head k has
    the right token at rank(place, k). Own output matrices, solved for; so the text may hold hidden_size tokens."""
    places = len(text) - heads
    assert 0 < places <= of.hidden_size
    cache = of.new_cache(len(ids) + len(text))
    hidden = of.prefill([*ids, *text[: places - 1]], cache, keep=places).hidden.double()
    wanted = torch.zeros(heads, places, of.vocab_size, dtype=torch.float64)
    for place in range(places):
        for k in range(1, heads + 1):
            right = text[place + k]
            wanted[k - 1, place, right] = 10
            for better in range(rank(place, k)):
                wanted[k - 1, place, (right + 1 + better) % of.vocab_size] = 20 + better
    output = (torch.linalg.pinv(hidden) @ wanted).transpose(1, 2)
    assert (hidden @ output.transpose(1, 2) - wanted).abs().max() < 1, "the hidden states are too alike"
    return Drafter(MedusaHeads(heads, of.hidden_size, output=output.float()), of.lm_head)


def mixed_ranks(seed: int) -> Callable[[int, int], int]:
    """Right tokens at rank 0 most often, else at 1, 2 or nowhere in a small tree."""
    rng, known = random.Random(seed), {}
    return lambda place, k: known.setdefault((place, k), rng.choices([0, 1, 2, 7], [6, 2, 1, 1])[0])


def random_shape(rng: random.Random, heads: int = 3, width: int = 3, paths: int = 6) -> TreeShape:
    return from_paths([[rng.randrange(width) for _ in range(rng.randint(1, heads))]
                       for _ in range(rng.randint(0, paths))])


@torch.no_grad()
def plain_logits(of: Backbone, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), V]: the model's own causal forward, without any cache, mask or position of ours."""
    return of.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def plain_greedy(of: Backbone, ids: Sequence[int], tokens: int, end_ids: Collection[int] = ()) -> list[int]:
    """Greedy decoding by whole forwards of the model alone."""
    text: list[int] = []
    while len(text) < tokens and not (text and text[-1] in end_ids):
        text.append(int(plain_logits(of, [*ids, *text])[-1].argmax()))
    return text


def engine(of: Backbone, drafter: Drafter) -> SimpleNamespace:
    """What a live run needs of an engine."""
    return SimpleNamespace(backbone=of, drafter=drafter)


def greedy_rows(look: Look) -> list[int]:
    """Rows that greedy acceptance takes, read off the look alone."""
    own = np.array(look.verification.rank) == 0
    own[0] = True
    return acceptance.longest_path(look.shape, acceptance.passed(look.shape, own))


def greedy_step(run: LiveRun, position: Position, shape: TreeShape) -> tuple[Look, list[int], Position]:
    """Look, commit, and the position behind."""
    look = run.look(position, shape, Acceptance())
    rows = greedy_rows(look)
    tokens = [look.drafts.token[row] for row in rows]
    return look, tokens, run.advance(look, rows, tokens, look.verification.top[rows[-1]].ids[0])[0]


def fail_in_third_chunk(monkeypatch: Any, of: Backbone) -> None:
    """Lets the backbone prefill three tokens at a time, and fail at the third time: six are in the cache by then."""
    calls, forward = [], of._forward

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr("medusa_viz.models.backbone.PREFILL_CHUNK", 3)
    monkeypatch.setattr(of, "_forward", failing)


def plain_text(of, ids, tokens: int, end_ids=None) -> list[int]:
    """What `decode` writes without heads."""
    steps = decode(of, None, list(ids), PLAIN, Acceptance(), tokens, end_ids)
    return [token for step in steps for token in step.tokens]
