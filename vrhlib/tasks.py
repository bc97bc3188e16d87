"""Beyond boxes: what cutting heads that were found on grounding does to questions answered in words (Table 3).

A drop means something only above what can be answered without looking (`with_floor`), and only if language survives
(`text_only`). Everything here is read off replies; no model runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

import numpy as np
import pandas as pd

from vrhlib.outcomes import UNREADABLE
from vrhlib.samples import Samples
from vrhlib.stats import Accuracy, paired_difference


def with_floor(cells: pd.DataFrame, answers: pd.DataFrame, chances: Mapping[str, float]) -> pd.DataFrame:
    """`evaluate.cells` with how much of each benchmark is answered without looking.

    `answers`: the replies behind `cells`, and those under condition `blind` (`evaluate.blind`); `chances`: percent by
    benchmark, NaN where not known. Adds blind, blind_low, blind_high (accuracy, percent, 95 % Wilson), chance, and
    above_blind, above_blind_low, above_blind_high (unmasked minus blind on the same samples, points, 95 % paired
    bootstrap over images). Raises ValueError where a cell has no blind replies.
    """
    rows = []
    for cell in cells.itertuples():
        own = answers[(answers.model == cell.model) & (answers.benchmark == cell.benchmark)].set_index("id")
        seen, grey = (own[own.condition == condition] for condition in ("unmasked", "blind"))
        if set(grey.index) != set(seen.index):
            raise ValueError(f"{cell.model} on {cell.benchmark}: ask the same questions about grey pictures first.")
        right, guessed = (seen.outcome == "correct"), (grey.outcome == "correct").loc[seen.index]
        above = paired_difference(right.tolist(), guessed.tolist(), seen.image.tolist())
        floor = Accuracy(int(guessed.sum()), len(guessed))
        rows.append({
            "blind": floor.mean, "blind_low": floor.interval[0], "blind_high": floor.interval[1],
            "chance": chances.get(cell.benchmark, np.nan), "above_blind": above.mean, "above_blind_low": above.low,
            "above_blind_high": above.high,
        })  # fmt: skip
    table = pd.concat([cells.reset_index(drop=True), pd.DataFrame(rows)], axis=1)
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


def by_benchmark(table: pd.DataFrame, k: Mapping[str, int]) -> pd.DataFrame:
    """An accuracy table in the layout of the paper's Table 3: a row per model and condition, a column per benchmark, at
    `k[model]` heads; means over seeds, percent, NaN where nothing was cut."""
    at = table[(table.k == 0) | (table.k == table.model.map(k))]
    rows = at.pivot_table(index=["model", "condition"], columns="benchmark", values="accuracy", sort=False)
    order = {c: i for i, c in enumerate(("blind", "unmasked", "random", "layer_matched", "vrh", "flip_q"))}
    models = list(dict.fromkeys(table.model))
    ranked = sorted(rows.index, key=lambda at: (models.index(at[0]), order.get(at[1], len(order))))
    return rows.loc[ranked, list(dict.fromkeys(at.benchmark))].rename_axis(columns=None).reset_index()


def turned(answers: pd.DataFrame, model: str, k: int, n: int, seed: int) -> list[tuple[str, str]]:
    """Up to n cases (benchmark, sample id) that a model answers right, and wrong without its top k heads; drawn by
    seed, one from each benchmark in turn."""
    mine = answers[(answers.model == model) & answers.k.isin([0, k])]
    right = mine[(mine.condition == "unmasked") & (mine.outcome == "correct")]
    wrong = mine[(mine.condition == "vrh") & (mine.k == k) & (mine.outcome != "correct")]
    lost, rng = set(zip(wrong.benchmark, wrong.id)), Random(seed)
    piles = []
    for _, own in right.groupby("benchmark", sort=False):
        pile = [at for at in zip(own.benchmark, own.id) if at in lost]
        piles.append(rng.sample(pile, len(pile)))
    turns = [pile[i] for i in range(max(map(len, piles), default=0)) for pile in piles if i < len(pile)]
    return turns[:n]


def text_only(answers: pd.DataFrame, samples: Samples) -> pd.DataFrame:
    """Does language survive the cut? Replies to questions about a text, no picture, a row per model, condition and k:
    means over the seeds of a control.

    accuracy (percent; low, high: 95 % Wilson, of a control the means of its draws; chance: of a reader who names one of
    the things in the text), from_text (percent of the replies that stand in the text word for word: read there, if
    perhaps in the wrong place), readable (percent that hold an answer at all), seeds, n.
    """
    texts = {s.id: " ".join(s.context.casefold().split()) for s in samples}
    if lacking := [name for name, text in texts.items() if not text]:
        raise ValueError(f"{len(lacking)} samples of {samples!r} have no text before the question ({lacking[0]}).")
    told = [_stands(text, texts[name]) for name, text in zip(answers.id, answers.text)]
    known = answers.assign(
        accuracy=100.0 * (answers.outcome == "correct"), from_text=100.0 * np.array(told),
        readable=100.0 * ~answers.outcome.isin(UNREADABLE),
    )  # fmt: skip
    by = known.groupby(_CONDITION, sort=False)
    table = by[["accuracy", "from_text", "readable"]].mean()
    draws = [*_CONDITION, "seed"]
    ends = known.groupby(draws, sort=False, dropna=False).outcome.apply(_wilson).unstack()
    table[["low", "high"]] = ends.groupby(_CONDITION, sort=False).mean()
    table["seeds"], table["n"] = by.seed.nunique().clip(lower=1), by.id.nunique()
    table["chance"] = 100 * float(np.mean([np.nan if s.chance is None else s.chance for s in samples]))
    table = table.reset_index()
    table.attrs["runs"] = answers.attrs.get("runs", [])
    return table


_CONDITION = ["model", "benchmark", "condition", "k"]


def _wilson(outcomes: pd.Series) -> pd.Series:
    return pd.Series(Accuracy(int((outcomes == "correct").sum()), len(outcomes)).interval, index=["low", "high"])


def _stands(reply: str, text: str) -> bool:
    said = " ".join(reply.casefold().split()).strip(" .")
    return bool(said) and re.search(rf"(?<!\w){re.escape(said)}(?!\w)", text) is not None
