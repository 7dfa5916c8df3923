"""Advantages for on-policy distillation."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from llmrl.data.ragged import flat_batch, has_entry, ragged_column, write_column
from llmrl.objectives.kl import masked_kl


class TeacherAdvantage(Transform):
    """Writes the advantage `coeff * (log pi_teacher - log pi)` of each trained token that the student sampled.

    Its policy gradient is that of the reverse KL at each token, without the effect of a token on later ones (on-policy
    distillation, arXiv:2306.13649). An existing advantage, such as that of `MCAdvantage`, is added.

    The student's log-probs are the sampler's; `write_log_probs` writes the teacher's under
    `("next", "teacher_log_probs", "full")`. Writes `"advantage"` and `"kl_to_teacher"` (`log pi - log pi_teacher`),
    `[num_tokens, 1]` per row, 0 at tokens that are not trained. A batch that has `"kl_to_teacher"` is returned as is.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict({"log_probs": {"full": torch.tensor([0.0, -1.0])}, "advantage": torch.ones(1, 1),
        ...     "next": {"teacher_log_probs": {"full": torch.tensor([0.0, -3.0])}},
        ...     "masks": {"all_assistant_mask": torch.tensor([False, True])}})
        >>> TeacherAdvantage()(lazy_stack([row]))[0]["advantage"].flatten()
        tensor([ 0., -1.])
    """

    def __init__(self, coeff: float = 1.0) -> None:
        super().__init__()
        self.coeff = coeff
        self.in_keys = [("log_probs", "full"), ("next", "teacher_log_probs", "full"), ("masks", "all_assistant_mask")]
        self.out_keys = ["advantage", "kl_to_teacher"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantages of a batch in place."""
        batch = flat_batch(tensordict)
        if not batch.batch_size.numel() or has_entry(batch, "kl_to_teacher"):
            return tensordict
        log_probs, teachers, masks = (ragged_column(batch, key) for key in self.in_keys)
        kls = [masked_kl(*row) for row in zip(log_probs, teachers, masks, strict=True)]
        written = [-self.coeff * kl for kl in kls]
        if has_entry(batch, "advantage"):
            rewarded = [advantage.reshape(-1) for advantage in ragged_column(batch, "advantage")]
            parts = zip(rewarded, written, masks, strict=True)
            written = [(advantage + part) * mask for advantage, part, mask in parts]
        write_column(tensordict, "advantage", [advantage.unsqueeze(-1) for advantage in written])
        write_column(tensordict, "kl_to_teacher", [kl.unsqueeze(-1) for kl in kls])
        return tensordict
