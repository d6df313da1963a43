"""Token files: replies that the backbone wrote itself, and what the heads learn from them.

A file is an .npz with the arrays
    ids          uint16|uint32 [N]  all sequences joined: template, user turn, reply
    offsets      int64 [n+1]        sequence i is ids[offsets[i]:offsets[i+1]]
    reply_start  int32 [n]          index of the first reply token inside its sequence
    temperature  float [n]          at which the reply was drawn; 0 = greedy
    kind, kinds  uint8 [n], str     index into `kinds`, where the prompt came from
    split        uint8 [n]          0 train, 1 held out
of which `ids` and `offsets` must be there; without temperatures all replies count as greedy. No padding is ever stored,
so no id is special: an end-of-text token that the reply really holds is a label like any other, also where the
tokenizer pads with the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medusa_viz.models.beside import NPZ_FAULTS

TRAIN, HELD_OUT = 0, 1
SELF_SYNTHESISED = "self-synthesised"


class DataError(ValueError):
    """Token data that nothing can be learned from; the message is one sentence."""


@dataclass(frozen=True, eq=False)
class Replies:
    """Sequences of one or several token files; arrays as in the module's docstring, ids as int32."""

    name: str
    ids: np.ndarray
    offsets: np.ndarray
    reply_start: np.ndarray
    temperature: np.ndarray
    kind: np.ndarray
    kinds: tuple[str, ...]
    split: np.ndarray
    self_written: bool = False
    """Whether every file says at which temperatures the replies were drawn, and to what prompts: a model wrote them."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of a SHA-256 over every array that training reads."""
        digest = hashlib.sha256()
        for array in (self.ids, self.offsets, self.reply_start, self.split):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def sequence(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    def select(self, chosen: np.ndarray) -> Replies:
        """The sequences for which `chosen` (bool [n]) is True, in the same order."""
        rows = np.flatnonzero(chosen)
        lengths = np.diff(self.offsets)[rows]
        ids = [self.sequence(i) for i in rows]
        return Replies(self.name, np.concatenate(ids) if ids else self.ids[:0],
                       np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), self.reply_start[rows],
                       self.temperature[rows], self.kind[rows], self.kinds, self.split[rows], self.self_written)

    def replies_only(self) -> np.ndarray:
        """The reply tokens of all sequences, joined."""
        return self.ids[self.is_reply]

    @cached_property
    def before_reply(self) -> np.ndarray:
        """int64: places in the joined ids whose next token is a reply token of the same sequence."""
        following = np.append(self.is_reply[1:], False)
        following[self.offsets[1:] - 1] = False
        return np.flatnonzero(following)

    @cached_property
    def is_reply(self) -> np.ndarray:
        """bool [N]: which tokens belong to a reply."""
        within = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return within >= np.repeat(self.reply_start, np.diff(self.offsets))


def load(paths: Sequence[Path]) -> Replies:
    """Read token files and join them. Raises DataError."""
    return join([_read(Path(path)) for path in paths])


def some(replies: Replies, tokens: int, seed: int) -> Replies:
    """Whole replies drawn by seed until they hold `tokens` reply tokens, those to written prompts before those to
    prompts that the model made up, since they teach more (see the model card); 0 = all of them."""
    if not tokens:
        return replies
    order = np.random.default_rng((seed, 2)).permutation(len(replies))
    order = order[np.argsort([replies.kinds[replies.kind[i]] == SELF_SYNTHESISED for i in order], kind="stable")]
    length = (np.diff(replies.offsets) - replies.reply_start)[order]
    chosen = np.zeros(len(replies), bool)
    chosen[order[np.cumsum(length) - length < tokens]] = True
    return replies.select(chosen)


def greedy(replies: Replies) -> Replies:
    """Those written at temperature 0. Raises DataError where there is none."""
    chosen = replies.select(replies.temperature == 0)
    if not len(chosen):
        raise DataError(f"{replies.name} holds no greedy reply to train on; take all its replies.")
    return chosen


def join(parts: Sequence[Replies]) -> Replies:
    """One set of sequences out of several; kinds are merged by name."""
    if len(parts) == 1:
        return parts[0]
    kinds = tuple(dict.fromkeys(kind for part in parts for kind in part.kinds))
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    kind = [np.array([kinds.index(name) for name in part.kinds], np.uint8)[part.kind] for part in parts]
    together = {field: np.concatenate([getattr(part, field) for part in parts])
                for field in ("ids", "reply_start", "temperature", "split")}
    return Replies(" + ".join(part.name for part in parts), offsets=np.concatenate([[0], np.cumsum(lengths)]),
                   kind=np.concatenate(kind), kinds=kinds, self_written=all(part.self_written for part in parts),
                   **together)


def _read(path: Path) -> Replies:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        ids, offsets = arrays["ids"].astype(np.int32), arrays["offsets"].astype(np.int64)
    except FileNotFoundError:
        raise DataError(f"{path} is no token file: it is not there; `distill` writes one.") from None
    except NPZ_FAULTS as error:
        raise DataError(f"{path} is no token file: it must be an .npz with `ids` and `offsets`.") from error
    n = len(offsets) - 1
    if n < 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise DataError(f"{path} holds no sequence, or offsets that do not fit its {len(ids):,} ids.")
    zeros = np.zeros(n, np.uint8)
    replies = Replies(path.name, ids, offsets, arrays.get("reply_start", zeros).astype(np.int32),
                      arrays.get("temperature", zeros).astype(np.float32), arrays.get("kind", zeros),
                      tuple(str(kind) for kind in arrays.get("kinds", ["unnamed"])), arrays.get("split", zeros),
                      {"temperature", "kind", "kinds"} <= arrays.keys())
    for field in ("reply_start", "temperature", "kind", "split"):
        if len(getattr(replies, field)) != n:
            raise DataError(f"{path} has {n} sequences but {len(getattr(replies, field))} entries of `{field}`.")
    _check_ranges(path, replies, arrays["ids"])
    return replies


