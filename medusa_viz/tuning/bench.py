"""Benchmark: plain decoding, Medusa and transformers' own `generate`, all greedy, on the same prompts.

Methods take turns on every prompt, so that whatever else the machine does falls on all of them alike. Prefill and
decode are timed apart: the first new token comes from the prefill, all rates are those of the tokens behind it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, Tree, decode
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.metrics import measure
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import Drafter
from medusa_viz.models.packed import PackedLinear
from medusa_viz.tuning.jobs import Job, Progress, finish

METHODS = ("plain", "medusa", "transformers")
RATIOS = (("plain", "transformers"), ("medusa", "plain"), ("medusa", "transformers"))
WARM_UP_TOKENS = 8
BANDWIDTH_BYTES = 256 << 20  # more than caches hold
BANDWIDTH_ROUNDS = 9
GREEDY = Acceptance()


class BenchError(ValueError):
    """A benchmark that cannot run; the message is one sentence."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Run:
    """One prompt decoded once: the new ids, how many of them each step committed, and milliseconds."""

    ids: list[int]
    committed: list[int]
    forwards: int
    """Forward passes behind the prefill."""
    prefill_ms: float
    """Until the first new token is known."""
    decode_ms: float
    """From there to the end of the text."""


Method = Callable[[Sequence[int], int], Run]
"""Decodes a prompt's ids up to a number of new tokens."""


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines {"prompt": …, "kind": …}, kind optional. Raises BenchError in one sentence."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"The prompts file {path} cannot be read ({error}).") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = Prompt(entry["prompt"], entry.get("kind", ""))
        except (ValueError, TypeError, KeyError, AttributeError):
            prompt = Prompt("")
        if not (isinstance(prompt.text, str) and prompt.text.strip() and isinstance(prompt.kind, str)):
            raise BenchError(f'Line {number} of {path} is not {{"prompt": "some text", "kind": "writing"}}.')
        prompts.append(prompt)
    if not prompts:
        raise BenchError(f"The prompts file {path} holds no prompt.")
    return prompts


def parse_methods(text: str) -> list[str]:
    """Method names from a comma-separated list, each once. Raises BenchError."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in METHODS]:
        raise BenchError(f"{unknown[0]!r} is no method; choose from {', '.join(METHODS)}.")
    if not names:
        raise BenchError(f"No method is named; choose from {', '.join(METHODS)}.")
    return names


def own_decoder(backbone: Backbone, drafter: Drafter | None, tree: Tree) -> Method:
    """Our decoder with one tree, greedily; without nodes it is plain decoding."""
    return lambda ids, max_new_tokens: finish(stepping(backbone, drafter, tree, ids, max_new_tokens))


def stepping(backbone: Backbone, drafter: Drafter | None, tree: Tree, ids: Sequence[int], max_new_tokens: int,
             settings: Acceptance = GREEDY) -> Job[Run]:
    """One run of our decoder; a part is one step. The clock stands still between parts."""
    steps, first_ms, total_ms = [], 0.0, 0.0
    decoding = decode(backbone, drafter, ids, tree, settings, max_new_tokens)
    while True:
        begun = perf_counter()
        step = next(decoding, None)
        total_ms += (perf_counter() - begun) * 1e3
        if step is None:
            break
        if not steps:  # the first step's own time is no prefill
            first_ms = total_ms - step.timings.total
        steps.append(step)
        yield Progress(sum(len(step.tokens) for step in steps), max_new_tokens)
    forwards = sum(step.timings.verify is not None for step in steps)
    return Run([token for step in steps for token in step.tokens], [len(step.tokens) for step in steps], forwards,
               first_ms, total_ms - first_ms)


def generate(model: PreTrainedModel, end_ids: Sequence[int]) -> Method:
    """transformers' greedy `generate` on a model as transformers loads it."""
    end_ids = sorted(end_ids)
    # Its own copy of the model carries the settings: `generate` fills gaps in a passed config from the model's.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, eos_token_id=end_ids or None,
                                               pad_token_id=end_ids[0] if end_ids else 0)

    @torch.inference_mode()
    def run(ids: Sequence[int], max_new_tokens: int) -> Run:
        prompt, clock = torch.tensor([list(ids)], device=model.device), _Clock()
        begun = perf_counter()
        text = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens,
                              streamer=clock)
        new = text[0, len(ids) :].tolist()
        total_ms, prefill_ms = (perf_counter() - begun) * 1e3, (clock.first - begun) * 1e3
        return Run(new, [1] * len(new), len(new) - 1, prefill_ms, total_ms - prefill_ms)

    return run


