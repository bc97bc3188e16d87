"""From the tables of all scripts to `summary.csv`, the figure's frame and the paragraph of README.md.

A row of the summary is one measure: its ratio, the target it was given beforehand (if any), and whether that is met. Of
several models the one that is worst against the target stands for all; where there is no target, the median model does
(of two, the lower one), with the lowest and highest round of all.
"""

from __future__ import annotations

import operator
import os
import platform
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from benchmarks import ablation, capture, design_space
from benchmarks.turns import MEMORY, TIME

COLUMNS = ["part", "measure", "ratio", "target", "met", "low", "high", "unit", "model", "n", "device"]
LARGE = "random random-wide"
MARKERS = "<!-- performance -->", "<!-- /performance -->"
RUNS = {
    "cold": "every notebook, nothing stored",
    "cached": "every notebook again, replies stored, all drawn anew",
    "unchanged": "nothing has changed, nothing is run",
}
WHOLE = {"cold": "<= 900", "cached": "<= 60", "unchanged": "<= 60"}  # seconds, after the installation
CLAUSES = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

Tables = Mapping[str, pd.DataFrame]


def met(ratio: float, target: str) -> str:
    """yes or no; nothing where there is no target. Raises ValueError for a target that is no comparison."""
    if not target:
        return ""
    clause, _, bound = target.partition(" ")
    if clause not in CLAUSES:
        raise ValueError(f"A target is like '<= 1.1' or '>= 5', not {target!r}.")
    return "yes" if CLAUSES[clause](ratio, float(bound)) else "no"  # NaN is no success


def summarised(tables: Tables) -> pd.DataFrame:
    """One row a measure, in the columns of `COLUMNS`; of scripts that have not run there are none."""
    rows: list[dict] = []
    for name, read in {"capture": _capture, "ablation": _ablation, "design_space": _design_space, "growth": _growth,
                       "peers": _peers, "whole_run": _whole_run}.items():  # fmt: skip
        if name in tables and len(tables[name]):
            rows += read(tables[name])
    found = pd.DataFrame(rows, columns=COLUMNS)
    found["met"] = [met(ratio, target) for ratio, target in zip(found.ratio, found.target)]
    return found


def _row(part: str, measure: str, own: pd.DataFrame, target: str = "") -> dict:
    """The worst model against a target; without one, the median model and the range of all."""
    own = own.sort_values("ratio", ignore_index=True)
    worst = (len(own) - 1) // 2 if not target else len(own) - 1 if target.startswith("<") else 0
    one = own.iloc[worst]
    low, high = (one.low, one.high) if target else (own.low.min(), own.high.max())
    model = one.model if target or len(own) == 1 else f"median of {len(own)} models"
    return {"part": part, "measure": measure, "ratio": one.ratio, "target": target, "low": low, "high": high,
            "unit": "x", "model": model, "n": one.n, "device": one.device}  # fmt: skip


def _of(table: pd.DataFrame, measure: str, quantity: str = TIME) -> pd.DataFrame:
    return table[(table.measure == measure) & (table.quantity == quantity)]


def _span(values: pd.Series) -> str:
    """One number, or the lowest and highest of several: `48`, `48 to 64`; nothing of none."""
    return " to ".join(f"{value:,}" for value in sorted({values.min(), values.max()})) if len(values) else ""


def _inverted(own: pd.DataFrame) -> pd.DataFrame:
    return own.assign(ratio=1 / own.ratio, low=1 / own.high, high=1 / own.low)


def _capture(table: pd.DataFrame) -> list[dict]:
    rows = []
    for words, chosen in (
        (" (large random model)", table.model == LARGE),
        (" (embedded models)", table.model != LARGE),
    ):
        own = table[chosen]
        for measure, found, target in (
            ("captured / plain pass", _of(own, capture.PLAIN), "<= 1.1"),
            ("eager / captured, time", _of(own, capture.EAGER), ">= 2"),
            ("captured / eager, peak memory", _inverted(_of(own, capture.EAGER, MEMORY)), "<= 0.1"),
        ):
            rows += [_row("a", measure + words, found, target)] if len(found) else []
    for measure, words in {
        capture.FORCED: "1 eager in generate / reply, then captured pass",
        capture.INSIDE: "1 captured in generate / reply, then captured pass",
        capture.KNOWN: "1 eager in generate / captured pass, reply known",
    }.items():
        rows += [_row("1", words, _of(table, measure))]
    return rows


