"""Task environments: prompts, rewards, done, and what bad input does to them."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import time
from typing import TYPE_CHECKING

import pytest
from tensordict import TensorDict, lazy_stack
from torchrl.envs import check_env_specs

from llmrl._utils.asynchronous import run_sync
from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory, RolloutStatus, StopReason
from llmrl.data.tensordicts import batch_elements
from llmrl.envs import (
    AdditionEnv,
    ChatEnv,
    CountdownEnv,
    CountdownRewardParser,
    DatasetChatEnv,
    GSM8KEnv,
    GSM8KRewardParser,
    GuessEnv,
    GymnasiumTextEnv,
    IFEvalEnv,
    IfEvalScorer,
    MATHEnv,
    MATHRewardParser,
    MessageChatEnv,
    ReasoningGymEnv,
    ReasoningGymProblems,
    SearchEnv,
    SumOfDigitsEnv,
    countdown_problems,
    make_countdown_env,
    make_gsm8k_env,
    make_reasoning_gym_env,
    make_sum_of_digits_env,
)
from llmrl.envs.chat import unlock_batch_size
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardInput, evaluate_expression, is_countdown_right
from llmrl.testing import ScriptedEngine
from llmrl.transforms import find_rubric_rewards

if TYPE_CHECKING:
    from decimal import Decimal

GSM8K = [
    {"question": "Ida has 3 boxes of 400 nails. How many nails?", "answer": "3 * 400 = <<3*400=1200>>1200 #### 1,200"},
    {"question": "A shirt is $20, half off. What is the price?", "answer": "It is $10. #### 10"},
    {"question": "It was 4 degrees and fell by 9. What is it?", "answer": "4 - 9 = -5 #### -5"},
]
MATH = [
    {"problem": "What is half of one?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Factor x^2 - 1.", "solution": r"$\boxed{(x-1)(x+1)}$"},
]
IFEVAL = [{"prompt": "Name a colour without commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]


class Guess:
    """A text environment in gymnasium's manner: one guess, then over."""

    is_closed = False

    def reset(self, seed=None):
        return "Guess my number.", {}

    def step(self, action):
        return "So it is.", float("7" in action), True, False, {}

    def close(self):
        self.is_closed = True


needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: no C compiler"
)
ENVS = {
    "gsm8k": lambda **options: GSM8KEnv(GSM8K, **options),
    "gsm8k-plain": lambda **options: GSM8KEnv(GSM8K, reasoning=False, **options),
    "math": lambda **options: MATHEnv(MATH, **options),
    "math-plain": lambda **options: MATHEnv(MATH, reasoning=False, **options),
    "ifeval": lambda **options: IFEvalEnv(IFEVAL, **options),
    "ifeval-plain": lambda **options: IFEvalEnv(IFEVAL, reasoning=False, **options),
    "countdown": lambda **options: CountdownEnv(num_problems=4, **options),
    "countdown-plain": lambda **options: CountdownEnv(num_problems=4, reasoning=False, **options),
    "reasoning-gym": lambda **options: ReasoningGymEnv("chain_sum", num_problems=4, **options),
    "reasoning-gym-tags": lambda **options: ReasoningGymEnv("chain_sum", num_problems=4, reasoning=True, **options),
    "sum-of-digits": lambda **options: SumOfDigitsEnv(num_problems=4, **options),
    "sum-of-digits-tags": lambda **options: SumOfDigitsEnv(num_problems=4, reasoning=True, **options),
    "addition": lambda **options: AdditionEnv(**options),
    "addition-tags": lambda **options: AdditionEnv(reasoning=True, **options),
    "search": lambda **options: SearchEnv(num_people=4, **options),
    "guess": lambda **options: GuessEnv(**options),
}
NAMES = [pytest.param(name, marks=needs_reasoning_gym) if name.startswith("reasoning-gym") else name for name in ENVS]


def answered(env, text, data=None, **entries):
    """One step in which the policy says `text`."""
    data = env.reset() if data is None else data
    elements = batch_elements(data)
    for element in elements:
        prompt = element["history"].prompt
        element["history"] = ChatHistory(prompt=prompt, full=prompt.append({"role": "assistant", "content": text}))
    data = lazy_stack(elements, 0) if data.batch_size else elements[0]
    for key, value in entries.items():
        data["rollout", key] = value
    return env.step(data)["next"]


@pytest.mark.parametrize("name", NAMES)
def test_task_env_passes_check_env_specs(name):
    check_env_specs(ENVS[name]())


