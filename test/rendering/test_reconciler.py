"""The reconciler: small integers, masks by eye."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.rendering import Conversation, TurnNode, common_prefix_length
from llmrl.rendering import reconcile as reconcile_tree


class Turn(NamedTuple):
    prompt_ids: list[int]
    completion_ids: list[int]
    log_probs: list[float]
    versions: list[int]


def turn(prompt, completion, version=0):
    log_probs = [-token / 100 for token in completion]
    return Turn(list(prompt), list(completion), log_probs, [version] * len(completion))


def reconcile(turns, fork_threshold_tokens=64):
    conversation = Conversation.start(None, fork_threshold_tokens=fork_threshold_tokens)
    for each in turns:
        conversation = conversation.with_prompt_ids(each.prompt_ids)
        assert conversation.prompt_ids == each.prompt_ids
        conversation = conversation.with_completion(
            each.completion_ids, log_probs=each.log_probs, versions=each.versions
        )
        # held_is_prompt_and_completion
        assert conversation.prompt_ids == each.prompt_ids + each.completion_ids
    return conversation.reconcile()


def masks(result):
    return [[int(trained) for trained in row.columns.loss_mask] for row in result.rows]


def test_no_turns_give_no_rows():
    result = reconcile([])
    assert result.rows == []


def test_clean_turns_make_one_row():
    result = reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])])
    assert [row.columns.token_ids for row in result.rows] == [[1, 2, 3, 4, 5, 6]]
    assert masks(result) == [[0, 0, 1, 1, 0, 1]]
    assert result.rows[0].turn_span == (0, 2)
    assert result.counts["num_clean_turns"] == 1


def test_realign_overwrites_the_tail_and_keeps_what_stands_before():
    result = reconcile([turn([1, 2], [3, 4, 5], 7), turn([1, 2, 3, 4, 9], [6], 8)])
    row = result.rows[0].columns
    assert row.token_ids == [1, 2, 3, 4, 9, 6]
    assert masks(result) == [[0, 0, 1, 1, 0, 1]]
    assert row.log_probs == [0, 0, -0.03, -0.04, 0, -0.06] and row.versions == [-1, -1, 7, 7, -1, 8]
    assert result.counts["num_realigned_turns"] == 1 and result.counts["num_realigned_tokens"] == 1


@pytest.mark.parametrize(("threshold", "num_rows"), [(3, 1), (2, 2)])
def test_drift_equal_to_the_threshold_forks(threshold, num_rows):
    turns = [turn([1], [2, 3, 4, 5]), turn([1, 2, 3, 9], [6])]  # drift 2
    assert len(reconcile(turns, fork_threshold_tokens=threshold).rows) == num_rows


@pytest.mark.parametrize(("num_kept", "num_rows"), [(6, 1), (5, 2), (1, 2)])
def test_a_realign_that_would_take_most_of_an_answer_forks(num_kept, num_rows):
    answer = list(range(10, 20))
    result = reconcile([turn([1], answer), turn([1, *answer[: num_kept - 1], 9], [5])], fork_threshold_tokens=1024)
    assert len(result.rows) == num_rows
    num_lost = 0 if num_rows == 2 else 10 + 1 - num_kept
    assert sum(map(sum, masks(result))) == 11 - num_lost and result.counts["num_realigned_tokens"] == num_lost


def test_drift_in_an_older_turn_forks():
    result = reconcile([turn([1], [2, 3]), turn([1, 2, 3, 4], [5]), turn([1, 2, 9, 4, 5, 6], [7])])
    assert [row.columns.token_ids for row in result.rows] == [[1, 2, 3, 4, 5], [1, 2, 9, 4, 5, 6, 7]]
    assert masks(result) == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert [row.turn_span for row in result.rows] == [(0, 2), (2, 3)]


def test_drift_in_the_last_context_forks():
    result = reconcile([turn([1, 2], [3]), turn([1, 9, 3], [4])])
    assert result.counts["num_forked_turns"] == 1 and len(result.rows) == 2


def test_a_short_answer_that_is_rewritten_keeps_its_signal_in_a_row_of_its_own():
    result = reconcile([turn([1], [2]), turn([1, 9], [3])])
    assert masks(result) == [[0, 1], [0, 0, 1]]
    assert result.counts["num_realigned_tokens"] == 0


def test_a_row_left_without_trained_tokens_is_dropped_and_flagged():
    result = reconcile([turn([1], []), turn([1, 9], [])])
    assert result.rows == [] and result.counts["num_dropped_rows"] == 1


def test_long_dropped_reasoning_with_a_short_next_turn_forks_and_trains_both():
    reasoning = list(range(100, 140))
    result = reconcile([turn([1], [*reasoning, 2]), turn([1, 2, 3], [4])], fork_threshold_tokens=16)
    assert masks(result) == [[0] + [1] * 41, [0, 0, 0, 1]]


def test_an_empty_completion_leaves_the_row_clean():
    result = reconcile([turn([1], []), turn([1, 2], [3])])
    assert masks(result) == [[0, 0, 1]] and result.counts["num_clean_turns"] == 1


def test_a_prompt_shorter_than_the_row_is_a_realign_or_a_fork():
    assert masks(reconcile([turn([1, 2], [3, 4]), turn([1, 2, 3], [5])])) == [[0, 0, 1, 1]]
    assert masks(reconcile([turn([1, 2], [3]), turn([1], [5])])) == [[0, 0, 1], [0, 1]]


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="fork_threshold_tokens"):
        reconcile([], fork_threshold_tokens=-1)


tokens = st.lists(st.integers(0, 3), max_size=8)


@st.composite
def turn_lists(draw):
    turns, held = [], []
    for _ in range(draw(st.integers(1, 6))):
        kept = draw(st.integers(0, len(held)) | st.just(len(held)))
        prompt = held[:kept] + draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        turns.append(turn(prompt, draw(tokens), draw(st.integers(0, 5))))
        held = turns[-1].prompt_ids + turns[-1].completion_ids
    return turns


@settings(deadline=None)
@given(turn_lists(), st.integers(0, 6))
def test_every_sampled_token_is_trained_once_or_counted_as_realigned(turns, threshold):
    result = reconcile(turns, fork_threshold_tokens=threshold)
    num_trained = sum(sum(row.columns.loss_mask) for row in result.rows)
    num_sampled = sum(len(each.completion_ids) for each in turns)
    assert num_trained + result.counts["num_realigned_tokens"] == num_sampled
    for row in result.rows:
        columns = row.columns
        assert len(columns.token_ids) == len(columns.loss_mask) == len(columns.log_probs) == len(columns.versions)
        assert all(
            v >= 0 if t else v == -1 and p == 0
            for t, v, p in zip(columns.loss_mask, columns.versions, columns.log_probs, strict=True)
        )
        last = turns[row.turn_span[1] - 1]
        if row is result.rows[-1] and row.turn_span[1] == len(turns):
            assert columns.token_ids == last.prompt_ids + last.completion_ids
    kinds = sum(result.counts[f"num_{kind}_turns"] for kind in ("clean", "realigned", "forked"))
    assert kinds == len(turns) - 1


@settings(deadline=None)
@given(tokens, tokens)
def test_common_prefix_is_that_of_the_plain_definition(left, right):
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert common_prefix_length(left, right) == expected


def to_path(turns, threshold):
    node, held = None, []
    for each in turns:
        kept = common_prefix_length(held, list(each.prompt_ids))
        context = each.prompt_ids[kept:]
        node = TurnNode(node, kept, context, each.completion_ids, each.log_probs, each.versions, threshold)
        held = each.prompt_ids + each.completion_ids
    return node


@pytest.mark.slow
@settings(deadline=None)
@given(turn_lists(), st.integers(0, 6))
def test_a_path_of_the_tree_gives_the_rows_of_its_turns(turns, threshold):
    leaf = to_path(turns, threshold)
    flat, tree = (
        reconcile(turns, fork_threshold_tokens=threshold),
        reconcile_tree([leaf]),
    )
    assert flat.counts == tree.counts
    assert [row.columns.token_ids for row in flat.rows] == [row.columns.token_ids for row in tree.rows]
    assert masks(flat) == masks(tree)
    assert leaf.token_ids() == turns[-1].prompt_ids + turns[-1].completion_ids


@st.composite
def trees(draw):
    """Nodes with sampled tokens that are all different, so that a trained token can be identified."""
    nodes: list[TurnNode] = []
    threshold = draw(st.integers(0, 6))
    fresh = iter(range(1000, 10**6))
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *nodes]))
        num_tokens = 0 if parent is None else parent.num_tokens
        kept = draw(st.integers(0, num_tokens) | st.just(num_tokens))
        completion = [next(fresh) for _ in range(draw(st.integers(0, 4)))]
        context = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        n = len(completion)
        nodes.append(TurnNode(parent, kept, context, completion, [-0.5] * n, [1] * n, threshold))
    parents = {id(node.parent) for node in nodes}
    return nodes, [node for node in nodes if id(node) not in parents]


@settings(deadline=None)
@given(trees())
def test_no_token_of_a_tree_is_trained_twice_and_none_is_lost_but_to_a_realign(tree):
    nodes, leaves = tree
    result = reconcile_tree(leaves)
    trained = [
        t
        for row in result.rows
        for t, loss_mask in zip(row.columns.token_ids, row.columns.loss_mask, strict=True)
        if loss_mask
    ]
    assert len(trained) == len(set(trained))
    sampled = {token for node in nodes for token in node.completion_ids}
    assert set(trained) <= sampled
    if result.counts["num_realigned_tokens"] == 0:
        assert set(trained) == sampled
    assert [row.row_index for row in result.rows] == list(range(len(result.rows)))


def test_the_tail_that_one_branch_realigned_is_trained_by_the_branch_that_kept_it():
    root = TurnNode(None, 0, [1], [2, 3], [-0.1, -0.2], [0, 0])
    leaves = [TurnNode(root, 2, [9], [4], [-0.3], [0]), TurnNode(root, 3, [8], [5], [-0.4], [0])]
    result = reconcile_tree(leaves)
    assert [row.columns.token_ids for row in result.rows] == [[1, 2, 9, 4], [1, 2, 3, 8, 5]]
    assert masks(result) == [[0, 1, 0, 1], [0, 0, 1, 0, 1]]


def test_a_node_refuses_to_keep_more_than_its_parent_has():
    root = TurnNode(None, 0, [1], [2], [-0.1], [0])
    with pytest.raises(ValueError, match="num_kept_tokens"):
        TurnNode(root, 3, [], [4], [-0.1], [0])
