"""Updates that fail half-way, engines that die in them, and what requests see of the different pause modes."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from waiting import wait_until
from weight_sync_tools import (
    SAMPLING,
    assert_each_weight_arrives,
    change_every_parameter,
    difference_of,
    log_prob_difference,
    make_sender,
    out_of_reach,
    sharp_llama,
    weights_of,
)

from llmrl.engines import AsyncVLLM, EngineReplicas, SamplingConfig
from llmrl.engines.base import EngineError
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError
from llmrl.weight_sync.double_buffer import DoubleBuffer
from llmrl.weight_sync.member import Member

pytestmark = pytest.mark.usefixtures("real_vllm")

TOLERANCE, STALE = 0.15, 1.0
"""Mean log-prob difference of a bfloat16 engine with these sharp random weights, and of one with other weights."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small model and its folder."""
    path = tmp_path_factory.mktemp("tiny")
    return sharp_llama(path), path


def start(path, **options):
    return AsyncVLLM.from_pretrained(
        path, max_model_len=2048, kv_cache_memory=1 << 27, cpu_threads=1,
        engine_args={"skip_tokenizer_init": True}, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny):
    with start(tiny[1]) as engine:
        yield engine


@pytest.fixture
def model(tiny):
    """The trainer's model; it has its first weights again afterwards."""
    original = weights_of(tiny[0])
    yield tiny[0]
    tiny[0].load_state_dict(original)


@pytest.fixture
def sender(model, engine):
    sender = make_sender(VLLMWeightSyncScheme(), model, engine)
    sender.update_weights()
    yield sender
    sender.shutdown()


def faulty(model, fault):
    """The model's names with other values, and one of them wrong."""
    weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "untied head":  # vLLM would drop it without a word
        weights["lm_head.weight"] = torch.zeros_like(model.lm_head.weight)
    elif fault == "unknown":
        weights["model.extra.weight"] = torch.zeros(3)
    elif fault == "missing":
        del weights[name]
    else:
        weights[name] = torch.zeros(3, 5)
    return weights


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("unknown", "parameter named 'extra'"),
        ("missing", "lacks weights for 1 parameters, among them ..model.layers.1.self_attn.qkv_proj"),
        ("wrong shape", "does not take these weights"),
        ("untied head", "no place for 1 of the weights, among them ..lm_head.weight"),
    ],
)
def test_a_refused_update_leaves_the_old_weights_and_can_be_retried(sender, engine, model, fault, message):
    version = engine.policy_version
    with pytest.raises(WeightSyncError, match=f"{message}.*hold the weights of version {version} as before"):
        sender.update_weights(faulty(model, fault))
    assert engine.policy_version == version
    assert log_prob_difference(model, engine) < TOLERANCE
    change_every_parameter(model, seed=3, size=0.3)
    assert log_prob_difference(model, engine) > STALE
    assert sender.update_weights() == version + 1
    assert log_prob_difference(model, engine) < TOLERANCE


def test_each_weight_arrives_on_its_own(sender, engine, model):
    """The parts of fused projections, the norms, and the embedding that is also the head."""
    names = [name for name, _ in model.named_parameters() if "layers.1" not in name]
    assert len(names) == 11
    assert_each_weight_arrives(model, engine, sender, names, tolerance=TOLERANCE)


def test_another_model_is_refused_when_the_group_is_opened(engine):
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1))
    with pytest.raises(EngineError, match="does not take these weights"):
        make_sender(VLLMWeightSyncScheme(), other, engine)