# There any text is an answer, or one that cannot be read is asked for again.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("ifeval-plain", "guess")])
@pytest.mark.parametrize(
    "text", ["", "no idea", "<answer>", "</answer><answer>", "<answer></answer>", "<think><answer>5</think>", "\x00<<"]
)
def test_an_answer_that_cannot_be_read_gets_nothing_and_ends_the_conversation(name, text):
    data = answered(ENVS[name](), text)
    assert data["reward"].item() == 0.0 and data["terminated"].item() and data["is_scored"].item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece", ["(", "[", "<<", "<answer>", "1", "1,", "a b. ", "\\boxed{", "-"])
def test_a_200_kb_completion_costs_little(name, piece, takes_long):
    text = piece * (200_000 // len(piece))
    for wrapped in (text, f"<answer>{text}</answer>"):
        started = time.process_time()
        data = answered(ENVS[name](), wrapped)
        assert time.process_time() - started < 3
        assert data["reward"].item() < 0.11 and data["terminated"].item() == (name != "guess")  # which goes on


@pytest.mark.parametrize("make", [ChatEnv, lambda: MessageChatEnv(lambda item: GymnasiumTextEnv(Guess()))])
def test_environments_without_a_task_take_200_kb_too(make):
    data = make().reset(TensorDict(query="?"))
    step = answered(make(), "no" * 100_000, data)
    assert step["reward"].item() == 0.0 and len(step["history"].prompt.content) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_the_policy_did_not_answer_goes_on_unscored(name):
    env = ENVS[name]()
    data = env.reset()
    data["history"].full = data["history"].prompt.append({"role": "user", "content": "5"})
    step = env.step(data)["next"]
    assert step["reward"].item() == 0.0 and not step["done"].item() and not step["is_scored"].item()


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_gets_nothing(name):
    data = answered(ENVS[name](), "<answer>5</answer>", reason=StopReason.LENGTH)
    assert data["reward"].item() == 0.0 and not data["terminated"].item()


@pytest.mark.parametrize("reasoning", [True, False])
@pytest.mark.parametrize("row", GSM8K)
def test_gsm8k_reference_gets_full_reward_and_a_mutated_number_does_not(row, reasoning):
    number = row["answer"].rpartition("#### ")[2]
    wrap = "<think>hm</think><answer>It is ${}.</answer>" if reasoning else "So it is ${}."
    env = GSM8KEnv([row], reasoning=reasoning)
    right = answered(env, wrap.format(number))
    wrong = answered(env, wrap.format(number + "3"))
    assert right["reward"].item() == 1.0 and right["reward_breakdown", "success"].item() == 1.0
    assert wrong["reward"].item() == pytest.approx(0.1) and wrong["reward_breakdown", "success"].item() == 0.0
    assert right["reward_breakdown", "reward_think"].item() == reasoning


@pytest.mark.parametrize(
    ("row", "given", "is_right"),
    [(0, "0.5", True), (0, r"\frac{2}{4}", True), (0, "0.6", False), (1, "(x+1)(x-1)", True), (1, "(x+1)(x-2)", False)],
)
def test_math_answers_are_compared_as_mathematics(row, given, is_right):
    reward = answered(MATHEnv([MATH[row]]), f"<answer>{given}</answer>")["reward"].item()
    assert reward == pytest.approx(1.0 if is_right else 0.1)
    assert answered(MATHEnv([MATH[row]], reasoning=False), f"So\n\\boxed{{{given}}}")["reward"].item() == pytest.approx(
        reward
    )


@pytest.mark.slow
def test_an_endless_expression_is_wrong():
    assert answered(MATHEnv(MATH[:1]), "<answer>9^{9^{9^{9^9}}}</answer>")["reward"].item() == pytest.approx(0.1)


def test_countdown_problems_can_be_solved_and_only_with_their_numbers():
    for problem in countdown_problems(50, seed=3):
        assert 0 < problem["target"] <= 1000
    env = CountdownEnv(num_problems=8, reasoning=False, num_epochs=1)
    for _ in range(8):
        data = env.reset()
        solution, target = data[0]["solution"], data[0]["target"]
        assert answered(env, f"I see:\n{solution} = {target}", data.clone())["reward"].item() == 1.0
        assert answered(env, str(target), data)["reward"].item() == float(target in data[0]["numbers"])


def test_an_expression_may_have_signs():
    assert evaluate_expression("-(3 - 8) * 2") == (10, [3, 8, 2])
    assert is_countdown_right("-3 + 8 = 5", 5, [3, 8]) and not is_countdown_right("--5", 5, [3])


@pytest.mark.parametrize(
    "expression", ["5 ** 2", "1 // 1", "1 / 0", "((" * 80, "1 1", "__import__('os')", "5(5)", "+5"]
)
def test_what_is_no_expression_gets_the_format_reward_at_most(expression):
    assert answered(CountdownEnv(num_problems=1), f"<answer>{expression}</answer>")["reward"].item() < 0.11


def test_ifeval_reward_weighs_strict_and_loose_following():
    env = IFEvalEnv(IFEVAL, reasoning=False)
    assert answered(env, "Red")["reward"].item() == pytest.approx(1.0)
    assert answered(env, "Sure, here:\nRed")["reward"].item() == pytest.approx(0.3)  # loosely, without the first line
    assert answered(env, "Red, blue")["reward"].item() == 0.0
    assert answered(IFEvalEnv(IFEVAL), "Red")["reward"].item() == 0.0  # no <answer>


def test_ifeval_is_aggregated_by_a_function_of_ones_own():
    seen = {}

    def aggregate(score, answer_blocks, complete):
        seen.update(answer_blocks=answer_blocks, complete=complete)
        return 0.5 * score.prompt_level_strict_acc + 0.1 * (len(answer_blocks) == 1)

    reward = IfEvalScorer(aggregate_reward=aggregate)
    env = DatasetChatEnv([{"query": "?", **IFEVAL[0]}]).append_transform(reward)
    step = answered(env, "<think>hm</think><answer>Red</answer>")
    assert step["reward"].item() == pytest.approx(0.6) and seen == {"answer_blocks": ["Red"], "complete": True}
    assert step["reward_breakdown", "aggregate"].item() == pytest.approx(0.6)
    assert step["reward_breakdown", "prompt_level_loose_acc"].item() == 1.0
    assert answered(env, "<answer>Red, blue</answer>")["reward"].item() == pytest.approx(0.1)
    with pytest.raises(ValueError, match="aggregate_reward"):
        IfEvalScorer(aggregate_reward=False)


def test_ifeval_is_aggregated_by_an_instance_that_cannot_be_hashed():
    @dataclasses.dataclass
    class Aggregate:
        share: float

        def __call__(self, score, complete):
            return self.share * score.prompt_level_strict_acc * complete

    env = DatasetChatEnv([{"query": "?", **IFEVAL[0]}]).append_transform(IfEvalScorer(aggregate_reward=Aggregate(0.5)))
    assert answered(env, "<answer>Red</answer>")["reward"].item() == 0.5


def test_an_environment_of_ones_own_has_types_that_only_type_checkers_import():
    class OwnEnv(ChatEnv):
        def __init__(self, *, length: Decimal, **options: Decimal):
            super().__init__(**options)
            self.length = length

    assert OwnEnv(length=3, system_prompt="Be brief.").length == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'sytem_prompt'"):
        OwnEnv(length=3, sytem_prompt="Be brief.")


@pytest.mark.parametrize("parser", [GSM8KRewardParser, MATHRewardParser, CountdownRewardParser])
def test_success_is_reported_whatever_the_rewards_are(parser):
    row = {"query": "?", "answer": "#### 2" if parser is GSM8KRewardParser else "2", "target": 2, "numbers": [1, 1]}
    env = DatasetChatEnv([row]).append_transform(parser(correct_reward=0.7, format_reward=0.2))
    right = answered(env, "<think>hm</think><answer>1 + 1</answer>")
    wrong = answered(env, "<answer>1 - 1</answer>")
    is_sum_read = parser is not GSM8KRewardParser  # there the last number, 1, is the answer
    assert right["reward"].item() == pytest.approx(0.7 if is_sum_read else 0.2)
    assert right["reward_breakdown", "success"].item() == is_sum_read
    assert wrong["reward"].item() == pytest.approx(0.2) and wrong["reward_breakdown", "success"].item() == 0.0
    with pytest.raises(TypeError, match="text of the last message"):
        parser(tokenizer=object())
    with pytest.raises(TypeError, match="did you mean 'format_reward'"):
        parser(format_rewards=0.0)


@pytest.mark.parametrize("parser", [GSM8KRewardParser, IfEvalScorer])
def test_an_answer_need_not_end_the_conversation(parser):
    row = {"query": "?", "answer": "#### 2", **IFEVAL[0]}
    env = DatasetChatEnv([row]).append_transform(parser(set_done_if_answer=False))
    step = answered(env, "<answer>2</answer>")
    assert not step["done"].item() and not step["is_scored"].item()
    step = answered(env, "<answer>2</answer>", reason=StopReason.MAX_TURNS)
    assert not step["terminated"].item() and step["is_scored"].item()


@pytest.mark.slow
@needs_reasoning_gym
def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    env = ReasoningGymEnv({"chain_sum": 1.0, "spell_backward": 1.0}, num_problems=16)
    seen = set()
    for _ in range(16):
        data = env.reset()
        seen.add(data[0]["task"])
        assert answered(env, data[0]["entry"]["answer"], data)["reward"].item() == 1.0
    assert seen == {"chain_sum", "spell_backward"}


@needs_reasoning_gym
def test_a_task_of_reasoning_gym_is_configured():
    config = {"chain_sum": {"min_terms": 7, "max_terms": 7, "min_digits": 1, "max_digits": 1}}
    query = ReasoningGymEnv("chain_sum", config=config).reset()[0]["query"]
    assert len(query.split(":")[1].replace("-", "+").split("+")) == 7


@needs_reasoning_gym
def test_curriculum_rises_with_accuracy_and_a_group_keeps_its_problem():
    problems = ReasoningGymProblems("chain_sum", curriculum=True, window=4)
    first = problems[0]
    for score in (0.0, 1.0, 1.0, 1.0, 1.0):
        assert problems.levels["chain_sum"] == 0
        problems.record("chain_sum", 0, score)
    assert problems.levels["chain_sum"] == 1
    problems.record("chain_sum", 0, 1.0)  # a late answer to an easier problem counts for nothing
    assert problems[0] is first and problems[1]["level"] == 1
    for _ in range(400):
        problems.record("chain_sum", problems.levels["chain_sum"], 1.0)
    assert 1 < problems.levels["chain_sum"] < 20 and problems[2]["query"]


@needs_reasoning_gym
@pytest.mark.parametrize(("num_cut", "level"), [(0, 1), (306, 0)])
def test_the_curriculum_sees_answers_that_were_cut(num_cut, level):
    env = ReasoningGymEnv("chain_sum", num_problems=400, curriculum=True, window=340)
    problems, rubric = env.base_env.problems, find_rubric_rewards(env)[0].rubric
    for index in range(340):
        problem = problems[index]
        chat = ({"role": "assistant", "content": problem["entry"]["answer"]},)
        status = RolloutStatus.TRUNCATED if index < num_cut else RolloutStatus.COMPLETED
        assert problems.levels["chain_sum"] == 0
        assert run_sync(rubric.score(RewardInput(chat, problem, status))).reward == float(index >= num_cut)
    assert run_sync(rubric.score(RewardInput(chat, problem, RolloutStatus.ERROR))).is_scored is False
    assert problems.levels["chain_sum"] == level


@needs_reasoning_gym
def test_the_next_epoch_comes_at_the_level_that_was_reached():
    problems = ReasoningGymProblems("chain_sum", num_problems=4, curriculum=True, window=1)
    assert [problems[index]["level"] for index in range(4)] == [0] * 4
    problems.record("chain_sum", 0, 1.0)
    assert [problems[index]["level"] for index in range(4)] == [1] * 4


@needs_reasoning_gym
def test_a_curriculum_survives_with_the_state_of_a_collector(renderer):
    def answer(prompt_ids):
        text = renderer.decode(prompt_ids).split("<|im_start|>user\n")[-1]
        return f"{eval(text.split(':')[1].split('=')[0])}<|im_end|>"

    def make():
        env = ReasoningGymEnv("chain_sum", num_problems=8, curriculum=True, window=4, repeats=2)
        policy = LLMWrapperBase(ScriptedEngine(answer, encode=renderer.encode), renderer=renderer)
        return env, LLMCollector(env, policy=policy, dialog_turns_per_batch=4)

    (env, first), (again, second) = make(), make()
    with first, second:
        first.next(), first.next()
        levels = env.state_dict()["curriculum"]["levels"]
        assert levels["chain_sum"] > 0
        second.load_state_dict(first.state_dict())
        assert again.state_dict()["curriculum"]["levels"] == levels
        queries = [[element["query"] for element in collector.next().unbind(0)] for collector in (first, second)]
        assert queries[0] == queries[1]
    fresh = make()[0]
    fresh.load_state_dict(env.state_dict())
    assert fresh.state_dict() == env.state_dict()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GSM8KEnv([]), "empty"),
        (lambda: GSM8KEnv([*GSM8K, {"question": "?"}]), "answer"),
        (lambda: MATHEnv([{"problem": "?", "solution": "two"}]), "boxed"),
        (lambda: IFEvalEnv([{**IFEVAL[0], "instruction_id_list": ["punctuation:none"]}]), "punctuation:none"),
        (lambda: IFEvalEnv([{**IFEVAL[0], "kwargs": [{"comma": 1}]}]), "comma"),
        (lambda: IFEvalEnv([{**IFEVAL[0], "kwargs": []}]), "one entry per instruction"),
        pytest.param(lambda: ReasoningGymEnv("chain_sun"), "did you mean 'chain_sum'", marks=needs_reasoning_gym),
        pytest.param(lambda: ReasoningGymEnv("composite"), "'composite'", marks=needs_reasoning_gym),
        pytest.param(
            lambda: ReasoningGymEnv("chain_sum", config={"chain_sum": {"min_terms": 9}}),
            "max_terms",
            marks=needs_reasoning_gym,
        ),
        pytest.param(
            lambda: ReasoningGymEnv("chain_sum", config={"chain_sub": {}}), "not among", marks=needs_reasoning_gym
        ),
        pytest.param(lambda: ReasoningGymEnv({"chain_sum": 0.0}), "positive sum", marks=needs_reasoning_gym),
        (lambda: CountdownEnv(max_target=3), "max_target"),
    ],
)
def test_bad_data_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_an_unknown_option_is_refused_before_anything_is_loaded():
    for make in (GSM8KEnv, MATHEnv, IFEvalEnv, CountdownEnv, SumOfDigitsEnv):
        with pytest.raises(TypeError, match=f"{make.__name__} has no argument 'repeat'; did you mean 'repeats'"):
            make("no-such-data", repeat=2)
    with pytest.raises(TypeError, match="read once"):
        make_gsm8k_env(data="no-such-data", batch_size_dl=4)
    with pytest.raises(TypeError, match="did you mean 'repeats'"):
        DatasetChatEnv("no-such-data", repeat=2)


@needs_reasoning_gym
def test_an_unknown_configuration_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match="'chain_sum' has no argument 'min_term'; did you mean 'min_terms'"):
        ReasoningGymEnv("chain_sum", config={"chain_sum": {"min_term": 3}})


