"""All figures of a set of texts together: Gen-PPL, MAUVE and entropy are not to be had without each other.

Each is easily fooled alone. Text that repeats itself has a low Gen-PPL, random text a high entropy, and MAUVE says
little without that of real text. So the same figures of held-out text stand beside them, from as many texts, each cut
to the length of a sample: one half of the reference is what MAUVE compares with, the other stands where the samples do.

Then all lose their last eighth. A model that is told where a text ends writes an end, with a full stop; a passage that
is cut to its length has none. A judge's state at the last token is mostly about that: MAUVE would tell ends from
middles, not samples from real text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adlm.evaluate.archive import Archive, fill
from adlm.evaluate.bleu import GROUPS, NOTHING, ORDERS, self_bleu
from adlm.evaluate.divergence import Mauve, mauve_of, settings_of
from adlm.evaluate.diversity import Figure, cut_alike, distinct, entropy, repetition
from adlm.evaluate.generative import GenPpl, gen_ppl_of
from adlm.evaluate.judges import Judge, Piece
from adlm.evaluate.verdicts import BATCH, Request, Told, Verdict

DISTINCT, REPETITION = (1, 2, 3), 4  # orders of n-grams
SEEDS = (0, 1, 2, 3, 4)  # of MAUVE's k-means
LEAST = max(ORDERS, REPETITION, *DISTINCT)  # tokens of a text that n-grams can be counted in
EIGHTH = 8  # of a text, so much of its end is left out
MEND = "leave such texts out and say so, or write longer ones"


@dataclass(frozen=True)
class Figures:
    """What a set of texts is worth, by one judge."""

    gen_ppl: GenPpl
    mauve: Mauve
    entropy: Figure
    distinct: dict[int, Figure]
    repetition: Figure
    self_bleu: Figure

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"gen_ppl": self.gen_ppl.as_dict(), "mauve": self.mauve.as_dict(), "entropy": asdict(self.entropy)}
        found |= {f"distinct_{n}": asdict(figure) for n, figure in self.distinct.items()}
        return found | {f"repetition_{REPETITION}": asdict(self.repetition), "self_bleu": asdict(self.self_bleu)}


@dataclass(frozen=True)
class Quality:
    """The figures of samples, those of as much real text, and every choice that they depend on."""

    samples: Figures
    reference: Figures
    settings: dict[str, Any]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {"samples": self.samples.as_dict(), "reference": self.reference.as_dict()}
        return figures | {"settings": self.settings, "warnings": list(self.warnings)}


@dataclass(frozen=True)
class Plan:
    """What there is to judge: samples, what they are compared with, and what stands beside them, all cut alike."""

    judge: Judge
    features: Judge
    sets: list[list[Piece]]
    tokens_before: int  # of the samples, when they were whole
    window: int | None
    asked: list[list[Request]]  # of each set

    @property
    def requests(self) -> list[Request]:
        """All that judges are asked."""
        return [request for requests in self.asked for request in requests]


def quality(
    samples: Sequence[str],
    reference: Sequence[str],
    judge: Judge,
    features: Judge | None = None,
    *,
    until_eos: bool = False,
    window: int | None = None,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
    batch: int = BATCH,
    on_texts: Told | None = None,
) -> Quality:
    """The figures of samples and of real text: one half of `reference` is compared with, the other stands beside.

    `judge` gives Gen-PPL and its tokenizer the tokens of all other figures; `features`, the judge itself unless told,
    what MAUVE compares. The reference needs twice as many texts as there are samples (see `passages`).
    """
    plan, archive = planned(samples, reference, judge, features, window=window), Archive()
    fill(archive, plan.requests, batch=batch, on_texts=on_texts)
    return figures_of(plan, archive, until_eos=until_eos, seeds=seeds, buckets=buckets)


def planned(
    samples: Sequence[str],
    reference: Sequence[str],
    judge: Judge,
    features: Judge | None = None,
    *,
    window: int | None = None,
) -> Plan:
    """Which texts are to be judged, in the judges' tokens."""
    judge.require_causal()
    features = features or judge
    wholes = [judge.encode(texts) for texts in halves(samples, reference)]
    for pieces, name in zip(wholes, ("samples", "texts of the reference", "texts of the reference"), strict=True):
        require_long(pieces, name)
    sets = [[without_end(piece) for piece in pieces] for pieces in cut_together(wholes)]
    for pieces in sets:
        require_long(pieces, "texts, cut to the lengths of the others,")
    asked = [asked_of(judge, features, pieces, number != 1, window) for number, pieces in enumerate(sets)]
    return Plan(judge, features, sets, sum(map(len, wholes[0])), window, asked)


