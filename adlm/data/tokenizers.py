"""Tokenizers: those of the paper, any `tokenizer.json`, or a byte-level BPE trained on the data."""

import gzip
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from adlm.data.hub import download_files
from adlm.errors import suggest_names
from adlm.files import read_bounded, read_json, write_atomically, write_json

BYTES = 256
MAX_VOCAB_SIZE = 2**24
END_OF_TEXT = "<|endoftext|>"
BUNDLED = ("gpt2", "bert-base-uncased")
WEIGHTS = (
    Path(__file__).resolve().parents[1] / "weights"
)  # bundled models, each with its tokenizer.json
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Keys of special tokens in a configuration; the first one that is present counts.
CONFIG_KEYS = {"bos": ["bos_token", "cls_token"], "eos": ["eos_token", "sep_token"]}
CONFIG_KEYS |= {"pad": ["pad_token"], "mask": ["mask_token"]}
WELL_KNOWN = {
    "bos": ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", END_OF_TEXT),
    "eos": ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", END_OF_TEXT),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to ids and back; `vocab_size` counts the mask, which is the last id if the tokenizer has none."""

    bpe: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    own_mask_id: int | None = None
    name: str = "bpe"
    source: str | None = (
        None  # the tokenizer.json as it was read; its hash identifies the tokenizer
    )

    def __post_init__(self) -> None:
        if self.vocab_size > MAX_VOCAB_SIZE:
            problem = f"{self.name} has ids up to {self.vocab_size - 1:,}: expected fewer than {MAX_VOCAB_SIZE:,}"
            raise ValueError(f"{problem}; check the ids of its vocabulary")
        self.bpe.no_padding()
        self.bpe.no_truncation()
        self.bpe.encode_special_tokens = (
            True  # "[MASK]" in a text is six characters, never the mask
        )
        for token_id in [token_id for token_id in self.special_ids if token_id is not None]:
            if (token := self.bpe.id_to_token(token_id)) is None:
                raise ValueError(
                    f"{self.name}: special token {token_id} is not in the vocabulary: check its files"
                )
            if token_id in self.encode(token):
                problem = f"{self.name}: the text {token!r} is encoded to special token {token_id}"
                raise ValueError(
                    f"{problem}: mark it as special in tokenizer.json (added_tokens, special: true)"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.bpe.encode_special_tokens = True  # which a pickled tokenizers.Tokenizer loses

    @property
    def special_ids(self) -> tuple[int | None, ...]:
        """The ids in the order of `CONFIG_KEYS`, None for a token that the tokenizer lacks."""
        return self.bos_id, self.eos_id, self.pad_id, self.own_mask_id

    @cached_property
    def max_id(self) -> int:
        """The largest id of the vocabulary, which may have gaps."""
        return max(self.bpe.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def vocab_size(self) -> int:
        return self.max_id + (1 if self.own_mask_id is not None else 2)

    @property
    def mask_id(self) -> int:
        return self.vocab_size - 1 if self.own_mask_id is None else self.own_mask_id

    @cached_property
    def json(self) -> str:
        return self.bpe.to_str() if self.source is None else self.source

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode("utf-8")).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.bpe.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of all texts, at least one, in one array, and the number of ids of each."""
        encodings = self.bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        return np.concatenate(ids), np.array([len(each) for each in ids], dtype=np.int64)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of the ids; a mask among them is an error."""
        for position, token in enumerate(ids):
            if token == self.mask_id or not 0 <= token < self.vocab_size:
                problem = (
                    "the mask"
                    if token == self.mask_id
                    else f"outside the vocabulary of {self.vocab_size}"
                )
                raise ValueError(
                    f"token {token} at position {position} is {problem}: only text can be decoded"
                )
        return self.bpe.decode(list(ids), skip_special_tokens=skip_special)

    def save(self, folder: Path | str) -> None:
        """Write `tokenizer.json`, and `tokenizer_config.json` with the names of the special tokens."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        ids = zip(CONFIG_KEYS, self.special_ids)
        names = {f"{role}_token": None if i is None else self.bpe.id_to_token(i) for role, i in ids}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "name": self.name, **names}
        write_json(folder / "tokenizer_config.json", config)
        write_atomically(folder / "tokenizer.json", self.json.encode("utf-8"))  # newlines stay

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """Load what `save` wrote, or any folder with a `tokenizer.json`."""
        return _load_file(Path(folder) / "tokenizer.json")


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load a tokenizer: a bundled one or model by name, a `tokenizer.json`, a folder that holds one, or a Hub name."""
    name = str(name_or_path)
    if name in BUNDLED:
        packed = resources.files("adlm.data").joinpath("bundled", f"{name}.json.gz").read_bytes()
        return _parse_json(gzip.decompress(packed).decode("utf-8"), {}, name)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    bundled_models = {folder.name for folder in WEIGHTS.iterdir()}
    path = WEIGHTS / name if name in bundled_models else Path(name_or_path)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.is_file():
        return _load_file(path)
    if (
        path.exists()
        or path.suffix == ".json"
        or path.is_absolute()
        or name.startswith(".")
        or name.count("/") > 1
    ):
        raise ValueError(f"tokenizer {name!r} has no tokenizer.json: {EXPECTED_NAME}")
    if "/" not in name and (hint := suggest_names(name, [*BUNDLED, *BUILT_IN, *bundled_models])):
        raise ValueError(
            f"unknown tokenizer {name!r}{hint}: give one of these, a file, or OWNER/{name} for the Hub's"
        )
    try:
        return _load_file(
            download_files(name, "tokenizer.json", *CONFIG_FILES) / "tokenizer.json", name=name
        )
    except FileNotFoundError as error:
        raise ValueError(
            f"tokenizer {name!r} could not be loaded ({error}): {EXPECTED_NAME}"
        ) from error


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, end_token: str | None = None, name: str = "bpe"
) -> Tokenizer:
    """Train a byte-level BPE; `vocab_size` counts the mask, and the end token where there is one."""
    specials = [] if end_token is None else [AddedToken(end_token, special=True, normalized=False)]
    if vocab_size <= (least := BYTES + len(specials)):
        raise ValueError(
            f"vocab_size is {vocab_size}: expected more than {least}, which leaves an id for the mask"
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )  # sorted: this order gives the ids of the bytes
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=alphabet,
        special_tokens=specials,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    end_id = None if end_token is None else bpe.token_to_id(end_token)
    return Tokenizer(bpe, bos_id=end_id, eos_id=end_id, name=name)


def _make_byte_tokenizer() -> Tokenizer:
    """Make a tokenizer of bytes, in their order, the end of text and the mask."""
    # In a byte-level vocabulary a visible byte is its own character; the others count from 256 on.
    visible = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(BYTES) if byte not in visible]
    vocabulary = {
        chr(byte if byte in visible else BYTES + hidden.index(byte)): byte for byte in range(BYTES)
    }
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(bpe, bos_id=BYTES, eos_id=BYTES, name="bytes")


