"""Serves a resource server of the package nemo-gym, which needs Python 3.12, and prints its address.

    PYTHON nemo_gym_server.py MODULE:CLASS

`PYTHON` has nemo-gym; the module is one of its folder `resources_servers`.
"""

from __future__ import annotations

import importlib
import socket
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf


def main() -> None:
    """Serve until the process is ended."""
    module, _, name = sys.argv[1].partition(":")
    server_class = getattr(importlib.import_module(module), name)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config_class = server_class.model_fields["config"].annotation
        head = BaseServerConfig(host="127.0.0.1", port=port)
        server = server_class(
            config=config_class(name="trial", host="127.0.0.1", port=port, entrypoint="app.py"),
            server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
        )
        app = server.setup_webserver()
        print(f"http://127.0.0.1:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
