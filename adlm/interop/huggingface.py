"""Exports models to Hugging Face folders (docs/huggingface.md); importing this registers them with transformers."""

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
import torch
import yaml
from tokenizers import AddedToken, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from adlm.data.tokenizers import Tokenizer
from adlm.files import (
    create_partial_folder,
    publish_folder,
    write_atomically,
    write_json,
    write_tensors,
)
from adlm.interop.modeling_adlm import AdlmConfig, AdlmForCausalLM, AdlmForMaskedLM
from adlm.models.costs import count_parameters
from adlm.models.folder import EXPORTED_PREFIX, EXPORTED_WEIGHTS, LoadedModel, require_transformer
from adlm.text.lm import LM
from adlm.text.templates import classify_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASK_TOKEN = "<|mask|>"  # of tokenizers without their own; "[MASK]" in a text stays text
MODELING, SCHEDULING = "adlm.interop.modeling_adlm", "adlm.interop.scheduling_adlm"
PIPELINE = "adlm.interop.pipeline_adlm"
PACKAGE = Path(__file__).resolve().parents[1]

AutoConfig.register("adlm", AdlmConfig, exist_ok=True)
AutoModelForMaskedLM.register(AdlmConfig, AdlmForMaskedLM, exist_ok=True)
AutoModelForCausalLM.register(AdlmConfig, AdlmForCausalLM, exist_ok=True)


def export(
    lm: LM, folder: str | Path, *, dtype: str = "float32", report: str | Path | None = None
) -> Path:
    """Write a model as a Hugging Face folder, its weights in float32 or bfloat16, with the metrics of a report."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
    require_transformer(lm.loaded.network, "an export")
    final, loaded = Path(folder), lm.loaded
    if final.exists() and any(final.iterdir()):
        raise ValueError(f"{final} is not empty: give a new folder")
    folder = create_partial_folder(final)
    (folder / "model").mkdir()
    tokenizer = export_tokenizer(lm, folder)
    weights = {
        EXPORTED_PREFIX + name: tensor.to(DTYPES[dtype])
        for name, tensor in lm.model.state_dict().items()
        if not (lm.model.config.tied and name == "head.weight")
    }
    write_tensors(folder / EXPORTED_WEIGHTS, weights, metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": dict.fromkeys(weights, EXPORTED_WEIGHTS),
    }
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", build_hub_config(loaded, tokenizer, dtype))
    write_code(folder, MODELING)
    card = write_card(lm, dtype)
    if report is not None:
        card = add_report(card, Path(lm.name).name, Path(report), folder)
    write_atomically(folder / "README.md", card.encode("utf-8"))
    if not lm.model.config.is_causal:
        write_diffusers_files(lm, folder)
    publish_folder(folder, final)
    return final


def export_tokenizer(lm: LM, folder: Path) -> Tokenizer:
    """Write the tokenizer with a mask and a pad token; it puts the tokens that begin and end a text around it."""
    own, shape = lm.tokenizer, lm.model.config
    bpe = tokenizers.Tokenizer.from_str(own.json)
    mask_id = own.own_mask_id
    if mask_id is None and shape.mask_id is not None:
        mask_id = shape.mask_id
        token = AddedToken(
            MASK_TOKEN, lstrip=classify_tokens(own).joins_blanks, normalized=False, special=True
        )
        bpe.add_special_tokens([token])
        if (actual := bpe.token_to_id(MASK_TOKEN)) != mask_id:
            raise ValueError(
                f"{MASK_TOKEN} gets id {actual}, the model's mask is {mask_id}: set its mask_token"
            )
    names = {i: bpe.id_to_token(i) for i in (own.bos_id, own.eos_id) if i is not None}
    first = [names[own.bos_id]] if own.bos_id is not None else []
    last = [names[own.eos_id]] if own.eos_id is not None and lm.row_format.is_framed else []
    single, pair, special = (
        [*first, "$A", *last],
        [*first, "$A", "$B", *last],
        [(t, i) for i, t in names.items()],
    )
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    is_kept = isinstance(bpe.post_processor, processors.ByteLevel)  # it changes offsets alone
    bpe.post_processor = (
        processors.Sequence([bpe.post_processor, template]) if is_kept else template
    )
    pad_id = next((i for i in (own.pad_id, own.eos_id, mask_id) if i is not None), None)
    exported = Tokenizer(bpe, own.bos_id, own.eos_id, pad_id, mask_id, own.name)
    exported.save(folder)
    path = folder / "tokenizer_config.json"
    write_json(
        path,
        json.loads(path.read_text("utf-8"))
        | {"model_max_length": shape.length, "padding_side": "left"},
    )
    return exported


def build_hub_config(loaded: LoadedModel, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Return a config.json that both libraries read: ours and the keys of transformers."""
    shape = loaded.model.config
    special = classify_tokens(tokenizer).special[: shape.vocab_size]
    beyond = range(len(special), shape.vocab_size)  # ids without a token
    kind = "CausalLM" if shape.is_causal else "MaskedLM"
    modeling, ids = (
        MODELING.rpartition(".")[2],
        (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id),
    )
    return loaded.describe(loaded.model).model_dump() | {
        "model_type": AdlmConfig.model_type,
        "architectures": [f"AdlmFor{kind}"],
        "auto_map": {
            "AutoConfig": f"{modeling}.AdlmConfig",
            f"AutoModelFor{kind}": f"{modeling}.AdlmFor{kind}",
        },
        "dtype": dtype,
        "tie_word_embeddings": shape.tied,
        "special_token_ids": [*special.nonzero()[:, 0].tolist(), *beyond],
        "transformers_version": version("transformers"),
        **{
            f"{role}_token_id": token
            for role, token in zip(("bos", "eos", "pad"), ids, strict=True)
        },
    }


