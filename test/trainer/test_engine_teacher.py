"""Teachers behind engines: vLLM here and behind a server, and transformers, against a model in eager attention."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from loopback_server import LoopbackServer, web
from tensordict import TensorDict, lazy_stack
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.collectors import Demonstrations
from llmrl.config.imitation import TeacherConfig
from llmrl.engines import EngineError, EngineReplicas, SamplingConfig, ServerEngine, TransformersEngine
from llmrl.objectives import TeacherAdvantage
from llmrl.rendering import TemplateRenderer
from llmrl.runs.setup import start_teacher
from llmrl.testing import ScriptedEngine
from llmrl.trainer import (
    EngineTeacher,
    TransformersWrapper,
    load_model,
    load_teacher,
    write_hinted_log_probs,
    write_log_probs,
)

TEACHER = ("next", "teacher_log_probs", "full")
MASK = ("masks", "all_assistant_mask")


def plain_scores(model, ids):
    """Log-probs in the place of each token but the first, `[num_tokens - 1, vocab_size]`, float64."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def check(scores, log_p, ids, top_k, **tolerance):
    own = log_p.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs[1:].double(), own, **tolerance)
    assert scores.log_probs[0] == 0 and scores.top_ids.shape == scores.top_log_probs.shape == (len(ids), top_k)
    torch.testing.assert_close(scores.top_log_probs[1:].double(), log_p.topk(top_k).values, **tolerance)
    named = log_p.gather(1, scores.top_ids[1:])
    torch.testing.assert_close(scores.top_log_probs[1:].double(), named, **tolerance)
    assert all(len(set(place)) == top_k for place in scores.top_ids[1:].tolist())


