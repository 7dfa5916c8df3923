"""A teacher served by an engine, which returns the log-probs of given tokens."""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from llmrl._utils.asynchronous import run_sync
from llmrl._utils.ranks import gather_or_fail, rank_and_size
from llmrl._utils.types import Tokenizer
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.data.ragged import flat_batch, ragged_column
from llmrl.data.sampling_mask import read_sampling_masks
from llmrl.engines.base import HasTokenizer
from llmrl.engines.replicas import EngineReplicas
from llmrl.engines.scores import ScoresTokens, TokenScores
from llmrl.engines.server.engine import ServerEngine
from llmrl.trainer.trained_model import trained_model

if TYPE_CHECKING:
    from llmrl.trainer.transformers_wrapper import TransformersWrapper

_NUM_WORDS = 512
"""Number of vocabulary entries per text; small enough for the context of any model."""


class EngineTeacher:
    """A teacher served by an engine, as an alternative to `load_teacher`.

    `write_log_probs` and `write_top_k` score all rows of a batch concurrently. An engine scores
    whole distributions at temperature 1, so other temperatures and rows sampled from truncated
    distributions are refused. If the student is sharded, each rank requests its share of the rows.

    Args:
        policy: the student, with `generate=False`.
        engine: `ServerEngine("http://host:8000")` of a `vllm serve`, an `AsyncVLLM`, a
            `TransformersEngine`, another object with a `score` method, or `EngineReplicas` of
            these. Its context must hold the longest row plus one token.
        tokenizer: tokenizer of the student.

    Raises:
        TypeError: if the engine does not score given tokens.
        ValueError: if the student's temperature is not 1, or the engine's tokenizer differs; the
            message names the first differing entry.

    Example:
        >>> teacher = EngineTeacher(actor, ServerEngine("http://host:8000"), tokenizer=tokenizer)    # doctest: +SKIP
        >>> write_log_probs(teacher, batch, ("next", "teacher_log_probs", "full"))                   # doctest: +SKIP
    """

    def __init__(self, policy: TransformersWrapper, engine: ScoresTokens, *, tokenizer: Tokenizer) -> None:
        engines = list(engine) if isinstance(engine, EngineReplicas) else [engine]
        for one in engines:
            if not isinstance(one, ScoresTokens):
                raise TypeError(
                    f"engine must score given tokens, but {type(one).__name__} has no method score; pass an AsyncVLLM, "
                    "a ServerEngine or a TransformersEngine."
                )
        if policy.temperature != 1:
            raise ValueError(
                f"the student samples at temperature {policy.temperature:g}, but an engine scores given tokens only at "
                "temperature 1: sample at temperature 1, or use load_teacher, which computes the teacher at the "
                "student's temperature."
            )
        for one in engines:
            if isinstance(one, ServerEngine):
                _check_served_tokenizer(one, tokenizer)
            elif isinstance(one, HasTokenizer) and (theirs := one.get_tokenizer()) is not None:
                check_same_tokenizer(tokenizer, theirs, teacher=type(one).__name__)
        self.engine = engine
        self._student = policy

    def scores(self, batch: TensorDictBase, *, top_k: int = 0, assistant_only: bool = True) -> list[TokenScores]:
        """Return the teacher's scores of each row's tokens; tokens that are not scored have log-prob 0 and ids -1.

        Raises ValueError if rows were sampled from truncated distributions or are too long, and
        EngineError if an engine fails.
        """
        rows = flat_batch(batch)
        token_ids = [ids.cpu() for ids in ragged_column(rows, TOKENS_KEY)]
        if read_sampling_masks(rows, [len(ids) for ids in token_ids]) is not None:
            raise ValueError(
                "an engine scores whole distributions, but these rows were sampled from truncated ones: sample with "
                "top_p=1, top_k=0 and min_p=0, or load the teacher (load_teacher)."
            )
        masks = [torch.ones_like(ids).bool() for ids in token_ids]
        if assistant_only:
            masks = [mask.cpu().bool() for mask in ragged_column(rows, LOSS_MASK_KEY)]
        group = trained_model(self._student.model).process_group
        rank, num_ranks = rank_and_size(group)
        own = list(zip(token_ids, masks, strict=True))[rank::num_ranks]

        async def scored() -> list[TokenScores]:
            return list(await asyncio.gather(*(self._scored_row(ids, mask, top_k) for ids, mask in own)))

        parts = gather_or_fail(lambda: run_sync(scored()), group)
        return [parts[index % num_ranks][index // num_ranks] for index in range(len(token_ids))]

    async def _scored_row(self, ids: torch.Tensor, mask: torch.Tensor, top_k: int) -> TokenScores:
        mask = mask.clone()
        mask[:1] = False
        # Tokens after the last trained token do not affect its log-prob.
        num_needed = int(mask.nonzero()[-1]) + 1 if mask.any() else 0
        no_ids = torch.full((len(ids), top_k), -1)
        scores = TokenScores(torch.zeros(len(ids)), no_ids, torch.zeros(len(ids), top_k))
        if num_needed:
            found = await self.engine.score(ids[:num_needed].tolist(), top_k=top_k)
            for name in ("log_probs", "top_ids", "top_log_probs"):
                getattr(scores, name)[mask] = getattr(found, name)[mask[:num_needed]]
        return scores


def check_same_tokenizer(ours: Tokenizer, theirs: Tokenizer, *, teacher: str) -> None:
    """Raise ValueError if a teacher's vocabulary differs from the student's, naming the first differing entry."""
    differing = {*ours.get_vocab().items()} ^ {*theirs.get_vocab().items()}
    if differing:
        token, number = min(differing, key=lambda entry: entry[1])
        raise ValueError(
            f"the teacher {teacher!r} has another tokenizer than the student: {len(differing)} entries of their "
            f"vocabularies differ, the first is {token!r} with id {number}. The teacher would read the student's ids "
            "as other text: choose a teacher of the student's model family."
        )


def _check_served_tokenizer(engine: ServerEngine, tokenizer: Tokenizer) -> None:
    """Raise ValueError if a server, which cannot report its vocabulary, tokenizes the student's differently."""
    words = [tokenizer.decode([number]) for number in sorted(tokenizer.get_vocab().values())]
    texts = ["\n".join(words[start : start + _NUM_WORDS]) for start in range(0, len(words), _NUM_WORDS)]

    async def tokenized() -> list[list[int]]:
        return list(await asyncio.gather(*map(engine.tokenize, texts)))

    for text, theirs in zip(texts, run_sync(tokenized()), strict=True):
        ours = tokenizer.encode(text, add_special_tokens=False)
        if ours == theirs:
            continue
        pairs = enumerate(zip_longest(ours, theirs))
        place = next(index for index, (our_id, their_id) in pairs if our_id != their_id)
        around = tokenizer.decode(ours[max(0, place - 2) : place + 3])
        raise ValueError(
            f"the server's model {engine.model!r} has another tokenizer than the student: in the text {around!r}, it "
            f"makes {theirs[place : place + 3]} where the student's makes {ours[place : place + 3]}. The teacher would "
            "read the student's ids as other text: choose a teacher of the student's model family."
        )
