"""What a run can be told that imitates: conversations, a teacher, its own best answers. See `llmrl.runs.config`."""

from __future__ import annotations

from dataclasses import dataclass

from llmrl._utils.types import Row
from llmrl.runs.config import CollectConfig, GRPOTrainConfig, ScriptConfig, TrainConfig


@dataclass(slots=True, kw_only=True)
class ConversationsConfig:
    """Conversations to learn from: rows with `messages`, and `tools` where there are some (`Demonstrations`)."""

    path: str
    """A file, folder or hub name; `collect.groups_per_batch` of them make a batch."""
    held_out: str | None = None
    """Others, whose loss is `eval/loss`; null: none."""


@dataclass(slots=True, kw_only=True)
class SFTConfig(ScriptConfig):
    """Of `sota-implementations/sft/sft.py`."""

    conversations: ConversationsConfig
    """What is learned."""
    algorithm: str = "sft"


@dataclass(slots=True, kw_only=True)
class TeacherConfig:
    """Whose log-probs the student's tokens are judged by."""

    path: str | None = None
    """A Hugging Face name or folder of a model with the student's tokenizer, loaded beside the student."""
    url: str | None = None
    """Or the address of a `vllm serve` of such a model, which asks for `collect.temperature=1`; neither: the student
    itself, with a hint."""
    hint: str | None = None
    """What the teacher's prompt says besides, with columns of the problem: `The answer is {answer}.`; null: nothing."""
    coeff: float = 1.0
    """Of the teacher's part of each token's advantage; 1 is the gradient of the KL itself."""
    top_k: int | None = None
    """Compare whole distributions instead, over so many of the teacher's likeliest ids, all others as one."""
    use_reward: bool = False
    """Add it to the advantage of the rewards, as GRPO has it; without, nothing is rewarded."""

    def __post_init__(self) -> None:
        if self.path is None and self.url is None and self.hint is None:
            raise ValueError(
                "teacher.path, teacher.url or teacher.hint is needed: a student teaches itself only by what it is told."
            )
        if self.path is not None and self.url is not None:
            raise ValueError(
                f"teacher.path={self.path!r} and teacher.url={self.url!r} are two teachers: leave one null."
            )
        if self.top_k is None:
            return
        if self.top_k < 1:
            raise ValueError(f"teacher.top_k must be at least 1, got {self.top_k}; null compares sampled tokens.")
        for name, value, without in (
            ("hint", self.hint, None),
            ("coeff", self.coeff, 1.0),
            ("use_reward", self.use_reward, False),
        ):
            if value != without:
                raise ValueError(
                    f"teacher.top_k={self.top_k} makes the divergence of distributions the loss, and teacher.{name}="
                    f"{value!r} is for a teacher whose part is an advantage: leave teacher.top_k=null, or "
                    f"teacher.{name}={'null' if without is None else str(without).lower()}."
                )

    def hint_for(self, problem: Row) -> str:
        """Return what the teacher is told of a problem.

        Raises:
            ValueError: when the hint names a column that the problem lacks.

        Example:
            >>> TeacherConfig(hint="It is {answer}.").hint_for({"query": "1 + 1 =", "answer": "2"})
            'It is 2.'
        """
        assert self.hint is not None
        try:
            return self.hint.format_map(problem)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"teacher.hint={self.hint!r} cannot be filled in ({type(error).__name__}: {error}): a problem has the "
                f"columns {sorted(problem)}; name them in braces, and write a brace itself twice."
            ) from error


@dataclass(slots=True, kw_only=True)
class DistillationConfig(ScriptConfig):
    """Of `sota-implementations/distillation/distillation.py`."""

    train: GRPOTrainConfig
    teacher: TeacherConfig
    algorithm: str = "distillation"

    def __post_init__(self) -> None:
        # By its name: in a slotted dataclass the zero-argument `super()` is of a class that is no more.
        ScriptConfig.__post_init__(self)
        for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self.collect, name)
            if self.teacher.top_k is not None and value != whole:
                raise ValueError(
                    f"teacher.top_k={self.teacher.top_k} compares whole distributions, and collect.{name}={value:g} "
                    f"samples from truncated ones: leave collect.{name}={whole:g}."
                )


@dataclass(slots=True, kw_only=True)
class BestOfGroupConfig(CollectConfig):
    """Collection of the best answers of each group."""

    num_best: int = 2
    """Answers kept of each group: more would be the same answer again."""
    in_background: bool = False
    """Draw batches in the background, and train on what was kept where none is ready."""

    def __post_init__(self) -> None:
        # By its name: in a slotted dataclass the zero-argument `super()` is of a class that is no more.
        CollectConfig.__post_init__(self)
        if self.in_background and self.max_staleness is not None:
            # Versions that no batch was trained on would make every group too old.
            raise ValueError("collect.in_background has no bound of staleness: leave collect.max_staleness=null.")


@dataclass(slots=True, kw_only=True)
class ExpertIterationTrainConfig(TrainConfig):
    """Supervised training on a buffer of the best answers."""

    num_updates: int = 4
    """A step: supervised updates are safe to repeat, answers are expensive to come by."""
    rows_per_update: int = 16
    """With four updates per step, about what is kept of one."""
    max_reuse: int = 8
    """Times that a row is learned, on average, before new ones are waited for in the background."""
    buffer_size: int = 512
    """Rows: those of the last 16 steps and more, older ones are of a worse policy."""


@dataclass(slots=True, kw_only=True)
class ExpertIterationConfig(ScriptConfig):
    """Of `sota-implementations/expert-iteration/expert_iteration.py`."""

    collect: BestOfGroupConfig
    train: ExpertIterationTrainConfig
    algorithm: str = "expert-iteration"
