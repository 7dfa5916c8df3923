"""A step of TRL's trainer in an environment that another process serves; answers are scripted, all else is TRL's.

    OPENENV_PYTHON trl_trainer.py SITE_PACKAGES MODEL URL < SOURCE

`SOURCE` defines the class `Served`, as the documentation has it. The interpreter has the package openenv, which needs
`mcp<2`; `SITE_PACKAGES` has TRL, and comes behind.
"""

from __future__ import annotations

import json
import re
import sys

sys.path.append(sys.argv[1])

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

ROWS = [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in range(2)]


def answer(prompt: str, number: int) -> str:
    """Call the tool, with the right sum for every second conversation; after its result, end."""
    if "<tool_response>" in prompt:
        return "Done.<|im_end|>"
    first, second = re.findall(r"(\d+) \+ (\d+) =", prompt)[-1]
    text = str(int(first) + int(second) + number % 2)
    return f"<tool_call>\n{json.dumps({'name': 'answer', 'arguments': {'text': text}})}\n</tool_call><|im_end|>"


def main() -> None:
    """Print the rewards by seed, and the prompts."""
    model_path, url = sys.argv[2:]
    names: dict[str, type] = {}
    exec(sys.stdin.read().replace("http://127.0.0.1:8000", url), names)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = qwen3_chat_template
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    seen = []

    def generate(input_ids, attention_mask, **options):
        prompts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        seen.extend(prompts)
        said = [tokenizer.encode(answer(prompt, number)) for number, prompt in enumerate(prompts)]
        longest = max(map(len, said))
        padded = [ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids in said]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    model.generate = generate
    scores = []

    class Logged(names["Served"]):
        def reset(self, **row):
            self.seed = row["seed"]
            return super().reset(**row)

        def get_reward(self):
            scores.append((self.seed, super().get_reward()))
            return scores[-1][1]

    config = GRPOConfig(
        "unused",
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=128,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=Logged,
    )
    trainer.train()
    print(json.dumps({"scores": scores, "prompts": seen, "log": trainer.state.log_history[0]}))


if __name__ == "__main__":
    main()
