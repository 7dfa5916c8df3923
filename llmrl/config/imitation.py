"""The configuration of runs that imitate conversations, a teacher, or their own best answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from llmrl._utils.types import Row
from llmrl.config.entries import NAMED, Section, above, at_least, matching
from llmrl.config.sections import ClippedTrainConfig, CollectConfig, ScriptConfig, TrainConfig


@dataclass(slots=True, kw_only=True)
class ConversationsConfig(Section):
    """Conversations to learn from: rows with `messages`, and `tools` where there are some (`Demonstrations`)."""

    section: ClassVar[str] = "conversations"
    path: str = field(metadata=NAMED)
    """A file, folder or hub name; `collect.groups_per_batch` of them make a batch."""
    held_out: str | None = field(default=None, metadata=NAMED)
    """Other demonstrations, for `eval/loss`; null: none."""


@dataclass(slots=True, kw_only=True)
class SFTConfig(ScriptConfig):
    """Configuration of `sota-implementations/sft/sft.py`."""

    conversations: ConversationsConfig
    """What is learned."""
    algorithm: str = "sft"


@dataclass(slots=True, kw_only=True)
class TeacherConfig(Section):
    """Teacher: its log-probs judge the student's tokens."""

    section: ClassVar[str] = "teacher"
    path: str | None = field(default=None, metadata=NAMED)
    """A Hugging Face name or folder of a model with the student's tokenizer, loaded beside the student."""
    url: str | None = field(default=None, metadata=matching(r"https?://.*\S", "an address, as http://localhost:8000"))
    """Or the address of a `vllm serve` of such a model, which asks for `collect.temperature=1`; neither: the student
    itself, with a hint."""
    hint: str | None = field(default=None, metadata=NAMED)
    """What the teacher's prompt says besides, with columns of the problem: `The answer is {answer}.`; null: nothing."""
    coeff: float = field(default=1.0, metadata=above(0))
    """Weight of the teacher's part of each token's advantage; 1 is the gradient of the KL itself."""
    top_k: int | None = field(default=None, metadata=at_least(1))
    """Compare whole distributions instead, over so many of the teacher's likeliest ids, all others as one."""
    use_reward: bool = False
    """Add it to the advantage of the rewards, as GRPO has it; without, nothing is rewarded."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.path is None and self.url is None and self.hint is None:
            raise ValueError(
                "teacher.path, teacher.url or teacher.hint is needed: a student teaches itself only with a hint."
            )
        if self.path is not None and self.url is not None:
            raise ValueError(
                f"teacher.path={self.path!r} and teacher.url={self.url!r} are two teachers: leave one null."
            )
        if self.top_k is None:
            return
        for name, value, without in (
            ("hint", self.hint, None),
            ("coeff", self.coeff, 1.0),
            ("use_reward", self.use_reward, False),
        ):
            if value != without:
                raise ValueError(
                    f"teacher.top_k={self.top_k} makes the divergence of distributions the loss, and teacher.{name}="
                    f"{value!r} is for a teacher that gives an advantage: leave teacher.top_k=null, or "
                    f"teacher.{name}={'null' if without is None else str(without).lower()}."
                )

    def hint_for(self, problem: Row) -> str:
        """Return what the teacher reads about a problem.

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
    """Configuration of `sota-implementations/distillation/distillation.py`."""

    train: ClippedTrainConfig
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

    num_best: int = field(default=2, metadata=at_least(1))
    """Answers kept of each group: more would be the same answer again."""
    in_background: bool = False
    """Draw batches in the background, and train on what was kept where none is ready."""

    def __post_init__(self) -> None:
        # By its name: in a slotted dataclass the zero-argument `super()` is of a class that is no more.
        CollectConfig.__post_init__(self)
        if self.num_best > self.group_size:
            raise ValueError(
                f"collect.num_best={self.num_best} is more than the collect.group_size={self.group_size} answers of a "
                "group."
            )
        if self.in_background and self.max_staleness is not None:
            # Versions that no batch was trained on would make every group too old.
            raise ValueError("collect.in_background has no bound of staleness: leave collect.max_staleness=null.")


@dataclass(slots=True, kw_only=True)
class ExpertIterationTrainConfig(TrainConfig):
    """Supervised training on a buffer of the best answers."""

    num_updates: int = field(default=4, metadata=at_least(1))
    """Updates of a step: supervised updates are safe to repeat, answers are expensive to come by."""
    rows_per_update: int = field(default=16, metadata=at_least(1))
    """Rows of an update: with four updates per step, about what is kept of one."""
    max_reuse: int = field(default=8, metadata=at_least(1))
    """Times that a row is learned, on average, before new ones are waited for in the background."""
    buffer_size: int = field(default=512, metadata=at_least(1))
    """Rows of the buffer: those of the last 16 steps and more, older ones are of a worse policy."""


@dataclass(slots=True, kw_only=True)
class ExpertIterationConfig(ScriptConfig):
    """Configuration of `sota-implementations/expert-iteration/expert_iteration.py`."""

    collect: BestOfGroupConfig
    train: ExpertIterationTrainConfig
    algorithm: str = "expert-iteration"
