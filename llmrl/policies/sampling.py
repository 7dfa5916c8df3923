"""Generation arguments with the names of TorchRL, vLLM and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from llmrl._utils.arguments import refuse_unknown
from llmrl.engines import SamplingConfig

_SYNONYMS = {"max_tokens": "max_new_tokens", "stop_sequences": "stop"}
_ONE_SAMPLE = (1, "pass num_samples= to the policy, or repeats= to the environment")
_NO_BEAMS = (1, "beam search does not sample, so its answers cannot be trained on")
_REDUNDANT: Mapping[str, tuple[object, str]] = {
    "n": _ONE_SAMPLE,
    "num_return_sequences": _ONE_SAMPLE,
    "num_beams": _NO_BEAMS,
    "best_of": _NO_BEAMS,
    "length_penalty": (1.0, "it applies to beam search only"),
    "early_stopping": (False, "it applies to beam search only"),
    "logprobs": (True, "log-probs are always returned, and only for the sampled tokens"),
    "skip_special_tokens": (False, "the text is what was sampled; a message's content has no special tokens"),
    "include_stop_str_in_output": (True, "sampled stop strings are always kept"),
}
"""Arguments with a single allowed value, which is the default, and the advice for other values."""


def sampling_from_kwargs(generate_kwargs: Mapping[str, object] | SamplingConfig | None) -> SamplingConfig:
    """Return the sampling parameters for TorchRL-style generation arguments.

    Raises TypeError if a name is unknown, and ValueError if a value is out of range or two contradict each other.

    Example:
        >>> sampling_from_kwargs({"max_new_tokens": 8, "stop_sequences": ["END"], "do_sample": True}).stop
        ('END',)
        >>> sampling_from_kwargs({"n": 4})
        Traceback (most recent call last):
        ValueError: generate_kwargs has n=4: pass num_samples= to the policy, or repeats= to the environment.
    """
    if isinstance(generate_kwargs, SamplingConfig):
        return generate_kwargs
    known = [field.name for field in fields(SamplingConfig)]
    arguments: dict[str, object] = {}
    for given, value in (generate_kwargs or {}).items():
        name = _SYNONYMS.get(given, given)
        if name in _REDUNDANT:
            default, advice = _REDUNDANT[name]
            if value != default:
                raise ValueError(f"generate_kwargs has {name}={value!r}: {advice}.")
        elif name == "do_sample":
            temperature = (generate_kwargs or {}).get("temperature", float(bool(value)))
            if temperature is None or bool(value) != bool(temperature):
                raise ValueError(
                    f"generate_kwargs has do_sample={value!r} and temperature={temperature!r}, which contradict each "
                    "other; remove one of them."
                )
            if not value:
                arguments["temperature"] = 0.0
        else:
            refuse_unknown("generate_kwargs", [name], known)
            if arguments.setdefault(name, value) != value:
                raise ValueError(f"generate_kwargs has {name} twice, under two names, with different values.")
    return SamplingConfig().with_changes(**arguments)
