"""What a visitor does on the Explorer, and what it shows, read from its data attributes. Waits, never sleeps."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

ARGUMENTS = ["--no-sandbox", "--disable-gpu"]  # of Chromium
PATIENCE_MS = 300_000  # of what the server works at; only a hang takes them
ANSWER_MS = 120_000  # of everything else: on busy cores a page answers late
_ANY = re.compile(r"-?\d+")

# Clicks the pixel where a figure drew a point of one of its axes, as a hand would.
_PIXEL = """([id, x, y]) => {
  const plot = document.querySelector(`#${id} .js-plotly-plot`), {xaxis, yaxis} = plot._fullLayout;
  const box = plot.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)];
}"""

# Resolves behind the page's own timer, after which it tells the server what room its figures have.
_TOLD = """async () => {
  for (let frame = 0; frame < 2; frame += 1) await new Promise(requestAnimationFrame);
  await new Promise((resolve) => setTimeout(resolve, 300));
}"""


class Explorer:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.tree = page.locator("#tree")

    def wait_drawn(self) -> Explorer:
        """A view is drawn, and for the room that there is: no other comes by itself."""
        expect(self.tree).to_have_attribute("data-step", _ANY, timeout=PATIENCE_MS)
        self.page.evaluate(_TOLD)
        self.settled()
        return self

    def wait_ready(self) -> Explorer:
        expect(self.page.locator(".mv")).to_have_attribute("data-model", "ready", timeout=PATIENCE_MS)
        return self

    def at(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def data(self, name: str, selector: str = "#tree") -> str:
        return self.page.get_attribute(selector, f"data-{name}") or ""

    def wait(self, name: str, value: object, selector: str = "#tree") -> None:
        expect(self.page.locator(selector)).to_have_attribute(f"data-{name}", str(value), timeout=PATIENCE_MS)

    def wait_change(self, name: str, old: str, selector: str = "#tree") -> str:
        expect(self.page.locator(selector)).not_to_have_attribute(f"data-{name}", old, timeout=PATIENCE_MS)
        return self.data(name, selector)

    def settled(self) -> None:
        """No call is under way and every figure shows the newest view."""
        self.wait("busy", "false", ".mv")

    def act(self, do: object) -> None:
        """Do something that asks the server, and wait until its answer is drawn."""
        stamp = self.data("stamp")
        do()
        self.wait_change("stamp", stamp)
        self.settled()

    def start(self, prompt: str) -> Explorer:
        self.page.fill("#prompt textarea", prompt)
        self.act(lambda: self.page.click("#start"))
        self.wait("step", 0)
        return self

    def step(self) -> None:
        self.act(lambda: self.page.click("#step"))

    def set(self, knob: str, value: object, kind: str = "number") -> None:
        self.act(lambda: self.page.fill(f"#{knob} input[type={kind}]", str(value)))

    def phase(self, phase: int) -> None:
        self.page.click(f"#phase button[data-phase='{phase}']")
        self.wait("phase", phase)

    def pixel(self, figure: str, x: float, y: float) -> tuple[float, float]:
        return tuple(self.page.evaluate(_PIXEL, [figure, x, y]))

    def node_pixel(self, row: int) -> tuple[float, float]:
        """Where the tree drew a row's marker."""
        x, y = self.page.evaluate("""(row) => {
          const marks = document.querySelector('#tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes');
          const at = marks.customdata.indexOf(row);
          return [marks.x[at], marks.y[at]];
        }""", row)
        return self.pixel("tree", x, y)

    def shapes(self, figure: str) -> int:
        """How many marks (rings, halos, frames) the selection put into a figure."""
        return self.page.evaluate(
            "(id) => (document.querySelector(`#${id} .js-plotly-plot`).layout.shapes ?? []).length", figure)

    def emit(self, figure: str, point: dict) -> None:
        """A click that Plotly reports, without pixels."""
        plot = self.page.locator(f"#{figure} .js-plotly-plot")
        plot.evaluate("(plot, point) => plot.emit('plotly_click', {points: [point]})", point)

    def listen(self) -> None:
        """Keep what the status line says from now on, which passes after a while."""
        self.page.evaluate("""() => {
          const line = document.querySelector('#model-status');
          window.said = [];
          new MutationObserver(() => window.said.push(line.textContent)).observe(line, {childList: true});
        }""")

    def heard(self, words: str) -> None:
        """The status line said that once."""
        self.page.wait_for_function("(words) => window.said.some((line) => line.includes(words))", arg=words)

    def text(self) -> str:
        """The committed text as its chips spell it."""
        return self.at("#text .mv-chips").first.text_content() or ""