class _Clock(BaseStreamer):
    """Notes when the first new token arrives; what comes before it is the prompt."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = perf_counter()

    def end(self) -> None:
        pass


def limits_of(prompts: Sequence[Sequence[int]], context: int, max_new_tokens: int) -> list[int]:
    """New tokens that each prompt has room for. Raises BenchError where those are too few to time."""
    limits = [min(max_new_tokens, context - len(ids)) for ids in prompts]
    if min(limits, default=0) < 2:
        raise BenchError("Two new tokens at least are needed, since the first one comes from the prefill; a prompt or "
                         "the limit leaves room for fewer.")
    return limits


def run_all(methods: dict[str, Method], prompts: Sequence[Sequence[int]], limits: Sequence[int], rounds: int
            ) -> Iterator[tuple[str, int, Run]]:
    """Yields (method, number of the prompt, run), prompt by prompt, `rounds` times; the first runs warm up and are
    not yielded."""
    for method in methods.values():
        method(prompts[0], min(limits[0], WARM_UP_TOKENS))
    for name, number in turns(list(methods), len(prompts), rounds):
        yield name, number, methods[name](prompts[number], limits[number])


def turns(names: Sequence[str], prompts: int, rounds: int) -> Iterator[tuple[str, int]]:
    """(method, number of the prompt), prompt by prompt, `rounds` times; the order of methods turns from one prompt to
    the next, so that nobody always goes first."""
    for turn in range(rounds * prompts):
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            yield name, turn % prompts


def summary(runs: Sequence[Sequence[Run]], differences: Sequence[object]) -> dict:
    """Figures of one method: runs[prompt][round]; differences[prompt] from greedy decoding, None where equal.

    A prompt's time is the median of its rounds. `spread` are the slowest and the fastest round, in tokens per second.
    """
    tokens = [len(of_prompt[0].ids) - 1 for of_prompt in runs]  # behind the one that the prefill gives
    decode_ms = [median(run.decode_ms for run in of_prompt) for of_prompt in runs]
    rounds = [sum(run.decode_ms for run in of_round) for of_round in zip(*runs)]
    forwards = sum(of_prompt[0].forwards for of_prompt in runs)
    committed = [count for of_prompt in runs for count in of_prompt[0].committed]
    return {
        "tokens_per_second": _ratio(1e3 * sum(tokens), sum(decode_ms)),
        "ms_per_token": _ratio(sum(decode_ms), sum(tokens)),
        "ms_per_step": _ratio(sum(decode_ms), forwards),
        "tokens_per_step": measure(committed, 0).tokens_per_step,
        "prefill_ms": median(median(run.prefill_ms for run in of_prompt) for of_prompt in runs),
        "equals_greedy": _equality(differences),
        "spread": [_ratio(1e3 * sum(tokens), ms) for ms in (max(rounds), min(rounds))],
    }


def bench(engine: Engine, reference: PreTrainedModel | None, prompts: Sequence[Prompt], names: Sequence[str],
          tree: Tree, max_new_tokens: int, rounds: int, progress: Callable[[], None] = lambda: None) -> dict:
    """Run the methods and return the result as JSON holds it. `reference` is the model that `transformers` runs;
    `progress` is called after every run."""
    backbone = engine.backbone
    ids = [engine.codec.encode_prompt(prompt.text) for prompt in prompts]
    limits = limits_of(ids, backbone.context, max_new_tokens)
    methods: dict[str, Method] = {
        "plain": own_decoder(backbone, None, PLAIN),
        "medusa": own_decoder(backbone, engine.drafter, tree),
    }
    if reference is not None:
        methods["transformers"] = generate(reference, backbone.end_ids)
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in ids] for name in names}
    for name, number, run in run_all({name: methods[name] for name in names}, ids, limits, rounds):
        runs[name][number].append(run)
        progress()
    results = {name: summary(of_method, [equals_greedy(backbone, of_prompt, of_runs[0].ids)
                                         for of_prompt, of_runs in zip(ids, of_method)])
               for name, of_method in runs.items()}
    return facts(engine, prompts, tree) | {"max_new_tokens": max_new_tokens, "rounds": rounds, "methods": results,
                                            "ratios": ratios(results)}


def ratios(results: dict[str, dict]) -> dict[str, float]:
    """Quotients of tokens per second, decode only, of the methods that ran."""
    return {f"{a}/{b}": _ratio(results[a]["tokens_per_second"], results[b]["tokens_per_second"])
            for a, b in RATIOS if a in results and b in results}


def facts(engine: Engine, prompts: Sequence[Prompt], tree: Tree) -> dict:
    """What ran where: no path, no host name."""
    backbone = engine.backbone
    return {
        "device": backbone.placement.device_name, "cpu": cpu_name(), "dtype": backbone.placement.dtype_name,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "linears": backbone.linears,
        "model": engine.title, "heads": Path(engine.loaded.source).name, "tree_nodes": tree.nodes,
        "tree": tree.fingerprint if isinstance(tree, TreeShape) else "another at each step",
        "prompts": len(prompts), "kinds": sorted({prompt.kind for prompt in prompts} - {""}),
        "bandwidth_gb_s": read_bandwidth(backbone.device), "step_gb": linear_bytes(backbone.model) / 1e9,
    }


def read_bandwidth(device: torch.device) -> float:
    """GB per second that a sum over more memory than caches hold reads at best."""
    buffer = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(BANDWIDTH_ROUNDS):
        begun = perf_counter()
        buffer.sum().item()
        seconds.append(perf_counter() - begun)
    return BANDWIDTH_BYTES / min(seconds) / 1e9


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the linears' weights: what a plain step reads at least (models of other layers read more)."""
    size = next(model.parameters()).element_size()
    return sum(module.in_features * module.out_features * size for module in model.modules()
               if isinstance(module, (nn.Linear, PackedLinear)))


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _equality(differences: Sequence[object]) -> bool | dict:
    """True, or the first fault (first tie, if all are ties) with the number of its prompt and of differing prompts."""
    found = [(number, difference) for number, difference in enumerate(differences) if difference is not None]
    if not found:
        return True
    number, difference = min(found, key=lambda entry: (entry[1].tie, entry[0]))
    return {"prompt": number, **asdict(difference), "differing_prompts": len(found)}


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