def test_a_wrong_role_is_refused():
    env = make_gsm8k_env(data=GSM8K)
    with pytest.raises((TypeError, ValueError), match="role"):
        env.base_env.opening_messages([{"rôle": "user", "content": "?"}])


@needs_reasoning_gym
def test_prompts_of_reasoning_environments_ask_for_tags():
    for name in ("gsm8k", "math", "ifeval", "countdown", "reasoning-gym-tags"):
        assert "<answer>" in ENVS[name]().reset()["history"].prompt[0, 0].content
    assert "<answer>" not in ENVS["gsm8k-plain"]().reset()["history"].prompt[0, 0].content


def test_a_local_file_is_an_offline_source(tmp_path):
    import json

    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM8K)))
    assert GSM8KEnv(str(path), repeats=2, num_envs=4).reset()["answer"][2] == GSM8K[1]["answer"]


def test_a_data_frame_is_a_source_of_a_task():
    pandas = pytest.importorskip("pandas")
    assert GSM8KEnv(pandas.DataFrame(GSM8K)).reset()["answer"] == [GSM8K[0]["answer"]]


def test_help_shows_every_option_of_a_task():
    own = {"num_problems", "num_count", "max_number", "max_target"}
    shown = set(inspect.signature(CountdownEnv).parameters)
    assert {"dataset", "split", "reasoning", "repeats", "max_steps", *own} <= shown
    assert set(inspect.signature(MATHEnv).parameters) == shown - own


