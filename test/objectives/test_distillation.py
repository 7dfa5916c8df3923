"""Teachers: advantages from their log-probs, divergences over the vocabulary, hints, and the script."""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from loss_batches import near_policy, ragged_batch
from tensordict import TensorDict, lazy_stack
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.collectors import Demonstrations
from llmrl.config.imitation import TeacherConfig
from llmrl.engines import TransformersEngine
from llmrl.objectives import DistillationLoss, GRPOLoss, KLPenalty, TeacherAdvantage
from llmrl.rendering import TemplateRenderer
from llmrl.trainer import (
    EngineTeacher,
    TeacherDistribution,
    TeacherTopK,
    TopK,
    TransformersWrapper,
    chunked_divergence,
    chunked_top_k,
    load_model,
    load_teacher,
    train_step,
    write_hinted_log_probs,
    write_log_probs,
    write_top_k,
)
from llmrl.trainer.head.log_probs import Head, LogitTransform, chunked_log_probs

TEACHER = ("next", "teacher_log_probs", "full")
MASK = ("masks", "all_assistant_mask")


def divergence_of(ours, theirs, kind, beta):
    """The definitions, over whole distributions."""
    p, q = ours.double().softmax(-1), theirs.double().softmax(-1)

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    mixture = beta * q + (1 - beta) * p
    js = beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    return {"reverse": kl(p, q), "forward": kl(q, p), "js": js}[kind]


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergences_and_gradients_are_those_of_the_definition_whatever_the_chunks(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    made = partial(torch.randn, generator=generator, dtype=dtype)
    parts = [made(7, 5), made(11, 5), made(11)]  # hidden states, head, bias
    teacher = Head(made(7, 3), made(13, 3), None, LogitTransform(scale=0.5))  # padded to 13 ids
    transform, beta = LogitTransform(soft_cap=2.0, temperature=0.7), 0.3
    weights = torch.arange(1.0, 8.0)
    given = [part.clone().requires_grad_() for part in parts]
    values = chunked_divergence(Head(*given, transform), teacher, kind, beta=beta, chunk_size=3)
    (values * weights).sum().backward()
    expected = [part.double().clone().requires_grad_() for part in parts]
    logits = 2.0 * torch.tanh((expected[0] @ expected[1].T + expected[2]) / 2.0) / 0.7
    reference = divergence_of(logits, (0.5 * teacher.states.double() @ teacher.weight.double().T)[:, :11], kind, beta)
    (reference * weights).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(values.double(), reference, **close)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, **close)


def test_a_divergence_is_held_a_chunk_at_a_time():
    sizes = []
    states, weight = torch.randn(64, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in torch.utils._pytree.tree_leaves(made) if isinstance(one, torch.Tensor))
            return made

    teacher = Head(states.detach() + 1, weight.detach())
    with Watching():
        likeliest = chunked_top_k(teacher, 5, chunk_size=4)
        for one in (teacher, likeliest):
            chunked_divergence(Head(states, weight), one, "js", chunk_size=4).sum().backward()
    assert likeliest.token_ids.shape == (64, 5)
    assert max(sizes) < 64 * 5000 / 2


@pytest.mark.parametrize(
    ("divergence", "beta", "message"),
    [("sideways", 0.5, "must be 'reverse', 'forward' or 'js'"), ("js", 1.0, "beta must be between 0 and 1, got 1")],
)
def test_a_divergence_that_is_none_is_refused(divergence, beta, message):
    same = Head(torch.eye(3), torch.eye(3))
    with pytest.raises(ValueError, match=message):
        chunked_divergence(same, same, divergence, beta=beta)
    with pytest.raises(ValueError, match="3 and 2 positions"):
        chunked_divergence(same, Head(torch.eye(3)[:2], torch.eye(3)), "reverse")
    with pytest.raises(ValueError, match="or 'js' with teacher="):
        DistillationLoss(None, kl_direction="js")


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_a_chunk_without_positions_is_refused(chunk_size):
    head, targets = Head(torch.eye(3), torch.eye(3)), torch.tensor([0, 1, 2])
    for compute in (
        lambda: chunked_log_probs(head.states, head.weight, targets, chunk_size=chunk_size),
        lambda: chunked_divergence(head, head, "reverse", chunk_size=chunk_size),
        lambda: chunked_top_k(head, 1, chunk_size=chunk_size),
    ):
        with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
            compute()


@pytest.fixture(scope="module")
def student(tiny_model_path):
    return TransformersWrapper(load_model(tiny_model_path), generate=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path):
    return AutoTokenizer.from_pretrained(tiny_model_path)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return TemplateRenderer(tokenizer)


