"""The Gradio page: one element that the scripts in `assets/` draw, and the calls between it and the sessions.

Gradio only adapts: it serves our files, carries `server.act` calls (6-12 ms, no queue) and says when a tab closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import plotly

from medusa_viz.figures import palette
from medusa_viz.figures.texts import Texts, table
from medusa_viz.ui import prompt_box
from medusa_viz.ui.host import PAGES, Sessions

ASSETS = Path(__file__).resolve().parents[2] / "assets"
STYLES = tuple(ASSETS / f"{name}.css" for name in ("explorer", "screens", "pages", *(kind.name for kind in PAGES)))
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
EXAMPLES = ASSETS / "prompts" / "examples.json"
MAX_THREADS = 40
_TOKEN = re.compile("[0-9a-f]{32}")  # as the script below makes them

# The token is the page's own: server functions are not told Gradio's session, so `hello` pairs the two once.
ON_LOAD = """
const setup = JSON.parse(props.value);
const files = (window.gradio_config?.root ?? '') + '/gradio_api/file=';
const bytes = crypto.getRandomValues(new Uint8Array(16));
const token = Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
const act = (action, payload, page) => server.act({ token, action, payload, page });
trigger('hello', { token });
import(files + setup.script).then(({ mount }) => mount(element.querySelector('.mv-page'), {
  texts: setup.texts, lang: setup.lang, options: setup.options, act, poll: () => act('poll', {}),
  page: (name, action, payload) => act(action, payload, name),
  models: () => act('models', {}).then(JSON.parse),
  waiting: () => act('waiting', {}).then(Number), record: () => act('record', {}), written: () => act('written', {}),
}));
"""

# Gradio's own frame steps back: the page fills the window.
FRAME_CSS = """
.gradio-container { padding: 0 !important; max-width: none !important; background: none !important;
  overflow: visible !important; }
.gradio-container > .main, .gradio-container .wrap, .gradio-container .column {
  padding: 0 !important; gap: 0 !important; }
.gradio-container .block, .gradio-container .html-container {
  padding: 0 !important; overflow: visible !important; }
.gradio-container footer { display: none !important; }
"""


def build(sessions: Sessions, lang: str = "en", functions: Sequence[Callable] = ()) -> gr.Blocks:
    """The page as Gradio Blocks. Sessions are made by the first call of a page and closed with its tab. `functions` can
    be called by Gradio's clients, one call of each at a time."""
    gr.set_static_paths([*sorted(ASSETS.glob("*.js")), *STYLES, PLOTLY])
    tokens: dict[str, str] = {}

    def act(message: dict) -> str:
        return answer(sessions, message)

    def hello(event: gr.EventData, request: gr.Request) -> None:
        if _is_token(event.token):
            tokens[str(request.session_hash)] = event.token

    def bye(request: gr.Request) -> None:
        token = tokens.pop(str(request.session_hash), None)
        if token:
            sessions.close(token)

    with gr.Blocks(title=Texts(lang)("ui.title"), analytics_enabled=False, fill_width=True, fill_height=True) as demo:
        page = gr.HTML(_setup(lang), html_template='<div class="mv-page"></div>', js_on_load=ON_LOAD, head=_head(),
                       apply_default_css=False, elem_id="explorer", server_functions=[act])
        page.hello(hello, None, None, queue=False, show_progress="hidden", api_visibility="private")
        demo.unload(bye)
        for function in functions:
            gr.api(function)
    return demo


def launch(demo: gr.Blocks, host: str, port: int, *, block: bool = True) -> str:
    """Serve the page; returns its address. Nothing but the files named in `build` can be fetched."""
    demo.queue(api_open=False)
    _, url, _ = demo.launch(
        server_name=host, server_port=port, prevent_thread_lock=not block, quiet=True, inbrowser=False, share=False,
        ssr_mode=False, run_history=False, footer_links=[], enable_monitoring=False, max_threads=MAX_THREADS,
        show_error=False, css=FRAME_CSS, theme=gr.themes.Base(font=["system-ui", "sans-serif"],
                                                              font_mono=["ui-monospace", "monospace"]))
    return url


def _head() -> str:
    """Loaded before the page's script: Plotly as pip shipped it, and our style sheets."""
    styles = "".join(f'<link rel="stylesheet" href="/gradio_api/file={path}">' for path in STYLES)
    return f'<script src="/gradio_api/file={PLOTLY}"></script>{styles}'


def _setup(lang: str) -> str:
    """What the script needs to begin, as JSON in which no markup can begin either."""
    texts = {**table()["en"], **table()[lang]}
    setup = {"script": str(ASSETS / "explorer.js"), "lang": lang, "texts": texts,
             "options": {"palette": palette.page_table(), "examples": _examples(),
                         "longest_prompt": prompt_box.MOST,
                         "pages": [kind.name for kind in PAGES]}}
    return json.dumps(setup, ensure_ascii=False).replace("<", "\\u003c")


def answer(sessions: Sessions, message: Any) -> str:
    """What the page's script is told when it sends a message."""
    message = readable(message) if isinstance(message, dict) else {}
    token, action, payload = (message.get(name) for name in ("token", "action", "payload"))
    if not _is_token(token):  # no page of ours; whatever is kept by token would grow as it likes
        return "{}"
    if message.get("page"):
        return sessions.pages.act(token, str(message["page"]), str(action), _payload(payload))
    asked = {"waiting": sessions.waiting, "record": sessions.record, "written": sessions.written,
             "models": sessions.models}.get(str(action))
    if asked:
        return str(asked(token))
    return sessions.act(token, str(action), _payload(payload))


def _is_token(token: object) -> bool:
    return isinstance(token, str) and _TOKEN.fullmatch(token) is not None


def readable(value: Any) -> Any:
    """A message without what no JSON answer could repeat: halves of surrogate pairs, and NUL."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\0", "")
    if isinstance(value, dict):
        return {readable(key): readable(entry) for key, entry in value.items()}
    return [readable(entry) for entry in value] if isinstance(value, list) else value


def _payload(payload: object) -> dict:
    return payload if isinstance(payload, dict) else {}


def _examples() -> list[dict]:
    return json.loads(EXAMPLES.read_text(encoding="utf-8")) if EXAMPLES.is_file() else []
