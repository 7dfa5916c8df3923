"""Configuration of the engines, of the transport of weights, and of the Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmrl.config.entries import NAMED, Section, above, at_least, one_of
from llmrl.engines.vllm.passed_through import check_passed_through

if TYPE_CHECKING:
    PauseMode = Literal["keep", "wait", "abort"]
    Quantization = Literal["int8"]
    Speculative = Literal["ngram"]
    SentLoRA = Literal["merged", "adapter"]
    Transport = Literal["direct", "ipc", "files"]
else:  # OmegaConf does not support Literal: it checks for strings, and `one_of` checks their values
    PauseMode = Quantization = Speculative = SentLoRA = Transport = str


@dataclass(slots=True, kw_only=True)
class EngineConfig(Section):
    """The engines that generate."""

    section: ClassVar[str] = "engine"
    num_replicas: int | None = field(default=None, metadata=at_least(1))
    """Number of engines with the same weights; null starts one that this process manages."""
    tensor_parallel_size: int = field(default=1, metadata=at_least(1))
    """Number of GPUs over which one engine is sharded."""
    max_num_seqs: int | None = field(default=None, metadata=at_least(1))
    """Maximum number of requests decoded together; null is the default of `AsyncVLLM`."""
    gpu_memory_utilization: float | None = field(default=None, metadata=above(0, at_most=1))
    """Share of a GPU's memory; null is vLLM's default."""
    enforce_eager: bool | None = None
    """Whether to disable compilation; null is true on CPU, where compilation does not pay off in short runs."""
    cpu_threads: int | None = field(default=None, metadata=at_least(1))
    """Number of threads of an engine on CPU; null is all cores."""
    quantization: Quantization | None = field(default=None, metadata=one_of("int8"))
    """`int8` quantises the linear layers of an engine on CPU; `train.importance_cap` corrects for it."""
    speculative: Speculative | None = field(default=None, metadata=one_of("ngram"))
    """`ngram` drafts the tokens that followed the same tokens earlier in the request, and keeps those that the model
    confirms. Drafting is faster if answers repeat parts of the prompt, and does not change the distribution."""
    sleep_while_training: bool | None = None
    """Whether the engine frees the memory of a GPU shared with the trainer (`sync.transport=ipc`) while the trainer
    trains; null is true if the two alternate."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vLLM by name (`engine_args` of `AsyncVLLM`)."""
    use_ray: bool = False
    """Whether to start engines in Ray actors."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Ray options of each engine's actor: `num_cpus`, `num_gpus`, `resources`."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        own = {spec.name for spec in fields(self)} & self.engine_args.keys()
        if own:
            raise ValueError(f"engine.engine_args may not hold {min(own)!r}: set engine.{min(own)}.")
        check_passed_through(self.engine_args)


@dataclass(slots=True, kw_only=True)
class SyncConfig(Section):
    """Transport of new weights to the engines."""

    section: ClassVar[str] = "sync"
    transport: Transport = field(default="direct", metadata=one_of("direct", "ipc", "files"))
    """`direct`: shared memory on CPU, NCCL on GPU. `ipc`: one GPU shared with the trainer. `files`: double-buffered
    files."""
    folder: str | None = field(default=None, metadata=NAMED)
    """Folder of the transport `files`; null is `weights` in the run's folder."""
    pause_mode: PauseMode = field(default="keep", metadata=one_of("keep", "wait", "abort"))
    """Whether requests in flight continue with the new weights (`keep`), are awaited (`wait`) or end (`abort`)."""
    reset_running_requests: bool = True
    """Whether kept requests are recomputed with the new weights, so that no token depends on an old key-value cache."""
    anchor_every: int = field(default=1, metadata=at_least(1))
    """Number of updates per full transfer through files or gloo; the updates in between send only changes."""
    lora: SentLoRA = field(default="merged", metadata=one_of("merged", "adapter"))
    """Whether LoRA adapters are merged into the weights (`merged`), or sent alone (`adapter`), so that each request
    finishes with the adapters that it started with."""
    max_adapters: int = field(default=4, metadata=at_least(2))
    """Maximum number of adapter versions in the engine (`lora=adapter`); an update waits until one has no requests."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.lora == "adapter" and self.transport != "direct":
            raise ValueError(f"sync.lora=adapter needs sync.transport=direct, got {self.transport}.")
        if self.anchor_every > 1 and self.transport == "ipc":
            raise ValueError(f"sync.anchor_every={self.anchor_every} needs sync.transport=direct or files, got ipc.")
        if self.anchor_every > 1 and self.lora == "adapter":
            raise ValueError(
                f"sync.anchor_every={self.anchor_every} is for full weights, and sync.lora=adapter sends adapters only."
                " Set sync.anchor_every=1."
            )


@dataclass(slots=True, kw_only=True)
class RayConfig(Section):
    """The Ray cluster on which engines or collectors run."""

    section: ClassVar[str] = "ray"
    address: str | None = field(default=None, metadata=NAMED)
    """Address of an existing cluster (`auto`: the cluster of this machine); null starts a cluster on this machine."""

    @property
    def init_config(self) -> dict[str, object]:
        """Arguments of `ray.init`: the cluster at `address`, or a new local cluster, even if another one is running."""
        if self.address is None:
            return {"address": "local", "include_dashboard": False}
        return {"address": self.address}