def _make_character_tokenizer() -> Tokenizer:
    """Make the lineage's tokenizer for text8: eight special tokens, letters and the space."""
    specials = ["[CLS]", "[SEP]", "[BOS]", "[EOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]"]
    vocabulary = {token: i for i, token in enumerate([*specials, *ascii_lowercase, " "])}
    bpe = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    bpe.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), behavior="isolated")
    bpe.decoder = decoders.Fuse()
    bpe.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    bos, eos, pad, mask = (vocabulary[f"[{role}]"] for role in ("BOS", "EOS", "PAD", "MASK"))
    return Tokenizer(bpe, bos, eos, pad, mask, name="characters")


BUILT_IN = {"bytes": _make_byte_tokenizer, "characters": _make_character_tokenizer}
EXPECTED_NAME = f"give a file, a folder that holds one, {', '.join([*BUNDLED, *BUILT_IN])}, or a name on the Hub"


def _load_file(path: Path, name: str | None = None) -> Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"no tokenizer at {path}: expected a tokenizer.json of the `tokenizers` library"
        )
    config: dict[str, Any] = {}
    for other in reversed(CONFIG_FILES):  # the first of them takes precedence
        if (path.parent / other).is_file():
            content = read_json(path.parent / other)
            if not isinstance(content, dict):
                raise ValueError(f"{path.parent / other} is no JSON object: make or fetch it again")
            config |= content
    name = (
        name
        or config.get("name")
        or (path.parent.name if path.name == "tokenizer.json" else path.stem)
    )
    return _parse_json(read_bounded(path), config, str(name))


def _parse_json(text: str, config: dict[str, Any], name: str) -> Tokenizer:
    try:
        bpe = tokenizers.Tokenizer.from_str(text)
    except (
        BaseException
    ) as error:  # the library raises plain Exception, and what is none where it panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(
            f"{name} is not a sound tokenizer.json ({error}): make or fetch it again"
        ) from error
    if dropout := getattr(bpe.model, "dropout", None):
        raise ValueError(
            f"{name} has model.dropout {dropout}, and a text must have one encoding: set it to null"
        )
    added = {token.content for token in bpe.get_added_tokens_decoder().values()}
    ids = []
    for (
        role,
        keys,
    ) in (
        CONFIG_KEYS.items()
    ):  # what the configuration names (null: nothing), else a well-known name
        configured = [config[key] for key in keys if key in config]
        names = [token for token in configured if token is not None]
        if not configured:
            names = [token for token in WELL_KNOWN[role] if token in added]
        token = next(iter(names), None)
        token = token.get("content", token) if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise ValueError(
                f"{name} names {token!r:.80} as {role}: expected a token or its content; fetch it again"
            )
        ids.append(None if token is None else bpe.token_to_id(token))
    bos, eos, pad, mask = ids
    return Tokenizer(bpe, bos, eos, pad, mask, name, text)
