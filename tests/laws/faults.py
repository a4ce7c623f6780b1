"""Faults planted one by one in a copy of the tree, each of which the laws must notice.

    python -m tests.laws.faults             # all of them
    python -m tests.laws.faults nucleus     # those with this word in their name
    python -m tests.laws.faults --workers 2

A fault has a patch for every version of the code that it is known in: the first one whose text is
found is applied, and a fault without one is an error, because a redesign must not lose it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "adlm",
    "recipes",
    "pyproject.toml",
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/golden",
    "tests/laws",
)
SECONDS = 900

SAMPLERS = "test_sampler_laws.py"
GOLDENS = "test_goldens.py"
BOUNDS = "test_bounds.py"
LOSSES = "test_losses.py"
DRAWS = "test_draws.py"
ROWS = "test_rows.py"
BATCH = "test_running_batch.py"
TEXTS = "test_texts.py"
SURFACES = "test_surfaces.py"
TRAINING = "test_training.py"
EVALUATION = "test_evaluation.py"
OLD_FILES = "test_old_files.py"


@dataclass(frozen=True)
class Patch:
    """A text of a file and what a fault makes of it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A fault, the law that it breaks, its patch in each version of the code, and where to look."""

    name: str
    law: str
    patches: tuple[Patch, ...]
    files: tuple[str, ...]


PLANS = "adlm/diffusion/plans.py"
ORDERS = "adlm/diffusion/orders.py"
CATEGORICAL = "adlm/diffusion/categorical.py"
RNG = "adlm/diffusion/rng.py"
DENOISING = "adlm/diffusion/denoising.py"
SAMPLING = "adlm/diffusion/sampling.py"
NAMED = "adlm/diffusion/samplers.py"
MASKING = "adlm/diffusion/masking.py"
OBJECTIVES = "adlm/diffusion/objectives.py"
SCHEDULES = "adlm/diffusion/schedules.py"
ANCHORS = "adlm/diffusion/anchors.py"
BATCHES = "adlm/serve/batches.py"
MODEL = "adlm/models/language_model.py"
EVALUATOR = "adlm/models/evaluator.py"
LIKELIHOOD = "adlm/likelihood.py"
LOOP = "adlm/training/loop.py"
TRAIN = "adlm/training/train.py"

FAULTS = (
    Fault(
        "wrong sigma of cap",
        "the remasking family is its table",
        (
            Patch(PLANS, ".clamp(max=eta), compat)", ".clamp(max=2 * eta), compat)"),
            Patch(
                PLANS,
                "max_remask_prob(1 - t, 1 - s).clamp(max=eta), compat",
                "max_remask_prob(1 - t, 1 - s).clamp(max=2 * eta), compat",
            ),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "wrong sigma of rescale",
        "the remasking family is its table",
        (Patch(PLANS, "eta * max_remask_prob(1 - t, 1 - s)", "eta * (1 - s)"),),
        (SAMPLERS,),
    ),
    Fault(
        "remask_loop ends too early",
        "the loop lasts from t_on to t_off",
        (Patch(PLANS, "(t <= t_on) & (t > t_off)", "(t <= t_on) & (t > 2 * t_off)"),),
        (SAMPLERS,),
    ),
    Fault(
        "reveal forgets what was hidden again",
        "the visible share after a step is alpha_s",
        (
            Patch(
                PLANS,
                "(self.alpha_s - (1 - self.remask_prob) * self.alpha_t)",
                "(self.alpha_s - self.alpha_t)",
            ),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "confidence hides the surest",
        "conf hides the least certain token most often",
        (Patch(PLANS, "doubt = (-confidence)", "doubt = confidence"),),
        (SAMPLERS,),
    ),
    Fault(
        "confidence of a token is not kept",
        "conf remembers the probability of the last draw",
        (
            Patch(
                DENOISING,
                "confidence[revealed] = probs.cpu()",
                "confidence[revealed] = 0 * probs.cpu()",
            ),
            Patch(
                SAMPLING,
                "self.last_prob[each.row, each.position] = each.probs",
                "self.last_prob[each.row, each.position] = 0 * each.probs",
            ),
        ),
        (ROWS,),
    ),
    Fault(
        "confidence of a token is not kept in the running batch",
        "a row has the tokens that it has alone",
        (
            Patch(
                BATCHES,
                'self.columns["confidence"][mine] = probs.cpu()',
                'self.columns["confidence"][mine] = 0 * probs.cpu()',
            ),
            Patch(
                SAMPLING,
                "own[:] = getattr(slot, name)",
                'own[:] = 0 if name == "last_prob" else getattr(slot, name)',
            ),
            Patch(
                SAMPLING,
                "self.last_prob = append_array(self.last_prob, ",
                "self.last_prob = append_array(0 * self.last_prob, ",
            ),
            Patch(
                SAMPLING,
                "all_probs = append_array(self.last_prob, ",
                "all_probs = append_array(0 * self.last_prob, ",
            ),
        ),
        (BATCH,),
    ),
    Fault(
        "noise level of the step's end",
        "a timed network is told how much is visible",
        (
            Patch(
                PLANS,
                "level = -torch.log(EPS + (1 - EPS) * alpha_t)",
                "level = -torch.log(EPS + (1 - EPS) * alpha_s)",
            ),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "last step without argmax",
        "compat fills what is left by argmax",
        (
            Patch(
                DENOISING,
                "return sampling, replace(sampling, temperature=0.0)",
                "return sampling, sampling",
            ),
            Patch(
                SAMPLING,
                "return sampling, replace(sampling, temperature=0.0)",
                "return sampling, sampling",
            ),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "confidence order reversed",
        "the surest position is revealed first",
        (
            Patch(
                ORDERS,
                "lambda logits: logits.softmax(-1).amax(-1)",
                "lambda logits: -logits.softmax(-1).amax(-1)",
            ),
            Patch(
                NAMED, "return logits.softmax(-1).amax(-1)", "return -logits.softmax(-1).amax(-1)"
            ),
        ),
        (SAMPLERS, ROWS),
    ),
    Fault(
        "entropy bound with the largest in it",
        "the sum less the largest stays below the bound",
        (
            Patch(
                ORDERS,
                "entropies.cumsum(-1) - entropies <= order.entropy_bound",
                "entropies.cumsum(-1) <= order.entropy_bound",
            ),
            Patch(
                NAMED,
                "fits = entropies.cumsum(-1) - entropies <= view",
                "fits = entropies.cumsum(-1) <= view",
            ),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "nucleus off by one",
        "the token that crosses p is in",
        (Patch(CATEGORICAL, "total - probs < params.top_p", "total < params.top_p"),),
        (DRAWS,),
    ),
    Fault(
        "lineage nucleus off by one",
        "the token that crosses p is out in the lineage",
        (Patch(CATEGORICAL, "else total <= params.top_p", "else total - probs < params.top_p"),),
        (DRAWS,),
    ),
    Fault(
        "top_k off by one",
        "top_k keeps k tokens",
        (
            Patch(
                CATEGORICAL,
                "values[:, : params.top_k], ids[:, : params.top_k]",
                "values[:, : params.top_k + 1], ids[:, : params.top_k + 1]",
            ),
        ),
        (DRAWS,),
    ),
    Fault(
        "temperature squared",
        "logits are divided by the temperature",
        (
            Patch(
                CATEGORICAL,
                "(logits - logits.amax(-1, keepdim=True)) / temperature",
                "(logits - logits.amax(-1, keepdim=True)) / temperature**2",
            ),
        ),
        (DRAWS,),
    ),
    Fault(
        "nucleus of few candidates",
        "a nucleus may be wider than any first selection",
        (Patch(CATEGORICAL, "is_whole = ~keep[:, -1] if", "is_whole = keep[:, 0] if"),),
        (DRAWS,),
    ),
    Fault(
        "mask may be drawn",
        "a text holds no mask",
        (
            Patch(
                "adlm/generate.py",
                "bias[self.config.mask_id] = -torch.inf",
                "bias[self.config.mask_id] += 0",
            ),
            Patch(EVALUATOR, "        bias[mask_id] = -torch.inf", "        bias[mask_id] += 0"),
        ),
        (SAMPLERS,),
    ),
    Fault(
        "mask has mass in the loss",
        "the denoiser never says the mask",
        (Patch(OBJECTIVES, "without=mask_id, offset=offset", "without=None, offset=offset"),),
        (BOUNDS, GOLDENS),
    ),
    Fault(
        "special tokens may be drawn",
        "limits hold at every position",
        (
            Patch(
                CATEGORICAL,
                "return logits.masked_fill(banned, -torch.inf)",
                "return logits.masked_fill(banned, -1.0)",
            ),
            Patch(
                SAMPLING,
                "logits = logits.masked_fill(banned, -torch.inf)",
                "logits = logits.masked_fill(banned, -1.0)",
            ),
        ),
        (SAMPLERS, TEXTS),
    ),
    Fault(
        "a neighbor's noise",
        "a row's numbers follow from its own number",
        (
            Patch(
                RNG,
                "uniform_pair(seed, self.rows[:, None], when",
                "uniform_pair(seed, torch.arange(len(self.rows))[:, None], when",
            ),
            Patch(
                RNG, "row = self.rows.numpy()[:, None]", "row = np.arange(len(self.rows))[:, None]"
            ),
            Patch(
                RNG,
                "arguments = (seed[..., None], row[:, None], when",
                "arguments = (seed[..., None], np.arange(len(row))[:, None], when",
            ),
        ),
        (ROWS, LOSSES),
    ),
    Fault(
        "a row's clock in the running batch",
        "a row that joins late has its own clock",
        (
            Patch(
                BATCHES,
                '* denoising.MAX_BLOCK_STEPS + columns["step"]',
                "* denoising.MAX_BLOCK_STEPS",
            ),
            Patch(
                SAMPLING,
                "x.row.seed, x.row.number, x.clock) for x in slots]",
                "x.row.seed, x.row.number, slots[0].clock) for x in slots]",
            ),
        ),
        (BATCH,),
    ),
    Fault(
        "blocks share their numbers",
        "rows are those of an earlier version",
        (
            Patch(
                DENOISING,
                "window, number * MAX_BLOCK_STEPS\n    sampling",
                "window, 0\n    sampling",
            ),
            Patch(SAMPLING, "return self.block * MAX_BLOCK_STEPS + self.step", "return self.step"),
        ),
        (BATCH,),
    ),
    Fault(
        "steps in which nothing changes are not counted",
        "rows are those of an earlier version",
        (
            Patch(
                DENOISING,
                "state.step, state.clock = state.step + 1, state.clock + 1\n            yield",
                "state.clock = state.clock + 1\n            yield",
            ),
            Patch(SAMPLING, "self.frames += change.step - self.step", "self.frames += 0"),
        ),
        (BATCH,),
    ),
    Fault(
        "settled too early",
        "what is settled does not change",
        (
            Patch(BATCHES, "remask_end = 1 + max(", "remask_end = -3 + max("),
            Patch(
                SAMPLING,
                "if slot.step >= slot.hides_until:",
                "if slot.step >= slot.hides_until - 4:",
            ),
            Patch(
                SAMPLING,
                "self.block + (self.step >= hides_until) if",
                "self.block + (self.step >= hides_until - 4) if",
            ),
        ),
        (BATCH,),
    ),
    Fault(
        "random purposes swapped",
        "an old run goes on as it did",
        (
            Patch(
                RNG,
                "    TIME = 2  # training: the row's time\n"
                "    MASK = 3  # training: which positions are hidden",
                "    TIME = 3\n    MASK = 2",
            ),
        ),
        (OLD_FILES,),
    ),
    Fault(
        "time and masks share numbers",
        "two purposes never share a number",
        (Patch(MASKING, "x0.shape[1], Purpose.MASK)", "x0.shape[1], Purpose.TIME)"),),
        (LOSSES, BOUNDS),
    ),
    Fault(
        "evaluations of neighbors are counted",
        "a row's evaluations are those it has alone",
        (
            Patch(DENOISING, "self.nfe[rows] += 1", "self.nfe += 1"),
            Patch(
                SAMPLING,
                "for i in members:\n            self.slots[i].nfe += 1",
                "for i in range(len(self.slots)):\n            self.slots[i].nfe += 1",
            ),
            Patch(
                SAMPLING,
                "for i in self.evaluated:\n            self.slots[i].nfe += 1",
                "for i in range(len(self.slots)):\n            self.slots[i].nfe += 1",
            ),
        ),
        (ROWS, BATCH),
    ),
    Fault(
        "wrong loss weight",
        "the weight is -alpha' / (1 - alpha)",
        (
            Patch(
                SCHEDULES,
                "(-schedule.dalpha(exact) / (1 - schedule.alpha(exact)))",
                "(-schedule.dalpha(exact) / (1.01 - schedule.alpha(exact)))",
            ),
        ),
        (GOLDENS,),
    ),
    Fault(
        "weight of discrete time",
        "a discrete bound is the sum over its steps",
        (
            Patch(
                SCHEDULES,
                "(schedule.alpha(exact - 1 / steps)",
                "(schedule.alpha(exact - 0.9 / steps)",
            ),
        ),
        (BOUNDS, GOLDENS),
    ),
    Fault(
        "score entropy counts the mask",
        "c is log(V - 1)",
        (
            Patch(
                OBJECTIVES,
                "math.log(head.weight.shape[0] - 1)",
                "math.log(head.weight.shape[0])",
            ),
            Patch(OBJECTIVES, "offset = math.log(vocab_size - 1)", "offset = math.log(vocab_size)"),
        ),
        (BOUNDS,),
    ),
    Fault(
        "bridge without normalization",
        "the softmax bridge reads probabilities",
        (
            Patch(
                MODEL,
                "self.bridge(self.anchor_head(anchor).softmax(-1)",
                "self.bridge(self.anchor_head(anchor).exp()",
            ),
        ),
        (LOSSES,),
    ),
    Fault(
        "factored bridge without the head's bias",
        "the factored bridge is a map of the anchor logits",
        (
            Patch(
                MODEL,
                "torch.mv(self.bridge.weight, self.anchor_head.bias) + self.bridge.bias",
                "self.bridge.bias",
            ),
        ),
        (GOLDENS,),
    ),
    Fault(
        "anchors without indicator",
        "only anchors carry the anchor loss",
        (Patch(MASKING, "select(is_anchor & counted, weight", "select(counted, weight"),),
        (GOLDENS, LOSSES),
    ),
    Fault(
        "scope of anchors swapped",
        "the paper's scope is what is hidden",
        (
            Patch(
                ANCHORS,
                'is_hidden if scope == "masked" else ~is_hidden',
                '~is_hidden if scope == "masked" else is_hidden',
            ),
        ),
        (LOSSES, BOUNDS),
    ),
    Fault(
        "tau off by one",
        "an anchor occurs at most tau times",
        (
            Patch(
                ANCHORS,
                "count_in_row(tokens, valid) <= most",
                "count_in_row(tokens, valid) < most",
            ),
        ),
        (GOLDENS, LOSSES),
    ),
    Fault(
        "anchor ramp from the top",
        "gamma rises to its peak",
        (Patch(ANCHORS, "return min(peak, step / steps)", "return max(peak, step / steps)"),),
        (GOLDENS,),
    ),
    Fault(
        "padding attended in training",
        "padding changes no loss",
        (
            Patch(
                MASKING, "counted.sum().float(), valid=read)", "counted.sum().float(), valid=None)"
            ),
        ),
        (LOSSES,),
    ),
    Fault(
        "padding attended in sampling",
        "padding changes no tokens",
        (
            Patch(
                DENOISING,
                "features = self.predict(tokens, level, valid, rows)",
                "features = self.predict(tokens, level, None, rows)",
            ),
            Patch(
                SAMPLING,
                "valid = torch.from_numpy(np.arange(width) < lengths[:, None])",
                "valid = None",
            ),
        ),
        (ROWS, BATCH),
    ),
    Fault(
        "causal cache off by one",
        "a causal model reads all that is before",
        (
            Patch(
                "adlm/models/transformer.py",
                "<= position[:, None, :, None]\n",
                "<= position[:, None, :, None]\n        mask[..., 0] &= (position == 0)[:, None]\n",
            ),
            Patch(
                "adlm/models/transformer.py",
                "return self.keys[:, :, :end], self.values[:, :, :end]",
                "return self.keys[:, :, end > 1 : end], self.values[:, :, end > 1 : end]",
            ),
        ),
        (ROWS,),
    ),
    Fault(
        "causal likelihood counts the first token",
        "a causal nll is the product of its conditionals",
        (Patch(LIKELIHOOD, "is_counted[:, :1] &= not skip_first", "is_counted[:, :1] &= True"),),
        (BOUNDS,),
    ),
    Fault(
        "noise of an evaluation follows the batch",
        "the batch changes no estimate",
        (
            Patch(
                LIKELIHOOD,
                "rng, at = CounterRng.from_seed(seed, each.row),",
                "rng, at = CounterRng.from_seed(seed, len(each.row)),",
            ),
            Patch(
                OBJECTIVES,
                "CounterRng.from_seed(seed, rows.number)",
                "CounterRng.from_seed(seed, len(rows.number))",
            ),
        ),
        (LOSSES, EVALUATION),
    ),
    Fault(
        "learning rate of the step before",
        "the rate rises from the first step on",
        (
            Patch(LOOP, "= lr_multiplier(step), ", "= lr_multiplier(step - 1), "),
            Patch(
                TRAIN,
                "multiplier = lr_multiplier(step)\n",
                "multiplier = lr_multiplier(step - 1)\n",
            ),
        ),
        (TRAINING,),
    ),
    Fault(
        "anchor ramp ignored in training",
        "a run is the run of an earlier version",
        (
            Patch(
                "adlm/training/objective.py",
                "steps, self.peak_anchor_weight) if self.anchor_ramp else",
                "steps, self.peak_anchor_weight) if False else",
            ),
            Patch(
                MASKING,
                "anchor_weight(step, process.ramp_steps, process.anchor_weight)",
                "anchor_weight(step, None, process.anchor_weight)",
            ),
        ),
        (TRAINING,),
    ),
    Fault(
        "bell-shaped times weigh as uniform ones",
        "a run is the run of an earlier version",
        (Patch(MASKING, "(weight / density).float()", "weight.float()"),),
        (TRAINING,),
    ),
    Fault(
        "averages of the optimizer ignored",
        "a run is the run of an earlier version",
        (Patch("adlm/training/optim.py", "betas=settings.betas", "betas=(0.9, 0.999)"),),
        (TRAINING,),
    ),
    Fault(
        "best is the worst",
        "the best checkpoint has the least loss",
        (
            Patch(LOOP, "valid[task.best_metric] < best", "valid[task.best_metric] > -best"),
            Patch(TRAIN, "current < best", "current > best"),
        ),
        (TRAINING,),
    ),
    Fault(
        "average of the weights is not saved",
        "the average is what is loaded",
        (
            Patch(
                LOOP,
                "weights = ema.shadow if ema is not None else dict(model.named_parameters())",
                "weights = dict(model.named_parameters())",
            ),
            Patch(
                TRAIN,
                "self.weights = self.weights | self.ema.shadow",
                "self.weights = self.weights | {}",
            ),
        ),
        (TRAINING,),
    ),
    Fault(
        "average restarts its warm-up",
        "a resumed run is the run",
        (
            Patch(
                LOOP,
                'ema.load(checkpoint.read_weights(source), state["ema_updates"])',
                "ema.load(checkpoint.read_weights(source), 0)",
            ),
            Patch(
                TRAIN,
                "self.ema.load(read_weights(source), self.state.ema_updates)",
                "self.ema.load(read_weights(source), 0)",
            ),
        ),
        (TRAINING,),
    ),
    Fault(
        "resume loses the order of the data",
        "a resumed run is the run",
        (
            Patch(LOOP, "batches.load_state_dict(restored)", "restored.keys()"),
            Patch(TRAIN, "self.batches.load_state_dict(place)", "len(place)"),
        ),
        (TRAINING,),
    ),
    Fault(
        "dropout of every step alike",
        "an old run goes on as it did",
        (
            Patch(LOOP, "step * 0xD1B54A32D192ED03", "0 * 0xD1B54A32D192ED03"),
            Patch(TRAIN, "step * 0xD1B54A32D192ED03", "0 * 0xD1B54A32D192ED03"),
        ),
        (OLD_FILES,),
    ),
    Fault(
        "stop text is kept",
        "a text ends before its stop sequence",
        (
            Patch(
                "adlm/serve/protocol.py",
                "self.text = True, self.text[: min(found)]",
                "self.text = True, self.text[: min(found) + 1]",
            ),
            Patch(
                "adlm/serve/protocol.py",
                "self.text = self.text[:end]",
                "self.text = self.text[: end + 1]",
            ),
        ),
        (SURFACES,),
    ),
    Fault(
        "seed ignored over HTTP",
        "a seed's text is one",
        (
            Patch(
                "adlm/serve/protocol.py",
                '{"seed": secrets.randbits(32), **{name: value for name, value in given.items()',
                '{**{name: value if name != "seed" else 4 for name, value in given.items()',
            ),
            Patch(
                "adlm/serve/protocol.py",
                "given[name] = value",
                'given[name] = value if name != "seed" else 4',
            ),
        ),
        (SURFACES,),
    ),
    Fault(
        "top_k ignored on the command line",
        "a seed's text is one",
        (
            Patch(
                "adlm/cli/text.py",
                'for name in ("n", "temperature", "top_p", "top_k", "seed", "batch")',
                'for name in ("n", "temperature", "top_p", "seed", "batch")',
            ),
            Patch(
                "adlm/cli/options.py",
                "        if text not in (None, []):\n            given[typed]",
                '        if text not in (None, []) and name != "top_k":\n            given[typed]',
            ),
        ),
        (SURFACES,),
    ),
    Fault(
        "hole length off by one",
        "a hole has the likeliest length within its limits",
        (
            Patch(
                "adlm/text/generation.py",
                "for length in range(hole.min_tokens, most + 1):",
                "for length in range(hole.min_tokens, most):",
            ),
        ),
        (TEXTS,),
    ),
    Fault(
        "hole length reads the hidden token",
        "a hole has the likeliest length within its limits",
        (
            Patch(
                "adlm/text/generation.py",
                "xt = x0.index_put(place, torch.tensor(predictor.config.mask_id))",
                "xt = x0",
            ),
            Patch(
                "adlm/text/generation.py",
                "xt = x0.index_put(place, torch.tensor(mask_id))",
                "xt = x0",
            ),
        ),
        (TEXTS,),
    ),
    Fault(
        "bits per token of a score",
        "bits are per byte of the text",
        (
            Patch(
                "adlm/text/lm.py",
                "nats / math.log(2) / size, is_exact",
                "nats / math.log(2) / tokens, is_exact",
            ),
            Patch(
                "adlm/text/lm.py",
                'nats / math.log(2) / len(whole.text.encode("utf-8"))',
                "nats / math.log(2) / tokens",
            ),
        ),
        (TEXTS,),
    ),
    Fault(
        "bits per token of an evaluation",
        "bits are per byte of the text",
        (
            Patch(
                LIKELIHOOD,
                "return self.nll * self.tokens / math.log(2) / size",
                "return self.nll / math.log(2)",
            ),
        ),
        (EVALUATION,),
    ),
    Fault(
        "end token kept in the text",
        "a text ends at the first end token",
        (
            Patch(
                "adlm/text/templates.py",
                "stop = span.start + tokens.index(eos_id)",
                "stop = span.start + tokens.index(eos_id) + 3",
            ),
            Patch(
                "adlm/text/templates.py",
                "tokens = tokens[: tokens.index(eos_id)]",
                "tokens = tokens[: tokens.index(eos_id) + 3]",
            ),
        ),
        (TEXTS,),
    ),
)


def make_copy(folder: Path) -> None:
    """Copy what the ring needs."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target)


