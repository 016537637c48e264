"""The app as Flower's own programs run it: flwr run, and a process for each message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_processes import Machines, check_equal

from bespoke.flower import children, keys
from bespoke.flower.server import APP

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
BIN = Path(sys.executable).parent


def test_flwr_run_takes_the_app(tmp_path):
    with Machines(tmp_path, rounds=1) as machines:
        home, files = tmp_path / "flwr", machines.certificates
        home.mkdir()
        settings = f'[superlink.tls]\naddress = "{machines.address}"\nroot-certificates = "{files / keys.CA}"\n'
        (home / "config.toml").write_text(settings)
        environment = os.environ | {"FLWR_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

        def start(log, program, *words):
            with (tmp_path / log).open("wb") as sink:
                command = [str(BIN / program), *map(str, words)]
                options = {"stdout": sink, "stderr": sink, "env": environment, "start_new_session": True}
                machines.processes.append(subprocess.Popen(command, **options))

        def flwr(*words):
            command = [str(BIN / "flwr"), *map(str, words)]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

        host, port = machines.address.split(":")
        tls = ("--ssl-ca-certfile", files / keys.CA, "--ssl-certfile", files / keys.CERTIFICATE)
        tls += ("--ssl-keyfile", files / keys.KEY, "--enable-supernode-auth", "--host", host, "--port", port)
        start("superlink.txt", "flower-superlink", *tls, "--disable-runtime-dependency-installation")
        machines.until(lambda: "Uvicorn running" in machines.text("superlink.txt"), "the SuperLink")
        for client, own in enumerate(machines.homes):
            assert flwr("supernode", "register", own / "node.key.pub", "tls").returncode == 0
            data = tmp_path / "data" / f"{client}.npz"
            config = f'experiment="{machines.experiment}" data="{data}" home="{own}"'
            safety = ("--root-certificates", files / keys.CA, "--auth-supernode-private-key", own / "node.key")
            more = ("--host", "127.0.0.1", "--port", children.free_port(), "--node-config", config)
            start(f"node{client}.txt", "flower-supernode", "--superlink", machines.address, *safety, *more)
        given = f'experiment="{machines.experiment}" out="{machines.out / "run"}"'
        begun = flwr("run", APP, "tls", "--run-config", given)
        assert begun.returncode == 0, begun.stdout + begun.stderr

        def status():
            text = flwr("list", "tls", "--format", "json").stdout
            return json.loads(text[text.index("{") :])["runs"][0]["status"]

        machines.until(lambda: status().startswith("finished"), "the end of the run")
        assert status() == "finished:completed", machines.text("superlink.txt")
    check_equal(machines, tmp_path / "loop")