@pytest.fixture(scope="module")
def teacher_path(tiny_model_path, tokenizer, tmp_path_factory):
    """Another model of the same tokenizer."""
    path = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def teacher(student, teacher_path, tokenizer):
    return load_teacher(student, teacher_path, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def logits_of():
    """The logits of a folder's model after each of some ids, in float64."""

    @cache
    def model_of(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")

    return lambda path, ids: model_of(path)(ids[None]).logits[0]


@pytest.fixture
def batch(renderer):
    def said(n):
        return [{"role": "user", "content": f"{n} + 1 ="}, {"role": "assistant", "content": f"It is {n + 1}"}]

    rows = [{"messages": said(n)} for n in range(3)]
    return Demonstrations(rows, renderer, conversations_per_batch=3).all_rows()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_a_loss_against_whole_distributions_is_the_mean_divergence(
    student, teacher, teacher_path, batch, tiny_model_path, logits_of, kind
):
    loss = DistillationLoss(
        student, teacher=TeacherDistribution(teacher, beta=0.2), kl_direction=kind, reduction="token_mean"
    )
    assert loss.in_keys == [("tokens", "full"), MASK] and loss.out_keys == ["loss_distill", "kl_to_teacher"]
    output = loss(batch)
    with torch.no_grad():
        expected = torch.cat([
            divergence_of(*(logits_of(path, row["tokens", "full"])[:-1] for path in (tiny_model_path, teacher_path)),
                          kind, 0.2)[row[MASK][1:]]
            for row in batch.unbind(0)
        ])  # fmt: skip
    assert float(output.loss_distill.detach()) == pytest.approx(float(expected.mean()), rel=1e-3)
    assert float(output.kl_to_teacher) == pytest.approx(float(expected.mean()), rel=1e-3)
    student.model.zero_grad()


def test_a_policy_without_distributions_is_refused_where_they_are_compared(student):
    batch = ragged_batch()
    for teacher in (TeacherDistribution(student), TeacherTopK()):
        with pytest.raises(TypeError, match="actor_network is a Table, which writes the log-probs of tokens alone"):
            DistillationLoss(near_policy(batch), teacher=teacher)(batch)


@pytest.mark.slow
def test_a_student_becomes_its_teacher(tiny_model_path, teacher_path, tokenizer, batch):
    model = load_model(tiny_model_path)
    student = TransformersWrapper(model, generate=False)
    teacher = load_teacher(student, teacher_path, tokenizer=tokenizer)
    loss = DistillationLoss(student, teacher=TeacherDistribution(teacher), kl_direction="forward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = [train_step(loss, batch, optimizer).loss for _ in range(12)]
    assert values[-1] < 0.3 * values[0]
    assert all(weight.grad is None for weight in teacher.model.parameters())


@pytest.mark.slow
def test_a_teacher_of_another_tokenizer_is_refused_by_name(student, tokenizer, tmp_path):
    another = copy.deepcopy(tokenizer)
    another.add_tokens(["<other>"])
    another.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"theirs' has another tokenizer .*1 entries .*'<other>'"):
        load_teacher(student, tmp_path / "theirs", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"teacher\.path, teacher\.url or teacher\.hint is needed"):
        TeacherConfig()
    problem = {"query": "1 + 1 =", "solution": "2"}
    for hint in ("It is {answer}.", "{}", "{"):
        with pytest.raises(ValueError, match=r"teacher\.hint=.*cannot be filled in .*\['query', 'solution'\]"):
            TeacherConfig(hint=hint).hint_for(problem)


def with_teacher(seed=0):
    batch = ragged_batch(seed)
    for row in batch.unbind(0):
        row[TEACHER] = -3 * torch.rand(len(row["tokens", "full"]), generator=torch.Generator().manual_seed(seed + 7))
    return batch


@pytest.mark.parametrize("is_rewarded", [False, True])
def test_an_advantage_is_what_the_teacher_and_the_reward_say_of_each_token(is_rewarded):
    batch = with_teacher()
    rewards = [float(row["advantage"]) if is_rewarded else 0.0 for row in batch.unbind(0)]
    if not is_rewarded:
        batch = lazy_stack([row.exclude("advantage") for row in batch.unbind(0)])
    TeacherAdvantage(0.5)(batch)
    for row, reward in zip(batch.unbind(0), rewards, strict=True):
        for place, is_trained in enumerate(row[MASK].tolist()):
            gap = float(row[TEACHER][place]) - float(row["log_probs", "full"][place])
            assert float(row["advantage"][place, 0]) == pytest.approx((reward + 0.5 * gap) * is_trained, abs=1e-6)
    before = batch[0]["advantage"].clone()
    TeacherAdvantage(0.5)(batch)  # once
    assert torch.equal(before, batch[0]["advantage"])


def test_a_penalty_changes_the_one_reward_of_rows_that_say_they_are_not_padded():
    batch = ragged_batch()
    for row in batch.unbind(0):
        row["next", "reward"] = torch.ones(1, 1)
    KLPenalty(0.5)(batch)
    of_rollout = {}
    for row in batch.unbind(0):
        gap = (row["log_probs", "full"] - row["next", "ref_log_probs", "full"])[row[MASK]].sum()
        of_rollout[row["rollout", "rollout_id"]] = of_rollout.get(row["rollout", "rollout_id"], 0.0) + float(gap)
    for row in batch.unbind(0):
        expected = 1 - 0.5 * of_rollout[row["rollout", "rollout_id"]]
        assert float(row["next", "reward"]) == pytest.approx(expected, rel=1e-5)


def test_on_policy_its_gradient_is_that_of_the_loss_with_k2(student, renderer, batch):
    scored = write_log_probs(student, batch, ("log_probs", "full"))
    for row in scored.unbind(0):
        row[TEACHER] = torch.linspace(-4, -1, len(row["tokens", "full"]))

    def gradient(loss):
        student.model.zero_grad()
        loss.backward()
        return torch.cat([weight.grad.reshape(-1).double() for weight in student.model.parameters()])

    by_loss = gradient(DistillationLoss(student, kl_estimator="k2", reduction="token_mean")(scored).loss_distill)
    TeacherAdvantage()(scored)
    by_advantage = gradient(GRPOLoss(student)(scored).loss_objective)
    student.model.zero_grad()
    torch.testing.assert_close(by_advantage, by_loss, rtol=1e-3, atol=1e-6)


def test_a_hint_changes_the_prompt_alone(student, renderer, tokenizer, batch, tiny_model_path, logits_of):
    hints = ["The answer is 1.", "", "Think."]
    write_hinted_log_probs(
        student, batch, TEACHER, hints=hints, render=partial(renderer.render, add_generation_prompt=True)
    )
    for place, (row, hint) in enumerate(zip(batch.unbind(0), hints, strict=True)):
        asked = [{"role": "user", "content": f"{place} + 1 =\n\n{hint}"}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor(tokenizer.encode(f"{prompt}It is {place + 1}<|im_end|>", add_special_tokens=False))
        answer = row["tokens", "full"][row[MASK]]
        assert ids[-len(answer) :].tolist() == answer.tolist()
        log_p = logits_of(tiny_model_path, ids).log_softmax(-1)[:-1].gather(1, ids[1:, None])[-len(answer) :, 0]
        torch.testing.assert_close(row[TEACHER][row[MASK]].double(), log_p.detach(), rtol=1e-4, atol=1e-4)
        assert not row[TEACHER][~row[MASK]].any() and len(row[TEACHER]) == len(row["tokens", "full"])
    moved = TensorDict({"tokens": {"full": batch[0]["tokens", "full"].flip(0)}, "masks": batch[0]["masks"],
                        "history": batch[0]["history"]})  # fmt: skip
    with pytest.raises(ValueError, match="row 0 does not begin with the prompt"):
        write_hinted_log_probs(student, lazy_stack([moved]), TEACHER, hints=["a"],
                               render=partial(renderer.render, add_generation_prompt=True))  # fmt: skip


def joined_divergence_of(ours, theirs, ids, kind, beta):
    """The definitions, over the given ids of each position and all others as one."""

    def joined(logits):
        chosen = logits.double().softmax(-1).gather(1, ids)
        return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], 1).log()

    return divergence_of(joined(ours), joined(theirs), kind, beta)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
@pytest.mark.parametrize(("top_k", "dtype"), [(1, torch.float64), (3, torch.float32), (10, torch.float64)])
def test_of_likeliest_ids_the_others_are_one_whatever_the_chunks(kind, top_k, dtype):
    generator = torch.Generator().manual_seed(top_k)
    made = partial(torch.randn, generator=generator, dtype=dtype)
    parts = [made(7, 5), made(11, 5), made(11)]
    logits = 2 * made(7, 11)
    ids = logits.topk(top_k).indices
    teacher = TopK(ids, logits.log_softmax(-1).gather(1, ids))
    transform, beta, weights = LogitTransform(soft_cap=2.0, temperature=0.7), 0.3, torch.arange(1.0, 8.0)
    given = [part.clone().requires_grad_() for part in parts]
    values = chunked_divergence(Head(*given, transform), teacher, kind, beta=beta, chunk_size=3)
    (values * weights).sum().backward()
    expected = [part.double().clone().requires_grad_() for part in parts]
    ours = 2.0 * torch.tanh((expected[0] @ expected[1].T + expected[2]) / 2.0) / 0.7
    reference = joined_divergence_of(ours, logits, ids, kind, beta)
    (reference * weights).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(values.double(), reference, **close)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, **close)
    assert (values.double() <= divergence_of(ours, logits, kind, beta) + 1e-5).all()  # joining loses some


