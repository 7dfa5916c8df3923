"""A folder's tokenizer is parsed once in a process, and in those that are forked from it."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from unittest import mock

from transformers import AutoTokenizer


@contextlib.contextmanager
def parse_once():
    """Parse the tokenizer of a folder once, which takes a third of a second, however often it is loaded.

    What is handed out are copies with the same vocabulary: a test that adds tokens does so to a deep copy.
    """
    load = AutoTokenizer.from_pretrained
    parsed = {}

    def from_pretrained(path, *args, **options):
        files = [file for file in Path(path).glob("*.*") if file.suffix != ".safetensors"]  # none of a hub's name
        if args or not files or set(options) - {"local_files_only", "trust_remote_code"}:
            return load(path, *args, **options)
        key = (str(path), *sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))
        if key not in parsed:
            tokenizer = load(path, **options)
            parsed[key] = tokenizer, len(tokenizer)
        tokenizer, size = parsed[key]
        assert len(tokenizer) == size, "a test has added tokens to all copies of a tokenizer; add them to a deep copy"
        twin = copy.copy(tokenizer)
        containers = {name: value for name, value in vars(twin).items() if isinstance(value, dict | list)}
        vars(twin).update({name: value.copy() for name, value in containers.items()})
        return twin

    with mock.patch.object(AutoTokenizer, "from_pretrained", from_pretrained):
        yield
