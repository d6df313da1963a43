"""What the tests of sessions share: sessions over a tiny model whose greedy text is known, and one visitor's calls."""

import json
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from tiny import VOCAB, backbone, oracle_drafter, plain_greedy

from medusa_viz.decoding import live
from medusa_viz.models.checkpoints import HeadsConfig, LoadedHeads, LoadReport
from medusa_viz.models.worker import Worker
from medusa_viz.ui import host as hosts
from medusa_viz.ui.running import Model

ACCURACY = [[0.5, 0.2, 0.1, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01]] * 4


class Ids(list):
    notice = ""


class Letters:
    """A codec for the tiny model: one id per character."""

    def encode_prompt(self, text, raw=False, system=None):
        return Ids(ord(char) % VOCAB for char in text)

    def token_text(self, token):
        return f"<{token}>"

    def token_kind(self, token):
        return "special" if token == 0 else "text"


def make_sessions(prompt="abcdef"):
    """Sessions over an engine whose heads know the greedy continuation of one prompt at varying ranks."""
    of = backbone(dtype=torch.float64)
    ids = Letters().encode_prompt(prompt)
    text = plain_greedy(of, ids, min(of.hidden_size, 60))
    drafter = oracle_drafter(of, ids, text, heads=4, rank=lambda place, k: (place * k) % 3)
    loaded = LoadedHeads(drafter.module, HeadsConfig(accuracy=ACCURACY), LoadReport([], [], [], []), "tiny")
    engine = SimpleNamespace(backbone=of, drafter=drafter, codec=Letters(), loaded=loaded, title="Tiny", place="CPU",
                             accuracy=ACCURACY, tree="")
    found = hosts.Sessions({})
    found._opening = None
    host = found.host
    host.start_on(Model(engine, Worker("tiny"), live, plain=deque([5.0], 5)))
    host.model.latency.add(1, 1.0)
    return found, text


def serving() -> Iterator[SimpleNamespace]:
    """act(action, **payload) -> view of one visitor, with the sessions and the greedy text beside it."""
    found, text = make_sessions()
    yield SimpleNamespace(act=lambda action, token="one", **payload: json.loads(found.act(token, action, payload)),
                          sessions=found, text=text, of=lambda token="one": found.session(token))
    found.host.close()


def committed(session):
    return session.line.committed(len(session.line.done()))