def test_likeliest_ids_bear_extremes_and_refuse_what_makes_no_sense():
    weight = torch.eye(4) * 1e4  # probabilities of 1 and 0
    for kind in ("reverse", "forward", "js"):
        states = torch.eye(4).requires_grad_()
        theirs = TopK(torch.tensor([[0], [0], [3], [3]]), torch.tensor([[0.0], [0.0], [-1e-8], [-30.0]]))
        values = chunked_divergence(Head(states, weight), theirs, kind)
        values.sum().backward()
        assert values.isfinite().all() and states.grad.isfinite().all() and values[1] > 0.3
    beyond = TopK(torch.tensor([[0], [4], [1], [0]]), torch.full((4, 1), -1.0))
    with pytest.raises(ValueError, match="go up to 4, beyond the student's 4"):
        chunked_divergence(Head(torch.eye(4), weight), beyond, "reverse")
    for top_k in (0, 4):
        theirs = TopK(torch.zeros(4, top_k, dtype=torch.int64), torch.zeros(4, top_k))
        with pytest.raises(ValueError, match=f"less than the 4 ids of the vocabulary, got {top_k}"):
            chunked_divergence(Head(torch.eye(4), weight), theirs, "reverse")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "js"])
def test_a_loss_against_likeliest_ids_by_a_model_and_by_an_engine(
    student, teacher, teacher_path, tokenizer, batch, tiny_model_path, logits_of, kind
):
    expected = []
    for row in batch.unbind(0):
        ours, theirs = (logits_of(path, row["tokens", "full"])[:-1] for path in (tiny_model_path, teacher_path))
        expected.append(joined_divergence_of(ours, theirs, theirs.topk(5).indices, kind, 0.2)[row[MASK][1:]])
    expected = torch.cat(expected).detach().mean()
    loss = DistillationLoss(student, teacher=TeacherTopK(beta=0.2), kl_direction=kind, reduction="token_mean")
    assert loss.in_keys == [("tokens", "full"), *loss.teacher.in_keys, MASK]
    grads = []
    with TransformersEngine(teacher_path) as engine:
        for one in (teacher, EngineTeacher(student, engine, tokenizer=tokenizer)):
            scored = write_top_k(one, batch.clone(), 5)
            ids = scored[0]["next", "teacher_top", "token_ids"]
            assert ((ids < 0).all(1) == ~scored[0][MASK]).all()
            # Micro-batches of one row each, and all at once.
            for token_budget in (8, 4096):
                student.model.zero_grad()
                inputs = loss.prepare(scored)
                micro = list(loss.micro_losses(inputs, scored, token_budget=token_budget))
                for part in micro:
                    part.total().backward()
                assert float(loss.collect(micro).loss_distill.detach()) == pytest.approx(float(expected), rel=1e-3)
                assert len(micro) == (3 if token_budget == 8 else 1)
                grads.append(torch.cat([weight.grad.reshape(-1) for weight in student.model.parameters()]))
    student.model.zero_grad()
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-3, atol=1e-5)


def test_likeliest_ids_are_of_the_loss_mask_of_whole_distributions_and_of_every_token(student, batch):
    scored = write_top_k(student, batch.clone(), 3)
    with pytest.raises(ValueError, match="no ids at some of the trained tokens"):
        DistillationLoss(student, teacher=TeacherTopK(), masking_strategy="generic")(scored)
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        write_top_k(student, batch, 0)
    num_ids = student.model.config.vocab_size
    with pytest.raises(ValueError, match=f"top_k must be from 1 to the {num_ids} ids of the vocabulary"):
        write_top_k(student, batch, num_ids + 1)
    scored[0]["next", "teacher_top", "log_probs"] = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"'log_probs'\) must have one vector per token"):
        DistillationLoss(student, teacher=TeacherTopK())(scored)
    counts = torch.zeros(len(batch[0]["tokens", "full"]), dtype=torch.int32)
    counts[-1] = 2
    cut = batch[0].clone()
    cut["sampling_mask"] = TensorDict({"counts": counts, "token_ids": torch.tensor([1, 2], dtype=torch.int32)})
    with pytest.raises(ValueError, match="sampled from truncated ones"):
        write_top_k(student, lazy_stack([cut]), 3)
