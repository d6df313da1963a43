"""Text to token ids and back, exactly.

Prompts: a chat template's own markers become special ids, whatever a person typed stays text, even `<|im_end|>`.
For ordinary messages the ids equal `tokenizer.apply_chat_template`.

Text: every token stands for fixed bytes (`token_bytes`), and a text is the UTF-8 reading of all bytes in a row. Whole
texts, streams and chips of single tokens all come from that one table, so that they cannot disagree. It covers the
two kinds of fast tokenizers that causal language models use: byte-level (GPT-2, Llama 3, Qwen) and SentencePiece
style (Llama 2, Mistral, Gemma). No torch, no transformers; a codec may be used from several threads at once.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from tokenizers import Tokenizer

MARKS = {" ": "␠", "\n": "⏎", "\t": "⇥", "\r": "␍"}
BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols whose glyph is empty
LOOSE_BYTES = re.compile("([\udc80-\udcff]+)")  # what `surrogateescape` makes of bytes that are no UTF-8
NO_TEMPLATE = "This model has no chat template: the prompt alone is continued as plain text."
SLOT = "MedusaVizSlot{}End"  # stands for message n in a trial render; letters and digits survive trim and escaping


class PromptIds(list):
    """Token ids of a prompt; `notice` is empty or one sentence about what was done differently than asked."""

    def __init__(self, ids: Iterable[int] = (), notice: str = ""):
        super().__init__(ids)
        self.notice = notice


class TemplateFault(ValueError):
    """The chat template refuses or loses a message."""


class TextCodec:
    """Encodes prompts and decodes tokens for one Hugging Face fast tokenizer."""

    def __init__(self, tokenizer):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(f"The tokenizer {type(tokenizer).__name__} has no fast (tokenizers) form, as needed.")
        self.tokenizer = tokenizer
        self._spec = backend.to_str()
        self._plain = self._private_copy(self._spec)
        added = self._plain.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._special |= {i: str(self._plain.id_to_token(i)) for i in tokenizer.all_special_ids}
        self._edges = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self._marker = _either(self._special.values())
        self.rule = ByteRule(json.loads(self._spec)["decoder"])
        self._bytes: dict[int, bytes] = {}
        self._shown: dict[int, str] = {}

    @staticmethod
    def _private_copy(spec: str) -> Tokenizer:
        """A backend of our own that reads special spellings as text.

        That switch is a state of the backend, which every call on the shared tokenizer sets anew; on a shared one,
        another thread's call could turn a person's `<|im_end|>` into the special token.
        """
        copy = Tokenizer.from_str(spec)
        copy.encode_special_tokens = True
        copy.no_truncation()
        copy.no_padding()
        return copy

    # ------------------------------------------------------------------------------------------------ encoding

    def encode_prompt(self, text: str, raw: bool = False, system: str | None = None) -> PromptIds:
        """Ids of one user message, ready for the reply; see `notice` on the result.

        `system=None` leaves the template's own default system message in force; an empty string replaces it.
        Without a usable template, or with `raw`, the text itself is encoded, after BOS where the tokenizer adds one.
        """
        if raw:
            return self._encode_raw(text)
        if not getattr(self.tokenizer, "chat_template", None):
            return self._encode_raw(text, NO_TEMPLATE)
        user, notice = {"role": "user", "content": text}, ""
        if system is not None:
            try:
                return PromptIds(self.encode_chat([{"role": "system", "content": system}, user]))
            except TemplateFault as fault:
                notice = f"The system message was left out: {fault}."
        try:
            return PromptIds(self.encode_chat([user]), notice)
        except TemplateFault as fault:
            return self._encode_raw(text, f"The chat template was not used: {fault}.")

    def encode_chat(self, messages: Sequence[dict], generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation through the chat template; raises `TemplateFault` if it refuses or loses a message."""
        ids: list[int] = []
        for run, is_marker in self._runs(self._render(messages, generation_prompt)):
            if is_marker:
                ids.append(self._plain.token_to_id(run))
            else:
                coder = self._inner if ids else self._plain
                ids += coder.encode(run, add_special_tokens=False).ids
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of bare text: no BOS, no special token whatever it spells."""
        return self._plain.encode(_valid(text), add_special_tokens=False).ids

    def _encode_raw(self, text: str, notice: str = "") -> PromptIds:
        """BOS if the tokenizer itself starts with it, then the text; never the EOS that some tokenizers append."""
        bos = self.tokenizer.bos_token_id
        start = [i for i in self._plain.encode("", add_special_tokens=True).ids[:1] if i == bos]
        ids = start + self.encode_text(text)
        if not ids:
            raise ValueError("The prompt is empty: write at least one character.")
        return PromptIds(ids, notice)

    def _render(self, messages: Sequence[dict], generation_prompt: bool) -> list[tuple[str, bool]]:
        """The rendered conversation as (text, written by the template?) pieces.

        One trial render holds a slot in place of every message; what lies around the slots is the template's. Then
        each message is rendered between the other slots, because templates may change it (most of them trim).
        """
        texts = [_valid(message["content"]) for message in messages]
        slots = [SLOT.format(n) for n in range(len(texts))]
        frame = self._apply(messages, slots, generation_prompt)
        if lost := [str(m["role"]) for m, slot in zip(messages, slots) if slot not in frame]:
            raise TemplateFault(f"the chat template drops the {lost[0]} message")
        shown = {}
        for n, (slot, text) in enumerate(zip(slots, texts)):
            filled = self._apply(messages, slots[:n] + [text] + slots[n + 1:], generation_prompt)
            before, _, after = frame.partition(slot)
            fits = filled.startswith(before) and filled.endswith(after) and len(filled) >= len(before) + len(after)
            shown[slot] = filled[len(before):len(filled) - len(after)] if fits else text
        pieces = re.split(_either(slots), frame)
        return [(shown[piece], False) if n % 2 else (piece, True) for n, piece in enumerate(pieces)]

    def _apply(self, messages: Sequence[dict], contents: Sequence[str], generation_prompt: bool) -> str:
        """Run the template on these contents in place of the messages' own."""
        filled = [dict(message, content=content) for message, content in zip(messages, contents)]
        try:
            return self.tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=generation_prompt)
        except Exception as fault:  # the template is a program from the checkpoint and may raise anything
            reason = next(iter(str(fault).splitlines()), type(fault).__name__).rstrip(". ")
            raise TemplateFault(f"the chat template says “{reason}”") from fault

    def _runs(self, pieces: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """Split pieces at the template's markers into (text, is marker) runs; neighbouring text joins into one run.

        A template's "user\\n" and the message after it are one run, as they are when the whole string is encoded.
        """
        run, strip_left = "", False
        for text, is_template in pieces:
            for n, part in enumerate(self._marker.split(text) if is_template else [text]):
                if n % 2 == 0:
                    run += part
                    continue
                takes_left, takes_right = self._edges.get(part, (False, False))
                yield from _trimmed(run, strip_left, takes_left)
                yield part, True
                run, strip_left = "", takes_right
        yield from _trimmed(run, strip_left, False)

    @cached_property
    def _inner(self) -> Tokenizer:
        """Backend for text that does not start the prompt: there, "first" Metaspace tokenizers add no space."""
        inside = re.sub(r'"prepend_scheme":\s*"first"', '"prepend_scheme":"never"', self._spec)
        return self._plain if inside == self._spec else self._private_copy(inside)

    # ------------------------------------------------------------------------------------------------ decoding

    def decode(self, ids: Iterable[int], keep_special: bool = False, continues: bool = False) -> str:
        """Exact text of all ids together; bytes that are no UTF-8 become U+FFFD.

        SentencePiece models write "▁Hello" at the very start of a text; that one space is dropped, unless the ids
        continue an earlier text (`continues`).
        """
        text = b"".join(self.text_bytes(ids, keep_special)).decode("utf-8", "replace")
        return text if continues or not self.rule.drops_first_space else text.removeprefix(" ")

    def text_bytes(self, ids: Iterable[int], keep_special: bool) -> Iterator[bytes]:
        """Each id's bytes; special tokens only if they are kept."""
        return (self.token_bytes(i) for i in ids if keep_special or i not in self._special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; none for an id outside the tokenizer's vocabulary."""
        if token_id not in self._bytes:
            token = self._plain.id_to_token(token_id)
            self._bytes[token_id] = self.rule(token) if token is not None else b""
        return self._bytes[token_id]

    def token_kind(self, token_id: int) -> str:
        """`special`; `bytes` for part of a character or an invalid sequence; else `text`.

        Ids that the model has but the tokenizer does not (padded vocabularies) count as special.
        """
        if token_id in self._special or self._plain.id_to_token(token_id) is None:
            return "special"
        return "bytes" if LOOSE_BYTES.search(_escaped(self.token_bytes(token_id))) else "text"

    def token_text(self, token_id: int) -> str:
        """One token for display: never empty, never invisible; specials as spelled, loose bytes as `<F0 9F>`."""
        if token_id not in self._shown:
            spelled = self._special.get(token_id)
            self._shown[token_id] = spelled or visible(self.token_bytes(token_id)) or f"<#{token_id}>"
        return self._shown[token_id]


class TextStream:
    """Text of a growing list of ids: what was returned so far is always a prefix of the final text."""

    def __init__(self, codec: TextCodec, keep_special: bool = False, continues: bool = False):
        self._codec, self._keep_special = codec, keep_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = codec.rule.drops_first_space and not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become final with these ids; an unfinished character waits for its other bytes."""
        return self._start(self._utf8.decode(b"".join(self._codec.text_bytes(ids, self._keep_special))))

    def finish(self) -> str:
        """The end of the text: an unfinished character that was held back becomes U+FFFD."""
        return self._start(self._utf8.decode(b"", final=True))

    @property
    def held(self) -> str:
        """The unfinished character for display, such as `<F0 9F>`; empty when nothing is held back."""
        return visible(self._utf8.getstate()[0])

    def _start(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


# ------------------------------------------------------------------------------------------------ tokens and bytes


class ByteRule:
    """How a tokenizer's decoder turns a token's spelling into bytes."""

    def __init__(self, decoder: dict | None):
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = {step["type"]: step for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds.keys() & {"Metaspace", "Replace", "ByteFallback"}:
            raise ValueError(f"The tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported: "
                             "it is neither byte-level nor SentencePiece style.")
        self._byte_fallback = "ByteFallback" in kinds
        self._replaced = [(s["pattern"]["String"], s["content"]) for s in steps
                          if s["type"] == "Replace" and "String" in s["pattern"]]
        self.drops_first_space = kinds.get("Strip", {}).get("start", 0) > 0
        if metaspace := kinds.get("Metaspace"):
            self._replaced.append((metaspace["replacement"], " "))
            self.drops_first_space = metaspace.get("prepend_scheme", "always") != "never"

    def __call__(self, token: str) -> bytes:
        if self._byte_level:
            # Added tokens are spelled plainly; one with a character outside the table is taken as it stands.
            loose = [BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in loose else bytes(loose)
        if self._byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: visible Latin-1 characters are themselves, the other 68 follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(other)}


BYTE_OF_CHAR = _byte_of_char()


def visible(data: bytes) -> str:
    """Bytes as a label: marks for white space, `<F0 9F>` for bytes of no character, `<U+200D>` for the unseen."""
    parts = LOOSE_BYTES.split(_escaped(data))
    label = "".join(_hex(part) if n % 2 else "".join(map(_visible_char, part)) for n, part in enumerate(parts))
    is_mark = unicodedata.category(label[:1] or " ").startswith("M")
    return "◌" + label if is_mark else label  # an accent alone would sit on whatever stands before the label


def _escaped(data: bytes) -> str:
    """Bytes as text in which each byte that is no UTF-8 is one character from U+DC80 to U+DCFF."""
    return data.decode("utf-8", "surrogateescape")


def _hex(escaped: str) -> str:
    return f"<{' '.join(f'{ord(char) - 0xDC00:02X}' for char in escaped)}>"


def _visible_char(char: str) -> str:
    """Controls, odd spaces, direction marks, unassigned and blank characters as their number: they would hide."""
    if char in MARKS:
        return MARKS[char]
    hidden = unicodedata.category(char)[0] in "CZ" or char in BLANK_LETTERS or char == "\ufffd"
    return f"<U+{ord(char):04X}>" if hidden else char


# ----------------------------------------------------------------------------------------------------- small parts


def _either(words: Iterable[str]) -> re.Pattern:
    """Pattern with one group that matches any of the words, the longest first; nothing if there are none."""
    ordered = sorted(filter(None, words), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")


def _trimmed(run: str, left: bool, right: bool) -> Iterator[tuple[str, bool]]:
    """The run without the white space that neighbouring markers swallow (AddedToken lstrip, rstrip), unless empty."""
    run = run.lstrip() if left else run
    run = run.rstrip() if right else run
    if run:
        yield run, False


def _valid(text: str) -> str:
    """Text without lone surrogates, which a browser can send and no encoder takes: they become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
