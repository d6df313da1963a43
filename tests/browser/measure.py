"""Measures the page as a visitor feels it: python -m tests.browser.measure

Starts app.py itself and prints start-up times, click-to-repaint medians by tree size, and memory per visitor, as
JSON on the last line. The machine should be idle.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.explorer import ARGUMENTS, Explorer

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = (4, 16, 63, 256)
TIMES = 10
VISITORS = 4
PROMPT = "Explain how a rainbow forms."


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.monotonic()
    app = subprocess.Popen([sys.executable, "app.py", "--port", str(port)], cwd=REPOSITORY)
    url, result = f"http://127.0.0.1:{port}", {}
    try:
        result["start_s"] = {"page": wait_open(url, begun)}
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
            page = visitor(browser, url)
            result["start_s"]["ready"] = round(time.monotonic() - begun, 1)
            result["repaint_ms"] = {size: repaint(page, size) for size in SIZES}
            result["memory_mb_per_visitor"] = memory(browser, url, app.pid)
            browser.close()
    finally:
        app.terminate()
    print(json.dumps(result))


def wait_open(url: str, begun: float) -> float:
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return round(time.monotonic() - begun, 1)
        except OSError:
            time.sleep(0.05)


def visitor(browser: Browser, url: str) -> Page:
    """A page with a live run at its first step; reduced motion, since animation is no latency."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce").new_page()
    page.goto(url)
    explorer = Explorer(page)
    explorer.wait_drawn().wait_ready()
    explorer.start(PROMPT)
    return page


def repaint(page: Page, size: int) -> dict[str, float]:
    """Medians over TIMES: Step, click to repaint less the step itself; temperature and size, move to repaint."""
    explorer = Explorer(page)
    explorer.start(PROMPT)
    for knob in range(1, 5):
        explorer.set(f"top-s-{knob}", 10)
    explorer.set("temperature", 0)
    explorer.set("tree-size", size)
    if explorer.data("nodes") != str(size):
        raise SystemExit(f"the tree has {explorer.data('nodes')} nodes, not {size}")
    steps, weighs, narrows = [], [], []
    for turn in range(TIMES):
        explorer.step()
        steps.append(felt(page) - step_ms(page))
        explorer.set("temperature", 0.1 * (1 + turn % 5))
        weighs.append(felt(page))
        explorer.set("tree-size", max(size // 2, 1))
        narrows.append(felt(page))
        explorer.set("tree-size", size)
        explorer.set("temperature", 0)
    return {"step_beyond_model": median(steps), "temperature": median(weighs), "smaller_tree": median(narrows)}


def felt(page: Page) -> float:
    """Milliseconds from the last action to its repaint, as the page measured them."""
    return float(page.get_attribute(".mv", "data-repaint"))


def step_ms(page: Page) -> float:
    """What the step itself took: the badge's new forward."""
    found = re.search(r"([\d.]+) ms", page.locator(".mv-badge").first.text_content() or "")
    return float(found[1]) if found else 0.0


def memory(browser: Browser, url: str, pid: int) -> float:
    """Growth of the server's resident memory per further visitor with a run of a few steps."""
    before = resident(pid)
    pages = [visitor(browser, url) for _ in range(VISITORS)]
    for page in pages:
        for _ in range(3):
            Explorer(page).step()
    grown = (resident(pid) - before) / VISITORS
    for page in pages:
        page.context.close()
    return round(grown, 1)


def resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    main()
