"""Tasks for TorchRL's calls: with arguments that only these calls pass, and with the parsers' static functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase, tensorclass
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from llmrl import envs
from llmrl._utils.arguments import refuse_unknown
from llmrl._utils.other_libraries import instead_of
from llmrl.data.message import text_of
from llmrl.data.tensordicts import batch_elements, dataset_columns, restacked
from llmrl.rewards import (
    boxed_answer,
    extract_answer,
    extract_tag,
    is_countdown_right,
    is_math_right,
    score_instructions,
)


class _ReadsTags:
    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """Return the content of a completion's last `<think>` and last `<answer>` tags; `""` for a missing tag."""
        return extract_tag(text, "think") or "", extract_tag(text, "answer") or ""


class GSM8KRewardParser(_ReadsTags, envs.GSM8KRewardParser):
    """`llmrl.envs.GSM8KRewardParser` with TorchRL's functions for a single answer."""

    @staticmethod
    def normalize_answer(answer: str) -> str:
        """Return a number's text without separators, units and trailing zeros.

        Example:
            >>> GSM8KRewardParser.normalize_answer(" $1,234.50 ")
            '1234.5'
        """
        number = answer.strip().translate(str.maketrans("", "", ",$%")).rstrip(".")
        return number.rstrip("0").rstrip(".") if "." in number else number


class MATHRewardParser(_ReadsTags, envs.MATHRewardParser):
    """`llmrl.envs.MATHRewardParser` with TorchRL's functions for a single answer."""

    @staticmethod
    def extract_boxed(text: str) -> str:
        r"""Return the content of the last `\boxed{…}`, or the whole text.

        Example:
            >>> MATHRewardParser.extract_boxed(r"It is $\boxed{\frac{1}{2}}$.")
            '\\frac{1}{2}'
        """
        boxed = boxed_answer(text)
        return (text if boxed is None else boxed).strip()

    @staticmethod
    def answers_match(predicted: str, reference: str) -> bool:
        r"""Return whether two answers are the same expression.

        Example:
            >>> MATHRewardParser.answers_match("0.5", r"\frac{1}{2}")
            True
        """
        return is_math_right(predicted, reference)


class CountdownRewardParser(_ReadsTags, envs.CountdownRewardParser):
    """`llmrl.envs.CountdownRewardParser` with TorchRL's function for a single expression."""

    @staticmethod
    def validate_expression(expression: str, target: int, numbers: list[int]) -> bool:
        """Return whether an expression equals the target and uses each number at most once.

        Example:
            >>> CountdownRewardParser.validate_expression("(25 + 3) * 4", 112, [25, 3, 4])
            True
        """
        # Numbers of a tensor are tensors, which hash by identity: none would be one of the expression's.
        return is_countdown_right(expression, int(target), [int(number) for number in numbers])


@tensorclass
class IFEvalScoreData:
    """The accuracies of an answer, as tensors."""

    prompt_level_strict_acc: torch.Tensor | None = None
    inst_level_strict_acc: torch.Tensor | None = None
    prompt_level_loose_acc: torch.Tensor | None = None
    inst_level_loose_acc: torch.Tensor | None = None


class IfEvalScorer(envs.IfEvalScorer):
    """`llmrl.envs.IfEvalScorer` with TorchRL's function for one answer, and its entry `("next", "ifeval_score")`.

    A function as `aggregate_reward` is called with this entry.
    """

    @functools.wraps(envs.IfEvalScorer.__init__)  # type: ignore[misc]  # preserves the signature
    def __init__(self, *, aggregate_reward: bool | Callable[..., float | torch.Tensor] = True, **options: Any) -> None:
        if callable(aggregate_reward):
            aggregate_reward = _of_tensors(aggregate_reward)
        super().__init__(aggregate_reward=aggregate_reward, **options)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_elements = batch_elements(super()._step(tensordict, next_tensordict))
        for element, next_element in zip(batch_elements(tensordict), next_elements, strict=True):
            columns = dataset_columns(element)
            text = text_of(self._messages(element, next_element)[-1].get("content"))
            answer = extract_answer(text, reasoning=self.reasoning) or ""
            score = score_instructions(answer, columns["instruction_id_list"], columns["kwargs"])  # type: ignore[arg-type]
            next_element.set("ifeval_score", _as_tensors(score))
        return restacked(next_elements, next_tensordict.batch_size)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the accuracies to the specs of the reward."""
        reward_spec = super().transform_reward_spec(reward_spec)
        shape = reward_spec.shape
        entries = {name: Unbounded((*shape, -1), dtype=torch.bool) for name in _ACCURACIES}
        reward_spec["ifeval_score"] = Composite(entries, shape=shape, data_cls=IFEvalScoreData)
        return reward_spec

    def default_reward_aggregator(
        self,
        score: IFEvalScoreData,
        think_blocks: list[str] | None = None,
        answer_blocks: list[str] | None = None,
        complete: bool | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the accuracies, plus 0.1 for exactly one answer and 0.05 for one thought."""
        given = [getattr(score, name) for name in _ACCURACIES]
        device = next((one.device for one in given if one is not None), None)
        zero = torch.zeros(1, device=device)
        means = [zero if one is None else one.float().mean(-1, keepdim=True) for one in given]
        bonus = 0.1 * (len(answer_blocks or ()) == 1) + 0.05 * (len(think_blocks or ()) == 1)
        shares = torch.stack(torch.broadcast_tensors(*means), -1)
        return (shares @ shares.new_tensor(self.format_weights)).unsqueeze(-1) + bonus