def _ablation(table: pd.DataFrame) -> list[dict]:
    rows = []
    for phase in ablation.PHASES:
        own = _of(table, ablation.ALL.format(phase))
        small = own.groupby("model").image_tokens.transform("min") == own.image_tokens
        for found in (own[small], own[~small]):
            words = f"naive / sweep of 12 conditions, {phase}, {_span(found.image_tokens)} tokens"
            rows += [_row("b", words, found, ">= 5")] if len(found) else []
        several = table[table.measure.str.match(re.escape(ablation.MANY.format(0, phase)).replace("0", r"\d+", 1))]
        for measure, own in several.groupby("measure", sort=False):
            pictures = re.search(r"on (\d+) pictures", measure)[1]
            rows.append(_row("b", f"naive / sweep, {pictures} pictures at once, {phase}", own))
    for phase in ablation.PHASES:
        for words in ablation.STEPS.values():
            rows.append(_row("2-4", words.format(phase), _of(table, words.format(phase))))
    for phase in ablation.PHASES:
        for words in ablation.WITHOUT.values():
            rows.append(_row("left out", words.format(phase), _of(table, words.format(phase))))
    rows += [_row("5", ablation.ORDER, _of(table, ablation.ORDER))] if len(_of(table, ablation.ORDER)) else []
    return rows


def _design_space(table: pd.DataFrame) -> list[dict]:
    own, rows = _of(table, design_space.WITH_REPLY), []
    for words, found in (
        ("shipped", own.loc[own.groupby("model").image_tokens.idxmin()]),
        ("enlarged", own.loc[own.groupby("model").image_tokens.idxmax()]),
    ):
        words = f"design space / one variant, {words}, {_span(found.image_tokens)} tokens"
        rows.append(_row("c", words, found, "<= 1.3"))
    return rows


