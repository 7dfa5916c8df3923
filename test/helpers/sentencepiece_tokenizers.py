"""Tokenizers that join pieces as SentencePiece does, and templates that such models have."""

from __future__ import annotations


def sentencepiece_tokenizer(special, prepend_scheme):
    """A tiny one in the manner of sentencepiece: a text's first word has a space before it, or each after a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *letters, *(f"▁{each}" for each in letters)])}
    merges = [("▁", each) for each in letters]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme, split=False)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SENTENCEPIECE_TEMPLATES = {
    "phi3": "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt else '</s>' }}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt else '' }}",
    "mistral_v01": "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' "
    "else m.content + eos_token }}{% endfor %}",
}
