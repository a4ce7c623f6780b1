"""Our samplers inside diffusers: LLaDA2Pipeline with AdlmScheduler, AdlmPipeline, exported folders."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm import LM
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import entropy_bounded, negative_entropy
from adlm.diffusion.sampling import View
from tests.text.models import lm as small_lm
from tests.world import OPTIONS, SAMPLING, fill

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
huggingface = import_module("adlm.interop.huggingface")
scheduling = import_module("adlm.interop.scheduling_adlm")
pipeline = import_module("adlm.interop.pipeline_adlm")

PROMPT, NEW = "it was", 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[LM, Path, Any]:
    """A small model, its folder, and the components of its pipelines."""
    lm = small_lm("adlm", "bytes", "wrapped")
    folder = huggingface.export(lm, tmp_path_factory.mktemp("export") / "model")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    return (
        lm,
        folder,
        {"model": model, "tokenizer": transformers.AutoTokenizer.from_pretrained(folder)},
    )


def make_scheduler(name: str, **settings: Any) -> Any:
    options = dict(OPTIONS[name])
    return scheduling.AdlmScheduler(
        sampler=name, steps=options.pop("steps", None), options=options, **settings
    )


def generate_ours(
    lm: LM, tokens: torch.Tensor, name: str, seed: int, banned: list[int]
) -> list[list[int]]:
    """The new tokens of our own loop, without the text of `LM.generate`."""
    xt = torch.cat([tokens, torch.full((len(tokens), NEW), lm.tokenizer.mask_id)], -1)
    is_banned = torch.zeros(1, lm.model.config.vocab_size, dtype=torch.bool)
    is_banned[0, banned] = True
    sampler, sampling = adlm.build_sampler(name, **OPTIONS[name]), SamplingParams(top_p=0.9)
    filled = fill(lm.evaluator, xt, sampler, seed=seed, sampling=sampling, banned=is_banned)
    return filled[:, tokens.shape[1] :].tolist()


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("name", OPTIONS)
def test_llada2_pipeline_gives_our_tokens(
    name: str, seeds: range, small: tuple[LM, Path, Any]
) -> None:
    lm, _, components = small
    banned = components["model"].config.special_token_ids
    pipe = diffusers.LLaDA2Pipeline(
        scheduler=make_scheduler(name, banned_token_ids=banned), **components
    )
    pipe.set_progress_bar_config(disable=True)
    tokens = components["tokenizer"]([PROMPT, PROMPT[::-1]], return_tensors="pt").input_ids
    for seed in seeds:
        settings = {
            "gen_length": NEW,
            "block_length": tokens.shape[1] + NEW,
            "eos_early_stop": False,
        }
        settings |= {
            "temperature": 1.0,
            "top_p": 0.9,
            "generator": torch.Generator().manual_seed(seed),
        }
        output = pipe(input_ids=tokens, use_chat_template=False, output_type="seq", **settings)
        assert output.sequences.tolist() == generate_ours(lm, tokens, name, seed, banned), seed


def test_blocks_and_greedy_text(small: tuple[LM, Path, Any]) -> None:
    """Several blocks fill every position; greedy decoding needs no seed, and a text does not depend on the last one."""
    _, _, components = small
    pipe = diffusers.LLaDA2Pipeline(scheduler=make_scheduler("remask_loop"), **components)
    pipe.set_progress_bar_config(disable=True)
    settings = {"gen_length": 12, "block_length": 4, "eos_early_stop": False, "output_type": "seq"}
    first = pipe(
        PROMPT, temperature=1.0, generator=torch.Generator().manual_seed(1), **settings
    ).sequences
    again = pipe(
        PROMPT, temperature=1.0, generator=torch.Generator().manual_seed(1), **settings
    ).sequences
    other = pipe(
        PROMPT, temperature=1.0, generator=torch.Generator().manual_seed(2), **settings
    ).sequences
    assert components["tokenizer"].mask_token_id not in first
    assert torch.equal(first, again) and not torch.equal(first, other)
    ordered = diffusers.LLaDA2Pipeline(scheduler=make_scheduler("confidence"), **components)
    ordered.set_progress_bar_config(disable=True)
    greedy = [ordered(PROMPT, sampling_method="greedy", **settings).sequences for _ in range(2)]
    assert torch.equal(*greedy)


def test_our_entropy_rule_is_that_of_diffusers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1000, 16, 11) * torch.rand(1000, 16, 1) * 8
    theirs = diffusers.EntropyBoundScheduler(entropy_bound=0.5, t_max=1.0, t_min=1.0)
    accepted = theirs.step(logits, 0, torch.zeros(1000, 16, dtype=torch.int64)).accepted_index
    sampler, rows = entropy_bounded(0.5), torch.zeros(1000, dtype=torch.int64)
    view = View(
        rows=list(range(1000)),
        step=rows,
        is_hidden=torch.ones_like(accepted),
        is_free=torch.ones_like(accepted),
        first_hidden=rows + 16,
        rng=CounterRng(rows, rows),
        columns={"bound": torch.full((1000,), sampler.bound, dtype=torch.float64)},
        scores=negative_entropy(logits.flatten(0, 1)).view(1000, 16),
    )
    ours = sampler.move(view).reveal
    assert torch.equal(ours, accepted)
    assert 1 < float(ours.sum(-1).float().mean()) < 16


def test_our_pipeline_continues_fills_and_calls_back(small: tuple[LM, Path, Any]) -> None:
    lm, _, components = small
    pipe = pipeline.AdlmPipeline(scheduler=make_scheduler("remask_cap"), **components)
    canvases: list[torch.Tensor] = []

    def callback(
        _: Any, step: int, timestep: int, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        assert step == timestep == len(canvases)
        canvases.append(tensors["canvas"])
        return tensors

    generator = torch.Generator().manual_seed(3)
    output = pipe(PROMPT, max_new_tokens=NEW, generator=generator, callback_on_step_end=callback)
    expected = lm.generate(PROMPT, max_new_tokens=NEW, seed=3, **SAMPLING["remask_cap"])
    assert output.texts == expected.texts and len(canvases) == 6
    sequences, texts = pipe(
        PROMPT, max_new_tokens=NEW, num_inference_steps=3, output_type="seq", return_dict=False
    )
    assert sequences.shape[-1] == len(PROMPT) + 1 + NEW and texts is None
    (text,) = pipe("a<|mask|><|mask|>b", generator=generator).texts
    assert text.startswith("a") and text.endswith("b") and "mask" not in text
    with pytest.raises(ValueError, match="expected text or seq"):
        pipe(PROMPT, output_type="pil")
    with pytest.raises(
        NotImplementedError, match=r"save pipe.model and pipe.tokenizer into new; `adlm export`"
    ):
        pipe.save_pretrained("new")


def test_settings_of_a_scheduler_are_saved(tmp_path: Path) -> None:
    make_scheduler("remask_loop").save_pretrained(tmp_path)
    again = scheduling.AdlmScheduler.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="did you mean remask_loop"):
        scheduling.AdlmScheduler(sampler="remask_lop")
    assert (again.config.sampler, again.config.steps, again.config.options) == (
        "remask_loop",
        8,
        {"eta": 0.3},
    )


# Runs in a process of its own, in which importing this package is an error.
CHECK = """
import json, sys
if sys.argv[2] == "without":
    sys.modules["adlm"] = None