def test_a_gymnasium_env_plays_as_a_conversation():
    guess = Guess()
    env = MessageChatEnv(lambda item: GymnasiumTextEnv(guess, system_prompt="Be brief."))
    data = env.reset()
    assert data["history"].prompt.content == ["Be brief.", "Guess my number."]
    step = answered(env, "7!", data)
    assert step["reward"].item() == 1.0 and step["terminated"].item()
    env.release(data)
    assert guess.is_closed


@needs_reasoning_gym
def test_a_curriculum_is_saved_and_a_group_goes_on_with_its_problem():
    def make():
        return ReasoningGymEnv("chain_sum", num_problems=8, curriculum=True, window=2, repeats=4)

    env = make()
    opened = env.reset()
    for _ in range(2):
        answered(env, opened[0]["entry"]["answer"], opened.clone())
    assert env.base_env.prompts.items.levels == {"chain_sum": 1}
    state = env.base_env.state_dict()
    again = make()
    again.base_env.load_state_dict(state)
    # The rest of the group has the problem of its first member, in this process and in the next.
    assert again.reset()["query"] == env.reset()["query"] == opened["query"]
    assert again.base_env.prompts.items.levels == {"chain_sum": 1}


@pytest.mark.parametrize(
    "make",
    [
        make_countdown_env,
        make_sum_of_digits_env,
        pytest.param(make_reasoning_gym_env, marks=needs_reasoning_gym),
    ],
)
def test_generated_train_and_test_problems_differ_and_are_the_same_each_time(make):
    def queries(split):
        items = make(split).base_env.prompts.items
        return [items[index]["query"] for index in range(40)]

    assert queries("train") == queries("train")
    assert not {*queries("train")} & {*queries("test")} or make is make_reasoning_gym_env
    assert queries("train") != queries("test")
    assert make("test").reset()[0]["rollout", "group_id"] == "test/0/0"
    with pytest.raises(ValueError, match="split must be"):
        make("validation")


