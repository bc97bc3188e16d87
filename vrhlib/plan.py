"""What a run would ask for, before anything is spent: downloads, passes, hours, memory; and what stands in its way.

`WORK` says what each notebook runs, read off its cells. Counts are upper bounds: results are stored, and what is stored
is not computed again. Nothing here needs torch, a GPU or the network, except `check`, which looks.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from vrhlib import hub, store
from vrhlib.profiles import MODELS, Profile
from vrhlib.profiles import profile as profile_of
from vrhlib.training import CONTEXT_GB, KEEP, SHAPES, TEXT, memory_rows, recipe_of

REPLY = 35  # tokens of a reply that is a box, in JSON
LONG = {"needle-text": 2100, "pages": 1400}  # tokens of a prompt: 400 to 3,200 words, 896 x 1152 pixels (Qwen)

# Tokens read and written a second, stated before anything was measured: RTX A6000 48 GB, bfloat16, HF generate.
# Reading: a token of a 7-8B model costs about 15-16 GFLOP, and the card gives a good third of its 155 TFLOP/s.
# Writing: a step moves all weights (21 ms at 768 GB/s) and starts hundreds of small kernels from Python, say 80 ms;
# it writes one token of every sequence of the batch, 48 or 16 (`Pin.rows`).
SPEED = {
    "qwen2.5-vl-7b": (3500, 600),
    "qwen3-vl-8b": (3300, 600),
    "internvl3-8b": (3500, 200),
    "internvl3.5-8b": (3300, 200),
}
STEP = 0.08  # seconds of a step that writes one token of a single sequence
# What the vision tower adds to the reading of an image token: four patches of its 0.67 (Qwen) or 0.3 (InternVL) billion
# parameters, beside the 7.6 of the language model.
VISION = {"qwen2.5-vl-7b": 0.35, "qwen3-vl-8b": 0.3, "internvl3-8b": 0.16, "internvl3.5-8b": 0.15}
# The lowest layer of the 20 heads that were published (data/paper/heads.json).
LOWEST = {"qwen2.5-vl-7b": 14, "qwen3-vl-8b": 17, "internvl3-8b": 14, "internvl3.5-8b": 17}
TOLD = 0.7  # of the replies under an intervention, those that are the untouched model's; counted where runs are stored
MEASURED = 60  # seconds on a GPU after which measured speed replaces the stated one

# Keys and values (Qwen3-8B: 36 layers x 8 heads x 128 x 2 numbers of 2 bytes, 0.15 MB), what a layer holds while it
# reads (MLP: 3 x 18,944 numbers of 2 bytes, 0.11 MB), and what is kept of the untouched model for its conditions (keys
# and values again, and what enters some ten layers, 0.07 MB), for every token of all sequences that run at once.
TOKEN_GB = 0.5e-3
MOST_TOKENS = 3328  # of the cost table's picture; InternVL gives no more (12 tiles and a thumbnail), enlarged or not
SPARE_GB = 6.0  # of disk, beside the downloads: scores of every variant take 1 to 2 MB a sample


# ---------------------------------------------------------------- what the notebooks run


@dataclass(frozen=True)
class Work:
    """Sequences of one kind: `samples` of a benchmark's split under each of `conditions`.

    `passes`: how often a prompt is read (2: once to reply, once more to look at its attention). `prompt`: its tokens,
    if they are more than those of an ordinary picture and question. `stored`: whether the run store keeps them.
    `eager`: image tokens of a picture whose full attention matrices are held. `reply`: tokens that a reply takes, with
    the padding behind it.
    """

    model: str
    benchmark: str
    what: str
    conditions: int
    samples: int
    passes: int = 1
    stored: bool = True
    eager: int = 0
    reply: int = REPLY
    prompt: int = 0
    decode: int = 0  # of the conditions, those that touch only the answer

    @property
    def replies(self) -> int:
        return self.conditions * self.samples

    @property
    def sequences(self) -> int:
        return self.replies * self.passes

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return max(self.prompt, MODELS[self.model].visual_tokens + TEXT)

    @property
    def read(self) -> int:
        return self.sequences * self.length

    @property
    def written(self) -> int:
        return self.replies * self.reply

    @property
    def acting(self) -> int:
        """Conditions that are compared with the untouched model, and share what they have in common with it."""
        return self.conditions - 1 if self.passes == 1 and self.reply else 0


def _detect(p: Profile, given: Mapping) -> list[Work]:
    """01_detect: head scores, then the first model closely, then every model at its own k and at the profile's."""
    models, (benchmark, found, test) = given["MODELS"] or p.models, _sets(p, given, "01_detect", p.n_test, "pairs")
    _check_controls(models, given["K"])
    work = []
    for model in models:
        most = max(len(_cuts(p, k, closely=model == models[0])) for k in _possible(p, given))
        work += [
            Work(model, benchmark, "head scores", 1, found, passes=2),
            Work(model, benchmark, "replies, unmasked and ablated", most, test),
            Work(model, benchmark, "two questions a picture", 1, min(p.n_pairs, 2 * -(-test // 2))),
        ]
    few = 1 + sum(n <= p.k for n in p.ks) * (1 + 2 * len(p.control_seeds))
    work.append(Work(models[0], benchmark, "replies, to try it", few, min(16, test)))
    work.append(Work(models[0], benchmark, "looked at closely", 1, 12, passes=2, stored=False))
    large = min(MOST_TOKENS, MODELS[models[0]].visual_tokens * max(p.cost_scales) ** 2)
    work.append(Work(models[0], benchmark, "cost table", 1, 10 * len(p.cost_scales), stored=False, eager=large))
    return work


def _possible(p: Profile, given: Mapping) -> Sequence[int]:
    """Numbers of top heads that a notebook may cut: how many hold most of the mass is not known beforehand, unless the
    mass is all of it."""
    return [given["K"]] if given["K"] else [p.k] if p.mass == 1 else range(1, p.k + 1)


def _check_rows(benchmark: str, found: int, test: int, option: str = "") -> None:
    """Raises ValueError for a benchmark without the option or a held-out part, or with too few rows to find heads or to
    test them."""
    row = benchmark_table()[benchmark]
    fit = [b for b in benchmark_table().values() if b.family == "grounding" and {"detect", "test"} <= set(b.splits)]
    fit = [b for b in fit if not option or option in b.options]
    if row not in fit:
        names = ", ".join(b.name for b in fit if b.profile == row.profile)
        what = option or "boxes to ground"
        raise ValueError(f"{benchmark} has no {what}, or no rows held out for detection; {names} have both.")
    if row.about and found > (held := min(200, row.about.rows // 2)):
        raise ValueError(f"N_DETECT={found}: of {benchmark}, {held} rows are held out for detection.")
    if row.about and found + test > row.about.rows:
        raise ValueError(
            f"{found + test} rows of {benchmark}, for detection and test, are more than its {row.about.rows}."
        )


def _cuts(p: Profile, k: int, closely: bool) -> set[tuple]:
    """Distinct conditions of one model whose top k heads are cut: equal ones are run once.

    Controls are drawn from outside a number of top heads, so those of another number are others.
    """

    def controls(outside: int, ks: Sequence[int]) -> set[tuple]:
        kinds = ("random", "layer_matched")
        return {(kind, seed, n, outside) for kind in kinds for seed in p.control_seeds for n in ks}

    conditions = {("unmasked",)} | {("vrh", n) for n in (k, p.k)} | controls(k, (k,)) | controls(p.k, (p.k,))
    if closely:
        ks = [n for n in p.ks if n < k] + [k]
        conditions |= {("vrh", n) for n in (*p.ks, k)} | controls(k, ks) | {("one output token", k)}
    return conditions


def _space(p: Profile, given: Mapping) -> list[Work]:
    """02_design_space: head scores on four kinds of data, then every variant and method cut at every k."""
    from vrhlib.methods import FLIPS, METHODS, PICKED  # needs numpy, as `benchmark_table` does

    models = given["MODELS"] or p.models
    benchmark, found, test = _sets(p, given, "02_design_space", p.n_variants, "pairs")
    _check_controls(models, given["K"])
    own = {name: m for name, m in METHODS.items() if m.data in p.prior_data or m.data == "pictures"}
    formulas = [m for m in METHODS.values() if m.data not in ("grounding", "pictures")]
    ks = {*p.variant_ks, given["K"] or p.variant_k}
    cuts = len(ks) * (1 + len(FLIPS) + len(own) + len(p.control_seeds)) + len(formulas) + len(p.control_seeds)
    prior = given["N_PRIOR"] or p.n_prior
    work = []
    for model in models:
        work.append(Work(model, benchmark, "head scores", 1, found, passes=2))
        work += [Work(model, b, "head scores", 1, prior, 2, prompt=LONG.get(b, 0)) for b in p.prior_data.values()]
        work.append(Work(model, benchmark, "replies, unmasked and ablated", 1 + cuts, test))
        work.append(Work(model, benchmark, "two questions a picture", 1, min(p.n_pairs, 2 * -(-test // 2))))
    return work + [Work(models[0], benchmark, "points of the picker", len(PICKED), test)]


def _few(p: Profile, given: Mapping) -> list[Work]:
    """03_sparsity: head scores, those of 02_design_space where they are stored."""
    benchmark, found, _ = _sets(p, given, "03_sparsity", 1)
    return [Work(model, benchmark, "head scores", 1, found, passes=2) for model in given["MODELS"] or p.models]


def _check_controls(models: Sequence[str], k: int) -> None:
    """Raises ValueError for a model without as many heads outside the top k as inside."""
    for model in models:
        if (heads := math.prod(MODELS[model].grid)) < 2 * k:
            raise ValueError(f"K={k}: controls need as many heads outside; {model} has {heads} in all.")


def _universal(p: Profile, given: Mapping) -> list[Work]:
    """04_universality: top heads cut on every benchmark, in every sense of the word on one, and found on every one."""
    found_on, found = p.benchmarks[0], given["N_DETECT"] or p.n_detect
    family = [b for several in p.families.values() for b in several]
    chosen = dict.fromkeys([found_on, *(given["BENCHMARKS"] or family)])
    for name in chosen:
        _check_rows(name, found if name == found_on else 0, 0)
    _check_controls(given["MODELS"] or p.models, given["K"])
    work, ways = [], len(_KINDS) * len(_PHASES)
    for model in given["MODELS"] or p.models:
        cuts = max(len(_curve(p, k)) for k in _possible(p, given))
        work.append(Work(model, found_on, "head scores", 1, found, passes=2))
        for name in chosen:
            test = _tested(p, given, name, found_on, found)
            work.append(Work(model, name, "replies, unmasked and ablated", cuts, test))
            if name == found_on:
                each = 1 + len(p.control_seeds)
                more, late = (ways - 1) * each, len(_KINDS) * each  # one of the ways is among the cuts above
                work.append(Work(model, name, "kinds and phases of ablation", more, test, decode=late))
                work.append(Work(model, name, "mean outputs of heads", 1, min(50, found), stored=False, reply=0))
                work.append(Work(model, name, "replies to detection samples", 2, found))
            else:
                again = _at_most(name, given["N_DETECT"] or p.n_elsewhere)
                work.append(Work(model, name, "head scores, to compare", 1, again, passes=2))
    return work


_KINDS, _PHASES = ("zero", "uniform", "mean"), ("all", "decode")  # those of `attention`, which needs torch


def _at_most(benchmark: str, n: int | None, held_out: int = 0) -> int | None:
    from vrhlib.benchmarks import at_most  # as `benchmark_table`

    return at_most(benchmark, n, held_out)


def _curve(p: Profile, k: int) -> set[tuple]:
    """Distinct conditions of `evaluate.causal_sweep` for one model whose top heads are k."""
    return _cuts(p, k, closely=False) | {("vrh", n) for n in p.universal_ks if n <= max(k, p.k)}


def _tested(p: Profile, given: Mapping, benchmark: str, found_on: str, found: int) -> int:
    """Test samples of a benchmark at most: pictures that served to find heads are left out."""
    n = given["N_TEST"] or p.n_universal
    return _at_most(benchmark, n if n >= 0 else sys.maxsize, found * (benchmark == found_on))


def _transfer(p: Profile, given: Mapping) -> list[Work]:
    """05_transfer: own, borrowed and random heads cut; the cuts of 04_universality are stored if that ran."""
    models, (benchmark, found, test) = given["MODELS"] or p.models, _sets(p, given, "05_transfer", p.n_universal)
    _check_controls(models, given["K"])
    work = []
    for model in models:
        lenders = sum(MODELS[other].grid == MODELS[model].grid for other in models if other != model)
        own = {k: len({*p.universal_ks, k, p.k}) for k in _possible(p, given)}
        most = max(len(_curve(p, k)) + lenders * ks for k, ks in own.items())
        work.append(Work(model, benchmark, "head scores", 1, found, passes=2))
        work.append(Work(model, benchmark, "replies, own and borrowed heads", most, test))
    return work


# Tokens of a reply in words: a letter, a word, a number; a reasoned answer where the prompt asks for reasons.
ANSWERS = {"spatial457": 150, "needle-text": 40, "spatialrgpt": 12}
ANSWER = 8


def _cross(p: Profile, given: Mapping) -> list[Work]:
    """06_cross_task: heads found on grounding, cut on questions; the same about grey pictures, and in text alone."""
    models, chosen = given["MODELS"] or p.models, given["BENCHMARKS"] or p.questions
    known = [b.name for b in benchmark_table().values() if b.profile == _profile_name(p) and b.family == "questions"]
    for name in chosen:
        if name not in known:
            raise ValueError(f"{name} is not answered in words; {', '.join(known)} are.")
    found_on, found = p.benchmarks[0], given["N_DETECT"] or p.n_detect
    _check_rows(found_on, found, 0)
    _check_controls(models, given["K"])
    # Unmasked, the top heads, as many that look from the expression, and both kinds of controls.
    work, cuts = [], 3 + 2 * len(p.control_seeds)
    n = given["N_TEST"] if given["N_TEST"] > 0 else p.n_questions
    for model in models:
        work.append(Work(model, found_on, "head scores", 1, found, passes=2))
        for name in chosen:
            test, reply = _at_most(name, sys.maxsize if given["N_TEST"] < 0 else n), ANSWERS.get(name, ANSWER)
            work.append(Work(model, name, "replies, unmasked and ablated", cuts, test, reply=reply))
            work.append(Work(model, name, "replies about grey pictures", 1, test, reply=reply))
        text, prompt = p.text_only, LONG.get(p.text_only, 0)
        reply = ANSWERS.get(text, ANSWER)
        work.append(Work(model, text, "replies without a picture", cuts, n, prompt=prompt, reply=reply))
    work.append(Work(models[0], chosen[0], "looked at closely", 1, 4 + len(chosen), passes=2, stored=False))
    return work


def _play(p: Profile, given: Mapping) -> list[Work]:
    """08_play: heads made to look at every segment of a picture, while the answer is written and in the prompt too; and
    in the first model what its widgets show first."""
    models, (benchmark, found, asked) = given["MODELS"] or p.models, _sets(p, given, "08_play", p.n_steer, "pairs")
    _check_controls(models, given["K"])
    things = 8 if _profile_name(p) == "nano" else 2  # in a picture, at most: of a scene, and of a pair of expressions
    work = []
    for model in models:
        most = max(len({*p.steer_ks, k}) for k in _possible(p, given))
        cuts = 1 + most + 1 + len(_PHASES) * 2 * len(p.control_seeds)  # in the prompt too only at one k
        work.append(Work(model, benchmark, "head scores", 1, found, passes=2))
        late = most + 2 * len(p.control_seeds)
        work.append(Work(model, benchmark, "replies while heads look elsewhere", cuts, asked * things, decode=late))
    cuts = 1 + max(len({n for n in p.ks if n <= k} | {k}) for k in _possible(p, given)) + 2 * len(p.control_seeds)
    shown = given["N_TEST"] if given["N_TEST"] > 0 else p.n_universal
    work.append(Work(models[0], benchmark, "replies, unmasked and ablated", cuts, shown))
    work.append(Work(models[0], benchmark, "looked at closely", 1, 20, passes=2, stored=False))
    return work


def _profile_name(p: Profile) -> str:
    return MODELS[p.models[0]].profile


def _train(p: Profile, given: Mapping) -> list[Work]:
    """07_dpo: pairs sampled, policies trained, each asked on every benchmark, and the first of each kind scored."""
    recipe = recipe_of(_profile_name(p), given["RECIPE"])
    if given["KEEP"] not in KEEP:
        raise store.unknown("rule for pairs", given["KEEP"], KEEP)
    if not given["TEMPERATURE"] > 0:
        raise ValueError(f"TEMPERATURE={given['TEMPERATURE']}: replies of a pair are sampled, at one above 0.")
    models, found_on, found = given["MODELS"] or p.dpo_models, p.benchmarks[0], given["N_DETECT"] or p.n_detect
    if len(models) > 1:
        raise ValueError(f"07_dpo trains one model; choose one of {', '.join(models)}.")
    if 0 < given["N_PAIRS"] < len(p.dpo_data):
        raise ValueError(f"N_PAIRS={given['N_PAIRS']}: at least one of each of {', '.join(p.dpo_data)}.")
    _check_rows(found_on, found, 0)
    (model,), policies = models, 3 * len(p.dpo_seeds)  # VRH negatives, random ones, fine-tuning
    each = (given["N_PAIRS"] or p.n_pairs_dpo) // len(p.dpo_data)
    n = given["N_TEST"] or p.n_dpo
    work = [Work(model, found_on, "head scores, before and after", 4, found, passes=2)]
    for train, test in p.dpo_data.items():
        tested = _at_most(test, n if n > 0 else sys.maxsize, found * (test == found_on))
        # A step reads both replies of a pair: forwards as policy and as reference, backwards, and forwards once more.
        steps = math.ceil(recipe.epochs * 2 * each)
        work += [
            Work(model, train, "chosen and rejected replies", 3, each),
            Work(model, train, f"training ({recipe.method}, {recipe.epochs:g} epochs)", policies, steps, passes=5,
                 stored=False, reply=0),
            Work(model, test, "replies, untrained and trained", 1 + policies, tested),
        ]  # fmt: skip
    work.append(Work(model, list(p.dpo_data.values())[0], "looked at closely", 2, 1, passes=2, stored=False))
    return work


def training_table(work: Mapping[str, Sequence[Work] | None], given: Mapping[str, Mapping]) -> str:
    """Memory of training the models of 07_dpo, in full and with adapters; empty without that notebook."""
    if not work.get("07_dpo"):
        return ""
    recipe = recipe_of("paper", given["07_dpo"]["RECIPE"])
    rows = table(*memory_rows([m for m in MODELS if m in SHAPES], recipe.rank, recipe.at_once))
    return (
        f"Memory of training in GB (07_dpo), {recipe.at_once} pair{'s' * (recipe.at_once > 1)} at once, gradient "
        f"checkpointing; calculated, not measured. The recipe chosen is {recipe.method}.\n{rows}"
    )


def _sets(p: Profile, given: Mapping, notebook: str, test: int, option: str = "") -> tuple[str, int, int]:
    """The benchmark of a notebook that takes one, and its numbers of detection and test samples."""
    benchmarks, found = given["BENCHMARKS"] or p.benchmarks, given["N_DETECT"] or p.n_detect
    if len(benchmarks) > 1:
        raise ValueError(f"{notebook} takes one benchmark; choose one of {', '.join(benchmarks)}.")
    test = given.get("N_TEST") or test
    if test < 0:  # all there are
        test = (about.rows if (about := benchmark_table()[benchmarks[0]].about) else 0) - found
    if given["BENCHMARKS"] or p is profile_of("paper"):  # the shipped scenes have no end
        _check_rows(benchmarks[0], found, test, option)
    return benchmarks[0], found, test


WORK: dict[str, Callable[[Profile, Mapping], list[Work]]] = {
    "01_detect": _detect,
    "02_design_space": _space,
    "03_sparsity": _few,
    "04_universality": _universal,
    "05_transfer": _transfer,
    "06_cross_task": _cross,
    "07_dpo": _train,
    "08_play": _play,
}


def work_of(notebook: str, profile: str, given: Mapping) -> list[Work] | None:
    """What a notebook runs with these parameters; None if nobody wrote it down, since "?" is better than a guess.

    Raises ValueError where the benchmark cannot give what the notebook asks of it."""
    return WORK[notebook](profile_of(profile), given) if notebook in WORK else None


# ---------------------------------------------------------------- what it needs


@dataclass(frozen=True)
class Item:
    """A model or a table that a run needs. `ids`: Hub ids in order of preference (none: it comes from elsewhere);
    `here`: "local copy", "cached" or ""."""

    name: str
    kind: str  # "model" or "dataset", as the Hub says
    ids: tuple[str, ...]
    revision: str | None
    gb: float
    here: str = ""

    def commit(self, i: str) -> str | None:
        return hub.pinned(i, self.revision if i == self.ids[0] else None)

    @property
    def download_gb(self) -> float:
        """Disk that is still to be taken. `datasets` keeps what it downloads beside an Arrow copy of it."""
        return 0.0 if self.here else self.gb * (2 if self.kind == "dataset" else 1)


def benchmark_table() -> dict:
    from vrhlib.benchmarks import BENCHMARKS  # numpy and pillow; a Python without them can still plan nano

    return BENCHMARKS


def check_values(profile: str, given: Mapping) -> None:
    """Raises ValueError for MODELS or BENCHMARKS that the profile does not have, with the nearest, and for n < 0."""
    for name in given.get("MODELS", ()):
        if name not in (known := [m for m, pin in MODELS.items() if pin.profile == profile]):
            raise store.unknown(f"model of the {profile} profile", name, known)
    for name in given.get("BENCHMARKS", ()):
        if name not in (known := [b.name for b in benchmark_table().values() if b.profile == profile]):
            raise store.unknown(f"benchmark of the {profile} profile", name, known)
    for name, value in given.items():
        least = -1 if name == "N_TEST" and profile == "paper" else 0  # -1: all there are
        if (name == "K" or name.startswith("N_")) and type(value) is int and value < least:
            raise ValueError(f"{name}={value}: it takes a number, or 0 for the profile's{' (-1: all)' * (least < 0)}.")


@dataclass(frozen=True)
class Paper:
    """A run of the paper profile: `given` is notebook name to all its parameters."""

    given: Mapping[str, Mapping]

    @cached_property
    def work(self) -> dict[str, list[Work] | None]:
        return {notebook: work_of(notebook, "paper", given) for notebook, given in self.given.items()}

    @cached_property
    def items(self) -> list[Item]:
        """Models, then benchmarks; of a notebook whose work nobody wrote down, those that it is given."""
        p, models, benchmarks = profile_of("paper"), {}, {}
        for notebook, given in self.given.items():
            work = self.work[notebook] or ()
            models |= dict.fromkeys([w.model for w in work] or given.get("MODELS") or p.models)
            benchmarks |= dict.fromkeys([w.benchmark for w in work] or given.get("BENCHMARKS") or p.benchmarks)
        pins, abouts = {m: MODELS[m] for m in models}, {b: benchmark_table()[b].about for b in benchmarks}
        abouts = {b: about for b, about in abouts.items() if about}  # what is drawn or made here needs nothing
        found = [Item(m, "model", (pin.source,), pin.revision, pin.gb) for m, pin in pins.items()]
        found += [Item(b, "dataset", about.ids, about.revision, about.gb) for b, about in abouts.items()]
        return [replace(item, here=_where(item)) for item in found]

    @cached_property
    def memory(self) -> dict[str, tuple[float, float]]:
        everything = [w for work in self.work.values() for w in work or ()]
        models = [item.name for item in self.items if item.kind == "model"]
        return {m: memory_gb(m, max([w.eager for w in everything if w.model == m], default=0)) for m in models}

    @property
    def disk_gb(self) -> float:
        """Disk that the downloads take; 0 if everything is here."""
        return sum(item.download_gb for item in self.items)


def _where(item: Item) -> str:
    if any(map(hub.local_copy, item.ids)):
        return "local copy"
    return "cached" if any(hub.cached(i, item.kind, item.commit(i)) for i in item.ids) else ""


def memory_gb(model: str, eager: int = 0) -> tuple[float, float]:
    """GPU memory that a model cannot do without (one sequence at a time), and that of full batches. GB.

    `eager`: with the attention matrices of all layers over so many image tokens, as the cost table of 01_detect holds
    them.
    """
    pin = MODELS[model]
    one, most = ((pin.visual_tokens + TEXT + REPLY) * TOKEN_GB * rows for rows in (1, pin.rows))
    matrices = pin.grid[0] * pin.grid[1] * (eager + TEXT + REPLY) ** 2 * 2e-9 if eager else 0.0
    return pin.gb + CONTEXT_GB + max(one, matrices), pin.gb + CONTEXT_GB + max(most, matrices)


# ---------------------------------------------------------------- hours


def correction(model: str, measured: Mapping[str, Sequence[float]]) -> float | None:
    """Measured seconds over stated seconds, of what a GPU did with this model so far; None before it did much."""
    read, written, seconds = measured.get(f"{model} on cuda", (0, 0, 0.0))
    return seconds / _stated(model, read, written) if seconds >= MEASURED and read + written else None


def _stated(model: str, read: float, written: float) -> float:
    reads, writes = SPEED[model]
    return read / reads + written / writes


def hours(work: Sequence[Work], measured: Mapping[str, Sequence[float]], told: float = TOLD) -> float:
    """GPU hours, loading of models aside; `told`: share of replies under an intervention that need no decoding."""
    seconds = [_stated(w.model, *spent(w, told)) * (correction(w.model, measured) or 1) for w in work]
    return sum(seconds) / 3600


def spent(w: Work, told: float = TOLD, layers: bool = True) -> tuple[float, float]:
    """Tokens that are read and written for it, with all that conditions share (see `decoding`): the untouched model
    replies and reads that once more; a condition reads prompt and draft from the lowest layer it touches on (if
    `layers`), or only the draft, and writes what differs."""
    if not w.acting:
        return w.read, w.written
    whole = w.length + w.reply
    share = shared_layers(w.model) if layers else 0.0
    prompts = (w.acting - w.decode) * whole * (1 - share) + w.decode * w.reply
    return w.samples * (w.length + whole + prompts), w.samples * w.reply * (1 + w.acting * (1 - told))


@cache
def shared_layers(model: str) -> float:
    """Share of a model's layers that lie below the lowest of 20 ablated heads: mean of the published heads' (half of
    the conditions cut them, or as many of their layers) and of random heads' (the other half)."""
    depth, heads = MODELS[model].grid
    total, k = depth * heads, 20
    above = [math.comb(total - layer * heads, k) / math.comb(total, k) for layer in range(1, depth)]
    return (LOWEST[model] + sum(above)) / 2 / depth


def ladder(
    work: Sequence[Work], measured: Mapping[str, Sequence[float]], told: float = TOLD
) -> list[tuple[str, float]]:
    """GPU hours when one trick after the other is added, from the loop that everybody writes to what is done here."""

    def total(each: Callable[[Work], float]) -> float:
        return sum(each(w) * (correction(w.model, measured) or 1) for w in work) / 3600

    def looks(w: Work) -> float:
        """Seconds that the vision tower takes for one look at every picture."""
        seen = 0 if w.prompt and w.benchmark in LONG else MODELS[w.model].visual_tokens
        return w.samples * seen * VISION[w.model] / SPEED[w.model][0]

    alone = total(lambda w: _stated(w.model, w.read, 0) + w.written * STEP + looks(w) * w.conditions * w.passes)
    batched = total(lambda w: _stated(w.model, w.read, w.written) + looks(w) * w.conditions * w.passes)
    seen_once = total(lambda w: _stated(w.model, w.read, w.written) + looks(w))
    verified = total(lambda w: _stated(w.model, *spent(w, told, layers=False)) + looks(w))
    everything = total(lambda w: _stated(w.model, *spent(w, told)) + looks(w))
    return [
        ("one sequence at a time, every picture looked at for every condition", alone),
        ("conditions and samples share a batch", batched),
        ("a picture is looked at once for all conditions", seen_once),
        (f"{100 * told:.0f} % of the replies are told by their draft; phase decode shares the prompt", verified),
        ("layers below the lowest ablated head run once", everything),
    ]  # fmt: skip


def share_told(runs: Path) -> float | None:
    """Share of the replies under an intervention in a folder of runs that needed no decoding; None before there are a
    hundred."""
    replies = drafted = 0
    for path in runs.glob("*.json"):
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["task"] == "replies" and manifest["condition"] and manifest["decoding"]["drafted"]:
                replies, drafted = replies + int(manifest["samples"]), drafted + int(manifest["drafted"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the run store names what it cannot read
    return drafted / replies if replies >= 100 else None


# ---------------------------------------------------------------- what stands in its way


def unreachable(needed: Sequence[Item]) -> dict[str, str]:
    """Name to the reason, of all that is neither on this machine nor to be had from the Hub. Asks the network."""
    asked = [item for item in needed if not item.here]
    with ThreadPoolExecutor(max(1, len(asked))) as pool:  # each may take its time to fail
        return {item.name: why for item, why in zip(asked, pool.map(_why_not, asked)) if why}


def _why_not(item: Item) -> str | None:
    if not item.ids:
        return None  # its own reader fetches it, and says what it misses
    reasons = []
    for i in item.ids:
        reasons.append(hub.reachable(i, item.kind, item.commit(i)))
        if reasons[-1] is None:
            return None
    return f"{item.name}: {' Or else: '.join(reasons)}"


def free_gpu_gb(device: str) -> float | None:
    """Free memory of a CUDA device; None if PyTorch cannot use one. In a process of its own, or this one would hold
    a part of that memory for as long as the notebooks run."""
    code = "import sys, torch; torch.cuda.is_available() and print(torch.cuda.mem_get_info(sys.argv[1])[0])"
    done = subprocess.run([sys.executable, "-c", code, device], capture_output=True, text=True)
    return float(done.stdout) / 1e9 if done.stdout.strip() else None


def obstacles(run: Paper, refused: Mapping[str, str], device: str, gpu_gb: float | None, disk_gb: float) -> list[str]:
    """All reasons not to begin, a line each with what to do. `refused` as `unreachable` returns it; `gpu_gb` and
    `disk_gb` are what is free."""
    found, least = [], {model: low for model, (low, _) in run.memory.items()}
    largest = max(least, key=least.get)
    if device.startswith("cuda") and gpu_gb is None:
        found.append(
            "No CUDA device that PyTorch can use. Go to a machine with a GPU, with a torch built for its driver "
            "(./run_all.sh help); or set VRHLIB_DEVICE=cpu, and hours become days."
        )
    elif device.startswith("cuda") and gpu_gb < least[largest]:
        found.append(
            f"{largest} needs {least[largest]:.1f} GB of GPU memory, and {gpu_gb:.1f} GB are free. End what else runs "
            "there (nvidia-smi shows it), choose other models (MODELS=) or a larger GPU."
        )
    if run.disk_gb and disk_gb < run.disk_gb + SPARE_GB:
        found.append(
            f"{run.disk_gb + SPARE_GB:.1f} GB of disk are needed, and {disk_gb:.1f} GB are free at "
            f"{hub.cache_folder()}. Make room, or set HF_HOME to a folder on a larger disk."
        )
    return [*found, *refused.values()]


def check(run: Paper) -> list[str]:
    """`obstacles` of a run on this machine: asks GPU, disk and Hub."""
    device = os.environ.get("VRHLIB_DEVICE") or "cuda"
    gpu_gb = free_gpu_gb(device) if device.startswith("cuda") else None
    return obstacles(run, unreachable(run.items), device, gpu_gb, free_disk_gb())


def free_disk_gb() -> float:
    """Where the Hub's files go."""
    return hub.free_gb(hub.cache_folder())


# ---------------------------------------------------------------- in words


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    padded = [[word.ljust(width) for word, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def gpu_here() -> tuple[str, float] | None:
    """Name and memory (GB) of the first GPU, as nvidia-smi says; None where there is none that it knows."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        name, mib = said.splitlines()[0].rsplit(",", 1)
        return name, float(mib) * 2**20 / 1e9
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def in_words(run: Paper, measured: Mapping[str, Sequence], gpu: tuple[str, float] | None, free_gb: float) -> str:
    """The plan of a paper run: work, models, benchmarks, and whether disk and GPU are large enough."""
    told = share_told(store.runs_dir("paper"))
    tables = _work_table(run, measured, told), _ladder(run, measured, told), _model_table(run, measured)
    tables = *tables, _benchmark_table(run)
    tables = filter(None, [*tables, training_table(run.work, run.given)])
    return "\n\n".join([*tables, f"{_disk_line(run, free_gb)}\n{_gpu_line(run, gpu)}"])


def _ladder(run: Paper, measured: Mapping[str, Sequence], told: float | None) -> str:
    """What each trick saves."""
    steps = ladder([w for work in run.work.values() for w in work or ()], measured, told or TOLD)
    before = [None, *(value for _, value in steps)]
    rows = [(name, f"{value:.1f}", f"{earlier - value:.1f}" if earlier else "")
            for (name, value), earlier in zip(steps, before)]  # fmt: skip
    known = "counted in stored runs" if told else "as in the embedded models"
    return (
        "What sharing saves, one trick after the other (GPU hours, with the vision tower; estimates of the same kind). "
        f"The share of\nreplies that need no decoding is {known}.\n{table(('with', 'GPU h', 'saved'), rows)}"
    )


def _work_table(run: Paper, measured: Mapping[str, Sequence], told: float | None) -> str:
    told = told or TOLD

    def numbers(work: Sequence[Work]) -> tuple[str, ...]:
        read, written = (sum(spent(w, told)[i] for w in work) / 1e6 for i in (0, 1))
        gpu = hours(work, measured, told)
        return f"{sum(w.sequences for w in work):,}", f"{read:.2f}", f"{written:.2f}", f"{gpu:.2f}"

    rows, everything = [], [w for work in run.work.values() for w in work or ()]
    for notebook, work in run.work.items():
        rows += [(notebook, *"?" * 9)] if work is None else []
        for w in work or ():
            rows.append((notebook, w.model, w.benchmark, w.what, str(w.conditions), f"{w.samples:,}", *numbers([w])))
    rows.append(("all", *[""] * 5, *numbers(everything)))
    header = ("notebook", "model", "benchmark", "what", "conditions", "samples", "sequences", "Mtok read", "written")
    return (
        "Sequences at most, as if nothing were stored yet; equal conditions are run once. GPU hours are an estimate "
        f"for an RTX A6000\n(48 GB), loading and drawing aside.\n{table((*header, 'GPU h'), rows)}"
    )


def _model_table(run: Paper, measured: Mapping[str, Sequence]) -> str:
    rows = []
    for item in (i for i in run.items if i.kind == "model"):
        (low, high), factor, pin = run.memory[item.name], correction(item.name, measured), MODELS[item.name]
        at = f"@{item.revision[:8]}" if item.revision and item.here != "local copy" else ""
        known = f"measured here, {factor:.2f} x the time stated" if factor else "stated"
        rows.append((
            item.name, f"{item.ids[0]}{at}", f"{item.gb:.1f}", item.here or "to download", f"{low:.1f}",
            f"{high:.1f} ({pin.rows} at once)", "{} / {}".format(*SPEED[item.name]), known,
        ))  # fmt: skip
    header = ("model", "from", "GB", "status", "GPU GB at least", "full batches", "read / written a second", "speed is")
    return table(header, rows)


def _benchmark_table(run: Paper) -> str:
    rows, notes = [], []
    for item in (i for i in run.items if i.kind == "dataset"):
        about = benchmark_table()[item.name].about
        rows.append((
            item.name, " or ".join(item.ids) or "(see below)", about.split, f"{about.rows:,}", f"{item.gb:.2f}",
            item.here or "to download",
        ))  # fmt: skip
        notes.append(f"{item.name}: {about.metric}. Licence: {about.licence}.")
        notes += [f"{item.name} needs {about.needs}."] * bool(about.needs)
    return "\n".join([table(("benchmark", "from", "split", "rows", "GB", "status"), rows), *notes])


def _disk_line(run: Paper, free_gb: float) -> str:
    models, tables = (sum(i.gb for i in run.items if i.kind == kind and not i.here) for kind in ("model", "dataset"))
    short = "WARNING, the disk is too small: " if run.disk_gb and free_gb < run.disk_gb + SPARE_GB else ""
    return (
        f"Disk: {short}{models:.1f} GB of models and {tables:.1f} GB of tables are to be downloaded. With the Arrow "
        f"copy of the\ntables that makes {run.disk_gb:.1f} GB; {free_gb:.1f} GB are free at {hub.cache_folder()}."
    )


def _gpu_line(run: Paper, gpu: tuple[str, float] | None) -> str:
    low, high = (max(sizes) for sizes in zip(*run.memory.values()))
    needs = f"{low:.1f} GB are needed, {high:.1f} GB for full batches (they are halved where memory runs out)."
    if gpu is None:
        return f"GPU: not known here. {needs}"
    short = "WARNING, its memory is too small: " if gpu[1] < low else ""
    return f"GPU: {short}{gpu[0]} with {gpu[1]:.1f} GB. {needs}"