def _growth(table: pd.DataFrame) -> list[dict]:
    rows = []
    for axis, target in (("samples", "<= 1.1"), ("conditions", "< 1"), ("image tokens", "")):
        own = table[table.axis == axis]
        fitted = own.drop_duplicates("model").rename(columns={"exponent": "fit"})
        whole = fitted.assign(ratio=fitted.fit, low=fitted.fit, high=fitted.fit, n=len(own) // max(1, len(fitted)))
        rows.append(_row("d", f"exponent of time over {axis}", whole, target) | {"unit": "exponent"})
    return rows


def _peers(table: pd.DataFrame) -> list[dict]:
    rows = []
    for (peer, measure, quantity), own in table[table.ratio.notna()].groupby(
        ["peer", "measure", "quantity"], sort=False
    ):
        more = "" if quantity == TIME else ", peak memory"
        words = measure.replace(peer, f"{peer} {own.version.iloc[0]}", 1)
        rows.append(_row("peers", words + more, own))
    return rows


def _whole_run(table: pd.DataFrame) -> list[dict]:
    alike = {"part": "whole run", "model": "", "n": 1, "device": "cpu"}
    rows = [
        {**alike, "measure": f"{RUNS[row.run]}, {row.cores} cores, {row.at_once} notebooks at once",
         "ratio": row.wall_seconds, "target": WHOLE[row.run], "low": row.wall_seconds, "high": row.wall_seconds,
         "unit": "s"}
        for row in table.itertuples()
    ]  # fmt: skip
    told = table.told.dropna() if "told" in table else []
    rows += [{**alike, "measure": "replies under an intervention that needed no decoding", "ratio": share, "target": "",
              "low": share, "high": share, "unit": "share"} for share in told]  # fmt: skip
    return rows


# ---------------------------------------------------------------- the figure


def drawn(summary: pd.DataFrame, growth: pd.DataFrame | None) -> pd.DataFrame:
    """The frame of `vrhlib.figures.performance`."""
    bars = summary[(summary.unit == "x") & (summary.part != "left out")].assign(panel="ratio")
    columns = ["panel", "measure", "x", "ratio", "low", "high", "target", "met", "model"]
    if growth is None:
        return bars.reindex(columns=columns)
    curves = growth.rename(columns={"axis": "measure", "relative": "ratio"}).assign(panel="growth", target="", met="")
    return pd.concat([bars.reindex(columns=columns), curves.reindex(columns=columns)], ignore_index=True)


# ---------------------------------------------------------------- README.md


def paragraph(summary: pd.DataFrame, machine: str) -> str:
    """What README.md says between its markers, from the summary alone."""
    aimed = summary[summary.target != ""]
    missed = aimed[aimed.met == "no"]
    lines = [
        "Each row is a ratio of two ways to the same result, which were compared before they were timed; they took "
        f"turns in one process. CPU time of one thread on {machine}; best of the rounds, in brackets the lowest and "
        "highest ratio of a round. Of several models, the one that is worst against the target.",
    ]
    table = ["| | ratio | target | met |", "|---|---|---|---|"]
    for row in aimed.itertuples():
        span = "" if row.unit in ("exponent", "s") else f" ({row.low:.2f} to {row.high:.2f})"
        where = f"; {_where(row)}" if row.unit != "s" else ""
        table.append(f"| {row.measure}{where} | {_number(row)}{span} | {_sign(row.target)}{_unit(row)} | {row.met} |")
    told = f"{len(aimed) - len(missed)} of {len(aimed)} targets are met"
    told += "." if missed.empty else "; **missed**: " + "; ".join(
        f"{row.measure} ({_number(row)}, not {_sign(row.target)}{_unit(row)})" for row in missed.itertuples()
    ) + "."  # fmt: skip
    lines.append(f"{told} {_LIMITS}" if missed.measure.str.startswith("naive").any() else told)
    lines.append("The tricks one by one (median model; in brackets, over the rounds of all models):")
    if len(beside := summary[summary.part == "peers"]):
        lines.append(
            "Beside what else there is (`benchmarks/peers.py`, same numbers required): " + _listed(beside) + "."
        )
    for row in summary[summary.unit == "share"].itertuples():
        lines.append(
            f"Of the {row.measure.removesuffix(' that needed no decoding')} of all notebooks, {100 * row.ratio:.0f} % "
            "needed no decoding: one pass told that they are the unmasked model's."
        )
    lines.append(
        "`python -m benchmarks` measures all this again, `python -m benchmarks.gpu` the same on a GPU (five minutes, "
        "random weights of the real sizes, beside the paper's Table A11); it has not been run on one yet."
    )
    picture = (
        "![Bars of the ratios above with their targets, and time against the number of samples, conditions and image "
        "tokens](figures/nano/performance/performance.png)"
    )
    first, *others = (textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines)
    at = next(i for i, line in enumerate(others) if line.startswith("The tricks")) + 1
    return "\n\n".join([first, "\n".join(table), *others[:at], _tricks(summary), *others[at:], picture])


_LIMITS = (
    "What limits a sweep here: a batch of conditions saves a small model's overhead but no arithmetic; in phase all, "
    "the lowest layer that is cut is early in most draws of random heads, so that little of the stack is shared; the "
    "pass that verifies is one more, beside replies of about ten tokens; and the unmasked reply is one of the twelve. "
    "A whole run is arithmetic, too: some 12 million tokens through models of 4 million parameters, at what the cores "
    "can do."
)


def _tricks(summary: pd.DataFrame) -> str:
    """A table of the tricks, a column a phase where there are two; each against the step before it."""
    own = summary[summary.part.isin(["1", "2-4", "5"])]
    cells: dict[str, list[str]] = {}
    for row in own.itertuples():
        name, _, _ = row.measure.partition(", phase")
        cells.setdefault(name, []).append(f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})")
    lines = ["| trick, each on top of those above | all positions | while decoding |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {' | '.join((found + [''])[:2])} |" for name, found in cells.items()])


def _listed(rows: pd.DataFrame) -> str:
    return "; ".join(f"{row.measure}: {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})" for row in rows.itertuples())


def _where(row) -> str:
    return str(row.model).removeprefix("random ")


def _number(row) -> str:
    return f"{row.ratio:,.0f} s" if row.unit == "s" else f"{row.ratio:.2f}"


def _unit(row) -> str:
    return " s" if row.unit == "s" else ""


def _sign(target: str) -> str:
    return target.replace("<=", "≤").replace(">=", "≥")


def inserted(readme: str, text: str) -> str:
    """README.md with the text between its markers. Raises ValueError where they are not there, once each, in order."""
    begin, end = MARKERS
    if (readme.count(begin), readme.count(end)) != (1, 1) or readme.index(begin) > readme.index(end):
        raise ValueError(f"README.md needs the lines {begin} and {end}, once each, around its performance paragraph.")
    before, rest = readme.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def machine() -> str:
    """The machine in words: kind of processor and number of cores, no name."""
    kind, listed = platform.machine(), Path("/proc/cpuinfo")
    if listed.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", listed.read_text(), re.M)):
        kind = re.sub(r"\s+", " ", re.sub(r"\((R|TM)\)|CPU|@.*", "", found[1])).strip()
    return f"{kind}, {os.cpu_count()} cores"
