from env import env


def test_halving_finds_the_number_and_is_rewarded_once(played):
    def halve(prompt):
        low, high = 1, 9
        for guess, answer in zip(said(prompt, "assistant"), said(prompt, "user")[1:], strict=False):
            low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
        return (low + high) // 2

    rollouts = played(env(repeats=1), halve, 9)
    assert all(one.reward == 1 and one.num_turns <= 4 for one in rollouts)


def test_what_is_no_number_is_asked_again_and_earns_nothing(played):
    (rollout,) = played(env(repeats=1), lambda prompt: "seven?")
    assert rollout.reward == 0 and rollout.num_turns == 8


def said(prompt, role):
    """Return the messages of a role in a rendered prompt."""
    turns = [turn.removesuffix("<|im_end|>\n") for turn in prompt.split("<|im_start|>")[:-1]]
    return [turn.partition("\n")[2].strip() for turn in turns if turn.startswith(role)]
