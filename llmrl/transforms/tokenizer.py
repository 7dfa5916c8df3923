"""`Tokenizer`: text to token ids on the way out of an environment, token ids to text on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import NonTensorData, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Composite
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer as PretrainedTokenizer
from llmrl.data.tensordicts import batch_elements, non_tensor, plain, restacked
from llmrl.transforms.specs import replace_input


class Tokenizer(KnownArguments, Transform):
    """Tokenizes entries of plain text, `[num_tokens]` each, and reads a policy's tokens as text.

    For text that is not a conversation, as `LLMEnv` has, or a column. The messages of a `ChatEnv` are rendered by the
    policy, or by `IncrementalTokenizer`, which keep tokens as they were sampled; text that is tokenized again may not.

    Args:
        in_keys, out_keys: text of the environment's output, and where its token ids go.
        in_keys_inv, out_keys_inv: text that the environment reads, and the token ids that a policy writes for it.
        tokenizer: a Hugging Face tokenizer, or its name.
        skip_special_tokens: whether the policy's special tokens are left out of its text.
        add_special_tokens: whether the tokenizer adds its own to the text.
        return_attention_mask: whether `"attention_mask"`, ones of the same length, is written beside the token ids.
        call_before_reset: tokenize what a reset is given rather than what comes out; a primer's rows too, where this
            is inserted before the primer.

    Raises:
        ValueError: if keys come without their counterparts.
        KeyError: if an entry is missing.

    Example:
        >>> from tensordict import TensorDict
        >>> class Bytes:
        ...     def encode(self, text, add_special_tokens):
        ...         return list(text.encode())
        >>> transform = Tokenizer(["text"], ["tokens"], tokenizer=Bytes())
        >>> transform(TensorDict({"text": "Hi"}))["tokens"]
        tensor([ 72, 105])
    """

    reads_turns = True

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
        *,
        tokenizer: PretrainedTokenizer | str,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        return_attention_mask: bool = True,
        call_before_reset: bool = False,
    ) -> None:
        pairs = {"in_keys": (in_keys, out_keys), "in_keys_inv": (in_keys_inv, out_keys_inv)}
        for name, (left, right) in pairs.items():
            if len(left or ()) != len(right or ()):
                raise ValueError(f"{name} and its out_keys must be as many, got {left} and {right}.")
        super().__init__(*(list(keys or ()) for keys in (in_keys, out_keys, in_keys_inv, out_keys_inv)))
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            self.tokenizer: PretrainedTokenizer = AutoTokenizer.from_pretrained(tokenizer)
        else:
            self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.add_special_tokens = add_special_tokens
        self.return_attention_mask = return_attention_mask
        self.call_before_reset = call_before_reset

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Tokenize the texts of a batch of any shape."""
        return self._each(tensordict, self._tokenize)

    def _tokenize(self, element: TensorDictBase) -> None:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            text = plain(_entry(element, in_key))
            token_ids = self.tokenizer.encode(text, add_special_tokens=self.add_special_tokens)
            written = torch.tensor(token_ids, dtype=torch.int64, device=element.device)
            element.set(out_key, written)
            if self.return_attention_mask:
                element.set(_mask_key(out_key), torch.ones_like(written))

    def _decode(self, element: TensorDictBase) -> None:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            token_ids = _entry(element, out_key).tolist()
            text = self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
            element.set(in_key, non_tensor(text))

    @staticmethod
    def _each(tensordict: TensorDictBase, write: Callable[[TensorDictBase], None]) -> TensorDictBase:
        elements = batch_elements(tensordict)
        for element in elements:
            write(element)
        return restacked(elements, tensordict.batch_size)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict if self.call_before_reset else self._each(next_tensordict, self._tokenize)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # Without a tensordict the environment draws by itself, or says what it misses.
        if tensordict is None or not self.call_before_reset:
            return tensordict
        return self._each(tensordict, self._tokenize)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._each(tensordict, self._decode) if self.in_keys_inv else tensordict

    def _spec(self, shape: torch.Size) -> Bounded:
        return Bounded(0, len(self.tokenizer) - 1, shape=(*shape, -1), dtype=torch.int64)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add what it writes: tokens."""
        shape = observation_spec.shape
        for out_key in [] if self.call_before_reset else self.out_keys:
            observation_spec[out_key] = self._spec(shape)
            if self.return_attention_mask:
                observation_spec[_mask_key(out_key)] = Bounded(1, 1, shape=(*shape, -1), dtype=torch.int64)
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Read tokens where the environment reads text."""
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            replace_input(input_spec, in_key, out_key, self._spec(input_spec.shape))
        return input_spec


def _mask_key(out_key: NestedKey) -> NestedKey:
    return "attention_mask" if isinstance(out_key, str) else (*out_key[:-1], "attention_mask")


def _entry(element: TensorDictBase, key: NestedKey) -> torch.Tensor | NonTensorData:
    value = element.get(key, None)
    if value is None:
        raise KeyError(f"there is no {key!r} to read, only {sorted(map(str, element.keys()))}.")
    return value
