"""Two models learn in one conversation: one encodes a digit as a letter, and the other decodes the letter.

Each model repeats its input before it answers, so that a one-layer model attends to it: the answer to "2" is "2B", and
the answer to "B" is "B2".
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tensordict import lazy_stack
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmrl import (
    AgentEnv,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    TransformersEngine,
    TransformersWrapper,
    train_step,
    vLLMWrapper,
)
from llmrl.endpoint.agent import AgentModel
from llmrl.testing import make_tiny_model

DIGITS, LETTERS = "1234", "ABCD"
ROLES = ("sender", "receiver")
WORDS = {"sender": (DIGITS, LETTERS), "receiver": (LETTERS, DIGITS)}
"""Inputs and possible answers of each role."""
SYSTEM = {"role": "system", "content": "You say it."}


def make_agent() -> Callable[[Mapping[str, str], AgentModel], Awaitable[dict[str, float]]]:
    """Return the agent. Its rollouts share one HTTP client, because each new client would read certificates again."""
    http = DefaultAsyncHttpxClient()

    async def play(row: Mapping[str, str], model: AgentModel) -> dict[str, float]:
        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=http)

        async def ask(role: str, text: str) -> str:
            answer = await client.chat.completions.create(
                model=model.role(role).name, messages=[SYSTEM, {"role": "user", "content": text}]
            )
            return answer.choices[0].message.content or ""

        named = await ask("sender", row["digit"])
        read = await ask("receiver", named[1:2])
        right = row["digit"] + row["letter"]
        return {"sender": float(named == right), "receiver": float(read == right[::-1])}

    return play


def make_speaker(
    folder: str, reads: str, says: str, num_lessons: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a one-layer model that repeats one of `reads` and adds any of `says` with equal probability."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(
        folder, vocab_size=10_240, initializer_range=0.1
    )  # higher token ids are not needed
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    chats = [
        [SYSTEM, {"role": "user", "content": read}, {"role": "assistant", "content": read + said}]
        for read in reads
        for said in says
    ]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in chats])
    prompt = tokenizer.apply_chat_template(chats[0][:2], tokenize=True, add_generation_prompt=True, return_dict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_lessons):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits[:, len(prompt) - 1 : len(prompt) + 2]
        answers = ids[:, len(prompt) : len(prompt) + 3]  # the input, the answer, and the end of the turn
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
    return model, tokenizer


def main(
    engine: object = None, *, num_steps: int = 1, num_lessons: int = 60, repeats: int = 8, seed: int = 0
) -> list[tuple[float, float]]:
    """Train both models; return the share of right letters and of right digits at each step."""
    torch.manual_seed(seed)
    policies, losses, optimizers = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        for role in ROLES:
            model, tokenizer = make_speaker(folder, *WORDS[role], num_lessons)
            playing = TransformersEngine(model, tokenizer=tokenizer, max_num_seqs=256, seed=seed)
            policies[role] = vLLMWrapper(playing, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})
            losses[role] = GRPOLoss(TransformersWrapper(model, generate=False))
            optimizers[role] = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = [{"digit": digit, "letter": letter} for digit, letter in zip(DIGITS, LETTERS, strict=True)]
    env = AgentEnv(make_agent(), rows, roles=ROLES, policies={"receiver": policies["receiver"]}, repeats=repeats)
    curve = []
    advantage = MCAdvantage(by="role", drop_constant_groups=False)
    with LLMCollector(env, policy=policies["sender"], groups_per_batch=2 * len(rows), postproc=advantage) as collector:
        for step, batch in zip(range(num_steps), collector, strict=False):
            means = []
            for role in ROLES:
                own = lazy_stack([row for row in batch.unbind(0) if row["rollout", "role"] == role])
                train_step(losses[role], own, optimizers[role])
                means.append(own["next", "reward"].float().mean().item())
            curve.append((means[0], means[1]))
            print("step {}: {:.2f} of the letters are right, {:.2f} of the digits".format(step, *curve[-1]), flush=True)
    return curve


if __name__ == "__main__":
    main(num_steps=40, num_lessons=150, repeats=16)
