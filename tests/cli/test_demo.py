"""The demo's short form, as a person would type it."""

from typer.testing import CliRunner

from adlm import __version__
from adlm.cli.demo import DemoResult
from adlm.cli.main import app
from adlm.cli.screen import curve


def test_the_short_demo_learns_writes_and_fills() -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "40", "--seed", "1"], standalone_mode=False)
    assert result.exit_code == 0, result.output
    found = result.return_value
    assert isinstance(found, DemoResult)

    assert len(found.losses) == 40
    assert sum(found.losses[-10:]) < sum(found.losses[:10]) - 1.0  # well below where it began
    assert found.valid["val/ppl"] < found.tokenizer.vocab_size  # better than knowing nothing
    assert found.valid["val/stderr"] > 0

    mask_id = found.tokenizer.mask_id
    assert not (found.sample == mask_id).any()
    assert not (found.answer == mask_id).any()
    is_given = found.question != mask_id
    assert 0 < int(is_given.sum()) < is_given.numel()
    assert (found.answer[is_given] == found.question[is_given]).all()

    # A pipe gets lines, not a screen.
    assert "\x1b" not in result.output
    assert f"held-out perplexity: at most {found.valid['val/ppl']:.1f}" in result.output
    assert found.tokenizer.decode(found.sample[1].tolist(), skip_special=True).split()[0] in result.output
    assert len(result.output.splitlines()) < 80


def test_the_number_of_steps_follows_from_the_seconds() -> None:
    result = CliRunner().invoke(app, ["demo", "--seconds", "1"], standalone_mode=False)
    assert result.exit_code == 0, result.output
    assert f"(repeat with --steps {len(result.return_value.losses)})" in " ".join(result.output.split())


def test_options_out_of_range_are_named() -> None:
    result = CliRunner().invoke(app, ["demo", "--steps", "0"])
    assert result.exit_code == 2
    assert "--steps" in result.output


def test_version() -> None:
    assert CliRunner().invoke(app, ["version"]).output.strip() == __version__


def test_a_falling_curve_falls() -> None:
    lines = curve([4.0, 3.0, 2.0, 1.0], width=4, height=4).splitlines()
    assert lines[0].startswith("  4.00 ┤█")
    assert lines[3].startswith("  1.00 ┤")
    heights = [sum(line[8:][column : column + 1] not in ("", " ") for line in lines[:4]) for column in range(4)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == 4
