"""The configuration of the engines, of how weights reach them, and of the cluster that they are on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from llmrl.config.entries import NAMED, Section, above, at_least, one_of

if TYPE_CHECKING:
    PauseMode = Literal["keep", "wait", "abort"]
    Quantization = Literal["int8"]
    SentLoRA = Literal["merged", "adapter"]
    Transport = Literal["direct", "ipc", "files"]
else:  # OmegaConf does not support Literal: it checks that they are strings, and `one_of` which ones
    PauseMode = Quantization = SentLoRA = Transport = str


@dataclass(slots=True, kw_only=True)
class EngineConfig(Section):
    """The engine that generates, or several."""

    section: ClassVar[str] = "engine"
    num_replicas: int | None = field(default=None, metadata=at_least(1))
    """Engines with the same weights; null is one, in this process's care."""
    tensor_parallel_size: int = field(default=1, metadata=at_least(1))
    """GPUs that one engine is sharded over."""
    max_num_seqs: int | None = field(default=None, metadata=at_least(1))
    """Requests decoded together; null is what `AsyncVLLM` chooses."""
    gpu_memory_utilization: float | None = field(default=None, metadata=above(0, at_most=1))
    """Share of a GPU's memory; null is vLLM's default."""
    enforce_eager: bool | None = None
    """No compilation; null is true on CPU, where it costs more than it saves in minutes."""
    cpu_threads: int | None = field(default=None, metadata=at_least(1))
    """Threads of an engine on CPU; null is all cores."""
    quantization: Quantization | None = field(default=None, metadata=one_of("int8"))
    """`int8` rounds the linear layers of an engine on CPU; `train.importance_cap` corrects for it."""
    sleep_while_training: bool | None = None
    """Give the trainer all of a GPU that the two share (`sync.transport=ipc`); null: where they take turns."""
    use_ray: bool = False
    """Start engines in Ray actors."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Options of each engine's actor, by Ray's names: `num_cpus`, `num_gpus`, `resources`."""


@dataclass(slots=True, kw_only=True)
class SyncConfig(Section):
    """How new weights reach the engines."""

    section: ClassVar[str] = "sync"
    transport: Transport = field(default="direct", metadata=one_of("direct", "ipc", "files"))
    """`direct`: shared memory on CPU, NCCL on GPU. `ipc`: one GPU for both. `files`: a double buffer."""
    folder: str | None = field(default=None, metadata=NAMED)
    """Folder of the transport `files`; null is `weights` in the run's folder."""
    pause_mode: PauseMode = field(default="keep", metadata=one_of("keep", "wait", "abort"))
    """Requests in flight go on with the new weights (`keep`), are waited for (`wait`) or end (`abort`)."""
    reset_running_requests: bool = True
    """Read kept requests again by the new weights, so that no token is computed from blocks of old ones."""
    anchor_every: int = field(default=1, metadata=at_least(1))
    """Through files or gloo all weights are sent at every so many updates, and in between what has changed."""
    lora: SentLoRA = field(default="merged", metadata=one_of("merged", "adapter"))
    """Adapters are added to the weights that are sent, or go alone (`adapter`): requests then end on their own."""
    max_adapters: int = field(default=4, metadata=at_least(2))
    """Versions that may have requests in flight with `lora=adapter`; an update waits until there is room."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.lora == "adapter" and self.transport != "direct":
            raise ValueError(f"sync.lora=adapter needs sync.transport=direct, got {self.transport}.")
        if self.anchor_every > 1 and self.transport == "ipc":
            raise ValueError(f"sync.anchor_every={self.anchor_every} needs sync.transport=direct or files, got ipc.")
        if self.anchor_every > 1 and self.lora == "adapter":
            raise ValueError(
                f"sync.anchor_every={self.anchor_every} is of all weights, and sync.lora=adapter sends few."
            )


@dataclass(slots=True, kw_only=True)
class RayConfig(Section):
    """The Ray cluster, where engines or collectors are on one."""

    section: ClassVar[str] = "ray"
    address: str | None = field(default=None, metadata=NAMED)
    """Address of a cluster that exists (`auto`: this machine's); null starts one on this machine."""

    @property
    def init_config(self) -> dict[str, object]:
        """Arguments of `ray.init`: the cluster at `address`, or a new one here, even where one runs."""
        if self.address is None:
            return {"address": "local", "include_dashboard": False}
        return {"address": self.address}
