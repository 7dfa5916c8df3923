"""`Demonstrations`, which yields recorded conversations as batches of training rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

from tensordict import TensorDictBase, lazy_stack

from llmrl._utils.arguments import check_least
from llmrl._utils.types import Row, StateDict
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.rows import rollout_rows
from llmrl.collectors.weights import Weights, WeightScheme, WeightSenders
from llmrl.data import Rollout, RolloutStatus
from llmrl.endpoint.chat_logs import read_chat_log
from llmrl.envs.sampler import Drawn, PromptSampler
from llmrl.envs.sources import Source, load_rows
from llmrl.rendering import Renderer, demonstrate

_NUM_NAMED = 8


class Demonstrations:
    """Iterable of batches of training rows from recorded conversations, for `SFTLoss`.

    Each row of the dataset has `messages` and optionally `tools`, or a logged `request` and its `response` in OpenAI's
    format; the arguments of a call are a dict or a JSON string. The assistant's messages are
    trained on. All conversations are rendered at the beginning, so errors are raised before
    training. A `Run` uses this in place of a collector, and saves its position in the data.

    Args:
        dataset: dataset as `load_rows` accepts it, such as a JSON lines file.
        conversations_per_batch: number of conversations; the next epoch fills up the last batch of an epoch.
        max_tokens: maximum length of a row; longer ones are left out with a warning, since
            truncated conversations would teach the model to stop early. Unlimited by default.
        shuffle: whether each epoch has its own order.
        num_epochs: number of epochs after which iteration ends; None never ends.

    Raises:
        FileNotFoundError: if the dataset's file or folder is missing.
        ValueError: if messages are malformed, have nothing to train or cannot be rendered as they
            would be sampled (the message names the row); or if all are longer than `max_tokens`.

    Example:
        >>> said = [{"messages": [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}]}]
        >>> batch = next(iter(Demonstrations(said, renderer, conversations_per_batch=8)))     # doctest: +SKIP
        >>> SFTLoss(actor, reduction="token_mean")(batch).loss_sft.backward()                 # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Source,
        renderer: Renderer,
        *,
        conversations_per_batch: int,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int | None = None,
    ) -> None:
        check_least(1, conversations_per_batch=conversations_per_batch)
        self._renderer = renderer
        self._size = conversations_per_batch
        kept = _that_fit(load_rows(dataset), renderer, max_tokens)
        self.prompts = PromptSampler(kept, shuffle=shuffle, seed=seed, num_epochs=num_epochs, name="demonstrations")
        """Order of the conversations."""
        self.engine: object = None
        """Engine that receives the weights, for evaluation."""
        self._weight_senders: WeightSenders | None = None
        self.rollouts: list[Rollout] = []
        """Always empty: nothing is played."""
        self.report: CollectionReport | None = None
        """Report on the last batch."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        while True:
            started = time.perf_counter()
            count = len(self.prompts.upcoming(self._size))
            if not count:
                return
            shown = [_rollout(drawn, self._renderer) for drawn in self.prompts.draw_many(count)]
            batch = lazy_stack([row for rollout in shown for row in rollout_rows(rollout)])
            self.report = CollectionReport.of(shown, seconds=time.perf_counter() - started)
            yield batch

    def all_rows(self) -> TensorDictBase:
        """Return the rows of all conversations in the dataset's order, without drawing any."""
        items = self.prompts.items
        rollouts = [_rollout((items[place], f"held-out/{place}", 0), self._renderer) for place in range(len(items))]
        return lazy_stack([row for rollout in rollouts for row in rollout_rows(rollout)])

    def connect(self, engine: object, weight_sync_schemes: Mapping[str, WeightScheme] | None = None) -> None:
        """Send the trainer's weights to an engine from now on, as `LLMCollector` does."""
        self.engine = engine
        self._weight_senders = WeightSenders(weight_sync_schemes or {}, self)

    def update_policy_weights_(self, model: Weights | None = None) -> int:
        """Send the weights to the engine, if there is one, and return the policy version."""
        if self._weight_senders is None:
            return 0
        return max(sender.update_weights() for sender in self._weight_senders.connected(model))

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights; 0 without an engine."""
        return getattr(self.engine, "policy_version", 0)

    def state_dict(self) -> StateDict:
        """Return the position in the data."""
        return {"prompts": self.prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a saved position; raise ValueError if it is of other data or order."""
        self.prompts.load_state_dict(state["prompts"])

    def shutdown(self) -> None:
        """Close the weight senders; the engine keeps running."""
        if self._weight_senders is not None:
            self._weight_senders.shutdown()

    def __enter__(self) -> Demonstrations:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _that_fit(rows: Sequence[Row], renderer: Renderer, max_tokens: int | None) -> Sequence[Row]:
    """Render all rows and return those that are not longer than `max_tokens`."""
    lengths: list[int] = []
    for index in range(len(rows)):
        try:
            turns = _rollout((rows[index], "", 0), renderer).conversation.turns
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {index} of the conversations cannot be trained on: {error}") from error
        lengths.append(max(turn.num_tokens for turn in turns))
    too_long = [] if max_tokens is None else [index for index, length in enumerate(lengths) if length > max_tokens]
    if not too_long:
        return rows
    named = ", ".join(map(str, too_long[:_NUM_NAMED])) + (" and more" if len(too_long) > _NUM_NAMED else "")
    what = f"longer than max_tokens={max_tokens} (the longest has {max(lengths)})"
    if len(too_long) == len(rows):
        raise ValueError(
            f"all {len(rows)} conversations are {what}: raise max_tokens (model.max_model_len), or shorten them."
        )
    warnings.warn(
        f"{len(too_long)} of {len(rows)} conversations are {what} and left out: rows {named}.",
        stacklevel=3,
    )
    left_out = set(too_long)
    return [rows[index] for index in range(len(rows)) if index not in left_out]


def _rollout(drawn: Drawn, renderer: Renderer) -> Rollout:
    """Return a drawn conversation as an unscored rollout."""
    given, group_id, sample_index = drawn
    row = read_chat_log(given)
    messages = row["messages"]
    conversation = demonstrate(renderer, messages, tools=row.get("tools"))
    counts = conversation.count_turns()
    return Rollout(
        rollout_id=f"{group_id}/{sample_index}",
        group_id=group_id,
        sample_index=sample_index,
        group_size=1,
        conversation=conversation,
        messages=tuple(messages),
        status=RolloutStatus.COMPLETED,
        num_turns=conversation.num_turns,
        num_completion_tokens=conversation.num_completion_tokens,
        num_forks=counts["num_forked_turns"],
        num_realigned_tokens=counts["num_realigned_tokens"],
    )
