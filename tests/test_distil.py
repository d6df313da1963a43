"""Self-distillation: runs resume, mixes and splits follow their rules, files read back, the command goes on."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import VOCAB, backbone, plain_text, prompt

from medusa_viz.cli import main
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.settings import SettingsError
from medusa_viz.training import data, distil, distil_command, prompts, written
from medusa_viz.training.data import DataError
from medusa_viz.training.distil import FromPrompts, SelfWritten, Shelf, write
from medusa_viz.training.distil_settings import DistilSettings
from medusa_viz.training.prompts import Prompt, TurnFrame

END = frozenset([0, 5])
FRAME = TurnFrame((1, 2, 3), (4, 6, 7))


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


@pytest.mark.parametrize("synthesised", [False, True])
def test_a_run_whose_texts_are_all_dropped_ends_and_says_why(monkeypatch, synthesised):
    monkeypatch.setattr(distil, "MOST_DROPPED", 12)
    of, settings = backbone(), DistilSettings(tokens=5_000, max_new_tokens=8, turn_tokens=4, temperatures="0:1,0.001:1")
    endless = TurnFrame((1, 2, 3), (VOCAB, 6, 7))  # no model says a token behind its vocabulary
    source = SelfWritten(endless, of, settings) if synthesised else prompted(settings, of)
    why = "user turn without an end: 12" if synthesised else "written before: 12"
    shelf, texts = Shelf(source, settings.tokens), []
    with pytest.raises(DataError, match=rf"the last 12 texts were all unfit \({why}\)"):
        for text, _ in write(of, source, settings, shelf, {}):
            texts.append(text)
    assert len(shelf.entries) == (0 if synthesised else 6) and len(texts) >= 12 + len(shelf.entries)
    again = Shelf(source, settings.tokens)
    for text in texts:
        again.add(text)
    with pytest.raises(DataError, match="the last 12"):  # a resumed run knows at once
        next(write(of, source, settings, again, {text.number: text for text in texts}))


def test_a_pass_that_has_an_end_goes_through_all_its_prompts(monkeypatch):
    monkeypatch.setattr(distil, "MOST_DROPPED", 2)
    settings = DistilSettings(loops="keep", max_new_tokens=8, temperatures="0")
    listed = [Prompt(text) for text in ("one", "one", "one", "one", "another")]
    source = FromPrompts(listed, lambda text: [1, 2, len(text)], backbone(), settings, "list")
    shelf = distilled(source, settings, backbone())
    assert shelf.complete and len(shelf.entries) == 2 and shelf.dropped == {"written before": 3}


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


def test_prompts_are_read_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distil_command, "_load", lambda args: pytest.fail("loaded"))
    assert main(["distill", "--prompts", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out.npz")]) == 2
    assert "cannot be read" in (error := capsys.readouterr().err.strip()) and "\n" not in error


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


def test_what_is_written_stays_where_a_run_gives_up_and_can_be_made_the_file(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distil, "MOST_DROPPED", 12)
    words = ("--temperatures", "0:1,0.001:1", "--rows", "4")
    assert command("few.npz", *words, "--tokens", "5000") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the last 12 texts were all unfit (written before: 12); --resume with --tokens " in said
    written_so_far = said.split("--tokens ")[1].split()[0]
    assert command("few.npz", *words, "--resume", "--tokens", written_so_far) == 0
    assert data.load([tmp_path / "few.npz"]).is_reply.sum() == int(written_so_far) > 100


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
