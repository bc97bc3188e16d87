"""What a table must hold to be drawn. Each check raises ValueError, saying whose rows are wrong and the next step."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

ACCURACY_COLUMNS = ("model", "benchmark", "condition", "k", "seed", "accuracy", "n")


def check_columns(table: pd.DataFrame, columns: Sequence[str], step: str) -> None:
    """Raise ValueError, naming the next step, if a table is empty or lacks a column."""
    if table.empty:
        raise ValueError(f"The table has no rows: {step}.")
    if missing := [column for column in columns if column not in table]:
        raise ValueError(f"The table has no column {', '.join(missing)}: {step}, or add it.")


def check_panels(
    table: pd.DataFrame, by: Sequence[str] = ("model",), columns: Sequence[str] = ACCURACY_COLUMNS
) -> None:
    """Raise ValueError unless every panel of an accuracy table has one benchmark and an unmasked row."""
    check_columns(table, columns, "run the ablations first")
    for panel, own in table.groupby(list(by), sort=False):
        panel = " on ".join(panel)
        if own.benchmark.nunique() > 1:
            raise ValueError(f"{panel} has {own.benchmark.nunique()} benchmarks in one panel: select one.")
        if not (own.condition == "unmasked").any():
            raise ValueError(f"{panel} has no unmasked row: nothing to compare with. Add its unmasked accuracy.")


def check_conditions(table: pd.DataFrame, known: Sequence[str], mark: str) -> None:
    """Raise ValueError if a condition has no mark (bar, line) in the drawing."""
    if unknown := set(table.condition) - {"unmasked", *known}:
        names = ", ".join(c for c in known if c != "unmasked")
        raise ValueError(f"No {mark} for {', '.join(sorted(unknown))}: conditions are unmasked, {names}.")


def check_one_k(cut: pd.DataFrame) -> None:
    """Raise ValueError if a model has rows of several k."""
    if several := [model for model, own in cut.groupby("model", sort=False) if own.k.nunique() > 1]:
        raise ValueError(f"Several k for {', '.join(several)}: select the rows of one k for each model.")


def check_draws(table: pd.DataFrame) -> None:
    """Raise ValueError if a point has several rows that `seed` does not tell apart."""
    point = ["model", "benchmark", "condition", "k", "seed"]
    if (again := table.duplicated(point)).any():
        row = table[again].iloc[0]
        raise ValueError(
            f"{row.model} on {row.benchmark} has several rows for {row.condition} at k={row.k}: "
            "number the draws (or the donors) in the column seed."
        )


def check_sums(table: pd.DataFrame, parts: Sequence[str], by: str, name: str, whole: str) -> None:
    """Raise ValueError, naming model and `by`, unless the parts of every row sum to 100."""
    off = table[(table[list(parts)].sum(axis=1) - 100).abs() > 0.5]
    if len(off):
        row = off.iloc[0]
        raise ValueError(
            f"The {name} of {row.model} ({row[by]}) sum to {row[list(parts)].sum():.1f}, not 100: "
            f"they are percent of all {whole}."
        )
