"""Self-distillation: many texts side by side equal one at a time; runs resume; loops and mixes follow their rules."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import EAGER_ONLY, KINDS, VOCAB, backbone, plain_greedy, plain_logits, prompt
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import repeat_kv

from medusa_viz.cli import main
from medusa_viz.decoding.batch import TOP_P, Draw, Request, Writer, draw, shared_prefix, write_all
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.loops import kept_length
from medusa_viz.decoding.settings import Acceptance, SettingsError
from medusa_viz.models.rows import BLOCK, GROUPED, RowBackbone, grouped_attention
from medusa_viz.training import data, distil_command, prompts, written
from medusa_viz.training.data import DataError
from medusa_viz.training.distil import FromPrompts, SelfWritten, Shelf, write
from medusa_viz.training.distil_settings import DistilSettings
from medusa_viz.training.prompts import Prompt, TurnFrame

END = frozenset([0, 5])
FRAME = TurnFrame((1, 2, 3), (4, 6, 7))


def requests(count: int, seed: int = 0, temperature: float = 0.0, limit: int = 40, shared: tuple[int, ...] = (1, 2, 3),
             ) -> list[Request]:
    rng = random.Random(seed)
    return [Request(n, (*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))),
                    (Draw(rng.randint(1, limit), END, temperature),)) for n in range(count)]


def plain_text(of, ids, tokens: int, end_ids=None) -> list[int]:
    """What `decode` writes without heads."""
    steps = decode(of, None, list(ids), PLAIN, Acceptance(), tokens, end_ids)
    return [token for step in steps for token in step.tokens]


# ---------------------------------------------------------------------------------------------------- side by side


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_continuous_batching_writes_what_greedy_decoding_writes_one_by_one(rows):
    of = backbone()
    asked = requests(24)
    for request, text in zip(asked, write_all(of, asked, rows)):
        single = plain_text(of, request.ids, request.draws[0].limit, END)
        assert text.ids == [*request.ids, *single] and text.starts == [len(request.ids)]
        assert text.finishes == ["end" if single[-1] in END else "length"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_every_kind_of_model_writes_its_own_greedy_text(kind):
    of = backbone(kind)
    asked = [Request(n, tuple(prompt(n, 4 + 3 * n)), (Draw(12, END),)) for n in range(3)]
    for request, text in zip(asked, write_all(of, asked, 2)):
        assert text.ids[len(request.ids) :] == plain_greedy(of, request.ids, 12, END)


def test_texts_longer_than_a_block_of_the_cache_and_empty_prefixes_work():
    of = backbone()
    asked = [Request(0, (9,), (Draw(BLOCK + 10, frozenset()),)), Request(1, (7, 8), (Draw(3, frozenset()),)),
             Request(2, tuple(prompt(3, BLOCK + 5)), (Draw(20, frozenset()),))]
    assert shared_prefix([request.ids for request in asked]) == []
    for request, text in zip(asked, write_all(of, asked, 2)):
        assert text.ids[len(request.ids) :] == plain_greedy(of, request.ids, request.draws[0].limit)


def test_the_shared_model_is_left_as_it_was_and_its_weights_are_shared():
    of = backbone()
    before = of.model.config._attn_implementation
    rows = RowBackbone(of)
    assert rows.attention == "grouped attention" and rows.model.config._attn_implementation == GROUPED
    assert of.model.config._attn_implementation == before and of.config is not rows.config
    assert {p.data_ptr() for p in of.model.parameters()} == {p.data_ptr() for p in rows.model.parameters()}
    ids = prompt(1)
    assert torch.allclose(of.prefill(ids, of.new_cache(9)).logits[0], plain_logits(of, ids)[-1], atol=1e-4)


def test_models_whose_attention_is_more_than_products_and_softmax_keep_their_own():
    for kind in EAGER_ONLY:
        assert RowBackbone(backbone(kind)).attention.startswith("eager attention (grouped attention changes")


def test_packed_linears_are_shared_not_copied():
    of = backbone()
    from medusa_viz.models import packed

    if not packed.has_operators():
        pytest.skip("this torch has no packed oneDNN linears")
    plain = write_all(of, requests(6), 4)
    packed.replace_linears(of.model)
    assert [text.ids for text in write_all(of, requests(6), 4)] == [text.ids for text in plain]


@pytest.mark.parametrize("length", [1, 5])
def test_grouped_attention_equals_repeated_keys(length):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, length, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    mask = torch.where(torch.rand(3, 1, length, 11) < 0.4, torch.finfo(torch.float32).min, 0.0)
    mask[..., 0] = 0
    right = F.scaled_dot_product_attention(query, repeat_kv(key, 3), repeat_kv(value, 3), mask, scale=0.3)
    mixed, _ = grouped_attention(None, query, key, value, mask, scaling=0.3)
    assert torch.allclose(mixed, right.transpose(1, 2), atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_there_are():
    of = RowBackbone(backbone())
    seen = []
    for rows, place in ((8, 0), (8, 5), (12, 11)):
        cache = of.new_row_cache([1, 2, 3], rows, 30)
        rng = random.Random(place)
        for position, token in enumerate((9, 8, 7), start=3):
            fed = [rng.randrange(VOCAB) for _ in range(rows)]
            fed[place] = token
            logits = of.advance(fed, [position] * rows, cache, list(range(rows)))
        seen.append(logits[place])
    right = plain_logits(of, [1, 2, 3, 9, 8, 7])[-1]
    for logits in seen:
        assert torch.allclose(logits, right, atol=1e-4) and torch.allclose(logits, seen[0], atol=1e-6)


def test_a_request_that_does_not_start_with_the_prefix_is_refused():
    with pytest.raises(ValueError, match="shared prefix"):
        list(Writer(backbone(), [1, 2], 2).run(iter([Request(0, (1, 3), (Draw(3, END),))]).__next__))


# --------------------------------------------------------------------------------------------------------- sampling


def test_drawn_tokens_follow_the_truncated_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])
    uniforms = np.random.default_rng(0).random(4000)
    drawn = draw(logits.expand(4000, -1), [0.7] * 4000, uniforms.tolist())
    p = (logits[0] / 0.7).softmax(0).double().numpy()
    kept = p * (np.cumsum(p) - p < TOP_P)
    shares = np.bincount(drawn, minlength=5) / 4000
    assert np.abs(shares - kept / kept.sum()).max() < 0.02 and shares[kept == 0].sum() == 0
    assert draw(logits, [0.0], [0.99]) == [0] and draw(logits, [0.7], [0.0]) == [0]


def test_samples_depend_on_seed_and_number_alone():
    of = backbone()
    asked = requests(12, temperature=1.0)
    texts = {text.number: text.ids for text in write_all(of, asked, 5, seed=3)}
    assert {text.number: text.ids for text in write_all(of, asked, 5, seed=3)} == texts
    shuffled = asked[::-1]
    assert {text.number: text.ids for text in write_all(of, shuffled, 2, seed=3)} == texts
    assert {text.number: text.ids for text in write_all(of, asked, 5, seed=4)} != texts


# ------------------------------------------------------------------------------------------------------------ loops


@pytest.mark.parametrize(("ids", "kept"), [
    ([1, 2, 3] + [7] * 24, 4),  # one token over and over
    ([1, 2, 3] + [7] * 23, None),  # too short a span to be a loop
    ([9, 9] + [4, 5, 6] * 8, 2 + 3),
    ([1] + list(range(10, 40)) * 3, 1 + 30),  # a long period needs three rounds
    (list(range(10, 40)) * 2 + list(range(10, 39)), None),
    (list(range(200)), None),
    ([7] * 24 + list(range(30)), 1),  # found when it happens: what comes after it is not read
])
def test_loops_are_found_and_cut_after_their_first_round(ids, kept):
    assert kept_length(ids) == kept


def test_the_loop_rule_equals_a_plain_search():
    def plain(ids):
        for end in range(1, len(ids) + 1):
            for period in range(1, 65):
                span = period
                while span < end and ids[end - 1 - span] == ids[end - 1 - span + period]:
                    span += 1
                if span > period and span >= max(3 * period, 24):
                    return end - span + period
        return None

    rng = random.Random(0)
    for _ in range(60):
        start, period = ([rng.randrange(4) for _ in range(rng.randint(*length))] for length in ((0, 30), (1, 9)))
        text = start + period * rng.randint(1, 12)
        assert kept_length(text) == plain(text)


def test_a_looping_text_ends_and_is_cut():
    of = backbone("llama tied")
    with torch.no_grad():  # a model that repeats its last token for ever
        for parameter in of.model.model.layers.parameters():
            parameter.zero_()
        of.model.lm_head.weight.copy_(torch.linalg.qr(torch.randn(64, 64))[0][:VOCAB])
    text, = write_all(of, [Request(0, (8, 9), (Draw(80, END, watch_loops=True),))], 1)
    assert text.ids == [8, 9, 9] and text.finishes == ["loop"]


# ------------------------------------------------------------------------------------------------------ jobs, shelf


def prompted(settings: DistilSettings, of=None, count: int = 6) -> FromPrompts:
    listed = [Prompt(f"prompt {n}", ("a", "b")[n % 2], n % 3 == 0) for n in range(count)]
    return FromPrompts(listed, lambda text: [1, 2, 3, *prompt(int(text.split()[1]), 5)], of or backbone(), settings,
                       "list")


def distilled(source, settings, of, done=()) -> Shelf:
    shelf, texts = Shelf(source, settings.tokens), {text.number: text for text in done}
    for text in texts.values():
        shelf.add(text)
    for _ in write(of, source, settings, shelf, texts):
        pass
    return shelf


def texts_of(shelf: Shelf) -> list[list[int]]:
    return [entry.text.ids for entry in shelf.entries]


def test_one_pass_gives_one_reply_per_prompt_and_later_passes_are_sampled():
    of = backbone()
    shelf = distilled(prompted(DistilSettings(max_new_tokens=10, loops="keep")), DistilSettings(max_new_tokens=10), of)
    assert sorted(entry.label.prompt for entry in shelf.entries) == list(range(6)) and shelf.complete
    settings = DistilSettings(tokens=250, max_new_tokens=10, temperatures="0:1,1:1", loops="keep", rows=4)
    source = prompted(settings, of)
    shelf = distilled(source, settings, of)
    later = [entry for entry in shelf.entries if entry.label.turn]
    assert later and all(entry.temperature == 1 for entry in later) and shelf.tokens >= 250
    assert {source.place(n)[1] for n in range(6, 12)} == set(range(6))
    assert prompted(DistilSettings(tokens=10**6, temperatures="0"), of).jobs == 6  # greedy replies repeat themselves


@pytest.mark.parametrize("synthesised", [False, True])
def test_the_file_is_the_first_jobs_however_many_rows_and_interruptions(synthesised):
    of = backbone()
    settings = DistilSettings(tokens=200, max_new_tokens=12, turn_tokens=30, temperatures="0:1,1:1", rows=5, seed=2)

    def make():
        return SelfWritten(FRAME, of, settings) if synthesised else prompted(settings, of)

    whole = distilled(make(), settings, of)
    numbers = [entry.text.number for entry in whole.entries]
    assert numbers == sorted(numbers) and whole.tokens >= 200
    assert whole.tokens - (len(whole.entries[-1].text.ids) - whole.entries[-1].text.starts[-1]) < 200
    rng = random.Random(1)
    done: list = []
    for _ in range(4):  # stopped four times, with some finished texts each time, in any order
        shelf = Shelf(make(), settings.tokens)
        for text in done:
            shelf.add(text)
        for text, _ in write(of, shelf.source, settings, shelf, {text.number: text for text in done}):
            done.append(text)
            if rng.random() < 0.2:
                break
    settings = DistilSettings(**{**vars_of(settings), "rows": 3})
    assert texts_of(distilled(make(), settings, of, done)) == texts_of(whole)


def vars_of(settings: DistilSettings) -> dict:
    return {name: getattr(settings, name) for name in DistilSettings.__dataclass_fields__}


def test_self_written_turns_are_framed_and_split_by_their_own_tokens():
    of = backbone()
    settings = DistilSettings(tokens=300, max_new_tokens=12, turn_tokens=40, held_out=0.3)
    shelf = distilled(SelfWritten(FRAME, of, settings), settings, of)
    sides: dict[tuple, int] = {}
    for entry in shelf.entries:
        turn = entry.text.ids[: entry.text.starts[1]]
        assert turn[:3] == [1, 2, 3] and tuple(turn[-3:]) == FRAME.after and FRAME.end not in turn[3:-3]
        assert sides.setdefault(tuple(turn), entry.label.split) == entry.label.split
    assert shelf.dropped and len({entry.label.split for entry in shelf.entries}) == 2


def test_a_text_that_was_written_before_stays_out():
    of = backbone()
    settings = DistilSettings(loops="keep", max_new_tokens=8, temperatures="0")
    source = FromPrompts([Prompt("one"), Prompt("one")], lambda text: [1, 2, 9], of, settings, "list")
    shelf = distilled(source, settings, of)
    assert len(shelf.entries) == 1 and shelf.dropped == {"written before": 1}


def test_the_mix_of_temperatures_has_its_shares_and_bad_ones_are_refused():
    settings = DistilSettings(temperatures="0:60,0.7:30,1:10")
    heats = np.array([settings.temperature(n) for n in range(3000)])
    assert np.allclose([(heats == heat).mean() for heat in (0, 0.7, 1)], [0.6, 0.3, 0.1], atol=0.03)
    assert DistilSettings(temperatures="0").mix == {0.0: 1.0}
    for bad in ("", "0:60,x:1", "3:1", "0:-1", "0:0", "nan:1", "0:inf"):
        with pytest.raises(SettingsError, match="temperatures is"):
            DistilSettings(temperatures=bad)
    with pytest.raises(SettingsError, match="tokens is 0"):
        SelfWritten(FRAME, backbone(), DistilSettings())


# ------------------------------------------------------------------------------------------------------------ files


def test_a_part_file_survives_a_torn_line_and_refuses_another_run(tmp_path):
    path, run = tmp_path / "a.jsonl", {"seed": 0}
    texts = [written.Written(n, [1, 2, n], [2], ["end"]) for n in (3, 1)]
    part = written.PartFile(path, run, resume=False)
    for text in texts:
        part.add(text)
    part.close()
    path.write_text(path.read_text() + '{"number": 7, "ids": [1,')
    part = written.PartFile(path, run, resume=True)
    assert list(part.texts.values()) == texts
    part.add(written.Written(4, [1, 2, 4], [2], ["end"]))
    part.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][-1]["number"] == 4
    with pytest.raises(DataError, match="--resume"):
        written.PartFile(path, run, resume=False)
    with pytest.raises(DataError, match="other settings \\(seed\\)"):
        written.PartFile(path, {"seed": 1}, resume=True)
    path.write_text("no json\n")
    with pytest.raises(DataError, match="no part file"):
        written.PartFile(path, run, resume=True)


def test_a_token_file_reads_back_and_its_card_counts_it(tmp_path):
    of = backbone()
    settings = DistilSettings(max_new_tokens=10, loops="keep", temperatures="0:1,0.7:1")
    source = prompted(settings, of)
    shelf = distilled(source, settings, of)
    path = tmp_path / "replies.npz"
    written.save_replies(path, shelf.entries, source.kinds, of.vocab_size)
    written.save_card(path, shelf.entries, source.kinds, {"model": "tiny"})
    replies, card = data.load([path]), json.loads(path.with_suffix(".json").read_text())
    assert np.load(path)["prompt"].tolist() == list(range(6))  # in the order of the file of prompts
    assert [replies.kinds[k] for k in replies.kind] == ["a", "b"] * 3 and replies.split.tolist() == [1, 0, 0, 1, 0, 0]
    assert np.load(path)["ids"].dtype == np.uint16
    kept = written.replies_of(shelf.entries, source.kinds, "again")
    assert kept.fingerprint == replies.fingerprint == card["fingerprint"]
    assert card["reply_tokens"] == shelf.tokens
    for groups in ("by_kind_and_split", "by_temperature"):
        assert sum(group["reply_tokens"] for group in card[groups].values()) == shelf.tokens


def test_prompts_are_read_from_json_lines_or_text_and_bad_files_are_refused(tmp_path):
    listed = tmp_path / "p.jsonl"
    listed.write_text('{"prompt": "one", "kind": "maths", "split": "held_out"}\n\n{"prompt": "two"}\n')
    assert prompts.read(listed) == [Prompt("one", "maths", 1), Prompt("two", prompts.UNNAMED, 0)]
    assert prompts.read(listed, [0]) == [Prompt("two")]
    plain = tmp_path / "p.txt"
    plain.write_text("one\n\n two \n")
    assert [entry.text for entry in prompts.read(plain)] == ["one", "two"]
    for bad in ('{"text": "x"}', "[1]", "{", '{"prompt": " "}', '{"prompt": "x", "split": "test"}', '{"prompt": 3}',
                ""):
        listed.write_text(bad)
        with pytest.raises(DataError):
            prompts.read(listed)


def test_the_shipped_prompts_are_sixteen_of_each_of_eight_kinds_half_of_them_held_out():
    listed = prompts.read(prompts.SHIPPED)
    assert len(listed) == 128 and len({entry.text for entry in listed}) == 128
    for kind in ("writing", "roleplay", "reasoning", "maths", "coding", "extraction", "science", "humanities"):
        assert sorted(entry.split for entry in listed if entry.kind == kind) == [0] * 8 + [1] * 8


def test_prompts_for_training_alone_are_never_held_out_ones():
    held_out = {entry.text.casefold() for entry in prompts.read(prompts.SHIPPED, [data.HELD_OUT])}
    for path in sorted(prompts.SHIPPED.parent.glob("train*.jsonl")):
        listed = prompts.read(path)
        assert all(entry.split == data.TRAIN for entry in listed)
        assert len({entry.text for entry in listed}) == len(listed)
        assert not held_out & {entry.text.casefold() for entry in listed}


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `distill` over a tiny model and six prompts; further words go to the command line."""
    of = backbone()
    codec = SimpleNamespace(encode_prompt=lambda text: [1, 2, 3, *(byte % VOCAB for byte in text.encode()[:9])])
    monkeypatch.setattr(distil_command, "_load", lambda args: (of, codec))
    listed = tmp_path / "p.txt"
    listed.write_text("".join(f"{n} is number\n" for n in range(6)))

    def run(out, *words):
        return main(["distill", "--prompts", str(listed), "--out", str(tmp_path / out), "--max-new-tokens", "20",
                     "--tokens", "300", "--temperatures", "0:1,1:1", "--rows", "4", *words])

    return run