_ACCURACIES = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")


def _as_tensors(score: envs.IFEvalScoreData) -> IFEvalScoreData:
    return IFEvalScoreData(**{name: torch.tensor(getattr(score, name)).reshape(-1) for name in _ACCURACIES})


def _of_tensors(aggregate: Callable[..., float | torch.Tensor]) -> Callable[..., float]:
    @functools.wraps(aggregate)  # the scorer passes what the function has parameters for
    def aggregated(score: envs.IFEvalScoreData, **extras: object) -> float:
        return float(aggregate(_as_tensors(score), **extras))

    return aggregated


class _TakesFixed:
    """Mixin that accepts some of TorchRL's arguments, each with one value only; `apply_template=` is ignored."""

    _fixed: ClassVar = {"group_repeats": True, "ray_backend": False}

    def __new__(cls, *args: object, **options: object) -> Self:
        return super().__new__(cls, *args, **cls._others(options))

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **self._others(options))

    @classmethod
    def _others(cls, options: dict[str, object]) -> dict[str, object]:
        for name, value in cls._fixed.items():
            if options.get(name, value) is not value:
                refuse_unknown(cls.__name__, [name], (), instead_of(cls.__name__))
        return {name: value for name, value in options.items() if name not in {*cls._fixed, "apply_template"}}


class ChatEnv(envs.ChatEnv):
    """`llmrl.envs.ChatEnv` with a `from_dataloader` that also accepts `group_repeats=True`."""

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[object], *, repeats: int = 1, **options: object) -> EnvBase:
        """Return a `DatasetChatEnv` over the rows of a data loader."""
        return DatasetChatEnv.from_dataloader(dataloader, repeats=repeats, **options)


class DatasetChatEnv(_TakesFixed, envs.DatasetChatEnv):
    """`llmrl.envs.DatasetChatEnv`, which also accepts `group_repeats=True`, `ray_backend=False`, `apply_template=`."""

    __signature__ = inspect.signature(envs.DatasetChatEnv.__init__)  # by which unknown arguments are refused


class GSM8KEnv(_TakesFixed, envs.GSM8KEnv):
    """`llmrl.envs.GSM8KEnv`, which also accepts `group_repeats=True`, `ray_backend=False`, `apply_template=`."""

    task = dataclasses.replace(envs.GSM8KEnv.task, reward=GSM8KRewardParser)


class IFEvalEnv(_TakesFixed, envs.IFEvalEnv):
    """`llmrl.envs.IFEvalEnv`, which also accepts `group_repeats=True`, `ray_backend=False`, `apply_template=`."""

    task = dataclasses.replace(envs.IFEvalEnv.task, reward=IfEvalScorer)


class MATHEnv(_TakesFixed, envs.MATHEnv):
    """`llmrl.envs.MATHEnv`, which also accepts `group_repeats=True`, `ray_backend=False`, `apply_template=`."""

    task = dataclasses.replace(envs.MATHEnv.task, reward=MATHRewardParser)


class CountdownEnv(_TakesFixed, envs.CountdownEnv):
    """`llmrl.envs.CountdownEnv`, which also accepts `group_repeats=True` and `apply_template=`."""

    _fixed: ClassVar = {"group_repeats": True}
    task = dataclasses.replace(envs.CountdownEnv.task, reward=CountdownRewardParser)
