"""Reading of a server's scores of given tokens, by vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmrl.engines.base import EngineError
from llmrl.engines.scores import TokenScores, read_scores


def read_prompt_scores(answer: object, token_ids: Sequence[int], top_k: int, *, server: str) -> TokenScores:
    """Read the scores of a prompt's tokens from a server's answer. Raises EngineError if they are invalid.

    Example:
        >>> place = {"7": {"logprob": -2.0, "rank": 4}, "5": {"logprob": -0.5, "rank": 1}}
        >>> answer = {"choices": [{"prompt_logprobs": [None, place]}]}
        >>> read_prompt_scores(answer, [3, 7], 1, server="http://host").top_log_probs.tolist()
        [[0.0], [-0.5]]
    """
    ids = []
    log_probs = []
    try:
        _, *places = answer["choices"][0]["prompt_logprobs"]  # type: ignore[index]
        for token_id, place in zip(token_ids[1:], places, strict=True):
            # If the token is not among the likeliest, its rank is greater than theirs.
            likeliest = sorted((entry["rank"], int(name), entry["logprob"]) for name, entry in place.items())[:top_k]
            ids.append([token_id, *(number for _, number, _ in likeliest)])
            log_probs.append([place[str(token_id)]["logprob"], *(log_prob for *_, log_prob in likeliest)])
        shape = (len(token_ids) - 1, 1 + top_k)
        reported_ids = torch.tensor(ids).view(shape)
        reported = torch.tensor(log_probs, dtype=torch.float32).view(shape)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise EngineError(
            f"{server} did not return the log-probs of the given tokens (prompt_logprobs, which vLLM's "
            f"/v1/completions supports): {type(error).__name__} {error}"
        ) from error
    return read_scores(token_ids, reported_ids, reported, engine=server)
