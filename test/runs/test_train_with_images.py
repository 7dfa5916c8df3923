"""Checkpoints with images in their official form through `train`, with vLLM, their own templates and tool formats."""

import pytest
import torch
from biased_models import letters_of
from models_with_images import make_checkpoint
from real_templates import real_tokenizer
from weight_sync_tools import differences_of

from llmrl import DatasetChatEnv, RubricReward, train
from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.runs.run_folder import RunFolder
from llmrl.transforms import ToolTransform
from llmrl.watch.token_log import TokenLog

# Template, how its prompt shows a tool, the engine's dtype (vLLM's delta rules on a CPU take bfloat16 alone), and the
# mean difference that its rounding explains.
FAMILIES = {
    "qwen3_5": ("qwen3_5_nothink", "<tools>\n{", "bfloat16", 0.02),
    "gemma4": ("gemma4", "<|tool>declaration:look_up", "float32", 0.001),
}


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: word to look up.
    """
    return word


def make_env(repeats, name):
    env = DatasetChatEnv([f"{a} + 1 =" for a in range(6)], repeats=repeats, name=name)
    return env.append_transform(ToolTransform([look_up])).append_transform(RubricReward(letters_of))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_trained_synchronized_saved_loaded_and_evaluated(family, real_vllm, model_path, tmp_path):
    template, shown, dtype, bound = FAMILIES[family]
    tokenizer = real_tokenizer(model_path, template)
    folder = tmp_path / "model"
    kind = make_checkpoint(family, folder, vocab_size=len(tokenizer), max_position_embeddings=1024)
    tokenizer.save_pretrained(folder)
    options = {"max_model_len": 512, "kv_cache_memory": 1 << 27, "cpu_threads": 1, "dtype": dtype}
    with AsyncVLLM.from_pretrained(folder, **options) as engine:
        path = train(
            folder, make_env(2, "train"), eval_envs={"held_out": make_env(1, "held_out")}, path=tmp_path / "run",
            engine=engine, num_steps=3, groups_per_batch=2, max_new_tokens=8, learning_rate=1e-2, dtype=dtype,
        )  # fmt: skip
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2 ="}], return_dict=False)
        completions = engine.generate_batch([prompt] * 2, SamplingConfig(max_new_tokens=16, ignore_eos=True))
    metrics = {int(row["step"]): row for row in RunFolder(path, read_only=True).read_metrics()}
    for step in (1, 2, 3):  # after no update, one, and two
        assert metrics[step]["on_policy_difference"] < bound
    assert 0 <= metrics[3]["eval/held_out/reward"] <= 1
    (row, *_) = TokenLog(path / "tokens").read(3)
    assert shown in tokenizer.decode(row.token_ids)
    # What was saved is what the engine has after the last update, and differs from what it began with.
    again = kind.from_pretrained(path / "model", dtype=torch.float32, attn_implementation="eager").eval()
    first = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert differences_of(again, [prompt] * 2, completions).abs().mean() < bound
    assert differences_of(first, [prompt] * 2, completions).abs().mean() > 5 * bound
    encoders = {name: tensor for name, tensor in first.state_dict().items() if ".language_model." not in name}
    encoders.pop("lm_head.weight", None)
    assert encoders and all(torch.equal(again.state_dict()[name], tensor) for name, tensor in encoders.items())
