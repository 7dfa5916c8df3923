"""The engine's half of a type of model: whether vLLM's class takes every weight that the trainer sends.

The class is made on this machine without an engine, and asked to load what is sent. That shows names, shapes, and
weights that are missing or left over. Then an engine is started and given changed weights, and the
log-probs of its tokens are compared with the trainer's; where its kernels need a GPU, this is left to `tools/gpu`.

`python test/helpers/engine_halves.py` examines every causal type that vLLM serves, and every type with images, and
writes a table of `docs/models.md`; with names of types it writes their rows. `--engines` starts engines alone, in
some 10 s each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import signal
import tempfile
from pathlib import Path
from unittest import mock

import torch
from causal_types import PAGE, causal_types
from engine_checkpoints import OFFICIAL_CLASSES, write_checkpoint
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from warm_processes import ENGINE_MODULES, WarmServer, forking
from weight_sync_tools import change_every_parameter, differences_of, make_sender

from llmrl._utils.model_parts import text_config
from llmrl.engines import SamplingConfig

BEGIN = "<!-- what engines take -->\n\n"
END = "\n<!-- end -->"
# vLLM wants what these tiny configurations lack: sizes of encoders, processors of images.
NO_TINY_FORM = {
    "blip-2", "hunyuan_vl", "inkling_mm_model", "minimax_m3_vl", "muse_glimmer", "qianfan_ocr", "shieldgemma2",
    "step3p7",
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


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
    return cell in ("yes", "merged", "attention alone", "attention alone, merged") or bool(re.match(r"\de[+-]", cell))


def is_started(cell: str) -> bool:
    """Whether an engine's log-probs were compared, and agree or not."""
    return is_shown(cell) or "from the weights before" in cell


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
    with mock.patch("llmrl.engines.vllm.start.check_model"), classes_read_here():
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


def said(error: BaseException) -> str:
    """The beginning of an error."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:160]


def outcome(question, *arguments) -> str:
    """`yes`, or why not."""
    try:
        return question(*arguments) or "yes"
    except Exception as error:
        return said(error)


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
    from llmrl.runs.exports import write_model
    from llmrl.runs.model_files import ExportedModel

    whole = kind.from_pretrained(folder / "whole", dtype=torch.float32).state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    (folder / "tokenizer").mkdir()
    exported = ExportedModel(model)
    write_model(exported, folder / "saved", folder / "tokenizer", "", "1GB", str(folder / "whole"))
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
    """The largest difference of an engine's log-probs from the model's, after two updates of every parameter."""
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
        sender = make_sender(VLLMWeightSyncScheme(), model.to(device), engine)
        for seed in (1, 2):
            change_every_parameter(model, seed=seed, size=0.2)
            sender.update_weights()
        sender.shutdown()
        completions = engine.generate_batch(prompts, sampling)
    new, old, own = (
        differences_of(one.cpu(), prompts, completions).abs()
        for one in (model, eager_model(folder), copy.deepcopy(model).to(getattr(torch, dtype)))
    )
    # Rounding may choose other experts of single tokens, and is compared on average.
    is_same = new.max() < 1e-2 if dtype == "float32" else new.mean() < 3 * own.mean()
    rounded = "" if dtype == "float32" else f" in {dtype}"
    if is_same and old.max() > 5 * new.max():
        return f"{new.max():.0e}{rounded}"
    return f"{new.max():.2g}, and {old.max():.2g} from the weights before{rounded}"


def wrapper_types() -> dict[str, str]:
    """The class of each type with images, by its name in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def write_table(rows: list[dict[str, str]]) -> None:
    """Replace the table of the page."""
    import transformers
    import vllm

    counts = {name: sum(is_shown(row[name]) for row in rows) for name in COLUMNS}
    differ = sum(is_started(row["nats"]) for row in rows) - counts["nats"]
    lines = [
        f"vLLM {vllm.__version__}, transformers {transformers.__version__}, {len(rows)} types of both: "
        f"**{counts['shards']} shard**, **{counts['engine']} engines take every weight**, **{counts['nats']} engines "
        f"agree with the trainer after updates** ({differ} differ, {len(rows) - counts['nats'] - differ} do not run on "
        f"this CPU), **{counts['saved']} load again after saving**, **{counts['lora']} are bases of adapters**.",
        "",
        "| type | class | shards | engine takes its weights | nats after an update | saved | adapters |",
        "|---|---|---|---|---|---|---|",
        *(f"| `{row['type']}` | `{row['class']}` | {' | '.join(row[name] for name in COLUMNS)} |" for row in rows),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def examine_engine(model_type: str, class_name: str) -> str:
    """Make a random checkpoint of a type, and compare its engine."""
    with tempfile.TemporaryDirectory() as name:
        whole, log = Path(name, "whole"), Path(name, "log")
        found = in_child(outcome, write_checkpoint, model_type, class_name, whole, log=log)
        return in_child(run_engine, whole, log=log) if whole.exists() else f"refused: {found}"


def main() -> None:
    """Examine the types that are given, or all, and write their rows into the page; a row of JSON is printed of each.

    With `--engines` engines alone are started and compared, and the other columns stay as they are.
    """
    import sys

    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.utils
    import vllm.model_executor.models.registry  # noqa: F401
    from vllm.model_executor.models.registry import ModelRegistry

    import llmrl.runs.exports
    import llmrl.trainer  # noqa: F401

    for module in ENGINE_MODULES:
        importlib.import_module(module)
    torch.set_num_threads(1)
    kinds = {**causal_types(), **wrapper_types()}
    served = set(ModelRegistry.get_supported_archs())
    given = [name for name in sys.argv[1:] if name != "--engines"]
    rows = page_rows() if len(sys.argv) > 1 else {}
    for model_type in given or kinds.keys() - NO_TINY_FORM:
        class_name = kinds[model_type]
        if OFFICIAL_CLASSES.get(class_name, class_name) not in served:
            continue
        if "--engines" in sys.argv and model_type in rows:
            rows[model_type]["nats"] = examine_engine(model_type, class_name)
        else:
            half = examine_type(model_type, class_name)
            if not half.shards:  # no tiny form of it was made
                print(model_type, half.engine, flush=True)
                continue
            rows[model_type] = {"type": model_type, "class": class_name, **dataclasses.asdict(half)}
        print(json.dumps(rows[model_type]), flush=True)
        write_table([rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    main()