def test_a_broadcast_that_breaks_leaves_the_old_weights_and_can_be_retried(engine, model, monkeypatch):
    from llmrl.weight_sync import channels

    out_of_reach(monkeypatch)
    sender = make_sender(VLLMWeightSyncScheme(), model, engine)
    version = sender.update_weights()
    old, broadcast = weights_of(model), channels.broadcast

    def break_off(group, buffer):
        broadcast(group, buffer[:1000])
        group.shutdown()
        raise RuntimeError("the cable was pulled")

    change_every_parameter(model, seed=4, size=0.3)
    new = weights_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(channels, "broadcast", break_off)
        with pytest.raises(WeightSyncError, match=f"version {version} as before"):
            sender.update_weights()
    model.load_state_dict(old)
    assert log_prob_difference(model, engine) < TOLERANCE
    model.load_state_dict(new)
    assert sender.update_weights() == version + 1
    assert log_prob_difference(model, engine) < TOLERANCE
    sender.shutdown()


def test_a_damaged_file_is_refused_and_the_one_before_is_current_again(engine, model, tmp_path, monkeypatch):
    sender = make_sender(VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)), model, engine)
    version, write = sender.update_weights(), DoubleBuffer.write
    old = DoubleBuffer(tmp_path).pointer()

    def write_damaged(buffer, weights, version):
        pointer = write(buffer, {name: torch.zeros_like(weight) for name, weight in weights}, version)
        with buffer.path(pointer.slot).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x01")
        return pointer

    with monkeypatch.context() as patch:
        patch.setattr(DoubleBuffer, "write", write_damaged)
        with pytest.raises(WeightSyncError, match=f"version {version} as before"):
            sender.update_weights()
    assert DoubleBuffer(tmp_path).pointer() == old
    assert log_prob_difference(model, engine) < TOLERANCE
    assert sender.update_weights() == version + 1
    sender.shutdown()


def test_an_engine_that_the_trainer_cannot_call_reads_the_double_buffer_by_itself(engine, model, tmp_path):
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path))
    writer, reader = scheme.create_sender(), scheme.create_receiver(engine)
    assert reader.poll_and_apply() is None
    writer.register_model(model)
    writer.init_all_workers_group()
    change_every_parameter(model, seed=5, size=0.3)
    version = writer.update_weights()
    assert reader.poll_and_apply() == version == engine.policy_version
    assert reader.poll_and_apply() is None
    assert log_prob_difference(model, engine) < TOLERANCE
    reader.shutdown()
    writer.shutdown()


def test_the_prefix_cache_is_empty_after_an_update_unless_asked_otherwise(sender, engine, model):
    prompt_ids, sampling = list(range(100, 400)), SamplingConfig(max_new_tokens=1)

    def num_cached():
        return engine.generate_batch([prompt_ids], sampling)[0].metrics["num_cached_tokens"]

    num_cached()
    assert num_cached() > 0
    sender.update_weights()
    assert num_cached() == 0


@pytest.mark.parametrize("is_kept", [False, True], ids=["blocks computed anew", "blocks kept"])
def test_what_keep_means_for_a_request_in_flight(engine, model, is_kept):
    """Default: as if the new weights had read the whole prefix. With blocks kept: the old ones had read theirs."""
    sender = make_sender(VLLMWeightSyncScheme(reset_running_requests=not is_kept), model, engine)
    first = sender.update_weights()
    old, prompt_ids = weights_of(model), [1, 2, 3]

    async def run():
        task = asyncio.create_task(engine.generate(prompt_ids, SAMPLING.with_changes(max_new_tokens=600)))
        await _until_tokens(engine, 100)
        change_every_parameter(model, seed=6, size=0.3)
        await asyncio.to_thread(sender.update_weights)
        return await task

    completion = asyncio.run(run())
    sender.shutdown()
    assert set(completion.versions) == {first, first + 1}
    change = completion.versions.index(first + 1)
    token_ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    given = torch.tensor(completion.log_probs)[change:]
    end = len(prompt_ids) + change - 1  # the last token of the old weights is read by the new ones

    def differ(past_of):
        with torch.no_grad():
            past = None
            if past_of is not None:
                new = weights_of(model)
                model.load_state_dict(past_of)
                past = model(token_ids[:, :end], use_cache=True).past_key_values
                model.load_state_dict(new)
            read = token_ids[:, :-1] if past is None else token_ids[:, end:-1]
            log_probs = model(read, past_key_values=past).logits[0].log_softmax(-1)[-len(given) :]
        return (given - log_probs.gather(1, token_ids[0, -len(given) :, None])[:, 0]).abs()

    by_old, by_new = differ(old)[:20].mean(), differ(None)[:20].mean()
    right, wrong = (by_old, by_new) if is_kept else (by_new, by_old)
    assert right < TOLERANCE < wrong / 2