def test_a_run_stopped_by_ctrl_c_and_resumed_gives_the_same_bytes(command, tmp_path, monkeypatch, capsys):
    assert command("whole.npz") == 0
    add, calls = written.PartFile.add, []

    def stop(self, text):
        add(self, text)
        calls.append(text)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(written.PartFile, "add", stop)
    assert command("parts.npz") == 130
    monkeypatch.setattr(written.PartFile, "add", add)
    assert "5 texts are kept" in capsys.readouterr().err
    assert command("parts.npz") == 2 and "--resume" in capsys.readouterr().err
    assert command("parts.npz", "--resume", "--seed", "1") == 2 and "seed" in capsys.readouterr().err
    assert command("parts.npz", "--resume") == 0
    assert (tmp_path / "parts.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("parts*")) == ["parts.json", "parts.npz"]
    card = (tmp_path / "parts.json").read_text()
    assert str(tmp_path) not in card and json.loads(card)["reply_tokens"] >= 300
    assert command("parts.npz") == 2 and "exists already" in capsys.readouterr().err


def test_bad_options_are_one_sentence(command, tmp_path, capsys):
    for words in (("--temperatures", "x"), ("--rows", "0"), ("--split", "held_out")):
        assert command("bad.npz", *words) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert command("bad.txt") == 2 and not list(tmp_path.glob("bad*"))


# ------------------------------------------------------------------------------------------------ the default model


@pytest.mark.model
def test_shipped_replies_are_what_greedy_decoding_writes(model_folder):
    from transformers import AutoTokenizer

    from medusa_viz.models import backbone as backbones
    from medusa_viz.models import device
    from medusa_viz.models.text import TextCodec

    of = backbones.load(model_folder, device.choose("cpu", "fp32"))
    codec = TextCodec(AutoTokenizer.from_pretrained(model_folder))
    replies = data.load([prompts.SHIPPED.with_name("replies-smollm2-135m.npz")])
    listed = prompts.read(prompts.SHIPPED)
    assert len(replies) == len(listed) and replies.split.tolist() == [entry.split for entry in listed]
    assert [replies.kinds[k] for k in replies.kind] == [entry.kind for entry in listed]
    assert not replies.temperature.any()
    for i in range(len(listed)):
        ids, start = replies.sequence(i).tolist(), replies.reply_start[i]
        assert ids[:start] == list(codec.encode_prompt(listed[i].text))
        assert ids[-1] in of.end_ids or len(ids) - start == 256
        if i % 32 == 5:
            found = equals_greedy(of, ids[:start], ids[start:])
            assert found is None or found.tie
    i = int(np.argmin(np.diff(replies.offsets) - replies.reply_start))
    ids, start = replies.sequence(i).tolist(), replies.reply_start[i]
    assert plain_text(of, ids[:start], 256) == ids[start:]


@pytest.mark.model
def test_the_default_model_s_frame_of_a_user_turn(model_folder):
    from transformers import AutoTokenizer

    from medusa_viz.models.text import TextCodec

    codec = TextCodec(AutoTokenizer.from_pretrained(model_folder))
    frame = prompts.turn_frame(codec)
    assert codec.decode(frame.before, keep_special=True).endswith("<|im_start|>user\n")
    assert codec.decode(frame.after, keep_special=True) == "<|im_end|>\n<|im_start|>assistant\n"
    assert [*frame.before, *codec.encode_text("Hello there"), *frame.after] == list(codec.encode_prompt("Hello there"))
