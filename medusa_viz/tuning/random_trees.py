"""Random trees, the background against which chosen ones are judged (the tree study of the Medusa paper, figure 4)."""

from __future__ import annotations

import random

from medusa_viz.decoding.tree import Path, TreeShape, dense, dense_nodes, from_paths

TRIES = 200


def random_product(walls: list[int], budget: int, seed: int = 0) -> TreeShape:
    """A dense tree of random top-s, no wider than the walls, that fills as much of the budget as a few hundred draws
    find: products hit few sizes exactly."""
    draws = random.Random(seed)
    best: list[int] = []
    for _ in range(TRIES):
        top_s: list[int] = []
        for wall in walls[: draws.randint(1, max(len(walls), 1))]:
            level = dense_nodes(top_s)
            room = (budget - sum(level)) // (level[-1] if level else 1)
            if min(wall, room) < 1:
                break
            top_s.append(draws.randint(1, min(wall, room)))
        if sum(dense_nodes(top_s)) > sum(dense_nodes(best)):
            best = top_s
        if sum(dense_nodes(best)) >= 0.9 * budget:  # near enough; going on would favour a few shapes
            break
    return dense(best)


def random_subset(walls: list[int], budget: int, seed: int = 0) -> TreeShape:
    """`budget` nodes of the dense tree of the walls, or all of them: each is drawn evenly among the nodes that may be
    added, those whose parent is in the tree."""
    draws = random.Random(seed)
    chosen: list[Path] = []
    open_slots: list[Path] = [(rank,) for rank in range(walls[0])] if walls else []
    while open_slots and len(chosen) < budget:
        place = draws.randrange(len(open_slots))
        open_slots[place], open_slots[-1] = open_slots[-1], open_slots[place]
        path = open_slots.pop()
        chosen.append(path)
        if len(path) < len(walls):
            open_slots += [path + (rank,) for rank in range(walls[len(path)])]
    return from_paths(chosen)