def test_an_engine_that_sleeps_goes_on_when_new_weights_are_there(sender, engine, model, monkeypatch):
    """Scheduler and executor sleep; the worker of a CPU gives no memory back, which is why it is refused there."""
    with pytest.raises(EngineError, match=r"cannot sleep; start it on a GPU with enable_sleep=True"):
        engine.sleep()
    monkeypatch.setattr(engine, "_can_sleep", True)
    woken, wake_up, before = [], engine.llm.wake_up, engine.policy_version

    def noted_wake_up(tags):
        woken.append((tags, engine.policy_version))
        return wake_up(tags)

    monkeypatch.setattr(engine.llm, "wake_up", noted_wake_up)

    async def run():
        task = asyncio.create_task(engine.generate([1, 2, 3], SAMPLING.with_changes(max_new_tokens=400)))
        await _until_tokens(engine, 50)
        await asyncio.to_thread(engine.sleep)
        await asyncio.to_thread(engine.sleep)  # of a batch that is learned from twice
        assert await engine._background.wait(engine.llm.is_sleeping()) and await engine.progress() is None
        for action in (engine.resume, lambda: engine.generate_batch([[1]], SAMPLING)):
            with pytest.raises(EngineError, match=r"sleeps: .*after the next update"):
                await asyncio.to_thread(action)
        with pytest.raises(WeightSyncError, match="No engine holds a complete set of weights; they stay paused"):
            await asyncio.to_thread(sender.update_weights, faulty(model, "shape"))
        assert engine.lacks_weights and not task.done()
        change_every_parameter(model, seed=6, size=0.3)
        await asyncio.to_thread(sender.update_weights)
        return await task

    completion = asyncio.run(run())
    assert set(completion.versions) == {before, before + 1} and len(completion.token_ids) == 400
    assert woken[0] == (["weights"], before) and woken[-1] == (["kv_cache"], before + 1)
    assert not engine._background.run(engine.llm.is_sleeping())
    assert log_prob_difference(model, engine) < TOLERANCE


@pytest.mark.parametrize("pause_mode", ["wait", "abort"])
def test_requests_are_finished_first_or_end_with_what_they_have(engine, model, pause_mode):
    sender = make_sender(VLLMWeightSyncScheme(pause_mode=pause_mode), model, engine)
    version, num_tokens = engine.policy_version, 800

    async def run():
        task = asyncio.create_task(engine.generate([1, 2, 3], SAMPLING.with_changes(max_new_tokens=num_tokens)))
        await _until_tokens(engine, 5)
        await asyncio.to_thread(sender.update_weights)
        return await task

    completion = asyncio.run(run())
    sender.shutdown()
    assert engine.policy_version == version + 1
    assert set(completion.versions) == {version}, "no token of the new weights"
    if pause_mode == "wait":
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", num_tokens)
    else:
        assert completion.finish_reason == "abort"
        assert 5 <= len(completion.token_ids) == len(completion.log_probs) < num_tokens
        # The partial answer goes on, with the new weights.
        [rest] = engine.generate_batch([[1, 2, 3, *completion.token_ids]], SAMPLING)
        assert set(rest.versions) == {version + 1}


def test_difference_is_measured_on_the_tokens_of_the_completion(model):
    """The tool itself: with the model's own log-probs the difference is zero."""
    from llmrl.engines import Completion

    token_ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        log_probs = model(token_ids).logits[0].log_softmax(-1)
    own = [log_probs[1, 3].item(), log_probs[2, 4].item()]
    completion = Completion([3, 4], own, [0, 0], "length")
    assert difference_of(model, [1, 2], completion).abs().max() < 1e-5


