"""Log-probs of a batch under a model that does not train on it: the old policy, a reference or a teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl._utils.arguments import check_least
from llmrl._utils.ranks import share_of
from llmrl.data import Message, text_of
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.data.message import prompt_of
from llmrl.data.ragged import flat_batch, ragged_column, write_column
from llmrl.data.sampling_mask import SAMPLING_MASK_KEY, read_sampling_masks
from llmrl.data.tensordicts import plain
from llmrl.objectives.scoring import log_probs_of
from llmrl.trainer.engine_teacher import EngineTeacher
from llmrl.trainer.head.divergence import TOP_K_KEY, chunked_top_k
from llmrl.trainer.trained_model import trained_model
from llmrl.trainer.transformers_wrapper import TransformersWrapper

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


_HISTORY: NestedKey = ("history", "full")
_HINTED: NestedKey = ("hinted", "full")


@torch.no_grad()
def write_log_probs(
    policy: TransformersWrapper | EngineTeacher,
    batch: TensorDictBase,
    key: NestedKey,
    *,
    disable_adapter: bool = False,
    assistant_only: bool = True,
) -> TensorDictBase:
    """Write a policy's log-probs of the trained tokens under `key`, `[num_tokens]` float32 per row; return the batch.

    If the model is sharded, every rank must pass the same batch; the ranks share the work and each has all results.

    Usual keys are

    - `("old_log_probs", "full")` for the trained policy, before the first of several updates on a batch;
    - `("next", "ref_log_probs", "full")` for a reference, with LoRA the trained policy with `disable_adapter`;
    - `("next", "teacher_log_probs", "full")` for a teacher.

    Args:
        policy: model that scores, without gradient, or an `EngineTeacher`.
        disable_adapter: whether to disable the adapters of a peft model.
        assistant_only: whether to score only trained tokens; losses with `masking_strategy="generic"` need all.

    Raises:
        TypeError: if `disable_adapter` is given for a model without adapters.
        EngineError: if a teacher's engine fails.
    """
    if isinstance(policy, EngineTeacher):
        if disable_adapter:
            raise TypeError("disable_adapter needs a peft model, got an EngineTeacher; leave disable_adapter out.")
        scored = [row.log_probs for row in policy.scores(batch, assistant_only=assistant_only)]
    else:
        group = trained_model(policy.model).process_group
        with _adapters_off(policy.model) if disable_adapter else contextlib.nullcontext():
            scored = log_probs_of(policy, batch, assistant_only=assistant_only, process_group=group)
    write_column(batch, key, scored)
    return batch


@torch.no_grad()
def write_top_k(
    teacher: TransformersWrapper | EngineTeacher, batch: TensorDictBase, top_k: int, *, key: tuple[str, ...] = TOP_K_KEY
) -> TensorDictBase:
    """Write a teacher's most likely ids at each trained token and their log-probs, for `TeacherTopK`; return the batch.

    If the model is sharded, every rank must pass the same batch; the ranks share the work and each has all results.

    Args:
        top_k: number of ids per token; a vLLM server returns at most 20 by default.
        key: parent of the entries `token_ids` (int64) and `log_probs` (float32),
            `[num_tokens, top_k]` per row; outside the mask, they are -1 and 0.

    Raises:
        ValueError: if `top_k` is below 1 or above the teacher's vocabulary, or rows were sampled
            from truncated distributions.
        EngineError: if the teacher's engine fails.
    """
    check_least(1, top_k=top_k)
    if isinstance(teacher, EngineTeacher):
        columns = [(row.top_ids, row.top_log_probs) for row in teacher.scores(batch, top_k=top_k)]
    else:
        columns = _top_k_of(teacher, flat_batch(batch), top_k)
    for name, rows in zip(("token_ids", "log_probs"), zip(*columns, strict=True), strict=True):
        write_column(batch, (*key, name), rows)
    return batch


def _top_k_of(
    teacher: TransformersWrapper, rows: TensorDictBase, top_k: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    token_ids = ragged_column(rows, TOKENS_KEY)
    masks = [mask.bool() for mask in ragged_column(rows, LOSS_MASK_KEY)]
    lengths = [len(ids) for ids in token_ids]
    if read_sampling_masks(rows, lengths) is not None:
        raise ValueError(
            "write_top_k reads the teacher's whole distribution, but these rows were sampled from truncated ones: "
            "sample with top_p=1, top_k=0 and min_p=0."
        )
    starts = torch.tensor([0, *lengths], device=teacher.device).cumsum(0)
    log_probs = torch.zeros(sum(lengths), top_k, device=teacher.device)
    ids = torch.zeros_like(log_probs, dtype=torch.int64)
    record = trained_model(teacher.model)
    for packed, is_repeated in share_of(teacher.pack(token_ids, masks), *record.place):
        head, positions = teacher.packed_head(packed)
        if record.is_reporting and not is_repeated:
            found = chunked_top_k(head, top_k, chunk_size=teacher.chunk_size)
            flat = starts[packed.row_index] + packed.token_index
            ids[flat] = found.token_ids[positions]
            log_probs[flat] = found.log_probs[positions].float()
    if record.process_group is not None:
        for column in (ids, log_probs):
            torch.distributed.all_reduce(column, group=record.process_group)
    ids[~torch.cat(masks).to(ids.device)] = -1
    ids[starts[:-1]] = -1
    return list(zip(ids.split(lengths), log_probs.split(lengths), strict=True))


def write_hinted_log_probs(
    policy: TransformersWrapper | EngineTeacher,
    batch: TensorDictBase,
    key: NestedKey,
    *,
    hints: Sequence[str],
    render: Callable[[Sequence[Message]], list[int]],
) -> TensorDictBase:
    """Write the log-probs of the trained tokens given a first prompt extended by a hint (privileged information).

    A policy that reads a solution or a judge's feedback can teach the same policy without that hint
    (self-distillation; OPSD, arXiv:2601.18734; SDPO, arXiv:2601.20802). The hint is appended to the
    last message before the first answer; later turns stay as they were sampled.

    Args:
        batch: training rows with conversations in `("history", "full")`; changed in place.
        key: entry to write, `[num_tokens]` float32 per row.
        hints: one text per row.
        render: function from messages to prompt ids: `partial(renderer.render, add_generation_prompt=True)`.

    Raises:
        ValueError: if a row does not begin with its rendered prompt, because its history was
            rewritten or its prompt contains tools.
    """
    rows = flat_batch(batch).unbind(0)
    prompts = []
    for index, (row, hint) in enumerate(zip(rows, hints, strict=True)):
        messages = prompt_of(plain(row[_HISTORY]).chats)
        shown = render(messages)
        ids = row[TOKENS_KEY]
        if ids[: len(shown)].tolist() != shown:
            raise ValueError(
                f"row {index} does not begin with the prompt rendered from the first messages of its conversation: its "
                "history was rewritten, or its prompt contains tools. Pass only rows that begin their conversation."
            )
        last = {**messages[-1], "content": f"{text_of(messages[-1]['content'])}\n\n{hint}"}
        prompts.append((len(shown), render([*messages[:-1], last])))
    scored = write_log_probs(
        policy, lazy_stack([_with_prompt(row, *prompt) for row, prompt in zip(rows, prompts, strict=True)]), _HINTED
    )
    columns = [
        torch.cat([torch.zeros(num_shown), row[_HINTED][len(hinted) :].cpu()])
        for row, (num_shown, hinted) in zip(scored.unbind(0), prompts, strict=True)
    ]
    write_column(batch, key, columns)
    return batch


def _with_prompt(row: TensorDictBase, num_replaced: int, prompt_ids: list[int]) -> TensorDictBase:
    """Return the entries of a row that scoring reads, with the first `num_replaced` tokens replaced."""

    def after(column: torch.Tensor, first: list[int]) -> torch.Tensor:
        return torch.cat([torch.tensor(first, dtype=column.dtype), column[num_replaced:].cpu()])

    nothing = [0] * len(prompt_ids)
    replaced = TensorDict({"tokens": {"full": after(row[TOKENS_KEY], prompt_ids)}})
    replaced["masks", "all_assistant_mask"] = after(row["masks", "all_assistant_mask"], nothing)
    if (sampling_mask := row.get(SAMPLING_MASK_KEY, None)) is not None:
        counts = after(sampling_mask["counts"], nothing)
        replaced[SAMPLING_MASK_KEY] = TensorDict({"counts": counts, "token_ids": sampling_mask["token_ids"]})
    return replaced


def _adapters_off(model: PreTrainedModel | PeftModel) -> contextlib.AbstractContextManager[object]:
    if not hasattr(model, "disable_adapter"):
        raise TypeError(
            f"disable_adapter needs a peft model, got {type(model).__name__}; score with a reference model instead."
        )
    return model.disable_adapter()
