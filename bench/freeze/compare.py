"""What differs between what two trees have made of a probe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

MISSING = "(no such case)"


GONE = "(no such key)"
ANY = "(any value)"


@dataclass(frozen=True)
class Change:
    """What the value of a key may become; all that differs besides must be allowed by itself."""

    key: str  # such as seed or settings.seed
    old: Any = ANY
    new: Any = ANY

    def leave_out(self, old: Any, new: Any) -> tuple[Any, Any]:
        """Return two values of JSON without the key where it changes like this, in lists too."""
        return self._leave_out(old, new, self.key.split("."))

    def _leave_out(self, old: Any, new: Any, names: list[str]) -> tuple[Any, Any]:
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            pairs = [self._leave_out(*pair, names) for pair in zip(old, new, strict=True)]
            return [before for before, _ in pairs], [after for _, after in pairs]
        if not isinstance(old, dict) or not isinstance(new, dict):
            return old, new
        name, *rest = names
        before = old.get(name, GONE)
        after = new.get(name, GONE)
        old_kept = {key: value for key, value in old.items() if key != name}
        new_kept = {key: value for key, value in new.items() if key != name}
        if rest and name in old and name in new:
            old_kept[name], new_kept[name] = self._leave_out(before, after, rest)
            return old_kept, new_kept
        if rest or not self.fits(before, after):
            return old, new
        return old_kept, new_kept

    def fits(self, before: Any, after: Any) -> bool:
        """Return whether two values of the key are as said."""
        pairs = ((self.old, before), (self.new, after))
        return all(said == ANY or find_difference(said, value) is None for said, value in pairs)


@dataclass(frozen=True)
class Allowed:
    """Cases that may differ."""

    probe: str
    case: str  # a pattern, such as "adlm, *"
    reason: str
    changes: tuple[Change, ...] = ()  # the only ones; none: the whole value may differ

    def names(self, probe: str, case: str) -> bool:
        """Return whether this is about a case."""
        return self.probe == probe and fnmatchcase(case, self.case)

    def covers(self, probe: str, case: str, old: Any, new: Any) -> bool:
        """Return whether a case may differ as it does."""
        if not self.names(probe, case):
            return False
        if not self.changes:
            return True
        for change in self.changes:
            old, new = change.leave_out(old, new)
        return compare_case(old, new) is None


BASE = "3da4d78"  # the commit that ALLOWED compares with
DRAWS = "from left to right, tokens are drawn with the random numbers that all samplers take"
ENDS = "a row's end comes with its last text, not in an event of its own some idle steps later"
GEOMETRIC = "where a schedule leaves out a part of the bound, it is evaluated log-linearly"
MISSING_SHARE = "an estimate says how much of the bound its schedule leaves out"
ORDER = "each row passes over its own idle steps, so rows come in another order"
PADDING = "whether padding is attended to is the model's own rule, null, and not always false"
POSITIONS = "all causal rows draw their next token in a step, not only those of equal length"
SETTINGS = "settings may name a network, an objective and options, and by default name none"
RECIPES = f"{SETTINGS}; those of reasoning are only in its recipes"
PADDING_RULE = Change("settings.attend_padding", False, None)
NO_REASONING = {  # the settings of a run that does not reason
    "task": None,
    "arm": "cot",
    "path": None,
    "tokenizer": None,
    "hops": 4,
    "stages": None,
    "stage_steps": 500,
    "slots_per_stage": 1,
    "revisit": 0.1,
    "label_weight": 1.0,
    "tests": 4000,
    "samplers": ["confidence"],
}
NAMED = (
    Change("model.network", GONE, None),
    Change("model.options", GONE, None),
    Change("objective.name", GONE, None),
    Change("objective.anchor_options", GONE, {}),
)
BOUND = (Change("val/nll"), Change("val/ppl"), Change("val/stderr"))
RANDOM_DRAWS = ("plain", "nucleus", "top_k")
ALLOWED = (
    *(Allowed("causal", f"*, {draw}, *: texts", DRAWS) for draw in RANDOM_DRAWS),
    *(Allowed("causal", f"*, {draw}, *: frames", DRAWS) for draw in RANDOM_DRAWS),
    Allowed("causal", "*, defaults: texts", DRAWS),
    Allowed("commands", "causal: texts", DRAWS),
    Allowed("transformers", "ar, left to right: tokens", DRAWS),
    Allowed("transformers", "ar, seed of torch: tokens", DRAWS),
    Allowed("server", "causal*: texts", DRAWS),
    Allowed("server", "causal several: log-probabilities", DRAWS),
    Allowed("server", "causal*, stream: events", DRAWS),
    Allowed("server", "causal, stream: order", DRAWS),
    Allowed("server", "*causal several, stream: order", POSITIONS),
    Allowed("server", "causal, drafts: events", DRAWS),
    Allowed("server", "*, stream: ends apart", ENDS),
    Allowed("server", "several prompts, stream: order", ORDER),
    Allowed("server", "tokens, stream: order", ORDER),
    Allowed("training", "adlm geometric, *: metrics of validation", GEOMETRIC, BOUND),
    Allowed("ppl", "*: settings", MISSING_SHARE, (Change("missing", GONE),)),
    Allowed("ppl", "*: beyond the entries", PADDING, (PADDING_RULE,)),
    Allowed("reasoning", "*: settings", SETTINGS, NAMED),
    Allowed("recipes", "*", RECIPES, (*NAMED, Change("reasoning", NO_REASONING, GONE))),
)


@dataclass
class Difference:
    """Where two values differ, and by how much: inf where they are no numbers."""

    place: str
    size: float
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.place or 'value'}: {shorten(self.old)} became {shorten(self.new)}"


@dataclass
class Comparison:
    """What the two trees have made of a probe."""

    probe: str
    cases: int
    differing: dict[str, Difference] = field(default_factory=dict)  # by case
    allowed: dict[str, str] = field(default_factory=dict)  # reasons by case, of those that differ
    unused: list[Allowed] = field(default_factory=list)  # that allow what does not happen
    problem: str = ""
    seconds: float = 0.0

    @property
    def wrong(self) -> dict[str, Difference]:
        """The cases that differ and are not allowed to."""
        return {case: each for case, each in self.differing.items() if case not in self.allowed}

    @property
    def is_fine(self) -> bool:
        return not self.problem and not self.wrong and not self.unused

    def describe(self) -> str:
        """Return what is equal and what is not, in a few words."""
        if self.problem:
            return "failed"
        if not self.differing:
            return f"all {self.cases:,} cases are equal"
        equal = self.cases - len(self.differing)
        parts = [f"{equal:,} of {self.cases:,} cases are equal"]
        if self.allowed:
            parts.append(f"{len(self.allowed):,} differ for a reason")
        if self.wrong:
            parts.append(f"{len(self.wrong):,} differ without one")
        return ", ".join(parts)

    def group_by_reason(self) -> dict[str, list[str]]:
        """Return the cases that may differ by the reason."""
        groups: dict[str, list[str]] = {}
        for case, reason in self.allowed.items():
            groups.setdefault(reason, []).append(case)
        return groups


def shorten(value: Any) -> str:
    """Return a value for the table."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def find_difference(old: Any, new: Any, place: str = "") -> Difference | None:
    """Return the largest difference of two values of JSON, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            gone = {key: old[key] for key in old.keys() - new.keys()}
            added = {key: new[key] for key in new.keys() - old.keys()}
            return Difference(f"{place} keys".lstrip(), math.inf, gone, added)
        parts = (find_difference(old[key], new[key], f"{place}.{key}".lstrip(".")) for key in old)
        return pick_largest(parts)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return pick_largest(find_difference(a, b, f"{place}[{i}]") for i, (a, b) in pairs)
    if is_number(old) and is_number(new):
        return None if old == new else Difference(place, float(abs(old - new)), old, new)
    if old == new and type(old) is type(new):
        return None
    return Difference(place, math.inf, old, new)


def pick_largest(differences: Iterable[Difference | None]) -> Difference | None:
    """Return the largest difference, of equal ones the first."""
    present = [each for each in differences if each is not None]
    return max(present, key=lambda each: each.size, default=None)


def compare_arrays(old: np.ndarray, new: np.ndarray) -> Difference | None:
    """Return the difference of two arrays, which are equal if all bits are."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        kinds = [f"{each.dtype}{list(each.shape)}" for each in (old, new)]
        return Difference("shape", math.inf, *kinds)
    if old.tobytes() == new.tobytes():
        return None
    before = old.astype(np.float64)
    after = new.astype(np.float64)
    is_same = (before == after) | (np.isnan(before) & np.isnan(after))
    apart = np.nan_to_num(np.abs(before - after), nan=np.inf)
    apart[is_same] = 0
    place = np.unravel_index(int(apart.argmax()), apart.shape)
    position = [int(i) for i in place]
    return Difference(f"at {position}", float(apart[place]), old[place].item(), new[place].item())


