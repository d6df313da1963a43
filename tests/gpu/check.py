"""Checks and measures a step on a CUDA card: equality, latency, speed, what lies outside the model, memory, bandwidth.

Run it inside a checkout of Medusa-Viz, whose code it measures. Beside that it needs torch and transformers 5.17 to 5.24
(for a GGUF file also gguf and accelerate), nothing else, no network.

    python tests/gpu/check.py --small                                a tiny random Llama, on any machine
    python tests/gpu/check.py --model FOLDER                         a converted default model, with its heads
    python tests/gpu/check.py --model PART1 PART2                    its GGUF file, in parts if it is too large to send
    python tests/gpu/check.py --llama-7b --compile                   machinery at real size: random weights, bf16

Writes check.json and check.md into --out. With random weights no draft is ever right, so acceptance is then drawn from
an accuracy table and labelled simulated: steps are real, the tokens per step are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent / "../.."))
if find_spec("medusa_viz") is None:
    print("check.py: medusa_viz was not found: run this script where it lies in a checkout of Medusa-Viz, whose code "
          "it measures.", file=sys.stderr)
    sys.exit(2)
from medusa_viz.decoding import decoder
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeShape, dense, from_paths
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, device, fetch, static
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.models.packed import PackedLinear, relative_error
from medusa_viz.models.presets import DEFAULT_PRESET, heads_folder
from medusa_viz.tuning.builders import sparse

GREEDY = Acceptance()
ACCURACY = [[.5604, .1113, .0554, .0328, .0200], [.3164, .1072, .0615, .0431, .0343],
            [.2010, .0869, .0596, .0359, .0335], [.1474, .0776, .0487, .0372, .0288]]
ACCURACY_SOURCE = "Vicuna 7B v1.3 heads, FasterDecoding/Medusa assets/medusa_acc.csv, last training batch"
PROMPTS = ("Give me five tips for learning a new language.", "Explain how a rainbow forms.",
           "Write a short story about a lighthouse.")
TINY = ("tiny random Llama", 251, 64, 96, 2, 4, 2)
LLAMA_7B = ("random Llama of 7B size", 32000, 4096, 11008, 32, 32, 32)
"""Name, vocabulary, hidden and inner size, layers, attention heads, key heads."""
# At 7B size on an H200-class card: at most, at least, at most.
GOALS = {"outside_share": 0.10, "bandwidth_share": 0.60, "step_63_over_plain": 1.25}


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    name: str
    backbone: Backbone
    drafter: Drafter
    accuracy: list[list[float]]
    simulated: bool
    prompts: list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    nodes: tuple[int, ...]
    prefixes: tuple[int, ...]
    tokens: int
    rounds: int
    trees: int


FULL = Sizes((0, 1, 3, 7, 15, 31, 47, 63, 95, 127, 255), (128, 1024), 256, 30, 40)
SMALL = Sizes((0, 3, 15, 63), (32, 96), 40, 5, 12)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sizes = SMALL if options.small else FULL
    make = default if options.model else partial(random_subject, *(TINY if options.small else LLAMA_7B))
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        subject = make(options=options)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"check.py: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    result = measured(subject, sizes)
    (options.out / "check.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "check.md").write_text(table(result))
    print(table(result))
    return 0 if result["equality"]["right"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--small", action="store_true", help="a tiny random Llama")
    what.add_argument("--model", nargs="+", type=Path, help="folder of the converted default model, or its GGUF parts")
    what.add_argument("--llama-7b", action="store_true", help="a randomly initialised Llama of 7B size")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("auto", *device.DTYPES), default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    return parser.parse_args(arguments)


def random_subject(name: str, vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int,
                   options: argparse.Namespace) -> Subject:
    """Random weights, and four Medusa heads with output matrices of their own, as the published Vicuna heads have."""
    torch.manual_seed(0)
    placement = device.choose(options.device, options.dtype)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=groups, max_position_embeddings=4096,
                         initializer_range=2 / hidden**0.5 if hidden < 1024 else 0.02, eos_token_id=None)
    with torch.device(placement.device):
        model = AutoModelForCausalLM.from_config(config, dtype=placement.dtype)
        output = torch.randn(len(ACCURACY), vocabulary, hidden, dtype=placement.dtype)
    backbone = prepared(Backbone(model, placement, name), options)
    drafter = Drafter(MedusaHeads(len(ACCURACY), hidden, output=output), backbone.lm_head)
    rng = random.Random(0)
    prompts = [[rng.randrange(vocabulary) for _ in range(32)] for _ in PROMPTS]
    return Subject(name, backbone, drafter, ACCURACY, True, prompts)


def default(options: argparse.Namespace) -> Subject:
    placement = device.choose(options.device, options.dtype)
    with tempfile.TemporaryDirectory() as work:
        folder = options.model[0]
        if not folder.is_dir():
            folder = Path(work) / "model"
            folder.mkdir()
            fetch.convert(DEFAULT_PRESET, joined(options.model, Path(work)), folder, fetch.silent)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=placement.dtype).to(placement.device)
        backbone = prepared(Backbone(model, placement, DEFAULT_PRESET.title), options)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = checkpoints.load(heads_folder(DEFAULT_PRESET), backbone.hidden_size, backbone.vocab_size, placement.dtype)
    loaded = checkpoints.with_ranks(loaded, DEFAULT_PRESET.title, placement.dtype_name)
    prompts = [tokenizer(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
               for prompt in PROMPTS]
    return Subject(DEFAULT_PRESET.title, backbone, Drafter(loaded.module, backbone.lm_head), loaded.accuracy, False,
                   prompts)


def joined(parts: Sequence[Path], work: Path) -> Path:
    """The GGUF file that the parts make, in the order given, if it is the one that the preset names."""
    target = work / Path(DEFAULT_PRESET.member).name
    target.write_bytes(b"".join(part.read_bytes() for part in parts))
    found, right = hashlib.sha256(target.read_bytes()).hexdigest(), DEFAULT_PRESET.member_sha256
    if found != right:
        raise ValueError(f"The parts make a file with sha256 {found[:12]}…, not {right[:12]}…: name all, in order.")
    return target


def prepared(backbone: Backbone, options: argparse.Namespace) -> Backbone:
    """Checked, and with a static step: on a CPU too, where nothing but this script uses one."""
    backbone.check_trees()
    if backbone.device.type == "cuda":
        backbone.speed_up(options.compile)
    else:
        backbone.static = static.StaticStep(backbone)
    return backbone


def measured(subject: Subject, sizes: Sizes) -> dict:
    backbone = subject.backbone
    tree = sparse(subject.accuracy, 63)
    if cuda := backbone.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(backbone.device)
    latency = latencies(subject, sizes)
    plain, medusa = (speed(subject, shape, sizes) for shape in (PLAIN, tree))
    result = {
        "date": date.today().isoformat(), "device": backbone.placement.device_name, "torch": torch.__version__,
        "transformers": transformers.__version__, "cuda": torch.version.cuda, "model": subject.name,
        "dtype": backbone.placement.dtype_name, "tree_nodes": tree.nodes,
        "step": backbone.step + ("" if cuda else ", on a CPU for this check alone"),
        "acceptance": {"simulated": subject.simulated, "accuracy": subject.accuracy,
                       "source": ACCURACY_SOURCE if subject.simulated else "measured: the heads' own drafts"},
        "sizes": asdict(sizes), "equality": equality(subject, tree, sizes), "latency": latency,
        "plain": plain, "medusa": medusa,
        "speedup": medusa["tokens_per_second"] / plain["tokens_per_second"],
        "share": share(subject, tree, sizes), "synchronisations": synchronisations(subject, tree),
        "bandwidth": bandwidth(backbone, plain["ms_per_step"]),
        "peak_memory_gb": (torch.cuda.max_memory_allocated(backbone.device) if cuda
                           else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 1e9,
    }
    at = {row["nodes"]: row["static_ms"] for row in latency if row["prefix"] == sizes.prefixes[0]}
    reached = {"outside_share": result["share"]["outside_share"], "step_63_over_plain": at[63] / at[0],
               "bandwidth_share": result["bandwidth"]["share"]}
    return result | {"goals": {name: {"goal": goal, "reached": reached[name]} for name, goal in GOALS.items()}}


def equality(subject: Subject, tree: TreeShape, sizes: Sizes) -> dict:
    """Static against eager logits of random trees; then whole texts against plain greedy (a tie is rounding)."""
    backbone, rng, worst, texts = subject.backbone, random.Random(0), 0.0, []
    caches = [backbone.new_cache(64), TreeCache(backbone.config.num_hidden_layers, 64)]
    for cache in caches:
        backbone.prefill(subject.prompts[0], cache)
    for _ in range(sizes.trees):
        shape = from_paths([[rng.randrange(4) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(0, 20))])
        plan = decoder.plan(shape, backbone, subject.drafter)
        tokens = torch.tensor([rng.randrange(backbone.vocab_size) for _ in range(shape.nodes + 1)],
                              device=backbone.device)
        seen, right = (backbone.verify(tokens, plan.depth, plan.block, cache).logits for cache in caches)
        worst = max(worst, relative_error(seen.float(), right.float()))
        rows = shape.path_to(rng.randrange(shape.nodes + 1))
        for cache in caches:
            cache.commit(rows)
    for prompt in subject.prompts:
        for shape in (PLAIN, dense([3, 2]), tree):
            steps = decode(backbone, subject.drafter, prompt, shape, GREEDY, min(sizes.tokens, 128), ())
            found = equals_greedy(backbone, prompt, [token for step in steps for token in step.tokens])
            texts.append(True if found is None else asdict(found))
    tolerance = backbones.tolerance(backbone.placement.dtype)
    ties, faults = (sum(text is not True and text["tie"] == tie for text in texts) for tie in (True, False))
    return {"logits_error": worst, "tolerance": tolerance, "texts": texts, "ties": ties, "faults": faults,
            "right": worst <= tolerance and not faults}


def latencies(subject: Subject, sizes: Sizes) -> list[dict]:
    """Milliseconds of a forward by nodes and prefix, static and eager, interleaved."""
    backbone, rows = subject.backbone, []
    for prefix in sizes.prefixes:
        ids = [1 + place % (backbone.vocab_size - 1) for place in range(prefix)]
        caches = {"static_ms": backbone.new_cache(prefix + max(sizes.nodes) + 1),
                  "eager_ms": TreeCache(backbone.config.num_hidden_layers, prefix + max(sizes.nodes) + 1)}
        for cache in caches.values():
            backbone.prefill(ids, cache)
        for nodes in sizes.nodes:
            shape = dense([nodes] if nodes else [])
            depth = torch.as_tensor(shape.depth, device=backbone.device).long()
            block = backbone.additive(torch.from_numpy(shape.mask))
            tokens = torch.arange(nodes + 1, device=backbone.device) % backbone.vocab_size
            found = turns(backbone, sizes.rounds, {name: partial(backbone.verify, tokens, depth, block, cache)
                                                   for name, cache in caches.items()})
            rows.append({"prefix": prefix, "nodes": nodes, "rows": static.padded(nodes + 1)} | found)
    return rows


def speed(subject: Subject, shape: TreeShape, sizes: Sizes) -> dict:
    """Decoding by the four calls, prefill apart, as long as `tokens` per prompt."""
    run = Run(subject, shape)
    run.steps(subject.prompts[0], sizes.tokens // 4)  # captures and warms up
    runs = [run.steps(prompt, sizes.tokens) for prompt in subject.prompts]
    seconds, committed = sum(spent for spent, _ in runs), [count for _, lengths in runs for count in lengths]
    return {"tokens_per_second": sum(committed) / seconds, "ms_per_step": seconds * 1e3 / len(committed),
            "tokens_per_step": sum(committed) / len(committed), "steps": len(committed)}


class Run:
    """Steps of one tree, with the heads' own acceptance or, where that is simulated, a drawn one."""

    def __init__(self, subject: Subject, shape: TreeShape) -> None:
        self.subject, self.rng = subject, random.Random(1)
        self.plan = decoder.plan(shape, subject.backbone, subject.drafter)

    def start(self, prompt: Sequence[int], tokens: int) -> decoder.DecodingState:
        return decoder.start(self.subject.backbone, prompt, GREEDY, tokens + self.plan.shape.nodes + 8)

    def step(self, state: decoder.DecodingState) -> int:
        """One step; how many tokens it committed."""
        candidates = decoder.propose(self.subject.drafter, state, self.plan)
        forward = decoder.verify(self.subject.backbone, state, self.plan, candidates)
        accepted = decoder.accept(forward, state, self.plan, candidates, GREEDY)
        if self.subject.simulated:
            accepted = self._drawn(accepted)
        decoder.commit(state, forward, accepted)
        return len(accepted.rows)

    def _drawn(self, accepted: decoder.Accepted) -> decoder.Accepted:
        """The path that heads of the accuracy table would have had right; its tokens mean nothing."""
        shape, path = self.plan.shape, ()
        for chances in self.subject.accuracy:
            rank = self.rng.choices(range(len(chances) + 1), [*chances, 1 - sum(chances)])[0]
            if path + (rank,) not in shape.row_of:
                break
            path += (rank,)
        rows = shape.path_to(shape.row_of[path])
        return replace(accepted, rows=rows, tokens=[0] * len(rows), path=self.plan.tables.paths[rows[-1]])

    def steps(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Seconds behind the prefill, and the committed tokens of each step."""
        state, committed = self.start(prompt, tokens), []
        device.settle(self.subject.backbone.device)
        begun = perf_counter()
        while sum(committed) < tokens:
            committed.append(self.step(state))
        device.settle(self.subject.backbone.device)
        return perf_counter() - begun, committed


def share(subject: Subject, tree: TreeShape, sizes: Sizes) -> dict:
    """A step of the tree against its `verify` (the forward, padding and masks included) and its heads alone."""
    backbone, run = subject.backbone, Run(subject, tree)
    state = run.start(subject.prompts[0], 64)
    candidates = decoder.propose(subject.drafter, state, run.plan)
    heads = torch.inference_mode()(lambda: subject.drafter.logits(state.hidden))
    found = turns(backbone, sizes.rounds, {
        "step_ms": lambda: run.step(state), "heads_ms": heads,
        "model_ms": lambda: decoder.verify(backbone, state, run.plan, candidates),
    }, lambda: state.cache.truncate(len(subject.prompts[0])))
    outside = max(found["step_ms"] - found["model_ms"] - found["heads_ms"], 0.0)
    return found | {"outside_ms": outside, "outside_share": outside / found["step_ms"]}


def synchronisations(subject: Subject, tree: TreeShape) -> int | None:
    """How often one step makes the host wait for the card, as torch counts it; None where there is none."""
    if subject.backbone.device.type != "cuda":
        return None
    run = Run(subject, tree)
    state = run.start(subject.prompts[0], 64)
    run.step(state)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step(state)
    torch.cuda.set_sync_debug_mode("default")
    return len([one for one in caught if "synchroniz" in str(one.message)])


def bandwidth(backbone: Backbone, plain_ms: float) -> dict:
    """Bytes of the weights that a plain step reads, per second, against what a sum over a large buffer reads."""
    size = (1 << 31) if backbone.device.type == "cuda" else (1 << 26)
    buffer = torch.ones(size // 4, device=backbone.device)
    best = min(timed(backbone, buffer.sum) for _ in range(8))
    weight = next(backbone.model.parameters()).element_size()
    step = sum(module.in_features * module.out_features * weight for module in backbone.model.modules()
               if isinstance(module, (torch.nn.Linear, PackedLinear)))
    reads, achieved = size / best / 1e6, step / plain_ms / 1e6
    return {"read_gb_s": reads, "step_gb": step / 1e9, "achieved_gb_s": achieved, "share": achieved / reads}


def turns(backbone: Backbone, rounds: int, actions: dict[str, Callable[[], object]],
          after: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Median milliseconds of each action, taking turns; the first two turns capture and warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 2):
        for name, action in actions.items():
            ms = timed(backbone, action)
            after()
            if turn > 1:
                times[name].append(ms)
    return {name: median(values) for name, values in times.items()}


def timed(backbone: Backbone, action: Callable[[], object]) -> float:
    """Milliseconds until the device is done with it."""
    device.settle(backbone.device)
    begun = perf_counter()
    action()
    device.settle(backbone.device)
    return (perf_counter() - begun) * 1e3


def table(result: dict) -> str:
    """The result in short, as Markdown."""
    equal, plain, medusa, part = (result[name] for name in ("equality", "plain", "medusa", "share"))
    simulated = " (simulated acceptance)" if result["acceptance"]["simulated"] else ""
    short = [row for row in result["latency"] if row["prefix"] == result["sizes"]["prefixes"][0]]
    lines = [
        ("device, date", f"{result['device']}, {result['date']}"),
        ("model, dtype", f"{result['model']}, {result['dtype']}"),
        ("step", result["step"]),
        ("static logits against eager", f"{equal['logits_error']:.1e} of the largest, at most {equal['tolerance']:g}"),
        ("texts against plain greedy", f"{len(equal['texts'])} texts, {equal['ties']} ties, {equal['faults']} faults"),
        ("forward, ms by nodes", ", ".join(f"{row['nodes']}: {row['static_ms']:.2f}" for row in short)),
        ("plain", f"{plain['tokens_per_second']:.1f} tokens/s, {plain['ms_per_step']:.2f} ms per step"),
        (f"Medusa, {result['tree_nodes']} nodes{simulated}",
         f"{medusa['tokens_per_second']:.1f} tokens/s, {medusa['ms_per_step']:.2f} ms per step, "
         f"{medusa['tokens_per_step']:.2f} tokens per step, {result['speedup']:.2f} times plain"),
        ("outside `verify` and heads", f"{part['outside_share']:.0%} of a step of {part['step_ms']:.2f} ms"),
        ("synchronisations per step", "not on a card" if (count := result["synchronisations"]) is None else count),
        ("weights read by a plain step", f"{result['bandwidth']['achieved_gb_s']:.0f} GB/s, "
         f"{result['bandwidth']['share']:.0%} of what a sum reads"),
        ("peak memory", f"{result['peak_memory_gb']:.2f} GB"),
    ]
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in lines)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
