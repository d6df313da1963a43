"""Takes the README's screenshots from a running page: python -m tests.browser.screenshots [URL]"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.browser.explorer import ARGUMENTS, Explorer

FOLDER = Path(__file__).resolve().parents[2] / "assets" / "screenshots"
PROMPT = "What are the benefits of regular exercise?"
LEAST_COMMITTED = 4  # tokens that the step on the picture commits
MOST_STEPS = 20
MEASURING_MS = 600_000
SHOTS = {
    "explorer-light": ((1440, 900), "light"),
    "explorer-dark": ((1440, 900), "dark"),
    "phone-light": ((390, 844), "light"),
}
TUNER_SHOTS = {"tuner-light": ((1440, 900), "light"), "tuner-phone-dark": ((390, 844), "dark")}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7860"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, (size, scheme) in SHOTS.items():
            take(browser, url, FOLDER / f"{name}.png", size, scheme)
        for name, (size, scheme) in TUNER_SHOTS.items():
            take_tuner(browser, url, FOLDER / f"{name}.png", size, scheme)
        browser.close()


def take(browser: Browser, url: str, file: Path, size: tuple[int, int], scheme: str) -> None:
    """One picture, at the first later step that commits enough tokens."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme,
                                  reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    explorer = Explorer(page)
    explorer.wait_drawn().wait_ready()
    explorer.start(PROMPT)
    for _ in range(MOST_STEPS):
        explorer.step()
        committed = page.locator("#text .mv-pending .mv-chip").count()
        if committed >= LEAST_COMMITTED:
            break
    page.mouse.move(size[0] / 2, 2)
    page.wait_for_timeout(600)  # a picture, not a test: the hover of the button fades
    page.screenshot(path=file)
    print(file.name)
    context.close()


def take_tuner(browser: Browser, url: str, file: Path, size: tuple[int, int], scheme: str) -> None:
    """The Tuner with the recommended tree; ranks and step times are measured first where none are stored."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme,
                                  reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{url}#tuner")
    page.wait_for_selector(".mv-tuner[data-ready=true]", timeout=MEASURING_MS)
    for action in ("calibrate", "time"):
        if page.locator(f".mv-source:is([data-kind=none], [data-kind=config]) #tuner-{action}").count():
            page.click(f"#tuner-{action}")
            page.wait_for_selector(f".mv-job[data-job={action}]")
            page.wait_for_selector(".mv-job[data-job='']", timeout=MEASURING_MS)
    compared = "#tuner-scatter .mv-curve-box:not([data-points='0'])"
    page.wait_for_selector(compared, state="attached", timeout=MEASURING_MS)
    page.wait_for_timeout(600)
    page.screenshot(path=file)
    print(file.name)
    context.close()


if __name__ == "__main__":
    main()