def write_diffusers_files(lm: LM, folder: Path) -> None:
    """Add what `DiffusionPipeline.from_pretrained` reads: a pipeline, and the code of every component in its folder."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    may_end = not lm.row_format.is_framed
    banned = [
        token
        for token in config["special_token_ids"]
        if not (may_end and token == lm.tokenizer.eos_id)
    ]
    index = {
        "_class_name": ["pipeline_adlm", "AdlmPipeline"],
        "model": ["modeling_adlm", "AdlmForMaskedLM"],
        "scheduler": ["scheduling_adlm", "AdlmScheduler"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    }
    write_json(folder / "model_index.json", index)
    write_code(folder, PIPELINE)
    write_code(folder / "model", MODELING)
    write_json(folder / "model" / "config.json", config)
    write_code(folder / "scheduler", SCHEDULING)
    scheduler = {
        "_class_name": "AdlmScheduler",
        "banned_token_ids": banned,
        "block_length": lm.model.config.length,
    }
    write_json(folder / "scheduler" / "scheduler_config.json", scheduler)
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, folder / "tokenizer" / name)


def write_code(folder: Path, module: str) -> None:
    """Write the code files of a module and of all that it imports from this package."""
    folder.mkdir(exist_ok=True)
    for name, source in collect_code(module).items():
        write_atomically(folder / f"{name}.py", source.encode("utf-8"))


def collect_code(module: str) -> dict[str, str]:
    """Return the sources of a module and of all that it imports from this package, by the names of flat files."""
    files, todo = dict[str, str](), [module]
    while todo:
        each = todo.pop()
        if name_code_file(each) not in files:
            source, needed = rewrite_imports(find_source(each).read_text("utf-8"))
            head = (
                f"# Copied from {each} of adlm {version('adlm')} (Apache-2.0); change it there.\n"
            )
            files[name_code_file(each)] = head + source
            todo += needed
    first, *others = (
        files  # transformers and diffusers copy only the files that the first one imports itself
    )
    lines = [f"    from .{name} import __name__ as _\n" for name in sorted(others)]
    files[first] += (
        "\nif False:  # never run: the files to copy\n" + "".join(lines) if lines else ""
    )
    return files


def find_source(module: str) -> Path:
    """Return the file of a module of this package."""
    return PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")


def name_code_file(module: str) -> str:
    """Return the flat name of a module of this package: that of transformers for a model, else its path."""
    return module.removeprefix("adlm.interop.").replace(".", "_")


def rewrite_imports(source: str) -> tuple[str, list[str]]:
    """Make a module's imports from this package relative to its folder; return the source and the imported modules."""
    needed: list[str] = []

    def make_relative(match: re.Match[str]) -> str:
        indent, module, names = match.groups()
        if find_source(module).is_file():
            needed.append(module)
            return f"{indent}from .{name_code_file(module)} import {names}"
        modules = {name: f"{module}.{name}" for name in names.split(", ")}
        needed.extend(modules.values())
        return (
            indent
            + "from . import "
            + ", ".join(f"{name_code_file(m)} as {name}" for name, m in modules.items())
        )

    source = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n)+", "", source, flags=re.MULTILINE)
    source = re.sub(
        r"^( *)from (adlm(?:\.\w+)*) import (\([^)]*\)|.*)",
        make_relative,
        source,
        flags=re.MULTILINE,
    )
    # transformers requires what a file imports, except in `try`, and triton comes with CUDA alone.
    source = re.sub(
        r"^(import triton.*)", r"try:\n    \1\nfinally:\n    pass", source, flags=re.MULTILINE
    )
    # Several copies of an operator may be loaded into one process.
    return source.replace('custom_op("adlm::', 'custom_op(__name__.replace(".", "_") + "::'), needed