def compare_case(old: Any, new: Any) -> Difference | None:
    """Return the difference of two values, arrays or JSON."""
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return compare_arrays(old, new)
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return Difference("kind", math.inf, type(old).__name__, type(new).__name__)
    return find_difference(old, new)


def read_cases(folder: Path) -> dict[str, Any]:
    """Read what a probe has written."""
    values: dict[str, Any] = json.loads((folder / "cases.json").read_text("utf-8"))
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        for name, value in values.items():
            if isinstance(value, dict) and value.keys() == {"array"}:
                values[name] = arrays[value["array"]]
    return values


def compare_probe(
    name: str, old: Path, new: Path, listed: Sequence[Allowed] = (), *, is_quick: bool = False
) -> Comparison:
    """Compare what two trees have made of a probe; a case that one of them lacks differs.

    What is listed must happen, or a fault that looks like it would be missed some day. Only a quick
    run may lack the cases.
    """
    before = read_cases(old)
    after = read_cases(new)
    cases = before | after
    comparison = Comparison(name, len(cases))
    used = []
    for case in cases:
        old_value = before.get(case, MISSING)
        new_value = after.get(case, MISSING)
        difference = compare_case(old_value, new_value)
        if difference is None:
            continue
        comparison.differing[case] = difference
        for each in listed:
            if each.covers(name, case, old_value, new_value):
                comparison.allowed.setdefault(case, each.reason)
                used.append(each)
    for each in listed:
        is_there = not is_quick or any(each.names(name, case) for case in cases)
        if each.probe == name and is_there and each not in used:
            comparison.unused.append(each)
    return comparison