def _check_ranges(path: Path, replies: Replies, ids: np.ndarray) -> None:
    """Refuse numbers that point nowhere; `ids` as the file has them, since a cast may hide what is wrong with them."""
    if ids.dtype.kind not in "iu" or (ids < 0).any() or (ids > np.iinfo(np.int32).max).any():
        raise DataError(f"{path} holds ids that are no token ids: they must be whole numbers from 0.")
    lengths = np.diff(replies.offsets)
    if (astray := (replies.reply_start < 0) | (replies.reply_start > lengths)).any():
        i = int(astray.argmax())
        raise DataError(f"{path} says that the reply of sequence {i} starts at its token {replies.reply_start[i]}, but "
                        f"it has {lengths[i]}.")
    if replies.kind.dtype.kind not in "iu" or not np.isin(replies.kind, np.arange(len(replies.kinds))).all():
        raise DataError(f"{path} names {len(replies.kinds)} kinds of prompts, but its `kind` holds other numbers than "
                        f"0 to {len(replies.kinds) - 1}.")


# --------------------------------------------------------------------------------------------------- draft vocabulary


def draft_vocabulary(train: Replies, byte_ids: Sequence[int], rows: int, vocab_size: int) -> Tensor:
    """int64 ids in rising order: the `rows` most frequent reply tokens of `train`, and all single-byte tokens.

    Equal counts go to the smaller id, which in a byte-pair vocabulary is the earlier and so commoner merge.
    """
    counts = np.bincount(train.replies_only(), minlength=vocab_size)
    frequent = np.argsort(-counts, kind="stable")[:rows]
    return torch.from_numpy(np.union1d(frequent, np.asarray(byte_ids, np.int64)))


def byte_token_ids(tokenizer) -> list[int]:
    """Ids of the tokens that stand for one byte each, of a byte-level or a byte-fallback vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = tokenizer.get_vocab()
    spelled = [*bytes_to_unicode().values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    return sorted(vocabulary[text] for text in spelled if text in vocabulary)


# ------------------------------------------------------------------------------------------------------------- labels


@dataclass(frozen=True, eq=False)
class Labels:
    """What each head is to predict.

    rows  int64 [P]: indices into the joined ids (and hidden states) of the positions that draft;
    token int32 [P, K]: vocabulary id at t+k+1 in column k-1, or -1 past the end of the sequence;
    draft int32 [P, K]: its row in the draft vocabulary, or -1 where `token` is -1 or lies outside.
    """

    rows: np.ndarray
    token: np.ndarray
    draft: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def scorable(self) -> np.ndarray:
        """int64 [K]: positions per head whose target exists, in the draft vocabulary or not."""
        return (self.token >= 0).sum(0)

    @property
    def labelled(self) -> np.ndarray:
        """int64 [K]: positions per head that give a loss: the target exists and can be drafted."""
        return (self.draft >= 0).sum(0)

    def check(self) -> None:
        """Refuse to start where nothing can be learned."""
        if not self.labelled.sum():
            raise DataError("There is no label to learn from: no reply is long enough (head 1 needs two reply tokens), "
                            "or the draft vocabulary holds none of their tokens.")

    def coverage(self) -> float:
        """Share of the targets that the draft vocabulary holds."""
        return float(self.labelled.sum() / max(1, self.scorable.sum()))


def make_labels(replies: Replies, heads: int, draft_ids: Tensor | None, vocab_size: int,
                whole_text: bool = False) -> Labels:
    """Labels of every head: head k (from 1) at position t predicts the token at t+k+1.

    Positions are those that decoding drafts from: the last prompt token (the first step drafts there) and the reply,
    so that every label is a reply token. `whole_text` labels the prompts too.
    """
    ends = np.repeat(replies.offsets[1:], np.diff(replies.offsets))  # [N], end of each token's own sequence
    place = np.arange(len(replies.ids))
    drafts = np.ones(len(place), bool)
    if not whole_text:
        drafts[:-1] = replies.is_reply[1:]  # the next token is a reply token of the same sequence
        drafts[ends - 1 == place] = False
    drafts &= place + 2 < ends  # head 1 at least has a target
    rows = np.flatnonzero(drafts)
    ahead = rows[:, None] + np.arange(2, heads + 2)  # [P, K]
    inside = ahead < ends[rows, None]
    token = np.where(inside, replies.ids[np.minimum(ahead, len(place) - 1)], -1).astype(np.int32)
    place_of = np.arange(vocab_size, dtype=np.int32)
    if draft_ids is not None:
        place_of = np.full(vocab_size, -1, np.int32)
        place_of[draft_ids.numpy()] = np.arange(len(draft_ids))
    return Labels(rows, token, np.where(inside, place_of[token], -1))
