"""TextArena's Wordle: five letters, six guesses; the reward is 1 for the word, else the share of letters in place."""

from __future__ import annotations

from llmrl.envs import GameEnv, make_textarena_env

PROMPT = "You play Wordle. Think about the feedback, then end with one guess in square brackets, such as [crane]."


def env(split: str = "train", repeats: int = 16, seed: int = 0) -> GameEnv:
    """Return the environment: games of 1,000 seeds for training, or of 100 other seeds."""
    return make_textarena_env(
        "Wordle-v0",
        num_players=1,
        seeds=range(1000) if split == "train" else range(1_000_000, 1_000_100),
        system_prompt=PROMPT,
        repeats=repeats,
        name=split,
        shuffle=True,
        seed=seed,
    )