@pytest.fixture(scope="module")
def student(tiny_model_path):
    return TransformersWrapper(load_model(tiny_model_path), generate=False)


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_model_path):
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture(scope="module")
def eager(tiny_model_path):
    """Another model of the student's tokenizer, the teacher's, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.fixture(scope="module")
def teacher_path(eager, tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    eager.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def batch(tiny_tokenizer):
    def said(n):
        return [{"role": "user", "content": f"{n} + 1 ="}, {"role": "assistant", "content": f"It is {n + 1}" * (n + 1)}]

    rows = [{"messages": said(n)} for n in range(3)]
    return Demonstrations(rows, TemplateRenderer(tiny_tokenizer), conversations_per_batch=3).all_rows()


def test_vllm_scores_given_tokens_whatever_its_cache_holds(vllm_engine, reference_model, tokenizer):
    texts = ["The capital of France is Paris, and that of Italy is Rome.", "The capital of France is Lyon."]
    rows = [tokenizer.encode(text) for text in texts]
    asyncio.run(vllm_engine.generate(rows[0], SamplingConfig(max_new_tokens=4)))

    async def score(top_k):
        return await asyncio.gather(*(vllm_engine.score(ids, top_k=top_k) for ids in rows * 2))

    for top_k in (0, 5):
        for ids, scores in zip(rows * 2, asyncio.run(score(top_k)), strict=True):
            check(scores, plain_scores(reference_model, ids), ids, top_k, rtol=0, atol=2e-3)
    assert vllm_engine.num_in_flight == 0
    with pytest.raises(ValueError, match="context is 2048; shorten"):
        asyncio.run(vllm_engine.score([5] * 2048))
    with pytest.raises(ValueError, match="vLLM refused the request"):
        asyncio.run(vllm_engine.score([5, 10**7]))


def test_transformers_score_given_tokens(eager, teacher_path, tiny_tokenizer):
    ids = tiny_tokenizer.encode("One plus one is two.")
    with TransformersEngine(teacher_path) as engine:
        check(asyncio.run(engine.score(ids, top_k=4)), plain_scores(eager, ids), ids, 4, rtol=0, atol=1e-4)
        for wrong, message in (([5], "at least two"), ([5, 10**7], "outside the vocabulary"), ([5] * 9000, "context")):
            with pytest.raises(ValueError, match=message):
                asyncio.run(engine.score(wrong))
        with pytest.raises(ValueError, match="top_k must be at least 0, got -1"):
            asyncio.run(engine.score(ids, top_k=-1))
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(engine.score(ids))


@pytest.mark.slow
def test_it_stands_where_a_teachers_model_does(student, teacher_path, eager, batch, tiny_tokenizer):
    for row in batch.unbind(0):
        row["log_probs", "full"] = torch.full((len(row["tokens", "full"]),), -2.0)
    copies = [batch.clone() for _ in range(2)]
    render = partial(TemplateRenderer(tiny_tokenizer).render, add_generation_prompt=True)
    hints = ["It is 1.", "", "Think first, then say it."]
    with EngineReplicas([TransformersEngine(teacher_path) for _ in range(2)]) as engines:
        teacher = EngineTeacher(student, engines, tokenizer=tiny_tokenizer)
        model = load_teacher(student, teacher_path, tokenizer=tiny_tokenizer)
        for given, copy in zip((model, teacher), copies, strict=True):
            TeacherAdvantage()(write_log_probs(given, copy, TEACHER))
            write_hinted_log_probs(given, copy, ("hinted", "full"), hints=hints, render=render)
            write_log_probs(given, copy, ("all", "full"), assistant_only=False)
    for row, by_model, by_engine in zip(batch.unbind(0), *(copy.unbind(0) for copy in copies), strict=True):
        ids, mask = row["tokens", "full"], row[MASK]
        own = plain_scores(eager, ids.tolist()).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(by_engine[TEACHER][mask].double(), own[mask[1:]], rtol=0, atol=1e-4)
        assert not by_engine[TEACHER][~mask].any()
        torch.testing.assert_close(by_engine["all", "full"][1:].double(), own, rtol=0, atol=1e-4)
        for key in ("advantage", "kl_to_teacher", ("hinted", "full")):
            torch.testing.assert_close(by_engine[key], by_model[key], rtol=0, atol=1e-4)


def test_what_it_cannot_do_exactly_is_refused(student, teacher_path, tiny_tokenizer, batch):
    others = copy.deepcopy(tiny_tokenizer)
    others.add_tokens(["<other>"])
    warm = TransformersWrapper(student.model, generate=False, generate_kwargs={"temperature": 0.7})
    with TransformersEngine(teacher_path, max_model_len=40) as engine:
        with pytest.raises(ValueError, match=r"temperature 0\.7.*load_teacher"):
            EngineTeacher(warm, engine, tokenizer=tiny_tokenizer)
        with pytest.raises(ValueError, match=r"another tokenizer .*1 entries .*'<other>'"):
            EngineTeacher(student, engine, tokenizer=others)
        for silent in (ScriptedEngine([[1]]), EngineReplicas([engine, ScriptedEngine([[1]])])):
            with pytest.raises(TypeError, match="ScriptedEngine has no method score"):
                EngineTeacher(student, silent, tokenizer=tiny_tokenizer)
        teacher = EngineTeacher(student, engine, tokenizer=tiny_tokenizer)
        with pytest.raises(ValueError, match="context is 40"):
            write_log_probs(teacher, batch, TEACHER)
        with pytest.raises(TypeError, match="disable_adapter"):
            write_log_probs(teacher, batch, TEACHER, disable_adapter=True)
        row = batch[0].clone()
        counts = torch.zeros(len(row["tokens", "full"]), dtype=torch.int32)
        counts[-1] = 2
        row["sampling_mask"] = TensorDict({"counts": counts, "token_ids": torch.tensor([1, 2], dtype=torch.int32)})
        with pytest.raises(ValueError, match="sampled from truncated ones"):
            write_log_probs(teacher, lazy_stack([row]), TEACHER)
        untrained = TensorDict({"tokens": {"full": torch.tensor([5])}, "masks": {MASK[1]: torch.tensor([True])}})
        assert write_log_probs(teacher, lazy_stack([untrained]), TEACHER)[0][TEACHER].tolist() == [0.0]


class TeacherServer(LoopbackServer):
    """Answers with the log-probs of a prompt as `vllm serve` does, and with the ids of a text."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer, self.num_texts = model, tokenizer, 0
        super().__init__(model_entry={"id": "teacher", "max_model_len": 64})
        self.answer = self.scores

    async def _start(self, port):
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/tokenize", self.tokenize)
        self._runner = web.AppRunner(application, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, shutdown_timeout=0.1)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def _complete(self, request):
        self.bodies.append(await request.json())
        return web.json_response({"choices": [self.answer(self.bodies[-1])]})

    async def tokenize(self, request):
        body = await request.json()
        self.num_texts += 1
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return web.json_response({"tokens": ids, "count": len(ids)})

    def scores(self, body):
        ids, top_k = body["prompt"], body["prompt_logprobs"]
        places = [None]
        for place, token_id in zip(plain_scores(self.model, ids), ids[1:], strict=True):
            ranks = {token_id: int((place > place[token_id]).sum()) + 1}
            ranks |= {number: rank for rank, number in enumerate(place.topk(top_k).indices.tolist(), 1)}
            entries = {str(number): {"logprob": float(place[number]), "rank": rank} for number, rank in ranks.items()}
            places.append(entries)
        return {"text": "", "finish_reason": "length", "prompt_logprobs": places}


