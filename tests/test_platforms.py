"""Other systems, pretended: Apple's GPU, which has no float64, and Windows, which has no locks and fewer signals."""

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import adlm
from adlm import files
from adlm.diffusion.categorical import SamplingParams, draw
from adlm.diffusion.samplers import SAMPLERS, LeftToRight, takes_steps
from adlm.likelihood import estimate_nll
from adlm.models.methods import METHODS, build_config
from tests.world import fill

MPS, CPU = torch.device("mps"), torch.device("cpu")


class PretendedTensor(torch.Tensor):
    """A tensor that says it is on an Apple GPU; its numbers are on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "PretendedTensor":
        tensor: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=CPU,
            requires_grad=False,
        )
        tensor.inner = inner
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_mps(func, args, kwargs or {})


def str_to_device(value: Any) -> Any:
    return torch.device(value) if isinstance(value, str) else value


class PretendedApi(TorchFunctionMode):
    """Creates tensors on the CPU and pretends that they are on `mps`, which this torch may not be built for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def is_mps(value: Any) -> bool:
            return isinstance(value, str | torch.device) and str(value) == "mps"

        kwargs = kwargs or {}
        if args and isinstance(args[0], PretendedTensor):
            is_copied = func is torch.Tensor.to and CPU in (
                *map(str_to_device, args[1:]),
                *kwargs.values(),
            )
            if func in (torch.Tensor.cpu, torch.Tensor.tolist) or is_copied:
                return func(args[0].inner.clone(), *args[1:], **kwargs)
        if func in (torch.device, torch._C._nn._parse_to) or not any(
            map(is_mps, (*args, *kwargs.values()))
        ):
            return func(*args, **kwargs)
        args = [CPU if is_mps(each) else each for each in args]
        result = func(
            *args, **{name: CPU if is_mps(each) else each for name, each in kwargs.items()}
        )
        return (
            make_pretended(result.clone(), func.__name__)
            if isinstance(result, torch.Tensor)
            else result
        )


class PretendedMps(TorchDispatchMode):
    """Runs operations on the device `mps` on the CPU, and refuses float64 and mixed devices there, as Apple's does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_mps(func, args, kwargs or {})


def run_on_mps(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    wrapped: dict[int, PretendedTensor] = {}
    plain: list[torch.Tensor] = []

    def unwrap(value: Any) -> Any:
        if isinstance(value, PretendedTensor):
            wrapped[id(value.inner)] = value
            return value.inner
        if isinstance(value, torch.Tensor):
            plain.append(value)
        return CPU if isinstance(value, torch.device) else value

    device = kwargs.get("device")
    is_device = device == MPS if device is not None else None
    args, kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    name = func.overloadpacket.__name__
    may_mix = name in ("copy_", "index", "index_put_")  # positions may be on the host
    if wrapped and any(each.dim() for each in plain) and not may_mix:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    result = func(*args, **kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in wrapped:
            return wrapped[id(value)]
        is_here = (
            is_device
            if is_device is not None
            else bool(wrapped) and all(value is not each for each in plain)
        )
        return make_pretended(value, name) if is_here else value

    return tree_map(wrap, result)


def make_pretended(value: torch.Tensor, name: str) -> PretendedTensor:
    if value.dtype == torch.float64:
        raise TypeError(f"{name}: the MPS framework does not support float64")
    return PretendedTensor(value)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with PretendedMps(), PretendedApi():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_the_pretended_device_refuses_what_the_real_one_does(mps: None) -> None:
    x = torch.ones(3).to("mps")
    assert x.device == MPS and (x + 1).device == MPS and (x + 1).sum().item() == 6
    with pytest.raises(TypeError, match="float64"):
        x.double()
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(2, dtype=torch.float64, device="mps")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(0.5, 5), SamplingParams(0)],
)
def test_tokens_are_drawn_on_the_host(mps: None, params: SamplingParams) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    u = torch.linspace(0, 0.99, 7, dtype=torch.float64)
    drawn = draw(logits.to("mps"), u, params)
    assert (
        drawn.tokens.device == MPS
        and drawn.tokens.cpu().tolist() == draw(logits, u, params).tokens.tolist()
    )


def tiny_model(method: str) -> adlm.LanguageModel:
    sizes: dict[str, Any] = {
        "dim": 16,
        "heads": 2,
        "denoiser_layers": 1,
        "length": 12,
        "dropout": 0.0,
    }
    layers = {"anchor_layers": 1 if METHODS[method].two_stages else 0}
    model = adlm.LanguageModel(
        build_config(method, "nano", vocab_size=40, mask_id=39, **sizes, **layers), seed=1
    )
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():  # heads begin as zero
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return model.eval()


def sample(method: str, sampler: Any, device: str) -> list[list[int]]:
    is_causal = METHODS[method].is_causal
    xt = torch.full((2, 12), 39)
    xt[:, :2] = torch.tensor([3, 5])
    is_fixed = torch.arange(12).expand(2, 12) < 2
    evaluator = adlm.build_evaluator(tiny_model(method), device)
    assert evaluator.model.head.weight.device == torch.device(device)
    sampler = LeftToRight() if is_causal else sampler
    options: dict[str, Any] = {"is_fixed": is_fixed, "sampling": SamplingParams(top_p=0.9)}
    return list(fill(evaluator, xt, sampler, seed=3, **options).cpu().tolist())


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_runs_without_float64_on_the_device(mps: None, name: str) -> None:
    sampler = adlm.build_sampler(name, **({"steps": 6} if takes_steps(name) else {}))
    assert sample("adlm", sampler, "mps") == sample("adlm", sampler, "cpu")


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_models_run_without_float64_on_the_device(mps: None, method: str) -> None:
    assert sample(method, None, "mps") == sample(method, None, "cpu")


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar"])
def test_rows_are_scored_without_float64_on_the_device(mps: None, method: str) -> None:
    rows = torch.randint(38, (4, 12), generator=torch.Generator().manual_seed(0))
    model = tiny_model(method)
    expected = estimate_nll(model, rows, batch=2).nll
    assert estimate_nll(model.to("mps"), rows, batch=2).nll == pytest.approx(expected, abs=1e-5)
    if method == "mdlm":
        with pytest.raises(ValueError, match="mps does not have: use device=cpu"):
            estimate_nll(model, rows, order="confidence")


def import_anew(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_signals_that_windows_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGUSR1")
    guard = import_anew("adlm.training.guard")
    assert guard.EXIT_CODES == {signal.SIGTERM: 75, signal.SIGINT: 130}


def test_the_command_line_starts_without_the_signals_that_windows_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled: list[int] = []
    monkeypatch.setattr(sys, "argv", ["adlm", "train"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    monkeypatch.delattr(signal, "SIGUSR1")
    monkeypatch.delattr(os, "EX_TEMPFAIL")
    import_anew("adlm.cli")
    assert handled == [signal.SIGTERM]


def test_where_files_cannot_be_locked_the_error_says_what_to_use(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    monkeypatch.setattr(os, "name", "nt")
    with (
        pytest.raises(OSError, match=r"cannot be locked.*on Windows, in WSL"),
        files.file_lock(path, ""),
    ):
        pytest.fail("the folder is not locked")
