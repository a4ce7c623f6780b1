"""Models for lm-eval (`--model adlm`); `adlm-lm-eval` is its command line for releases without entry points."""

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from adlm.bundled import DEFAULT
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.samplers import LeftToRight, confidence
from adlm.diffusion.sampling import Row, fill_rows
from adlm.errors import install_command, suggest_names
from adlm.likelihood import MAX_ENUMERATED
from adlm.registry import VARIADIC
from adlm.settings import SamplingSettings, SettingsError
from adlm.text.generation import check_whole_numbers
from adlm.text.lm import LM, load
from adlm.text.templates import TEXT, Hole, classify_tokens, parse_template, tokenize_piece

try:
    from lm_eval.api.model import LM as HarnessModel
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise ModuleNotFoundError(
        f"lm-eval is not installed: {install_command('eval')}", name="lm_eval"
    ) from error

NAME = "adlm"
AUTO_BATCH = 16  # requests at a time for lm-eval's batch size `auto`
MAX_GEN_TOKS = 256  # tokens to generate where the task does not set them: the harness's own default
GENERATION_KWARGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
log = logging.getLogger(__name__)


class ScoredRow(NamedTuple):
    """A row of tokens, and which of them are scored; the others are given."""

    ids: tuple[int, ...]
    is_scored: tuple[bool, ...]


def iterate_windows(total: int, start: int, room: int) -> Iterator[tuple[int, int, int]]:
    """Windows (begin, end, first scored) of at most `room` tokens with context, each token from `start` scored once."""
    if room < 2:
        raise ValueError(
            f"rows of {room} tokens have no room for context: give a model with longer rows"
        )
    begin, scored = max(0, start - 1), start
    while scored < total:
        end = min(begin + room, total)
        yield (max(0, total - room) if end == total else begin), end, scored
        begin, scored = end - 1, end


def build_rows(lm: LM, context: str, continuation: str) -> list[ScoredRow]:
    """The rows that score a continuation after its context: several where both do not fit into one."""
    encoding = lm.tokenizer.bpe.encode(context + continuation, add_special_tokens=False)
    ids = tuple(encoding.ids)
    # Blanks at the context's end belong to the continuation, as everywhere in the harness.
    start = sum(end <= len(context.rstrip()) for _, end in encoding.offsets)
    first = () if lm.tokenizer.bos_id is None else (lm.tokenizer.bos_id,)
    last = (
        (lm.tokenizer.eos_id,)
        if lm.row_format.is_framed and lm.tokenizer.eos_id is not None
        else ()
    )
    rows = []
    for begin, end, scored in (
        iterate_windows(len(ids), start, lm.row_format.longest) if start < len(ids) else ()
    ):
        is_scored = (
            [False] * len(first) + [i >= scored for i in range(begin, end)] + [False] * len(last)
        )
        if lm.row_format.is_causal:
            is_scored[0] = False  # nothing predicts the first token
        rows.append(ScoredRow((*first, *ids[begin:end], *last), tuple(is_scored)))
    return rows


def check_greedy(lm: LM, rows: Sequence[ScoredRow], batch: int) -> list[bool]:
    """Whether greedy decoding (masked: the most confident token a step) generates the scored tokens of each row."""
    most = max((sum(row.is_scored) for row in rows), default=1)
    sampler = LeftToRight() if lm.row_format.is_causal else confidence(max(1, most))
    sampling = SamplingParams(temperature=0)
    is_greedy = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        hidden = []
        for row in part:
            is_scored = torch.tensor(row.is_scored)
            tokens = torch.tensor(row.ids).masked_fill(is_scored, lm.tokenizer.mask_id)
            kinds = torch.full_like(tokens, TEXT)
            hidden.append(Row(tokens, sampler, ~is_scored, sampling=sampling, kinds=kinds))
        banned = classify_tokens(lm.tokenizer).banned
        filled = fill_rows(lm.evaluator, hidden, banned=banned)
        for row, tokens in zip(part, filled, strict=True):
            is_greedy.append(tuple(tokens.tolist()) == row.ids)
    return is_greedy


