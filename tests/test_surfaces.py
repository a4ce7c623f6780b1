"""Every setting of sampling is on every surface, without a line of its own there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.settings import SamplingSettings, Vocabulary, list_own_names
from tests.cli.terminal import ROOT, answer_json, invoke, make_env, trained
from tests.text.models import lm

LIBRARIES: tuple[Vocabulary, ...] = ("transformers", "diffusers")


def test_every_setting_is_an_option_of_the_command_line() -> None:
    options = list_own_names(SamplingSettings, "cli")
    shown = " ".join(invoke("sample", "--help").stdout.replace("│", " ").split())
    filled = invoke("infill", "--help").stdout
    for name, option in options.items():
        field = SamplingSettings.model_fields[name]
        assert f" {option} " in shown, option
        assert f"{field.description}" in shown or name == "option"
        is_length = name in ("length", "max_new_tokens", "stop")
        assert (f" {option} " in filled) != is_length, option


def test_a_shell_completes_every_option() -> None:
    code = "from adlm.cli.main import app; app(prog_name='adlm')"
    asked = {"_ADLM_COMPLETE": "complete_bash", "COMP_WORDS": "adlm sample --", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=make_env(**asked),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert set(list_own_names(SamplingSettings, "cli").values()) <= set(done.stdout.split())


def test_every_setting_is_a_field_of_requests() -> None:
    pytest.importorskip("fastapi")
    from adlm.serve.app import create_app

    schemas = create_app(lm()).openapi()["components"]["schemas"]
    for name, typed in list_own_names(SamplingSettings, "openai").items():
        field = schemas["CompletionBody"]["properties"][typed]
        assert field["description"] == SamplingSettings.model_fields[name].description
        is_length = name in ("max_new_tokens", "stop")
        assert (typed in schemas["InfillBody"]["properties"]) != is_length, typed
    top_p = schemas["CompletionBody"]["properties"]["top_p"]["anyOf"][0]
    assert top_p == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_setting_is_an_argument_of_other_libraries(library: Vocabulary) -> None:
    settings = SamplingSettings(n=2, steps=3, top_k=5, block=4, max_new_tokens=7)
    keywords = settings.to_keywords(library)
    again = SamplingSettings.parse(library, None, **keywords)
    assert again.to_keywords(library) == keywords
    assert {"temperature", "top_p", "top_k", "max_new_tokens"} <= keywords.keys()


def test_a_draw_is_the_same_on_every_surface(tmp_path: Path) -> None:
    """The least probability, which no surface names: Python, command, request, other libraries."""
    for extra in ("fastapi", "httpx", "transformers", "diffusers"):
        pytest.importorskip(extra)
    from diffusers import DiffusionPipeline
    from fastapi.testclient import TestClient
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from adlm.interop.huggingface import export
    from adlm.serve.app import create_app

    lm = adlm.load(trained(), device="cpu")
    short: dict[str, Any] = {"steps": 6, "seed": 3, "top_p": 1.0, "sampler": "remask_loop"}
    output = lm.generate("It was", max_new_tokens=12, min_p=0.5, **short)
    expected = output.texts
    assert output.settings["min_p"] == 0.5
    assert lm.generate("It was", max_new_tokens=12, **short).texts != expected

    words = ("--prompt", "It was", "--max-new-tokens", 12, "--steps", 6, "--seed", 3, "--top-p", 1)
    answer = answer_json("sample", trained(), *words, "--sampler", "remask_loop", "--min-p", 0.5)
    assert answer["texts"] == expected

    with TestClient(create_app(lm)) as client:
        body = {"prompt": "It was", "max_tokens": 12, "min_p": 0.5, "echo": True, **short}
        choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == expected

    folder = export(lm, tmp_path / "model")
    model, tokenizer = (
        AutoModelForMaskedLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    prompt = tokenizer("It was", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=12, min_p=0.5, **short)
    assert tokenizer.batch_decode(tokens, skip_special_tokens=True) == expected

    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    generator = torch.Generator().manual_seed(3)
    texts = pipe(
        "It was",
        max_new_tokens=12,
        num_inference_steps=6,
        top_p=1.0,
        min_p=0.5,
        generator=generator,
    ).texts
    assert texts == expected