import torch, diffusers
pipe = diffusers.DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = pipe.tokenizer("It was", return_tensors="pt").input_ids
texts = pipe("It was", max_new_tokens=12, num_inference_steps=16, generator=torch.Generator().manual_seed(4)).texts
print(json.dumps([type(pipe).__name__, pipe.model(ids).logits[0, :, :50].tolist(), ids.tolist(), texts]))
"""


@pytest.mark.parametrize("package", [pytest.param("with", marks=pytest.mark.slow), "without"])
def test_an_exported_folder_is_a_pipeline(package: str, tmp_path: Path) -> None:
    lm = adlm.load("adlm-prose", device="cpu")
    folder = huggingface.export(lm, tmp_path / "adlm-prose")
    env = os.environ | {
        "HF_MODULES_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", CHECK, str(folder), package]
    cwd = Path(adlm.__file__).parents[1] if package == "with" else tmp_path
    printed = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env, check=True
    ).stdout
    name, logits, ids, texts = json.loads(printed.splitlines()[-1])
    assert name == "AdlmPipeline"
    expected = lm.model.head(lm.model(torch.tensor(ids)).final)[0, :, :50]
    assert (torch.tensor(logits) - expected).abs().max() < 1e-5
    assert texts == lm.generate("It was", max_new_tokens=12, seed=4, steps=16).texts
