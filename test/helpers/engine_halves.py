"""The engine's half of a type of model: whether vLLM's class takes every weight that the trainer sends.

The class is made on this machine without an engine, and asked to load what is sent. That shows names, shapes, and
weights that are missing or left over. Then an engine is started and given changed weights, and the
log-probs of its tokens are compared with the trainer's; where its kernels need a GPU, this is left to `tools/gpu`.

`python test/helpers/engine_halves.py` examines every causal type that vLLM serves, and every type with images, and
writes a table of `docs/models.md`; with names of types it writes their rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from causal_types import PAGE, SPECIAL, causal_types, tiny_config
from causal_types import SIZES as TINY_SIZES
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from warm_processes import WarmServer, forking
from weight_sync_tools import change_every_parameter, differences_of, make_sender

from llmrl._utils.model_parts import text_config
from llmrl.engines import SamplingConfig

BEGIN = "<!-- what engines take -->\n\n"
END = "\n<!-- end -->"
# vLLM's kernels and blocks want multiples of 32.
SIZES = {8: 32, 16: 64, 32: 128, 48: 128, 61: 64}
# What sizes of tiny configurations do not fit, and what official configurations have in another way.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # all that vLLM's kernels on a CPU have
_FULL = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "falcon": {"ffn_hidden_size": 512},  # vLLM has four times the hidden size, as checkpoints do
    "falcon_h1": {"mamba_d_ssm": 256},
    # As official ones have them; transformers leaves caps out of its class with images.
    "gemma3_text": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "gemma4_text": {"num_experts": None, "enable_moe_block": False},
    "granite4_vision": {
        "text_config": lambda: tiny_config("granite"),
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
    },
    "lfm2_moe": {"num_dense_layers": 1},
    # A block of vLLM's cache, and one expert a token as in checkpoints.
    "llama4_text": {"attention_chunk_size": 32, "num_experts_per_tok": 1},
    "mamba2": {"head_dim": 64},
    "mistral3": {"text_config": lambda: tiny_config("ministral3")},
    "qwen2": _FULL,
    "qwen2_5_vl_text": _FULL,
    "qwen2_moe": _FULL,
    "qwen2_vl_text": _FULL,
    "qwen3": _FULL,
    # Not square, since transformers finds by its shape whether an expert's weight is transposed.
    "qwen3_vl_moe_text": {"moe_intermediate_size": 32},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": {"indexer_head_dim": 32},
}
# Classes that official checkpoints name, and vLLM, where transformers has another name.
_OFFICIAL_CLASSES = {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}
# Entries of official configurations that vLLM reads and transformers' classes do not name.
_OFFICIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"n_group": 1, "route_norm": True, "route_scale": 1.0, "score_func": "sigmoid", "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},
    "glm4v_moe_text": {"head_dim": 32, "use_qk_norm": False},
    "glm4v_text": {"attention_bias": True},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "qk_norm": True, "route_norm": True},
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "add_swa_attention_sink_bias": True,
        "sliding_window_size": 18,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
}


@dataclasses.dataclass(frozen=True)
class EngineHalf:
    """What becomes of a type beyond the trainer's own computation; each entry is `yes` or says why not."""

    shards: str = ""
    engine: str = ""
    nats: str = ""
    saved: str = ""
    lora: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(EngineHalf))


def is_shown(cell: str) -> bool:
    """Whether a cell says yes, perhaps under a condition that is enforced."""
    return cell in ("yes", "merged", "attention alone", "attention alone, merged") or cell[1:3] == "e-"


def page_rows() -> dict[str, dict[str, str]]:
    """The rows of the page by type."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [[cell.strip("` ") for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    names = ("type", "class", *COLUMNS)
    return {(row := dict(zip(names, (cell.strip("|` ") for cell in one), strict=True)))["type"]: row for one in cells}


def examine_type(model_type: str, class_name: str) -> EngineHalf:
    """Make a random checkpoint of a type and take it through trainer, engine and saving."""
    with tempfile.TemporaryDirectory() as name:
        half = in_child(examine, model_type, class_name, Path(name), log=Path(name, "log"))
        if isinstance(half, str):
            return EngineHalf(engine=half)
        if half.engine.startswith("refused"):
            return half
        return dataclasses.replace(half, nats=in_child(run_engine, Path(name) / "whole", log=Path(name, "log")))


def in_child(function, *arguments, log: Path, limit_s: float = 300):
    """Return what a function returns in a forked process, which may crash, or the reason why it returned nothing.

    What the process starts is forked, too, and its output is appended to `log`.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, log, function, *arguments))
    process.start()
    writer.close()
    try:
        found = reader.recv() if reader.poll(limit_s) else f"it took more than {limit_s:.0f} s"
    except EOFError:
        found = "the process died"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return found