def asked_of(
    judge: Judge, features: Judge, pieces: Sequence[Piece], with_nats: bool, window: int | None
) -> list[Request]:
    """Nats of the judge and features of the other: in one pass if they are one."""
    if features is judge:
        return [Request(judge, pieces, with_nats, True, window)]
    again = features.encode([piece.text for piece in pieces])
    most = features.context - sum(map(len, features.ends))
    size = window if window is None else min(window, most)  # the window is the judge's; an encoder may read less
    own = [Request(judge, pieces, True, False, window)] if with_nats else []
    return [*own, Request(features, again, False, True, size)]


def figures_of(
    plan: Plan,
    archive: Archive,
    *,
    until_eos: bool = False,
    seeds: Sequence[int] = SEEDS,
    buckets: int | None = None,
) -> Quality:
    """All figures of a plan whose texts were judged."""
    judge, sets = plan.judge, plan.sets
    own, compared, beside = (together([archive.verdict(each) for each in requests]) for requests in plan.asked)
    assert compared.features is not None
    found = []
    for pieces, verdict in ((sets[0], own), (sets[2], beside)):
        assert verdict.features is not None
        rows = [piece.ids for piece in pieces]
        figures = Figures(
            gen_ppl_of(judge, pieces, verdict.nats, until_eos=until_eos),
            mauve_of(compared.features, verdict.features, seeds=seeds, buckets=buckets),
            entropy(rows),
            {n: distinct(rows, n) for n in DISTINCT},
            repetition(rows, REPETITION),
            self_bleu(rows),
        )
        found.append(figures)
    kept, kind = sum(len(piece) for piece in sets[0]), plan.features.is_causal
    settings = {
        "judge": judge.settings,
        "features": plan.features.settings,
        "features_are": "last layer at the last token" if kind else "mean of the last layer over tokens",
        "tokens_of": f"the tokenizer of {judge.name}, for every figure but MAUVE",
        "first_token_is_scored": bool(judge.ends[0]),
        "until_eos": until_eos,
        "window": plan.window,
        "stride": None if plan.window is None else plan.window // 2,
        "texts": len(sets[0]),
        "tokens": kept,
        "share_of_samples_cut": 1 - kept / plan.tokens_before,
        "cut": "samples and reference cut to the same lengths, the longest with the longest and so on down, and all "
        f"without their last 1/{EIGHTH}",
        "mauve": settings_of(seeds, buckets),
        "self_bleu": f"{ORDERS}-grams, all others as references, no match counts {NOTHING}, {GROUPS} jackknife groups",
    }
    return Quality(found[0], found[1], settings, found[0].mauve.warnings)


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """What several passes found in the same texts: nats of one, features of one."""
    nats = next((each.nats for each in verdicts if each.nats), [])
    return Verdict(nats, next((each.features for each in verdicts if each.features is not None), None))


def halves(samples: Sequence[str], reference: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """The samples, what they are compared with, and what stands beside them: equally many of each."""
    n = len(samples)
    if n < 2:
        raise ValueError(f"the figures of a set need at least 2 texts, got {n}: a hundred or more say something (--n)")
    if len(reference) < 2 * n:
        raise ValueError(
            f"{n} samples need {2 * n} texts of the reference, one half to compare with, one to stand beside them, and "
            f"there are {len(reference)}: give more, or judge fewer samples"
        )
    return samples, reference[:n], reference[n : 2 * n]


def require_long(pieces: Sequence[Piece], what: str) -> None:
    """Refuse texts that n-grams cannot be counted in."""
    if empty := [number for number, piece in enumerate(pieces) if not piece.text.strip()]:
        raise ValueError(f"{len(empty)} of {len(pieces)} {what} are empty, number {empty[0]} among them: {MEND}")
    if short := [number for number, piece in enumerate(pieces) if len(piece) < LEAST]:
        raise ValueError(
            f"{len(short)} of {len(pieces)} {what} have fewer than {LEAST} tokens (number {short[0]} has "
            f"{len(pieces[short[0]])}): {MEND}"
        )


def cut_together(sets: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Sets of equally many texts cut to the same lengths."""
    rows: list[Any] = [[piece.ids for piece in pieces] for pieces in sets]
    for other in (*range(1, len(rows)), *range(1, len(rows) - 1)):  # the first ends as the shortest, then all fit it
        rows[0], rows[other] = cut_alike(rows[0], rows[other])
    return [[piece.cut(len(row)) for piece, row in zip(pieces, each, strict=True)] for pieces, each in zip(sets, rows)]


def without_end(piece: Piece) -> Piece:
    """A text without its last eighth: no text of any set then ends where its writer ended it."""
    return piece.cut(len(piece) - len(piece) // EIGHTH)
