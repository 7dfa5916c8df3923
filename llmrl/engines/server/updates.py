"""The part of `ServerEngine` that updates weights, over vLLM's routes for RL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llmrl.engines.base import EngineError, PauseMode, TransferInfo
from llmrl.engines.server.messages import entry_of
from llmrl.engines.vllm.arguments import LLMRL_BACKEND, NCCL_BACKEND
from llmrl.engines.vllm.private import RELOAD_METHOD

if TYPE_CHECKING:
    import torch

FILES_BACKEND = "files"
"""Backend of a server started without one: vLLM itself reads a folder."""
WAYS = {
    LLMRL_BACKEND: "taken through shared memory, gloo or files",
    NCCL_BACKEND: "taken by NCCL",
    "nccl": "taken by NCCL",
    "ipc": "taken by CUDA IPC",
    FILES_BACKEND: "taken from files",
}
"""Descriptions of the server's weight-transfer backends."""
HOW_TO_SERVE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs, and "
    f'--weight-transfer-config \'{{"backend": "{LLMRL_BACKEND}"}}\' if llmrl is installed on the server'
)
"""Command that starts a server that takes weights."""
GENERATE_PATH = "/inference/v1/generate"
"""Route for requests of token ids, which returns token ids and their versions."""
ABORT_PATH = "/inference/v1/abort_requests"
ABORT_PREFIX = "generate-tokens-"
"""Prefix of request ids on the server."""
_PROGRESS = "vllm:generation_tokens_total"
_UNFINISHED = "already active"
"""Part of vLLM's error message if an earlier update is unfinished."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server that weight updates depend on."""

    dtype: str
    """dtype of the weights, as a name of torch."""
    quantization: str | None
    backend: str
    """Weight-transfer backend."""
    is_cpu: bool
    has_processed_log_probs: bool
    """Whether the server's log-probs are those of the sampled distribution."""

    @classmethod
    def read(cls, info: object) -> ServerInfo:
        """Read vLLM's `/server_info`. Raises ValueError if it is malformed.

        Example:
            >>> model, device = {"dtype": "torch.float32"}, {"device": "cpu", "device_type": "cpu"}
            >>> ServerInfo.read({"vllm_config": {"model_config": model, "device_config": device}})
            ServerInfo(dtype='float32', quantization=None, backend='files', is_cpu=True, has_processed_log_probs=False)
        """
        try:
            config = info["vllm_config"]  # type: ignore[index]
            model = config["model_config"]
            device = config["device_config"]
            transfer = config.get("weight_transfer_config") or {}
            quantization = model.get("quantization")
            return cls(
                dtype=str(model["dtype"]).removeprefix("torch."),
                quantization=None if quantization is None else str(quantization),
                backend=str(transfer.get("backend") or FILES_BACKEND),
                is_cpu="cpu" in (device.get("device"), device.get("device_type")),
                has_processed_log_probs=model.get("logprobs_mode") == "processed_logprobs",
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its /server_info is not vLLM's: {str(info)[:200]}") from error


class ServerUpdates(ABC):
    """The weight updates of one server.

    The server stores the version of its weights as a label, because it outlives its trainer and may be restarted. If
    the label differs from the expected version, the weights are lost, and the server is not used
    until the next update. An unfinished update of another trainer is ended first.
    """

    quantization: str | None = None
    """Quantisation of the engine's weights, or None."""
    num_workers: int = 1
    """Number of worker processes that receive weights."""
    lacks_weights: bool = False
    """Whether the server lost its weights, or an update was left unfinished, until the next update."""
    num_restarts: int = 0
    """Number of times that the server was found without its weights."""
    info: ServerInfo | None = None
    """Properties of the server; None without `weight_sync`."""
    _version: int = 0
    _first_version: int = 0
    _is_paused: bool = False
    _is_left: bool = False
    """Whether a control call has failed, so that an update may be unfinished, since the last `_take_back`."""
    _is_loading: bool = False
    """Whether the weights may be in the middle of a change."""
    _folder: str | None = None
    _base_url: str

    @abstractmethod
    def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, takes_time: bool = False
    ) -> object:
        """Call the server from any thread and return its JSON; `takes_time` applies the time limit of requests."""

    @property
    def policy_version(self) -> int:
        """Version of the server's weights."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version of the server's weights, and their label if the server takes weights."""
        if self.info is not None and version != self._version:
            self._set_label(version)
        self._version = version
        self.lacks_weights = False

    @property
    def model_dtype(self) -> torch.dtype:
        """dtype of the engine's weights. Raises AttributeError without `weight_sync`."""
        if self.info is None:
            raise AttributeError(f"{self._base_url} was opened without weight_sync.")
        import torch

        return getattr(torch, self.info.dtype)

    @property
    def weight_transfer_backend(self) -> str | None:
        """The server's weight-transfer backend; None without `weight_sync`."""
        return None if self.info is None else self.info.backend.replace(NCCL_BACKEND, "nccl")

    def server_version(self) -> str | None:
        """Return vLLM's version; None if the server is another program."""
        try:
            answer = self._call("GET", "/version")
        except EngineError:
            return None
        version = entry_of(answer, "version")
        return None if version is None else str(version)

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Stop stepping; `clear_cache` also drops the key-value blocks, including those of kept requests."""
        self._require_info()
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        self._call("POST", path, takes_time=mode == "wait")
        self._is_paused = True
        if clear_cache:
            self.reset_prefix_cache()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._call("POST", "/resume")
        self._is_paused = False

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Drop cached key-value blocks; without `reset_running_requests`, keep those in use and return False."""
        query = f"reset_running_requests={str(reset_running_requests).lower()}"
        return entry_of(self._call("POST", f"/reset_prefix_cache?{query}"), "success") is True

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Open the server's side of a weight transfer."""
        backend = self._require_info().backend
        if backend == FILES_BACKEND:
            return
        if backend != NCCL_BACKEND:  # vLLM's own backends have no deadline
            init_info = {name: value for name, value in init_info.items() if name != "timeout_seconds"}
        self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info}, takes_time=True)

    def start_weight_update(self) -> None:
        """Prepare the paused server for new weights."""
        self._folder = None
        if self._require_info().backend == FILES_BACKEND:
            return
        try:
            self._call("POST", "/start_weight_update")
        except EngineError as error:
            if _UNFINISHED not in str(error):
                raise
            if self._require_info().backend == LLMRL_BACKEND:
                self.update_weights({"is_discarded": True})
            self._call("POST", "/finish_weight_update", {})
            self._call("POST", "/start_weight_update")

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Receive weights; for files, only store the folder, which vLLM loads at the end."""
        backend = self._require_info().backend
        if backend != FILES_BACKEND:
            self._is_loading |= backend != LLMRL_BACKEND  # vLLM's own backends load weights at once
            self._call("POST", "/update_weights", {"update_info": update_info}, takes_time=True)
        elif isinstance(update_info, dict) and isinstance(pointer := update_info.get("pointer"), dict):
            self._folder = str(PurePosixPath(str(update_info["folder"]), str(pointer["slot"])))

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Activate the weights and return their version, by default the next; the current one cancels an update."""
        version = self._version + 1 if weight_version is None else int(weight_version)
        is_to_files = self._require_info().backend == FILES_BACKEND
        if version == self._version:  # cancelled; no label is set, because the server may have lost its weights
            if not is_to_files:
                self._call("POST", "/finish_weight_update", {}, takes_time=True)
            return version
        self._is_loading = True
        if not is_to_files:
            self._call("POST", "/finish_weight_update", {"weight_version": str(version)}, takes_time=True)
        else:
            if self._folder is not None:
                body = {"method": RELOAD_METHOD, "kwargs": {"weights_path": self._folder}}
                self._call("POST", "/collective_rpc", body, takes_time=True)
            self._set_label(version)
        self.lacks_weights = self._is_loading = False
        self._version = version
        return version

    def _set_label(self, version: int) -> None:
        self._call("POST", "/update_weight_version", {"new_version": str(version)})

    def _require_info(self) -> ServerInfo:
        if self.info is None:
            raise EngineError(
                f"{self._base_url} was opened without weight updates; use ServerEngine(url, weight_sync=True)."
            )
        return self.info

    def _open_updates(self) -> ServerInfo:
        """Read the server's properties and version. Raises EngineError if it lacks options."""
        try:
            self.info = ServerInfo.read(self._call("GET", "/server_info?config_format=json"))
            world = self._call("GET", "/get_world_size")
            self.num_workers = int(world["world_size"])  # type: ignore[index]
            self.quantization = self.info.quantization
            self._require_generate()
            self._require_loadable()
        except (EngineError, ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{self._base_url} takes no weights: {error}. Start it with {HOW_TO_SERVE}; or create the "
                "ServerEngine without weight_sync."
            ) from error
        label = label_of(self._call("GET", "/weight_info"))
        if label is None:
            self._set_label(self._version)
        else:
            self._version = label
        self.lacks_weights = entry_of(self._call("GET", "/is_paused"), "is_paused") is True
        return self.info

    def _take_back(self) -> None:
        """Synchronise with a server that answers again; it lacks weights if it was restarted or was loading."""
        is_left = self._is_left
        try:
            label = label_of(self._call("GET", "/weight_info"))
            if label is None and self._version == self._first_version and not self.lacks_weights:
                self._set_label(self._version)
            elif label != self._version or (is_left and self._is_loading):
                self._lose_weights()
            if is_left and not self.lacks_weights:
                self.start_weight_update()  # ends the unfinished update
                if self._require_info().backend != FILES_BACKEND:
                    self._call("POST", "/finish_weight_update", {})
                self.resume()
        except EngineError:
            self._is_left = is_left  # failed calls here do not count: an update in progress may continue
            raise
        self._is_left = self._is_loading = False

    def _lose_weights(self) -> None:
        """Record that the server has its initial weights, or weights of an unknown version."""
        self.num_restarts += 1
        self._version = self._first_version
        self.lacks_weights = True
        self._is_paused = False

    def _require_generate(self) -> None:
        """Raise EngineError if the server lacks the route for token ids, the only one that reports versions."""
        try:
            self._call("POST", GENERATE_PATH, {})
        except EngineError as error:
            if "(403)" in str(error) or "(404)" in str(error):
                raise

    def _require_loadable(self) -> None:
        """Raise ValueError for a tied head on a CPU without a backend: vLLM would keep its packed copy."""
        info = self._require_info()
        if info.backend != FILES_BACKEND or not info.is_cpu:
            return
        names = entry_of(self._call("POST", "/weight_checker", {"action": "checksum"}), "checksums") or ()
        if not any(name.endswith("lm_head.weight") for name in names):
            raise ValueError(
                "its model ties its head to its embedding, and vLLM without llmrl's backend keeps the old head on a "
                "CPU after an update"
            )


def label_of(weight_info: object) -> int | None:
    """Return the version in a server's `/weight_info`; None if its weights have no label.

    Example:
        >>> label_of({"weight_version": "3"}), label_of({"weight_version": "default"})
        (3, None)
    """
    label = str(entry_of(weight_info, "weight_version"))
    return int(label) if label.isdecimal() else None


def tokens_so_far(metrics: str) -> int | None:
    """Return the number of tokens sampled since the server started, from its `/metrics`; None if not reported.

    Example:
        >>> tokens_so_far('vllm:generation_tokens_total{engine="0"} 12.0')
        12
    """
    counts = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith(_PROGRESS)]
    return int(sum(map(float, counts))) if counts else None
