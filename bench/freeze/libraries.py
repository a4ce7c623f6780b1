"""Probes of other libraries: transformers and diffusers with exported folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.freeze.cases import ORDERS, PLANS, PROMPTS, Case, iter_samplers
from bench.freeze.fixtures import takes_options
from bench.versions import name_options

GREEDY = {"temperature": 0.0}


def export_model(name: str, out: Path) -> Path:
    """Export a model with this tree's command."""
    folder = out / name
    command = [sys.executable, "-P", "-m", "adlm", "export", f"models/{name}", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def name_old_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as the code in an export of the first tree names them."""
    if takes_options():
        return settings
    given = dict(settings)
    return given | given.pop("options", {})


def probe_transformers(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Texts and logits of folders that each tree, or the first one, has exported."""
    import transformers

    folders = {name: export_model(name, out / "exported") for name in ("adlm", "documents", "ar")}
    folders |= {f"old {name}": Path("exports", name).resolve() for name in ("adlm", "ar")}
    for name, folder in folders.items():
        is_causal = name.endswith("ar")
        loader: Any = transformers.AutoModelForMaskedLM
        if is_causal:
            loader = transformers.AutoModelForCausalLM
        model = loader.from_pretrained(folder, trust_remote_code=True)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        with torch.no_grad():
            yield f"{name}: logits", model(**inputs).logits.numpy()
        rename = name_old_options if name.startswith("old") else name_options
        ways: list[tuple[str, dict[str, Any]]] = [("left to right", {}), ("greedy", GREEDY)]
        if not is_causal:
            ways = list(iter_samplers())
        shared = {"max_new_tokens": 9, "seed": 3, "num_return_sequences": 2}
        for sampler, settings in ways:
            tokens = model.generate(**inputs, **shared, **rename(settings))
            yield f"{name}, {sampler}: tokens", tokens.tolist()
        torch.manual_seed(3)
        tokens = model.generate(**inputs, max_new_tokens=5)
        yield f"{name}, seed of torch: tokens", tokens.tolist()


def probe_diffusers(out: Path, *, is_quick: bool) -> Iterator[Case]:
    """Texts of the exported pipeline, and of LLaDA2Pipeline with our scheduler."""
    import diffusers

    folder = export_model("adlm", out / "exported")
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    shared = {
        "gen_length": 10,
        "temperature": 1.0,
        "top_p": 0.9,
        "eos_early_stop": False,
        "use_chat_template": False,
        "output_type": "seq",
    }
    for sampler, settings in (PLANS | ORDERS).items():
        options = dict(settings.get("options", {}))
        make_scheduler = type(pipe.scheduler)
        scheduler = make_scheduler(sampler=sampler, steps=settings.get("steps"), options=options)
        parts = {"model": pipe.model, "scheduler": scheduler, "tokenizer": pipe.tokenizer}
        ours = type(pipe)(**parts)
        ours.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(4)
        output = ours(PROMPTS[:2], max_new_tokens=9, generator=generator, output_type="seq")
        yield f"{sampler}, our pipeline: tokens", output.sequences.tolist()
        theirs: Any = diffusers.LLaDA2Pipeline(**parts)
        theirs.set_progress_bar_config(disable=True)
        for block in (5, 32):
            generator = torch.Generator().manual_seed(4)
            output = theirs(PROMPTS[0], block_length=block, generator=generator, **shared)
            yield f"{sampler}, LLaDA2Pipeline, block {block}: tokens", output.sequences.tolist()