def _send(writer, log, function, *arguments):
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # From this process, which has one thread so far.
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", forking(WarmServer.fork())):
        found = function(*arguments)
        if isinstance(found, str) and found.startswith(("EngineError", "WeightSyncError")):
            found = first_error(log.read_text(errors="replace")) or found
        writer.send(found)


def first_error(text: str) -> str | None:
    """The first error that a process of vLLM has raised, from its log."""
    raised = re.search(r"^(?:.*?\] )?((?:\w+\.)*\w*(?:Error|Exception|Failure)(?:: .*)?)$", text, re.MULTILINE)
    return raised and " ".join(raised[1].replace("|", "/").split())[:160]


def run_engine(folder: Path) -> str:
    """Compare an engine's log-probs after an update, or say why there are none; refusals of ours are passed over."""
    with mock.patch("llmrl.engines.vllm.model_types.problem_of", return_value=None), classes_read_here():
        return outcome(nats_after_update, folder)


def classes_read_here():
    """Let vLLM import a class to see its abilities in this process, not in a new interpreter."""
    return mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())


def examine(model_type: str, class_name: str, folder: Path) -> EngineHalf:
    """Examine a type, with a random checkpoint of it in `folder`."""
    import transformers

    from llmrl.trainer import load_model

    try:
        kind = getattr(transformers, class_name)
        class_name = write_checkpoint(model_type, class_name, folder / "whole")
        model = load_model(folder / "whole")
    except ImportError as error:
        return EngineHalf(**dict.fromkeys(COLUMNS, f"refused: {said(error)}"))
    except Exception as error:
        return EngineHalf(engine=said(error))
    return EngineHalf(
        shards=outcome(shards, folder / "whole"),
        # Before vLLM, which replaces activations.
        saved=outcome(is_saved, model, folder, kind),
        lora=outcome(is_lora_base, folder / "whole", class_name),
        engine=outcome(takes_weights, model, folder / "whole", class_name),
    )


def write_checkpoint(model_type, class_name, folder):
    """Write a random checkpoint, and return the class that official ones name."""
    import transformers

    kind = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = kind(enlarged(model_type, kind))
    with torch.no_grad():
        for one in model.state_dict().values():  # biases, norms, sinks, and corrections of routers
            if one.ndim < 2 and one.is_floating_point():
                one += 0.1 * torch.randn(one.shape)
    model.save_pretrained(folder)
    official = _OFFICIAL_CLASSES.get(class_name, class_name)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [official]}))
    return official


def said(error: BaseException) -> str:
    """The beginning of an error."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:160]


def outcome(question, *arguments) -> str:
    """`yes`, or why not."""
    try:
        return question(*arguments) or "yes"
    except Exception as error:
        return said(error)


def enlarged(model_type, kind):
    """The tiny configuration of a type, in sizes that vLLM's layers take."""
    sizes = {name: SIZES.get(size, size) if type(size) is int else size for name, size in TINY_SIZES.items()}
    sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # all that vLLM's latent attention on a CPU has
    sizes["use_sliding_window"] = False  # off in checkpoints, and vLLM has it for all layers or none
    special = {name: SPECIAL.get(name, {}) | changes for name, changes in _CHANGES.items()}
    with mock.patch.dict(TINY_SIZES, sizes), mock.patch.dict(SPECIAL, special):
        config = tiny_config(model_type)
    text = config.get_text_config()
    for name, value in _OFFICIAL.get(text.model_type, {}).items():
        if not hasattr(text, name):
            setattr(text, name, value)
    if not isinstance(config, kind.config_class):
        config = next(part for part in vars(config).values() if isinstance(part, kind.config_class))
    return config


