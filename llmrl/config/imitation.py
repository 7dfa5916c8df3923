"""Configuration of runs that learn from conversations, a teacher, or their own best answers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from llmrl._utils.types import Row
from llmrl.config.entries import NAMED, EntryError, Section, above, at_least, matching
from llmrl.config.sections import ClippedTrainConfig, CollectConfig, ScriptConfig, TrainConfig


@dataclass(slots=True, kw_only=True)
class ConversationsConfig(Section):
    """Conversations to learn from: rows with `messages` and optional `tools` (`Demonstrations`)."""

    section: ClassVar[str] = "conversations"
    path: str = field(metadata=NAMED)
    """A file, folder or hub name; a batch has `collect.groups_per_batch` conversations."""
    held_out: str | None = field(default=None, metadata=NAMED)
    """Held-out conversations for `eval/loss`; null: none."""


@dataclass(slots=True, kw_only=True)
class SFTConfig(ScriptConfig):
    """Configuration of `sota-implementations/sft/sft.py`."""

    conversations: ConversationsConfig
    """Training data."""
    algorithm: str = "sft"

    def __post_init__(self) -> None:
        ScriptConfig.__post_init__(self)
        # Entries that a `hardware` file sets, such as `num_collectors`, describe the machine and are ignored.
        unused = ("max_staleness", "max_concurrent_rollouts")
        for section, names in ((self.collect, unused), (self.train, ("target_reward",))):
            for name in names:
                if (value := getattr(section, name)) is not None:
                    raise EntryError(
                        f"{section.section}.{name}",
                        f"is for answers that are sampled and scored, got {value!r}; SFT only reads conversations: "
                        f"leave {section.section}.{name}=null.",
                    )


@dataclass(slots=True, kw_only=True)
class TeacherConfig(Section):
    """The teacher, which scores the student's tokens with its log-probs."""

    section: ClassVar[str] = "teacher"
    path: str | None = field(default=None, metadata=NAMED)
    """Hugging Face name or folder of a model with the student's tokenizer, loaded in addition to the student."""
    url: str | None = field(default=None, metadata=matching(r"https?://.*\S", "a URL such as http://localhost:8000"))
    """Address of a `vllm serve` server with such a model; requires `collect.temperature=1`. Without `path` and `url`,
    the student with `hint` in its prompt is the teacher."""
    hint: str | None = field(default=None, metadata=NAMED)
    """Addition to the teacher's prompt, with the problem's columns in braces: `The answer is {answer}.`; null: none."""
    coeff: float = field(default=1.0, metadata=above(0))
    """Weight of the teacher's part in each token's advantage; 1 gives the gradient of the KL."""
    top_k: int | None = field(default=None, metadata=at_least(1))
    """Number of the teacher's most likely ids for a loss that compares distributions; all other ids count as one id.
    With null, the teacher gives an advantage instead."""
    use_reward: bool = False
    """Whether to add the teacher's part to GRPO's advantage; if false, rewards are not used."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.path is None and self.url is None and self.hint is None:
            raise ValueError(
                "teacher.path, teacher.url or teacher.hint is needed: the student is its own teacher only with a hint."
            )
        if self.path is not None and self.url is not None:
            raise ValueError(
                f"teacher.path={self.path!r} and teacher.url={self.url!r} are two teachers: set one of them to null."
            )
        if self.top_k is None:
            return
        for name, unused, written in (("hint", None, "null"), ("coeff", 1.0, "1.0"), ("use_reward", False, "false")):
            if (value := getattr(self, name)) != unused:
                raise ValueError(
                    f"teacher.top_k={self.top_k} makes the divergence of distributions the loss, and teacher.{name}="
                    f"{value!r} is for a teacher that gives an advantage: leave teacher.top_k=null, or teacher.{name}="
                    f"{written}."
                )

    def hint_for(self, problem: Row) -> str:
        """Return the hint for a problem. Raises ValueError if the problem lacks a column that the hint names.

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
                f"columns {sorted(problem)}; name columns in braces, and double a literal brace."
            ) from error


@dataclass(slots=True, kw_only=True)
class DistillationConfig(ScriptConfig):
    """Configuration of `sota-implementations/distillation/distillation.py`."""

    train: ClippedTrainConfig
    teacher: TeacherConfig
    algorithm: str = "distillation"

    def __post_init__(self) -> None:
        ScriptConfig.__post_init__(self)
        teacher = self.teacher
        for name, whole in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self.collect, name)
            if value == whole:
                continue
            if teacher.url is not None:
                raise ValueError(
                    f"teacher.url={teacher.url!r} scores tokens by whole distributions at temperature 1, and collect."
                    f"{name}={value:g} samples from others: leave collect.{name}={whole:g}, or load teacher.path."
                )
            if teacher.top_k is not None and name != "temperature":
                raise ValueError(
                    f"teacher.top_k={teacher.top_k} compares whole distributions, and collect.{name}={value:g} "
                    f"samples from truncated distributions: leave collect.{name}={whole:g}."
                )
        if teacher.top_k is None:
            return
        for spec in fields(self.train):
            value = getattr(self.train, spec.name)
            if spec.name in ("clip_epsilon", "clip_epsilon_high", "importance_cap") and value != spec.default:
                raise EntryError(
                    f"train.{spec.name}",
                    f"is for a teacher that gives an advantage, got {value!r}; teacher.top_k={teacher.top_k} makes "
                    f"the divergence of distributions the loss: leave train.{spec.name} out.",
                )


@dataclass(slots=True, kw_only=True)
class BestOfGroupConfig(CollectConfig):
    """Collection of the best answers of each group."""

    num_best: int = field(default=2, metadata=at_least(1))
    """Number of answers kept per group; more answers would often be near-duplicates."""
    in_background: bool = False
    """Whether to collect batches in the background, and train on the buffer if no batch is ready."""

    def __post_init__(self) -> None:
        CollectConfig.__post_init__(self)
        if self.num_best > self.group_size:
            raise ValueError(
                f"collect.num_best={self.num_best} is more than the collect.group_size={self.group_size} answers of a "
                "group."
            )
        if self.in_background and self.max_staleness is not None:
            # Each update is a new version, even without a new batch, so every group would become too old.
            raise ValueError("collect.in_background does not bound staleness: leave collect.max_staleness=null.")


@dataclass(slots=True, kw_only=True)
class ExpertIterationTrainConfig(TrainConfig):
    """Supervised training on a buffer of the best answers."""

    num_updates: int = field(default=4, metadata=at_least(1))
    """Number of updates per step; supervised updates are safe to repeat, and answers are expensive to generate."""
    rows_per_update: int = field(default=16, metadata=at_least(1))
    """Number of rows per update; four updates use about as many rows as one step adds."""
    max_reuse: int = field(default=8, metadata=at_least(1))
    """Average number of uses of a row after which training waits for new rows (`collect.in_background`)."""
    buffer_size: int = field(default=512, metadata=at_least(1))
    """Number of rows in the buffer, about the last 16 steps; older rows are from a worse policy."""


@dataclass(slots=True, kw_only=True)
class ExpertIterationConfig(ScriptConfig):
    """Configuration of `sota-implementations/expert-iteration/expert_iteration.py`."""

    collect: BestOfGroupConfig
    train: ExpertIterationTrainConfig
    algorithm: str = "expert-iteration"