def test_a_real_gymnasium_env_of_text_is_played_to_its_end():
    gymnasium = pytest.importorskip("gymnasium")

    class Countdown(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.left = 2
            return "Two steps.", {}

        def step(self, action):
            self.left -= 1
            return f"{self.left} left.", 1.0, self.left == 0, False, {}

    env = MessageChatEnv(lambda item: GymnasiumTextEnv(Countdown(), seed=1))

    def policy(tensordict):
        prompt = tensordict["history"].prompt
        full = prompt.append({"role": "assistant", "content": "go"})
        return tensordict.set("history", ChatHistory(prompt=prompt, full=full))

    rollout = env.rollout(5, policy)
    assert rollout["next", "reward"].flatten().tolist() == [1.0, 1.0]
    assert rollout["next", "terminated"].flatten().tolist() == [False, True]
    assert rollout[-1]["history"].full.content == ["Two steps.", "go", "1 left.", "go"]


@pytest.mark.parametrize(
    ("make", "reply", "reward"),
    [
        (lambda: GSM8KEnv(GSM8K[:1]), "<think>3 * 400</think> <answer>1200</answer>", 1.0),
        (lambda: MATHEnv(MATH[:1]), "<answer>0.5</answer>", 1.0),  # awaited, after the conversation has left the batch
        (lambda: MATHEnv(MATH[:1]), "<answer>0.6</answer>", 0.1),
        (lambda: IFEvalEnv(IFEVAL), "<answer>Red</answer>", 1.0),
    ],
    ids=["gsm8k", "math", "math-wrong", "ifeval"],
)
def test_a_collector_plays_and_scores_a_task(renderer, make, reply, reward):
    engine = ScriptedEngine([f"{reply}<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(make(), policy=policy, groups_per_batch=2) as collector:
        rollouts = collector.play(2)
    assert [rollout.reward for rollout in rollouts] == pytest.approx([reward] * 2)
    assert all(rollout.is_scored for rollout in rollouts)


@pytest.mark.parametrize(
    "make",
    [
        *(ENVS[name] for name in ("gsm8k", "math", "ifeval", "countdown", "sum-of-digits", "addition", "search")),
        pytest.param(ENVS["reasoning-gym"], marks=needs_reasoning_gym),
        lambda: MessageChatEnv(lambda item: GymnasiumTextEnv(Guess())),
    ],
    ids=["gsm8k", "math", "ifeval", "countdown", "sum-of-digits", "addition", "search", "reasoning-gym", "gymnasium"],
)
def test_the_model_plays_every_environment(vllm_engine, tokenizer, make):
    from llmrl.policies import vLLMWrapper

    policy = vLLMWrapper(vllm_engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    env = make()
    unlock_batch_size(env)
    rollout = env.rollout(1, policy, auto_reset=False, tensordict=env.reset(TensorDict(batch_size=[2])))
    assert rollout["next", "reward"].shape == (2, 1, 1, 1)
    for element in batch_elements(rollout):
        assert element["history"].full.role[-1] == "assistant"
