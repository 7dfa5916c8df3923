"""Why cases of TorchRL's own test files do not pass unchanged, and what the page on moving says to write instead."""

from __future__ import annotations

_WITHOUT_CUDA = """    if not torch.cuda.is_available():
        pytest.skip("CUDA not available")

"""
# (file, text, other text) for this machine, with TorchRL and with llmrl: engines on a CPU, contexts of 2,048 tokens.
HERE = (
    (
        "test_wrapper.py",
        f"{_WITHOUT_CUDA}    import vllm.envs as envs\n    from vllm import LLM\n",
        """
    import vllm.envs as envs
    from vllm import LLM
""",
    ),
    ("test_wrapper.py", _WITHOUT_CUDA, "    return None, None  # TorchRL's asynchronous engine needs GPUs\n\n"),
    ("test_wrapper.py", "32768,  # Match max_model_len", "2048,"),
    ("test_wrapper.py", "max_model_len=32768", "max_model_len=2048"),
    ("test_llm_collectors.py", "GPT2Config())", "GPT2Config(n_layer=1, n_head=2, n_embd=32))"),
)
# (file, case, reason) of what is not run.
NOT_RUN: tuple[tuple[str, str, str], ...] = ()
# (file, pattern of cases, reason, changes of lines that the page gives)
REASONS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "test_conversions.py",
        "text_to_tokens_padding_error",
        "an argument that is not there is a TypeError: `Text.to_tokens(padding=)`",
        (('pytest.raises(ValueError, match="Padding is not yet supported")', "pytest.raises(TypeError)"),),
    ),
    (
        "test_llm_transforms.py",
        "test_step_incremental_tokenization",
        "`key in batch.keys(True, True)` of a lazily stacked step: ask `batch.get(key, None)`",
        (
            (
                'assert ("tokens", "prompt") in next_td.keys(True, True)',
                'assert next_td.get(("tokens", "prompt"), None, as_list=True) is not None',
            ),
        ),
    ),
    (
        "test_llm_envs.py",
        r"TestGSM8K::test_env\[",
        "no warning about a missing tokenizer, which only the policy needs; there is always a reward",
        (),
    ),
    (
        "test_llm_collectors.py",
        "completed_async.False-False",
        "an answer that was cut by its budget of tokens ends its rollout, which then has one turn",
        (),
    ),
    (
        "test_llm_objectives.py",
        "share_memory|local_queues",
        "`MCAdvantage.share_memory_`: groups are complete before they leave a collector",
        (),
    ),
    (
        "test_llm_objectives.py",
        "mc_advantage_validation",
        "bounds and candidates without `trajectory_return=`, which rows of rollouts do not need",
        (),
    ),
    ("test_llm_objectives.py", "assistant_only_mismatch", "`assistant_only=`: use `masking_strategy=`", ()),
    (
        "test_llm_objectives.py",
        "empty_sequence",
        "a row without trained tokens counts for nothing, and a batch needs tokens",
        (),
    ),
    (
        "test_wrapper.py",
        "parameter_validation",
        "the wording of errors; `top_k=0` keeps the whole vocabulary",
        (),
    ),
    (
        "test_wrapper.py",
        "conflict_resolution",
        "two names of one argument with different values are refused; TorchRL takes its older one",
        (),
    ),
    (
        "test_wrapper.py",
        "legacy_parameter_names",
        "a `vllm.LLM` with raw log-probs and a temperature is refused: take its processed ones",
        (),
    ),
    (
        "test_wrapper.py",
        "standardized_generation_parameters",
        "`skip_special_tokens=True`: the text is what was sampled",
        (),
    ),
    ("test_wrapper.py", "batching_cleanup", "`get_batching_state`: nothing waits for other requests", ()),
    (
        "test_wrapper.py",
        "retrieve_log_prob_input_modes.tokens",
        "a padded batch stays padded, whatever `pad_output=` says",
        (),
    ),
    (
        "test_wrapper.py",
        "log_probs_consistency.*history",
        "the mask of an answer includes the token that ends its turn, where a history says that it ended",
        (),
    ),
    (
        "test_wrapper.py",
        "log_probs_consistency.*tokens",
        "scoring the tokens under `input_key=` writes their log-probs, and no copy of the tokens nor a mask",
        (),
    ),
)