def find_patch(fault: Fault, folder: Path) -> Patch:
    """Return the patch of the version of the code in a folder."""
    for patch in fault.patches:
        path = folder / patch.file
        if path.exists() and patch.old in path.read_text("utf-8"):
            return patch
    files = ", ".join(patch.file for patch in fault.patches)
    raise ValueError(f"fault {fault.name!r} applies nowhere in {files}: add a patch for this code")


@contextmanager
def plant(fault: Fault, folder: Path) -> Iterator[None]:
    """A context in which a copy of the tree has a fault."""
    patch = find_patch(fault, folder)
    path = folder / patch.file
    sound = path.read_text("utf-8")
    path.write_text(sound.replace(patch.old, patch.new, 1), "utf-8")
    try:
        yield
    finally:
        path.write_text(sound, "utf-8")


def run_laws(folder: Path, files: tuple[str, ...]) -> str:
    """Run tests of a copy up to the first that fails, and return its name; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += [f"tests/laws/{name}" for name in files] or ["tests/laws"]
    # Bytecode of a file that was changed twice within a second would be taken for the other's.
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0].removeprefix("FAILED ").removeprefix("ERROR ")
    raise RuntimeError(
        f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


@dataclass(frozen=True)
class Verdict:
    """A fault and the test that noticed it, empty if none did."""

    fault: Fault
    test: str
    seconds: float


def try_fault(fault: Fault, folders: "Queue[Path]") -> Verdict:
    """Plant a fault in a free copy and run the likely tests, then all."""
    folder, began = folders.get(), time.monotonic()
    try:
        with plant(fault, folder):
            test = run_laws(folder, fault.files) or run_laws(folder, ())
    finally:
        folders.put(folder)
    verdict = Verdict(fault, test, time.monotonic() - began)
    test = test.removeprefix("tests/laws/") or "NOT CAUGHT"
    print(f"{fault.name:45} {verdict.seconds:6.0f} s  {test}", flush=True)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults and run the laws.")
    parser.add_argument("words", nargs="*", help="Words in the names of faults. [default: all]")
    parser.add_argument("--workers", type=int, default=1, help="Copies of the tree. [default: 1]")
    settings = parser.parse_args()
    chosen = []
    for fault in FAULTS:
        if not settings.words or any(word in fault.name for word in settings.words):
            find_patch(fault, ROOT)
            chosen.append(fault)
    if not chosen:
        raise SystemExit(f"no fault has one of {settings.words} in its name")
    with tempfile.TemporaryDirectory(prefix="adlm-faults-") as place:
        folders: Queue[Path] = Queue()
        for number in range(settings.workers):
            folder = Path(place) / str(number)
            make_copy(folder)
            folders.put(folder)
        with ThreadPoolExecutor(settings.workers) as pool:
            verdicts = list(pool.map(lambda fault: try_fault(fault, folders), chosen))
    caught = sum(bool(verdict.test) for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} faults were caught")
    sys.exit(caught < len(verdicts))


if __name__ == "__main__":
    main()
