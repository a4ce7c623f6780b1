"""A simulated trajectory, which the tests of terminal, player and GIF draw."""

import random
import re

from adlm.view.trajectory import (
    GIVEN,
    HIDDEN,
    REMASKED,
    REVEALED,
    VISIBLE,
    TokenState,
    Trajectory,
    TrajectoryFrame,
)

PARAGRAPH = (
    "When the harbour froze, the ferrymen carried their boats up the hill and slept beneath them. By the second week "
    "the children had learned to skate, and the baker, who had never trusted the sea, walked out over it every morning "
    'with a basket of warm rolls. "It will hold," he said to nobody in particular; and until the first of March it did.'
    "\n\nThen one night the lighthouse keeper heard a long, low note, like a cello being tuned in another room, and in "
    "the morning there was a dark line across the bay."
)


def make_trajectory(*states: list[TokenState], title: str = "made") -> Trajectory:
    return Trajectory(
        title,
        tuple(TrajectoryFrame(step, step, tuple(tokens)) for step, tokens in enumerate(states)),
    )


def simulate(
    paragraph: str = PARAGRAPH,
    *,
    steps: int = 64,
    remask: float = 0.05,
    prompt: int = 5,
    seed: int = 0,
    title: str = "loop",
    with_guesses: bool = True,
) -> Trajectory:
    """Simulate the denoising of a paragraph: tokens appear at random, some are hidden again, guesses grow surer."""
    rng = random.Random(seed)
    words = re.findall(r"\s*[A-Za-z]{1,6}|\s*[^A-Za-z\s]|\s+", paragraph)
    visible = [i < prompt for i in range(len(words))]
    before, frames = list(visible), []

    def token_at(i: int, progress: float) -> TokenState:
        is_rare = len(words[i].strip()) >= 5 and words.count(words[i]) == 1
        if i < prompt:
            return TokenState(words[i], GIVEN)
        if visible[i]:
            return TokenState(words[i], VISIBLE if before[i] else REVEALED, is_anchor=is_rare)
        sure = min(0.99, rng.random() * (0.3 + progress))
        guess = words[i] if rng.random() < 0.3 + progress / 2 else rng.choice(words)
        guesses = ((guess, sure), (" the", sure / 2)) if with_guesses else ()
        return TokenState("", REMASKED if before[i] else HIDDEN, guesses, is_rare)

    for step in range(steps + 1):
        before = list(visible)
        hidden = [i for i, is_visible in enumerate(visible) if not is_visible]
        for i in rng.sample(hidden, -(-len(hidden) // (steps - step + 1)) if step else 0):
            visible[i] = True
        for i in range(prompt, len(words)):
            if before[i] and step < 0.8 * steps and rng.random() < remask:
                visible[i] = False
        frames.append([token_at(i, step / steps) for i in range(len(words))])
    return make_trajectory(*frames, title=title)