def shards(folder):
    """Shard over one rank: layers are found, and weights gathered by the same names."""
    from llmrl.trainer import load_model, shard_model
    from llmrl.weight_sync.source import ModelWeights

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = load_model(folder)
        names = [meta.name for meta in ModelWeights(model).metadata()]
        shard_model(model)
        assert [name for name, _ in ModelWeights(model)] == names
    finally:
        torch.distributed.destroy_process_group()


def is_lora_base(folder, class_name):
    """Adapters are added and merged on the way; whether vLLM's class also takes them alone."""
    from vllm.model_executor.models.registry import ModelRegistry

    from llmrl.trainer import load_model
    from llmrl.trainer.loading import LoRAConfig
    from llmrl.weight_sync import get_model_metadata
    from llmrl.weight_sync.plugin import register

    register()
    expected = get_model_metadata(load_model(folder))
    try:
        found = "yes"
        adapted = load_model(folder, lora=LoRAConfig(rank=2))
        assert get_model_metadata(adapted) == expected
    except (TypeError, ValueError) as error:
        assert "adapter of" in str(error) or "incompatible" in str(error), error
        found = "attention alone"
        adapted = load_model(folder, lora=LoRAConfig(rank=2, target_modules=ATTENTION))
        assert get_model_metadata(adapted) == expected
    kind = ModelRegistry.models.get(class_name)
    takes = kind is not None and getattr(kind.load_model_cls(), "supports_lora", False)
    return found if takes else found.replace("yes", "merged").replace("alone", "alone, merged")


def is_saved(model, folder, kind):
    """What is saved loads under the same class, trained weights changed and the others bit by bit."""
    from llmrl.runs.exports import copy_to_host, write_model

    whole = kind.from_pretrained(folder / "whole", dtype=torch.float32).state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    (folder / "tokenizer").mkdir()
    write_model(copy_to_host(model), folder / "saved", folder / "tokenizer", "", "1GB", str(folder / "whole"))
    again, report = kind.from_pretrained(folder / "saved", dtype=torch.float32, output_loading_info=True)
    missing = report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]
    if missing:
        return f"not loaded again: {sorted(map(str, missing))[:2]}"
    expected = whole | model.state_dict()
    wrong = [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, expected[name])]
    return f"other values: {wrong[:2]}" if wrong else None


class Reads(TorchDispatchMode):
    """Remembers where a storage is read."""

    def __init__(self, buffer):
        super().__init__()
        self._storage = buffer.untyped_storage().data_ptr()
        self.starts = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (list, tuple)) and result else result
        if not self._is_part(first):  # else it is a view
            values = [*args, *(kwargs or {}).values()]
            for one in [*values, *(part for value in values if isinstance(value, (list, tuple)) for part in value)]:
                if self._is_part(one):
                    self.starts.add(one.storage_offset() * one.element_size())
        return result

    def _is_part(self, one):
        return isinstance(one, torch.Tensor) and one.numel() and one.untyped_storage().data_ptr() == self._storage


def takes_weights(model, folder, class_name):
    """Every parameter of vLLM's class is loaded, and every weight that is sent is read."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    from llmrl.weight_sync.buffers import PackedLayout
    from llmrl.weight_sync.plugin import register
    from llmrl.weight_sync.source import ModelWeights

    register()
    if class_name not in ModelRegistry.get_supported_archs():
        return "vLLM does not serve it"
    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True,
        language_model_only=True, block_size=32,
    )  # fmt: skip
    with classes_read_here():
        config = arguments.create_engine_config()
    source = ModelWeights(model, torch.float32)
    sent = dict(source)
    layout = PackedLayout.of((meta.name, meta.dtype, meta.shape) for meta in source.metadata())
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(buffer):
        view.copy_(sent[name])
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        engine = initialize_model(vllm_config=config)
        with torch.no_grad():
            for parameter in engine.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(torch.nan)
        # What is no parameter of the trainer stays as the engine read it from the checkpoint.
        stored = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
        reads = Reads(buffer)
        with torch.no_grad():
            engine.load_weights((name, one) for name, one in stored.items() if name not in sent)
            with reads:
                engine.load_weights(layout.views(buffer))
    # Parameters for images are on the device `meta`, as are encoders.
    loaded = {name: one for name, one in engine.named_parameters() if one.is_floating_point() and not one.is_meta}
    missing = [name for name, one in loaded.items() if one.isnan().any()]
    if missing:
        left = [name for name in stored if name not in sent]
        return f"lacks {len(missing)} weights: {missing[:2]}; not sent: {left[:3]}"
    starts = sorted(reads.starts)
    unread = []
    for place in layout.places:
        end = place.offset + torch.Size(place.shape).numel() * place.dtype.itemsize
        if not any(place.offset <= start < end for start in starts):
            unread.append(place.name)
    return f"leaves {len(unread)} weights: {unread[:2]}" if unread else None


def eager_model(folder):
    """The trainer's model with the attention that leaves nothing out."""
    from llmrl.trainer import load_model

    model = load_model(folder).eval()
    model.set_attn_implementation("eager")
    return model