def write_card(lm: LM, dtype: str) -> str:
    """Return the model card."""
    shape, is_causal, title = lm.model.config, lm.model.config.is_causal, Path(lm.name).name
    auto_class = "AutoModelForCausalLM" if is_causal else "AutoModelForMaskedLM"
    size, mask = (
        f"{count_parameters(shape):,}",
        "" if lm.tokenizer.own_mask_id is not None else f" ({MASK_TOKEN})",
    )
    layers = f"{shape.anchor_layers} layers of anchor network and " if shape.anchor_layers else ""
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if is_causal else "fill-mask"}
tags: [adlm, {lm.method}, {"autoregressive" if is_causal else "masked-diffusion"}]
---
# {title}

A language model of the method `{lm.method}` ([arXiv 2505.18456](https://arxiv.org/abs/2505.18456)), {size} parameters:
dim {shape.dim}, {shape.heads} heads, {layers}{shape.denoiser_layers} of the last stage; rows of {shape.length} tokens
({lm.loaded.rows}), vocabulary of {shape.vocab_size:,} (`{lm.tokenizer.name}`), {lm.step:,} training steps, {dtype}.

```python
from transformers import AutoTokenizer, {auto_class}

tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)
model = {auto_class}.from_pretrained("{title}", trust_remote_code=True)
tokens = model.generate(**tokenizer("It was", return_tensors="pt"), max_new_tokens=64, seed=0)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```

{"" if is_causal else f"Mask tokens{mask} in a text are filled. diffusers loads the folder as a pipeline, too. "}Without
`trust_remote_code`, `import adlm.interop.huggingface` with this package installed; `adlm.load` reads the folder too.
"""


def add_report(card: str, name: str, report: Path, folder: Path) -> str:
    """Return a card with the metrics and the text of a report of `adlm eval report`; copy its plots."""
    parts = (report / "report.md").read_text("utf-8").split("---\n", 2)
    front = yaml.safe_load(parts[1]) if len(parts) == 3 else {}
    if not (index := [entry for entry in front.get("model-index", []) if entry["name"] == name]):
        raise ValueError(
            f"{report / 'report.md'} has no metrics of {name!r}: give a report on this model"
        )
    for plot in report.glob("*.svg"):
        shutil.copyfile(plot, folder / plot.name)
    matter = yaml.safe_dump(
        {"license": front["license"], "language": front["language"], "model-index": index}
    )
    return card.replace("---\n# ", f"{matter}---\n# ", 1) + re.sub(
        "^#", "##", parts[2].lstrip(), flags=re.MULTILINE
    )


def push_to_hub(folder: str | Path, repo: str, *, is_private: bool = True) -> str:
    """Upload an exported folder to OWNER/NAME on the Hub and return the address of its commit."""
    from huggingface_hub import HfApi

    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / EXPORTED_WEIGHTS).is_file():
        raise ValueError(
            f"{folder} is no exported model: write it with `adlm export MODEL --out {folder}` first"
        )
    api = HfApi()
    api.create_repo(repo, private=is_private, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo, folder_path=folder, commit_message="Upload a model exported with adlm"
    )
    return str(commit.commit_url)