def read_options(
    options: Mapping[str, Any] | None, others: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the options of a sampler, which lm-eval's command line has as options.eta=0.04."""
    values = dict(options or {})
    for typed, value in others.items():
        section, _, name = typed.rpartition(".")
        if section != "options":
            known = list_model_args()
            problem = f"unknown name{suggest_names(typed, known)}; expected one of "
            problem += f"{', '.join(known)}; an option of a sampler is given as "
            raise SettingsError({typed: value}, f"{problem}options.{name}={value}")
        values[name] = value
    return values or None


def list_model_args() -> list[str]:
    """Return the names of all model_args."""
    parameters = inspect.signature(AdlmLM).parameters.values()
    return [each.name for each in parameters if each.kind not in VARIADIC]


class AdlmLM(HarnessModel):
    """A model for the harness; docs/lm_eval.md lists its arguments."""

    def __init__(
        self,
        pretrained: str = DEFAULT,
        draws: int = 64,
        sampler: str | None = None,
        steps: int | None = None,
        seed: int = 0,
        device: str = "auto",
        max_gen_toks: int = MAX_GEN_TOKS,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        network: str | None = None,
        objective: str | None = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.lm = load(str(pretrained), device=device, network=network, objective=objective)
        check_whole_numbers(1, draws=draws, steps=steps, max_gen_toks=max_gen_toks)
        check_whole_numbers(0, seed=seed)
        self.batch = AUTO_BATCH if str(batch_size).startswith("auto") else int(batch_size)
        check_whole_numbers(1, batch_size=self.batch)
        self.draws, self.seed, self.max_gen_toks = (
            1 if self.lm.row_format.is_causal else draws,
            seed,
            max_gen_toks,
        )
        self.sampler = sampler
        self.steps = steps
        self.options = read_options(options, others)
        self.lm.choose_sampler(
            SamplingSettings.parse("python", sampler=sampler, steps=steps, options=self.options)
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """Build the model; model_args override the command line, whose device is cuda:0 by default."""
        given = {
            name: value for name, value in (additional_config or {}).items() if value is not None
        }
        if given.get("device") == "cuda:0" and not torch.cuda.is_available():
            log.warning("this torch sees no CUDA device, which is lm-eval's default: using the CPU")
            given["device"] = "cpu"
        return cls(**given | arg_dict)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> Self:
        """Build the model from `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """The settings that the harness saves with its results."""
        bound = f"upper bound on the nll, estimated from draws above {MAX_ENUMERATED} tokens"
        kind = "exact" if self.lm.row_format.is_causal else bound
        info = {
            "model": self.lm.name,
            "method": self.lm.method,
            "step": self.lm.step,
            "likelihood": kind,
        }
        info |= {
            "draws": self.draws,
            "seed": self.seed,
            "sampler": self.sampler,
            "steps": self.steps,
            "options": self.options,
        }
        return {"adlm": info | {"length": self.lm.row_format.row, "device": str(self.lm.device)}}

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether greedy decoding generates it."""
        every = [build_rows(self.lm, *request.args) for request in requests]
        results = []
        for part in tqdm(_split(every, self.batch), "log-likelihoods", disable=disable_tqdm):
            is_greedy = iter(
                check_greedy(self.lm, [row for rows in part for row in rows], self.batch)
            )
            nats = self._sum_nats(part)
            results += [
                (-value, all(list(islice(is_greedy, len(rows))))) for value, rows in zip(nats, part)
            ]
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, window by window where it is longer than the model's rows."""
        every = [build_rows(self.lm, "", request.args[0]) for request in requests]
        parts = tqdm(_split(every, self.batch), "whole texts", disable=disable_tqdm)
        return [-value for part in parts for value in self._sum_nats(part)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to the first of its `until`; a repeated request gets another text."""
        parsed, repeats = (
            [self._parse_request(*request.args) for request in requests],
            Counter[Any](),
        )
        groups: dict[Any, list[int]] = defaultdict(
            list
        )  # places of requests that are generated together
        for place, each in enumerate(parsed):
            groups[each[2], repeats[each]].append(place)
            repeats[each] += 1
        texts = [""] * len(requests)
        parts = [(key, part) for key, group in groups.items() for part in _split(group, self.batch)]
        for (settings, repeat), part in tqdm(parts, "texts", disable=disable_tqdm):
            options = dict(settings) | {"seed": self.seed + repeat, "batch": self.batch}
            options["options"] = self.options
            rows = self.lm.layout_rows([parsed[place][0] for place in part], **options)
            self.lm.fill_rows(rows)
            for place, row in zip(part, rows, strict=True):
                texts[place] = truncate_at(row.pieces[-1][0], parsed[place][1])
        return texts

    def _sum_nats(self, part: Sequence[Sequence[ScoredRow]]) -> list[float]:
        """Nats of each request, over its rows: exact, or the bound."""
        rows = [(number, row) for number, each in enumerate(part) for row in each]
        rows.sort(
            key=lambda each: len(each[1].ids)
        )  # less padding; the noise of a row does not depend on the order
        ids, is_scored = [row.ids for _, row in rows], [row.is_scored for _, row in rows]
        estimate = self.lm.estimate_nats(
            ids, is_scored, draws=self.draws, seed=self.seed, batch=self.batch * self.draws
        )
        sums = [0.0] * len(part)
        for (number, _), nats in zip(rows, estimate.nats.tolist(), strict=True):
            sums[number] += nats
        return sums

    def _parse_request(
        self, context: str, kwargs: dict[str, Any]
    ) -> tuple[str, tuple[str, ...], tuple[Any, ...]]:
        """Return the context, where the text ends, and the arguments of `layout_rows` as pairs."""
        if unknown := [name for name in kwargs if name not in GENERATION_KWARGS]:
            known = ", ".join(GENERATION_KWARGS)
            raise ValueError(
                f"unknown generation_kwargs {', '.join(unknown)}: expected some of {known}"
            )
        until = kwargs.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        temperature = (
            float(kwargs.get("temperature") or 0.0) if kwargs.get("do_sample", True) else 0.0
        )
        context, tokens = fit_context(
            self.lm, context, int(kwargs.get("max_gen_toks") or self.max_gen_toks)
        )
        sampler, steps = self.sampler, self.steps
        if not self.lm.row_format.is_causal:
            sampler = sampler or ("confidence" if temperature == 0 else None)
            if sampler in ("confidence", "margin") and steps is None:
                steps = tokens
        settings: dict[str, Any] = {"max_new_tokens": tokens, "sampler": sampler, "steps": steps}
        settings |= {"temperature": temperature, "top_p": float(kwargs.get("top_p") or 1.0)}
        settings |= {"top_k": kwargs.get("top_k")}
        return context, until, tuple(settings.items())


def fit_context(lm: LM, context: str, tokens: int) -> tuple[str, int]:
    """The end of the context and the tokens to generate, as many as fit into a row; at most half is context."""
    longest = lm.row_format.longest
    taken = count_tokens(lm, context)
    if taken + tokens <= longest:
        return context, tokens
    generated = min(tokens, max(longest - taken, longest // 2))
    pieces = tokenize_piece(lm.tokenizer, context)[1]
    kept, keep = context, min(len(pieces), longest - generated)
    while (
        count_tokens(lm, kept) + generated > longest
    ):  # the end of a text may have more tokens by itself
        kept, keep = "".join(pieces[len(pieces) - keep :]) if keep else "", keep - 1
    log.warning(
        "a context of %d tokens and %d to generate do not fit into a row of %d: truncated to its last %d and %d",
        taken, tokens, longest, count_tokens(lm, kept), generated,
    )  # fmt: skip
    return kept, generated


def count_tokens(lm: LM, context: str) -> int:
    """Count the tokens of a text that is continued; a blank at its end belongs to the next word."""
    layout = lm.row_format.build_layout(parse_template((context, Hole.of_length(1))))
    return sum(span.end - span.start for span in layout.spans) - 1


def truncate_at(text: str, until: Sequence[str]) -> str:
    """The text up to the first occurrence of any of `until`."""
    ends = [place for stop in until if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _split(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def register() -> None:
    """Register `--model adlm` with lm-eval, where it did not read the entry points itself."""
    import lm_eval.models  # noqa: F401 (its own models first: once any is registered, it does not register them)
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    if NAME not in MODEL_REGISTRY:
        register_model(NAME)(AdlmLM)


def main() -> None:
    """lm-eval's command line, with our model registered."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