def nats_after_update(folder, device="cpu", dtype=None):
    """The largest difference of an engine's log-probs from the model's, after every parameter was changed and sent."""
    from llmrl.engines import AsyncVLLM
    from llmrl.weight_sync import VLLMWeightSyncScheme

    model = eager_model(folder)
    has_delta_rule = hasattr(text_config(model), "linear_num_value_heads")
    # bfloat16 is all that vLLM has of delta rules on a CPU.
    dtype = dtype or ("bfloat16" if has_delta_rule or device == "cuda" else "float32")
    options = {"max_model_len": 96, "max_num_seqs": 4, "dtype": dtype, "engine_args": {"skip_tokenizer_init": True}}
    if device == "cuda":
        options |= {"weight_transfer": "ipc", "gpu_memory_utilization": 0.2, "enforce_eager": True}
    else:
        options |= {"kv_cache_memory": 1 << 26, "cpu_threads": 1}
    prompts = [[(7 * place + 11 * index) % 50 + 5 for place in range(24)] for index in range(4)]
    sampling = SamplingConfig(max_new_tokens=16, ignore_eos=True)
    with AsyncVLLM.from_pretrained(folder, **options) as engine:
        change_every_parameter(model, seed=1, size=0.3)
        sender = make_sender(VLLMWeightSyncScheme(), model.to(device), engine)
        sender.update_weights()
        sender.shutdown()
        completions = engine.generate_batch(prompts, sampling)
    new, old = (
        float(differences_of(one.cpu(), prompts, completions).abs().max()) for one in (model, eager_model(folder))
    )
    return f"{new:.0e}" if new < 0.05 and old > 5 * new else f"{new:.2g}, and {old:.2g} from the weights before"


def wrapper_types() -> dict[str, str]:
    """The class of each type with images, by its name in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def write_table(rows: list[dict[str, str]]) -> None:
    """Replace the table of the page."""
    import transformers
    import vllm

    counts = {name: sum(is_shown(row[name]) for row in rows) for name in COLUMNS}
    lines = [
        f"vLLM {vllm.__version__}, transformers {transformers.__version__}, {len(rows)} types of both: "
        f"**{counts['shards']} shard**, **{counts['engine']} engines take every weight** ({counts['nats']} of them ran "
        f"beside the trainer), **{counts['saved']} load again after saving**, "
        f"**{counts['lora']} are bases of adapters**.",
        "",
        "| type | class | shards | engine takes its weights | nats after an update | saved | adapters |",
        "|---|---|---|---|---|---|---|",
        *(f"| `{row['type']}` | `{row['class']}` | {' | '.join(row[name] for name in COLUMNS)} |" for row in rows),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def main() -> None:
    """Examine the types that are given, or all, and write their rows into the page."""
    import sys

    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.utils
    import vllm.model_executor.models.registry  # noqa: F401
    from vllm.model_executor.models.registry import ModelRegistry

    import llmrl.runs.exports
    import llmrl.trainer  # noqa: F401

    torch.set_num_threads(1)
    kinds = {**causal_types(), **wrapper_types()}
    served = set(ModelRegistry.get_supported_archs())
    rows = page_rows() if sys.argv[1:] else {}
    for model_type in sys.argv[1:] or kinds:
        if _OFFICIAL_CLASSES.get(kinds[model_type], kinds[model_type]) in served:
            half = examine_type(model_type, kinds[model_type])
            rows[model_type] = {"type": model_type, "class": kinds[model_type], **dataclasses.asdict(half)}
            print(json.dumps(rows[model_type]), flush=True)
            write_table([rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    main()
