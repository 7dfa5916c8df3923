"""On-policy distillation as advantages."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl.data.ragged import flat_batch, has_entry, ragged_column, write_column
from llmrl.objectives.kl import masked_kl


class TeacherAdvantage(Transform):
    """Gives each trained token the advantage `coeff * (log pi_teacher - log pi)`, for what the student sampled.

    Its policy gradient is that of the reverse KL to the teacher at each token, without what a token does to later ones
    (on-policy distillation, arXiv:2306.13649, with tokens of the student alone). With `GRPOLoss` it has
    the ratio, the clip and the corrections of reinforcement learning. An advantage that is there already, such as
    `MCAdvantage`'s, is added to: the reward says what is right, the teacher how. A batch that has the KL is left alone.

    Args:
        coeff: coefficient of the teacher's part.
        log_prob_key: the student's log-probs, those that the sampler reported by default.
        teacher_log_prob_key: the teacher's of the same tokens, as `write_log_probs` writes them.
        mask_key: mask of the trained tokens.
        advantage_key: entry written, `[num_tokens, 1]` per row, 0 where nothing is trained.
        kl_key: entry written, `[num_tokens, 1]` per row: the estimate `log pi - log pi_teacher`, alike.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict({"log_probs": {"full": torch.tensor([0.0, -1.0])}, "advantage": torch.ones(1, 1),
        ...     "next": {"teacher_log_probs": {"full": torch.tensor([0.0, -3.0])}},
        ...     "masks": {"all_assistant_mask": torch.tensor([False, True])}})
        >>> TeacherAdvantage()(lazy_stack([row]))[0]["advantage"].flatten()
        tensor([ 0., -1.])
    """

    def __init__(
        self,
        coeff: float = 1.0,
        *,
        log_prob_key: NestedKey = ("log_probs", "full"),
        teacher_log_prob_key: NestedKey = ("next", "teacher_log_probs", "full"),
        mask_key: NestedKey = ("masks", "all_assistant_mask"),
        advantage_key: NestedKey = "advantage",
        kl_key: NestedKey = "kl_to_teacher",
    ) -> None:
        super().__init__()
        self.coeff = coeff
        self.advantage_key = advantage_key
        self.kl_key = kl_key
        self.log_prob_key = log_prob_key
        self.teacher_log_prob_key = teacher_log_prob_key
        self.mask_key = mask_key
        self.in_keys = [log_prob_key, teacher_log_prob_key, mask_key]
        self.out_keys = [advantage_key, kl_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantages of a batch, in place."""
        batch = flat_batch(tensordict)
        if not batch.batch_size.numel() or has_entry(batch, self.kl_key):
            return tensordict
        keys = (self.log_prob_key, self.teacher_log_prob_key, self.mask_key)
        columns = [ragged_column(batch, key) for key in keys]
        kls = [masked_kl(*row) for row in zip(*columns, strict=True)]
        masks = columns[-1]
        written = [-self.coeff * kl for kl in kls]
        if has_entry(batch, self.advantage_key):
            rewarded = [advantage.reshape(-1) for advantage in ragged_column(batch, self.advantage_key)]
            parts = zip(rewarded, written, masks, strict=True)
            written = [(advantage + part) * mask for advantage, part, mask in parts]
        write_column(tensordict, self.advantage_key, [advantage.unsqueeze(-1) for advantage in written])
        write_column(tensordict, self.kl_key, [kl.unsqueeze(-1) for kl in kls])
        return tensordict
