"""The losses of ``train-rl`` as a table: formula, source, settings and defaults; and the table of the documentation.

Invariants: a name here is the name of its function in ``gymdata.train.trainers.losses``, which takes exactly these settings;
a setting that several losses have means the same in each. ``python -m gymdata.train.losses --write gymdata/docs`` after a
change.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Aggregation = Literal["token", "sequence"]
PAGE = "batch-rl.md"
BEGIN, END = "<!-- losses -->\n", "<!-- end of losses -->\n"


@dataclass(frozen=True)
class Loss:
    """``settings``: setting → its default. ``aggregation``: what the mean over the global batch counts. ``needs``: a
    column that it needs besides the saved log-probs and advantages. ``at_zero``: whether it trains where every
    advantage is 0."""

    formula: str
    source: str
    settings: Mapping[str, float | str] = field(default_factory=dict)
    aggregation: Aggregation = "token"
    needs: Literal["reference", "optimal_value"] | None = None
    at_zero: bool = False


def _clip(low: float, high: float) -> dict[str, float | str]:
    return {"clip_low": low, "clip_high": high}


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss("−min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)", "PPO, arXiv 1707.06347", _clip(0.2, 0.2)),
    "cispo": Loss("−sg(clip(r, 1 − clip_low, 1 + clip_high))·A·ℓ", "MiniMax-M1, arXiv 2506.13585", _clip(1.0, 4.0)),
    "tis_reinforce": Loss(
        "−sg(min(r, tis_cap))·A·ℓ", "truncated importance sampling of each token, arXiv 2510.13786", {"tis_cap": 2.0}
    ),
    "tis_sequence": Loss(
        "−sg(min(R, tis_cap))·A·ℓ", "truncated importance sampling, arXiv 2503.14286", {"tis_cap": 2.0}
    ),
    "mis": Loss(
        "−sg(w·[w ≤ tis_cap])·A·ℓ, w = r with mis_level token, R with sequence",
        "masked importance sampling, arXiv 2510.26788",
        {"tis_cap": 2.0, "mis_level": "sequence"},
    ),
    "icepop": Loss(
        "−sg(r·[1 − clip_low ≤ r ≤ 1 + clip_high])·A·ℓ", "IcePop (Ring-1T), arXiv 2510.18855", _clip(0.5, 4.0)
    ),
    "gspo": Loss(
        "−min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A)",
        "GSPO, arXiv 2507.18071",
        _clip(3e-4, 4e-4),
        aggregation="sequence",
    ),
    "gmpo": Loss(
        "−exp(mean of log r)·mean of A; log r is at most clip_high where A > 0, at least −clip_low where A < 0",
        "GMPO, arXiv 2507.20673",
        _clip(0.4, 0.4),
        aggregation="sequence",
    ),
    "dppo_tv": Loss(
        "−sg(min(r, tis_cap))·A·ℓ; 0 where A > 0 and π − π_saved > clip_high, or A < 0 and π_saved − π > clip_low",
        "DPPO, arXiv 2602.04879",
        {**_clip(0.15, 0.15), "tis_cap": 20.0},
    ),
    "dppo_kl": Loss(
        "−sg(min(r, tis_cap))·A·ℓ; 0 where A > 0, r > 1 and D > clip_high, or A < 0, r < 1 and D > clip_low; "
        "D: KL of π_saved to π, of this token against all others",
        "DPPO, arXiv 2602.04879",
        {**_clip(0.05, 0.05), "tis_cap": 20.0},
    ),
    "sapo": Loss(
        "−σ(τ·(r − 1))·4/τ·A, τ = tau_positive where A > 0, else tau_negative",
        "SAPO, arXiv 2511.20347",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "topr": Loss("−A·L where A ≥ 0, −sg(min(R, 1))·A·L where A < 0", "TOPR, arXiv 2503.14286", aggregation="sequence"),
    "asymre": Loss(
        "−(A − baseline_shift)·L",
        "AsymRE, arXiv 2506.20520",
        {"baseline_shift": -0.1},
        aggregation="sequence",
        at_zero=True,
    ),
    "opmd": Loss("−A·ℓ/(1 + tau)", "OPMD (Trinity-RFT), arXiv 2505.17826", {"tau": 1.0}),
    "dro": Loss(
        "−A·L + tau/2·(L − L_ref)²",
        "DRO, arXiv 2405.19107",
        {"tau": 1.0},
        aggregation="sequence",
        needs="reference",
        at_zero=True,
    ),
    "oapl": Loss(
        "(tau·(L − L_saved) − (reward − optimal_value))²",
        "OAPL, arXiv 2602.19362; A*-PO, arXiv 2505.20686",
        {"tau": 1e-3},
        aggregation="sequence",
        needs="optimal_value",
        at_zero=True,
    ),
    "awr": Loss(
        "−min(exp(A/tau), weight_max)·ℓ", "AWR, arXiv 1910.00177", {"tau": 1.0, "weight_max": 20.0}, at_zero=True
    ),
    "filtered_bc": Loss("−[A > 0]·ℓ", "filtered behavior cloning (CRR, binary), arXiv 2006.15134"),
}


def with_setting(setting: str) -> str:
    """``--loss a, b or c``: the losses that a setting belongs to."""
    *some, last = [name for name, loss in LOSSES.items() if setting in loss.settings]
    return f"--loss {', '.join(some)} or {last}" if some else f"--loss {last}"


def table() -> str:
    """The losses in Markdown."""
    lines = ["| `--loss` | loss | mean over | settings and defaults | source |", "|---|---|---|---|---|"]
    for name, loss in LOSSES.items():
        settings = ", ".join(
            f"`{key}` {value:g}" if isinstance(value, float) else f"`{key}` {value}"
            for key, value in loss.settings.items()
        )
        lines.append(f"| `{name}` | {loss.formula} | {loss.aggregation}s | {settings or '–'} | {loss.source} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The text of the documentation with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="folder of the documentation")
    page = parser.parse_args().write / PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
