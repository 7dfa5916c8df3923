"""KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Hashable
from typing import get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl._utils.arguments import check_choice
from llmrl.data.keys import LOSS_MASK_KEY
from llmrl.data.ragged import flat_batch, has_entry, ragged_column, write_column
from llmrl.objectives.advantages.grouping import GroupKeys, add_to_rewards
from llmrl.objectives.kl import KLEstimator, masked_kl

_REWARD: NestedKey = ("next", "reward")
_KL = "kl_penalty"


class KLPenalty(Transform):
    """Subtracts `coeff * KL(policy || other)`, summed over trained tokens, from the reward of each rollout.

    With `k1` this is RLHF's reward, `r - coeff * log(pi / pi_ref)` (RLOO, arXiv:2402.14740, equation 3). It is applied
    before `MCAdvantage` to complete rollouts. The rollout's KL is written as `"kl_penalty"`, `[1, 1]` per row; a batch
    that has it is returned as is. `MCAdvantage(kl_penalty=)` instead uses `to_go` per token and
    does not change rewards. For single turns use `llmrl.transforms.KLComputation`.

    Args:
        log_prob_key: log-probs of the policy, by default the sampler's; `("old_log_probs", "full")` are the trainer's.
        other_log_prob_key: log-probs of the other model, by default the reference;
            `("log_probs", "full")` are the sampler's.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict({"log_probs": {"full": torch.tensor([0.0, -1.0])}, "next": {"reward": torch.ones(1, 1),
        ...     "ref_log_probs": {"full": torch.tensor([0.0, -3.0])}}, "rollout": {"rollout_id": "a"},
        ...     "masks": {"all_assistant_mask": torch.tensor([False, True])}})
        >>> KLPenalty(0.1)(lazy_stack([row]))["next", "reward"].flatten()
        tensor([0.8000])
    """

    def __init__(
        self,
        coeff: float,
        *,
        estimator: KLEstimator = "k1",
        log_prob_key: NestedKey = ("log_probs", "full"),
        other_log_prob_key: NestedKey = ("next", "ref_log_probs", "full"),
    ) -> None:
        super().__init__()
        check_choice(get_args(KLEstimator), estimator=estimator)
        self.coeff = coeff
        self.estimator: KLEstimator = estimator
        self.keys = GroupKeys()
        self.in_keys = [log_prob_key, other_log_prob_key, LOSS_MASK_KEY, self.keys.rollout, _REWARD]
        self.out_keys = [_REWARD, _KL]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalize the rewards of a batch in place."""
        batch = flat_batch(tensordict)
        if not batch.batch_size.numel() or has_entry(batch, _KL):
            return tensordict
        rows = batch.unbind(0)
        totals: dict[Hashable, torch.Tensor] = {}
        for row, divergences in zip(rows, self._divergences(batch), strict=True):
            name = self.keys.rollout_id(row)
            totals[name] = totals.get(name, 0.0) + divergences.sum()
        of_rows = [totals[self.keys.rollout_id(row)] for row in rows]
        written = [one.to(row[_REWARD].dtype).reshape(1, 1) for one, row in zip(of_rows, rows, strict=True)]
        add_to_rewards(tensordict, [-self.coeff * float(one.detach()) for one in of_rows], _REWARD)
        write_column(tensordict, _KL, written)
        return tensordict

    def to_go(self, batch: TensorDictBase) -> list[torch.Tensor]:
        """Return the penalty of each trained token plus all later ones, `[num_tokens]` per row, 0 elsewhere.

        This is the KL part of the reward-to-go (REINFORCE++, arXiv:2501.03262, equation 8). The batch must have all
        rows of its rollouts in order; ValueError is raised if its rewards were already penalized.
        """
        if has_entry(batch, _KL):
            raise ValueError(
                f"The rewards of the batch are already penalized (the batch has {_KL!r}): apply KLPenalty to the "
                "reward, or pass it to MCAdvantage, not both."
            )
        later: dict[Hashable, torch.Tensor] = {}
        penalties = []
        columns = zip(batch.unbind(0), self._divergences(batch), ragged_column(batch, LOSS_MASK_KEY), strict=True)
        for row, divergences, mask in reversed(list(columns)):
            name = self.keys.rollout_id(row)
            sums = divergences.flip(0).cumsum(0).flip(0) + later.get(name, 0.0)
            later[name] = later.get(name, 0.0) + divergences.sum()
            penalties.append(self.coeff * sums * mask)
        return penalties[::-1]

    def _divergences(self, batch: TensorDictBase) -> list[torch.Tensor]:
        """Return one estimate per token, `[num_tokens]` float64 per row; 0 at tokens that are not trained."""
        columns = [ragged_column(batch, key) for key in self.in_keys[:3]]
        return [
            masked_kl(log_probs.double(), others.double(), mask, self.estimator)
            for log_probs, others, mask in zip(*columns, strict=True)
        ]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalize rows before they are written to a replay buffer."""
        return self.forward(tensordict)


def dense_reward(
    reward: torch.Tensor, divergences: torch.Tensor, mask: torch.Tensor, coeff: float = 1.0
) -> torch.Tensor:
    """Return a turn's reward minus the penalty of each token, `[num_tokens, 1]`.

    `reward` is `[1, 1]`, added at the last sampled token, or dense, `[num_tokens, 1]`. `divergences` and `mask`, true
    at sampled tokens, are `[num_tokens]`; divergences are 0 outside the mask.

    Example:
        >>> dense_reward(torch.ones(1, 1), torch.tensor([0.0, 2.0, 4.0]), torch.tensor([False, True, True]), 0.1)
        tensor([[ 0.0000],
                [-0.2000],
                [ 0.6000]])
    """
    dense = 0.0 - coeff * divergences.unsqueeze(-1)  # no negative zeros
    if reward.shape == dense.shape:
        return dense + reward
    sampled = mask.nonzero().flatten().tolist() or [len(mask) - 1]
    return dense.index_add(0, torch.tensor(sampled[-1:], device=dense.device), reward.sum().reshape(1, 1))
