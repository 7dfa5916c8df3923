"""Routing replay: a mixture is trained with the experts that the engine chose, exactly; one choice for each token."""

import copy
import pickle

import pytest
import torch
from causal_types import tiny_model
from mixtures import NUM_EXPERTS, NUM_LAYERS, TOP_K, VOCAB, by_hand, drawn_experts, make_model, make_row
from tensordict import lazy_stack

from llmrl.engines.transformers.expert_routers import Routers
from llmrl.objectives import GRPOLoss
from llmrl.objectives.scoring import log_probs_of
from llmrl.trainer import TeacherDistribution, TransformersWrapper, load_teacher, train_step, write_log_probs
from llmrl.trainer.packing.packed_rows import pack_rows


def drawn_rows(seed, num_rows=6):
    """Rows that share prefixes of tokens, some of them with the same experts; some tokens, some rows without."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    stem = torch.randint(0, VOCAB, (8,), generator=generator)
    stem_experts = drawn_experts(8, generator)
    rows = []
    for _ in range(num_rows):
        num_shared, num_own = integer(1, 9), integer(1, 7)
        ids = torch.cat([stem[:num_shared], torch.randint(0, VOCAB, (num_own,), generator=generator)])
        experts = drawn_experts(len(ids), generator)
        if integer(0, 3):
            experts[:num_shared] = stem_experts[:num_shared]
        if integer(0, 2):
            experts[integer(0, len(ids))] = -1
        mask = torch.rand(len(ids), generator=generator) < 0.6
        mask[-1] = True
        rows.append(make_row(ids, mask, None if integer(0, 4) == 0 else experts))
    return rows


def scored(policy, rows):
    return torch.cat(log_probs_of(policy, lazy_stack(rows)))


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_log_probs_and_gradients_are_those_of_the_given_experts(is_checkpointing):
    model = make_model()
    if is_checkpointing:
        model.gradient_checkpointing_enable()
    policy = TransformersWrapper(model, generate=False, token_budget=24)
    largest_other = 0.0
    for seed in range(6 if not is_checkpointing else 3):
        rows = drawn_rows(seed)
        masks = torch.cat([row["masks", "all_assistant_mask"] for row in rows])
        shares = torch.randn(masks.shape, generator=torch.Generator().manual_seed(seed)) * masks
        model.zero_grad()
        ours = scored(policy, rows)
        (ours * shares).sum().backward()  # after all micro-batches' passes: each layer is computed anew with its own
        values, gradients = [], {}
        for row, share in zip(rows, shares.split([len(row["tokens", "full"]) for row in rows]), strict=True):
            alone, forced = by_hand(model, row["tokens", "full"], row.get("routed_experts", None))
            gradients_of_row = torch.autograd.grad((alone * share).sum(), list(forced.parameters()), allow_unused=True)
            values.append(alone.detach())
            for (name, _), gradient in zip(forced.named_parameters(), gradients_of_row, strict=True):
                if gradient is not None:
                    gradients[name] = gradients.get(name, 0) + gradient
        places = masks.clone()
        places[torch.tensor([0, *(len(row["tokens", "full"]) for row in rows)]).cumsum(0)[:-1]] = False
        torch.testing.assert_close(ours[places], torch.cat(values)[places], rtol=1e-4, atol=2e-5)
        assert {name for name in gradients if "gate.weight" in name}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)
        without = scored(policy, [row.exclude("routed_experts") for row in rows])
        largest_other = max(largest_other, float((without - ours).detach().abs().max()))
    assert largest_other > 0.1


def test_tokens_of_other_experts_are_not_shared():
    ids = torch.tensor([1, 2, 3, 4])
    experts = drawn_experts(4, torch.Generator().manual_seed(0))
    other = experts.clone()
    other[1, 2] = other[1, 2].flip(0)
    masks = [torch.ones(4).bool()] * 3
    (packed,) = pack_rows([ids] * 3, masks, routed_experts=[experts, other, experts])
    assert packed.num_packed_tokens == 3 + 2  # the last token predicts nothing
    for place, row in enumerate(packed.rows.tolist()):
        positions = packed.token_positions.split(packed.row_lengths.tolist())[place]
        assert packed.routed_experts[positions].equal((experts, other, experts)[row][:3])


@pytest.mark.parametrize(
    "model_type", ["mixtral", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3", "minimax_m2", "glm4_moe", "ernie4_5_moe"]
)
def test_other_families_take_the_experts_that_they_would_choose(model_type):
    """A model that is given the experts it chose computes the same; given other experts, it uses those."""
    model = tiny_model(model_type, attn_implementation="eager")
    routers = Routers(model)
    ids = torch.arange(7)[None]
    with torch.no_grad(), routers.telling() as choices:
        expected = model(input_ids=ids, use_cache=False).logits
    assert len(choices) == routers.num_layers > 0
    told = torch.stack([used for _, used in choices], 1)
    with torch.no_grad(), routers.telling() as again:
        replayed = model(input_ids=ids, use_cache=False, routed_experts=told.short()).logits
        other = (told + 1) % routers.num_experts
        forced = model(input_ids=ids, use_cache=False, routed_experts=other).logits
    torch.testing.assert_close(replayed, expected)
    assert (forced - expected).abs().max() > 1e-6
    assert torch.stack([used for _, used in again[routers.num_layers :]], 1).equal(other)


def test_metrics_count_reported_experts_and_where_tokens_went():
    model = make_model()
    policy = TransformersWrapper(model, generate=False)
    rows = [make_row(torch.arange(1, 9), torch.ones(8).bool(), None) for _ in range(2)]
    with torch.no_grad(), Routers(model).telling() as choices:
        model(input_ids=rows[0]["tokens", "full"][None])
    own = torch.stack([used for used, _ in choices], 1).short()
    told = own.flip(-1).clone()  # the same experts in another order
    told[2, 0] = torch.tensor([e for e in range(NUM_EXPERTS) if e not in own[2, 0].tolist()][:TOP_K])
    told[4] = -1
    for row in rows:
        row["routed_experts"] = told
    loss = GRPOLoss(policy)
    scored(policy, drawn_rows(0))  # is no part of a step
    report = train_step(loss, lazy_stack(rows), torch.optim.SGD(model.parameters(), lr=0.0))
    # The last token is not computed, one is not told: 6 tokens in 3 layers. What is changed in the first layer may
    # change what later layers would choose for that token and those after it.
    assert 1 / 18 - 1e-9 <= report.measurements["router_difference"] <= 11 / 18 + 1e-9
    first = torch.bincount(torch.cat([told[:4, 0], own[4:5, 0], told[5:7, 0]]).flatten().long(), minlength=NUM_EXPERTS)
    assert report.measurements["router_load_max"] >= float(first.max() / first.sum() * NUM_EXPERTS) - 1e-9
    assert 0 < report.measurements["router_entropy"] <= 1


def test_a_model_without_experts_computes_as_ever_and_one_of_another_shape_is_refused():
    rows = drawn_rows(1)
    dense = TransformersWrapper(tiny_model("qwen3"), generate=False)
    assert scored(dense, rows).equal(scored(dense, [row.exclude("routed_experts") for row in rows]))
    narrow = TransformersWrapper(make_model(num_experts_per_tok=1), generate=False)
    with pytest.raises(ValueError, match=r"3 routers of Qwen3MoeForCausalLM choose 1 of 5 experts"):
        scored(narrow, rows)
    policy = TransformersWrapper(make_model(), generate=False)
    rows[0]["routed_experts"] = torch.full((len(rows[0]["tokens", "full"]), NUM_LAYERS, TOP_K), 5, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"row 0 has shape .* ids up to 5"):
        scored(policy, rows)
    rows[0]["routed_experts"] = torch.zeros(1, NUM_LAYERS, TOP_K, dtype=torch.int16)
    with pytest.raises(ValueError, match="neither cut nor padded"):
        scored(policy, rows)


def test_layers_without_experts_are_passed_over_where_an_engine_tells_of_all():
    policy = TransformersWrapper(make_model(mlp_only_layers=[1], intermediate_size=8), generate=False)
    rows = [row for row in drawn_rows(4) if row.get("routed_experts", None) is not None]
    told = scored(policy, rows)
    for row in rows:
        row["routed_experts"][:, 1] = 0  # what vLLM has there
    assert scored(policy, rows).equal(told)
    fewer = [row.clone() for row in rows]
    for row in fewer:
        row["routed_experts"] = row["routed_experts"][:, [0, 2]]
    assert scored(policy, fewer).equal(told)
    for row in fewer:
        row["routed_experts"] = row["routed_experts"].flip(1)
    assert not scored(policy, fewer).equal(told)


def test_a_teacher_computes_with_its_own_experts_and_not_with_those_of_the_student(tmp_path, tokenizer):
    student = TransformersWrapper(make_model(), generate=False)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    teacher = load_teacher(student, tmp_path, tokenizer=tokenizer)
    rows = drawn_rows(2)
    scores = write_log_probs(teacher, lazy_stack(rows), ("scores", "full"))
    token_ids, masks, replay = student.scored_tokens(lazy_stack(rows))
    divergences = [torch.zeros(len(ids)) for ids in token_ids]
    for packed in student.pack(token_ids, masks, **replay):
        values = TeacherDistribution(teacher).packed_divergence(student, packed, "forward").detach()
        for row, place, value in zip(packed.row_index, packed.token_index, values, strict=True):
            divergences[row][place] = value
    for row, divergence in zip(scores.unbind(0), divergences, strict=True):
        ids, is_scored = row["tokens", "full"], row["masks", "all_assistant_mask"].clone()
        is_scored[0] = False
        expected, theirs = by_hand(model, ids, None)
        torch.testing.assert_close(row["scores", "full"][is_scored], expected[is_scored], rtol=1e-4, atol=2e-5)
        _, ours = by_hand(student.model, ids, row.get("routed_experts", None))
        target, own = (one(input_ids=ids[None]).logits[0, :-1].log_softmax(-1) for one in (theirs, ours))
        expected = torch.cat([torch.zeros(1), (target.exp() * (target - own)).sum(-1)])
        torch.testing.assert_close(divergence[is_scored], expected[is_scored], rtol=1e-4, atol=2e-5)


def test_compiled_layers_are_refused():
    with pytest.raises(ValueError, match="compile_layers=True cannot replay"):
        scored(TransformersWrapper(make_model(), generate=False, compile_layers=True), drawn_rows(1))


def test_routers_that_are_not_known_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("llmrl.engines.transformers.expert_routers._is_router", lambda module: False)
    policy = TransformersWrapper(make_model(), generate=False)
    with pytest.raises(TypeError, match="the routers of Qwen3MoeForCausalLM are not known"):
        scored(policy, drawn_rows(1))


def test_a_copy_and_a_pickled_model_have_routers_of_their_own():
    model = make_model()
    rows = drawn_rows(2)
    expected = scored(TransformersWrapper(model, generate=False), rows)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(scored(TransformersWrapper(other, generate=False), rows), expected)
        with torch.no_grad(), Routers(other).telling() as choices:
            other(input_ids=torch.arange(3)[None])
        assert len(choices) == NUM_LAYERS
