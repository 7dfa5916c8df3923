from agent import env


def test_the_last_answer_is_scored(played):
    def answer(prompt):
        return "May." if "only" in prompt else "Let me think."

    rollouts = played(env(repeats=1), answer, 3)  # one problem each: May has neither 28 nor 30 days
    assert sorted(one.reward for one in rollouts) == [0, 0, 1] and all(one.num_turns == 2 for one in rollouts)


def test_a_month_among_other_words_earns_a_share(played):
    rollouts = played(env(repeats=1), lambda prompt: "It is May, no.", 3)
    assert sorted(one.reward for one in rollouts) == [0, 0, 1 / 4]
