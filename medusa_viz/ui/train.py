"""The Train page: start, watch, stop and resume training runs, look at any run's log, and use its heads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.models.memory import QUANTISED
from medusa_viz.training import shipped
from medusa_viz.ui import model_menu, train_runner, train_view
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.pages import Page
from medusa_viz.ui.train_form import form, running_model
from medusa_viz.ui.train_log import LOG_NAME, Pace, RunLog, heads_written
from medusa_viz.ui.train_plan import Plan, changed, from_json, runs_root, token_file
from medusa_viz.ui.train_runner import Runner
from medusa_viz.ui.train_view import Shown

LIVE_MS, IDLE_MS = 1000, 4000  # between looks while something runs, and while nothing does
MOST_RUNS = 30


class TrainPage(Page):
    """Runs belong to the server: every visitor sees the same ones, each chooses which to look at."""

    name = "train"

    def __init__(self, host: Any, t: Texts) -> None:
        super().__init__(host, t)
        self.runner = Runner(host.asked["device"])
        self._opened: dict[str, Path] = {}
        self._have: dict[str, str] = {}  # key of the figures that a page has already
        self._looks: dict[Path, Shown] = {}
        self._lock = threading.Lock()

    def close(self, token: str) -> None:
        self._opened.pop(token, None)
        self._have.pop(token, None)

    def shutdown(self) -> None:
        self.runner.shutdown()

    # ---- actions ---------------------------------------------------------------------------------------------

    def do_poll(self, token: str, have: str = "") -> None:
        """Show what is new; `have` is the key of the figures on screen."""
        self._have[token] = have if isinstance(have, str) else ""

    def do_start(self, token: str, recipe: str, model: str, settings: dict, distil: int = 0, data: str = "",
                 name: str = "") -> None:
        """Begin a run, and look at it."""
        self.host.needs_unlocked()
        if not isinstance(settings, dict):
            raise ActionError("odd_payload", name="start")
        if model not in {one["name"] for one in form(self.host, self.t)["models"]}:
            raise ActionError("train_model", name=str(model)[:60])
        files = (str(_judged(token_file(data), model)),) if data else ()
        name = name.strip() if isinstance(name, str) else ""
        plan = Plan(name or _free_name(recipe), recipe, model, files, distil, changed(recipe, dict(settings)),
                    self._dtype(recipe, model))
        if plan.folder.exists() or plan.written.exists():
            raise ActionError("train_taken", name=plan.name)
        self.runner.start(plan)
        self._opened[token] = plan.folder

    def do_stop(self, token: str, run: str, now: bool = False) -> None:
        """Stop the run under way: within a step, its heads kept; `now`, where it is stopping already, at once."""
        self.host.needs_unlocked()
        self.runner.stop(_named(run), now is True)

    def do_resume(self, token: str, run: str) -> None:
        """Go on with a run that ended early."""
        self.host.needs_unlocked()
        folder = self._folder(token, run)
        plan = from_json(train_runner.read(folder).get("plan"))
        if plan is None or plan.folder != folder:
            raise ActionError("train_no_resume", name=folder.name[:60])
        self.runner.start(plan)
        self._opened[token] = folder

    def do_open(self, token: str, run: str) -> None:
        """Look at a run of the list."""
        self.host.needs_unlocked()
        self._opened[token] = self._folder(token, run)

    def do_open_path(self, token: str, path: str) -> None:
        """Look at a run or heads folder that lies anywhere on the server."""
        self.host.needs_unlocked()
        path = _named(path)
        try:
            folder = Path(path).expanduser().absolute()
            found = (folder / LOG_NAME).is_file() or heads_written(folder) is not None
        except (OSError, ValueError, RuntimeError):
            found = False
        if not found:
            raise ActionError("train_no_run", path=path[:200])
        self._opened[token] = folder

    def do_use(self, token: str, run: str) -> None:
        """Let the next Start of the Explorer run on these heads, and on the model that they were trained for."""
        self.host.needs_unlocked()
        folder = self._folder(token, run)
        if heads_written(folder) is None:
            raise ActionError("train_no_heads", name=folder.name[:60])
        plan = from_json(train_runner.read(folder).get("plan"))
        model = "" if plan is None or plan.model == self.host.options["model"] else plan.model
        self.host.use(token, **model_menu.choice(self.host, model, str(folder), ""))

    # ---- the view ----------------------------------------------------------------------------------------------

    def view(self, token: str) -> dict:
        have = self._have.pop(token, None)
        with self._lock:
            running = self.runner.current
            # Runs and their errors name files of the server, of which visitors are told none.
            folders = [] if self.host.locked else _folders()
            runs = [train_view.line(self._look(folder), running, self.t) for folder in folders]
            runs.sort(key=lambda run: -run["begun"])
            folder = self._opened.get(token) or (running.plan.folder if running else None)
            if folder is None and runs:
                folder = self._opened[token] = runs_root() / runs[0]["id"]
            shown = self._look(folder) if folder else None
            run = train_view.opened(shown, running, self._in_use(folder), self.t) if shown else None
            wanted = {*list(self._opened.values()), *(runs_root() / one["id"] for one in runs), folder}
            self._looks = {path: look for path, look in self._looks.items() if path in wanted}
            key = shown.log.key if shown else "none"
            figures = None if key == have else train_view.figures(shown.log if shown else RunLog(Path()), self.t)
        live = running is not None or (run is not None and run["live"])
        open_to_all = have is None and not self.host.locked
        return {"poll": LIVE_MS if live else IDLE_MS, "locked": self.host.locked, "runs": runs[:MOST_RUNS], "run": run,
                "key": key, "figures": figures, "busy": running is not None,
                "form": form(self.host, self.t) if open_to_all else None}

    def _look(self, folder: Path) -> Shown:
        """A run with the new lines of its log read."""
        shown = self._looks.get(folder)
        if shown is None:
            shown = self._looks[folder] = Shown(folder, RunLog(folder), Pace(), folder.parent == runs_root())
        shown.log.update()
        return shown

    def _in_use(self, folder: Path | None) -> bool:
        """Whether the next Start drafts with the heads that lie there now."""
        if self.host.model is None or folder is None:
            return False
        loaded = self.host.model.engine.loaded
        return Path(loaded.source).absolute() == folder and loaded.written == heads_written(folder)

    def _dtype(self, recipe: str, model: str) -> str:
        """The dtype that a run needs: that of the running model where it is quantised, since it may fit in no other.
        Only heads alone can be trained over such a backbone."""
        running, dtype = running_model(self.host), self.host.options["dtype"]
        return dtype if dtype in QUANTISED and recipe == "medusa1" and model == running else ""

    def _folder(self, token: str, run: str) -> Path:
        """The folder of a run that this page was shown."""
        run, opened = _named(run), self._opened.get(token)
        if opened is not None and run == str(opened):
            return opened
        folder = next((folder for folder in _folders() if folder.name == run), None)
        if folder is None:
            raise ActionError("train_no_run", path=run[:200])
        return folder


def _judged(path: Path, model: str) -> Path:
    """A token file as runs take it: of the shipped one, which holds nothing out, a copy that does."""
    return shipped.with_held_out(path) if path == shipped.training_file(model) else path


def _named(given: object) -> str:
    """The name or path that a person gave. Raises ActionError where there is none."""
    if not isinstance(given, str) or not given.strip():
        raise ActionError("train_unnamed")
    return given.strip()


def _folders() -> list[Path]:
    """The folders of this user's runs, newest first."""
    try:
        found = [folder for folder in runs_root().iterdir() if folder.is_dir()]
        return sorted(found, key=lambda folder: -folder.stat().st_mtime)[: 2 * MOST_RUNS]
    except OSError:
        return []


def _free_name(recipe: str) -> str:
    """A name that no run has."""
    stem = name = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 2
    while (runs_root() / name).exists():
        name, number = f"{stem}-{number}", number + 1
    return name
