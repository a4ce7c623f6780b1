"""Every setting of sampling is on every surface, without a line of its own there."""

import subprocess
import sys

import pytest

from adlm.settings import SamplingSettings, Vocabulary, list_own_names
from tests.cli.terminal import ROOT, invoke, make_env
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