@pytest.fixture(scope="module")
def pair(tiny, engine):
    """The engine and another one; tests that kill one leave a living one in its place."""
    engines = [engine, start(tiny[1])]
    yield engines
    for one in engines:
        one.shutdown()


def test_an_engine_killed_during_an_update_comes_back_with_the_current_weights(tiny, model, pair, monkeypatch):
    """One of two replicas dies while deltas are broadcast; the other takes its own, and the one in its place all."""
    out_of_reach(monkeypatch)
    replicas = EngineReplicas(pair, restart=lambda index: start(tiny[1]))
    sender = make_sender(VLLMWeightSyncScheme(anchor_every=8), model, replicas)
    sender.update_weights()
    survivor, victim = pair
    version = survivor.policy_version
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::61] *= -3
    assert log_prob_difference(model, survivor) > STALE
    with monkeypatch.context() as patch:
        patch.setattr(Member, "update_weights", killing(victim, Member.update_weights))
        assert sender.update_weights() == version + 1 == survivor.policy_version
    assert log_prob_difference(model, survivor) < TOLERANCE
    wait_until(lambda: replicas.serving == {0, 1}, timeout_s=300)
    pair[1] = replicas[1]
    assert (replicas.serving, replicas.num_deaths) == ({0, 1}, 1)
    assert pair[1] is not victim
    assert pair[1].policy_version == version + 1
    assert log_prob_difference(model, pair[1]) < TOLERANCE
    sender.shutdown()


def test_an_engine_that_stands_still_during_an_update_is_replaced(tiny, model, pair):
    """Its process is stopped and it has no request, so that nothing but the update itself can notice."""
    replicas = EngineReplicas(pair, restart=lambda index: start(tiny[1]), hang_timeout_seconds=5)
    sender = make_sender(VLLMWeightSyncScheme(), model, replicas)
    version = sender.update_weights()
    survivor, victim = pair
    change_every_parameter(model, seed=10, size=0.3)
    os.kill(process_of(victim).pid, signal.SIGSTOP)
    assert sender.update_weights() == version + 1 == survivor.policy_version
    assert log_prob_difference(model, survivor) < TOLERANCE
    wait_until(lambda: replicas.serving == {0, 1}, timeout_s=300)
    pair[1] = replicas[1]
    assert (replicas.num_hangs, replicas.num_restarts) == (1, 1)
    assert pair[1] is not victim and not victim.is_alive
    assert log_prob_difference(model, pair[1]) < TOLERANCE
    sender.shutdown()


def test_the_only_engine_killed_during_an_update_can_be_replaced(model, pair, monkeypatch):
    engines = [pair[0]]
    sender = make_sender(VLLMWeightSyncScheme(), model, engines)
    sender.update_weights()
    with monkeypatch.context() as patch:
        patch.setattr(Member, "commit", killing(engines[0], Member.commit))
        with pytest.raises(WeightSyncError, match="every engine died"):
            sender.update_weights()
    engines[0] = pair[1]
    change_every_parameter(model, seed=9, size=0.3)
    sender.update_weights()
    assert log_prob_difference(model, engines[0]) < TOLERANCE
    sender.shutdown()


def process_of(engine):
    """The process of an `AsyncVLLM`."""
    [process] = engine.llm.engine_core.resources.engine_manager.processes
    return process


def killing(victim, original):
    """A method of a member that kills the engine's process first, if the engine is `victim`."""

    def kill_first(member, *arguments):
        if member.engine is victim:
            os.kill(process_of(victim).pid, signal.SIGKILL)
        return original(member, *arguments)

    return kill_first


async def _until_tokens(engine, num_tokens):
    """Wait until the requests in flight have some tokens each."""
    for _ in range(6000):
        states = list(engine.llm.output_processor.request_states.values())
        if states and min(state.detokenizer.num_output_tokens() for state in states) >= num_tokens:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"no {num_tokens} tokens in time")