@pytest.fixture(scope="module")
def server(eager, tiny_tokenizer):
    with contextlib.closing(TeacherServer(eager, tiny_tokenizer)) as server:
        yield server


@pytest.mark.slow
def test_a_server_is_a_teacher(student, server, eager, batch, tiny_tokenizer):
    ids = tiny_tokenizer.encode("One plus one is two.")
    with ServerEngine(server.url) as engine:
        for top_k in (0, 3):
            scores = asyncio.run(engine.score(ids, top_k=top_k))
            check(scores, plain_scores(eager, ids), ids, top_k, rtol=0, atol=1e-6)
        assert server.bodies[-1]["max_tokens"] == 1
        teacher = EngineTeacher(student, engine, tokenizer=tiny_tokenizer)
        assert server.num_texts * 512 >= len(tiny_tokenizer.get_vocab())
        for row, scored in zip(batch.unbind(0), teacher.scores(batch, top_k=2), strict=True):
            asked = row["tokens", "full"].tolist()
            own = plain_scores(eager, asked)[row[MASK][1:]]
            torch.testing.assert_close(scored.top_log_probs[row[MASK]].double(), own.topk(2).values, rtol=0, atol=1e-5)
        server.tokenizer = _Shifted(tiny_tokenizer)
        with pytest.raises(ValueError, match=r"'teacher' has another tokenizer than .*!.* it makes \[18, 198"):
            EngineTeacher(student, engine, tokenizer=tiny_tokenizer)
        server.tokenizer = tiny_tokenizer


@pytest.mark.slow
def test_a_script_finds_its_teacher_by_path_or_by_url(server, student, teacher_path, tiny_tokenizer):
    def taught(**teacher):
        with start_teacher(SimpleNamespace(teacher=TeacherConfig(**teacher)), student, tokenizer=tiny_tokenizer) as one:
            return one

    by_url, by_path = taught(url=server.url), taught(path=str(teacher_path))
    assert isinstance(by_url, EngineTeacher) and by_url.engine.model == "teacher" and not by_url.engine.is_alive
    assert isinstance(by_path, TransformersWrapper) and by_path is not student
    assert taught(hint="It is {answer}.") is student
    with pytest.raises(ValueError, match=r"teacher\.path='a' and teacher\.url='http://b' are two teachers"):
        TeacherConfig(path="a", url="http://b")


class _Shifted:
    """Another tokenizer, in which one id is another."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text, *, add_special_tokens):
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return [number + (number == self.tokenizer.encode("!")[0]) for number in ids]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: None, "did not return the log-probs"),
        (lambda places: places[:-1], "did not return the log-probs"),
        (lambda places: [*places[:-1], {}], "did not return the log-probs"),
        (lambda places: [*places[:-1], {"5": {"logprob": "x", "rank": 1}}], "did not return the log-probs"),
        (lambda places: [places[0], *places[2:], places[1]], "did not return the log-probs"),
        (lambda places: [*places[:-1], {"7": {"logprob": 3.5, "rank": 1}}], "up to 3.5; numbers up to 0"),
        (lambda places: [*places[:-1], {"7": {"logprob": None, "rank": 1}}], "did not return the log-probs"),
    ],
)
def test_a_servers_wrong_answer_is_refused(server, monkeypatch, change, message):
    right = [None, {"5": {"logprob": -1.0, "rank": 9}}, {"7": {"logprob": -2.0, "rank": 9}}]
    monkeypatch.setattr(server, "answer", lambda body: {"prompt_logprobs": change(right)})
    with ServerEngine(server.url) as engine, pytest.raises(EngineError, match=message):
        asyncio.run(engine.score([3, 5, 7]))
