"""Tasks whose prompts are nearly the same, by MinHash over overlapping pieces of five characters.

The similarity is the estimated Jaccard index of the sets of pieces; with 128 permutations its standard error is at most
0.045 (Broder, "On the resemblance and containment of documents", 1997).
"""

from __future__ import annotations

from collections.abc import Iterable

from gymdata.errors import require

_PERMUTATIONS = 128
#: Signatures are compared where one of 32 bands of 4 agrees: 87 % of the pairs with a similarity of 0.5, 98.8 % of those
#: with 0.6 and all but one in ten million of those with 0.8.
_BANDS = 32
_PIECE = 5


def near_duplicates(prompts: Iterable[tuple[str, str]], threshold: float) -> dict[str, str]:
    """Task → the earlier task whose prompt is at least ``threshold`` similar, of ``prompts`` (task, text). Case and white
    space do not count. A task is compared with those that are kept. Raises UsageError where the library is missing."""
    require("mix", "rensa")
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=0.0, num_perm=_PERMUTATIONS, num_bands=_BANDS)
    originals: list[tuple[str, RMinHash]] = []
    same: dict[str, str] = {}
    for task, text in prompts:
        letters = " ".join(text.lower().split())
        signature = RMinHash(num_perm=_PERMUTATIONS, seed=1)
        signature.update([letters[i : i + _PIECE] for i in range(max(1, len(letters) - _PIECE + 1))])
        candidates = (originals[number] for number in sorted(index.query(signature)))
        earlier = next((name for name, other in candidates if other.jaccard(signature) >= threshold), None)
        if earlier is None:
            index.insert(len(originals), signature)
            originals.append((task, signature))
        else:
            same[task] = earlier
    return same
