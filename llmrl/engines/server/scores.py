"""The part of `ServerEngine` that scores given tokens, with vLLM's `prompt_logprobs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines.base import EngineError
from llmrl.engines.scores import TokenScores, check_scored, read_scores

_NUM_SCORES_A_TOKEN = 16
"""Number of scores with at most as much JSON as one sampled token."""


class ServerScores(ABC):
    """Requests for a server's scores of given tokens, and for the tokens of a text."""

    max_model_len: int
    model: str
    _base_url: str
    _background: BackgroundLoop

    @abstractmethod
    async def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, budget: int | None = None
    ) -> object:
        """Return the server's JSON answer."""

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return token scores as `ScoresTokens.score` does; `top_k` is limited to 20, or the server's `--max-logprobs`.

        Also raises ValueError if the server refuses, and EngineError if it cannot be reached or answers too late.
        """
        check_scored(token_ids, top_k, self.max_model_len)
        body = {"model": self.model, "prompt": list(token_ids), "prompt_logprobs": top_k, "max_tokens": 1}
        budget = len(token_ids) * (1 + top_k // _NUM_SCORES_A_TOKEN)
        asked = self._request("POST", "/v1/completions", body | {"temperature": 0.0}, budget=budget)
        return read_prompt_scores(await self._background.wait(asked), token_ids, top_k, server=self._base_url)

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's tokenizer; special tokens in the text are parsed.

        Raises ValueError if the server refuses, and EngineError if it cannot be reached or returns no ids.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        asked = self._request("POST", "/tokenize", body, budget=len(text))
        answer = await self._background.wait(asked)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            raise EngineError(f"{self._base_url}/tokenize answered without token ids: {str(answer)[:200]}")
        return ids


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
            f"{server} did not say the log-probs of the tokens that it was given (prompt_logprobs, which vLLM's "
            f"/v1/completions has): {type(error).__name__} {error}"
        ) from error
    return read_scores(token_ids, reported_ids, reported, engine=server)
