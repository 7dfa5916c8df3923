"""`Judge` against a small server on this machine that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrl import RewardFn, Rubric
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.background_loop import BackgroundLoop
from llmrl.rewards import Judge, RewardInput

pytest.importorskip("openai")
web = pytest.importorskip("aiohttp.web")


class JudgesServer:
    """Replies to each request what `reply` makes of its prompt, after `failures` (statuses) have been answered."""

    def __init__(self):
        self.requests, self.failures, self.num_open, self.max_open = [], [], 0, 0
        self.reply, self.latency_seconds = lambda prompt: "10", 0.0
        self._background = BackgroundLoop("judges-server")
        self.url = f"http://127.0.0.1:{self._background.run(self._start())}/v1"

    async def _start(self):
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _complete(self, request):
        self.requests.append(await request.json())
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        await asyncio.sleep(self.latency_seconds)
        self.num_open -= 1
        if self.failures:
            return web.Response(status=self.failures.pop(0), headers={"Retry-After": "0"}, text="not now")
        reply = self.reply(self.requests[-1]["messages"][0]["content"])
        message = {"role": "assistant", "content": reply}
        return web.json_response({
            "id": "1", "object": "chat.completion", "created": 0, "model": "judge",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        })  # fmt: skip

    def close(self):
        self._background.run(self._runner.cleanup())
        self._background.close()


@pytest.fixture
def server():
    server = JudgesServer()
    yield server
    server.close()


def make_judge(server, prompt="Rate {completion}", **options):
    return Judge("judge", prompt, base_url=server.url, api_key="-", **options)


def answered(text, **columns):
    return RewardInput(({"role": "user", "content": "2 + 3 ="}, {"role": "assistant", "content": text}), columns)


def test_a_rubric_scores_by_what_the_judge_says_of_each_answer(server):
    server.reply = lambda prompt: f"That is good: {prompt.count('x')}/10"
    judge = make_judge(server, "{query} {completion}", options={"temperature": 0}, prices=(2.0, 30.0))
    rubric = Rubric(RewardFn(judge, weight=1), RewardFn(lambda completion: 1.0, name="other", weight=3))
    scores = [run_sync(rubric.score(answered("x" * count, query="Write x."))) for count in (0, 4, 9)]
    assert [score.reward for score in scores] == pytest.approx([(count / 10 + 3) / 4 for count in (1, 5, 10)])
    assert [score.breakdown["judge"] for score in scores] == [0.1, 0.5, 1.0]
    assert {request["temperature"] for request in server.requests} == {0}
    assert {request["model"] for request in server.requests} == {"judge"}
    assert (judge.usage.num_requests, judge.usage.num_input_tokens, judge.usage.num_output_tokens) == (3, 300, 30)
    assert judge.usage.cost == pytest.approx(3 * (100 * 2 + 10 * 30) / 1e6)


def test_one_question_is_asked_once_and_few_at_a_time(server):
    server.latency_seconds = 0.02
    judge = make_judge(server, max_concurrent_requests=3)

    async def ask_all():
        return await asyncio.gather(*(judge(completion=f"{index % 10}") for index in range(40)))

    assert run_sync(ask_all()) == [1.0] * 40
    assert run_sync(ask_all()) == [1.0] * 40  # on another loop
    assert len(server.requests) == 10 == judge.usage.num_requests
    assert judge.usage.num_cached == 70
    assert server.max_open <= 3


@pytest.mark.slow
def test_a_refusal_and_an_error_are_tried_again_and_what_stays_wrong_leaves_the_rollout_unscored(server):
    judge = make_judge(server, max_retries=2)
    server.failures = [429, 503]
    assert run_sync(judge(completion="a")) == 1.0
    assert (len(server.requests), judge.usage.num_requests) == (3, 1)
    server.failures = [500] * 3
    score = run_sync(Rubric(judge).score(answered("b")))
    assert not score.is_scored and "InternalServerError" in score.error and "'judge'" in score.error
    assert len(server.requests) == 6
    assert run_sync(judge(completion="b")) == 1.0  # a failure is not remembered
    server.reply = lambda prompt: None
    score = run_sync(Rubric(judge).score(answered("c")))
    assert not score.is_scored and "has no text" in score.error


def test_a_cancelled_caller_takes_nothing_from_others_that_wait_for_the_same_reply(server):
    is_given_up = threading.Event()
    server.reply = lambda prompt: "10" if is_given_up.wait(240) else ""
    judge = make_judge(server)

    async def one_gives_up():
        tasks = [asyncio.ensure_future(judge(completion="a")) for _ in range(2)]
        while not server.requests:
            await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        is_given_up.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    gone, score = run_sync(one_gives_up())
    assert isinstance(gone, asyncio.CancelledError) and score == 1.0
    assert len(server.requests) == 1


def test_replies_are_kept_in_a_file_with_half_a_line_of_another_process(server, tmp_path):
    path = tmp_path / "replies.jsonl"
    server.reply = lambda prompt: "one\nline, then 3"
    assert run_sync(make_judge(server, cache_path=path)(completion="a")) == 0.3
    with path.open("a") as file:
        file.write('\n["half')
    server.reply = lambda prompt: "9"
    later = make_judge(server, cache_path=path)
    assert run_sync(later(completion="a")) == 0.3
    assert run_sync(later(completion="b")) == 0.9
    assert run_sync(make_judge(server, cache_path=path, options={"seed": 1})(completion="a")) == 0.9
    assert run_sync(make_judge(server, cache_path=path)(completion="b")) == 0.9
    assert len(server.requests) == 3


@pytest.mark.parametrize("name", [None, "replies.jsonl"])
def test_a_reply_without_a_score_is_asked_for_again(server, tmp_path, name):
    path = None if name is None else tmp_path / name
    server.reply = lambda prompt: "I cannot rate this."
    judge = make_judge(server, cache_path=path)
    with pytest.raises(ValueError, match="between 0 and 10"):
        run_sync(judge(completion="a"))
    server.reply = lambda prompt: "7"
    judges = [judge] if path is None else [make_judge(server, cache_path=path), make_judge(server, cache_path=path)]
    assert [run_sync(one(completion="a")) for one in [*judges, judges[0]]] == [0.7] * (len(judges) + 1)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7", 0.7),
        ("7.5", 0.75),
        ("Of 3 mistakes none is bad.\n\nScore: 8.", 0.8),
        ("8/10", 0.8),
        ("8 / 10", 0.8),
        ("I give it 8 out of 10.", 0.8),
        ("Score: 8 (out of 10)", 0.8),
        ("Score: 8\n\nOut of 10", 0.8),
        ("**8**/10", 0.8),
        ("**8** / **10**", 0.8),
        ("Rating: 3 of 10", 0.3),
        ("I give it 3 on a scale from 0 to 10.", 0.3),
        ("3 on a scale of 10", 0.3),
        ("3 (on a scale of 0-10)", 0.3),
        ("On a scale from 0 to 10, it is a 3.", 0.3),
        ("I note 2 of 3 points hold. Score: 6", 0.6),
        ("**10**", 1.0),
        ("0", 0.0),
        ("4/5", None),
        ("11", None),
        ("-1", None),
        ("ten", None),
        ("", None),
        ("GPT4", None),
        ("nan", None),
        ("1e5", None),
    ],
)
def test_the_score_is_the_last_number_of_the_scale(reply, expected):
    judge = Judge("judge", "{completion}", api_key="-")
    if expected is None:
        with pytest.raises(ValueError, match="between 0 and 10"):
            judge.score_of(reply)
    else:
        assert judge.score_of(reply) == pytest.approx(expected)


def test_another_scale_and_an_own_reader():
    assert Judge("judge", "{completion}", scale=(1, 5), api_key="-").score_of("4 out of 5") == 0.75
    own = Judge("judge", "{completion}", read=lambda reply: float("yes" in reply.lower()), api_key="-")
    assert (own.score_of("Yes."), own.score_of("no")) == (1.0, 0.0)
    with pytest.raises(ValueError, match="`read` returned"):
        Judge("judge", "{completion}", read=lambda reply: float("nan"), api_key="-").score_of("x")


@given(text=st.text())
def test_what_is_asked_about_stands_in_the_prompt_as_it_is(text):
    asked = []

    async def ask(request):
        asked.append(json.loads(json.dumps(request))["messages"][0]["content"])
        return "5"

    judge = Judge("judge", "{{rules}} <{completion}>", api_key="-", base_url="http://127.0.0.1:9")
    judge._opened = SimpleNamespace(ask=ask, loop=SimpleNamespace(wait=lambda coroutine: coroutine))
    assert run_sync(judge(completion=text)) == 0.5
    assert asked == [f"{{rules}} <{text}>"]


def test_a_conversation_is_written_with_who_said_what(server):
    judge = make_judge(server, "{messages}")
    run_sync(Rubric(judge).score(answered("5")))
    assert server.requests[0]["messages"][0]["content"] == "user: 2 + 3 =\n\nassistant: 5"


def test_requests_begin_at_the_rate_that_is_asked_for(server):
    judge = make_judge(server, requests_per_minute=120)
    run_sync(judge(completion="a"))
    delay = judge._opened.delay
    assert [delay(1e9) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert [delay(1e9 + 60) for _ in range(2)] == [0.0, 0.5]  # nothing is saved up
    other = make_judge(server)
    run_sync(other(completion="a"))
    assert [other._opened.delay(1e9) for _ in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda judge: pickle.loads(pickle.dumps(judge))])
def test_a_copy_asks_for_itself(server, copied):
    judge = make_judge(server)
    run_sync(judge(completion="a"))
    other = copied(judge)
    assert run_sync(other(completion="a")) == 1.0
    assert (judge.usage.num_requests, other.usage.num_requests, len(server.requests)) == (1, 1, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"prompt": "Rate it."}, "must contain names of inputs"),
        ({"prompt": "Rate {}"}, "must contain names of inputs"),
        ({"prompt": "Rate {completion.__class__}"}, "without attributes or indices"),
        ({"scale": (5, 5)}, "scale"),
        ({"requests_per_minute": 0}, "requests_per_minute must be positive"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests must be positive"),
        ({"max_retries": -1}, "max_retries must be at least 0"),
        ({"timeout_seconds": -1}, "timeout_seconds must be positive"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Judge("judge", **{"prompt": "Rate {completion}", **options})


def test_a_judge_without_a_key_leaves_its_rollouts_unscored_and_no_threads(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = set(threading.enumerate())
    rubric = Rubric(Judge("judge", "{completion}"))
    scores = [run_sync(rubric.score(answered(text))) for text in "abc"]
    assert not any(score.is_scored for score in scores) and "OPENAI_API_KEY" in scores[-1].error
    assert [thread.name for thread in set(threading.enumerate()) - before if "judge" in thread.name] == []


@pytest.mark.parametrize("name", ["missing/replies.jsonl", "."])
def test_a_cache_that_cannot_be_written_is_refused_before_a_request_is_paid_for(server, tmp_path, name):
    with pytest.raises(ValueError, match="cache_path must be a file that can be written"):
        run_sync(make_judge(server, cache_path=tmp_path / name)(completion="a"))
    assert server.requests == []


def test_a_column_that_is_not_there_is_named_where_the_reward_is_appended():
    with pytest.raises(TypeError, match="'anwser'"):
        Rubric(Judge("judge", "{completion} {anwser}", api_key="-")).check_inputs(["completion", "answer"])
