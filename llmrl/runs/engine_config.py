"""What a training run can be told of its engines, of how weights reach them, and of the cluster that they are on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    PauseMode = Literal["keep", "wait", "abort"]
    Quantization = Literal["int8"]
    SentLoRA = Literal["merged", "adapter"]
    Transport = Literal["direct", "ipc", "files"]
else:  # OmegaConf knows no Literal: it checks that they are strings, and we which ones
    PauseMode = Quantization = SentLoRA = Transport = str


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of the choices.

    Raises:
        ValueError: naming the entry and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """The engine that generates, or several."""

    num_replicas: int | None = None
    """Engines with the same weights; null is one, in this process's care."""
    tensor_parallel_size: int = 1
    """GPUs that one engine is sharded over."""
    max_num_seqs: int | None = None
    """Requests decoded together; null is what `AsyncVLLM` chooses."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory; null is vLLM's default."""
    enforce_eager: bool | None = None
    """No compilation; null is true on CPU, where it costs more than it saves in minutes."""
    cpu_threads: int | None = None
    """Of an engine on CPU; null is all cores."""
    quantization: Quantization | None = None
    """`int8` rounds the linear layers of an engine on CPU; `train.importance_cap` corrects for it."""
    sleep_while_training: bool | None = None
    """Give the trainer all of a GPU that the two share (`sync.transport=ipc`); null: where they take turns."""
    use_ray: bool = False
    """Start engines in Ray actors."""
    ray_options: dict[str, Any] = field(default_factory=dict)
    """Of each engine's actor, by Ray's names: `num_cpus`, `num_gpus`, `resources`."""

    def __post_init__(self) -> None:
        for name in ("num_replicas", "tensor_parallel_size", "max_num_seqs", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"engine.{name} must be at least 1, got {value}.")
        if self.quantization is not None:
            check_choice("engine.quantization", self.quantization, ("int8",))
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"engine.gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.")


@dataclass(slots=True, kw_only=True)
class SyncConfig:
    """How new weights reach the engines."""

    transport: Transport = "direct"
    """`direct`: shared memory on CPU, NCCL on GPU. `ipc`: one GPU for both. `files`: a double buffer."""
    folder: str | None = None
    """Of `files`; null is `weights` in the run's folder."""
    pause_mode: PauseMode = "keep"
    """Requests in flight go on with the new weights (`keep`), are waited for (`wait`) or end (`abort`)."""
    reset_running_requests: bool = True
    """Read kept requests again by the new weights, so that no token is computed from blocks of old ones."""
    anchor_every: int = 1
    """Through files or gloo all weights are sent at every so many updates, and in between what has changed."""
    lora: SentLoRA = "merged"
    """Adapters are added to the weights that are sent, or go alone (`adapter`): requests then end on their own."""
    max_adapters: int = 4
    """Of `lora=adapter`: versions that may have requests in flight, or an update waits for the end of one."""

    def __post_init__(self) -> None:
        check_choice("sync.transport", self.transport, ("direct", "ipc", "files"))
        check_choice("sync.pause_mode", self.pause_mode, ("keep", "wait", "abort"))
        check_choice("sync.lora", self.lora, ("merged", "adapter"))
        if self.lora == "adapter" and self.transport != "direct":
            raise ValueError(f"sync.lora=adapter needs sync.transport=direct, got {self.transport}.")
        if self.anchor_every < 1:
            raise ValueError(f"sync.anchor_every must be at least 1, got {self.anchor_every}.")
        if self.anchor_every > 1 and self.transport == "ipc":
            raise ValueError(f"sync.anchor_every={self.anchor_every} needs sync.transport=direct or files, got ipc.")
        if self.anchor_every > 1 and self.lora == "adapter":
            raise ValueError(
                f"sync.anchor_every={self.anchor_every} is of all weights, and sync.lora=adapter sends few."
            )
        if self.max_adapters < 2:
            raise ValueError(f"sync.max_adapters must be at least 2, got {self.max_adapters}: one beside another.")


@dataclass(slots=True, kw_only=True)
class RayConfig:
    """The Ray cluster, where engines or collectors are on one."""

    address: str | None = None
    """Of a cluster that exists (`auto`: this machine's); null starts one on this machine."""
